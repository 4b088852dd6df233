"""Show a pipeline's timeline as text, its costs, and schedules side by side.

A timeline has one row per device and a few columns per action. If the whole does not fit into the
width, a column covers several actions, and letters appear in proportion to their time. Example,
`gpipe`, 2 devices, 2 microbatches, a backward taking twice as long as a forward:

    stage 0 F0F1······B0──B1──      stage 0 waits for the gradient of stage 1
    stage 1 ··F0F1B0──B1──····

`F0` is the forward of microbatch 0, `B0──` its backward, `·` idle time (the bubble).
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from plurax.collective import Collective, by_kind, in_a_step
from plurax.hlo.memory import Memory
from plurax.pipeline.schedule import Schedule
from plurax.pipeline.simulation import Timeline
from plurax.report import lanes
from plurax.report.colors import GREEN, ORANGE, SKY, lighter
from plurax.report.plan_tables import new_table
from plurax.tree import human_bytes

COLOURS = {"F": lighter(SKY, 0.4), "B": ORANGE, "W": GREEN}
"""Of each kind of work; without colours one is darker than the other."""
IDLE = "·"
ROUNDING = 1e-9
NARROWEST, WIDEST = 80, 120


@dataclasses.dataclass(frozen=True)
class ScheduleCosts:
    """A schedule and its costs.

    **Fields:** `schedule`; `exchanged`, bytes that a device sends to other stages in a step;
    `memory` of a device.
    """

    schedule: Schedule
    exchanged: int
    memory: Memory

    @classmethod
    def of(cls, schedule: Schedule, sent: Sequence[Collective], memory: Memory) -> "ScheduleCosts":
        """Return the costs, from a step's planned or compiled communication."""
        sends = by_kind(sent).get(("collective-permute", ("pipeline",)), [])
        return cls(schedule, in_a_step(sends, lambda record: record.bytes), memory)

    @functools.cached_property
    def timelines(self) -> lanes.Timelines:
        """The timelines of the schedule."""
        return lanes.timelines_of(self.schedule)


Compared = Mapping[str, ScheduleCosts | str]
"""By the schedule's name its costs, or why it cannot run."""


# --- Timelines ------------------------------------------------------------------------------------


