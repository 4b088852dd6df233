"""Choose a population's chunk and batch dim: by a rule, within the memory, or by measuring.

A chunk that is too large falls out of the cache, one that is too small leaves the cores idle
between operations; narrow matrix products run faster on CPU with the batch in the minor dim.

*The rule* (`choose_chunk`), for `fit` and `compile`, reads shapes and the device and no clock: the
same task, plan and device always give the same plan, so that a run repeats bit for bit. It was
fitted to measurements (`benchmarks/choosing.py`, decision 0020):

    on a GPU or TPU: chunk = all members; batch_dim = "major", as the task is written
    on a CPU:        chunk = as many members as keep the bytes of a step below `CACHE`, but at least
                     `FEWEST`; batch_dim = "minor" where the arithmetic is in products of two
                     matrices with fewer than `NARROW` columns on average

Example, 100 MLPs `(2, 20, 20, 1)` with batch 64 on a CPU, each step touching 30 kB:

    target = max(16, 786432 // 30000) = 26 members
    even_chunk(100, 26) = 25      divides 100: no remainder to compile
    columns = 20 < 256            -> Plan(chunk=25, batch_dim="minor")

*The memory* (`choose_plan`): where the rule's estimate comes near the budget, the peak that the
compiled program reports decides, and the chunk is cut to a quarter until it fits.

*Measuring* (`measure_plan`), for `plurax.ensemble.tune` alone, is a hill climb over chunks at one
batch dim. Example, 100 members, chunk and batch dim both open:

    chunk=16 major   2.1 ms      first, as the task is written
    chunk=16 minor   0.9 ms      its losses agree with major: minor wins
    chunk=64 minor   1.3 ms      4 x larger: slower, stop
    chunk=4  minor   0.8 ms      4 x smaller: faster, go on
    chunk=1  minor   2.4 ms      slower, stop
    -> chunk=4, batch_dim="minor"
"""

import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr
from jaxtyping import PyTree

from plurax import tree
from plurax.execute.backends.choose import microbatch, needs_partitioner
from plurax.execute.compiler_options import jitted
from plurax.execute.gradient import gradient
from plurax.execute.initial_state import new_state
from plurax.execute.layouts.state_layout import place_start
from plurax.execute.population import Population
from plurax.execute.rows import abstract_rows
from plurax.execute.step import Metrics
from plurax.hlo.memory import memory
from plurax.jaxpr.compat import called_jaxpr, is_call
from plurax.mesh import memory_budget, platform_of, within
from plurax.plan import BatchDim, Plan
from plurax.state import TrainState

CACHE = 3 * 2**18
"""Bytes of cache per core, roughly: the working set of a chunk stays below it."""
FEWEST = 16
"""The smallest chunk on CPU, however large a member: fewer leave cores idle between operations."""
NARROW = 256
"""Columns of a matrix product from which the batch stays in the major dim."""
NOT_PLAIN = frozenset(["scan", "while", "cond", "conv_general_dilated"])
"""Primitives that may hold most of the arithmetic and have no batch-minor rule."""
ROOM = 16
"""An upper bound on the temporaries of one member of a chunk, in multiples of its step's bytes."""
FIRST_CHUNK = 16
SECONDS = 0.02
"""Minimum seconds of a timed run of fewer than `MOST_STEPS` steps; the best of three counts."""
MOST_STEPS = 64

Lower = Callable[[Population], jax.stages.Lowered]
"""Lowers the program that training will run most: the loop over resident data, or the step."""

Run = Callable[[int], Metrics]
"""A function that runs some steps and returns the metrics of the first, leaves `(K,)`."""


# --- The rule -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class MemberWork:
    """The size and kind of one member's step, read from its traced gradient.

    **Fields:** `bytes`, of its state, its gradient and the results of its matrix products;
    `columns`, the mean number of columns of those products, weighted by their arithmetic (infinite
    where there are none); `plain`, whether every product is of two matrices, outside any loop, and
    there is no convolution.
    """

    bytes: int
    columns: float
    plain: bool


def member_work(population: Population) -> MemberWork:
    """Return the size and kind of one member's step, from its traced gradient."""
    task, optimizer = population.example
    state = jax.eval_shape(lambda: new_state(task, optimizer, jax.random.key(0)))
    rows = abstract_rows(microbatch(population.batch, population.plan, coupled=task.coupled))
    fun = within(population.mesh, gradient(task, population.plan.precision))
    traced = jax.make_jaxpr(fun)(state.params, state.model_state, rows)
    columns, arithmetic, products, plain = 0.0, 0, 0, True
    for equation in _equations(traced.jaxpr):
        if equation.primitive.name == "dot_general":
            out = equation.outvars[0].aval
            (summed, _), batched = equation.params["dimension_numbers"]
            plain &= not any(batched)
            terms = math.prod(equation.invars[0].aval.shape[dim] for dim in summed)
            products += tree.byte_count(out)
            arithmetic += math.prod(out.shape) * terms
            columns += math.prod(out.shape) * terms * (out.shape[-1] if out.ndim else 1)
        plain &= equation.primitive.name not in NOT_PLAIN
    # Its state, and a gradient as large as the parameters.
    kept = (state.params, state.opt_state, state.model_state, state.params)
    touched = tree.byte_count(kept) + products
    return MemberWork(touched, columns / arithmetic if arithmetic else math.inf, plain)


