"""Seconds, memory and bytes sent of one given plan on a machine, before anything is compiled.

    kernels of a step           seconds of each
    a matrix product            the longer of multiplying and of reading and writing its matrices
    another kernel              reading and writing its arrays
    a collective                sending its bytes over the slowest links of its group
    every kernel                the overhead of starting it

They are added up: a program of plurax sends and computes one after another. A pipeline's devices
run different actions at a time; its ticks take as long as their slowest action, and what a device
waits is the bubble:

    tick       0    1    2    3    4    5
    device 0   F0   F1   B0   -    B1   -       2 forwards, 2 backwards of 6 ticks: the bubble is
    device 1   -    F0   B0   F1   B1   -       what is left
"""

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

import optax
from jaxtyping import PyTree

from plurax import errors
from plurax.analysis.device_program import Op
from plurax.analysis.fusion import Kernel, kernels
from plurax.analysis.liveness import temporaries
from plurax.analysis.plan_ahead import TracedPlan, trace_plan
from plurax.analysis.work import Work, work_of
from plurax.collective import Collective
from plurax.machine import Machine
from plurax.notebook import html_table
from plurax.pipeline.schedule import ticks
from plurax.plan import MESH_AXES, Plan
from plurax.task import Task
from plurax.tree import human_bytes


@dataclasses.dataclass(frozen=True)
class Seconds:
    """Seconds of a step on one device, by what it does.

    **Fields:** `products`, matrix products and convolutions; `traffic`, the memory traffic of all
    other kernels; `collectives`, by mesh axes, like `data` or `data+tensor`; `overhead`, of
    starting kernels; `bubble`, waiting for other stages of a pipeline.
    """

    products: float = 0.0
    traffic: float = 0.0
    collectives: Mapping[str, float] = dataclasses.field(default_factory=dict, hash=False)
    overhead: float = 0.0
    bubble: float = 0.0

    @property
    def total(self) -> float:
        """All of them."""
        sent = sum(self.collectives.values())
        return self.products + self.traffic + sent + self.overhead + self.bubble

    @staticmethod
    def sum(parts: Iterable["Seconds"]) -> "Seconds":
        """Return the seconds of all parts, one after another."""
        parts = list(parts)
        sent: dict[str, float] = defaultdict(float)
        for axes, seconds in (one for part in parts for one in part.collectives.items()):
            sent[axes] += seconds
        return Seconds(
            sum(part.products for part in parts),
            sum(part.traffic for part in parts),
            dict(sent),
            sum(part.overhead for part in parts),
            sum(part.bubble for part in parts),
        )

    def times(self, count: int) -> "Seconds":
        """Return the seconds of so many repetitions."""
        return Seconds(
            self.products * count,
            self.traffic * count,
            {axes: seconds * count for axes, seconds in self.collectives.items()},
            self.overhead * count,
            self.bubble * count,
        )


