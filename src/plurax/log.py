"""Metrics on disk: JSON lines, which plurax reads back, and TensorBoard events for its viewer."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tensorboardX import SummaryWriter

Row = dict[str, Any]

BOARD_EVERY = 10
"""Steps between those that TensorBoard is given; `metrics.jsonl` has all."""


class MetricsLog:
    """Writes rows of metrics to `metrics.jsonl` and to TensorBoard events in a directory.

    A row has `kind` (`"step"` or `"epoch"`), `step`, `epoch` and numbers; of a population also
    `members`, a dict of lists with a number for each member. Opening a directory for
    a run that resumes at `resume_step` drops the rows after that step: they will come again.
    """

    def __init__(self, directory: Path, *, resume_step: int | None = None) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / "metrics.jsonl"
        kept = []
        if resume_step is not None and self.path.exists():
            kept = [row for row in read_rows(self.path) if row["step"] <= resume_step]
        self.rows: list[Row] = kept
        self.path.write_text("".join(map(_line, kept)), encoding="utf-8")
        self._file = self.path.open("a", encoding="utf-8")
        self._board = SummaryWriter(
            str(directory / "tensorboard"),
            purge_step=None if resume_step is None else resume_step + 1,
        )

    def write(self, row: Row) -> None:
        """Add a row."""
        self.rows.append(row)
        self._file.write(_line(row))
        if row["kind"] == "step" and row["step"] % BOARD_EVERY:
            return
        for name, value in row.items():
            if name not in ("kind", "step", "epoch") and isinstance(value, int | float):
                self._board.add_scalar(f"{row['kind']}/{name}", value, row["step"])

    def flush(self) -> None:
        """Make what was written readable by others."""
        self._file.flush()
        self._board.flush()

    def close(self) -> None:
        """Flush and close."""
        self._file.close()
        self._board.close()


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of a `metrics.jsonl`; a last line cut short by a kill is left out."""
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                return


def _line(row: Row) -> str:
    """One row as JSON; a value that is not finite becomes text, inside lists null."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: plain(inner) for name, inner in value.items()}
        if isinstance(value, list):
            return [
                inner if inner is not None and math.isfinite(inner) else None for inner in value
            ]
        return str(value) if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps({name: plain(value) for name, value in row.items()}) + "\n"
