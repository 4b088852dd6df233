"""Simulate a schedule: its timeline, its bubble and the activations that it stores."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from plurax import errors
from plurax.argument_check import text
from plurax.notebook import html_table
from plurax.pipeline.schedule import Action, Schedule, live_activations


class Span(NamedTuple):
    """An action of a device, from `start` to `end`."""

    device: int
    action: Action
    start: float
    end: float


@dataclasses.dataclass(frozen=True)
class Timeline:
    """The times of all actions of a schedule.

    **Fields:** `schedule`; `spans`, all actions with their times, in the unit of the durations that
    `simulate` was given; `stored`, for each device the maximal number of activations that it
    stores at a time (see `live_activations`).
    """

    schedule: Schedule
    spans: tuple[Span, ...]
    stored: tuple[int, ...]

    @property
    def length(self) -> float:
        """Time until the last action ends."""
        return max(span.end for span in self.spans)

    @property
    def bubble(self) -> float:
        """Idle time as a part of all devices' time, 0 to 1."""
        busy = sum(span.end - span.start for span in self.spans)
        return 1 - busy / (self.length * self.schedule.devices)

    def __repr__(self) -> str:
        schedule = self.schedule
        sizes = f"{schedule.devices} devices, {schedule.microbatches} microbatches"
        return f"Timeline({schedule.name}, {sizes}: length {self.length:g}, {self.bubble:.1%} idle)"

    def _repr_html_(self) -> str:
        busy = [0.0] * self.schedule.devices
        for span in self.spans:
            busy[span.device] += span.end - span.start
        rows = [
            (device, time, f"{1 - time / self.length:.1%}", self.stored[device])
            for device, time in enumerate(busy)
        ]
        return html_table(repr(self), ["device", "busy", "idle", "stored activations"], rows)


def simulate(
    schedule: Schedule,
    *,
    forward: float = 1.0,
    backward: float = 1.0,
    weight: float = 1.0,
    exchange: float = 0.0,
    stage_lengths: Sequence[float] | None = None,
    lockstep: bool = False,
) -> Timeline:
    """Return the timeline of a schedule.

    **Arguments:**

    - `forward`, `backward` (gradient of the input), `weight` (gradient of the weights): duration of
      one microbatch through all of a device's chunks, in any unit. If the schedule does not split
      the backward pass, `B` takes `backward + weight`.
    - `stage_lengths`: how long each stage takes, in multiples of these; default 1 for all.
    - `exchange`: time from the end of an action until another device has its result.
    - `lockstep`: all devices start each tick's actions together, like a program that exchanges
      after each tick.

    Raises `PlanError` where devices wait for each other for ever.

    >>> from plurax.pipeline.schedule import make_schedule
    >>> simulate(make_schedule("1f1b", devices=4, microbatches=8)).bubble  # 3 / 11
    0.2727272727272727
    """
    whole = {"F": forward, "B": backward if schedule.split else backward + weight, "W": weight}
    takes = {kind: duration / schedule.chunks for kind, duration in whole.items()}
    lengths = [1.0] * schedule.stages if stage_lengths is None else stage_lengths
    if len(lengths) != schedule.stages:
        raise errors.argument_misfits(
            "plurax.pipeline.simulate", "stage_lengths", text(stage_lengths),
            f"{schedule.stages} numbers, one for each stage",
        )  # fmt: skip
    free = [0.0] * schedule.devices
    ended: dict[tuple[int, Action], float] = {}
    spans = []
    for column in schedule.ticks:
        begin = max(free) if lockstep else 0.0
        for device, action in _actions(column):
            arrived = [
                ended[other, need] + (exchange if other != device else 0.0)
                for other, need in schedule.dependencies(device, action)
            ]
            start = max([free[device], begin, *arrived])
            free[device] = ended[device, action] = (
                start + takes[action.kind] * lengths[schedule.stage(device, action)]
            )
            spans.append(Span(device, action, start, free[device]))
    return Timeline(schedule, tuple(spans), tuple(live_activations(schedule)))


def lockstep_seconds(schedule: Schedule, takes: Callable[[int, Action], float]) -> float:
    """Return the seconds of all ticks, each as long as its slowest device.

    `takes(device, action)` returns the seconds of an action.

    >>> from plurax.pipeline.schedule import make_schedule
    >>> lockstep_seconds(make_schedule("1f1b", 2, 2), lambda device, action: 1 + device)
    10
    """
    return sum(
        max(
            sum(takes(device, action) for action in actions)
            for device, actions in enumerate(column)
        )
        for column in schedule.ticks
    )


def _actions(column: Sequence[Sequence[Action]]) -> Iterator[tuple[int, Action]]:
    """Yield the actions of a tick with their device."""
    return ((device, action) for device, actions in enumerate(column) for action in actions)
