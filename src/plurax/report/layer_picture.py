"""Draw one layer of a found plan: its operators, how they are split, and what is sent between them.

Boxes stand in rows by their depth, parameters to the left of the operator that reads them. A value
that passes over rows, as that of a residual connection, goes down a lane on the right.
"""

import textwrap
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plurax import errors
from plurax.planner.found import Found
from plurax.planner.layer import Box, Edge, LayerGraph, Sent, layer_of
from plurax.report.colors import GREEN, GREY, ORANGE, PAPER, SKY, VERMILION, lighter
from plurax.report.picture import new_figure, saved
from plurax.report.search_picture import draw_search
from plurax.sharding.axes import Axes
from plurax.sharding.spec import TensorSharding
from plurax.tree import human_bytes

if TYPE_CHECKING:
    import matplotlib.figure
    from matplotlib.axes import Axes as Panel

FIRST, INNER, PARTIAL = lighter(SKY, 0.35), lighter(GREEN, 0.4), lighter(ORANGE, 0.4)
LINE, SENT = GREY, VERMILION
COLORS = {
    PAPER: "replicated",
    FIRST: "split in the first dim",
    INNER: "split in another dim",
    PARTIAL: "partial: terms of a sum",
}
BOX, PARAMETER, GAP, LANE = 2.9, 2.3, 0.45, 0.2
"""Inches: the widths of an operator and a parameter, between them, and of a lane."""
HEIGHT, ROW, MARGIN = 0.34, 0.58, 0.12
"""Inches: the height of a box, of a row, around all."""

LONGEST = 28
"""Characters of a function's name."""
ABOVE, NEXT, BELOW = 0.32, 0.17, 0.3
"""Inches: the heights of the title, of each further line of it, and of the legend."""
LETTERS = 11
"""The letters of the title in an inch."""

Places = list[tuple[float, float]]
"""The middle of each box, in inches."""


def draw_layer(found: Found, path: str | Path | None = None) -> "matplotlib.figure.Figure":
    """Draw the forward pass of one layer as the best plan splits it over `tensor`.

    Each box has the shape of its result; `512/4` is a dim of 512 split into 4 shards. A partial
    result is one term of a sum on each device. What is sent stands beside the line of the value, or
    in the box if it is sent within the operator. Equations in a row are one box, and those that
    have no part in the layer's output are left out.

    The guide [Pictures](../guides/pictures.md#draw_layer) shows one.

    **Arguments:** `found`, as `plurax.search` returns it; `path`, of the picture (its ending
    determines the format). Raises `PlanError` if the best plan does not use `tensor`, and
    of a population.
    """
    plan = found.ranked[0].candidate
    if plan.tensor == 1:
        raise errors.search_splits_nothing(plan.sizes_text())
    if found.shardings is None:
        raise errors.PlanError(
            "draw_layer draws how one network is split, and the search was for a population: "
            "search without members=."
        )
    solved = found.shardings.exactly(plan)
    layer = layer_of(solved)
    places, width, height = _placed(layer)
    sent = human_bytes(layer.bytes_sent) if layer.bytes_sent else "nothing"
    rows = solved.rows_of_a_microbatch
    title = (
        f"{'the network' if layer.whole else 'a layer'} over tensor={plan.tensor}: in its forward "
        f"pass of {rows:g} example{'s' if rows != 1 else ''} a device sends {sent}"
    )
    lines = textwrap.wrap(title, int(width * LETTERS))
    whole = height + ABOVE + NEXT * (len(lines) - 1) + BELOW
    figure = new_figure(width, whole, layout=None)
    axis = figure.add_axes((0, BELOW / whole, 1, height / whole))
    axis.set(xlim=(0, width), ylim=(height, 0))
    axis.axis("off")
    for edge, lane in _lanes(layer).items():
        _draw_edge(axis, layer, places, edge, lane)
    for box, (x, y) in zip(layer.boxes, places, strict=True):
        _draw_box(axis, box, x, y, solved.graph.axes)
    figure.suptitle("\n".join(lines), fontsize=10, y=1 - 0.1 / whole, va="top")
    _legend(figure, layer)
    return saved(figure, path)


