"""Draw runs with parameter servers: how stale gradients were, what the loss did, who waited."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from plurax.loop.log_rows import Row, read_rows
from plurax.report.colors import (
    BLUE,
    GREEN,
    HATCHES,
    LIGHT,
    ORANGE,
    PALETTE,
    PURPLE,
    SKY,
    VERMILION,
    line_style,
)
from plurax.report.lanes import WORK, Lane, worker_lanes
from plurax.report.picture import legend_below, new_figure, saved, tidy
from plurax.report.run_series import RunSeries
from plurax.server.record import FILE, read_events

if TYPE_CHECKING:
    import matplotlib.figure
    from matplotlib.axes import Axes

KINDS = {"gradient": BLUE, "dropped": ORANGE, "pulling": PURPLE, "waiting": LIGHT, "starting": SKY}
"""The colour of what a worker does."""
HATCHED = {"dropped": HATCHES[1], "pulling": HATCHES[2], "starting": HATCHES[3]}
SERVER, DEATH = GREEN, VERMILION
SMOOTHED = 25
"""A loss is the mean over this part of its run."""
LANE, AROUND = 0.3, 1.4
"""Heights in inches: of a row of the timeline, and the space around all of them."""


# --- Staleness and loss ---------------------------------------------------------------------------


def draw_servers(
    runs: Mapping[str, Sequence[Row] | str | Path], path: str | Path | None = None
) -> "matplotlib.figure.Figure":
    """Draw the staleness of some runs, and their loss against updates and against seconds.

    The guide [Pictures](../guides/pictures.md#draw_servers) shows one.

    **Arguments:** `runs`, by name, each its output directory or the rows of its `metrics.jsonl`;
    `path` of the picture (its ending determines the format).

    A loss is the mean over a twenty-fifth of its run. Seconds are those of the epochs' rows without
    the first call, which compiles; within an epoch every update takes as long.
    """
    read = {name: _rows(run) for name, run in runs.items()}
    figure = new_figure(12.0, 3.9)
    staleness, updates, seconds = figure.subplots(1, 3)
    _draw_staleness(staleness, read)
    _draw_losses(updates, seconds, read)
    for axis in (staleness, updates, seconds):
        tidy(axis)
    legend_below(figure, staleness)
    return saved(figure, path)


def _rows(run: Sequence[Row] | str | Path) -> list[Row]:
    if isinstance(run, str | Path):
        return list(read_rows(Path(run) / "metrics.jsonl"))
    return list(run)


def _draw_staleness(axis: "Axes", runs: Mapping[str, Sequence[Row]]) -> None:
    """Draw for each run which share of its gradients was how stale."""
    from matplotlib.ticker import MaxNLocator

    width = 0.8 / max(1, len(runs))
    for index, (name, rows) in enumerate(runs.items()):
        # A push that was refused weighs nothing.
        taken = [row for row in rows if row["kind"] == "step" and row.get("weight")]
        counts = Counter(round(row["staleness"]) for row in taken if "staleness" in row)
        total = max(1, counts.total())
        mean = sum(versions * count for versions, count in counts.items()) / total
        places = np.array(sorted(counts), float) + (index - (len(runs) - 1) / 2) * width
        shares = [100 * counts[versions] / total for versions in sorted(counts)]
        axis.bar(places, shares, width, color=PALETTE[index % len(PALETTE)], edgecolor="white",
                 linewidth=0, hatch=HATCHES[index % len(HATCHES)],
                 label=f"{name} (staleness {mean:.1f} on average)")  # fmt: skip
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.set_xlabel("staleness: updates since the parameters were pulled")
    axis.set_ylabel("% of gradients")


def _draw_losses(updates: "Axes", seconds: "Axes", runs: Mapping[str, Sequence[Row]]) -> None:
    """Draw the loss of each run against its updates, and against time."""
    from matplotlib.ticker import LogLocator, NullLocator

    ends, smooth = list[float](), False
    for index, rows in enumerate(runs.values()):
        run = RunSeries(rows)
        loss = run.steps("loss")
        finite = np.isfinite(loss.values)
        if not finite.any():
            continue
        over = max(1, finite.sum() // SMOOTHED)
        style = {**line_style(index), "marker": "", "linewidth": 1.4}
        smooth |= over > 1
        steps = loss.steps[finite][over - 1 :]
        means = np.convolve(loss.values[finite], np.full(over, 1 / over), "valid")
        updates.plot(steps, means, **style)
        at = _seconds(steps, run.epochs)
        seconds.plot(at[np.isfinite(at)], means[np.isfinite(at)], **style)
        ends += [means.min(), means.max()]
    for axis, x in ((updates, "updates"), (seconds, "seconds, without the first call")):
        axis.set_xlabel(x)
        axis.set_ylabel("loss, running mean" if smooth else "loss")
        if ends and min(ends) > 0 and max(ends) > 10 * min(ends):
            axis.set_yscale("log")
            axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.yaxis.set_major_formatter("{x:g}")
            axis.yaxis.set_minor_locator(NullLocator())


def _seconds(steps: np.ndarray, epochs: Sequence[Row]) -> np.ndarray:
    """Return when steps were taken; NaN for those after the last epoch that has a row."""
    epochs = [row for row in epochs if row["examples_per_second"] > 0]
    if not epochs:
        return np.full(len(steps), np.nan)
    took = np.cumsum([row["examples"] / row["examples_per_second"] for row in epochs])
    at = [0, *(row["step"] for row in epochs)]
    return np.interp(steps, at, [0.0, *took], right=np.nan)


# --- Workers over time ----------------------------------------------------------------------------


def draw_workers(output: str | Path, path: str | Path | None = None) -> "matplotlib.figure.Figure":
    """Draw what each worker and server of a run did over time, with waits and deaths.

    The guide [Pictures](../guides/pictures.md#draw_workers) shows one.

    **Arguments:** `output`, the directory of a run with `servers.jsonl`; `path` of the picture (its
    ending determines the format). Of a run that was resumed the parts stand one after the other,
    with a dotted line between them.
    """
    lanes, resumed, end = worker_lanes(read_events(Path(output) / FILE))
    figure = new_figure(9.0, AROUND + LANE * len(lanes))
    axis = figure.subplots()
    for row, lane in enumerate(lanes.values()):
        for kind, spans in lane.spans.items():
            color = SERVER if kind == "server" else KINDS[kind]
            height = 0.16 if kind == "server" else 0.72
            axis.broken_barh(spans, (row - height / 2, height), facecolors=color, linewidth=0,
                             edgecolor="white", hatch=HATCHED.get(kind))  # fmt: skip
        if lane.saved:
            axis.vlines(lane.saved, row - 0.24, row + 0.24, color=SERVER, linewidth=0.9)
        for at, words in lane.deaths:
            axis.plot(at, row, "X", color=DEATH, markeredgecolor="white", markersize=9)
            axis.annotate(words, (at, row), (7, 5), textcoords="offset points", fontsize=7.5)
    for at in resumed:
        axis.axvline(at, color="black", linestyle=":", linewidth=0.9)
    # Before it no worker has started.
    begin = min((start for lane in lanes.values() for kind, spans in lane.spans.items()
                 if kind != "server" for start, _ in spans), default=0.0)  # fmt: skip
    axis.set(
        xlim=(begin, end if end > begin else begin + 1),
        ylim=(len(lanes) - 0.4, -0.6),
        xlabel="seconds since the start",
    )
    axis.set_yticks(range(len(lanes)), lanes)
    axis.spines[["top", "right"]].set_visible(False)
    _legend_of_workers(figure, lanes)
    return saved(figure, path)


def _legend_of_workers(figure: "matplotlib.figure.Figure", lanes: Mapping[str, Lane]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    there = {kind for lane in lanes.values() for kind in lane.spans}
    shown: list[Patch | Line2D] = [
        Patch(facecolor=color, edgecolor="white", linewidth=0, hatch=HATCHED.get(kind),
              label=WORK[kind])
        for kind, color in KINDS.items() if kind in there
    ]  # fmt: skip
    if any(lane.saved for lane in lanes.values()):
        shown.append(Line2D([], [], color=SERVER, marker="|", label="server, and its snapshots"))
    if any(lane.deaths for lane in lanes.values()):
        shown.append(Line2D([], [], color=DEATH, marker="X", linestyle="", label="ended"))
    figure.legend(
        handles=shown, loc="outside lower center", ncols=min(3, len(shown)), frameon=False
    )
