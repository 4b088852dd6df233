"""Compile a step for a machine that is not here, and read what its compiler made of it.

A plan says what a step sends and holds; a compiler decides. It merges collectives, splits them,
moves them out of loops, keeps arrays longer, and orders all of it. Example, a transformer under
`Plan(data=4, zero=3, microbatches=2)` for `v5p:2x2x1`:

    memory of a device     planned 34.1 MiB, compiled 40.3 MiB
    all-gather over data   planned 42 × 81.3 MB, compiled 42 × 81.3 MB, 0 % hidden
    a step                 6.1 ms, an estimate: 54 % of the instructions have one

The compilers run on any machine with the package of the device (`plurax.topology`).
"""

import dataclasses
import time
from collections import defaultdict
from collections.abc import Sequence

import jax
import optax
from jaxtyping import PyTree

from plurax import errors
from plurax.analysis.compiled_schedule import CompiledSchedule, walk_schedule
from plurax.analysis.estimate import human_seconds
from plurax.collective import Collective
from plurax.execute.compile import compile
from plurax.execute.population import HyperFn
from plurax.execute.program import Program
from plurax.execute.recorder import record_step
from plurax.hlo.memory import Memory
from plurax.hlo.text import parse
from plurax.members import Members
from plurax.notebook import html_table, text_table
from plurax.plan import Plan
from plurax.targets import Target
from plurax.task import Task
from plurax.trace.clock import names_of
from plurax.trace.collectives import every_collective
from plurax.trace.liveness import peak_bytes
from plurax.tree import human_bytes

Key = tuple[str, str]
"""The kind of a collective, and its mesh axes."""


@dataclasses.dataclass(frozen=True)
class ComparedCollectives:
    """The collectives of a step of one kind over the same mesh axes: planned, and as compiled.

    **Fields:** `kind`, `axes`; `planned_count`, `planned_bytes` and `count`, `bytes`, in one step;
    `dtypes`, as compiled; `in_loop`, how many of the `count` are in a loop; `asynchronous`, how
    many are split, so that a device computes meanwhile; `seconds` of sending, and of these
    `hidden`.
    """

    kind: str
    axes: str
    planned_count: int
    planned_bytes: int
    count: int
    bytes: int
    dtypes: Sequence[str]
    in_loop: int
    asynchronous: int
    seconds: float
    hidden: float

    @property
    def differs(self) -> bool:
        """Whether more or fewer bytes are sent than planned."""
        return self.bytes != self.planned_bytes

    def text(self) -> str:
        """Return what is sent in one line."""
        sent = f"{self.count} × {', '.join(self.dtypes)}, {human_bytes(self.bytes)}"
        if not self.count:
            return f"planned {human_bytes(self.planned_bytes)}, and the compiler left it out"
        if self.differs:
            sent += f" (planned {self.planned_count} ×, {human_bytes(self.planned_bytes)})"
        share = self.hidden / self.seconds if self.seconds else 1.0
        parts = [sent, f"{self.in_loop} in a loop" if self.in_loop else "once a step"]
        parts.append(f"{human_seconds(self.seconds)}, {share:.0%} hidden")
        return ", ".join(parts)


@dataclasses.dataclass(frozen=True, repr=False)
class CompiledFor:
    """A step as the compiler of another machine made it; `compiled_for` returns it.

    **Fields:**

    - `program`: the compiled `Program`, which can be read and not run.
    - `target`: the machine's name; `memory_limit`, bytes that one of its devices has.
    - `compile_seconds`: of tracing and compiling.
    - `memory`: bytes on a device, as the compiler reports them; `planned_peak`, as estimated before
      compiling, None for members.
    - `collectives`: planned beside compiled, by kind and mesh axes.
    - `schedule`: the walk along the compiled schedule: seconds, an estimate, and what is hidden.
    """

    program: Program
    target: str
    memory_limit: int
    compile_seconds: float
    memory: Memory
    planned_peak: int | None
    collectives: Sequence[ComparedCollectives]
    schedule: CompiledSchedule

    @property
    def fits(self) -> bool:
        """Whether the step fits the memory of a device."""
        return self.memory.peak <= self.memory_limit

    def rows(self) -> list[tuple[str, str]]:
        """Return all of it as names and texts, one line for each part."""
        held, schedule = self.memory, self.schedule
        limit = human_bytes(self.memory_limit)
        verdict = f"of {limit}" if self.fits else f"of {limit}: does not fit"
        planned = ""
        if self.planned_peak is not None:
            planned = f", planned {human_bytes(self.planned_peak)}"
        rows = [
            ("compiled in", human_seconds(self.compile_seconds)),
            ("memory of a device", f"{human_bytes(held.peak)} {verdict}{planned}"),
            ("  state and batch", human_bytes(held.arguments)),
            ("  temporaries", human_bytes(held.temporaries)),
            ("  results in memory of their own", human_bytes(held.outputs - held.aliased)),
            ("  code", human_bytes(held.code)),
        ]
        rows += [(f"{one.kind} over {one.axes}", one.text()) for one in self.collectives]
        if not self.collectives:
            rows.append(("sent", "nothing"))
        covered = f"an estimate; {schedule.covered:.0%} of the instructions have one"
        rows.append(("a step", f"{human_seconds(schedule.seconds)}, {covered}"))
        rows.append(("  computing", human_seconds(schedule.computing)))
        if schedule.sending:
            sending, share = human_seconds(schedule.sending), f"{schedule.hidden:.0%}"
            rows.append(("  sending", f"{sending}, {share} of it hidden behind computing"))
        return [row for row in rows if row[1] != "0 B"]

    def _title(self) -> str:
        return f"Plan({self.program.plan.sizes_text()}) compiled for {self.target}"

    def __repr__(self) -> str:
        return (
            f"CompiledFor({self._title()}: {human_seconds(self.schedule.seconds)} per step, "
            f"{human_bytes(self.memory.peak)} per device)"
        )

    def __str__(self) -> str:
        return text_table(self._title(), self.rows())

    def _repr_html_(self) -> str:
        return html_table(self._title(), ["", ""], self.rows())


