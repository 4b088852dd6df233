"""Draw estimates and searches: seconds and memory by part, and time against memory."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from plurax import errors
from plurax.analysis.estimate import Estimate, human_seconds
from plurax.planner.found import Found, Ranked
from plurax.report.colors import (
    BLUE,
    GREEN,
    GREY,
    LIGHT,
    ORANGE,
    PAPER,
    PURPLE,
    SKY,
    VERMILION,
    YELLOW,
    lighter,
)
from plurax.report.picture import new_figure, saved
from plurax.tree import human_bytes

if TYPE_CHECKING:
    import matplotlib.figure
    from matplotlib.axes import Axes
    from matplotlib.figure import SubFigure

PARTS = {
    "matrix products": SKY,
    "memory traffic": lighter(SKY, 0.6),
    "collectives over tensor": ORANGE,
    "collectives over data": lighter(ORANGE, 0.55),
    "collectives over pipeline": lighter(VERMILION, 0.3),
    "starting kernels": lighter(GREY, 0.35),
    "pipeline bubble": LIGHT,
    "collectives over several axes": YELLOW,
    "optimizer's update": lighter(GREEN, 0.2),
}
KINDS = {
    "parameters": SKY,
    "gradients": lighter(SKY, 0.6),
    "optimizer": lighter(GREEN, 0.2),
    "model_state": PURPLE,
    "batch": lighter(GREY, 0.35),
    "temporaries": ORANGE,
}
CHOSEN, FITS, OUTSIDE, PALE = BLUE, lighter(BLUE, 0.5), VERMILION, lighter(GREY, 0.4)
WIDTH, PLAN, LEGEND, FRONTIER = 9.0, 0.5, 1.1, 3.0
"""Inches: the width, and the heights of a plan's bars, of legends with titles, of the frontier."""
CHARACTER = 3.7
"""Points taken by one character of a value inside a bar."""


def draw_estimates(
    estimates: Mapping[str, Estimate], path: str | Path | None = None
) -> "matplotlib.figure.Figure":
    """Draw where the time of a step goes, and the memory of a device by kind, one bar per plan.

    The guide [Pictures](../guides/pictures.md#draw_estimates) shows one.

    **Arguments:** `estimates`, as `plurax.estimate` returns them, by their names in the picture;
    `path`, of the picture (its ending determines the format). Raises `BatchError` without any.
    """
    if not estimates:
        raise errors.picture_of_nothing("draw_estimates", "estimate: {name: plurax.estimate(...)}")
    figure = new_figure(WIDTH, LEGEND + PLAN * len(estimates))
    (part,) = figure.subfigures(1, 1, squeeze=False)[:, 0]
    limit = min(estimate.machine.memory for estimate in estimates.values())
    _draw_bars(part, estimates, limit)
    return saved(figure, path)


def draw_search(found: Found, path: str | Path | None = None) -> "matplotlib.figure.Figure":
    """Draw what a search found: the ranked plans' time and memory, and time against memory.

    The lower panel has every plan that was estimated, those that do not fit too. The line joins
    plans than which no other one takes both less time and less memory.

    The guide [Pictures](../guides/pictures.md#draw_search) shows one.

    **Arguments:** `found`, as `plurax.search` returns it; `path`, of the picture (its ending
    determines the format).
    """
    ranked = {
        f"{rank}  {plan.plan.sizes_text()}": plan.estimate
        for rank, plan in enumerate(found.ranked, 1)
        if plan.estimate is not None
    }
    heights = (LEGEND + PLAN * len(ranked), FRONTIER)
    figure = new_figure(WIDTH, sum(heights))
    bars, below = figure.subfigures(2, 1, height_ratios=heights, squeeze=False)[:, 0]
    _draw_bars(bars, ranked, found.memory)
    _draw_frontier(below.subplots(), found)
    return saved(figure, path)


# --- Bars -----------------------------------------------------------------------------------------


