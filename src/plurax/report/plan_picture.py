"""Draw a plan: its pipeline over time, memory by kind, and the bytes a device sends."""

import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from plurax import errors
from plurax.collective import Collective, by_kind, in_a_step
from plurax.hlo.memory import Memory
from plurax.pipeline.schedule import Schedule
from plurax.pipeline.simulation import Timeline
from plurax.report import lanes
from plurax.report.colors import BLUE, PAPER
from plurax.report.picture import new_figure, saved
from plurax.report.plan_tables import kinds_of_memory
from plurax.report.timeline import COLOURS, Compared, ScheduleCosts
from plurax.sharding.parameter_info import ParameterInfo
from plurax.strategies import Strategies
from plurax.tree import human_bytes

if TYPE_CHECKING:
    import matplotlib.figure
    from matplotlib.axes import Axes
    from matplotlib.figure import SubFigure

WIDTH, WIDER = 9.0, 14.0
"""Widths in inches; the wider one where schedules are compared."""
DEVICE, AROUND, REASON, LEGEND = 0.24, 0.62, 0.7, 0.5
"""Heights in inches: of a device in a timeline, the space around one, a reason, a legend."""
MEMORY, COMPARED, BAR = 3.6, 2.2, 0.36
"""Heights in inches: of a plan's bars (at least), of compared schedules' bars, and of one bar with
two lines of text."""
NOTE = 0.17
"""The height of a line of text in inches."""
DIGIT = 4.6
"""Points taken by one digit of a microbatch's number."""
LATER = 0.6
"""The opacity of a device's next stage relative to the previous one."""


def draw_plan(
    title: str,
    parameters: Sequence[ParameterInfo],
    memory: Memory,
    sent: Sequence[Collective],
    path: str | Path | None = None,
    pipeline: ScheduleCosts | None = None,
    compared: Compared | None = None,
    strategies: Strategies | None = None,
) -> "matplotlib.figure.Figure":
    """Draw memory per device by kind, and bytes that a device sends by collective and axis, as PNG.

    Above them are the timelines of a `pipeline`, or of all schedules that it is `compared` with;
    below them the plan's `strategies`, one line each.
    """
    parts: list[tuple[float, Callable[[SubFigure], None]]] = []
    if compared is not None:
        height = LEGEND + sum(map(_row_height, compared.values()))
        parts.append((height, lambda part: _draw_schedules(part, compared)))
        parts.append((COMPARED, lambda part: _draw_compared(part, compared)))
    elif pipeline is not None:
        named = pipeline.timelines.captioned(f"{pipeline.schedule.name}, ")
        height = LEGEND + len(named) * (AROUND + DEVICE * pipeline.schedule.devices)
        parts.append((height, lambda part: _draw_timelines(part, named)))
    under = f" under {pipeline.schedule.name}" if compared is not None and pipeline else ""
    sizes, wires = kinds_of_memory(parameters, memory), _wires(sent)
    height = max(MEMORY, AROUND + BAR * len(wires))
    parts.append((height, lambda part: _draw_memory(part, sizes, memory.peak, wires, under)))
    if strategies:
        notes = strategies.lines()
        parts.append((NOTE * (len(notes) + 1), lambda part: _write(part, notes)))
    heights = [height for height, _ in parts]
    width = WIDTH if compared is None else WIDER
    figure = new_figure(width, sum(heights))
    figure.suptitle(title, fontsize=10)
    figures = figure.subfigures(len(parts), 1, height_ratios=heights, squeeze=False)[:, 0]
    for part, (_, draw) in zip(figures, parts, strict=True):
        draw(part)
    return saved(figure, path)


def draw_schedules(
    schedules: Sequence[Schedule], path: str | Path | None = None
) -> "matplotlib.figure.Figure":
    """Draw the timelines of schedules, one above the other, as PNG, before anything runs.

    The guide [Pictures](../guides/pictures.md#draw_schedules) shows one.

    **Arguments:** `schedules`, of any sizes; `path` of the picture. Each is drawn with every device
    starting as soon as it can and, where that differs, in lockstep, as a program runs it.

    Raises `PlanError` where devices wait for each other for ever.
    """
    shown: dict[str, Timeline] = {}
    for schedule in schedules:
        shown |= lanes.timelines_of(schedule).captioned(f"{schedule.name}, ")
    if not shown:
        raise errors.argument_misfits(
            "plurax.pipeline.draw_schedules", "schedules", "[]", "at least one schedule"
        )
    devices = sum(timeline.schedule.devices for timeline in shown.values())
    figure = new_figure(WIDTH, LEGEND + AROUND * len(shown) + DEVICE * devices)
    (part,) = figure.subfigures(1, 1, squeeze=False)[:, 0]
    _draw_timelines(part, shown)
    return saved(figure, path)


