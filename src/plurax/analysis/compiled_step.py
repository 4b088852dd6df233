"""Compile for a machine that is not here, and read what its compiler made of it.

A plan says what a step sends and holds; a compiler decides. It merges collectives, splits them,
moves them out of loops, keeps arrays longer, and orders all of it. Example, a transformer under
`Plan(data=4, zero=3, microbatches=2)` for `v5p:2x2x1`:

    memory of a device     planned 34.1 MiB, compiled 40.3 MiB
    all-gather over data   planned 42 × 81.3 MB, compiled 42 × 81.3 MB, 0 % hidden
    a step                 6.1 ms, an estimate: 54 % of the instructions have one

The compilers run on any machine with the package of the device (`plurax.topology`).
"""

import dataclasses
import itertools
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import jax
import optax
from jaxtyping import PyTree

from plurax import errors
from plurax.analysis.compiled_schedule import CompiledSchedule, walk_schedule
from plurax.analysis.estimate import human_seconds
from plurax.collective import Collective, by_kind, in_a_step
from plurax.execute.array_data import ArrayData
from plurax.execute.check import check_kinds
from plurax.execute.placement import leading_dim
from plurax.execute.population import HyperFn
from plurax.execute.program import Program
from plurax.execute.recorder import record_step
from plurax.hlo.live_values import held_at_peak
from plurax.hlo.memory import Memory, memory
from plurax.hlo.text import Module, dims_of, dtype_of, parse
from plurax.jaxpr.compat import open_jaxpr
from plurax.machine import Machine
from plurax.members import Members
from plurax.mesh import make_mesh
from plurax.notebook import html_table, text_table
from plurax.plan import Plan
from plurax.plan_text import ZERO_TEXTS
from plurax.targets import Target
from plurax.task import Task
from plurax.trace.clock import names_of
from plurax.trace.collectives import collectives_of, every_collective
from plurax.trace.compilers import rules_of
from plurax.trace.flatten import Flattener
from plurax.trace.liveness import peak_bytes
from plurax.trace.step_trace import StepTrace, Value
from plurax.tree import human_bytes
from plurax.user_frames import is_users_file

Function = Literal["step", "epoch", "gradients", "evaluate", "predict"]
_TIMED = {"step": "a step", "epoch": "a step of the loop"}
_TAKEN = {"epoch": "state and data", "evaluate": "parameters and batch",
          "predict": "parameters and inputs"}  # fmt: skip

MOST_HELD = 4
"""How many lines are printed of what a step holds, each with a hundredth of it at least."""


@dataclasses.dataclass(frozen=True)
class ComparedCollectives:
    """The collectives of a step of one kind over the same mesh axes: planned, and as compiled.

    **Fields:** `kind`, `axes`; `planned_count`, `planned_bytes`, None where nothing says what is
    planned (members), and `count`, `bytes`, in one step or one call of another function; `dtypes`,
    as compiled; `in_loop`, how many of the `count` are in a loop; `asynchronous`, how many are
    split, so that a device computes meanwhile; `seconds` of sending, and of these `hidden`.
    """

    kind: str
    axes: str
    planned_count: int | None
    planned_bytes: int | None
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
        return self.planned_bytes is not None and self.bytes != self.planned_bytes

    def text(self) -> str:
        """Return what is sent in one line."""
        sent = f"{self.count} × {', '.join(self.dtypes)}, {human_bytes(self.bytes)}"
        if not self.count:
            return f"planned {human_bytes(self.planned_bytes or 0)}, and the compiler left it out"
        if self.differs:
            sent += f" (planned {self.planned_count} ×, {human_bytes(self.planned_bytes or 0)})"
        share = self.hidden / self.seconds if self.seconds else 1.0
        parts = [sent, f"{self.in_loop} in a loop" if self.in_loop else "not in a loop"]
        parts.append(f"{human_seconds(self.seconds)}, {share:.0%} hidden")
        return ", ".join(parts)