def _draw_bars(part: "SubFigure", estimates: Mapping[str, Estimate], limit: float) -> None:
    """Draw seconds on the left and bytes on the right; a plan's name is above both of its bars."""
    left, right = part.subplots(1, 2)
    every = list(estimates.values())
    _stacked(left, [seconds_of(estimate) for estimate in every], PARTS, human_seconds)
    left.set_title("seconds of a step", fontsize=9.5, loc="left")
    _stacked(right, [estimate.memory for estimate in every], KINDS, human_bytes)
    largest = max(estimate.peak for estimate in every)
    if largest > limit / 4:
        right.set_xlim(0, 1.24 * max(largest, limit))
        right.axvline(limit, color="black", linewidth=1, linestyle="--", zorder=1)
    title = f"memory of a device, of {human_bytes(limit)}"
    right.set_title(title, fontsize=9.5, loc="left")
    right.patch.set_visible(False)  # a plan's name may be longer than its bars
    for row, name in enumerate(estimates):
        left.text(0, row - 0.3, name, fontsize=7.5, va="bottom", in_layout=False)


def seconds_of(estimate: Estimate) -> dict[str, float]:
    """Return `Estimate.parts`, with the collectives over several axes together."""
    parts: dict[str, float] = {}
    for name, seconds in estimate.parts().items():
        name = "collectives over several axes" if "+" in name else name
        parts[name] = parts.get(name, 0.0) + seconds
    return parts


def _stacked(
    axis: "Axes",
    rows: Sequence[Mapping[str, float]],
    colors: Mapping[str, str],
    text: Callable[[float], str],
) -> None:
    """Draw one bar for each row, cut into its parts, with the sum at its end."""
    end = 1.24 * max(sum(row.values()) for row in rows)
    points = 72 * (WIDTH / 2 - 0.4) / end
    for row, parts in enumerate(rows):
        at = 0.0
        for name, color in colors.items():
            size = parts.get(name, 0.0)
            axis.barh(row, size, left=at, color=color, height=0.5, edgecolor="white",
                      linewidth=0.5, zorder=2, hatch=_hatch(name))  # fmt: skip
            value = text(size)
            if CHARACTER * (len(value) + 1) < points * size:
                axis.text(at + size / 2, row, value, ha="center", va="center", fontsize=6.5)
            at += size
        axis.text(at + 0.012 * end, row, text(at), va="center", fontsize=8, zorder=3,
                  bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8})  # fmt: skip
    axis.set_xlim(0, end)
    axis.set_ylim(len(rows) - 0.6, -0.75)
    axis.set_xticks([])
    axis.set_yticks([])
    axis.spines[:].set_visible(False)
    from matplotlib.patches import Patch

    visible = [name for name in colors if max(row.get(name, 0.0) for row in rows) > 2e-3 * end]
    handles = [
        Patch(facecolor=colors[name], edgecolor="white", linewidth=0, hatch=_hatch(name),
              label=name.replace("_", " "))
        for name in visible
    ]  # fmt: skip
    axis.legend(handles=handles, loc="upper left", bbox_to_anchor=(-0.02, 0.0), ncols=3,
                frameon=False, fontsize=7, handlelength=1.0, handletextpad=0.5,
                columnspacing=1.0)  # fmt: skip


def _hatch(name: str) -> str:
    """What is sent is hatched, so that it is seen without colours."""
    return "////" if name.startswith("collectives") else ""


# --- Time against memory --------------------------------------------------------------------------


class Point(NamedTuple):
    """An estimated plan: its `rank`, 0 if it has none, `memory` in bytes, and `seconds`."""

    rank: int
    memory: float
    seconds: float
    plan: str


def points_of(search: Found) -> list[Point]:
    """Return all plans of a search that were estimated, the ranked ones first."""

    def point(rank: int, plan: Ranked) -> Point:
        return Point(rank, plan.memory, plan.seconds, plan.plan.sizes_text())

    ranked = [point(rank, plan) for rank, plan in enumerate(search.ranked, 1)]
    others = [*search.slower, *search.refused]
    return ranked + [point(0, plan) for plan in others if plan.estimate is not None]