def compiled_for(
    task: Task | HyperFn,
    optimizer: optax.GradientTransformation | HyperFn,
    plan: Plan,
    batch: PyTree,
    machine: str,
    *,
    members: Members | None = None,
) -> CompiledFor:
    """Compile a step for a machine that is not here, and return what its compiler made of it.

    **Arguments:** as for `compile`; `machine`, a name as `plurax.topology` takes it.

    Nothing is placed or run. A model of a billion parameters takes a minute on two cores.

    Raises the errors of `compile` and of `plurax.topology`, and `OutOfMemoryError`, with the
    compiler's figure, where the step does not fit a device.
    """
    target = Target.of(machine)
    started = time.perf_counter()
    devices = target.devices()
    try:
        program = compile(task, optimizer, plan, batch, members=members, devices=devices)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise _does_not_fit(plan, target, str(error)) from None
    seconds = time.perf_counter() - started
    planned, peak = [], None
    if members is None:
        assert isinstance(task, Task)
        trace = record_step(task, optimizer, plan, batch)
        planned = every_collective(trace)
        peak = peak_bytes(trace, target.machine.platform)
    schedule = walk_schedule(parse(program.hlo()), program.mesh, target.machine, target.clock)
    return CompiledFor(
        program=program,
        target=target.name,
        memory_limit=int(target.machine.memory),
        compile_seconds=seconds,
        memory=program.memory(),
        planned_peak=peak,
        collectives=_compared(planned, schedule),
        schedule=schedule,
    )


def _does_not_fit(plan: Plan, target: Target, reason: str) -> errors.OutOfMemoryError:
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    used = next((line for line in lines if "Used" in line or "exceed" in line.lower()), lines[0])
    return errors.OutOfMemoryError(
        f"Plan({plan.sizes_text()}) does not fit {target.name}: its compiler says {used[:300]!r}. "
        "More microbatches, remat='full' and a higher zero need less; plurax.search(task, "
        "optimizer, batch, machine) finds the fastest plan that fits."
    )


def _compared(
    planned: Sequence[Collective], schedule: CompiledSchedule
) -> list[ComparedCollectives]:
    """Return planned and compiled collectives by kind and mesh axes."""
    plans: dict[Key, list[Collective]] = defaultdict(list)
    for collective in planned:
        plans[_key(collective)].append(collective)
    compiled = defaultdict(list)
    for record in schedule.collectives:
        compiled[_key(record.collective)].append(record)
    compared = []
    for key in dict.fromkeys([*plans, *compiled]):
        own = compiled[key]
        counts = [one.collective.trips or 1 for one in own]
        compared.append(
            ComparedCollectives(
                *key,
                planned_count=sum(one.trips or 1 for one in plans[key]),
                planned_bytes=sum(one.bytes * (one.trips or 1) for one in plans[key]),
                count=sum(counts),
                bytes=sum(one.collective.bytes * n for one, n in zip(own, counts, strict=True)),
                dtypes=sorted({one.dtype for one in own}),
                in_loop=sum(
                    n for one, n in zip(own, counts, strict=True) if one.collective.in_loop
                ),
                asynchronous=sum(n for one, n in zip(own, counts, strict=True) if one.asynchronous),
                seconds=sum(one.seconds for one in own),
                hidden=sum(one.hidden for one in own),
            )
        )
    return compared


def _key(collective: Collective) -> Key:
    return collective.equivalent_kind or collective.kind, names_of(collective.axes)
