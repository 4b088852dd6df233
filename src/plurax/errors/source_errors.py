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
    names = {"frame": what, "name": name}
    ways = {
        "texts": f"number the classes first: {NUMBERED[library].format(**names)}",
        "times": "make numbers of them first: the seconds since the first",
        "lists": "all rows need equally many values: pad them, or cut them to one length",
        "objects": "make numbers of them first, in a column for each",
    }
    return BatchError(
        f"{what}[{name!r}] has dtype {dtype}, which no device can hold; {ways[kind]}. Or leave the "
        f"column out: {LEFT_OUT[library].format(**names)}."
    )


def column_has_nulls(what: str, name: str, count: int, library: str) -> BatchError:
    ways = FILLED[library].format(frame=what, name=name)
    return BatchError(
        f"{what}[{name!r}] has no value in {count} rows (null, or NaN in pandas), and a loss would "
        f"not be finite; write {ways}."
    )


def column_twice(what: str, name: str) -> BatchError:
    return BatchError(f"{what} has two columns {name!r}; rename one of them, or leave it out.")


def data_file_unreadable(what: str, given: str, reason: str) -> BatchError:
    return BatchError(
        f"{what}={given!r} cannot be read: {reason}. Write the file anew, with numpy.save, "
        "numpy.savez, pyarrow.parquet.write_table or pyarrow.feather.write_feather."
    )


def examples_not_understood(what: str, reason: str) -> BatchError:
    return BatchError(
        f"{what}: its examples cannot be put together in a batch: {reason}. An example is an "
        "array, or a tuple or dict of arrays and numbers, each of the same shape in all examples."
    )
