"""The pictures of `docs/performance.md`, from the results of the measurements.

`benchmarks.report` calls `draw_speeds`, `draw_members` and `draw_uneven`. The palette and the
markers are those of the library's own pictures; no picture needs colour to be read.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from benchmarks import machine
from plurax.report.colors import BLACK, BLUE, GREY, LIGHT, VERMILION, line_style
from plurax.report.picture import shrink_png

Row = dict[str, Any]
CHARTS = {
    "benchmarks.png": (
        "Steps, inference, compiling and planning",
        ("step", "accumulation", "domains", "inference", "max_batch_size", "compile", "planning",
         "ranked", "callbacks"),
    ),
    "benchmarks-devices.png": (
        "Several devices, several processes",
        ("gpu", "divided", "pipelines", "servers", "uneven", "recovery", "reliability", "hosts"),
    ),
    "benchmarks-sources.png": ("Sources of data", ("sources",)),
}  # fmt: skip
"""Of each picture of speeds its title and its groups of rows."""
BY_NAME = ("sources",)
"""Groups whose lines are what was measured; those of others are the peers."""
STYLES: dict[bool | None, tuple[str, str, str, str]] = {
    True: ("o", BLUE, BLUE, "target reached"),
    False: ("<", VERMILION, "white", "target missed"),
    None: ("s", GREY, GREY, "no target"),
}
"""Marker, colour, what fills it, and the words, by whether the target was reached."""
TICKS = (0.125, 0.25, 0.5, 1, 2, 4, 8, 16, 32, 64, 128)
WIDTH, DPI, LEFT, RIGHT = 7.4, 130, 2.85, 1.15
"""The width, pixels per inch, and the columns of words, in inches."""
WORDS = 38
"""The most characters of a line's words."""
HEADING, ROW, LINE, AROUND = 0.36, 0.1, 0.17, (0.66, 0.6)
"""Inches of a heading, a row, what a line has besides, and above and below all."""


@dataclasses.dataclass(frozen=True)
class Line:
    """Rows side by side, under words; without rows a heading, with a machine at its right."""

    words: str
    rows: Sequence[Row] = ()
    where: str = ""

    @property
    def height(self) -> float:
        return ROW * len(self.rows) + LINE if self.rows else HEADING


# ---- speeds ------------------------------------------------------------------------------------


def draw_speeds(results: list[dict[str, Any]], titles: dict[str, str], folder: Path) -> list[Path]:
    """Draw each chart of `CHARTS` that has rows; return the files.

    A mark is a row of the tables, with a bar over the quartiles of its rounds and a tick at its
    target. `titles` has the title of each group.
    """
    written = []
    for name, (title, groups) in CHARTS.items():
        lines = [
            line for group in groups if group in titles
            for line in _lines(results, group, titles[group])
        ]  # fmt: skip
        if lines:
            _save(_draw_lines(title, lines), folder / name)
            written.append(folder / name)
    return written


def _lines(results: list[dict[str, Any]], group: str, title: str) -> Iterator[Line]:
    for result in results:
        sides: dict[str, list[Row]] = {}
        for row in compared(result, group):
            sides.setdefault(_words(row), []).append(row)
        if sides:
            yield Line(title, where=machine.label(result["machine"]))
            yield from (Line(words, rows) for words, rows in sides.items())


def _words(row: Row) -> str:
    """The words of a row's line: short enough for their column."""
    words = row["name"].split(", batch")[0] if row["group"] in BY_NAME else row["against"]
    words = words.removeprefix("a ").removeprefix("an ").removesuffix(", and a jitted step")
    return words if len(words) <= WORDS else f"{words[: WORDS - 2].rstrip()} …"


def _draw_lines(title: str, lines: Sequence[Line]) -> Figure:
    above, below = AROUND
    height = sum(line.height for line in lines) + above + below
    figure = Figure(figsize=(WIDTH, height), dpi=DPI, facecolor="white")
    axis = figure.add_axes(
        (LEFT / WIDTH, below / height, 1 - (LEFT + RIGHT) / WIDTH, 1 - (above + below) / height)
    )
    rows = [row for line in lines for row in line.rows]
    low = min(min(row["speed"], row["spread"][0]) for row in rows)
    high = max(max(row["speed"], row["spread"][1], row["target"] or 0) for row in rows)
    axis.set_xscale("log")
    axis.set_xlim(min(0.9 * low, 0.7), max(1.12 * high, 1.4))
    axis.set_ylim(height - above - below, 0)
    axis.axvspan(axis.get_xlim()[0], 1, color="#f2f2f2", zorder=0)
    axis.axvline(1, color=BLACK, linewidth=1.2, zorder=1)
    top = 0.0
    for line in lines:
        _draw_line(axis, top, line)
        top += line.height
    _finish(axis, title, height)
    return figure