@dataclasses.dataclass(frozen=True)
class HeldValues:
    """Equal values that a step holds when it holds most, beside its arguments.

    **Fields:** `count` of them, and their `bytes` in sum; `type`, one's dtype and dims; `operation`
    that computes them, by its JAX name; `line` of the user's code, "" if unknown.
    """

    count: int
    bytes: int
    type: str
    operation: str
    line: str

    def text(self) -> str:
        """Return it in one line."""
        several = f"{self.count} × " if self.count > 1 else ""
        places = [place for place in (self.operation, self.line) if place]
        return ", ".join([f"{human_bytes(self.bytes)}: {several}{self.type}", *places])


@dataclasses.dataclass(frozen=True, repr=False)
class CompiledFor:
    """A step, or another function, as the compiler of another machine made it; `compiled_for`
    returns it.

    **Fields:**

    - `program`: the `Program`, which can be read and not run; `function`, which of its functions
      this is, and `compiled`, that as JAX gives it, with `as_text()` and `cost_analysis()`.
    - `target`: the machine's name; `memory_limit`, bytes that one of its devices has.
    - `compile_seconds`: of tracing and compiling.
    - `memory`: bytes on a device, as the compiler reports them; `planned_peak`, as estimated before
      compiling, None for members and other functions than the step.
    - `held`: the values that take most of the temporaries' memory when the step holds most, the
      largest first, by a walk along the schedule.
    - `collectives`: planned beside compiled, by kind and mesh axes.
    - `schedule`: the walk along the compiled schedule: seconds, an estimate, and what is hidden.
    - `lighter`: where the step does not fit, the plan nearest to it that should; None if none does.
    """

    program: Program
    function: Function
    compiled: jax.stages.Compiled
    target: str
    memory_limit: int
    compile_seconds: float
    memory: Memory
    planned_peak: int | None
    held: Sequence[HeldValues]
    collectives: Sequence[ComparedCollectives]
    schedule: CompiledSchedule
    lighter: Plan | None = None

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
            *([("  should fit", f"Plan({self.lighter.sizes_text()})")] if self.lighter else []),
            (f"  {_TAKEN.get(self.function, 'state and batch')}", human_bytes(held.arguments)),
            ("  temporaries", human_bytes(held.temporaries)),
            *(
                ("    of these", values.text())
                for values in self.held[:MOST_HELD]
                if 0 < held.temporaries / 100 <= values.bytes
            ),
            ("  results in memory of their own", human_bytes(held.outputs - held.aliased)),
            ("  code", human_bytes(held.code)),
        ]
        rows += [(f"{one.kind} over {one.axes}", one.text()) for one in self.collectives]
        if not self.collectives:
            rows.append(("sent", "nothing"))
        covered = f"an estimate; {schedule.covered:.0%} of the instructions have one"
        timed = _TIMED.get(self.function, self.function)
        rows.append((timed, f"{human_seconds(schedule.seconds)}, {covered}"))
        rows.append(("  computing", human_seconds(schedule.computing)))
        if schedule.sending:
            sending, share = human_seconds(schedule.sending), f"{schedule.hidden:.0%}"
            rows.append(("  sending", f"{sending}, {share} of it hidden behind computing"))
        return [row for row in rows if row[1] != "0 B"]

    def _title(self) -> str:
        what = "" if self.function == "step" else f", {self.function},"
        return f"Plan({self.program.plan.sizes_text()}){what} compiled for {self.target}"

    def __repr__(self) -> str:
        return (
            f"CompiledFor({self._title()}: {human_seconds(self.schedule.seconds)} for "
            f"{_TIMED.get(self.function, self.function)}, {human_bytes(self.memory.peak)} per "
            "device)"
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
    function: Function = "step",
    data: PyTree | ArrayData = None,
    compiler_options: Mapping[str, bool | int | float | str] | None = None,
) -> CompiledFor:
    """Compile a step for a machine that is not here, and return what its compiler made of it.

    **Arguments:** as for `compile`; `machine`, a name as `plurax.topology` takes it.

    - `function`: what is compiled in place of the step: `"epoch"`, the loop of `fit` over data on
      the devices; `"gradients"`, what a worker of parameter servers computes; `"evaluate"`, a
      chunk of an evaluation, without gradient; `"predict"`, the outputs for a batch.
    - `data`: of an epoch the whole data set, for `predict` inputs, by default those of the batch:
      arrays or `jax.ShapeDtypeStruct`s. Of an epoch also `plurax.train.ArrayData`, which says what
      a smaller last batch becomes.

    Nothing is placed or run. A model of a billion parameters takes a minute on two cores.

    Raises as `compile` and `plurax.topology`, `OutOfMemoryError`, with the compiler's figure, where
    it does not fit a device, and `BatchError` for `data` that the `function` does not read.
    """
    target = Target.of(machine)
    _check_function(function, data, batch)
    check_kinds(task, optimizer, plan, members)
    started = time.perf_counter()
    mesh = make_mesh(plan, target.devices())
    reads: ArrayData | None = None
    if function == "epoch":
        reads = data if isinstance(data, ArrayData) else ArrayData(data, leading_dim(batch))
        reads = reads.read_by(members) if members else reads
    is_step, lighter = function == "step" and members is None, None
    try:
        own = reads if members else None
        program = Program(task, optimizer, plan, batch, mesh, members, own, compiler_options)
        traced, compiled = _compile(program, function, batch, reads if reads else data)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        if is_step:
            lighter = _lighter(task, optimizer, plan, batch, target.machine)
        raise _does_not_fit(function, plan, target, str(error), lighter) from None
    seconds = time.perf_counter() - started
    planned: list[Collective] | None
    planned, peak = None, None
    if members is None:
        assert isinstance(task, Task)
        trace = record_step(task, optimizer, plan, batch, target.machine.platform)
        planned = every_collective(trace) if traced is None else _planned(function, traced, trace)
        peak = peak_bytes(trace, *_compiler_of(target.machine)) if is_step else None
    module, held = parse(compiled.as_text() or ""), memory(compiled)
    schedule = walk_schedule(module, program.mesh, target.machine, target.clock)
    if is_step and held.peak > target.machine.memory:
        lighter = _lighter(task, optimizer, plan, batch, target.machine)
    return CompiledFor(
        program=program,
        function=function,
        compiled=compiled,
        target=target.name,
        memory_limit=int(target.machine.memory),
        compile_seconds=seconds,
        memory=held,
        planned_peak=peak,
        held=_held(module),
        collectives=_compared(planned, schedule),
        schedule=schedule,
        lighter=lighter,
    )


