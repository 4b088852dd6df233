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

import contextlib
import dataclasses
import queue
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sized
from typing import Any, TypeVar

import jax
import numpy as np
from jaxtyping import PyTree

from plurax import errors
from plurax.execute.array_data import ArrayData, Position, Ragged, check_ragged
from plurax.execute.columns import as_arrays, check_kind
from plurax.execute.placement import is_arrays, leading_dim
from plurax.validate import whole_number

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class StreamData:
    """Batches from an iterable or a Grain dataset; one pass over it is an epoch.

    The state of a Grain iterator is part of the position, so resuming is immediate; any other
    iterable is read again up to the position.
    """

    source: Iterable[PyTree]
    batch_size: int
    ragged: Ragged = "pad"

    def __post_init__(self) -> None:
        check_ragged(self.ragged)

    @property
    def batches_per_epoch(self) -> int | None:
        """The number of steps in a pass, or None where the source has no length."""
        return len(self.source) if isinstance(self.source, Sized) else None

    def batches(self, start: Position) -> Iterator[tuple[PyTree, Position]]:
        """Yield the batches of the epoch from `start` on, each with the position after it.

        Raises `BatchError` for a smaller batch under `ragged="error"`, and where the Grain iterator
        rejects its saved state.
        """
        iterator: Any = iter(self.source)
        stateful = hasattr(iterator, "get_state") and hasattr(iterator, "set_state")
        taken = 0
        if stateful and start.iterator is not None:
            try:
                iterator.set_state(start.iterator)
            except (ValueError, TypeError, KeyError, IndexError) as error:
                raise errors.data_state_refused(str(error)) from error
            taken = start.batch
        for batch in iterator:
            taken += 1
            if taken <= start.batch:
                continue
            state = iterator.get_state() if stateful else None
            count = leading_dim(batch)
            if count < self.batch_size and self.ragged != "pad":
                if self.ragged == "error":
                    raise errors.batch_ragged(count, self.batch_size)
                continue
            yield batch, Position(start.epoch, taken, state)


Data = ArrayData | StreamData


def as_data(
    data: Any, *, batch_size: int | None, seed: int, shuffle: bool, ragged: Ragged
) -> tuple[Data, PyTree]:
    """Return `fit`'s data as `Data`, and the shapes of a full batch. Raises `BatchError`."""
    check_ragged(ragged)
    if not isinstance(shuffle, bool | np.bool_):
        raise errors.shuffle_not_a_bool(shuffle)
    shuffle = bool(shuffle)
    if batch_size is not None:
        size = whole_number(batch_size)
        if size is None:
            raise errors.batch_size_not_positive(batch_size)
        batch_size = size
    check_kind("data", data)
    if is_arrays(data):
        if batch_size is None:
            raise errors.data_needs_batch_size()
        data = as_arrays(data)
        source = ArrayData(data, min(batch_size, leading_dim(data)), seed, shuffle, ragged)
        return source, source.example_batch()
    if not isinstance(data, Iterable) and not hasattr(data, "__getitem__"):
        raise errors.data_not_understood(type(data).__name__)
    if isinstance(data, Iterator):
        raise errors.data_one_shot()
    first = next(iter(data), None)
    if first is None:
        raise errors.data_has_no_batches("the iterable is empty")
    size = batch_size or leading_dim(first)
    like = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((size, *np.shape(leaf)[1:]), np.asarray(leaf).dtype),
        first,
    )
    return StreamData(data, size, ragged), like


def prefetch(items: Iterator[T], load: Callable[[T], T], ahead: int = 2) -> Generator[T]:
    """Yield `load(item)` of each item, computed on another thread up to `ahead` items in advance.

    Errors of `items` and `load` are raised when the item is requested.
    """
    end = object()
    # The queue holds one item fewer than `ahead`: an item waiting in `put` is loaded too.
    ready: queue.Queue[Any] = queue.Queue(max(1, ahead - 1))
    stopped = threading.Event()

    def put(item: Any) -> bool:
        while not stopped.is_set():
            with contextlib.suppress(queue.Full):
                ready.put(item, timeout=0.1)
                return True
        return False

    def run() -> None:
        try:
            for item in items:
                if stopped.is_set() or not put((load(item), None)):
                    return
        except BaseException as error:
            put((end, error))
        else:
            put((end, None))

    # A daemon thread: a source that blocks must not keep a finished process alive.
    thread = threading.Thread(target=run, name="plurax-prefetch", daemon=True)
    thread.start()
    try:
        while True:
            item, error = ready.get()
            if error is not None:
                raise error
            if item is end:
                return
            yield item
    finally:
        stopped.set()
        thread.join(timeout=1.0)  # so that a source that does not block is not read any more
