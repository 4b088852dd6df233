"""The forms in which data of other libraries are read, where they are not arrays in memory.

    Column    an array whose rows are read when they are asked for: `column[rows]`
    Source    anything that gives the batches of an epoch, from any batch on

A data set with columns in a file becomes a tree of `Column`s, and is then used as arrays are: kept
on the devices where it fits, read by members each in its own order, split over processes. Where
rows are computed, or come as a stream, it becomes a `Source`.
"""

import abc
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Int, PyTree

from plurax.resample import Everything, epoch_rows


@dataclasses.dataclass(frozen=True)
class Reading:
    """How a run reads its data.

    **Fields:** `batch_size`, of this process; `seed`; `shuffle`; `drop`, whether a smaller last
    batch is left out.
    """

    batch_size: int
    seed: int = 0
    shuffle: bool = False
    drop: bool = False

    def steps(self, count: int) -> int:
        """Return the number of batches in `count` examples."""
        return count // self.batch_size if self.drop else -(-count // self.batch_size)

    def order(self, count: int, epoch: int) -> Int[np.ndarray, "N"]:
        """Return the order of an epoch over `count` rows, as arrays in memory are read."""
        one = count <= self.batch_size
        return epoch_rows(
            Everything(), count, self.seed, 0, epoch, shuffle=self.shuffle, one_batch=one
        )


class Source(abc.ABC):
    """Data that are read batch by batch. The batches of an epoch are the same in every run.

    The one protocol of data that are no arrays and have no columns: what other libraries, files and
    iterables give implements it. Training reads it by `plurax.loop.data.StreamData`; prediction and
    evaluation ask it for batches directly.

    **Attributes:** `by_row`, whether plurax forms the batches, and so needs `batch_size`; `kind`,
    what messages call it.
    """

    by_row: bool = True
    kind: str = "data set"

    @abc.abstractmethod
    def example(self) -> PyTree:
        """Return a batch of at least one example, for its shapes."""

    @abc.abstractmethod
    def count(self) -> int | None:
        """Return the number of examples (`by_row`), else of batches; None where nobody knows."""

    @abc.abstractmethod
    def batches(self, how: Reading, epoch: int, start: int, saved: Any = None) -> Iterator[PyTree]:
        """Return an iterator of the batches of an epoch, from batch `start` on.

        **Arguments:** `saved`, the state that the iterator had there. One with `get_state` and
        `set_state`, as Grain's, is part of the position; of others (None) `epoch` and `start` say
        where they are.
        """


class Examples(Source):
    """Examples that are read by their index, each once an epoch, in the order of arrays.

    **Arguments:** `count`; `read(rows)`, which returns a batch of the examples `rows` (int64).
    """

    def __init__(self, count: int, read: Callable[[Int[np.ndarray, "N"]], PyTree]) -> None:
        self._count, self._read = count, read

    def example(self) -> PyTree:
        """Return a batch of the first example."""
        return self._read(np.arange(1))

    def count(self) -> int:
        """Return the number of examples."""
        return self._count

    def batches(self, how: Reading, epoch: int, start: int, saved: Any = None) -> Iterator[PyTree]:
        """Yield the batches of an epoch; those before `start` are not read."""
        order = how.order(self._count, epoch)
        for batch in range(start, how.steps(self._count)):
            yield self._read(order[batch * how.batch_size : (batch + 1) * how.batch_size])


class Table:
    """Columns in a file, read by rows.

    The columns of a batch are asked for one after another, so the last rows read are kept.

    **Arguments:** `read(rows, names)`, which returns some columns at some rows (indices, or a
    slice) as NumPy arrays.
    """

    def __init__(self, read: Callable[[Any, Sequence[str]], dict[str, np.ndarray]]) -> None:
        self.read = read
        self._last: tuple[Any, dict[str, np.ndarray]] | None = None

    def columns(self, first: dict[str, np.ndarray], count: int) -> "dict[str, Column]":
        """Return its columns, of `count` rows, with the shapes of `first` rows of each."""
        return {
            name: Column(self, name, list(first), (count, *array.shape[1:]), array.dtype)
            for name, array in first.items()
        }

    def rows(self, rows: Int[np.ndarray, "N"], names: Sequence[str]) -> dict[str, np.ndarray]:
        """Return all columns at some rows."""
        last = self._last
        if last is None or not np.array_equal(last[0], rows):
            self._last = last = (rows, self.read(rows, names))
        return last[1]


class Column:
    """An array `(N, ...)` of a table, whose rows are read when they are asked for."""

    def __init__(
        self, table: Table, name: str, names: list[str], shape: tuple[int, ...], dtype: np.dtype
    ) -> None:
        self._table, self._name, self._names = table, name, names
        self.shape, self.dtype, self.ndim = shape, dtype, len(shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Any) -> np.ndarray:
        if isinstance(rows, slice):
            return self._table.read(rows, [self._name])[self._name]
        return self._table.rows(np.asarray(rows), self._names)[self._name]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self[:], dtype)


def in_memory(data: PyTree) -> PyTree:
    """Return arrays with all rows of columns that are in a file."""
    return jax.tree.map(lambda leaf: np.asarray(leaf) if isinstance(leaf, Column) else leaf, data)
