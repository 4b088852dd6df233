"""Draw an ensemble's confidence: reliability diagrams; probabilities and doubt over a plane."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float, Int

from plurax import errors
from plurax.ensemble.uncertainty import Calibration
from plurax.report.colors import GREY, HATCHES, ORANGE, PALETTE, SKY, line_style
from plurax.report.picture import new_figure, saved, tidy

if TYPE_CHECKING:
    import matplotlib.figure

CLASSES = ((SKY, "o"), (ORANGE, "^"))
COLUMNS = 3
"""Panels side by side at most: more would be too small on a page."""
Z = 1.959964
"""Standard deviations on each side of nineteen twentieths of a normal distribution."""


def draw_reliability(
    calibrations: Mapping[str, Calibration], path: str | Path | None = None
) -> "matplotlib.figure.Figure":
    """Draw the accuracy of predictions by confidence, and below it the number of examples.

    A curve under the diagonal is overconfident, one above it underconfident (C. Guo et al., ICML
    2017). Bars are 95 % intervals of the accuracy of a bin (E. B. Wilson, JASA 1927), so that a bin
    of few examples is not taken for a fact. Empty bins are left out.

    The guide [Pictures](../guides/pictures.md#draw_reliability) shows one.

    **Arguments:** `calibrations`, results of `plurax.ensemble.calibration` by their names in the
    legend; `path`, of the picture (its ending determines the format). Raises `BatchError` without
    any.
    """
    if not calibrations:
        raise errors.picture_of_nothing("draw_reliability", "plurax.ensemble.calibration(...)")
    figure = new_figure(5.2, 6.0 + 0.2 * len(calibrations))
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    above.plot([0, 1], [0, 1], color=GREY, linestyle=":", linewidth=1)
    above.text(0.02, 0.97, "not sure enough", color=GREY, va="top")
    above.text(0.98, 0.03, "too sure", color=GREY, ha="right")
    for index, (name, result) in enumerate(calibrations.items()):
        full = result.count > 0
        at, right = result.confidence[full], result.accuracy[full]
        above.errorbar(at, right, _intervals(right, result.count[full]), markersize=5, capsize=2.5,
                       elinewidth=0.9, label=f"{name} (error {result.error:.3f})", clip_on=False,
                       zorder=3, **line_style(index))  # fmt: skip
        _draw_counts(below, result.count, index, len(calibrations))
    above.set(xlim=(0, 1), ylim=(0, 1), ylabel="accuracy")
    counts = np.concatenate([result.count[result.count > 0] for result in calibrations.values()])
    if counts.size and counts.max() > 30 * counts.min():
        below.set_yscale("log")
        below.yaxis.set_major_formatter("{x:,.0f}")
        below.set_ylim(bottom=0.7)
    below.set(xlabel="confidence", ylabel="examples")
    figure.legend(frameon=False, loc="outside upper left")
    for axis in (above, below):
        tidy(axis)
    return saved(figure, path)


def _intervals(
    accuracy: Float[np.ndarray, "M"], count: Int[np.ndarray, "M"]
) -> Float[np.ndarray, "2 M"]:
    """Return how far Wilson's intervals reach below and above shares of so many examples."""
    scale = 1 + Z**2 / count
    middle = (accuracy + Z**2 / (2 * count)) / scale
    half = Z / scale * np.sqrt(accuracy * (1 - accuracy) / count + Z**2 / (4 * count**2))
    # An end at 0 or 1 may miss it by rounding.
    return np.maximum(np.stack([accuracy - (middle - half), middle + half - accuracy]), 0)


def _draw_counts(axis: Any, count: Int[np.ndarray, "M"], index: int, of: int) -> None:
    """Draw the examples of each bin, the bars of several calibrations side by side."""
    width = 0.86 / len(count) / of
    middles = (np.arange(len(count)) + 0.5) / len(count)
    axis.bar(middles + (index - (of - 1) / 2) * width, count, width,
             color=PALETTE[index % len(PALETTE)], hatch=HATCHES[index % len(HATCHES)],
             edgecolor="white", linewidth=0.3)  # fmt: skip


def draw_confidence(
    panels: Mapping[str, Float[np.ndarray, "Y X"]],
    extent: tuple[float, float, float, float],
    points: Float[np.ndarray, "N 2"],
    labels: Int[np.ndarray, "N"],
    path: str | Path | None = None,
    *,
    epistemic: Mapping[str, Float[np.ndarray, "Y X"]] | None = None,
) -> "matplotlib.figure.Figure":
    """Draw the probability of class 1 over a plane, panels side by side, with the data.

    All panels share one scale. The black line is where both classes are equally likely; white is a
    probability of one half. Panels of `epistemic` show where an ensemble does not know: light
    where its members agree, dark where each of them says something else.

    The guide [Pictures](../guides/pictures.md#draw_confidence) shows one.

    **Arguments:**

    - `panels`: by their titles, probabilities on a grid: row `i`, column `j` at the `i`-th of
      `Y` heights and the `j`-th of `X` widths, evenly spaced and ends included, as
      `np.meshgrid(np.linspace(left, right, X), np.linspace(bottom, top, Y))` returns them.
    - `extent`: `(left, right, bottom, top)` of the grid.
    - `points`, `labels`: the data, `(N, 2)` and `(N,)`, drawn on top; labels 0 or 1.
    - `path`: of the picture (its ending determines the format).
    - `epistemic`: by their titles, mutual information between the class and the member on the same
      grid, in nats, 0 to ln 2, as `Classification.epistemic` of two classes.

    Raises `BatchError` without panels and for other shapes.
    """
    points, labels = np.asarray(points), np.asarray(labels)
    if not panels:
        raise errors.picture_of_nothing("draw_confidence", "panel: {title: probabilities}")
    fit = points.ndim == 2 and points.shape[1] == 2 and labels.shape == points.shape[:1]
    if not fit or not np.isin(labels, (0, 1)).all():
        raise errors.BatchError(
            f"draw_confidence: the points have the shape {points.shape}, the labels the shape "
            f"{labels.shape} and the values {np.unique(labels)[:9].tolist()}; the points must be "
            "(N, 2), the coordinates x and y, and the labels (N,), 0 or 1."
        )
    doubts = epistemic or {}
    count = len(panels) + len(doubts)
    columns = 2 if count == 4 else min(count, COLUMNS)
    rows = math.ceil(count / columns)
    shape = (extent[3] - extent[2]) / (extent[1] - extent[0])
    size = (3.0 * columns + (1.8 if doubts else 0.9), (3.0 * shape + 0.4) * rows + 0.2)
    figure = new_figure(*size, layout="compressed")
    axes = figure.subplots(rows, columns, sharey=True, squeeze=False)
    drawn = [(*panel, False) for panel in panels.items()]
    drawn += [(*panel, True) for panel in doubts.items()]
    scales = {}
    for index, (name, values, doubt) in enumerate(drawn):
        axis = axes.flat[index]
        axis.tick_params(labelbottom=index + columns >= count)  # the lowest of its column
        scales[doubt] = _draw_panel(axis, name, np.asarray(values, np.float64), extent, doubt)
        for kind, (color, marker) in enumerate(CLASSES):
            axis.scatter(*points[labels == kind].T, s=13, color=color, marker=marker,
                         edgecolors="black", linewidths=0.5, zorder=3)  # fmt: skip
    for axis in axes.flat[count:]:
        axis.set_visible(False)
    if doubts:
        figure.colorbar(scales[True], ax=axes, label="mutual information (nats)",
                        ticks=[0, 0.2, 0.4, 0.6], pad=0.02)  # fmt: skip
    figure.colorbar(scales[False], ax=axes, label="probability of class 1",
                    ticks=[0, 0.25, 0.5, 0.75, 1], pad=0.02)  # fmt: skip
    return saved(figure, path, bbox_inches="tight")


def _draw_panel(
    axis: Any, name: str, values: Float[np.ndarray, "Y X"], extent: tuple[float, ...], doubt: bool
) -> Any:
    if values.ndim != 2 or min(values.shape) < 2:
        raise errors.BatchError(
            f"draw_confidence: the panel {name!r} has the shape {values.shape}; it must hold the "
            "probabilities of class 1 on a grid, (rows, columns), with at least 2 of each: "
            "probabilities[:, 1].reshape(rows, columns)."
        )
    left, right, bottom, top = extent
    x = np.linspace(left, right, values.shape[1])
    y = np.linspace(bottom, top, values.shape[0])
    # Few flat colours: a reader can follow their edges, and the file is small.
    levels = np.linspace(0, math.log(2) if doubt else 1, 13 if doubt else 21)
    mesh = axis.contourf(x, y, np.clip(values, 0, levels[-1]), levels,
                         cmap="Greys" if doubt else "PuOr_r")  # fmt: skip
    if not doubt and values.min() < 0.5 < values.max():
        axis.contour(x, y, values, levels=[0.5], colors="black", linewidths=1)
    axis.set(title=name, xlim=(left, right), ylim=(bottom, top), aspect="equal")
    return mesh
