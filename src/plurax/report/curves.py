"""Training curves as a picture, from the rows of a run's `metrics.jsonl`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

TRAIN, EVALUATION = "#3b6fb6", "#c4572b"
SKIP = {"kind", "step", "epoch", "seconds", "examples_per_second", "weight", "examples",
        "skipped", "grad_norm"}  # fmt: skip


def draw_curves(rows: Sequence[dict[str, Any]], path: str | Path, title: str = "") -> None:
    """One panel per metric: every step, the mean of each epoch, and the evaluation.

    **Arguments:** `rows`, as `plurax.log.read_rows` gives them; `path`, of the picture (its ending
    says the format).
    """
    steps = [row for row in rows if row["kind"] == "step"]
    epochs = [row for row in rows if row["kind"] == "epoch"]
    names = [
        name
        for name, value in (epochs[-1] if epochs else {}).items()
        if name not in SKIP and not name.startswith("eval_") and isinstance(value, float)
    ]
    figure = Figure(figsize=(5.2 * max(1, len(names)), 3.8), layout="constrained", dpi=120)
    axes = np.atleast_1d(figure.subplots(1, max(1, len(names))))
    for axis, name in zip(axes, names, strict=True):
        points = [(row["step"], row[name]) for row in steps if isinstance(row.get(name), float)]
        if points:
            axis.plot(*zip(*points, strict=True), color=TRAIN, alpha=0.25, linewidth=0.8)
        _line(axis, epochs, name, TRAIN, "o", "training, mean of the epoch")
        _line(axis, epochs, f"eval_{name}", EVALUATION, "s", "evaluation")
        values = [row[name] for row in epochs if isinstance(row[name], float)]
        if name == "loss" and min(values) > 0 and max(values) > 10 * min(values):
            axis.set_yscale("log")
        axis.set_xlabel("step")
        axis.set_ylabel(name.replace("_", " "))
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    if len(axes) and names:
        axes[0].legend(frameon=False)
    if title:
        figure.suptitle(title)
    figure.savefig(path)


def _line(axis: Any, epochs: list[dict[str, Any]], name: str, color: str, marker: str,
          label: str) -> None:  # fmt: skip
    points = [(row["step"], row[name]) for row in epochs if isinstance(row.get(name), float)]
    if points:
        axis.plot(*zip(*points, strict=True), color=color, marker=marker, markersize=4, label=label)
