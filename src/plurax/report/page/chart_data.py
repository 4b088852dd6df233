"""The numbers that the page draws: curves thinned to a budget, bands of members, events.

All curves of a page together have at most `BUDGET` points, so that a page of a hundred runs stays
small. A curve keeps the points that its look depends on (`plurax.report.page.thin`).
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from plurax.loop.log_rows import Row
from plurax.report.page.run_data import NOT_METRICS, RunData, is_number
from plurax.report.page.thin import thin

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
        rows = [name for row in (run.last,) for name, v in row.items() if is_number(v)]
        names |= {name.removeprefix("eval_") for name in (*run.steps, *rows)}
    names = {
        name
        for name in names - NOT_METRICS
        if not (name.endswith(("_best", "_worst")) and name.rpartition("_")[0] in names)
    }

    def order(name: str) -> tuple[bool, int, str]:
        return name != "loss", LAST.index(name) + 1 if name in LAST else 0, name

    return sorted(names, key=order)


def runs_json(runs: Sequence[RunData], metrics: Sequence[str]) -> list[dict[str, Any]]:
    """Return for each run its curves, bands, clock and events."""
    # Of each metric: every step, the mean of the epoch, the evaluation; five lines more of members.
    lines = sum(3 + 12 * (run.members is not None) for run in runs) * max(1, len(metrics))
    points = int(np.clip(BUDGET // max(1, lines), FEWEST, MOST))
    return [_run(run, metrics, points) for run in runs]


def _run(run: RunData, metrics: Sequence[str], points: int) -> dict[str, Any]:
    curves = {name: _curves(run, name, points) for name in metrics}
    return {
        "name": run.name,
        "members": run.members,
        "curves": {name: found for name, found in curves.items() if found},
        "clock": _clock(run, points),
        "matrices": _matrices(run.last),
        "events": [{"step": row["step"], "text": row["event"]} for row in events(run)],
    }


def _matrices(row: Row) -> dict[str, list[list[Any]]]:
    """Return the square matrices of a row, such as a confusion matrix."""
    found = {}
    for name, value in row.items():
        if isinstance(value, list) and 2 <= len(value) <= LARGEST_MATRIX:
            square = all(isinstance(one, list) and len(one) == len(value) for one in value)
            if square and all(is_number(number) for one in value for number in one):
                found[name] = [_rounded(np.asarray(one, np.float64)) for one in value]
    return found


def _curves(run: RunData, name: str, points: int) -> dict[str, Any]:
    """Return every step, the means of epochs, the evaluation, and bands of members."""
    found: dict[str, Any] = {}
    if name in run.steps:
        found["step"] = _thinned(run.steps[name].steps, run.steps[name].values, points)
    for kind, key, means in (
        ("train", name, run.epochs),
        ("eval", f"eval_{name}", run.evaluations),
    ):
        rows = [row for row in means if is_number(row.get(key))]
        if rows:
            steps = np.asarray([row["step"] for row in rows], np.float64)
            found[kind] = _thinned(steps, np.asarray([row[key] for row in rows], float), points)
        bands = _bands(means, key, points)
        if bands:
            found[f"{kind}_members"] = bands
    return found


def _bands(means: Sequence[Row], name: str, points: int) -> dict[str, list[Any]] | None:
    """Return of each epoch the lowest, quartiles and highest of the members, and the best one.

    The best one is that with the lowest last loss, of the evaluation where there was one.
    """
    rows = [row for row in means if name in (row.get("members") or {})]
    if not rows:
        return None
    last = rows[-1]["members"]
    count = len(last[name])
    values = np.full((len(rows), count), np.nan)
    for index, row in enumerate(rows):  # a population that has grown had fewer members before
        early = np.asarray(row["members"][name], np.float64)[:count]
        values[index, : len(early)] = early
    values = np.where(np.isfinite(values), values, np.nan)
    kept = np.isfinite(values).any(axis=1)
    if not kept.any():
        return None
    steps = np.asarray([row["step"] for row in rows], np.float64)[kept]
    spread = np.nanquantile(values[kept], (0.0, 0.25, 0.5, 0.75, 1.0), axis=1)
    losses = np.asarray(last.get("eval_loss", last.get("loss", last[name])), np.float64)[:count]
    best = int(np.argmin(np.where(np.isfinite(losses), losses, np.inf)))
    chosen = thin(steps, spread[2], points)
    columns = dict(zip(("low", "q25", "median", "q75", "high"), spread, strict=True))
    lines = {key: _rounded(column[chosen]) for key, column in columns.items()}
    return {
        "x": _rounded(steps[chosen]),
        **lines,
        "best": _rounded(values[kept][chosen, best]),
        "member": [best],
    }


def _thinned(
    steps: Float[np.ndarray, "N"], values: Float[np.ndarray, "N"], points: int
) -> list[list[Any]]:
    chosen = thin(steps, values, points)
    return [_rounded(steps[chosen]), _rounded(values[chosen])]


def _clock(run: RunData, points: int) -> list[list[Any]]:
    """Return steps, epochs and seconds since the start, with which other axes are computed."""
    steps, epochs, seconds = [0.0], [0.0], [0.0]
    for row in run.epochs:
        steps.append(row["step"])
        epochs.append(row["epoch"])
        seconds.append(seconds[-1] + row.get("seconds", 0.0))
    if len(steps) == 1:  # no epoch has ended
        steps, epochs, seconds = [0.0, float(run.step)], [0.0, 1.0], [0.0, math.nan]
    chosen = np.unique(np.linspace(0, len(steps) - 1, points + 1).astype(int))
    return [_rounded(np.asarray(one, np.float64)[chosen], 7) for one in (steps, epochs, seconds)]


def events(run: RunData) -> list[Row]:
    """Return what happened in a run, in order: step, event, details."""
    found = [
        {"step": row["step"], "event": str(row.get("event", "event")),
         "details": _details(row, ("kind", "step", "event"))}
        for row in run.events
    ]  # fmt: skip
    found += _skips(run)
    for row in run.starts[1:]:
        step = row.get("step", 0)
        event = "resumed" if step else "started again"
        found.append({"step": step, "event": event, "details": _details(row, ("step", "time"))})
    if run.set_aside:
        text = f"{run.set_aside} earlier in before.1 and so on"
        found.append({"step": 0, "event": "restarted from scratch", "details": text})
    # An event that is not whole, as of another version, is no reason to show nothing.
    found = [row for row in found if is_number(row["step"])]
    return sorted(found, key=lambda row: row["step"])[:MOST_LISTED]


def _skips(run: RunData) -> list[Row]:
    """Return skipped updates, steps in a row as one event; of members those that were frozen."""
    found: list[Row] = []
    begin = end = None
    for step in [*run.skipped, None]:
        if begin is not None and end is not None and step != end + 1:
            count = end - begin + 1
            what = "update skipped" if count == 1 else f"{count} updates skipped"
            details = "the loss or its gradient was not finite"
            details += "" if count == 1 else f", up to step {end}"
            found.append({"step": begin, "event": what, "details": details})
        begin, end = (step, step) if end is None or step != end + 1 else (begin, step)
    frozen = 0
    for row in run.epochs if run.members is not None else ():
        now = row.get("skipped", 0)
        if is_number(now) and now > frozen:
            text = f"{now - frozen} of {run.members} members, at or before this step"
            found.append({"step": row["step"], "event": "members frozen", "details": text})
            frozen = int(now)
    return found


def _details(row: Mapping[str, Any], hidden: Sequence[str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in row.items() if name not in hidden)


def _rounded(values: Float[np.ndarray, "N"], digits: int = 5) -> list[Any]:
    """Return numbers to some digits, whole ones as integers, None where they are not finite."""
    short = [float(f"{value:.{digits}g}") if math.isfinite(value) else None for value in values]
    whole = [float(value).is_integer() and abs(value) < 1e15 for value in values]
    return [int(v) if w else s for v, s, w in zip(values, short, whole, strict=True)]
