"""Draw parallel coordinates: many settings of many parameters in one picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from plurax.report.colors import BLUE, GREY, LIGHT, VERMILION
from plurax.report.picture import new_figure, saved
from plurax.report.run_series import crowds_low
from plurax.validate import Mode, check_choice, sign_of_mode

if TYPE_CHECKING:
    import matplotlib.figure


def draw_parallel(
    rows: Sequence[Mapping[str, Any]],
    names: Sequence[str],
    metric: str,
    path: str | Path | None = None,
    *,
    mode: Mode = "min",
) -> "matplotlib.figure.Figure":
    """Draw one line per row across one axis per name: the best few dark, the rest light.

    Dark is the best tenth, ten rows at most; the best row is thick, with markers.

    The guide [Pictures](../guides/pictures.md#draw_parallel) shows one.

    **Arguments:** `rows`, as `Sweep.rows`; `names`, of the numbers to show, without the metric. An
    axis is logarithmic where its values are positive, span more than a factor of thirty, and crowd
    at the low end. Rows whose metric is not finite are dotted grey.
    """
    names = [*names, metric]
    known = [name for name in (rows[0] if rows else ()) if all(name in row for row in rows)]
    for argument, name in (*(("names", name) for name in names[:-1]), ("metric", metric)):
        check_choice("plurax.ensemble.draw_parallel", argument, name, known)
    values_RA = np.asarray([[float(row[name]) for name in names] for row in rows])
    logs = [crowds_low(column) for column in values_RA.T]
    places_RA = np.stack(
        [_placed(column, log) for column, log in zip(values_RA.T, logs, strict=True)], axis=1
    )
    score = values_RA[:, -1]
    finite = np.isfinite(score)
    figure = new_figure(max(5.0, 2.1 * len(names)), 4.2)
    axis = figure.subplots()
    # The lower, the better.
    rank = places_RA[:, -1] if sign_of_mode(mode) > 0 else 1 - places_RA[:, -1]
    order = np.argsort(np.where(finite, rank, np.inf), kind="stable")  # the best first
    dark = max(1, min(10, round(finite.sum() / 10)))
    across = np.arange(len(names))
    for nth, row in reversed(list(enumerate(order))):  # the best is drawn last
        if not finite[row]:
            axis.plot(across[:-1], places_RA[row, :-1], ":", color=GREY, linewidth=0.8)
        elif nth == 0:
            axis.plot(across, places_RA[row], "-o", color=VERMILION, linewidth=2.6, markersize=6,
                      label="the best", zorder=3)  # fmt: skip
        else:
            label = f"the best {dark} of {len(rows)}" if nth == dark - 1 else None
            axis.plot(across, places_RA[row], color=BLUE if nth < dark else LIGHT,
                      linewidth=1.2 if nth < dark else 0.7, label=label)  # fmt: skip
    for x, (name, column, log) in enumerate(zip(names, values_RA.T, logs, strict=True)):
        axis.plot([x, x], [0, 1], color="black", linewidth=0.8)
        for place_, text in _ticks(column, log):
            axis.annotate(text, (x, place_), (4, 0), textcoords="offset points", va="center",
                          fontsize=8, zorder=4,
                          bbox={"fc": "white", "ec": "none", "alpha": 0.8, "pad": 0.6})  # fmt: skip
        kind = " (log)" if log else ""
        axis.text(x, 1.06, name.replace("_", " ") + kind, ha="center", fontsize=9.5)
    axis.set(xlim=(-0.35, len(names) - 0.5), ylim=(-0.04, 1.12))
    axis.axis("off")
    if finite.any():
        figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    return saved(figure, path)


def _placed(column: Float[np.ndarray, "R"], log: bool) -> Float[np.ndarray, "R"]:
    """Return the places of values on their axis, between 0 and 1."""
    with np.errstate(invalid="ignore"):
        values = np.log(column) if log else column
    finite = values[np.isfinite(values)]
    low, high = (finite.min(), finite.max()) if finite.size else (0.0, 1.0)
    return np.full_like(values, 0.5) if low == high else (values - low) / (high - low)


def _ticks(column: Float[np.ndarray, "R"], log: bool) -> list[tuple[float, str]]:
    """Return places and texts: every value where there are at most six, else five evenly spaced."""
    distinct = np.unique(column[np.isfinite(column)])
    if distinct.size == 0:
        return []
    if distinct.size <= 6:
        every = list(zip(_placed(distinct, log).tolist(), map(_text, distinct), strict=True))
        return _apart(every)
    low, high = distinct[0], distinct[-1]
    places = np.linspace(0, 1, 5)
    values = low * (high / low) ** places if log else low + places * (high - low)
    return list(zip(places.tolist(), map(_text, values), strict=True))


def _apart(labels: list[tuple[float, str]]) -> list[tuple[float, str]]:
    """Return those of labels, ascending, that are not written over each other; both ends are.

    >>> _apart([(0.0, "1"), (0.02, "2"), (0.5, "3"), (0.99, "4"), (1.0, "5")])
    [(0.0, '1'), (0.5, '3'), (1.0, '5')]
    """
    kept = labels[:1]
    for label in labels[1:-1]:
        if min(label[0] - kept[-1][0], labels[-1][0] - label[0]) > LABEL:
            kept.append(label)
    return kept + labels[1:][-1:]


LABEL = 0.05
"""The height of a label, of that of an axis."""


def _text(value: float) -> str:
    return f"{value:.3g}"