def _check_function(function: str, data: Any, batch: PyTree) -> None:
    """Raise where there is no such function, or the data are not what it reads."""
    if function not in get_args(Function):
        raise errors.ArgumentError(
            f"plurax.analysis.compiled_for(function={function!r}): function has to be one of "
            f"{', '.join(map(repr, get_args(Function)))}."
        )
    if function == "epoch" and data is None:
        raise errors.BatchError(
            "function='epoch' compiles the loop over data that are on the devices, and what it "
            "sends and holds depends on their shapes. Give data=..., arrays or "
            "jax.ShapeDtypeStructs with all examples."
        )
    if isinstance(data, ArrayData) and data.batch_size > leading_dim(batch):
        raise errors.steps_exceed_batch("compiled_for", data.batch_size, leading_dim(batch))
    if function not in ("epoch", "predict") and data is not None:
        raise errors.BatchError(
            f"function={function!r} reads the batch alone, and data=... is for 'epoch' (all "
            "examples) and 'predict' (inputs). Leave data out."
        )


def _compile(
    program: Program, function: Function, batch: PyTree, data: Any
) -> tuple[jax.stages.Traced | None, jax.stages.Compiled]:
    """Compile a function of a program; return it traced too unless it is a step or a loop."""
    if function == "step":
        return None, program.compiled_step
    if function == "epoch":
        order = () if program.members else program.place_epoch(*data.epoch_order(0))
        return None, program.compile_loop(program.place_data(data.arrays), order)
    if function == "gradients":
        traced = program.trace_gradients(batch)
    elif function == "evaluate":
        traced = program.trace_evaluate()
    else:
        traced = program.trace_predict(batch if data is None else data)
    return traced, traced.lower().compile()