def draw_found(search: Found, directory: Path) -> list[Path]:
    """Draw `search.png` into a directory, and `layer.png` if the best plan uses `tensor`."""
    directory.mkdir(parents=True, exist_ok=True)
    written = [directory / "search.png"]
    draw_search(search, written[0])
    if search.shardings is not None and search.ranked[0].candidate.tensor > 1:
        written.append(directory / "layer.png")
        draw_layer(search, written[1])
    return written


# --- Where things stand ---------------------------------------------------------------------------


def _placed(layer: LayerGraph) -> tuple[Places, float, float]:
    """Return the place of each box, and the size of all."""
    depths = layer.depths()
    rows: dict[int, list[int]] = defaultdict(list)
    parameters: dict[int, list[int]] = defaultdict(list)
    for index, box in enumerate(layer.boxes):
        (parameters if box.kind == "parameter" else rows)[depths[index]].append(index)
    most = max(map(len, rows.values()))
    left = MARGIN + (PARAMETER + GAP if parameters else 0)
    places: Places = [(0.0, 0.0)] * len(layer.boxes)
    before = defaultdict(list)
    for edge in layer.edges:
        before[edge.target].append(edge.source)
    top = MARGIN
    for depth in sorted(rows):
        tall = max(ROW, (HEIGHT + 0.06) * len(parameters[depth]) + 0.2)
        row = sorted(rows[depth], key=lambda box: _mean([places[b][0] for b in before[box]]))
        for place, index in enumerate(row):
            x = left + (place + (most - len(row)) / 2) * (BOX + GAP) + BOX / 2
            places[index] = x, top + tall / 2
        for place, index in enumerate(parameters[depth]):
            y = top + tall / 2 + (place - (len(parameters[depth]) - 1) / 2) * (HEIGHT + 0.06)
            places[index] = MARGIN + PARAMETER / 2, y
        top += tall
    lanes = 1 + max(_lanes(layer).values(), default=-1)
    width = left + most * (BOX + GAP) - GAP + (lanes + 2) * LANE + MARGIN
    return places, width, top + MARGIN


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _lanes(layer: LayerGraph) -> dict[Edge, int]:
    """Return all edges, each with its lane: -1 for those between neighboring rows."""
    depths, taken = layer.depths(), list[list[tuple[int, int]]]()
    lanes = {}
    for edge in sorted(layer.edges, key=lambda e: depths[e.target] - depths[e.source]):
        start, end = depths[edge.source], depths[edge.target]
        if end - start <= 1:
            lanes[edge] = -1
            continue
        lane = 0
        while lane < len(taken) and any(a < end and start < b for a, b in taken[lane]):
            lane += 1
        taken += [[]] if lane == len(taken) else []
        taken[lane].append((start, end))
        lanes[edge] = lane
    return lanes


# --- Drawing --------------------------------------------------------------------------------------