def frontier(points: Sequence[Point]) -> list[Point]:
    """Return the points than which no other has both less memory and fewer seconds, by memory."""
    best: list[Point] = []
    for candidate in sorted(points, key=lambda point: (point.memory, point.seconds)):
        if not best or candidate.seconds < best[-1].seconds:
            best.append(candidate)
    return best


def _draw_frontier(axis: "Axes", search: Found) -> None:
    """Draw the estimated plans; far slower ones that do not fit, either, would hide the others."""
    every, limit, tried = points_of(search), search.memory, search.candidates
    slowest = max(p.seconds for p in every if p.memory <= limit)
    points = [p for p in every if p.seconds <= 1.2 * slowest]
    best = frontier(points)
    axis.step([p.memory for p in best], [p.seconds for p in best], where="post", color=PALE,
              linewidth=1.2, zorder=1)  # fmt: skip
    for marker, color, size, shown in (
        ("o", FITS, 22, [p for p in points if p.memory <= limit and not p.rank]),
        ("o", CHOSEN, 30, [p for p in points if p.rank > 1]),
        ("x", OUTSIDE, 30, [p for p in points if p.memory > limit]),
        ("*", CHOSEN, 150, points[:1]),
    ):
        axis.scatter([p.memory for p in shown], [p.seconds for p in shown], s=size, color=color,
                     marker=marker, zorder=3, linewidths=1.3 if marker == "x" else 0)  # fmt: skip
    for point in points:
        if point.rank:
            # Nothing is below the fastest plan, and above it may be others.
            place, first = (point.memory, point.seconds), point.rank == 1
            _label(axis, "1, chosen" if first else str(point.rank), place, below=first)
    _scale(axis, points, limit)
    axis.set_xlabel("memory of a device", fontsize=8.5)
    axis.set_ylabel("seconds of a step", fontsize=8.5)
    left_out = len(every) - len(points)
    text = f"time against memory: the {len(every)} plans that were estimated, of {tried}"
    text += f"; {left_out} slower ones are not shown" if left_out else ""
    axis.set_title(text, fontsize=9.5, loc="left")
    axis.spines[["top", "right"]].set_visible(False)


def _label(axis: "Axes", text: str, place: tuple[float, float], *, below: bool = False) -> None:
    """Write a text to the right above a place, or to the left below it, over what is there."""
    from matplotlib.patheffects import withStroke

    axis.annotate(
        text, place, (-4, -4) if below else (4, 4), textcoords="offset points",
        ha="right" if below else "left", va="top" if below else "baseline",
        fontsize=8, path_effects=[withStroke(linewidth=2, foreground="white")],
    )  # fmt: skip


def _scale(axis: "Axes", points: Sequence[Point], limit: float) -> None:
    """Scale both axes to the points, and draw the limit of memory if it is near them."""
    from matplotlib.ticker import EngFormatter, FuncFormatter, MultipleLocator

    bottom, top = _range([p.seconds for p in points])
    sizes = [p.memory for p in points]
    left, right = _range([*sizes, limit] if max(sizes) > limit / 2 else sizes)
    axis.set_xlim(left, right)
    axis.set_ylim(bottom, top)
    axis.xaxis.set_major_locator(MultipleLocator(2 ** math.floor(math.log2((right - left) / 4))))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda size, _: human_bytes(size)))
    axis.yaxis.set_major_formatter(EngFormatter(unit="s"))
    axis.tick_params(labelsize=8)
    if left < limit < right:
        axis.axvspan(limit, right, color=PAPER, linewidth=0, zorder=0)
        axis.axvline(limit, color="black", linewidth=1, linestyle="--", zorder=0)
        _label(axis, f"limit {human_bytes(limit)}", (limit, top), below=True)
        if max(sizes) > limit:
            _label(axis, "does not fit", (limit, bottom))


def _range(values: Sequence[float]) -> tuple[float, float]:
    """Return where an axis begins and ends: at zero, unless the values are far from it."""
    least, most = min(values), max(values)
    start = 0.0 if least < most / 3 else least - 0.15 * max(most - least, 0.1 * most)
    return start, most + 0.15 * (most - start)
