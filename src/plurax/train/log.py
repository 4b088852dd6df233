"""Write metrics to disk: JSON lines, which plurax reads back, and TensorBoard events."""

import contextlib
import json
import math
import os
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from plurax import errors

Row = dict[str, Any]

BOARD_EVERY = 10
"""Steps between those written to TensorBoard; `metrics.jsonl` has every step."""

NOT_FINITE = ("nan", "inf", "-inf")
"""The texts that stand in JSON for numbers that JSON cannot hold."""


class DamagedLogWarning(UserWarning):
    """Lines of `metrics.jsonl` could not be read, and were left out."""


class MetricsLog:
    """Writes rows of metrics to `metrics.jsonl` and to TensorBoard events in a directory.

    A row has `kind` (`"step"` or `"epoch"`), `step`, `epoch` and numbers; of a population also
    `members`, a dict of lists with a number for each member. Opening a directory for a run that
    resumes at `resume_step` drops the rows after that step, which the run writes again.

    The file is append-only. When `flush` returns, all rows are on disk: call it before the
    checkpoint of the same step, so that no checkpoint is ever ahead of its log.

    Raises `CheckpointError` where the directory cannot be written.

    **Fields:** `epochs`, the epoch rows that the log held when it was opened.
    """

    def __init__(self, directory: Path, *, resume_step: int | None = None) -> None:
        self.path = directory / "metrics.jsonl"
        self.epochs: list[Row] = []
        lines: Iterable[bytes] = ()
        with _said(self.path):
            directory.mkdir(parents=True, exist_ok=True)
            if resume_step is not None and self.path.exists():
                lines = self._up_to(resume_step)
            replace_file(self.path, b"".join(lines))
            self._file = self.path.open("ab")
            from tensorboardX import SummaryWriter  # slow to import

            self._board = SummaryWriter(
                str(directory / "tensorboard"),
                purge_step=None if resume_step is None else resume_step + 1,
            )

    def _up_to(self, last: int) -> Iterator[bytes]:
        """Yield the lines of steps up to `last`, unchanged; append epoch rows to `epochs`."""
        torn = []
        after = False
        for number, line, row in _parsed(self.path):
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
            warnings.warn(
                f"{self.path}: line {', '.join(map(str, torn))} cannot be read and is left out",
                DamagedLogWarning,
                stacklevel=4,
            )

    def write(self, row: Row) -> None:
        """Append a row. Raises `CheckpointError` where writing fails."""
        with _said(self.path):
            self._file.write(_line(row))
        if row["kind"] == "step" and row["step"] % BOARD_EVERY:
            return
        for name, value in row.items():
            if name not in ("kind", "step", "epoch") and isinstance(value, int | float):
                self._board.add_scalar(f"{row['kind']}/{name}", value, row["step"])

    def flush(self) -> None:
        """Return when all rows are on disk. Raises `CheckpointError` where writing fails."""
        with _said(self.path):
            self._file.flush()
            os.fsync(self._file.fileno())
            self._board.flush()

    def close(self) -> None:
        """Flush and close. Raises `CheckpointError` where writing fails."""
        with _said(self.path):
            self._file.close()
            self._board.close()


@contextlib.contextmanager
def _said(path: Path) -> Iterator[None]:
    """Raise `CheckpointError` for an `OSError` while writing the log."""
    try:
        yield
    except OSError as error:
        raise errors.log_not_written(str(path), error.strerror or str(error)) from error


def read_rows(path: Path) -> Iterator[Row]:
    """Yield the rows of a `metrics.jsonl`, leaving out lines that a kill cut short."""
    for _, _, row in _parsed(path):
        if row is not None:
            yield row


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file's content atomically: readers, and a kill, find the old or the new content."""
    temporary = path.with_name(f".{path.name}.new")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _parsed(path: Path) -> Iterator[tuple[int, bytes, Row | None]]:
    """Yield number, bytes and row of each line; None for a line that is not a whole row."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            yield number, line, _row(line)


def _row(line: bytes) -> Row | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    if not line.endswith(b"\n") or not isinstance(row, dict):
        return None
    if not isinstance(row.get("step"), int) or row.get("kind") not in ("step", "epoch"):
        return None
    return {name: _numbers(value) for name, value in row.items()}


def _numbers(value: Any) -> Any:
    """Decode what `_plain` encoded."""
    if isinstance(value, dict):
        return {name: _numbers(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_numbers(inner) for inner in value]
    if value is None or value in NOT_FINITE:
        return math.nan if value is None else float(value)
    return value


def _line(row: Row) -> bytes:
    """Encode one row as a line of JSON; a value that is not finite becomes text."""
    return (json.dumps(_plain(row)) + "\n").encode()


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
