"""The base of callbacks that log the rows of a run elsewhere than `fit(output=...)` does.

A logger says how to open, write a row and close; the base listens to the run, and calls it in the
first process only. Files of one's own are in `plurax.loggers.row_files`; TensorBoard, MLflow and
Weights & Biases in `plurax.loggers.trackers`. A logger is a callback, so it also sees what
callbacks before it have added to a row: put loggers last.
"""

import abc
import contextlib

from plurax import errors
from plurax.loop.hook import EpochHook, SaveHook, StartHook, StepHook, StopHook
from plurax.loop.log_rows import Row
from plurax.loop.run import Run
from plurax.validate import whole_number


class Logger(StartHook, EpochHook, SaveHook, StopHook):
    """Writes rows of epochs somewhere, in the first process only."""

    def on_start(self, run: Run) -> None:
        """Open; a run that is resumed goes on after its step."""
        if run.is_primary:
            self._open(run)

    def on_epoch(self, run: Run, row: Row) -> None:
        """Write an epoch."""
        if run.is_primary:
            self._write(row)

    def on_save(self, run: Run, step: int) -> None:
        """Write to disk what a checkpoint shall not be ahead of."""
        if run.is_primary:
            self._flush()

    def on_stop(self, run: Run) -> None:
        """Close; an error that ends training is not replaced by one of the disk."""
        if run.is_primary:
            with contextlib.suppress(*(errors.DiskError,) if run.failed else ()):
                self._close(run)

    @abc.abstractmethod
    def _open(self, run: Run) -> None: ...

    @abc.abstractmethod
    def _write(self, row: Row) -> None: ...

    def _flush(self) -> None:
        """Return when all is on disk that was written; raise `DiskError` where it is not."""

    @abc.abstractmethod
    def _close(self, run: Run) -> None: ...


class StepLogger(Logger, StepHook):
    """Writes rows of steps, too.

    **Arguments:** `every`, steps between those that are written; rows of epochs always are.

    Raises `TaskError` for another number.
    """

    def __init__(self, every: int = 1) -> None:
        count = whole_number(every)
        if count is None:
            raise errors.callback_count(type(self).__name__, "every", every)
        self._every = count

    def on_step(self, run: Run, row: Row) -> None:
        """Write a step."""
        if run.is_primary and row["step"] % self._every == 0:
            self._write(row)
