"""Draw training curves from the rows of a run's `metrics.jsonl`."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from plurax import errors
from plurax.argument_check import text
from plurax.report.colors import BLUE, VERMILION
from plurax.report.picture import legend_below, new_figure, saved, tidy
from plurax.report.run_series import ENDS, RunSeries, bands, line, metrics_of

if TYPE_CHECKING:
    import matplotlib.figure

TRAIN, EVALUATION = BLUE, VERMILION
NO_PANEL = ("examples_per_second", "grad_norm", "staleness")


def draw_curves(
    rows: Sequence[dict[str, Any]], path: str | Path | None = None, title: str = ""
) -> "matplotlib.figure.Figure":
    """Draw one panel per metric: every step, the mean of each epoch, and the evaluation.

    For a population: the median member, bands that hold half and nine tenths of the members, and
    the member with the lowest last loss.

    The guide [Pictures](../guides/pictures.md#draw_curves) shows one.

    **Arguments:** `rows`, as `plurax.loop.log_rows.read_rows` yields them; `path`, of the picture
    (its ending determines the format).
    """
    run = RunSeries(rows)
    if not run.epochs:
        raise errors.argument_misfits(
            "plurax.train.draw_curves", "rows", text(rows),
            "rows of a log, and one of them of an epoch: {'kind': 'epoch', 'loss': 0.1, ...}",
        )  # fmt: skip
    names = [
        name
        for name in metrics_of(run.last)
        if name not in NO_PANEL and not name.startswith("eval_") and not name.endswith(ENDS)
    ]
    names = names or ["loss"]  # nothing was finite: an empty panel says so
    figure = new_figure(5.2 * len(names), 3.8)
    axes = np.atleast_1d(figure.subplots(1, len(names)))
    for axis, name in zip(axes, names, strict=True):
        _draw_metric(axis, run, name)
    legend_below(figure, axes[0])
    if title:
        figure.suptitle(title)
    return saved(figure, path)


def _draw_metric(axis: Any, run: RunSeries, name: str) -> None:
    steps, means = run.steps(name), line(name, run.epochs)
    if steps.values.size and run.members is None:
        axis.plot(*steps, color=TRAIN, alpha=0.25, linewidth=0.8)
    for metric, rows, color, marker, label in (
        (name, run.epochs, TRAIN, "o", "training, mean of the epoch"),
        (f"eval_{name}", run.evaluations, EVALUATION, "s", "evaluation"),
    ):
        series = line(metric, rows)
        if run.members is not None:
            _draw_bands(axis, rows, metric, color, label)
        elif series.values.size:
            axis.plot(*series, color=color, marker=marker, markersize=4, label=label)
    if not means.values.size:
        axis.set_title("no finite value", fontsize=10)
    elif name == "loss" and 0 < 10 * means.values.min() < means.values.max():
        axis.set_yscale("log")
    axis.set_xlabel("step")
    axis.set_ylabel(name.replace("_", " "))
    tidy(axis)


def _draw_bands(axis: Any, rows: Sequence[Any], name: str, color: str, label: str) -> None:
    """Draw the median of the members and the best one, on bands of half and nine tenths of them."""
    members = bands(name, rows, (0.05, 0.25, 0.5, 0.75, 0.95))
    if members is None:
        return
    steps, (low, lower, middle, upper, high) = members.steps, members.quantiles
    axis.fill_between(steps, low, high, color=color, alpha=0.12, linewidth=0)
    axis.fill_between(steps, lower, upper, color=color, alpha=0.25, linewidth=0)
    few = "o" if len(steps) == 1 else None
    axis.plot(steps, middle, color=color, marker=few, label=f"{label}: median, 50 %, 90 %")
    axis.plot(steps, members.values, color=color, linewidth=0.9, linestyle="--",
              label="best member")  # fmt: skip
