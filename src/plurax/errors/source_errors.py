"""Data of other libraries, and files, that are no numbers or cannot be read."""

from plurax.errors.kinds import BatchError

NUMBERED = {
    "pandas": "{frame}[{name!r}].astype('category').cat.codes",
    "polars": "{frame}[{name!r}].cast(polars.Categorical).to_physical()",
    "Arrow": "{frame}[{name!r}].combine_chunks().dictionary_encode().indices",
    "Hugging Face": "{frame}.class_encode_column({name!r})",
    "a file": "polars.read_parquet(...)[{name!r}].cast(polars.Categorical).to_physical()",
}
"""How each library numbers the classes of a column."""

LEFT_OUT = {
    "pandas": "{frame}.drop(columns={name!r})",
    "polars": "{frame}.drop({name!r})",
    "Arrow": "{frame}.drop_columns({name!r})",
    "Hugging Face": "{frame}.remove_columns({name!r})",
    "a file": "polars.scan_parquet(...).drop({name!r}).sink_parquet(...), of any size",
}
"""How each library leaves a column out."""

FILLED = {
    "pandas": "{frame}.fillna({{{name!r}: 0}}), or {frame}.dropna()",
    "polars": "{frame}.fill_null(0), or {frame}.drop_nulls({name!r})",
    "Arrow": "pyarrow.compute.fill_null({frame}[{name!r}], 0), or {frame}.drop_null()",
    "Hugging Face": "{frame}.filter(lambda row: row[{name!r}] is not None)",
    "a file": "polars.scan_parquet(...).drop_nulls({name!r}).sink_parquet(...), of any size",
}
"""How each library fills the values that a column lacks, or leaves their rows out."""


def column_not_numbers(what: str, name: str, dtype: str, kind: str, library: str) -> BatchError:
    given = {"frame": what, "name": name}
    ways = {
        "texts": f"number the classes first: {NUMBERED[library].format(**given)}",
        "times": "make numbers of them first: the seconds since the first",
        "lists": "all rows need equally many values: pad them, or cut them to one length",
        "objects": "make numbers of them first, in a column for each",
    }
    return BatchError(
        f"{what}[{name!r}] has dtype {dtype}, which no device can hold; {ways[kind]}. Or leave the "
        f"column out: {LEFT_OUT[library].format(**given)}."
    )


def column_has_nulls(what: str, name: str, count: int, library: str) -> BatchError:
    ways = FILLED[library].format(frame=what, name=name)
    return BatchError(
        f"{what}[{name!r}] has no value in {count} rows (null, or NaN in pandas), and a loss would "
        f"not be finite; write {ways}."
    )


def column_twice(what: str, name: str) -> BatchError:
    return BatchError(f"{what} has two columns {name!r}; rename one of them, or leave it out.")


def data_is_lazy(what: str) -> BatchError:
    return BatchError(
        f"{what} is a LazyFrame, which has no rows yet; write {what}.collect(), or for more than "
        f"fits memory {what}.sink_parquet('data.parquet') and data='data.parquet'."
    )


def data_of_scalars(what: str, kind: str) -> BatchError:
    return BatchError(
        f"{what} is a {kind}, and a dict of data holds arrays with the examples in the leading "
        "dim; write np.asarray([...]), or close over a constant in the loss."
    )


def data_of_uneven_lists(what: str) -> BatchError:
    return BatchError(
        f"{what} is a list of lists of different lengths, and an array has one shape; pad them "
        "to one length, and weigh the padding by 0 in the loss."
    )


def data_of_other_values(what: str, value: object) -> BatchError:
    return BatchError(
        f"{what} is a list that holds {value!r}, and a device holds numbers. Number the classes "
        f"first: np.unique({what}, return_inverse=True)[1]; fill in what is missing."
    )


def data_is_a_name(what: str, given: object) -> BatchError:
    return BatchError(
        f"{what}={given!r} is no file that plurax reads: .npy, .npz, .parquet, .arrow, .feather "
        "(one, a pattern such as 'part-*.parquet', or a folder of them). Load other files: "
        "pandas.read_csv(...) for a table, grain or datasets for what fits no memory."
    )


def data_file_missing(what: str, given: str) -> BatchError:
    return BatchError(
        f"{what}={given!r}: there is no such file. A path is of this machine, from the current "
        "directory; other hosts' files (gs://, s3://) are read with grain or datasets."
    )


def data_file_unreadable(what: str, given: str, reason: str) -> BatchError:
    return BatchError(
        f"{what}={given!r} cannot be read: {reason}. Write the file anew, with numpy.save, "
        "numpy.savez, pyarrow.parquet.write_table or pyarrow.feather.write_feather."
    )


def data_files_differ(what: str, first: str, other: str) -> BatchError:
    return BatchError(
        f"{what}: the columns of {other} are not those of {first}. Files that are read as one need "
        "the same columns with the same dtypes."
    )


def data_is_many_splits(what: str, splits: str) -> BatchError:
    return BatchError(
        f"{what} holds several data sets ({splits}); choose one of them, such as {what}['train']."
    )


def examples_as_a_stream(what: str, kind: str) -> BatchError:
    return BatchError(
        f"{what} is a {kind}, which gives examples one by one; write "
        f"torch.utils.data.DataLoader({what}, batch_size=...)."
    )


def stream_without_batches(what: str, kind: str) -> BatchError:
    return BatchError(
        f"{what} is a {kind} of single examples, and training takes batches; write "
        f"{what}.batch(batch_size)."
    )


def examples_not_understood(what: str, reason: str) -> BatchError:
    return BatchError(
        f"{what}: its examples cannot be put together in a batch: {reason}. An example is an "
        "array, or a tuple or dict of arrays and numbers, each of the same shape in all examples."
    )


def data_without_end(what: str) -> BatchError:
    return BatchError(
        f"{what} repeats without end, and an epoch is one pass; leave .repeat() out, or write "
        f"{what}.take(batches)."
    )