def _planned(function: Function, traced: jax.stages.Traced, step: StepTrace) -> list[Collective]:
    """Return the collectives of a traced function, on the mesh of a step and in its pipeline."""
    jaxpr, axes = open_jaxpr(traced.jaxpr)[0], step.plan.axes
    block = Flattener(axes).block(jaxpr, [Value(var.aval) for var in jaxpr.invars])
    return collectives_of(block, axes, step.pipelines if function == "gradients" else ())


def _compiler_of(machine: Machine) -> tuple[str, float]:
    """Return what `peak_bytes` has to know of a machine."""
    return machine.platform, machine.fast_memory


def _lighter(task: Any, optimizer: Any, plan: Plan, batch: PyTree, machine: Machine) -> Plan | None:
    """Return the plan nearest to one that should fit a device of a machine, None if none does.

    It has the same mesh. ZeRO costs the least time, more microbatches more, remat the most.
    """
    counts = [plan.replica_microbatches]
    while 2 * sum(counts[-1]) <= leading_dim(batch):
        counts.append(tuple(2 * count for count in counts[-1]))
    remats = dict.fromkeys([plan.remat, "full"])
    levels = [level for level in (0, *ZERO_TEXTS) if level >= plan.zero]
    for remat, microbatches, zero in itertools.product(remats, counts, levels):
        try:
            lighter = dataclasses.replace(plan, remat=remat, microbatches=microbatches, zero=zero)
            if lighter == plan:
                continue
            trace = record_step(task, optimizer, lighter, batch, machine.platform)
            peak = peak_bytes(trace, *_compiler_of(machine))
            if peak + rules_of(machine.platform).margin_of(peak) <= machine.memory:
                return lighter
        except errors.PlanError:  # of a combination that there is not
            continue
    return None


def _does_not_fit(
    function: str, plan: Plan, target: Target, reason: str, lighter: Plan | None
) -> errors.OutOfMemoryError:
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    used = next((line for line in lines if "Used" in line or "exceed" in line.lower()), lines[0])
    advice = f"Plan({lighter.sizes_text()}) should fit" if lighter else "A larger mesh needs less"
    return errors.OutOfMemoryError(
        f"the {function} of Plan({plan.sizes_text()}) does not fit {target.name}: its "
        f"compiler says {used[:300]!r}. {advice}; plurax.search(task, optimizer, "
        "batch, machine) finds the fastest plan that fits."
    )


def _held(module: Module) -> list[HeldValues]:
    """Return what a program holds at its peak, equal values together, the largest sums first."""
    groups: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for value in held_at_peak(module):
        dims = ", ".join(map(str, dims_of(value.type)))
        operation = value.instruction.op_name.rpartition("/")[2]
        operation = operation if operation.isidentifier() else ""  # the name of a call says nothing
        files = module.lines(value.instruction)
        line = next((f"{Path(f).name}:{n}" for f, n in files if is_users_file(f)), "")
        groups[f"{dtype_of(value.type)} ({dims})", operation, line].append(value.bytes)
    held = [HeldValues(len(sizes), sum(sizes), *key) for key, sizes in groups.items()]
    return sorted(held, key=lambda values: -values.bytes)


def _compared(
    planned: Sequence[Collective] | None, schedule: CompiledSchedule
) -> list[ComparedCollectives]:
    """Return planned and compiled collectives by kind and mesh axes."""
    plans, compiled = by_kind(planned or ()), defaultdict(list)
    for record in schedule.collectives:
        compiled[record.collective.key].append(record)
    compared = []
    for key in dict.fromkeys([*plans, *compiled]):
        own, plan = compiled[key], plans.get(key, ())
        counts = [one.collective.trips or 1 for one in own]
        compared.append(
            ComparedCollectives(
                key[0],
                names_of(key[1]),
                planned_count=None if planned is None else in_a_step(plan, lambda one: 1),
                planned_bytes=None if planned is None else in_a_step(plan, lambda one: one.bytes),
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