def _draw_edge(axis: "Panel", layer: LayerGraph, places: Places, edge: Edge, lane: int) -> None:
    """Draw the line of a value, and beside it what is sent for it."""
    (x, y), (to_x, to_y) = places[edge.source], places[edge.target]
    if layer.boxes[edge.source].kind == "parameter":
        points = [(x + PARAMETER / 2, y), (to_x - BOX / 2, to_y)]
        label = (x + PARAMETER / 2 + GAP, y + HEIGHT / 2 + 0.08, "right", 0)
        if any(other_y == to_y and x < other_x < to_x for other_x, other_y in places):
            # Other boxes are in between: from below.
            low, turn = to_y + HEIGHT / 2 + 0.1, x + PARAMETER / 2 + GAP / 3
            points = [points[0], (turn, y), (turn, low), (to_x, low), (to_x, to_y + HEIGHT / 2)]
    elif lane < 0:
        points = [(x, y + HEIGHT / 2), (to_x, to_y - HEIGHT / 2)]
        label = ((x + to_x) / 2 + 0.08, (y + to_y) / 2, "left", 0)
    else:
        right = max(place for place, _ in places) + BOX / 2 + LANE * (lane + 1)
        # What leaves a box begins below what comes to it.
        y, to_y = y + HEIGHT / 4, to_y - HEIGHT / 4
        points = [(x + BOX / 2, y), (right, y), (right, to_y), (to_x + BOX / 2, to_y)]
        label = (right, (y + to_y) / 2, "center", 90)
    color, line = SENT if edge.sent or edge.shared else LINE, 2.0 if edge.sent else 1.0
    axis.plot(*zip(*points[:-1], strict=True), color=color, linewidth=line, solid_joinstyle="round")
    arrow: dict[str, Any] = {
        "arrowstyle": "-|>", "color": color, "linewidth": line, "shrinkA": 0, "shrinkB": 0,
        "mutation_scale": 8,
    }  # fmt: skip
    axis.annotate("", points[-1], points[-2], arrowprops=arrow)
    if edge.sent:
        at_x, at_y, side, turned = label
        axis.text(at_x, at_y, _sent(edge.sent), fontsize=8, weight="bold", ha=side, va="center",
                  rotation=turned,
                  bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5})  # fmt: skip


def _draw_box(axis: "Panel", box: Box, x: float, y: float, axes: Axes) -> None:
    from matplotlib.patches import FancyBboxPatch

    width = PARAMETER if box.kind == "parameter" else BOX
    axis.add_patch(
        FancyBboxPatch(
            (x - width / 2 + 0.04, y - HEIGHT / 2 + 0.04), width - 0.08, HEIGHT - 0.08,
            boxstyle="round,pad=0.04", facecolor=_color(box.sharding), linewidth=0, zorder=2,
        )
    )  # fmt: skip
    first, second = _texts(box, axes)
    axis.text(x, y - 0.07, first, fontsize=8, ha="center", va="center", zorder=3)
    axis.text(x, y + 0.085, second, fontsize=7, ha="center", va="center", zorder=3, color="#333333")


def _color(sharding: TensorSharding) -> str:
    if sharding.partial:
        return PARTIAL
    return PAPER if not sharding.axes else FIRST if sharding.dims[0] else INNER


def _texts(box: Box, axes: Axes) -> tuple[str, str]:
    """Return the two lines of a box."""
    shape = _shape(box, axes) + (" partial" if box.sharding.partial else "")
    if box.kind in ("parameter", "input", "output"):
        return box.name.rpartition("/")[2] or box.kind, shape
    title = ", ".join(box.operators[:3]) + (", ..." if len(box.operators) > 3 else "")
    # "model.py:84 (block.<locals>.attention)" -> "attention, line 84"
    file, _, function = box.where.partition(" ")
    name = function.strip("()").rpartition(".")[2]
    name = name if len(name) <= LONGEST else f"{name[: LONGEST - 3]}..."
    line = f"{name}, line {file.rpartition(':')[2]}" if name else ""
    inside = f", {_sent(box.sent)}" if box.sent else ""
    return f"{title}{inside}", f"{shape}   {line}".strip()


def _shape(box: Box, axes: Axes) -> str:
    """Return a shape with the number of shards of each split dim, such as `8 × 512/4`."""
    dims = []
    for dim, size in enumerate(box.tensor.shape):
        shards = box.sharding.num_shards(dim, axes.sizes)
        dims.append(f"{size}/{shards}" if shards > 1 else str(size))
    return " × ".join(dims) or "scalar"


def _sent(sent: Sent) -> str:
    return ", ".join(f"{kind} {human_bytes(size)}" for kind, size in sent)


def _legend(figure: "matplotlib.figure.Figure", layer: LayerGraph) -> None:
    from matplotlib.patches import Patch

    shown = {_color(box.sharding) for box in layer.boxes}
    handles = [Patch(color=color, label=text) for color, text in COLORS.items() if color in shown]
    figure.legend(handles=handles, loc="lower center", ncols=4, frameon=False, fontsize=8,
                  columnspacing=1.4)  # fmt: skip
