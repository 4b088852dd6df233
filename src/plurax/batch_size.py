"""The largest batch that fits, from compiled memory; the fastest batch, by measurement."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np
import optax
from jaxtyping import PyTree

from plurax import errors
from plurax.execute.placement import leading_dim
from plurax.execute.program import Program
from plurax.mesh import make_mesh, memory_budget
from plurax.plan import Plan
from plurax.task import Task

MAX_COMPILATIONS = 10
KNEE = 0.95
"""The knee of a throughput curve: the smallest batch with this share of the best throughput."""


@dataclasses.dataclass(frozen=True)
class MaxBatchSize:
    """The largest batch that fits a budget. `int()` of it is the size.

    **Fields:**

    - `size`: examples; a multiple of the plan's `data * microbatches`.
    - `bytes`: the compiled step's peak on one device at that size.
    - `next_size`, `next_bytes`: the next size that would need a larger program, and its peak,
      which exceeds the budget. `next_bytes` is None if the search ended by `MAX_COMPILATIONS`.
    - `budget`: bytes per device.
    - `compilations`: how many programs were compiled to find it.
    """

    size: int
    bytes: int
    next_size: int
    next_bytes: int | None
    budget: int
    compilations: int

    def __int__(self) -> int:
        return self.size

    def __index__(self) -> int:
        return self.size


def max_batch_size(
    task: Task,
    optimizer: optax.GradientTransformation,
    plan: Plan,
    example: PyTree,
    *,
    memory: int | None = None,
    devices: Sequence[jax.Device] | None = None,
) -> MaxBatchSize:
    """The largest batch whose training step fits in memory, without running a step.

    Compiles the step for a few sizes and reads the memory that the compiler reports. Memory grows
    nearly in proportion to the batch, so the search follows the line through the two sizes that
    bracket the budget (regula falsi) and ends when they are neighbours: at most 10 compilations.

    **Arguments:**

    - `task`, `optimizer`, `plan`: as for `compile`.
    - `example`: a batch of any size: arrays or `jax.ShapeDtypeStruct`s with a leading dim.
    - `memory`: bytes per device. Default: what the device reports as its limit; where it reports
      none (CPU), half of the machine's memory divided by the plan's devices.

    Raises `BatchError` where not even the smallest batch fits.
    """
    mesh = make_mesh(plan, devices)
    budget = memory_budget(mesh) if memory is None else memory
    unit = plan.data * plan.microbatches

    def peak(units: int) -> int:
        like = resized(example, units * unit)
        return Program(task, optimizer, plan, like, mesh).memory().peak

    fits, fits_bytes, over, over_bytes, compilations = _search(peak, budget)
    if fits == 0:
        raise errors.no_batch_fits(budget, unit, fits_bytes)
    return MaxBatchSize(
        size=fits * unit,
        bytes=fits_bytes,
        next_size=fits * unit + 1,
        next_bytes=over_bytes if over == fits + 1 else None,
        budget=budget,
        compilations=compilations,
    )


def _search(
    peak: Callable[[int], int], budget: int
) -> tuple[int, int, int | None, int | None, int]:
    """Largest `n >= 1` with `peak(n) <= budget`, and the smallest known above it.

    Returns `(fits, its bytes, over, its bytes, evaluations)`; `fits` is 0 where `peak(1)` is over.
    """
    known: dict[int, int] = {}

    def measure(n: int) -> int:
        known[n] = peak(n)
        return known[n]

    if measure(1) > budget:
        return 0, known[1], 1, known[1], 1
    low, high = 1, None
    candidate = 16
    shrink = 0
    while len(known) < MAX_COMPILATIONS:
        if measure(candidate) <= budget:
            low = max(low, candidate)
        else:
            high = candidate if high is None else min(high, candidate)
        if high is not None and high - low == 1:
            break
        candidate = _next_candidate(known, low, high, budget, shrink)
        shrink += 1
    return low, known[low], high, None if high is None else known[high], len(known)


def _next_candidate(
    known: dict[int, int], low: int, high: int | None, budget: int, turn: int
) -> int:
    """Where the line through two known points crosses the budget, kept inside the bracket."""
    if high is None:
        other = max((n for n in known if n < low), default=None)
        slope = (known[low] - known[other]) / (low - other) if other else 0
        # Without growth to go by, double; else go just past the crossing.
        guess = low * 64 if slope <= 0 else low + int((budget - known[low]) / slope) + 1
        return max(low + 1, min(guess, low * 4096))
    slope = (known[high] - known[low]) / (high - low)
    guess = low + int((budget - known[low]) / slope) if slope > 0 else (low + high) // 2
    if turn > 4:  # a line that misses repeatedly: halve instead
        guess = (low + high) // 2
    # Next to a bound already known, look at the neighbour: it may close the bracket.
    return min(max(guess, low + 1), high - 1)


@dataclasses.dataclass(frozen=True)
class Throughput:
    """One point of a throughput curve: `size` examples, `seconds` per step (a median)."""

    size: int
    seconds: float

    @property
    def examples_per_second(self) -> float:
        """Throughput at this size."""
        return self.size / self.seconds


@dataclasses.dataclass(frozen=True)
class FastestBatchSize:
    """How throughput depends on the batch. `int()` of it is the knee's size.

    **Fields:** `curve`, by increasing size; `knee`, the smallest size with 95 % of the best
    throughput: beyond it a larger batch buys (almost) no speed.
    """

    curve: tuple[Throughput, ...]
    knee: Throughput

    def __int__(self) -> int:
        return self.knee.size

    def __index__(self) -> int:
        return self.knee.size

    def __str__(self) -> str:
        best = max(point.examples_per_second for point in self.curve)
        lines = [f"{'batch':>9} {'ms/step':>10} {'examples/s':>12}"]
        for point in self.curve:
            bar = "█" * max(1, round(30 * point.examples_per_second / best))
            mark = " ← knee" if point == self.knee else ""
            lines.append(
                f"{point.size:>9,} {1e3 * point.seconds:>10.2f} "
                f"{point.examples_per_second:>12,.0f} {bar}{mark}"
            )
        return "\n".join(lines)


def fastest_batch_size(
    task: Task,
    optimizer: optax.GradientTransformation,
    plan: Plan,
    example: PyTree,
    *,
    largest: int | None = None,
    memory: int | None = None,
    repeats: int = 5,
    devices: Sequence[jax.Device] | None = None,
) -> FastestBatchSize:
    """Measure training throughput over batch sizes, and find the knee of the curve.

    Sizes double from the plan's smallest up to `largest` (default: `max_batch_size`), and the
    measurement ends early once two sizes in a row bring no gain.

    **Arguments:** as for `max_batch_size`; `example` needs real arrays, whose rows are repeated to
    fill each batch; `repeats`, timed steps per size, of which the median counts.
    """
    mesh = make_mesh(plan, devices)
    unit = plan.data * plan.microbatches
    if largest is None:
        found = max_batch_size(task, optimizer, plan, example, memory=memory, devices=devices)
        largest = found.size
    curve: list[Throughput] = []
    size = unit
    while size <= max(largest, unit) and not _flat(curve):
        rows = np.arange(size) % leading_dim(example)
        batch = jax.tree.map(lambda leaf: np.asarray(leaf)[rows], example)  # noqa: B023
        program = Program(task, optimizer, plan, batch, mesh)
        curve.append(Throughput(size, _time_step(program, batch, repeats)))
        size *= 2
    best = max(point.examples_per_second for point in curve)
    knee = next(point for point in curve if point.examples_per_second >= KNEE * best)
    return FastestBatchSize(tuple(curve), knee)


def _time_step(program: Program, batch: PyTree, repeats: int) -> float:
    state = program.init(0)
    placed = program.place_batch(batch)
    times = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        state, metrics = program.step_placed(state, placed)
        jax.block_until_ready(metrics)
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def _flat(curve: list[Throughput]) -> bool:
    if len(curve) < 4:
        return False
    before = max(point.examples_per_second for point in curve[:-2])
    return all(point.examples_per_second < before for point in curve[-2:])


def resized(example: PyTree, size: int) -> PyTree:
    """The shapes of a batch like `example`, with another leading dim."""
    leading_dim(example)
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((size, *leaf.shape[1:]), leaf.dtype), example
    )
