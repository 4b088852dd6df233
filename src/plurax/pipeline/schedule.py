"""Pipeline schedules as plain data: the ordered actions of each device. Imports no JAX.

A network is cut into consecutive *stages*. Stage `s` is on device `s mod devices`; a device with
several stages (*chunks*) has stage `c * devices + device` as its chunk `c`. A schedule is an
ordered list of actions for each device. It contains no times: each action runs as soon as the
actions that it depends on are done.

    F  forward of a microbatch through a stage; depends on F of the previous stage
    B  backward; depends on F of the same stage and B of the next stage
    W  gradient of the weights, if B computes the input's gradient only; depends on B

`F3` is the forward of microbatch 3, and `B2.1` the backward of microbatch 2 through the device's
chunk 1. Example: 1F1B with 2 devices and 3 microbatches, and the ticks that follow from it:

    device 0    F0 F1 B0 F2 B1 B2            tick       0   1   2   3   4   5   6   7
    device 1    F0 B0 F1 B1 F2 B2            device 0   F0  F1  -   B0  F2  B1  -   B2
                                             device 1   -   F0  B0  F1  B1  F2  B2  -

A *bubble* is the time in which devices are idle, as a part of all devices' time. The sources of the
named schedules are in their docstrings.
"""

import collections
import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from plurax import errors
from plurax.plan import CHUNKS
from plurax.validate import check_whole

KINDS = ("F", "B", "W")

MAX_ACTIONS = 10**6
"""More actions of one kind no table of a schedule holds."""


