"""Draw an ensemble's confidence: reliability diagrams, and probabilities over a plane."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float, Int

from plurax import errors
from plurax.ensemble.uncertainty import Calibration
from plurax.report.picture import new_figure, saved

if TYPE_CHECKING:
    import matplotlib.figure

LINES = (("#3b6fb6", "o"), ("#c4572b", "s"), ("#4a8f5c", "D"), ("#8659a8", "^"), ("#9a7b1c", "v"),
         ("#555555", "P"))  # fmt: skip
"""Colours and markers that also differ in greyscale."""
CLASSES = (("#a9cdf2", "o"), ("#ffb8a0", "^"))
COLUMNS = 4


def draw_reliability(
    calibrations: Mapping[str, Calibration], path: str | Path | None = None
) -> "matplotlib.figure.Figure":
    """Draw the accuracy of predictions by confidence, and below it the number of examples.

    A curve under the diagonal is overconfident, one above it underconfident (C. Guo et al., ICML
    2017). Empty bins are left out.

    **Arguments:** `calibrations`, results of `plurax.ensemble.calibration` by their names in the
    legend; `path`, of the picture (its ending determines the format). Raises `BatchError` without
    any.
    """
    if not calibrations:
        raise errors.picture_of_nothing("draw_reliability", "plurax.ensemble.calibration(...)")
    figure = new_figure(5.2, 6.0 + 0.2 * len(calibrations))
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    above.plot([0, 1], [0, 1], color="#888888", linestyle="--", linewidth=1)
    above.text(0.02, 0.97, "not sure enough", color="#777777", va="top")
    above.text(0.98, 0.03, "too sure", color="#777777", ha="right")
    for index, (name, said) in enumerate(calibrations.items()):
        color, marker = LINES[index % len(LINES)]
        full = said.count > 0
        label = f"{name} (error {said.error:.3f})"
        above.plot(said.confidence[full], said.accuracy[full], color=color, marker=marker,
                   markersize=5, label=label, clip_on=False, zorder=3)  # fmt: skip
        edges = np.linspace(0, 1, len(said.count) + 1)
        below.stairs(said.count, edges, color=color, linewidth=1.5)
    above.set(xlim=(0, 1), ylim=(0, 1), ylabel="accuracy")
    below.set(xlabel="confidence", ylabel="examples")
    figure.legend(frameon=False, loc="outside upper left")
    for axis in (above, below):
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    return saved(figure, path)


def draw_confidence(
    panels: Mapping[str, Float[np.ndarray, "Y X"]],
    extent: tuple[float, float, float, float],
    points: Float[np.ndarray, "N 2"],
    labels: Int[np.ndarray, "N"],
    path: str | Path | None = None,
) -> "matplotlib.figure.Figure":
    """Draw the probability of class 1 over a plane, panels side by side, with the data.

    All panels share one scale. The black line is where both classes are equally likely; white is a
    probability of one half.

    **Arguments:**

    - `panels`: by their titles, probabilities on a grid: row `i`, column `j` at the `i`-th of
      `Y` heights and the `j`-th of `X` widths, evenly spaced and ends included, as
      `np.meshgrid(np.linspace(left, right, X), np.linspace(bottom, top, Y))` returns them.
    - `extent`: `(left, right, bottom, top)` of the grid.
    - `points`, `labels`: the data, `(N, 2)` and `(N,)`, drawn on top; labels 0 or 1.
    - `path`: of the picture (its ending determines the format).

    Raises `BatchError` without panels and for other shapes.
    """
    points, labels = np.asarray(points), np.asarray(labels)
    if not panels:
        raise errors.picture_of_nothing("draw_confidence", "panel: {title: probabilities}")
    fit = points.ndim == 2 and points.shape[1] == 2 and labels.shape == points.shape[:1]
    if not fit or not np.isin(labels, (0, 1)).all():
        raise errors.points_do_not_fit(points.shape, labels.shape, np.unique(labels)[:9].tolist())
    columns = min(len(panels), COLUMNS)
    rows = math.ceil(len(panels) / columns)
    shape = (extent[3] - extent[2]) / (extent[1] - extent[0])
    size = (3.0 * columns + 0.9, (3.0 * shape + 0.4) * rows + 0.2)
    figure = new_figure(*size, layout="compressed")
    axes = figure.subplots(rows, columns, sharey=True, squeeze=False)
    for index, (name, values) in enumerate(panels.items()):
        axis = axes.flat[index]
        axis.tick_params(labelbottom=index + columns >= len(panels))  # the lowest of its column
        mesh = _draw_panel(axis, name, np.asarray(values, np.float64), extent)
        for kind, (color, marker) in enumerate(CLASSES):
            axis.scatter(*points[labels == kind].T, s=16, color=color, marker=marker,
                         edgecolors="black", linewidths=0.5)  # fmt: skip
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    figure.colorbar(mesh, ax=axes, label="probability of class 1", ticks=[0, 0.25, 0.5, 0.75, 1])
    return saved(figure, path, bbox_inches="tight")


def _draw_panel(
    axis: Any, name: str, values: Float[np.ndarray, "Y X"], extent: tuple[float, ...]
) -> Any:
    if values.ndim != 2 or min(values.shape) < 2:
        raise errors.panel_wrong_shape(name, values.shape)
    left, right, bottom, top = extent
    x = np.linspace(left, right, values.shape[1])
    y = np.linspace(bottom, top, values.shape[0])
    mesh = axis.pcolormesh(x, y, values, cmap="RdBu_r", vmin=0, vmax=1, shading="gouraud",
                           rasterized=True)  # fmt: skip
    if values.min() < 0.5 < values.max():
        axis.contour(x, y, values, levels=[0.5], colors="black", linewidths=1)
    axis.set(title=name, xlim=(left, right), ylim=(bottom, top), aspect="equal")
    return mesh
