"""Show a run that is going on in the terminal, from its files alone.

A frame has the state of the run, a bar, the last rows, the curve of a metric and the last events:

    digits  running · epoch 7 of 12 · step 84 · 61,320 examples/s · 0:02 left
    ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━
    loss
     2.31 ▇▆▃▂▁
    0.045      ▇▆▅▄▃▂▂▁
"""

import math
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from plurax import errors
from plurax.analysis.compiled_figures import figures_text
from plurax.checkpoint import Checkpoints
from plurax.checkpoint.lock import LOCK, writer_of
from plurax.loop.log_rows import Row
from plurax.progress.training_progress import clock_text
from plurax.report.page.run_data import LogTail, read_settings, run_folders
from plurax.report.run_series import ENDS, WIDE, RunSeries, details, is_number, metrics_of
from plurax.run_folder.log import LOG_FILE
from plurax.run_folder.log_check import damage_row, log_damage

BLOCKS = " ▁▂▃▄▅▆▇█"
ROWS, COLUMNS = 6, 60
"""Lines and columns of the curve."""
LAST_ROWS, LAST_EVENTS = 8, 5
MOST_METRICS = 5
SILENT = 60.0
"""Seconds without a new row after which a run is said to be silent."""


class WatchedRun:
    """What the files of a run have said so far.

    **Arguments:** `path`, its folder; `metric`, of the curve; `now`, seconds of a clock.

    Raises `ExperimentError` for a folder that is no run's, or holds several.
    """

    def __init__(
        self, path: Path, metric: str = "loss", now: Callable[[], float] = time.monotonic
    ) -> None:
        folders = run_folders([path])
        if len(folders) > 1:
            raise errors.ExperimentError(
                f"{path} holds {len(folders)} runs, and plurax watch shows one. Name it, like "
                f"plurax watch {path}/NAME; plurax report compares several."
            )
        self.path, self.metric = folders[0], metric
        self._tail = LogTail(self.path / LOG_FILE)
        self._now, self._heard = now, now()
        self._restarts = 0
        self._seen: tuple[int, ...] = ()
        self.settings: dict[str, Any] = {}
        self._clear()
        self.read()

    def _clear(self) -> None:
        self.series = RunSeries()
        self.events: deque[Row] = deque(maxlen=LAST_EVENTS)

    def read(self) -> None:
        """Read what was written since."""
        rows = self._tail.read()
        if self._tail.restarted > self._restarts:  # resumed or rolled back: the log is another
            self._restarts = self._tail.restarted
            self._clear()
        self.series.add(rows)
        self._heard = self._now() if rows else self._heard
        for row in rows:
            if row["kind"] == "event":
                self.events.append(row)
            elif row["kind"] == "step" and row.get("skipped"):
                self.events.append({"step": row["step"], "event": "update skipped (not finite)"})
        self._check_log()
        self.alive = writer_of(self.path / "checkpoints" / LOCK)
        # While the file is being replaced, what it said before.
        self.settings = read_settings(self.path / "run.toml") or self.settings

    def _check_log(self) -> None:
        """Compare the log with each new checkpoint, and after it was replaced."""
        newest = (self._restarts, *Checkpoints(self.path / "checkpoints").steps()[-1:])
        if newest != self._seen:
            self._seen = newest
            if (damage := log_damage(self.path)) is not None:
                self.events.append(damage_row(*damage))

    @property
    def ended(self) -> bool:
        """Whether no process writes the run any more."""
        return not self.alive

    @property
    def total_epochs(self) -> int | None:
        """The epochs of the whole run, None where its files do not say."""
        epochs = self.settings.get("options.epochs")
        return epochs if isinstance(epochs, int) else None

    @property
    def state(self) -> str:
        """What the run is doing, in a few words."""
        last = self.series.last.get("epoch", 0)
        if self.alive is None:
            done = self.total_epochs is None or last >= self.total_epochs
            return "finished" if done and self.series.epochs else "stopped"
        if not self.alive:
            return "its process is gone"
        if not self.series.step:
            return "running, before its first step"
        silent = self._now() - self._heard
        return "running" if silent < SILENT else f"running, silent for {clock_text(silent)}"

    # --- The frame ------------------------------------------------------------------------------

    def frame(self, width: int = 100) -> RenderableType:
        """Return all that is shown, in at most `width` columns."""
        parts: list[RenderableType] = [self._headline()]
        total = self.total_epochs
        if total:
            done = self._epochs_done()
            bar = ProgressBar(total=total, completed=min(done, total), width=min(width, 72))
            parts += [bar, Text("")]
        if text := self._compiled():
            parts += [Text(text, style="dim")]
        if (values := self.series.steps(self.metric).values).size:
            parts += [Text(""), *curve_lines(self.metric, values, min(COLUMNS, width - 14))]
        if self.series.epochs:
            parts += [Text(""), self._table(width)]
        if self.events:
            parts += [Text(""), *self._event_lines()]
        return Group(*parts)

    def _headline(self) -> Text:
        text = Text(no_wrap=False)
        text.append(self.path.absolute().name, style="bold")
        parts = [self.state]
        total, last = self.total_epochs, self.series.last
        if last:
            parts.append(f"epoch {last['epoch']}" + (f" of {total}" if total else ""))
        parts.append(f"step {self.series.step:,}")
        if is_number(last.get("examples_per_second")):
            parts.append(f"{last['examples_per_second']:,.0f} examples/s")
        left = self._seconds_left()
        if left is not None:
            parts.append(f"{clock_text(left)} left")
        return text.append("  " + " · ".join(parts))

    def _compiled(self) -> str:
        """Return what the compiler made of the program, "" before the first epoch."""
        begin = "compiled."
        flat = {k.removeprefix(begin): v for k, v in self.settings.items() if k.startswith(begin)}
        return figures_text(flat)

    def _epochs_done(self) -> float:
        """Return the epochs that are done, with the part of the one that goes on."""
        if not self.series.epochs:
            return 0.0
        last = self.series.last
        per_epoch = last["step"] / max(1, last["epoch"])
        after = self.series.step - last["step"]
        return float(last["epoch"] + min(1.0, after / max(1.0, per_epoch)))

    def _seconds_left(self) -> float | None:
        total, epochs = self.total_epochs, self.series.epochs
        timed = epochs[-LAST_ROWS:]
        if not self.alive or total is None or not timed:
            return None
        first = epochs[-len(timed) - 1]["epoch"] if len(epochs) > len(timed) else 0
        seconds = sum(row.get("seconds", 0.0) for row in timed)
        return max(0.0, total - self._epochs_done()) * seconds / max(1, timed[-1]["epoch"] - first)

    def _table(self, width: int) -> Table:
        """Return the last rows of epochs."""
        names = [n for n in metrics_of(self.series.last) if n != "examples_per_second"]
        names.sort(key=lambda name: (name.endswith(ENDS), name == "grad_norm"))
        fits = max(1, (width - 18) // 14)
        names = names[: min(MOST_METRICS, fits)]
        table = Table(box=None, pad_edge=False, header_style="dim")
        for name in ("epoch", "step", *names, "skipped"):
            table.add_column(name.replace("_", " "), justify="right")
        for row in self.series.epochs[-LAST_ROWS:]:
            values = [_number(row.get(name)) for name in names]
            skipped = str(row.get("skipped", 0) or "")
            table.add_row(str(row["epoch"]), f"{row['step']:,}", *values, skipped)
        return table

    def _event_lines(self) -> list[Text]:
        return [
            Text.assemble(
                (f"step {row['step']:,}  ", "dim"),
                (str(row.get("event", "event")), "bold"),
                f"  {text}" if (text := details(row)) else "",
            )
            for row in self.events
        ]


def curve_lines(
    name: str, values: np.ndarray, columns: int = COLUMNS, rows: int = ROWS
) -> list[Text]:
    """Return a curve as lines of blocks, its highest and lowest value on the left.

    A column is the mean of the finite values in its part of the run; a column without any is blank.

    >>> lines = curve_lines("loss", np.array([4.0, 3.0, 2.0, 1.0]), columns=4, rows=2)
    >>> [line.plain for line in lines]
    ['loss', '         4 █▃', '         1 ██▆▁']
    """
    means = _columns(values, columns)
    finite = means[np.isfinite(means)]
    if not finite.size:
        return [Text(f"{name}: no finite value")]
    low, high = float(finite.min()), float(finite.max())
    log = low > 0 and high > WIDE * low
    drawn, ends = (np.log(means), np.log([low, high])) if log else (means, np.array([low, high]))
    span = float(ends[1] - ends[0])
    # The lowest value has one eighth, so that it is seen.
    part = (drawn - ends[0]) / span if span else np.where(np.isfinite(means), 0.5, np.nan)
    eighths = np.nan_to_num(1 + part * (8 * rows - 1), nan=0.0)
    lines = [
        Text.assemble((name.replace("_", " "), "bold"), (", logarithmic" if log else "", "dim"))
    ]
    for row in reversed(range(rows)):
        letters = [BLOCKS[int(np.clip(round(height - 8 * row), 0, 8))] for height in eighths]
        label = _number(high) if row == rows - 1 else _number(low) if row == 0 else ""
        lines.append(Text.assemble((f"{label:>10} ", "dim"), ("".join(letters).rstrip(), "cyan")))
    return lines


def _columns(values: np.ndarray, columns: int) -> np.ndarray:
    """Return the mean of the finite values of each of so many equal parts."""
    columns = min(columns, len(values))
    places = np.arange(len(values)) * columns // len(values)
    finite = np.isfinite(values)
    sums = np.bincount(places[finite], values[finite], columns)
    counts = np.bincount(places[finite], minlength=columns)
    with np.errstate(invalid="ignore", divide="ignore"):
        return sums / counts


def _number(value: Any) -> str:
    if not is_number(value):
        return "–"
    return f"{value:.4g}" if math.isfinite(value) else str(value)
