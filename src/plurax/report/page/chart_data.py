"""The numbers that the page draws: curves thinned to a budget, bands of members, events.

All curves of a page together have at most `BUDGET` points, so that a page of a hundred runs stays
small. A curve keeps the points that its look depends on (`plurax.report.page.thin`).
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from plurax.loop.log_rows import Row
from plurax.report.page.embed import json_value
from plurax.report.page.run_data import RunData
from plurax.report.page.thin import thin
from plurax.report.run_series import (
    ENDS,
    Bands,
    Series,
    bands,
    details,
    is_number,
    line,
    metrics_of,
)

BUDGET = 120_000
"""Points of all curves of a page."""
FEWEST, MOST = 40, 1000
"""Points of one curve."""
LAST = ("grad_norm", "learning_rate", "staleness", "examples_per_second")
"""Metrics whose panels come last."""
LARGEST_MATRIX = 64
"""Rows of a confusion matrix that is drawn."""
MOST_LISTED = 200
"""Events of a run that the page lists."""


def metric_names(runs: Sequence[RunData]) -> list[str]:
    """Return the metrics of all runs, one for each panel: the loss first, then by name."""
    names: set[str] = set()
    for run in runs:
        every = (*run.series.metrics, *metrics_of(run.series.last))
        names |= {name.removeprefix("eval_") for name in every}
    names = {n for n in names if not (n.endswith(ENDS) and n.rpartition("_")[0] in names)}

    def order(name: str) -> tuple[bool, int, str]:
        return name != "loss", LAST.index(name) + 1 if name in LAST else 0, name

    return sorted(names, key=order)


def runs_json(runs: Sequence[RunData], metrics: Sequence[str]) -> list[dict[str, Any]]:
    """Return for each run its curves, bands, clock and events."""
    # Of each metric: every step, the mean of the epoch, the evaluation; five lines more of members.
    lines = sum(3 + 12 * (run.series.members is not None) for run in runs) * max(1, len(metrics))
    points = int(np.clip(BUDGET // max(1, lines), FEWEST, MOST))
    return [_run(run, metrics, points) for run in runs]


def _run(run: RunData, metrics: Sequence[str], points: int) -> dict[str, Any]:
    curves = {name: _curves(run, name, points) for name in metrics}
    return {
        "name": run.name,
        "members": run.series.members,
        "curves": {name: lines for name, lines in curves.items() if lines},
        "clock": _clock(run, points),
        "matrices": _matrices(run.series.last),
        "events": [{"step": row["step"], "text": row["event"]} for row in events(run)],
    }


def _matrices(row: Row) -> dict[str, list[list[Any]]]:
    """Return the square matrices of a row, such as a confusion matrix."""
    matrices = {}
    for name, value in row.items():
        if isinstance(value, list) and 2 <= len(value) <= LARGEST_MATRIX:
            square = all(isinstance(line, list) and len(line) == len(value) for line in value)
            if square and all(is_number(number) for line in value for number in line):
                matrices[name] = json_value(value)
    return matrices


def _curves(run: RunData, name: str, points: int) -> dict[str, Any]:
    """Return every step, the means of epochs, the evaluation, and bands of members."""
    curves: dict[str, Any] = {}
    if (steps := run.series.steps(name)).values.size:
        curves["step"] = _thinned(steps, points)
    for kind, key, rows in (
        ("train", name, run.series.epochs),
        ("eval", f"eval_{name}", run.series.evaluations),
    ):
        if (means := line(key, rows)).values.size:
            curves[kind] = _thinned(means, points)
        if (members := bands(key, rows, (0.0, 0.25, 0.5, 0.75, 1.0))) is not None:
            curves[f"{kind}_members"] = _bands(members, points)
    return curves


def _bands(members: Bands, points: int) -> dict[str, list[Any]]:
    """Return the lowest of the members, their quartiles, the highest and the best one."""
    chosen = thin(members.steps, members.quantiles[2], points)
    lines = zip(("low", "q25", "median", "q75", "high"), members.quantiles, strict=True)
    return {
        "x": json_value(members.steps[chosen]),
        **{name: json_value(values[chosen]) for name, values in lines},
        "best": json_value(members.values[chosen]),
        "member": [members.best],
    }


def _thinned(series: Series, points: int) -> list[list[Any]]:
    chosen = thin(*series, points)
    return json_value([series.steps[chosen], series.values[chosen]])


def _clock(run: RunData, points: int) -> list[list[Any]]:
    """Return steps, epochs and seconds since the start, with which other axes are computed."""
    steps, epochs, seconds = [0.0], [0.0], [0.0]
    for row in run.series.epochs:
        steps.append(row["step"])
        epochs.append(row["epoch"])
        seconds.append(seconds[-1] + row.get("seconds", 0.0))
    if len(steps) == 1:  # no epoch has ended
        steps, epochs, seconds = [0.0, float(run.series.step)], [0.0, 1.0], [0.0, math.nan]
    chosen = np.unique(np.linspace(0, len(steps) - 1, points + 1).astype(int))
    return [json_value(np.asarray(axis)[chosen], 7) for axis in (steps, epochs, seconds)]


def events(run: RunData) -> list[Row]:
    """Return what happened in a run, in order: step, event, details."""
    listed = [
        {"step": row["step"], "event": str(row.get("event", "event")),
         "details": details(row)}
        for row in run.series.events
    ]  # fmt: skip
    listed += _skips(run)
    for row in run.starts[1:]:
        step = row.get("step", 0)
        event = "resumed" if step else "started again"
        listed.append({"step": step, "event": event, "details": details(row, ("step", "time"))})
    if run.set_aside:
        text = f"{run.set_aside} earlier in before.1 and so on"
        listed.append({"step": 0, "event": "restarted from scratch", "details": text})
    # An event that is not whole, as of another version, is no reason to show nothing.
    listed = [row for row in listed if is_number(row["step"])]
    return sorted(listed, key=lambda row: row["step"])[:MOST_LISTED]


def _skips(run: RunData) -> list[Row]:
    """Return skipped updates, steps in a row as one event; of members those that were frozen."""
    rows: list[Row] = []
    begin = end = None
    for step in [*run.series.skipped, None]:
        if begin is not None and end is not None and step != end + 1:
            count = end - begin + 1
            what = "update skipped" if count == 1 else f"{count} updates skipped"
            details = "the loss or its gradient was not finite"
            details += "" if count == 1 else f", up to step {end}"
            rows.append({"step": begin, "event": what, "details": details})
        begin, end = (step, step) if end is None or step != end + 1 else (begin, step)
    frozen = 0
    for row in run.series.epochs if run.series.members is not None else ():
        now = row.get("skipped", 0)
        if is_number(now) and now > frozen:
            text = f"{now - frozen} of {run.series.members} members, at or before this step"
            rows.append({"step": row["step"], "event": "members frozen", "details": text})
            frozen = int(now)
    return rows
