"""Pipeline schedules as plain data: what each device does, in order. Imports no JAX.

A network is cut into *stages*, one after another. Stage `s` is on device `s mod devices`, so that a
device with several stages (*chunks*) has chunk `c` as stage `c * devices + device`. A schedule is,
for each device, an ordered list of work; when it is done follows from what it depends on.

    F  forward of a microbatch through a stage: after that of the stage before
    B  backward: after F on the same stage and B of the stage behind
    W  gradient of the weights, where B computes that of the input alone: after B

Written down, `F3` is the forward of microbatch 3, and `B2.1` the backward of microbatch 2 through
the device's chunk 1.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from plurax import errors

KINDS = ("F", "B", "W")


class Action(NamedTuple):
    """One unit of work: its `kind` (`F`, `B` or `W`), `microbatch`, and `chunk` of the device.

    >>> str(Work("B", 2, 1)), Work.parse("F3")
    ('B2.1', Work(kind='F', microbatch=3, chunk=0))
    """

    kind: str
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}" + (f".{self.chunk}" if self.chunk else "")

    @classmethod
    def parse(cls, text: str) -> "Action":
        """From what `str` makes of it. Raises `PlanError`."""
        found = re.fullmatch(r"([FBW])(\d+)(?:\.(\d+))?", text)
        if found is None:
            raise errors.schedule_not_work(text)
        return cls(found[1], int(found[2]), int(found[3] or 0))


@dataclasses.dataclass(frozen=True)
class Schedule:
    """What each device of a pipeline does, in order.

    **Fields:** `name`; `work`, for each device its list of `Action`s.

    >>> print(one_f_one_b(devices=2, microbatches=3))
    F0 F1 B0 F2 B1 B2
    F0 B0 F1 B1 F2 B2
    """

    name: str
    work: tuple[tuple[Action, ...], ...]

    @classmethod
    def parse(cls, lines: Sequence[str], name: str = "by hand") -> "Schedule":
        """From one line of text for each device. Raises `PlanError`."""
        return cls(name, tuple(tuple(map(Action.parse, line.split())) for line in lines))

    @property
    def devices(self) -> int:
        """Devices of the pipeline."""
        return len(self.work)

    @functools.cached_property
    def microbatches(self) -> int:
        """How many microbatches it works through."""
        return 1 + max((work.microbatch for line in self.work for work in line), default=-1)

    @functools.cached_property
    def chunks(self) -> int:
        """How many stages a device has."""
        return 1 + max((work.chunk for line in self.work for work in line), default=-1)

    @property
    def stages(self) -> int:
        """How many stages the network is cut into."""
        return self.devices * self.chunks

    @functools.cached_property
    def split(self) -> bool:
        """Whether the gradient of the weights is work of its own."""
        return any(work.kind == "W" for line in self.work for work in line)

    def stage(self, device: int, work: Action) -> int:
        """The stage on which a device does some work."""
        return work.chunk * self.devices + device

    def dependencies(self, device: int, work: Action) -> Iterator[tuple[int, Action]]:
        """What has to be done before some work, as pairs of device and work."""
        stage = self.stage(device, work)
        if work.kind == "F" and stage > 0:
            yield self._at(stage - 1, "F", work.microbatch)
        if work.kind == "B":
            yield device, work._replace(kind="F")
            if stage < self.stages - 1:
                yield self._at(stage + 1, "B", work.microbatch)
        if work.kind == "W":
            yield device, work._replace(kind="B")

    def _at(self, stage: int, kind: str, microbatch: int) -> tuple[int, Action]:
        chunk, device = divmod(stage, self.devices)
        return device, Action(kind, microbatch, chunk)

    def __str__(self) -> str:
        return "\n".join(" ".join(map(str, line)) for line in self.work)


# --- The schedules that have a name ---------------------------------------------------------------


def gpipe(devices: int, microbatches: int, chunks: int = 1) -> Schedule:
    """All forwards, then all backwards (Huang et al. 2019, https://arxiv.org/abs/1811.06965).

    Bubble `(p - 1) / (m + p - 1)`; every device stores the activations of all microbatches.
    """
    _one_chunk("gpipe", chunks)
    forward = tuple(Action("F", m) for m in range(microbatches))
    backward = tuple(Action("B", m) for m in range(microbatches))
    return Schedule("gpipe", (forward + backward,) * devices)


def one_f_one_b(devices: int, microbatches: int, chunks: int = 1) -> Schedule:
    """One forward, one backward in turns (Narayanan et al. 2019, https://arxiv.org/abs/1806.03377).

    Bubble as GPipe's; device `d` of `p` stores the activations of at most `p - d` microbatches.
    """
    _one_chunk("1f1b", chunks)
    lines = []
    for device in range(devices):
        warm = min(microbatches, devices - device - 1)
        lines.append(_in_turns(_numbered("F", microbatches), _numbered("B", microbatches), warm))
    return Schedule("1f1b", tuple(lines))


def interleaved(devices: int, microbatches: int, chunks: int) -> Schedule:
    """1F1B with several stages on a device (Narayanan et al. 2021, https://arxiv.org/abs/2104.04473).

    Bubble `(p - 1) / (v m + p - 1)` with `v` chunks: a `v`-th of the time idle, for `v` times the
    exchanges. Raises `PlanError` where `devices` does not divide `microbatches`.
    """
    if microbatches % devices:
        raise errors.schedule_indivisible("interleaved", devices, microbatches)
    total = microbatches * chunks

    def work(kind: str, number: int) -> Action:
        round_, place = divmod(number, devices * chunks)
        chunk, inside = divmod(place, devices)
        last = chunks - 1 - chunk if kind == "B" else chunk
        return Action(kind, round_ * devices + inside, last)

    forward = tuple(work("F", number) for number in range(total))
    backward = tuple(work("B", number) for number in range(total))
    lines = []
    for device in range(devices):
        warm = min(total, 2 * (devices - device - 1) + (chunks - 1) * devices)
        lines.append(_in_turns(forward, backward, warm))
    return Schedule("interleaved", tuple(lines))


def zb_h1(devices: int, microbatches: int, chunks: int = 1) -> Schedule:
    """Weight gradients fill the bubble, in 1F1B's memory (Qi et al. 2023,
    https://arxiv.org/abs/2401.10241).

    1F1B with the backward pass in two. Device `d` puts the gradient of its weights off by `d`
    microbatches. Bubble `(p - 1) / (3 m + p - 1)`, a third of 1F1B's.
    """
    _one_chunk("zb-h1", chunks)
    lines = []
    for device in range(devices):
        warm = min(microbatches, devices - device - 1)
        turns = _in_turns(_numbered("F", microbatches), _numbered("B", microbatches), warm)
        line: list[Action] = []
        done = 0
        for work in turns:
            line.append(work)
            if work.kind == "B" and work.microbatch >= device:
                line.append(Action("W", done))
                done += 1
        line += [Action("W", m) for m in range(done, microbatches)]
        lines.append(tuple(line))
    return Schedule("zb-h1", tuple(lines))


SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zb-h1": zb_h1,
}
"""By name: `(devices, microbatches, chunks) -> Schedule`."""


def make_schedule(
    given: str | Sequence[str], devices: int, microbatches: int, chunks: int = 1
) -> Schedule:
    """The schedule of a name, or one written by hand, checked.

    Raises `PlanError` where it is not legal, or not for these devices, microbatches and chunks.
    """
    if isinstance(given, str):
        return SCHEDULES[given](devices, microbatches, chunks)
    schedule = Schedule.parse(given)
    check_schedule(schedule)
    found = (schedule.devices, schedule.microbatches, schedule.chunks)
    if found != (devices, microbatches, chunks):
        raise errors.schedule_of_other_sizes(found, (devices, microbatches, chunks))
    return schedule


# --- Whether one is legal -------------------------------------------------------------------------


def check_schedule(schedule: Schedule, *, stored: int | None = None) -> None:
    """Raise `PlanError` where a schedule cannot run, with the reason.

    Every unit of work is there once, on each device what comes first stands first, no two devices
    wait for each other, and, with `stored`, no device stores the activations of more than so many
    microbatches and chunks at a time.
    """
    kinds = KINDS if schedule.split else KINDS[:2]
    for device, line in enumerate(schedule.work):
        seen: set[Action] = set()
        for work in line:
            if work in seen:
                raise errors.schedule_twice(device, str(work))
            own = [need for at, need in schedule.dependencies(device, work) if at == device]
            for need in own:
                if need not in seen and need in line:
                    raise errors.schedule_out_of_order(device, str(work), str(need))
            seen.add(work)
        for chunk in range(schedule.chunks):
            for microbatch in range(schedule.microbatches):
                for kind in kinds:
                    if (missing := Action(kind, microbatch, chunk)) not in seen:
                        raise errors.schedule_incomplete(device, str(missing))
    ticks(schedule)
    if stored is not None:
        for device, most in enumerate(live_activations(schedule)):
            if most > stored:
                raise errors.schedule_stores_too_much(device, most, stored)


def check_forwards_in_order(schedule: Schedule) -> None:
    """Raise `PlanError` where the forwards of a stage are not in the order of their microbatches.

    Model state passes from one to the next.
    """
    for device, line in enumerate(schedule.work):
        last: dict[int, Action] = {}
        for work in line:
            if work.kind != "F":
                continue
            before = last.get(work.chunk)
            if before is not None and before.microbatch > work.microbatch:
                raise errors.schedule_forwards_out_of_order(device, str(work), str(before))
            last[work.chunk] = work


def ticks(schedule: Schedule) -> list[tuple[Action | None, ...]]:
    """For each tick what each device does, or None: as soon as it can, one unit at a time.

    What one device hands to another it has in the next tick. Raises `PlanError` where devices wait
    for each other for ever.
    """
    at = [0] * schedule.devices
    done: set[tuple[int, Action]] = set()
    columns: list[tuple[Action | None, ...]] = []
    while any(place < len(line) for place, line in zip(at, schedule.work, strict=True)):
        column: list[Action | None] = []
        for device, line in enumerate(schedule.work):
            work = line[at[device]] if at[device] < len(line) else None
            ready = work is not None and all(n in done for n in schedule.dependencies(device, work))
            column.append(work if ready else None)
        if not any(column):
            raise errors.schedule_deadlock(_waiting(schedule, at, done))
        for device, work in enumerate(column):
            if work is not None:
                done.add((device, work))
                at[device] += 1
        columns.append(tuple(column))
    return columns


def live_activations(schedule: Schedule) -> list[int]:
    """For each device the most activations it stores: of one microbatch and one chunk each.

    Stored from F on until B is done, or W where that is work of its own. It follows from the order
    alone, whatever the work takes.
    """
    last = "W" if schedule.split else "B"
    most = []
    for line in schedule.work:
        held = peak = 0
        for work in line:
            held += work.kind == "F"
            peak = max(peak, held)
            held -= work.kind == last
        most.append(peak)
    return most


def _waiting(schedule: Schedule, at: list[int], done: set[tuple[int, Action]]) -> list[str]:
    """Who waits for what, in words."""
    lines = []
    for device, line in enumerate(schedule.work):
        if at[device] < len(line):
            work = line[at[device]]
            for other, need in schedule.dependencies(device, work):
                if (other, need) not in done:
                    lines.append(f"device {device} is at {work}, waiting for {need} of {other}")
    return lines


def _numbered(kind: str, count: int) -> tuple[Action, ...]:
    return tuple(Action(kind, m) for m in range(count))


def _in_turns(
    forward: tuple[Action, ...], backward: tuple[Action, ...], warm: int
) -> tuple[Action, ...]:
    """`warm` forwards, then forward and backward in turns, then the backwards that are left."""
    line = list(forward[:warm])
    for number, work in enumerate(forward[warm:]):
        line += [work, backward[number]]
    return tuple(line + list(backward[len(forward) - warm :]))


def _one_chunk(name: str, chunks: int) -> None:
    if chunks != 1:
        raise errors.schedule_has_no_chunks(name, chunks)
