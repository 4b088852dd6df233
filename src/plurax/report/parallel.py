"""Draw parallel coordinates: many settings of many parameters in one picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from plurax.report.picture import new_figure, saved
from plurax.validate import Mode, sign_of_mode

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
    """Draw one line per row across one axis per name, coloured by the metric; the best is thick.

    **Arguments:** `rows`, as `Sweep.rows`; `names`, of the numbers to show, without the metric. An
    axis is logarithmic where its values are positive, span more than a factor of thirty, and crowd
    at the low end. Rows whose metric is not finite are dotted grey.
    """
    names = [*names, metric]
    values_RA = np.asarray([[float(row[name]) for name in names] for row in rows])
    logs = [_logarithmic(column) for column in values_RA.T]
    places_RA = np.stack(
        [_placed(column, log) for column, log in zip(values_RA.T, logs, strict=True)], axis=1
    )
    score = values_RA[:, -1]
    finite = np.isfinite(score)
    figure = new_figure(max(5.0, 2.1 * len(names)), 4.2)
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    axis = figure.subplots()
    rank = places_RA[:, -1] if sign_of_mode(mode) > 0 else 1 - places_RA[:, -1]
    colors = ScalarMappable(Normalize(0, 1.1), cmap="viridis")
    order = np.argsort(np.where(finite, -rank, -np.inf))  # the best is drawn last
    best = order[-1]
    across = np.arange(len(names))
    for row in order:
        if not finite[row]:
            axis.plot(across[:-1], places_RA[row, :-1], ":", color="#999999", linewidth=0.8)
            continue
        width = 2.6 if row == best else 0.8
        axis.plot(across, places_RA[row], color=colors.to_rgba(rank[row]), linewidth=width,
                  alpha=1.0 if row == best else 0.55)  # fmt: skip
    for x, (name, column, log) in enumerate(zip(names, values_RA.T, logs, strict=True)):
        axis.axvline(x, color="black", linewidth=0.8)
        for place_, text in _ticks(column, log):
            axis.annotate(text, (x, place_), (4, 0), textcoords="offset points", va="center",
                          fontsize=8, bbox={"fc": "white", "ec": "none", "alpha": 0.7, "pad": 0.6})  # fmt: skip  # noqa: E501
        kind = " (log)" if log else ""
        axis.text(x, 1.06, name.replace("_", " ") + kind, ha="center", fontsize=9.5)
    axis.set(xlim=(-0.35, len(names) - 0.5), ylim=(-0.04, 1.12))
    axis.axis("off")
    return saved(figure, path)


def _logarithmic(column: Float[np.ndarray, "R"]) -> bool:
    """Return whether values crowd at the low end of a wide range, as those of `log_uniform` do."""
    finite = column[np.isfinite(column)]
    if not finite.size or finite.min() <= 0 or finite.max() <= 30 * finite.min():
        return False
    return bool(np.median(finite) < 0.2 * finite.max())


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
        return list(zip(_placed(distinct, log).tolist(), map(_text, distinct), strict=True))
    low, high = distinct[0], distinct[-1]
    places = np.linspace(0, 1, 5)
    values = low * (high / low) ** places if log else low + places * (high - low)
    return list(zip(places.tolist(), map(_text, values), strict=True))


def _text(value: float) -> str:
    return f"{value:.3g}"
