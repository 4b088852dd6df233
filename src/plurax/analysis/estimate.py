"""Seconds, memory and bytes sent of one given plan on a machine, before anything is compiled.

The step is recorded as it runs on the machine's platform (`plurax.execute.recorder`); its seconds
are by `plurax.trace.clock`, its memory by `plurax.trace.liveness`, both by the rules of the
machine's compiler. A search ranks plans by the same numbers.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import optax
from jaxtyping import PyTree

from plurax import errors
from plurax.execute.check import check_kinds
from plurax.execute.placement import leading_dim
from plurax.execute.population import HyperFn
from plurax.execute.recorder import record_population, record_steady_step
from plurax.loop.iterate import SECONDS_PER_CALL
from plurax.machine import Machine
from plurax.members import Members
from plurax.notebook import html_table, text_table
from plurax.plan import Plan
from plurax.task import Task
from plurax.trace.clock import Clock, Seconds, names_of, rates_of_replicas
from plurax.trace.collectives import every_collective
from plurax.trace.compilers import rules_of
from plurax.trace.liveness import temporaries
from plurax.trace.step_trace import StepTrace
from plurax.trace.work import work_of_step
from plurax.tree import human_bytes, with_rows

LARGEST_KEPT = 2**25
"""The bytes of the largest block that a CPU's `malloc` keeps when it is freed; what is larger the
system hands out anew (glibc, https://man7.org/linux/man-pages/man3/mallopt.3.html, mmap threshold).
"""


@dataclasses.dataclass(frozen=True, repr=False)
class Estimate:
    """What a step takes, holds and sends under a plan, on each device of a machine.

    **Fields:**

    - `plan`, `machine`; `batch_size`, the examples of a step. Where devices differ, seconds and
      bytes sent are those of the slowest replica, with its own number of microbatches.
    - `gradient`, `update`: the `Seconds` of the gradient and of the optimizer's update.
    - `memory`: bytes at the moment when the most are held, by kind: `parameters`, `optimizer`,
      `model_state`, `batch`, `gradients`, and `temporaries`, which are activations above all; on
      TPUs `padding`, what whole tiles take of state and batch; in `fit` also `data`, what it keeps
      on every device of the data and their order.
    - `bytes_sent`: in a step, by mesh axes.
    - `product_flops`: operations of matrix products in a step; of a pipeline, of its busiest
      device.
    - `members` of a population, each of which takes such a step; None for one network. An update
      follows each chunk's gradients, so that its seconds are among those of `gradient`.
    """

    plan: Plan
    machine: Machine
    batch_size: int
    gradient: Seconds
    update: Seconds
    memory: Mapping[str, int] = dataclasses.field(hash=False)
    bytes_sent: Mapping[str, float] = dataclasses.field(hash=False)
    product_flops: float
    members: int | None = None

    @property
    def seconds(self) -> float:
        """The seconds of a step."""
        return self.gradient.total + self.update.total

    @property
    def between(self) -> tuple[float, float]:
        """The seconds between which a step is expected to be measured.

        The least if nothing is waited for, neither collectives nor other stages of a pipeline, at
        the machine's peaks, of which `Machine.efficiency` is expected; the most at two thirds of
        the expected rates, where power is limited. Of 62 published runs 58 are in between
        (`benchmarks/published.py`).
        """
        parts = (self.gradient, self.update)
        works = sum(part.products + part.traffic + part.overhead + part.paging for part in parts)
        return self.machine.efficiency * works, self.seconds * 1.5

    @property
    def peak(self) -> int:
        """The most bytes that a device holds."""
        return sum(self.memory.values())

    @property
    def total_sent(self) -> float:
        """The bytes that a device sends in a step, over all axes."""
        return sum(self.bytes_sent.values())

    @property
    def margin(self) -> int:
        """Bytes by which the compiler of the machine may need more than `peak`; none on CPUs."""
        return rules_of(self.machine.platform).margin_of(self.peak)

    @property
    def spare(self) -> int:
        """The bytes of a device's memory that are left beside `peak` and `margin`; negative where
        the plan does not fit."""
        return int(self.machine.memory) - self.peak - self.margin

    @property
    def fits(self) -> bool:
        """Whether the plan fits the memory of a device, with `margin`."""
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
            "pages of new memory": self.gradient.paging,
            "optimizer's update": self.update.total,
        }

    def rows(self) -> list[tuple[str, str]]:
        """Return the estimate as names and texts, one line for each part."""
        of_all = "" if self.members is None else f", {self.members} members"
        rows = [("a step", f"{human_seconds(self.seconds)}, {self.batch_size} examples{of_all}")]
        rows += [
            (f"  {name}", f"{human_seconds(part)}  {part / self.seconds:.0%}")
            for name, part in self.parts().items()
            if part
        ]
        if hidden := self.gradient.hidden + self.update.hidden:
            rows.append(("  sent meanwhile", f"{human_seconds(hidden)}, in no time of its own"))
        least, most = map(human_seconds, self.between)
        rows.append(("  between", f"{least} (no waits, peaks) and {most} (two thirds of rates)"))
        if self.machine.correction != 1:
            rows.append(("  by runs", f"× {self.machine.correction:g}, in all of these"))
        limit = human_bytes(self.machine.memory)
        left = human_bytes(abs(self.spare))
        verdict = f"{left} are left" if self.fits else f"does not fit: {left} too much"
        rows.append(("memory of a device", f"{human_bytes(self.peak)} of {limit}: {verdict}"))
        rows += [(f"  {kind}", human_bytes(size)) for kind, size in self.memory.items() if size]
        if self.margin:
            rows.append(("  margin", f"{human_bytes(self.margin)} beside these"))
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
        return text_table(self._title(), self.rows())

    def _repr_html_(self) -> str:
        return html_table(self._title(), ["", ""], self.rows())

    def _title(self) -> str:
        # Without the shardings, which may fill pages.
        return f"Plan({self.plan.sizes_text()}) on {self.machine.name}"


def estimate(
    task: Task | HyperFn,
    optimizer: optax.GradientTransformation | HyperFn,
    plan: Plan,
    batch: PyTree,
    machine: Machine,
    members: Members | None = None,
) -> Estimate:
    """Return what a step will take, hold and send, without compiling it.

    **Arguments:** as for `compile`; `machine`, whose devices need not be here. Of a plan's `chunk`
    and `batch_dim` for `members`, if it leaves them open, the rule of the machine's platform
    decides; the result's `plan` has them.

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
    # CPUs round to a plan's `reduce_dtype`, and send as without it.
    sent = dataclasses.replace(plan, reduce_dtype=None) if machine.platform == "cpu" else plan
    check_kinds(task, optimizer, plan, members)

    def recorded(sent: Plan, batch: PyTree) -> StepTrace:
        if members is None:
            assert isinstance(task, Task)
            trace = record_steady_step(task, optimizer, sent, batch, machine.platform)
        else:
            trace = record_population(task, optimizer, sent, batch, members, machine.platform)
        own = dataclasses.replace(trace.plan, reduce_dtype=plan.reduce_dtype)
        return dataclasses.replace(trace, plan=own)

    replicas: Mapping[Any, int] = {None: plan.most_microbatches}
    if plan.pipeline == 1:
        replicas = rates_of_replicas(plan, machine)
    traces = {count: recorded(*_alike(sent, batch, count)) for count in {*replicas.values()}}
    every = [estimate_trace(traces[count], machine, rates) for rates, count in replicas.items()]
    slowest = max(every, key=lambda one: one.seconds)
    return dataclasses.replace(
        slowest,
        plan=dataclasses.replace(slowest.plan, microbatches=plan.microbatches),
        batch_size=leading_dim(batch),
        # On all devices arrays are as large as the most microbatches need.
        memory=every[[*replicas.values()].index(plan.most_microbatches)].memory,
        members=None if members is None else members.count,
    )


def _alike(plan: Plan, batch: PyTree, count: int) -> tuple[Plan, PyTree]:
    """Return the plan of whose devices all do what one with `count` microbatches does, and its
    batch."""
    if count == plan.microbatches:
        return plan, batch
    size = plan.padded_size(leading_dim(batch)) // plan.parts * count * plan.data
    return dataclasses.replace(plan, microbatches=count), with_rows(batch, size)


def estimate_trace(trace: StepTrace, machine: Machine, rates: Machine | None = None) -> Estimate:
    """Return the `Estimate` of a recorded step, on devices of some `rates` where the machine's
    differ. See `estimate`."""
    rules = rules_of(machine.platform)
    clock, work = Clock(trace.plan, machine, rates), work_of_step(trace, rules, machine.fast_memory)
    gradient, flops = clock.gradient(work)
    needed = temporaries(trace.block, trace.state, rules, machine.fast_memory)
    padding = sum(rules.size(value, False) - value.bytes for value in trace.arguments)
    gradients, update = min(trace.memory.gradients, needed), clock.seconds(work.update)
    paging = _paging_seconds(rates or machine, needed, gradient.total + update.total)
    memory = {
        "parameters": trace.memory.parameters,
        "optimizer": trace.memory.optimizer,
        "model_state": trace.memory.model_state,
        "batch": trace.memory.batch,
        "gradients": gradients,
        "temporaries": needed - gradients,
    }
    if padding:
        memory["padding"] = padding
    sent: dict[str, float] = defaultdict(float)
    for collective in every_collective(trace):
        sent[names_of(collective.axes)] += collective.bytes_sent * (collective.trips or 1)
    return Estimate(
        trace.plan,
        machine,
        trace.batch_size,
        dataclasses.replace(gradient, paging=paging),
        update,
        memory,
        dict(sent),
        flops,
    )


def _paging_seconds(machine: Machine, needed: int, seconds: float) -> float:
    """Return the part of a step in which the system hands out the bytes of its temporaries.

    XLA frees what a call needed beside its arguments. A call of `fit` runs the steps that fit
    `SECONDS_PER_CALL`, and at least one.
    """
    if needed <= LARGEST_KEPT:
        return 0.0
    return machine.page_seconds(needed) * min(1.0, seconds / SECONDS_PER_CALL)


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
