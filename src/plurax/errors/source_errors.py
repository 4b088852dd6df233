"""Data of other libraries, and files, that are no numbers or cannot be read."""

import dataclasses

from plurax.errors.kinds import BatchError


@dataclasses.dataclass(frozen=True)
class ColumnAdvice:
    """What to write in a library where a column is no numbers, each with `frame` and `name`.

    **Fields:** `numbered` numbers the classes of a column; `left_out` leaves it out; `filled` fills
    the values that it lacks, or leaves their rows out.
    """

    numbered: str
    left_out: str
    filled: str


def column_not_numbers(
    what: str, name: str, dtype: str, kind: str, advice: ColumnAdvice
) -> BatchError:
    names = {"frame": what, "name": name}
    ways = {
        "texts": f"number the classes first: {advice.numbered.format(**names)}",
        "times": "make numbers of them first: the seconds since the first",
        "lists": "all rows need equally many values: pad them, or cut them to one length",
        "objects": "make numbers of them first, in a column for each",
    }
    return BatchError(
        f"{what}[{name!r}] has dtype {dtype}, which no device can hold; {ways[kind]}. Or leave the "
        f"column out: {advice.left_out.format(**names)}."
    )


def column_has_nulls(what: str, name: str, count: int, advice: ColumnAdvice) -> BatchError:
    ways = advice.filled.format(frame=what, name=name)
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