def timeline_report(costs: ScheduleCosts, width: int) -> RenderableType:
    """Return a schedule's timelines, on one scale, in at most `width` columns, and its costs."""
    schedule, timelines = costs.schedule, costs.timelines.captioned()
    names = [f"{name} " for name in lanes.lane_names(schedule)]
    margin = max(map(len, names))
    room = min(max(width, NARROWEST), WIDEST) - margin
    longest = max(map(_length, timelines.values()))
    per = room / longest if longest > room else min(room // longest, _label_width(schedule))
    lines = [
        Text(
            f"timeline of {schedule.name}: {schedule.devices} devices, "
            f"{schedule.microbatches} microbatches",
            style="italic",
        )
    ]
    for caption, timeline in timelines.items():
        lines.append(Text(lanes.titled(caption, timeline)))
        for name, line in zip(names, lanes.blocks(timeline), strict=True):
            draw = _scaled if per < 1 else _exact
            drawn = draw(line, _length(timeline), per, per >= _label_width(schedule))
            lines.append(Text(name.ljust(margin), style="dim") + drawn)
    return Group(*lines, _legend(schedule, per), "", costs_table(costs))


def _length(timeline: Timeline) -> int:
    return max(block.end for line in lanes.blocks(timeline) for block in line)


def _label_width(schedule: Schedule) -> int:
    return max(len(str(action)) for line in schedule.actions for action in line)


def _exact(line: Sequence[lanes.TimedAction], end: int, per: float, labelled: bool) -> Text:
    """Draw a row in which each action has columns to itself."""
    text, at, each = Text(), 0, int(per)
    for block in line:
        text.append(IDLE * ((block.start - at) * each), style="dim")
        label = str(block.action) if labelled else block.action.kind
        columns = (block.end - block.start) * each
        text.append(label.ljust(columns, "─"), style=_style(block.action.kind))
        at = block.end
    return text.append(IDLE * ((end - at) * each), style="dim")


def _scaled(line: Sequence[lanes.TimedAction], end: int, per: float, _labelled: bool) -> Text:
    """Draw a row whose columns cover several actions: letters in proportion to their time.

    Each column adds its shares to what every letter is owed, and shows the letter that is owed most
    among those in it (error diffusion, as in dithering).
    """
    count = max(1, round(end * per))
    shares = [dict.fromkeys([*COLOURS, IDLE], 0.0) for _ in range(count)]
    for block in line:
        start, stop = block.start * count / end, block.end * count / end
        for column in range(int(start), min(count, int(stop) + 1)):
            part = max(0.0, min(stop, column + 1) - max(start, column))
            shares[column][block.action.kind] += part
    text, owed = Text(), dict.fromkeys([*COLOURS, IDLE], 0.0)
    for share in shares:
        share[IDLE] = max(0.0, 1 - sum(share.values()))
        for kind, part in share.items():
            owed[kind] += part
        shown = max((kind for kind in share if share[kind] > ROUNDING), key=lambda k: owed[k])
        owed[shown] -= 1
        text.append(shown, style=_style(shown))
    return text


def _style(kind: str) -> str:
    return "dim" if kind == IDLE else f"black on {COLOURS[kind]}"


def _legend(schedule: Schedule, per: float) -> Text:
    text = Text()
    for kind, name in lanes.kinds_of_work(schedule).items():
        text.append(kind, style=_style(kind)).append(f" {name}   ")
    text.append(IDLE, style="dim").append(" idle")
    if per < 1:
        forwards = 1 / per / schedule.chunks
        text.append(
            f"\nscaled to fit: a column is the time of {forwards:.2g} forwards, "
            "letters stand in proportion"
        )
    return text


# --- Costs ----------------------------------------------------------------------------------------


def costs_table(costs: ScheduleCosts) -> Table:
    """Return a table of bubble, stored activations, bytes exchanged and memory of one schedule."""
    table = new_table("what the pipeline costs", "", ">", wrap=True)
    table.show_header = False
    unit = "a microbatch" if costs.schedule.chunks == 1 else "a microbatch on one stage"
    rows = {
        "bubble, each device as soon as it can": lanes.percent(costs.timelines.ideal.bubble),
        "bubble in lockstep, as it runs here": lanes.percent(costs.timelines.lockstep.bubble),
        f"stored at most, in activations of {unit}": stored_text(costs.timelines.ideal.stored),
        "exchanged by a device in a step": human_bytes(costs.exchanged),
        "memory per device, temporaries": human_bytes(costs.memory.temporaries),
        "memory per device, peak": human_bytes(costs.memory.peak),
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def stored_text(stored: Sequence[int], listed: int = 8) -> str:
    """Return the microbatches each device stores, or their range for more than `listed` devices."""
    if len(stored) <= listed:
        return ", ".join(map(str, stored))
    low, high = min(stored), max(stored)
    return f"{low} to {high}" if low < high else f"{high} on each"


def compared_schedules_table(compared: Compared, chosen: str) -> RenderableType:
    """Return schedules side by side, the `chosen` one marked; below, why others cannot run."""
    table = new_table("schedules of the same pipeline", "schedule", ">bubble", ">in lockstep",
                      ">stored at most", ">exchanged", ">temporaries", ">peak")  # fmt: skip
    reasons = []
    for name, costs in compared.items():
        shown, style = (f"{name} *", "bold") if name == chosen else (name, "")
        if isinstance(costs, str):
            table.add_row(shown, *["—"] * 6, style=style)
            reasons.append(Text(f"{name} cannot run: {costs}"))
            continue
        chunks, (ideal, lockstep) = costs.schedule.chunks, costs.timelines
        table.add_row(
            shown,
            lanes.percent(ideal.bubble),
            lanes.percent(lockstep.bubble),
            stored_text(ideal.stored, 4) + (f" of 1/{chunks}" if chunks > 1 else ""),
            human_bytes(costs.exchanged),
            human_bytes(costs.memory.temporaries),
            human_bytes(costs.memory.peak),
            style=style,
        )
    notes = Text(
        "* the plan. Exchanged, temporaries, peak: of one device in a step.\n"
        "Stored: activations of one microbatch, on each device; of 1/n: through one of n stages."
    )
    return Group(table, notes, *reasons)