# --- Timelines ------------------------------------------------------------------------------------


def _draw_timelines(part: "SubFigure", timelines: Mapping[str, Timeline]) -> None:
    """Draw timelines one above the other, by their captions."""
    heights = [AROUND + DEVICE * timeline.schedule.devices for timeline in timelines.values()]
    axes = part.subplots(len(timelines), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    end = max(timeline.length for timeline in timelines.values())
    for axis, (caption, timeline) in zip(axes, timelines.items(), strict=True):
        _draw_timeline(axis, timeline, caption, end, WIDTH - 1.3)
    axes[-1].set_xlabel("time, in forwards of one microbatch through a device", fontsize=8)
    _legend(part, [timeline.schedule for timeline in timelines.values()])


def _draw_schedules(part: "SubFigure", compared: Compared) -> None:
    """Draw one row per schedule: its two timelines side by side, or why it cannot run."""
    heights = [_row_height(costs) for costs in compared.values()]
    rows = part.subplots(len(compared), 2, height_ratios=heights, squeeze=False)
    able = [costs for costs in compared.values() if isinstance(costs, ScheduleCosts)]
    end = max(max(costs.timelines.ideal.length, costs.timelines.lockstep.length) for costs in able)
    last: Sequence[Axes] = ()
    for (left, right), (name, costs) in zip(rows, compared.items(), strict=True):
        if isinstance(costs, str):
            for axis in (left, right):
                axis.axis("off")
            text = textwrap.fill(f"{name} cannot run: {costs}", 150)
            left.text(0, 0.5, text, fontsize=8.5, va="center", in_layout=False,
                      transform=left.transAxes)  # fmt: skip
            continue
        width = WIDER / 2 - 1.2
        _draw_timeline(left, costs.timelines.ideal, f"{name}, {lanes.AS_SOON}", end, width)
        _draw_timeline(right, costs.timelines.lockstep, f"{name}, {lanes.LOCKSTEP}", end, width)
        last = (left, right)
    for axis in last:
        axis.set_xlabel("time, in forwards of one microbatch through a device", fontsize=8)
    _legend(part, [costs.schedule for costs in able])


def _row_height(costs: ScheduleCosts | str) -> float:
    return REASON if isinstance(costs, str) else AROUND + DEVICE * costs.schedule.devices


def _draw_timeline(axis: "Axes", timeline: Timeline, name: str, end: float, inches: float) -> None:
    """Draw devices downwards and time to the right until `end`, about `inches` wide."""
    schedule = timeline.schedule
    chunks = schedule.chunks
    points = 72 * inches / end / chunks
    axis.axvspan(0, timeline.length, color=PAPER, linewidth=0, zorder=0)
    for device, line in enumerate(lanes.blocks(timeline)):
        alike: dict[tuple[str, int], list[tuple[float, float]]] = {}
        for block in line:
            left, width = block.start / chunks, (block.end - block.start) / chunks
            alike.setdefault((block.action.kind, block.action.chunk), []).append((left, width))
            label = str(block.action.microbatch)
            if DIGIT * len(label) <= points:
                axis.text(left + width / 2, device, label, ha="center", va="center", fontsize=6)
        for (kind, chunk), boxes in alike.items():
            axis.broken_barh(
                boxes, (device - 0.46, 0.92), facecolor=COLOURS[kind], alpha=LATER**chunk,
                edgecolor="white", linewidth=min(0.5, points / 10),
            )  # fmt: skip
    devices = range(schedule.devices)
    axis.set_yticks(devices, [lanes.stages_of(schedule, device) for device in devices], fontsize=7)
    axis.set_ylim(schedule.devices - 0.5, -0.5)
    axis.set_ylabel("stage" if chunks == 1 else "stages", fontsize=8)
    axis.set_xlim(0, end)
    axis.tick_params(axis="x", labelsize=7)
    stored = axis.secondary_yaxis("right")
    stored.set_yticks(devices, [f"{n / chunks:g}" for n in timeline.stored], fontsize=7)
    stored.set_ylabel("stored", fontsize=8)
    for side in (axis, stored):
        side.tick_params(axis="y", length=0)
        side.spines[:].set_visible(False)
    axis.set_title(lanes.titled(name, timeline), fontsize=9, loc="left")


def _legend(part: "SubFigure", schedules: Sequence[Schedule]) -> None:
    kinds: Mapping[str, str] = lanes.kinds_of_work(schedules[0])
    if len({schedule.split for schedule in schedules}) > 1:
        kinds = {
            "F": "forward",
            "B": "backward; of half the length: gradient of input",
            "W": "gradient of weights",
        }
    from matplotlib.patches import Patch

    shown = [Patch(color=COLOURS[kind], label=text) for kind, text in kinds.items()]
    if any(schedule.chunks > 1 for schedule in schedules):
        shown.append(Patch(color=COLOURS["F"], alpha=LATER, label="paler: a device's later stage"))
    shown.append(Patch(color=PAPER, label="idle"))
    part.legend(
        handles=shown, loc="outside lower center", ncols=len(shown), frameon=False, fontsize=8,
        title="in boxes: microbatches; right: of how many a device stores activations, at most",
        title_fontsize=8,
    )  # fmt: skip


def _write(part: "SubFigure", notes: Sequence[str]) -> None:
    """Write lines below each other, all but the first indented."""
    for row, line in enumerate(notes):
        place = (0.03 if row else 0.015, 1 - (row + 0.5) / (len(notes) + 1))
        part.text(*place, line, fontsize=8, va="center")


# --- Bars -----------------------------------------------------------------------------------------


def _draw_compared(part: "SubFigure", compared: Compared) -> None:
    """Draw the costs that differ between schedules, one panel per number."""
    able = {name: costs for name, costs in compared.items() if isinstance(costs, ScheduleCosts)}
    numbers: list[tuple[str, Callable[[ScheduleCosts], float], Callable[[float], str]]] = [
        ("bubble, in lockstep", lambda costs: costs.timelines.lockstep.bubble, lanes.percent),
        ("stored at most, in microbatches",
         lambda costs: max(costs.timelines.ideal.stored) / costs.schedule.chunks, "{:g}".format),
        ("exchanged by a device in a step", lambda costs: costs.exchanged, human_bytes),
        ("temporaries per device", lambda costs: costs.memory.temporaries, human_bytes),
    ]  # fmt: skip
    for axis, (title, number, text) in zip(part.subplots(1, 4), numbers, strict=True):
        _bars(axis, {name: number(costs) for name, costs in able.items()}, title, text)


def _draw_memory(
    part: "SubFigure", sizes: Mapping[str, int], peak: int, wires: Mapping[str, float], under: str
) -> None:
    left, right = part.subplots(1, 2)
    kinds = {kind: size for kind, size in sizes.items() if size > 1e-3 * peak}
    _bars(left, kinds, f"memory per device{under}: {human_bytes(peak)}")
    if wires:
        total = human_bytes(sum(wires.values()))
        _bars(right, wires, f"sent by a device in a step{under}: {total}")
    else:
        right.text(0.5, 0.5, "no communication", ha="center", va="center")
        right.axis("off")


def _wires(sent: Sequence[Collective]) -> dict[str, float]:
    """Return the bytes that a device sends, by collective and axis."""
    return {
        f"{kind}\nover {', '.join(axes)}": in_a_step(group, lambda record: record.bytes_sent)
        for (kind, axes), group in by_kind(sent).items()
    }


def _bars(
    axis: "Axes",
    sizes: Mapping[str, float],
    title: str,
    text: Callable[[float], str] = human_bytes,
) -> None:
    names, values = list(sizes), list(sizes.values())
    positions = range(len(names))
    axis.barh(positions, values, color=BLUE, height=0.6)
    axis.set_yticks(positions, names, fontsize=8)
    axis.set_ylim(max(len(names), 4) - 0.5, -0.5)
    largest = max(values) or 1.0
    for position, value in zip(positions, values, strict=True):
        axis.text(value + 0.02 * largest, position, text(value), va="center", fontsize=8)
    axis.set_xlim(0, 1.25 * largest)
    axis.set_xticks([])
    axis.set_title(title, fontsize=9.5)
    axis.spines[["top", "right", "bottom"]].set_visible(False)