@dataclasses.dataclass(frozen=True, repr=False)
class Estimate:
    """What a step takes, holds and sends under a plan, on each device of a machine.

    **Fields:**

    - `plan`, `machine`; `batch_size`, the examples of a step.
    - `gradient`, `update`: the `Seconds` of the gradient and of the optimizer's update.
    - `memory`: bytes at the moment when the most are held, by kind: `parameters`, `optimizer`,
      `model_state`, `batch`, `gradients`, and `temporaries`, which are activations above all; in
      `fit` also `data`, what it keeps on every device of the data and their order.
    - `bytes_sent`: in a step, by mesh axes.
    - `product_flops`: operations of matrix products in a step; of a pipeline, of its busiest
      device.
    """

    plan: Plan
    machine: Machine
    batch_size: int
    gradient: Seconds
    update: Seconds
    memory: Mapping[str, int] = dataclasses.field(hash=False)
    bytes_sent: Mapping[str, float] = dataclasses.field(hash=False)
    product_flops: float

    @property
    def seconds(self) -> float:
        """The seconds of a step."""
        return self.gradient.total + self.update.total

    @property
    def peak(self) -> int:
        """The most bytes that a device holds."""
        return sum(self.memory.values())

    @property
    def total_sent(self) -> float:
        """The bytes that a device sends in a step, over all axes."""
        return sum(self.bytes_sent.values())

    @property
    def spare(self) -> int:
        """The bytes of a device's memory that are left; negative where the plan does not fit."""
        return int(self.machine.memory) - self.peak

    @property
    def fits(self) -> bool:
        """Whether the plan fits the memory of a device."""
        return self.spare >= 0

    def seconds_for(self, examples: float) -> float:
        """Return the seconds in which that many examples are trained on."""
        return self.seconds * examples / self.batch_size

    def device_hours(self, examples: float) -> float:
        """Return the hours of all devices together for that many examples."""
        return self.seconds_for(examples) * self.plan.devices / 3600

    def parts(self) -> dict[str, float]:
        """Return the seconds of a step by what a device does; those that it does not do are 0."""
        return {
            "matrix products": self.gradient.products,
            "memory traffic": self.gradient.traffic,
            **{f"collectives over {a}": s for a, s in self.gradient.collectives.items()},
            "starting kernels": self.gradient.overhead,
            "pipeline bubble": self.gradient.bubble,
            "optimizer's update": self.update.total,
        }

    def rows(self) -> list[tuple[str, str]]:
        """Return the estimate as names and texts, one line for each part."""
        rows = [("a step", f"{human_seconds(self.seconds)}, {self.batch_size} examples")]
        rows += [
            (f"  {name}", f"{human_seconds(part)}  {part / self.seconds:.0%}")
            for name, part in self.parts().items()
            if part
        ]
        if self.machine.correction != 1:
            rows.append(("  by runs", f"× {self.machine.correction:g}, in all of these"))
        limit = human_bytes(self.machine.memory)
        left = human_bytes(abs(self.spare))
        verdict = f"{left} are left" if self.fits else f"does not fit: {left} too much"
        rows.append(("memory of a device", f"{human_bytes(self.peak)} of {limit}: {verdict}"))
        rows += [(f"  {kind}", human_bytes(size)) for kind, size in self.memory.items() if size]
        if self.bytes_sent:
            rows.append(("sent by a device", f"{human_bytes(self.total_sent)} in a step"))
            rows += [(f"  over {a}", human_bytes(size)) for a, size in self.bytes_sent.items()]
        return rows

    def __repr__(self) -> str:
        fit = "fits" if self.fits else "does not fit"
        return (
            f"Estimate({self._title()}: {human_seconds(self.seconds)} per step, "
            f"{human_bytes(self.peak)} per device, {fit})"
        )

    def __str__(self) -> str:
        rows = self.rows()
        width = max(len(name) for name, _ in rows) + 2
        lines = [f"{name:{width}}{text}" for name, text in rows]
        return "\n".join([self._title(), *(f"  {line}" for line in lines)])

    def _repr_html_(self) -> str:
        return html_table(self._title(), ["", ""], self.rows())

    def _title(self) -> str:
        # Without the shardings, which may fill pages.
        return f"Plan({self.plan.sizes_text()}) on {self.machine.name}"


def estimate(
    task: Task,
    optimizer: optax.GradientTransformation,
    plan: Plan,
    batch: PyTree,
    machine: Machine,
) -> Estimate:
    """Return what a step will take, hold and send, without compiling it.

    **Arguments:** as for `compile`; `machine`, whose devices need not be here.

    Raises the errors that `compile` raises while it traces the step, and `MachineError` for a plan
    of more devices than the machine has.

    >>> import jax, jax.numpy as jnp, optax, plurax as px
    >>> task = px.Task(
    ...     init=lambda key: jnp.zeros((1024, 256)),
    ...     loss=lambda params, batch, keys: jnp.sum((batch["x"] @ params) ** 2, axis=1),
    ... )
    >>> batch = {"x": jax.ShapeDtypeStruct((4096, 1024), jnp.float32)}
    >>> machine = px.Machine.preset("8xA100-80GB")
    >>> found = px.estimate(task, optax.adam(1e-3), px.Plan(data=8), batch, machine)
    >>> found.fits, found.memory["optimizer"], found.product_flops
    (True, 2097156, 536870912.0)
    """
    if not isinstance(machine, Machine):
        raise errors.machine_wrong_type(machine)
    if plan.devices > machine.devices:
        raise errors.MachineError(
            f"Plan({plan.sizes_text()}) needs {plan.devices} devices, and {machine.name} has "
            f"{machine.devices}. Estimate it on a machine of more nodes: "
            "plurax.Machine.preset('8xA100-80GB', nodes=4)."
        )
    return estimate_traced(trace_plan(task, optimizer, plan, batch), machine)


def estimate_traced(traced: TracedPlan, machine: Machine) -> Estimate:
    """Return the `Estimate` of a plan that is traced already. See `estimate`."""
    plan, program, planned = traced.plan, traced.program, traced.planned
    clock = Clock(traced, machine)
    found = kernels(program.block)
    after = set(program.block.ops[program.update :])
    gradient = [kernel for kernel in found if after.isdisjoint(kernel.ops)]
    update = work_of([one for one in found if not after.isdisjoint(one.ops)], plan.axes)
    if traced.parts is None:
        done = work_of(gradient, plan.axes)
        seconds, flops = clock.seconds(done), done.product_flops
        collectives = [*done.collectives, *update.collectives]
    else:
        seconds, flops = pipelined(gradient, traced, clock)
        collectives = []
    held = planned.memory
    memory = {
        "parameters": held.parameters,
        "optimizer": held.optimizer,
        "model_state": held.model_state,
        "batch": held.batch,
    }
    extra = temporaries(program.block, program.state)
    memory["gradients"] = min(held.gradients, extra)
    memory["temporaries"] = extra - memory["gradients"]
    sent: dict[str, float] = defaultdict(float)
    for one in planned.collectives or collectives:
        sent[_over(one)] += one.bytes_sent * (one.trips or 1)
    return Estimate(
        plan, machine, traced.batch_size, seconds, clock.seconds(update), memory, dict(sent), flops
    )


