"""Hugging Face `datasets`: a data set is a dict of its columns, read by rows from its Arrow files.

Columns of numbers are arrays: kept on the devices where they fit, else read batch by batch. Where
each example is computed (images are decoded, or a transform is set), examples are read anew in
every epoch. An `IterableDataset` is a stream: its order is its own, and an epoch is
`set_epoch(epoch)`.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from jaxtyping import PyTree

from plurax import errors
from plurax.sources import arrow
from plurax.sources.source import Examples, Reading, Source, Table

COLUMN_ADVICE = errors.ColumnAdvice(
    numbered="{frame}.class_encode_column({name!r})",
    left_out="{frame}.remove_columns({name!r})",
    filled="{frame}.filter(lambda row: row[{name!r}] is not None)",
)


def adapt(what: str, data: Any) -> Any:
    """Return the columns of a Dataset, or a `Source` of examples; other objects as they are.

    Raises `BatchError` for a column with other values than numbers, or without some, and for
    several data sets in one.
    """
    import datasets

    if not hasattr(datasets, "IterableDatasetDict"):  # a module of the user's with this name
        return data
    if isinstance(data, datasets.DatasetDict | datasets.IterableDatasetDict):
        raise errors.BatchError(
            f"{what} holds several data sets ({', '.join(map(str, data))}); choose one of them, "
            f"such as {what}['train']."
        )
    if isinstance(data, datasets.IterableDataset):
        return Stream(data)
    if not isinstance(data, datasets.Dataset):
        return data
    if not len(data):
        raise errors.batch_is_empty()
    names = data.format["columns"]
    kinds = [data.features[name] for name in names]
    if data.format["type"] == "custom":
        return Examples(len(data), lambda rows: _stacked(what, data[rows.tolist()]))
    if any(hasattr(kind, "decode_example") for kind in kinds):
        decoded = data.with_format("numpy", columns=names)
        return Examples(len(data), lambda rows: _stacked(what, decoded[rows.tolist()]))

    def read(rows: Any, wanted: Sequence[str]) -> dict[str, np.ndarray]:
        whole = list(wanted) == list(names)
        chosen = plain if whole else data.with_format("arrow", columns=list(wanted))
        return arrow.arrays(what, chosen[rows], COLUMN_ADVICE)

    plain = data.with_format("arrow", columns=names)
    return Table(read).columns(read(slice(0, 1), names), len(data))


class Stream(Source):
    """The examples of an `IterableDataset`, in its own order; a resumed run reads them again."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def example(self) -> PyTree:
        """Return a batch of the first example."""
        return next(self.batches(Reading(1), 0, 0), None)

    def count(self) -> None:
        """Return None: nobody knows how many examples a stream has."""

    def batches(self, how: Reading, epoch: int, start: int, saved: Any = None) -> Iterator[PyTree]:
        """Yield the batches of an epoch; those before `start` are read and dropped."""
        data = self._data.with_format("numpy")
        data.set_epoch(epoch)
        batches = data.iter(how.batch_size, drop_last_batch=how.drop)
        yield from (_stacked("data", batch) for batch in itertools.islice(batches, start, None))


def _stacked(what: str, columns: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return columns of examples as arrays. Raises `BatchError` where they have several shapes."""
    try:
        return {
            name: values if isinstance(values, np.ndarray) else np.stack(values)
            for name, values in columns.items()
        }
    except (ValueError, TypeError) as error:
        raise errors.examples_not_understood(what, str(error)) from error