def _equations(jaxpr: Jaxpr) -> Iterator[Any]:
    """Yield all equations, including those of inlined calls such as `jit`."""
    for equation in jaxpr.eqns:
        if is_call(equation):
            yield from _equations(called_jaxpr(equation)[0])
        else:
            yield equation


def choose_chunk(plan: Plan, members: int, work: MemberWork, platform: str) -> Plan:
    """Return the plan with its open choices made.

    **Arguments:** `members`, on one device; `platform`, of the device: `"cpu"`, `"gpu"`, `"tpu"`.

    >>> from plurax.plan import Plan
    >>> spirals = MemberWork(bytes=30_000, columns=20.0, plain=True)
    >>> plan = choose_chunk(Plan(), 100, spirals, "cpu")
    >>> plan.chunk, plan.batch_dim
    (25, 'minor')
    """
    batch_dim: BatchDim = "major"
    if platform == "cpu" and work.plain and work.columns < NARROW:
        batch_dim = "minor"
    target = max(FEWEST, CACHE // max(work.bytes, 1)) if platform == "cpu" else members
    return dataclasses.replace(
        plan,
        chunk=plan.chunk or even_chunk(members, target),
        batch_dim=plan.batch_dim or batch_dim,
    )


def by_rule(population: Population) -> tuple[Plan, MemberWork | None]:
    """Return a population's plan with its open choices made by `choose_chunk`, and the work of a
    member where that was read for it."""
    plan = population.plan
    if needs_partitioner(population.example.task, plan):
        # `batch_dim="minor"` is for unpartitioned members; a partitioned step keeps major.
        plan = dataclasses.replace(plan, batch_dim=plan.batch_dim or "major")
    if plan.chunk is not None and plan.batch_dim is not None:
        return plan, None
    work, platform = member_work(population), platform_of(population.mesh) or "cpu"
    return choose_chunk(plan, population.layout.slots // plan.member, work, platform), work


def even_chunk(members: int, target: int) -> int:
    """Return a chunk near `target`, a divisor of `members` if one is within a factor of two.

    A remainder is a second body of the same program and takes as long to compile as the first.

    >>> even_chunk(100, 12), even_chunk(97, 12), even_chunk(5, 12)
    (10, 11, 5)
    """
    if target >= members:
        return members
    near = [size for size in range(1, members + 1)
            if members % size == 0 and target <= 2 * size and size <= 2 * target]  # fmt: skip
    if near:
        return min(near, key=lambda size: abs(math.log(size / target)))
    return -(-members // -(-members // target))


# --- The memory -----------------------------------------------------------------------------------


def choose_plan(make: Callable[[Plan], Population], plan: Plan, lower: Lower) -> Population:
    """Return the population under the plan with `chunk` and `batch_dim` chosen, its step within the
    memory budget."""
    population = make(plan)
    chosen, work = by_rule(population)
    if work is None:
        return population if population.plan == chosen else make(chosen)
    members = population.layout.slots // plan.member
    budget = memory_budget(population.mesh)
    # Compile to read the peak memory only where the estimate comes near the budget: a compilation
    # takes seconds, the estimate nothing.
    while (
        plan.chunk is None
        and (chunk := chosen.chunk or 1) > 1
        and (members + ROOM * chunk) * work.bytes > budget
        and memory(lower(make(chosen)).compile()).peak > budget
    ):
        chosen = dataclasses.replace(chosen, chunk=even_chunk(members, max(1, chunk // 4)))
    return make(chosen)


# --- Measuring ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A measured candidate: `seconds` per step of the whole population, or why it was left out."""

    chunk: int
    batch_dim: BatchDim
    seconds: float
    left_out: str = ""

    def __str__(self) -> str:
        result = self.left_out or f"{1e3 * self.seconds:.3g} ms"
        return f"chunk={self.chunk} {self.batch_dim} {result}"


def autotune(
    plan: Plan,
    members: int,
    build: Callable[[Plan], tuple[int, Callable[[], Run]]],
    budget: int,
    tolerance: float,
) -> tuple[Plan, list[Candidate]]:
    """Return the plan with its open choices measured, and every candidate measured.

    The batch dim comes first, at chunk `FIRST_CHUNK`: `minor` counts only if its losses and
    gradient norms agree with those of `major`. `hill_climb` then finds the chunk.

    **Arguments:** `members`, on one device; `build(plan)`, compiles and returns the bytes needed
    and a function that creates a fresh `Run`; `budget`, bytes per device; `tolerance`, the largest
    relative difference between `minor` and `major`.
    """
    measured: list[Candidate] = []
    first = plan.chunk or min(FIRST_CHUNK, members)
    seen: dict[BatchDim, Metrics] = {}

    def measure(chunk: int, batch_dim: BatchDim) -> float:
        bytes_needed, make = build(dataclasses.replace(plan, chunk=chunk, batch_dim=batch_dim))
        left_out, seconds = "", math.inf
        if bytes_needed > budget and chunk > 1:
            left_out = f"needs {bytes_needed:,} bytes of {budget:,}"
        else:
            seen[batch_dim], seconds = _time(make())
            if batch_dim == "minor" and "major" in seen:
                worst = _worst(seen["minor"], seen["major"])
                if not worst <= tolerance:
                    left_out, seconds = f"differs by {worst:.1e} from major", math.inf
        measured.append(Candidate(chunk, batch_dim, seconds, left_out))
        return seconds

    batch_dim = plan.batch_dim or "major"
    if plan.batch_dim is None:
        as_written = measure(first, "major")
        batch_dim = "minor" if measure(first, "minor") < as_written else "major"
    elif plan.chunk is None:
        measure(first, batch_dim)
    chunk = plan.chunk or hill_climb(first, members, lambda c: measure(c, batch_dim), measured)
    return dataclasses.replace(plan, chunk=chunk, batch_dim=batch_dim), measured


def hill_climb(
    first: int, members: int, measure: Callable[[int], float], measured: list[Candidate]
) -> int:
    """Return the fastest chunk found by repeated multiplication by 4, or else division."""
    best, fastest = first, min(choice.seconds for choice in measured)
    for factor in (4.0, 0.25):
        chunk = first
        while True:
            wanted = max(1, min(members, round(chunk * factor)))
            if wanted == chunk:
                break
            chunk = wanted
            seconds = measure(chunk)
            if seconds >= fastest:
                break
            best, fastest = chunk, seconds
        if best != first:
            break  # larger was faster; smaller need not be tried
    return best


def _time(run: Run) -> tuple[Metrics, float]:
    def timed(steps: int) -> float:
        began = time.perf_counter()
        jax.block_until_ready(run(steps))
        return (time.perf_counter() - began) / steps

    metrics = jax.device_get(run(1))
    # Run enough steps to amortize the cost of the call itself.
    steps = 1
    while (seconds := timed(steps)) * steps < SECONDS and steps < MOST_STEPS:
        steps *= 4
    return metrics, min(seconds, timed(steps), timed(steps))


def _worst(a: Metrics, b: Metrics) -> float:
    """Return the largest relative difference of losses and gradient norms.

    Infinity where one is finite and the other is not: a NaN must be a NaN in both.
    """
    worst = 0.0
    for name in ("loss", "grad_norm"):
        x, y = np.asarray(a[name], np.float64), np.asarray(b[name], np.float64)
        both = np.isfinite(x) & np.isfinite(y)
        if not (np.isfinite(x) == np.isfinite(y)).all():
            return math.inf
        scale = np.maximum(np.abs(y[both]), 1e-6)
        worst = max(worst, float(np.max(np.abs(x[both] - y[both]) / scale, initial=0.0)))
    return worst


def timed_runner(
    compiled: jax.stages.Compiled, state: TrainState, arguments: tuple[Any, ...], looped: bool
) -> Run:
    """Return a `Run` of a compiled loop or step.

    A loop is called as `(state, *arguments, first, stop)`, a step as `(state, *arguments)`.
    """

    def run(steps: int) -> Metrics:
        nonlocal state
        if looped:
            state, metrics = compiled(state, *arguments, np.int32(0), np.int32(steps))
            return {name: value[:, 0] for name, value in metrics.items()}
        for _ in range(steps):
            state, metrics = compiled(state, *arguments)
        return metrics

    return run


def measure_plan(
    make: Callable[[Plan], Population],
    plan: Plan,
    lower: Lower,
    arguments: tuple[PyTree, ...],
    *,
    looped: bool,
) -> tuple[Plan, list[Candidate]]:
    """Measure a plan's open choices by timing the loop (`looped`) or the step.

    **Arguments:** `arguments`, those of the loop or step after the members.

    **Returns:** the plan with its choices, and every candidate measured.
    """
    example = make(plan)
    like = example.layout.abstract(example.mesh)
    start = place_start(example.example.task, example.layout, example.mesh)
    out = jax.tree.map(lambda leaf: leaf.sharding, like)
    init = jitted(example.init, example.options, out_shardings=out)

    def build(plan: Plan) -> tuple[int, Callable[[], Run]]:
        compiled = lower(make(plan)).compile()

        def run() -> Run:
            state = init(*example.arguments, start)
            return timed_runner(compiled, state, (*example.arguments, *arguments), looped)

        return memory(compiled).peak, run

    dtype: Any = jnp.result_type(*jax.tree.leaves(like.params))
    tolerance = 2e-2 if plan.precision == "bfloat16" else 1e-4
    tolerance = 1e-9 if dtype == jnp.float64 else tolerance
    if plan.batch_dim is None and needs_partitioner(example.example.task, plan):
        plan = dataclasses.replace(plan, batch_dim="major")
    members = example.layout.slots // plan.member
    return autotune(plan, members, build, memory_budget(example.mesh), tolerance)
