"""Draw training curves from the rows of a run's `metrics.jsonl`."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from plurax import errors
from plurax.argument_check import text
from plurax.report.picture import BLUE, VERMILION, new_figure, saved

if TYPE_CHECKING:
    import matplotlib.figure

TRAIN, EVALUATION = BLUE, VERMILION
SKIP = {"kind", "step", "epoch", "seconds", "examples_per_second", "weight", "examples",
        "skipped", "grad_norm", "staleness"}  # fmt: skip


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
    steps = [row for row in rows if row.get("kind") == "step"]
    epochs = [row for row in rows if row.get("kind") == "epoch"]
    evaluations = [row for row in rows if row.get("kind") in ("evaluation", "epoch")]
    if not epochs:
        raise errors.argument_misfits(
            "plurax.train.draw_curves", "rows", text(rows),
            "rows of a log, and one of them of an epoch: {'kind': 'epoch', 'loss': 0.1, ...}",
        )  # fmt: skip
    names = [
        name
        for name, value in (epochs[-1] if epochs else {}).items()
        if name not in SKIP
        and not name.startswith("eval_")
        and not name.endswith(("_best", "_worst"))
        and isinstance(value, float)
    ]
    names = names or ["loss"]  # nothing was finite: an empty panel says so
    figure = new_figure(5.2 * max(1, len(names)), 3.8)
    axes = np.atleast_1d(figure.subplots(1, max(1, len(names))))
    for axis, name in zip(axes, names, strict=True):
        points = [(row["step"], row[name]) for row in steps if isinstance(row.get(name), float)]
        if points and "members" not in epochs[-1]:
            axis.plot(*zip(*points, strict=True), color=TRAIN, alpha=0.25, linewidth=0.8)
        for kind, means, color, marker, label in (
            (name, epochs, TRAIN, "o", "training, mean of the epoch"),
            (f"eval_{name}", evaluations, EVALUATION, "s", "evaluation"),
        ):
            if "members" in epochs[-1]:
                _bands(axis, means, kind, color, label)
            else:
                _line(axis, means, kind, color, marker, label)
        values = [row[name] for row in epochs if isinstance(row.get(name), float)]
        if not values:
            axis.set_title("no finite value", fontsize=10)
        elif name == "loss" and min(values) > 0 and max(values) > 10 * min(values):
            axis.set_yscale("log")
        axis.set_xlabel("step")
        axis.set_ylabel(name.replace("_", " "))
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    if axes[0].has_data():
        shown = axes[0].get_legend_handles_labels()
        figure.legend(*shown, loc="outside lower center", ncols=len(shown[0]), frameon=False)
    if title:
        figure.suptitle(title)
    return saved(figure, path)


def _line(axis: Any, epochs: list[dict[str, Any]], name: str, color: str, marker: str,
          label: str) -> None:  # fmt: skip
    points = [(row["step"], row[name]) for row in epochs if isinstance(row.get(name), float)]
    if points:
        axis.plot(*zip(*points, strict=True), color=color, marker=marker, markersize=4, label=label)


def _bands(axis: Any, epochs: list[dict[str, Any]], name: str, color: str, label: str) -> None:
    """Draw the median of the members and the best one, on bands of half and nine tenths of them."""
    rows = [row for row in epochs if name in row.get("members", {})]
    if not rows:
        return
    steps = [row["step"] for row in rows]
    count = len(rows[-1]["members"][name])
    values = np.full((len(rows), count), np.nan)
    for index, row in enumerate(rows):  # a population that has grown had fewer members before
        early = np.asarray(row["members"][name], float)
        values[index, : len(early)] = early
    kept = np.isfinite(values).any(axis=0)
    rows_kept = np.isfinite(values).any(axis=1)
    steps, values = np.asarray(steps)[rows_kept], values[rows_kept]
    if not kept.any():
        return
    low, lower, middle, upper, high = np.nanquantile(
        values[:, kept], (0.05, 0.25, 0.5, 0.75, 0.95), axis=1
    )
    axis.fill_between(steps, low, high, color=color, alpha=0.12, linewidth=0)
    axis.fill_between(steps, lower, upper, color=color, alpha=0.25, linewidth=0)
    few = "o" if len(steps) == 1 else None
    axis.plot(steps, middle, color=color, marker=few, label=f"{label}: median, 50 %, 90 %")
    losses = np.asarray(rows[-1]["members"].get("eval_loss", rows[-1]["members"]["loss"]), float)
    best = int(np.argmin(np.where(np.isfinite(losses), losses, np.inf)))
    axis.plot(
        steps, values[:, best], color=color, linewidth=0.9, linestyle="--", label="best member"
    )
