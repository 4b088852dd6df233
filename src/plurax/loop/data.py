"""Read batches from arrays, Grain datasets or iterables, from any position of a run.

A run that resumes must see the batches that it would have seen. The order of arrays is a pure
function of `(seed, member, epoch, position)`, so a `Position` (epoch, batch) is enough; a Grain
iterator adds its state; any other iterable is read again up to the batch. Example, 5 rows, batches
of 2, `ragged="pad"`, resumed at `Position(epoch=0, batch=1)`:

    epoch_order(0)    rows [[4 2] [0 3] [1 0]]  (3, 2)     counts [2 2 1]  (3,)
    batch 0           rows 4 2      skipped: read before the checkpoint
    batch 1           rows 0 3      yielded with Position(0, 2)
    batch 2           row  1        yielded with Position(0, 3)
"""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from plurax import errors
from plurax.distributed.global_arrays import process_count, process_index
from plurax.execute.array_data import ArrayData, Position, Ragged, check_ragged
from plurax.execute.placement import check_rows, is_arrays, leading_dim
from plurax.members import Members
from plurax.plan import MOST_PARTS
from plurax.resample import Everything
from plurax.sources.adapt import adapt, as_arrays
from plurax.sources.iterables import as_source, state_of
from plurax.sources.source import Reading, Source
from plurax.validate import whole_number


@dataclasses.dataclass(frozen=True)
class StreamData:
    """Batches from an iterable or a Grain dataset; one pass over it is an epoch.

    The state of a Grain iterator is part of the position, so resuming is immediate; any other
    iterable is read again up to the position.

    **Fields:** `source`; `batch_size`, of all processes together; `ragged`; `local`, whether each
    process gives its own rows of a batch, equally many; `on_devices`, whether its batches are
    arrays of JAX; `how` a source of rows forms them.
    """

    source: Iterable[PyTree] | Source
    batch_size: int
    ragged: Ragged = "pad"
    local: bool = False
    on_devices: bool = False
    how: Reading = Reading(1)  # noqa: RUF009  frozen

    def __post_init__(self) -> None:
        check_ragged(self.ragged)

    @property
    def own_size(self) -> int:
        """The number of examples in a full batch of `source`."""
        return self.batch_size // process_count() if self.local else self.batch_size

    @property
    def batches_per_epoch(self) -> int | None:
        """The number of steps in a pass, or None where the source has no length."""
        source = as_source(self.source)
        count = source.count()
        return self.how.steps(count) if source.by_row and count is not None else count

    def batches(self, start: Position) -> Iterator[tuple[PyTree, Position]]:
        """Yield the batches of the epoch from `start` on, each with the position after it.

        Raises `BatchError` for a smaller batch under `ragged="error"`, and where the Grain iterator
        rejects its saved state.
        """
        saved = self._own_state(start.iterator)
        iterator = as_source(self.source).batches(self.how, start.epoch, start.batch, saved)
        for taken, batch in enumerate(iterator, start.batch + 1):
            count = leading_dim(batch)
            if count < self.own_size and self.ragged != "pad":
                if self.ragged == "error":
                    raise errors.batch_ragged(count, self.own_size)
                continue
            yield batch, Position(start.epoch, taken, state_of(iterator))

    def _own_state(self, saved: Any) -> Any:
        """Return this process's iterator state, of those that all processes saved.

        None where there were more or fewer processes: then the source is read again.
        """
        if not self.local:
            return saved
        return saved[process_index()] if saved and len(saved) == process_count() else None


Data = ArrayData | StreamData


def as_data(
    data: Any,
    *,
    batch_size: int | None,
    seed: int,
    shuffle: bool,
    ragged: Ragged,
    local: bool = False,
    members: Members | None = None,
) -> tuple[Data, PyTree]:
    """Return `fit`'s data as `Data`, and the shapes of a full batch.

    **Arguments:** `local`, whether each process gives its own rows of a batch; `members`, whose
    resampling and epoch length the data have.

    Raises `BatchError`, also where a member's sample needs more rows than there are, and
    `MembersError` for resampling of data that are not arrays.
    """
    check_ragged(ragged)
    if not isinstance(shuffle, bool | np.bool_):
        raise errors.BatchError(
            f"shuffle={shuffle!r}: give True for a new order each epoch, or False."
        )
    shuffle = bool(shuffle)
    if batch_size is not None:
        size = whole_number(batch_size)
        if size is None:
            raise errors.batch_size_not_positive(batch_size)
        check_rows(size)
        batch_size = size
    data = adapt("data", data)
    if is_arrays(data):
        if local:
            raise errors.local_batches_need_batches()
        if batch_size is None:
            raise errors.data_needs_batch_size()
        data = as_arrays(data)
        arrays = ArrayData(data, min(batch_size, leading_dim(data)), seed, shuffle, ragged)
        like = arrays.example_batch()
        return arrays if members is None else arrays.read_by(members), like
    source = as_source(data)
    if source.by_row and (local or batch_size is None):
        raise errors.local_batches_need_batches() if local else errors.data_needs_batch_size()
    if members is not None and not isinstance(members.resample, Everything):
        # Of data that are not arrays, no row is known.
        raise errors.resample_needs_arrays(type(members.resample).__name__.lower())
    if isinstance(data, Iterator):
        raise errors.data_one_shot()
    first = source.example()
    if first is None:
        raise errors.data_has_no_batches(f"the {source.kind} is empty")
    size = _full_size(source, first, batch_size, local)
    how = Reading(size if source.by_row else 1, seed, shuffle, ragged == "drop")
    on_devices = any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(first))
    return StreamData(source, size, ragged, local, on_devices, how), _shapes(first, size)


def _full_size(source: Source, first: PyTree, batch_size: int | None, local: bool) -> int:
    """Return the number of examples in a full batch of all processes. Raises `BatchError`."""
    rows = leading_dim(first)
    size = batch_size or rows * (process_count() if local else 1)
    if source.by_row:
        return min(size, source.count() or size)
    # Each batch is padded to `batch_size`.
    if size > MOST_PARTS and size > 1000 * process_count() * rows:
        raise errors.BatchError(
            f"batch_size={size:,}, and the first batch of the data has {rows:,} examples: every "
            "batch would be padded to that size. Leave batch_size out, or give the size of the "
            "largest batch."
        )
    return size


def _shapes(batch: PyTree, size: int) -> PyTree:
    """Return the shapes of a batch of `size` examples, from any batch."""

    def shape(leaf: Any) -> jax.ShapeDtypeStruct:
        dtype = leaf.dtype if isinstance(leaf, jax.Array) else np.asarray(leaf).dtype
        return jax.ShapeDtypeStruct((size, *np.shape(leaf)[1:]), dtype)

    return jax.tree.map(shape, batch)
