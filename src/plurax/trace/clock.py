"""The one clock: seconds of a recorded step on a machine.

    kernels of a step           seconds of each
    a matrix product            the longer of multiplying and of reading and writing its matrices
    another kernel              reading and writing its arrays
    a collective                sending its bytes over the slowest links of its group
    every kernel                the overhead of starting it

They are added up, but on GPUs, where a collective is sent while the device computes what neither
waits for it nor it for that: only what is left of it counts (`plurax.trace.work.Sending`).

    backward pass of a layer         computed meanwhile              counts
    all-reduce of a gradient, 30 µs  the next product, 20 µs         10 µs

A pipeline's devices run different actions at a time, in lockstep: a tick takes as long as its
slowest action, and what a device waits is the bubble.

    tick       0    1    2    3    4    5
    device 0   F0   F1   B0   -    B1   -       2 forwards, 2 backwards of 6 ticks: the bubble is
    device 1   -    F0   B0   F1   B1   -       what is left

Estimates and searches read this clock, and the executor of a pipeline obeys the same ticks
(`plurax.pipeline.schedule.ticks`).
"""

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import final

from plurax.collective import Collective
from plurax.machine import Machine
from plurax.pipeline.simulation import lockstep_seconds
from plurax.plan import MESH_AXES, Plan
from plurax.trace.work import Sending, StepWork, TickWork, Work


@dataclasses.dataclass(frozen=True)
class Seconds:
    """Seconds of a step on one device, by what it does.

    **Fields:** `products`, matrix products and convolutions; `traffic`, the memory traffic of all
    other kernels; `collectives`, those that a device waits for, by mesh axes, like `data` or
    `data+tensor`; `overhead`, of starting kernels; `bubble`, waiting for other stages of a
    pipeline; `hidden`, of collectives behind other work, which takes no time of its own; `paging`,
    of memory that the system hands out anew for every call.
    """

    products: float = 0.0
    traffic: float = 0.0
    collectives: Mapping[str, float] = dataclasses.field(default_factory=dict, hash=False)
    overhead: float = 0.0
    bubble: float = 0.0
    hidden: float = 0.0
    paging: float = 0.0

    @property
    def total(self) -> float:
        """All of them but what is hidden."""
        sent = sum(self.collectives.values())
        return self.products + self.traffic + sent + self.overhead + self.bubble + self.paging

    @staticmethod
    def sum(parts: Iterable["Seconds"]) -> "Seconds":
        """Return the seconds of all parts, one after another."""
        parts = list(parts)
        sent: dict[str, float] = defaultdict(float)
        for part in parts:
            for axes, seconds in part.collectives.items():
                sent[axes] += seconds
        return Seconds(
            sum(part.products for part in parts),
            sum(part.traffic for part in parts),
            dict(sent),
            sum(part.overhead for part in parts),
            sum(part.bubble for part in parts),
            sum(part.hidden for part in parts),
            sum(part.paging for part in parts),
        )

    def times(self, count: int) -> "Seconds":
        """Return the seconds of so many repetitions."""
        return Seconds(
            self.products * count,
            self.traffic * count,
            {axes: seconds * count for axes, seconds in self.collectives.items()},
            self.overhead * count,
            self.bubble * count,
            self.hidden * count,
            self.paging * count,
        )


def names_of(axes: Iterable[str]) -> str:
    """Return mesh axes as one name, such as `data+tensor`."""
    return "+".join(axis for axis in MESH_AXES if axis in axes)


def rates_of_stages(plan: Plan, machine: Machine) -> list[Machine]:
    """Return the rates of the devices at each place of the pipeline; without one, of all.

    Raises `MachineError` if those of one place differ.
    """
    pipeline, inner = plan.pipeline, plan.tensor
    outer = plan.devices // (pipeline * inner)
    return [
        machine.rates_of(
            (group * pipeline + stage) * inner + index
            for group in range(outer)
            for index in range(inner)
        )
        for stage in range(pipeline)
    ]


def rates_of_replicas(plan: Plan, machine: Machine) -> dict[Machine, int]:
    """Return the rates of the devices of a plan without a pipeline, each with the most microbatches
    that a replica at these rates has. Raises `MachineError` if those of one replica differ."""
    most: dict[Machine, int] = {}
    for index in range(plan.member * plan.data if machine.groups else 1):
        rates = machine.rates_of(range(index * plan.tensor, (index + 1) * plan.tensor))
        count = plan.replica_microbatches[index % plan.data]
        most[rates] = max(count, most.get(rates, 0))
    return most if machine.groups else {machine: plan.most_microbatches}


def product_seconds(
    rates: Machine, dims: tuple[int, int, int, int], dtype: str, moved: float
) -> float:
    """Return the seconds of products `(m, n, k, batch)` that read and write `moved` bytes."""
    m, n, k, batch = dims
    return max(rates.product_seconds(m, n, k, dtype, batch), rates.traffic_seconds(moved))


