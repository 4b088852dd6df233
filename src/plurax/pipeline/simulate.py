"""What a schedule costs before it runs: its timeline, the time it is idle, what it stores."""

import dataclasses
from typing import NamedTuple

from plurax.pipeline.schedule import Action, Schedule, live_activations, ticks


class Span(NamedTuple):
    """Some work of a device, from `start` to `end`."""

    device: int
    work: Action
    start: float
    end: float


@dataclasses.dataclass(frozen=True)
class Timeline:
    """When each device does what.

    **Fields:** `schedule`; `spans`, all work with its times, in the units of the durations given;
    `stored`, for each device the most activations it stores, in microbatches times chunks.
    """

    schedule: Schedule
    spans: tuple[Span, ...]
    stored: tuple[int, ...]

    @property
    def length(self) -> float:
        """From the first work to the end of the last."""
        return max(span.end for span in self.spans)

    @property
    def bubble(self) -> float:
        """The part of all devices' time in which they are idle, 0 to 1."""
        busy = sum(span.end - span.start for span in self.spans)
        return 1 - busy / (self.length * self.schedule.devices)


def simulate(
    schedule: Schedule,
    *,
    forward: float = 1.0,
    backward: float = 1.0,
    weight: float = 1.0,
    exchange: float = 0.0,
    lockstep: bool = False,
) -> Timeline:
    """The timeline of a schedule in which all stages take as long.

    **Arguments:**

    - `forward`, `backward` (gradient of the input), `weight` (gradient of the weights): how long
      each takes for one microbatch through all of a device's chunks. Where the schedule does not
      split the backward pass, `B` takes both.
    - `exchange`: from the end of work on one device until another has what it made.
    - `lockstep`: all devices begin each unit of work together, as a program does that exchanges
      after each.

    Raises `PlanError` where devices wait for each other for ever.

    >>> from plurax.pipeline.schedule import make_schedule
    >>> simulate(make_schedule("1f1b", devices=4, microbatches=8)).bubble  # 3 / 11
    0.2727272727272727
    """
    whole = {"F": forward, "B": backward if schedule.split else backward + weight, "W": weight}
    takes = {kind: duration / schedule.chunks for kind, duration in whole.items()}
    free = [0.0] * schedule.devices
    ended: dict[tuple[int, Action], float] = {}
    spans = []
    for column in ticks(schedule):
        begin = max(free) if lockstep else 0.0
        for device, work in enumerate(column):
            if work is None:
                continue
            arrived = [
                ended[other, need] + (exchange if other != device else 0.0)
                for other, need in schedule.dependencies(device, work)
            ]
            start = max([free[device], begin, *arrived])
            free[device] = ended[device, work] = start + takes[work.kind]
            spans.append(Span(device, work, start, free[device]))
    return Timeline(schedule, tuple(spans), tuple(live_activations(schedule)))
