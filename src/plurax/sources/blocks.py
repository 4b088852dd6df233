"""Parquet and Arrow files: small ones become arrays, larger ones are read a window at a time.

Rows of a Parquet file cannot be read alone: a row group, of up to a million rows, is decoded as a
whole. So an epoch reads the row groups once, in a new order, a window of several at a time, and
shuffles the rows within a window. Example, 6 row groups of 100 rows, windows of 2, batches of 80:

    order of epoch 0     4 1 | 0 5 | 3 2         by (seed, epoch)
    window 0             rows of groups 4 and 1, shuffled: batches 0 and 1, and 40 rows of batch 2
    window 1             rows of groups 0 and 5, shuffled: 40 rows of batch 2, batches 3 and 4

Where an epoch begins in the middle, the windows before it are not read: their sizes are known.
Grain reads the next window while batches of one are taken. An Arrow file has record batches for row
groups. What fits `IN_MEMORY` bytes is read whole, and shuffled as arrays are; the order depends on
the files alone, not on the machine.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from jaxtyping import PyTree

from plurax import errors
from plurax.lazy import imported
from plurax.sources import arrow
from plurax.sources.source import Reading, Source

COLUMN_ADVICE = errors.ColumnAdvice(
    numbered="polars.read_parquet(...)[{name!r}].cast(polars.Categorical).to_physical()",
    left_out="polars.scan_parquet(...).drop({name!r}).sink_parquet(...), of any size",
    filled="polars.scan_parquet(...).drop_nulls({name!r}).sink_parquet(...), of any size",
)

IN_MEMORY = 2**30
"""The largest files, in bytes once decoded, that are read whole."""

WINDOW = 2**27
"""The bytes of a window, about: rows that are this near each other are mixed."""


class TableFile(Protocol):
    """A file of blocks: row groups, or record batches."""

    rows: list[int]
    """The rows of each block."""

    byte_count: int
    """Its bytes, once decoded."""

    def read(self, block: int) -> Any:
        """Return a block as an Arrow table."""


class ParquetTable:
    """The row groups of a Parquet file."""

    def __init__(self, path: Path) -> None:
        import pyarrow.parquet as pq

        self.path = path
        self._meta = meta = pq.read_metadata(path)
        groups = [meta.row_group(index) for index in range(meta.num_row_groups)]
        self.rows = [group.num_rows for group in groups]
        width = sum(_width(kind) for kind in meta.schema.to_arrow_schema().types)
        # What the file says is encoded: a column of one value takes next to nothing.
        encoded = sum(group.total_byte_size for group in groups)
        self.byte_count = max(encoded, width * meta.num_rows)

    def read(self, block: int) -> Any:
        """Return a row group."""
        import pyarrow.parquet as pq

        with pq.ParquetFile(self.path, metadata=self._meta) as file:
            return file.read_row_group(block)


def _width(kind: Any) -> int:
    """Return the bytes of a value of a type, 0 where values differ."""
    import pyarrow as pa

    if pa.types.is_fixed_size_list(kind):
        return kind.list_size * _width(kind.value_type)
    try:
        return -(-kind.bit_width // 8)
    except ValueError:
        return 0


class ArrowTable:
    """The record batches of an Arrow file; only their sizes come from a memory map.

    A file that something overwrites while a map of it is read ends the process (SIGBUS).
    """

    def __init__(self, path: Path) -> None:
        import pyarrow as pa

        self.path = path
        with pa.memory_map(str(path)) as file:
            reader = pa.ipc.open_file(file)
            count = reader.num_record_batches
            sizes = [reader.get_batch(index) for index in range(count)]
            self.rows = [batch.num_rows for batch in sizes]
            self.byte_count = sum(batch.nbytes for batch in sizes)

    def read(self, block: int) -> Any:
        """Return a record batch."""
        import pyarrow as pa

        with pa.OSFile(str(self.path)) as file:
            return pa.ipc.open_file(file).get_batch(block)


def open_tables(what: str, paths: Sequence[Path]) -> PyTree:
    """Return the data in files with the same columns: arrays, or a `Blocks`.

    Raises `MissingPackageError` without pyarrow or Grain, and `BatchError` for a column that does
    not hold numbers.
    """
    for package in ("grain", "pyarrow"):
        imported(package, "Reading Parquet and Arrow files", "pyarrow and grain", "parquet")
    kind = ParquetTable if paths[0].suffix == ".parquet" else ArrowTable
    files = [kind(path) for path in paths]
    found = Blocks(what, paths, files)
    return found.whole() if found.byte_count <= IN_MEMORY else found


@dataclasses.dataclass(frozen=True)
class Window:
    """Some rows of columns, in an order: `rows[start:stop]` is not taken yet."""

    columns: dict[str, np.ndarray]
    rows: np.ndarray | None

    def take(self, start: int, stop: int) -> dict[str, np.ndarray]:
        """Return the columns at rows from `start` to `stop`; a view where they are in order."""
        if self.rows is None:
            return {name: column[start:stop] for name, column in self.columns.items()}
        rows = self.rows[start:stop]
        return {name: column[rows] for name, column in self.columns.items()}


class Blocks(Source):
    """Files that are read block by block; a batch is a dict of the columns."""

    def __init__(self, what: str, paths: Sequence[Path], files: Sequence[TableFile]) -> None:
        self._what, self._paths, self._files = what, paths, files
        self._places = [
            (index, block) for index, file in enumerate(files) for block in range(len(file.rows))
        ]
        self._rows = np.array([rows for file in files for rows in file.rows], np.int64)
        self.byte_count = sum(file.byte_count for file in files)
        if not self._rows.sum():
            raise errors.batch_is_empty()

    def count(self) -> int:
        """Return the number of rows."""
        return int(self._rows.sum())

    def example(self) -> PyTree:
        """Return the first block that has rows."""
        return self._read([int(np.flatnonzero(self._rows)[0])])

    def whole(self) -> dict[str, np.ndarray]:
        """Return all rows."""
        return self._read(range(len(self._places)))

    def batches(self, how: Reading, epoch: int, start: int, saved: Any = None) -> Iterator[PyTree]:
        """Yield the batches of an epoch; windows before batch `start` are not read."""
        windows = self._windows(how, epoch)
        sizes = [int(self._rows[window].sum()) for window in windows]
        ends = np.cumsum(sizes)
        left = how.steps(self.count()) - start
        first = int(np.searchsorted(ends, start * how.batch_size, side="right"))
        at = start * how.batch_size - int(ends[first] - sizes[first] if left > 0 else 0)
        parts: list[dict[str, np.ndarray]] = []
        missing = how.batch_size
        for window in self._read_ahead(windows, first, how, epoch) if left > 0 else ():
            size = sizes[first]
            first += 1
            while at < size:
                stop = min(at + missing, size)
                parts.append(window.take(at, stop))
                missing -= stop - at
                at = stop
                if not missing:
                    yield _joined(parts)
                    parts, missing = [], how.batch_size
            at = 0
        if parts and not how.drop:
            yield _joined(parts)

    def _windows(self, how: Reading, epoch: int) -> list[list[int]]:
        """Return the blocks of each window of an epoch."""
        count = len(self._places)
        if not how.shuffle:
            return [[block] for block in range(count)]
        order = _order(count, how.seed, epoch).tolist()
        size = max(1, WINDOW * count // max(1, self.byte_count))
        return [order[first : first + size] for first in range(0, count, size)]

    def _read_ahead(
        self, windows: list[list[int]], first: int, how: Reading, epoch: int
    ) -> Iterator[Window]:
        """Yield the windows from `first` on, the next one read by a thread of Grain's."""
        import grain

        def read(index: int) -> Window:
            columns = self._read(windows[index])
            if not how.shuffle:
                return Window(columns, None)
            count = len(next(iter(columns.values())))
            return Window(columns, _order(count, how.seed, epoch, index + 1))

        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=1)
        order = grain.MapDataset.range(first, len(windows)).map(read)
        yield from order.to_iter_dataset(options)

    def _read(self, blocks: Sequence[int]) -> dict[str, np.ndarray]:
        """Return the columns of some blocks, one after another."""
        parts: list[dict[str, np.ndarray]] = []
        for index in blocks:
            file, block = self._places[index]
            columns = arrow.arrays(self._what, self._table(file, block), COLUMN_ADVICE)
            if parts and _shapes(columns) != _shapes(parts[0]):
                raise errors.BatchError(
                    f"{self._what}: the columns of {self._paths[file]} are not those of "
                    f"{self._paths[0]}. Files that are read as one need the same columns with the "
                    "same dtypes."
                )
            parts.append(columns)
        return _joined(parts)

    def _table(self, file: int, block: int) -> Any:
        """Return the Arrow table of a block."""
        import pyarrow as pa

        try:
            return self._files[file].read(block)
        except (pa.ArrowException, OSError) as error:
            raise errors.BatchError(
                f"{self._what}: {self._paths[file]} was opened, and cannot be read any more: "
                f"{str(error).strip()} Leave a file as it is until training ends; write a new one "
                "beside it, and rename that."
            ) from error


def _order(count: int, seed: int, epoch: int, window: int = 0) -> np.ndarray:
    """Return an order of `count` blocks, or of the rows of a window (from 1).

    Random bits of Philox stay the same in all versions of NumPy; its permutations need not.
    """
    key = (seed & 0xFFFFFFFF) << 64 | epoch << 32 | window
    return np.argsort(np.random.Philox(key=key).random_raw(count), kind="stable")


def _shapes(columns: dict[str, np.ndarray]) -> dict[str, Any]:
    return {name: (column.shape[1:], column.dtype) for name, column in columns.items()}


def _joined(parts: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Return columns one after another; one part as it is."""
    if len(parts) == 1:
        return parts[0]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