def collective_seconds(
    machine: Machine,
    kind: str,
    bytes_sent: float,
    over: Sequence[str],
    sizes: Mapping[str, int],
    mesh_devices: int,
    group: tuple[int, int] | None = None,
) -> float:
    """Return the seconds of a collective over some axes of a mesh.

    `sizes` of the mesh axes, the last one of neighboring devices; `mesh_devices`, all of the plan;
    `group`: as of `Collective`.
    """
    size = stride = 1
    spans = False
    for axis in reversed(list(sizes)):
        if axis in over:
            size *= sizes[axis]
            spans = True
        elif not spans:
            stride *= sizes[axis]
    if group is not None:
        size, stride = group[0], group[1] * stride
    return machine.collective_seconds(kind, bytes_sent, size, stride, mesh_devices=mesh_devices)


@final
class Clock:
    """Turns work into seconds, on the machine's devices that run a plan.

    `rates`: of the devices that count, where they are not all alike.
    """

    def __init__(self, plan: Plan, machine: Machine, rates: Machine | None = None) -> None:
        self._sizes = {axis: plan.axes[axis] for axis in MESH_AXES}
        self._machine, self._devices = machine, plan.devices
        self._rates = [rates] if rates else rates_of_stages(plan, machine)

    def seconds(self, work: Work, stage: int = 0) -> Seconds:
        """Return the seconds of some work on the devices at one index of the axis `pipeline`."""
        rates = self._rates[stage]
        products = sum(
            count * product_seconds(rates, (p.m, p.n, p.k, p.batch), p.dtype, p.bytes)
            for p, count in work.products.items()
        )
        sent: dict[str, float] = defaultdict(float)
        hidden = 0.0
        for sending in work.sending:
            each = [self._sending(collective) for collective in sending.collectives]
            waits = self._waits(sending, each, stage)
            for collective, seconds, wait in zip(sending.collectives, each, waits, strict=True):
                trips = collective.trips or 1
                sent[names_of(collective.axes)] += trips * wait
                hidden += trips * (seconds - wait)
        return Seconds(
            products,
            rates.traffic_seconds(work.bytes),
            dict(sent),
            rates.start_seconds * work.kernels,
            hidden=hidden,
        )

    def _waits(self, sending: Sending, seconds: Sequence[float], stage: int) -> list[float]:
        """Return how long a device waits for each collective, of which `seconds` are sent.

        Work beside few of them comes first. What is beside several is shared among them by what is
        left of each.
        """
        left = list(seconds)
        for work, places in sorted(sending.beside, key=lambda part: len(part[1])):
            own = self.seconds(dataclasses.replace(work, sending=()), stage).total
            hidden = min(1.0, own / (sum(left[place] for place in places) or math.inf))
            for place in places:
                left[place] *= 1 - hidden
        return left

    def _sending(self, collective: Collective) -> float:
        return collective_seconds(
            self._machine,
            collective.kind,
            collective.bytes_sent,
            collective.axes,
            self._sizes,
            self._devices,
            collective.group,
        )

    def gradient(self, work: StepWork) -> tuple[Seconds, float]:
        """Return the seconds of the gradient, and the flops of its products; of a pipeline those of
        its busiest device."""
        parts = [self.ticks(loop) for loop in work.loops]
        around = self.seconds(work.gradient)
        flops = [part for _, part in parts] or [work.gradient.product_flops]
        return Seconds.sum([*(seconds for seconds, _ in parts), around]), sum(flops)

    def ticks(self, work: TickWork) -> tuple[Seconds, float]:
        """Return the seconds of a loop over ticks, and the flops of its busiest device."""
        schedule = work.pipeline.schedule
        busy, flops = [Seconds()] * schedule.devices, [0.0] * schedule.devices
        seconds: dict[tuple[int, str, int], float] = {}
        for device, line in enumerate(schedule.actions):
            # A device repeats a few actions, each for many microbatches.
            for (kind, chunk), count in Counter((a.kind, a.chunk) for a in line).items():
                done = work.action(kind, chunk * schedule.devices + device)
                takes = self.seconds(done, device)
                seconds[device, kind, chunk] = takes.total
                busy[device] = Seconds.sum([busy[device], takes.times(count)])
                flops[device] += count * done.product_flops
        length = lockstep_seconds(schedule, lambda device, a: seconds[device, a.kind, a.chunk])
        device = max(range(len(busy)), key=lambda index: busy[index].total)
        waits = dataclasses.replace(busy[device], bubble=length - busy[device].total)
        ticks = self.seconds(work.tick).times(len(schedule.ticks))
        return Seconds.sum([waits, ticks]), flops[device]