class Action(NamedTuple):
    """One action of a device: `kind` (`F`, `B` or `W`), `microbatch`, and `chunk` of the device.

    >>> str(Action("B", 2, 1)), Action.parse("F3")
    ('B2.1', Action(kind='F', microbatch=3, chunk=0))
    """

    kind: str
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}" + (f".{self.chunk}" if self.chunk else "")

    @classmethod
    def parse(cls, text: str) -> "Action":
        """Parse the text that `str` returns. Raises `PlanError` if it is not of that form."""
        match = re.fullmatch(r"([FBW])(\d+)(?:\.(\d+))?", text)
        if match is None:
            raise errors.PlanError(
                f"{text!r} in a schedule is not an action: write F, B or W (forward, backward, "
                "gradient of the weights), the microbatch and, where a device has several stages, "
                "a dot and the index of its chunk: F3, B2.1."
            )
        return cls(match[1], int(match[2]), int(match[3] or 0))


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The actions of each device of a pipeline, in order.

    **Fields:** `name`; `actions`, for each device its `Action`s; `pairs`, whether a device runs a
    forward and the backward behind it in the same tick.

    >>> print(one_f_one_b(devices=2, microbatches=3))
    F0 F1 B0 F2 B1 B2
    F0 B0 F1 B1 F2 B2
    """

    name: str
    actions: tuple[tuple[Action, ...], ...]
    pairs: bool = False

    @classmethod
    def parse(cls, lines: Sequence[str], name: str = "by hand") -> "Schedule":
        """Parse one line of text per device, actions apart by spaces. Raises `PlanError`."""
        return cls(name, tuple(tuple(map(Action.parse, line.split())) for line in lines))

    @functools.cached_property
    def devices(self) -> int:
        """Number of devices of the pipeline."""
        return len(self.actions)

    @functools.cached_property
    def microbatches(self) -> int:
        """Number of microbatches."""
        return 1 + max((action.microbatch for line in self.actions for action in line), default=-1)

    @functools.cached_property
    def chunks(self) -> int:
        """Number of stages per device."""
        return 1 + max((action.chunk for line in self.actions for action in line), default=-1)

    @property
    def stages(self) -> int:
        """Number of stages of the network."""
        return self.devices * self.chunks

    @functools.cached_property
    def split(self) -> bool:
        """Whether the backward pass is split into B (of the input) and W (of the weights)."""
        return any(action.kind == "W" for line in self.actions for action in line)

    @functools.cached_property
    def ticks(self) -> list[tuple[tuple[Action, ...], ...]]:
        """For each tick the actions of each device: none, one, or with `pairs` an F and then a B.

        Each action runs in the first tick in which it can: after the device's previous action, and
        after the ticks of all actions that it depends on (a send takes until the next tick). Raises
        `PlanError` where devices wait for each other for ever.

        >>> [" ".join(map(str, first)) for first, _ in eager_one_f_one_b(2, 3).ticks]
        ['F0', 'F1', 'F2 B0', 'B1', 'B2']
        """
        return _ticks(self)

    def forwards(self) -> "Schedule":
        """Return the schedule of the forward passes alone, as evaluation has it."""
        lines = (tuple(action for action in line if action.kind == "F") for line in self.actions)
        return Schedule("forward", tuple(lines))

    def stage(self, device: int, action: Action) -> int:
        """Return the stage of an action on a device."""
        return action.chunk * self.devices + device

    def dependencies(self, device: int, action: Action) -> Iterator[tuple[int, Action]]:
        """Yield the actions that must be done before an action, as pairs `(device, action)`."""
        for kind, stage in self.needs(action.kind, self.stage(device, action)):
            yield stage % self.devices, Action(kind, action.microbatch, stage // self.devices)

    def needs(self, kind: str, stage: int) -> list[tuple[str, int]]:
        """Return kind and stage of what an action depends on, all of the same microbatch.

        >>> gpipe(devices=2, microbatches=3).needs("B", 0)
        [('F', 0), ('B', 1)]
        """
        if kind == "W":
            return [("B", stage)]
        if kind == "F":
            return [("F", stage - 1)] if stage else []
        return [("F", stage), ("B", stage + 1)] if stage + 1 < self.stages else [("F", stage)]

    def __str__(self) -> str:
        return "\n".join(" ".join(map(str, line)) for line in self.actions)


# --- The schedules that have a name ---------------------------------------------------------------


def gpipe(devices: int, microbatches: int, chunks: int = 1) -> Schedule:
    """Return GPipe: all forwards, then all backwards (Huang et al. 2019,
    https://arxiv.org/abs/1811.06965).

    Bubble `(p - 1) / (m + p - 1)`; every device stores the activations of all microbatches.
    """
    _check_sizes("gpipe", devices, microbatches, chunks)
    forward = tuple(Action("F", m) for m in range(microbatches))
    backward = tuple(Action("B", m) for m in range(microbatches))
    return Schedule("gpipe", (forward + backward,) * devices)


def one_f_one_b(devices: int, microbatches: int, chunks: int = 1) -> Schedule:
    """Return 1F1B: forwards and backwards alternate (Narayanan et al. 2019,
    https://arxiv.org/abs/1806.03377).

    Bubble as GPipe's; device `d` of `p` stores the activations of at most `p - d` microbatches.
    """
    _check_sizes("1f1b", devices, microbatches, chunks)
    turns = _numbered("F", microbatches), _numbered("B", microbatches)
    # Until the first cotangent is back from the devices behind, only forwards are possible.
    warm = [min(microbatches, devices - device - 1) for device in range(devices)]
    return Schedule("1f1b", tuple(_in_turns(*turns, count) for count in warm))


def eager_one_f_one_b(devices: int, microbatches: int, chunks: int = 1) -> Schedule:
    """Return eager 1F1B: as many forwards ahead as a cotangent takes to come back (Zhuang et al.
    2022, https://arxiv.org/abs/2211.05322), and in each tick a forward and a backward.

        tick        0    1      2       3       4           2 devices, 3 microbatches
        device 0    F0   F1     F2 B0   B1      B2
        device 1    -    F0 B0  F1 B1   F2 B2   -

    A tick of 1F1B, in which some devices run forwards and others backwards, takes as long as the
    slower of the two; here every device runs both, and none waits for another. Bubble as GPipe's,
    in lockstep too; device `d` of `p` stores the activations of at most `2 (p - d) - 1`
    microbatches, about twice as many as under 1F1B.
    """
    _check_sizes("eager-1f1b", devices, microbatches, chunks)
    turns = _numbered("F", microbatches), _numbered("B", microbatches)
    warm = [min(microbatches, 2 * (devices - device - 1)) for device in range(devices)]
    return Schedule("eager-1f1b", tuple(_in_turns(*turns, count) for count in warm), pairs=True)


def interleaved(devices: int, microbatches: int, chunks: int) -> Schedule:
    """Return interleaved 1F1B, with several stages per device (Narayanan et al. 2021,
    https://arxiv.org/abs/2104.04473).

    Bubble `(p - 1) / (v m + p - 1)` with `v` chunks: a `v`-th of the idle time, for `v` times the
    sends. Raises `PlanError` where `devices` does not divide `microbatches`.
    """
    _check_sizes("interleaved", devices, microbatches, chunks)
    if microbatches % devices:
        near = max(1, round(microbatches / devices)) * devices
        raise errors.PlanError(
            f"the schedule 'interleaved' processes microbatches in groups of pipeline={devices}, "
            f"which does not divide microbatches={microbatches}; microbatches={near} works, and so "
            "does schedule='1f1b'."
        )
    total = microbatches * chunks

    def action(kind: str, index: int) -> Action:
        # A device runs `devices` microbatches through one chunk, then the same ones through the
        # next: the last device's output of a chunk is then back at device 0 when it needs it.
        round_, rest = divmod(index, devices * chunks)
        chunk, inside = divmod(rest, devices)
        last = chunks - 1 - chunk if kind == "B" else chunk
        return Action(kind, round_ * devices + inside, last)

    forward = tuple(action("F", index) for index in range(total))
    backward = tuple(action("B", index) for index in range(total))
    lines = []
    for device in range(devices):
        warm = min(total, 2 * (devices - device - 1) + (chunks - 1) * devices)
        lines.append(_in_turns(forward, backward, warm))
    return Schedule("interleaved", tuple(lines))


def zb_h1(devices: int, microbatches: int, chunks: int = 1) -> Schedule:
    """Return ZB-H1: weight gradients fill the bubble, within 1F1B's memory (Qi et al. 2023,
    https://arxiv.org/abs/2401.10241).

    1F1B with a split backward pass; device `d` delays W by `d` microbatches. Bubble
    `(p - 1) / (3 m + p - 1)`, about a third of 1F1B's, if F, B and W take equally long.
    """
    _check_sizes("zb-h1", devices, microbatches, chunks)
    forward, backward, weights = (_numbered(kind, microbatches) for kind in KINDS)
    lines = []
    for device in range(devices):
        turns = _in_turns(forward, backward, min(microbatches, devices - device - 1))
        line: list[Action] = []
        done = 0
        for action in turns:
            line.append(action)
            # Later devices receive cotangents sooner, so they have B's to do first; their W's wait
            # for the end, where the device would otherwise be idle.
            if action.kind == "B" and action.microbatch >= device:
                line.append(weights[done])
                done += 1
        lines.append((*line, *weights[done:]))
    return Schedule("zb-h1", tuple(lines))


@dataclasses.dataclass(frozen=True)
class NamedSchedule:
    """A schedule that a plan names, and what planning needs to know before it is written down.

    **Fields:** `make(devices, microbatches, chunks)` returns it; `stores_all`, whether a device
    stores more with each further microbatch; `pairs`, whether a device runs a forward and a
    backward in one tick; `groups`, whether `devices` has to divide `microbatches`;
    `ticks(devices, microbatches, chunks)`, the number of ticks in which devices run forwards only,
    and that of all others, None to count them in the written schedule.
    """

    make: Callable[[int, int, int], Schedule]
    stores_all: bool = False
    pairs: bool = False
    groups: bool = False
    ticks: Callable[[int, int, int], tuple[int, int]] | None = None


# To add a schedule: a function above, a row here, and its name in `plan.ScheduleName`, and in
# `plan.CHUNKS` if its devices have several stages; a search then tries it.
SCHEDULES: dict[str, NamedSchedule] = {
    "1f1b": NamedSchedule(one_f_one_b, ticks=lambda p, m, v: (p, 2 * m + p - 2)),
    "eager-1f1b": NamedSchedule(eager_one_f_one_b, pairs=True),
    "interleaved": NamedSchedule(
        interleaved,
        groups=True,
        ticks=lambda p, m, v: (v * p, 2 * v * m + 2 * (p - 1) - v * p),
    ),
    "gpipe": NamedSchedule(gpipe, stores_all=True, ticks=lambda p, m, v: (m + p - 1, m + p - 1)),
    "zb-h1": NamedSchedule(
        zb_h1, ticks=lambda p, m, v: (p, max(3 * m + p - 1, 2 * (m + p - 1) + 1) - p)
    ),
}
"""The named schedules. Of two that are as fast, a search takes the first."""


def named(schedule: str | Sequence[str]) -> NamedSchedule | None:
    """Return what is known of a schedule by its name; None for one written by hand."""
    return SCHEDULES[schedule] if isinstance(schedule, str) else None


def make_schedule(
    given: str | Sequence[str], devices: int, microbatches: int, chunks: int = 1
) -> Schedule:
    """Return a named schedule, or parse and check one given as a line of text per device.

    Raises `PlanError` if the given schedule is not legal, or has other numbers of devices,
    microbatches or chunks.
    """
    if isinstance(given, str):
        if given not in SCHEDULES:
            raise errors.plan_schedule_unknown(given, SCHEDULES)
        return _named_schedule(given, devices, microbatches, chunks)
    schedule = Schedule.parse(given)
    check_schedule(schedule)
    written = (schedule.devices, schedule.microbatches, schedule.chunks)
    if written != (devices, microbatches, chunks):
        sizes = "{} devices, {} microbatches, {} stages on each"
        raise errors.PlanError(
            f"the schedule written by hand is for {sizes.format(*written)}; the plan has "
            f"{sizes.format(devices, microbatches, chunks)}."
        )
    return schedule


@functools.cache
def splits_backward(given: str | tuple[str, ...]) -> bool:
    """Return whether gradients of weights are actions of their own (W), under any sizes."""
    return (make_schedule(given, 2, 2) if isinstance(given, str) else Schedule.parse(given)).split


@functools.lru_cache(maxsize=32)  # a plan's schedule is asked for several times, and is large
def _named_schedule(name: str, devices: int, microbatches: int, chunks: int) -> Schedule:
    return SCHEDULES[name].make(devices, microbatches, chunks)


# --- Checks ---------------------------------------------------------------------------------------


def check_schedule(schedule: Schedule, *, stored: int | None = None) -> None:
    """Raise `PlanError` if a schedule cannot run, with the reason.

    Checks that each action is there exactly once, that each device's actions are in an order that
    their dependencies allow, and that devices do not wait for each other for ever. With `stored`,
    also that no device stores more than `stored` activations at a time (see `live_activations`).
    """
    kinds = KINDS if schedule.split else KINDS[:2]
    for device, line in enumerate(schedule.actions):
        seen: set[Action] = set()
        for action in line:
            if action in seen:
                raise errors.PlanError(
                    f"the schedule cannot run: device {device} runs {action} twice; every action "
                    "runs once."
                )
            own = [need for at, need in schedule.dependencies(device, action) if at == device]
            for need in own:
                if need not in seen and need in line:
                    raise errors.PlanError(
                        f"the schedule cannot run: device {device} runs {action} before {need}, on "
                        "which it depends."
                    )
            seen.add(action)
        for chunk in range(schedule.chunks):
            for microbatch in range(schedule.microbatches):
                for kind in kinds:
                    if (missing := Action(kind, microbatch, chunk)) not in seen:
                        raise errors.PlanError(
                            f"the schedule cannot run: device {device} never runs {missing}; every "
                            "device runs F and B of every microbatch for each of its stages, and W "
                            "for all of them or for none."
                        )
    schedule.ticks  # noqa: B018  raises
    if stored is not None:
        for device, most in enumerate(live_activations(schedule)):
            if most > stored:
                raise errors.PlanError(
                    f"the schedule stores too much: device {device} has the activations of {most} "
                    f"microbatches at a time, and {stored} are allowed; start backward passes "
                    "sooner, as '1f1b' does."
                )


def check_forwards_in_order(schedule: Schedule) -> None:
    """Raise `PlanError` if the forwards of a stage are not in the order of their microbatches.

    Required by stateful models, where a microbatch's forward reads the model state that the
    previous microbatch's forward wrote.
    """
    for device, line in enumerate(schedule.actions):
        last: dict[int, Action] = {}
        for action in line:
            if action.kind != "F":
                continue
            before = last.get(action.chunk)
            if before is not None and before.microbatch > action.microbatch:
                raise errors.PlanError(
                    f"on device {device} the schedule has {before} before {action}, and model "
                    "state passes from each microbatch to the next: write the forwards of a stage "
                    "in the order of their microbatches, as all named schedules do."
                )
            last[action.chunk] = action


def _ticks(schedule: Schedule) -> list[tuple[tuple[Action, ...], ...]]:
    at, last = [0] * (devices := schedule.devices), [-1] * schedule.devices
    # Of kind and stage, by microbatch; a schedule may have a hundred thousand actions.
    ticks_of: dict[tuple[str, int], dict[int, int]] = collections.defaultdict(dict)
    waiting: dict[tuple[str, int, int], list[int]] = {}
    columns: list[list[tuple[Action, ...]]] = []

    @functools.cache
    def needs(kind: str, stage: int) -> list[tuple[tuple[str, int], dict[int, int], bool]]:
        every = schedule.needs(kind, stage)
        return [(one, ticks_of[one], _takes_a_tick(schedule, one[0], kind)) for one in every]

    todo = [*range(devices)]
    while todo:
        device = todo.pop()
        line, tick = schedule.actions[device], last[device]
        while at[device] < len(line):
            kind, microbatch, chunk = action = line[at[device]]
            key = kind, chunk * devices + device
            tick += not at[device] or _takes_a_tick(schedule, line[at[device] - 1][0], kind)
            for need, known, later in needs(*key):
                if microbatch not in known:
                    waiting.setdefault((*need, microbatch), []).append(device)
                    break
                tick = max(tick, known[microbatch] + later)
            else:
                last[device] = ticks_of[key][microbatch] = tick
                while tick >= len(columns):
                    columns.append([()] * devices)
                columns[tick][device] += (action,)
                at[device] += 1
                todo += waiting.pop((*key, microbatch), ())
                continue
            break
    if waiting:
        raise errors.PlanError(
            "the schedule cannot run: devices wait for each other forever: "
            f"{'; '.join(_waiting(schedule, at))}. Put what they wait for earlier in the list."
        )
    return [tuple(column) for column in columns]


def _takes_a_tick(schedule: Schedule, need: str, kind: str) -> bool:
    """Return whether an action of a kind has to wait for the tick behind that of what it needs."""
    return not (schedule.pairs and need == "F" and kind == "B")


def live_activations(schedule: Schedule) -> list[int]:
    """Return for each device the maximal number of activations that it stores at a time.

    An activation is that of one microbatch through one chunk, stored from its F until its B is
    done, or its W if the schedule has one. The number depends only on the order of the actions, not
    on how long they take.
    """
    last = "W" if schedule.split else "B"
    most = []
    for line in schedule.actions:
        held = peak = 0
        for kind, _, _ in line:
            held += kind == "F"
            peak = max(peak, held)
            held -= kind == last
        most.append(peak)
    return most


def _waiting(schedule: Schedule, at: Sequence[int]) -> list[str]:
    """Return a line for each device that waits, with the action it waits for."""
    lines = []
    for device, line in enumerate(schedule.actions):
        if at[device] < len(line):
            action = line[at[device]]
            for other, need in schedule.dependencies(device, action):
                if need not in schedule.actions[other][: at[other]]:
                    lines.append(f"device {device} is at {action}, waiting for {need} of {other}")
    return lines


def _numbered(kind: str, count: int) -> tuple[Action, ...]:
    return tuple(Action(kind, m) for m in range(count))


def _in_turns(
    forward: tuple[Action, ...], backward: tuple[Action, ...], warm: int
) -> tuple[Action, ...]:
    """Return `warm` forwards, then forwards and backwards alternating, then the other backwards."""
    line = list(forward[:warm])
    for index, action in enumerate(forward[warm:]):
        line += [action, backward[index]]
    return tuple(line + list(backward[len(forward) - warm :]))


def _check_sizes(name: str, devices: int, microbatches: int, chunks: int) -> None:
    """Raise `PlanError` for a schedule that there is not, or that no table holds."""
    sizes = {"devices": devices, "microbatches": microbatches, "chunks": chunks}
    for what, size in sizes.items():
        check_whole("a schedule", what, size, most=MAX_ACTIONS)
    if chunks != 1 and name not in CHUNKS:
        raise errors.PlanError(
            f"the schedule {name!r} has one stage on each device, and the plan asks for {chunks}; "
            "leave `stages` out, or use schedule='interleaved'."
        )
    if devices * microbatches * chunks > MAX_ACTIONS:
        raise errors.PlanError(
            f"the schedule {name!r} for {devices} devices × {microbatches} microbatches × {chunks} "
            "stages on each is too long to write down; take fewer microbatches."
        )
