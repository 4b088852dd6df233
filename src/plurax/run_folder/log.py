"""Write metrics to disk: JSON lines, which plurax reads back, and TensorBoard events."""

import contextlib
import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from plurax import errors
from plurax.disk import AppendFile, log_errors, make_folder, replace_file
from plurax.event_file import EventFile
from plurax.loop.hook import RewindHook, RowsHook
from plurax.loop.log_rows import Row, encode_row, named_numbers, parsed_lines
from plurax.loop.run import Run
from plurax.user_frames import warn

LOG_FILE = "metrics.jsonl"

EVENTS_EVERY = 10
"""Steps between those written to TensorBoard; `metrics.jsonl` has every step."""


class MetricsLog(RowsHook, RewindHook):
    """Writes rows of metrics to `metrics.jsonl` and to TensorBoard events in a directory.

    A row has `kind` (`"step"`, `"epoch"` or, within an epoch, `"evaluation"`), `step`, `epoch` and
    numbers; of a population also `members`, a dict of lists with a number for each member. A row of
    kind `"event"` says under `event` what happened. Opening a directory for a run that resumes at
    `resume_step` drops the rows after that step, which the run writes again.

    The file is append-only. When `flush` returns, all rows are on disk: call it before the
    checkpoint of the same step, so that no checkpoint is ever ahead of its log. On a disk that is
    full rows wait in memory until there is room.

    Raises `CheckpointError` where the directory cannot be written.

    **Fields:** `epochs`, the epoch rows that the log held when it was opened.
    """

    def __init__(self, directory: Path, *, resume_step: int | None = None) -> None:
        self.path = directory / LOG_FILE
        self._open(resume_step)

    def _open(self, resume_step: int | None) -> None:
        self.epochs: list[Row] = []
        lines: Iterable[bytes] = ()
        with log_errors(self.path):
            make_folder(self.path.parent)
            if resume_step is not None and self.path.exists():
                lines = self._up_to(resume_step)
            content = b"".join(lines)
            replace_file(self.path, content)
            self._length, self._sum = len(content), hashlib.sha256(content)
            self._rows = AppendFile(self.path)
            purge = None if resume_step is None else resume_step + 1
            self._events = EventFile(self.path.parent / "tensorboard", purge)

    def on_rows(self, run: Run, rows: list[Row]) -> None:
        """Append rows."""
        for row in rows:
            self.write(row)

    def on_rewind(self, run: Run) -> None:
        """Drop the rows after the step to which the run went back."""
        self.cut(run.step)

    def cut(self, step: int) -> None:
        """Drop the rows after a step, as when resuming there. Raises `CheckpointError`."""
        self.close()
        self._open(step)

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close; an error that ends training is not replaced by one of the log."""
        with contextlib.suppress(*() if kind is None else (errors.DiskError,)):
            self.close()

    def _up_to(self, last: int) -> Iterator[bytes]:
        """Yield the lines of steps up to `last`, unchanged; append epoch rows to `epochs`."""
        torn = []
        after = False
        for number, line, row in parsed_lines(self.path):
            if row is None:
                torn += [] if after else [number]
            elif row["step"] <= last:
                if row["kind"] == "epoch":
                    self.epochs.append(row)
                yield line
            after = after or (row is not None and row["step"] > last)
        self._warn(torn)

    def _warn(self, torn: list[int]) -> None:
        if torn:
            warn(
                f"{self.path}: line {', '.join(map(str, torn))} cannot be read and is left out",
                errors.DamagedLogWarning,
            )

    @property
    def trouble(self) -> OSError | None:
        """Why the last attempt to write failed; None while the disk takes what is written."""
        return self._rows.trouble or self._events.file.trouble

    def write(self, row: Row) -> None:
        """Append a row; on a full disk it waits in memory."""
        line = encode_row(row)
        self._rows.write(line)
        self._length += len(line)
        self._sum.update(line)
        if row["kind"] == "event" or (row["kind"] == "step" and row["step"] % EVENTS_EVERY):
            return
        self._events.scalars(named_numbers(row, without=("step", "epoch")), row["step"])

    def flush(self) -> dict[str, Any]:
        """Return length and checksum of the log when all rows are on disk.

        Raises `CheckpointError` where writing fails.
        """
        with log_errors(self.path):
            self._rows.flush()
            self._events.file.flush()
        return {"length": self._length, "sha256": self._sum.hexdigest()}

    def close(self) -> None:
        """Flush and close. Raises `CheckpointError` where writing fails."""
        with log_errors(self.path), contextlib.closing(self._events.file):
            self._rows.close()
