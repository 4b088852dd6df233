"""Read batches on another thread into buffers of several, as fast as they come.

The reader fills one buffer while the loop computes on another. Where batches come fast the loop
takes full buffers, and the two meet once for all of a buffer's batches; where they come slowly it
takes what is there. Example, 4 slots:

    reader    0 1 2 3 | 4 5 ....... 6       waits for room after 3, for its source after 5
    loop      ......... takes 0 to 3
                                takes 4 5   half a moment later: the source is slow

The last batch of an epoch is known for the last one only once the source has said so.

Of large batches a buffer has one slot, in which a batch is that was put on the devices by the
reader: it waits there while the one before it is computed with, and another is in the reader's
hand.
"""

import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from plurax.execute.array_data import Position

SECONDS_BETWEEN_LOOKS = 0.1
"""How long a wait for data, or for room for them, does not notice that training is to stop."""

PATIENCE = 0.02
"""Seconds that the loop waits for more batches, once one is there."""


class Slots(Protocol):
    """A buffer that the reader fills with batches, one after the other; see `BatchBuffer`."""

    def __len__(self) -> int:
        """Return how many batches have been written."""

    @property
    def is_full(self) -> bool:
        """Whether there is no room for another."""

    def write(self, batch: Any, /) -> None:
        """Take one more batch."""


class OneSlot:
    """A buffer of one batch, kept as it is.

    **Attributes:** `batch`, once it has been written.
    """

    def __init__(self) -> None:
        self.is_full = False
        self.batch: Any = None

    def __len__(self) -> int:
        return int(self.is_full)

    def write(self, batch: Any) -> None:
        """Keep the batch."""
        self.batch, self.is_full = batch, True


B = TypeVar("B", bound=Slots)


class Filled(NamedTuple, Generic[B]):
    """A buffer that the reader has done with, and the position in the data after each batch."""

    buffer: B
    positions: list[Position]


class Part(NamedTuple, Generic[B]):
    """Batches of a buffer for one call: those in the slots `first` to `stop`.

    **Fields:** `positions`, in the data, after each of them; `is_last`, whether they end the epoch.
    """

    buffer: B
    first: int
    stop: int
    positions: list[Position]
    is_last: bool


class ReadAhead(Generic[B]):
    """Batches of an epoch, read ahead. Use as a context manager.

    **Arguments:**

    - `batches`: pairs of a batch and the position after it.
    - `new_buffer`: returns an empty buffer.
    - `stopping`: whether batches that are not there shall no longer be waited for.

    **Attributes:** `is_empty`, whether `parts` has given none.
    """

    def __init__(
        self,
        batches: Iterator[tuple[Any, Position]],
        new_buffer: Callable[[], B],
        stopping: Callable[[], bool],
    ) -> None:
        self._batches, self._new_buffer, self._stopping = batches, new_buffer, stopping
        self.is_empty = True
        self._changed = threading.Condition()
        self._filling: Filled[B] = Filled(new_buffer(), [])
        self._wanted = 0  # batches that the loop waits for
        self._ended = self._closed = False
        self._error: BaseException | None = None
        # A daemon thread: a source that blocks must not keep a finished process alive.
        self._thread = threading.Thread(target=self._read, name="plurax-read-ahead", daemon=True)

    def __enter__(self) -> "ReadAhead[B]":
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(timeout=1.0)  # so that a source that does not block is not read any more

    def parts(
        self,
        most: Callable[[], int] = lambda: 1,
        is_end: Callable[[bool | None], bool] = lambda more: more is False,
    ) -> Iterator[Part[B]]:
        """Yield the batches of the epoch, in parts of at most `most()` of one buffer.

        It ends early where it waits and is `stopping()`. Raises what the source has raised.

        **Arguments:** `is_end`, whether the epoch is over by what `has_more` returns: of several
        processes, each of which reads for itself, only together.
        """
        is_last = False
        while not is_last and (filled := self.take(most())) is not None:
            self.is_empty, first = False, 0
            while first < len(filled.positions):
                stop = min(first + most(), len(filled.positions))
                # Whether the last batch ends the epoch, the source has to say.
                is_last = stop == len(filled.positions) and is_end(self.has_more())
                yield Part(filled.buffer, first, stop, filled.positions[first:stop], is_last)
                first = stop

    def take(self, wanted: int) -> Filled[B] | None:
        """Return the batches read so far, `wanted` or as many as come within a moment.

        None at the end of the epoch, and where there is none and `stopping()`. Raises what the
        source has raised, once the batches before are taken.
        """
        with self._changed:
            if not self._wait(wanted):
                return None
            taken: Filled[B] = self._filling
            self._filling = Filled(self._new_buffer(), [])
            self._changed.notify_all()
            return taken

    def has_more(self) -> bool | None:
        """Return whether a batch follows those taken; None where one is not there yet and
        `stopping()`. Raises what the source has raised."""
        with self._changed:
            if self._wait(1):
                return True
            return False if self._ended else None

    def _wait(self, wanted: int) -> bool:
        """Wait for batches, with the lock held; return whether there is one."""
        until = time.monotonic() + PATIENCE
        while True:
            buffer = self._filling.buffer
            if len(buffer) >= wanted or buffer.is_full or (buffer and self._ended):
                return True
            if self._ended and self._error is not None:
                raise self._error
            if self._ended:
                return False
            left = until - time.monotonic()
            if buffer and left <= 0:
                return True
            if self._stopping():
                return len(buffer) > 0
            self._wanted = wanted if buffer else 1
            self._changed.wait(
                min(left, SECONDS_BETWEEN_LOOKS) if buffer else SECONDS_BETWEEN_LOOKS
            )

    def _read(self) -> None:
        try:
            for batch, position in self._batches:
                if not self._put(batch, position):
                    return
        except BaseException as error:
            self._end(error)
        else:
            self._end(None)

    def _put(self, batch: Any, position: Position) -> bool:
        """Write a batch into the buffer, as soon as there is room; return whether to go on."""
        with self._changed:
            while self._filling.buffer.is_full and not self._closed:
                self._changed.wait()
            if self._closed:
                return False
            self._filling.buffer.write(batch)
            self._filling.positions.append(position)
            if len(self._filling.positions) >= self._wanted or self._filling.buffer.is_full:
                self._changed.notify_all()
            return True

    def _end(self, error: BaseException | None) -> None:
        with self._changed:
            self._ended, self._error = True, error
            self._changed.notify_all()