def _over(one: Collective) -> str:
    return "+".join(axis for axis in MESH_AXES if axis in one.axes)


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


class Clock:
    """Turns work into seconds, on the machine's devices that run a plan."""

    def __init__(self, traced: TracedPlan, machine: Machine) -> None:
        self.axes, self.machine = traced.plan.axes, machine
        self.devices = traced.plan.devices
        self.rates = rates_of_stages(traced.plan, machine)

    def seconds(self, work: Work, stage: int = 0) -> Seconds:
        """Return the seconds of some work on the devices at one index of the axis `pipeline`."""
        rates = self.rates[stage]
        products = sum(
            count
            * max(
                rates.product_seconds(one.m, one.n, one.k, one.dtype, one.batch),
                rates.traffic_seconds(one.bytes),
            )
            for one, count in work.products.items()
        )
        sent: dict[str, float] = defaultdict(float)
        for one in work.collectives:
            sent[_over(one)] += (one.trips or 1) * self._collective(one)
        return Seconds(
            products,
            rates.traffic_seconds(work.bytes),
            dict(sent),
            rates.start_seconds * work.kernels,
        )

    def _collective(self, one: Collective) -> float:
        size = stride = 1
        spans = False
        for axis in reversed(MESH_AXES):
            if axis in one.axes:
                size *= self.axes[axis]
                spans = True
            elif not spans:
                stride *= self.axes[axis]
        return self.machine.collective_seconds(
            one.kind, one.bytes_sent, size, stride, mesh_devices=self.devices
        )


# --- Pipelines ------------------------------------------------------------------------------------


def pipelined(found: Sequence[Kernel], traced: TracedPlan, clock: Clock) -> tuple[Seconds, float]:
    """Return the seconds of a pipeline's gradient on its busiest device, and that one's flops.

    The program runs the ticks of the schedule in one loop. In its body each action of each part of
    a stage (embedding, one layer, head) is a loop that runs or not; a device runs in each tick what
    the schedule says.
    """
    sizes, pipeline = clock.axes, traced.parts
    assert pipeline is not None
    loop = next(kernel for kernel in found if _is_tick_loop(kernel))
    parts = [kernel for kernel in loop.inner[0] if kernel.root.name == "while"]
    rest = work_of([kernel for kernel in loop.inner[0] if kernel not in parts], sizes)
    other = clock.seconds(work_of([kernel for kernel in found if kernel is not loop], sizes))
    done = {
        key: work_of(kernel.inner[0], sizes)
        for key, kernel in zip(pipeline.parts(), parts, strict=True)
    }
    schedule, columns = pipeline.schedule, ticks(pipeline.schedule)
    busy, flops = [Seconds()] * schedule.devices, [0.0] * schedule.devices
    seconds: dict[tuple[int, str, int], float] = {}
    for device, line in enumerate(schedule.actions):
        # A device repeats a few actions, each for many microbatches.
        for (kind, chunk), count in Counter((a.kind, a.chunk) for a in line).items():
            work = Work.sum(
                done[kind, part].times(times)
                for part, times in pipeline.of_stage(chunk * schedule.devices + device)
            )
            one = clock.seconds(work, device)
            seconds[device, kind, chunk] = one.total
            busy[device] = Seconds.sum([busy[device], one.times(count)])
            flops[device] += count * work.product_flops
    length = sum(
        max(seconds[d, a.kind, a.chunk] for d, a in enumerate(column) if a is not None)
        for column in columns
    )
    device = max(range(len(busy)), key=lambda index: busy[index].total)
    waits = dataclasses.replace(busy[device], bubble=length - busy[device].total)
    every = Seconds.sum([waits, clock.seconds(rest).times(len(columns)), other])
    return every, flops[device]


def _is_tick_loop(kernel: Kernel) -> bool:
    root: Op = kernel.root
    return root.name == "scan" and any(op.name == "while" for op in root.blocks[0].ops)


def human_seconds(seconds: float) -> str:
    """Return seconds as text, with three digits.

    >>> [human_seconds(s) for s in (0.0000123, 0.5, 90, 3e5)]
    ['12.3 µs', '500 ms', '1.5 min', '3.47 days']
    """
    for unit, size, limit in _UNITS:
        if seconds < limit:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 31_557_600:.3g} years"


_UNITS = (
    ("µs", 1e-6, 1e-3),
    ("ms", 1e-3, 1.0),
    ("s", 1.0, 60.0),
    ("min", 60.0, 3600.0),
    ("hours", 3600.0, 86400.0),
    ("days", 86400.0, 31_557_600.0),
)