def _draw_line(axis: Axes, top: float, line: Line) -> None:
    """A line's words, its rows one below another, and the range of their speeds."""
    figure = axis.figure
    span = WIDTH - LEFT - RIGHT
    beside = axis.get_yaxis_transform()
    if not line.rows:
        place = top + 0.62 * HEADING
        axis.axhspan(top, top + HEADING, color="white", zorder=1.5)
        axis.text(-(LEFT - 0.1) / span, place, line.words, transform=beside, va="center",
                  weight="bold", fontsize=10)  # fmt: skip
        axis.text(1 + (RIGHT - 0.1) / span, place, line.where, transform=beside, va="center",
                  ha="right", fontsize=8.5, color="#555555")  # fmt: skip
        return
    assert figure is not None
    middle = top + line.height / 2
    speeds = [row["speed"] for row in line.rows]
    axis.text(-0.12 / span, middle, line.words, transform=beside, va="center", ha="right",
              fontsize=9)  # fmt: skip
    axis.text(1 + 0.12 / span, middle, range_of(speeds), transform=beside, va="center",
              fontsize=9)  # fmt: skip
    axis.axhline(top + line.height, color=LIGHT, linewidth=0.6, zorder=0.5)
    for index, row in enumerate(line.rows):
        marker, colour, inside, _ = STYLES[row["reached"]]
        place = top + LINE / 2 + ROW * (index + 0.5)
        axis.plot(row["spread"], [place] * 2, color=colour, linewidth=1.6, zorder=2)
        axis.plot(row["speed"], place, marker, color=colour, markersize=5.2, zorder=4,
                  markerfacecolor=inside, markeredgewidth=1.2)  # fmt: skip
        if row["target"] is not None:
            axis.plot([row["target"]] * 2, [place - ROW / 2, place + ROW / 2], color=BLACK,
                      linewidth=1.4, zorder=3)  # fmt: skip


def _finish(axis: Axes, title: str, height: float) -> None:
    """The title, what the marks mean, and the axis of speeds."""
    figure = axis.figure
    for marker, colour, inside, words in STYLES.values():
        axis.plot([], [], marker, color=colour, markerfacecolor=inside, label=words,
                  markeredgewidth=1.2)  # fmt: skip
    axis.plot([], [], color="#555555", linewidth=1.6, label="quartiles")
    axis.plot([], [], "|", color=BLACK, markersize=8, markeredgewidth=1.4, label="target")
    figure.text(0.1 / WIDTH, 1 - 0.1 / height, title, fontsize=12, weight="bold", va="top")
    figure.legend(loc="upper left", bbox_to_anchor=(0.05 / WIDTH, 1 - 0.36 / height), ncols=5,
                  frameon=False, fontsize=9.5, borderaxespad=0.1, columnspacing=1.6,
                  handletextpad=0.5, handlelength=1.4)  # fmt: skip
    low, high = axis.get_xlim()
    axis.set_xticks([tick for tick in TICKS if low <= tick <= high])
    axis.set_yticks([])
    axis.minorticks_off()
    axis.xaxis.set_major_formatter("{x:g} ×")
    axis.tick_params(labelsize=9.5)
    axis.set_xlabel("slower   ←   times as fast as the peer   →   faster", fontsize=9.5)
    axis.spines[["top", "right", "left"]].set_visible(False)


# ---- populations, and uneven workers ---------------------------------------------------------


def draw_members(results: list[dict[str, Any]], path: Path) -> None:
    """Draw speed over the number of networks: a panel a population, a line a peer."""
    panels: dict[str, list[Row]] = {}
    for result in results:
        for row in compared(result, "members"):
            facts = row["facts"]
            title = f"{facts['case']}: {facts['parameters']:,} parameters"
            panels.setdefault(f"{title}\n{machine.label(result['machine'])}", []).append(row)
    if not panels:
        return
    peers = list(dict.fromkeys(row["against"] for rows in panels.values() for row in rows))

    def draw(axis: Axes, rows: list[Row]) -> None:
        for index, peer in enumerate(peers):
            points = sorted(
                (row["facts"]["members"], row["speed"], *row["spread"])
                for row in rows if row["against"] == peer
            )  # fmt: skip
            if points:
                many, speeds, low, high = zip(*points, strict=True)
                style = line_style(index)
                axis.vlines(many, low, high, color=style["color"], linewidth=3.2, alpha=0.45)
                axis.plot(many, speeds, **style, linewidth=1.6, markersize=6, label=peer)
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.axhline(1, color=BLACK, linewidth=1.2, zorder=1.9)
        axis.set_xlabel("networks (bars: quartiles)")
        axis.xaxis.set_major_formatter("{x:,.0f}")
        axis.yaxis.set_major_formatter("{x:g} ×")
        axis.minorticks_off()

    figure = _panels(panels, draw, "times as fast as the peer", share=True, columns=2)
    _save(figure, path)


def draw_uneven(results: list[dict[str, Any]], path: Path) -> None:
    """Draw held-out loss over seconds: a panel an example, a line a way to train.

    Every epoch takes the median of the epochs after the first, as in the tables. A large mark is
    where the goal is reached first.
    """
    panels: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        for row in result["rows"]:
            if (row["row"], row["group"]) == ("check", "uneven"):
                title = f"{row['facts']['data']}\n{machine.label(result['machine'])}"
                panels.setdefault(title, []).append(row["facts"])
    if not panels:
        return

    def draw(axis: Axes, ways: list[dict[str, Any]]) -> None:
        goal = ways[0]["goal"]
        for index, facts in enumerate(ways):
            losses, style = facts["losses"], line_style(index)
            seconds = [facts["epoch"] * (epoch + 1) for epoch in range(len(losses))]
            reached = (epoch for epoch, loss in enumerate(losses) if loss <= goal)
            there = next(reached, len(losses))
            # fmt: off
            # Behind the goal no line says more: it is drawn faintly.
            axis.semilogy(seconds[: there + 1], losses[: there + 1], **style, markersize=4,
                          linewidth=1.7, label=facts["way"])
            axis.plot(seconds[there:], losses[there:], color=style["color"], linewidth=0.8,
                      alpha=0.45)
            axis.plot(seconds[there : there + 1], losses[there : there + 1], style["marker"],
                      color=style["color"], markersize=9, markeredgecolor="white", zorder=4)
            # fmt: on
        axis.axhline(goal, color=BLACK, linewidth=1, linestyle=":")
        axis.text(1.0, goal, f"goal {goal:g} ", transform=axis.get_yaxis_transform(),
                  va="bottom", ha="right", fontsize=9)  # fmt: skip
        axis.set_xlabel("seconds")
        axis.set_xlim(left=0)
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_locator(NullLocator())

    _save(_panels(panels, draw, "held-out loss", share=False, columns=5), path)


def _panels(
    panels: dict[str, Any], draw: Callable[[Axes, Any], None], ylabel: str, *, share: bool,
    columns: int,
) -> Figure:  # fmt: skip
    """Draw each panel under its title, with one legend above all."""
    figure = Figure(figsize=(WIDTH, 4.1), dpi=DPI, facecolor="white", layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=share, squeeze=False)[0]
    for (title, content), axis in zip(panels.items(), axes, strict=True):
        draw(axis, content)
        axis.set_title(title, fontsize=10)
        axis.grid(color=LIGHT, linewidth=0.6)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel(ylabel)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=columns,
                  frameon=False, fontsize=9.5, handlelength=3.2)  # fmt: skip
    return figure


# ---- what several have in common ---------------------------------------------------------------


def compared(result: dict[str, Any], group: str) -> list[Row]:
    """The comparisons of a group."""
    return [row for row in result["rows"] if (row["row"], row["group"]) == ("comparison", group)]


def speed_of(speed: float) -> str:
    """Three digits, more before the point, two after it at most."""
    return f"{speed:.{2 if speed < 10 else 1 if speed < 100 else 0}f}"


def range_of(speeds: Sequence[float]) -> str:
    """The lowest and the highest speed, or the one where they read the same."""
    low, high = speed_of(min(speeds)), speed_of(max(speeds))
    return f"{low} ×" if low == high else f"{low} to {high} ×"


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path)
    shrink_png(path)
