"""Find the largest batch that fits, from compiled memory, and the fastest batch, by measurement.

Compiling takes seconds, so the search for the largest batch must need few compilations. Peak memory
is a smooth function of the batch, near-linear or quadratic: the next size to try is where the
parabola through the nearest known points crosses the budget. Example, budget 1000 MB, true peak
`100 + 3 n` MB, `n` in units of `data * microbatches`:

    n = 1        103 MB   fits
    n = 16       148 MB   fits     the line through both crosses 1000 MB at n = 300; try one more
    n = 301     1003 MB   over     the bracket is 16 .. 301
    n = 300     1000 MB   fits     the neighbour of an n that does not fit: done, 4 compilations
"""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np
import optax
from jaxtyping import PyTree

from plurax import errors
from plurax.distributed.global_arrays import MEASURE_IN_ONE, check_alone
from plurax.execute.placement import leading_dim
from plurax.execute.program import Program
from plurax.mesh import make_mesh, memory_budget
from plurax.notebook import html_table
from plurax.plan import Plan
from plurax.task import Task
from plurax.tree import human_bytes, with_rows
from plurax.validate import bytes_of, check_whole

MAX_COMPILATIONS = 10
KNEE = 0.95
"""The share of the best throughput that defines the knee: the smallest batch that reaches it."""


@dataclasses.dataclass(frozen=True)
class MaxBatchSize:
    """The largest batch that fits a budget; `int()` of it is the size.

    **Fields:**

    - `size`: examples; a multiple of the plan's `data * microbatches`.
    - `bytes`: the compiled step's peak on one device at that size.
    - `next_size`, `next_bytes`: the next size that would need a larger program, and its peak,
      which exceeds the budget. `next_bytes` is None if the search ended by `MAX_COMPILATIONS`.
    - `budget`: bytes per device.
    - `compilations`: the number of programs compiled.
    """

    size: int
    bytes: int
    next_size: int
    next_bytes: int | None
    budget: int
    compilations: int

    def __index__(self) -> int:
        return self.size

    def _repr_html_(self) -> str:
        sizes = [(self.size, self.bytes, "yes"), (self.next_size, self.next_bytes, "no")]
        rows = [
            (size, "not compiled" if peak is None else human_bytes(peak), fits)
            for size, peak, fits in sizes
        ]
        budget = f"budget {human_bytes(self.budget)} per device, {self.compilations} programs"
        title = f"MaxBatchSize {self.size:,}: {budget} compiled"
        return html_table(title, ["batch size", "peak per device", "fits"], rows)


def max_batch_size(
    task: Task,
    optimizer: optax.GradientTransformation,
    plan: Plan,
    example: PyTree,
    *,
    memory: float | str | None = None,
    devices: Sequence[jax.Device] | None = None,
) -> MaxBatchSize:
    """Return the largest batch whose training step fits in memory, without running a step.

    It compiles the step for a few sizes and reads the memory that the compiler reports: at most 10
    compilations. It ends when a size fits and the next does not.

    **Arguments:**

    - `task`, `optimizer`, `plan`: as for `compile`.
    - `example`: a batch of any size: arrays or `jax.ShapeDtypeStruct`s with a leading dim.
    - `memory`: bytes per device, such as `40e9` or `"40GB"`. Default: what the device reports as
      its limit; where it reports none (CPU), half of the machine's memory divided by the plan's
      devices.

    Raises `BatchError` where not even the smallest batch fits.
    """
    mesh = make_mesh(plan, devices)
    budget = memory_budget(mesh) if memory is None else bytes_of(memory)
    unit = plan.parts
    leading_dim(example)  # raises where `example` is no batch

    def peak(units: int) -> int:
        like = with_rows(example, units * unit)
        return Program(task, optimizer, plan, like, mesh).memory().peak

    fits, fits_bytes, over, over_bytes, compilations = largest_below(peak, budget)
    if fits == 0:
        raise errors.BatchError(
            f"no batch fits: the smallest possible, {unit} example(s), needs {fits_bytes:,} bytes "
            f"on each device and the budget is {budget:,}. Give more memory=, more microbatches, "
            "or a plan that splits the parameters."
        )
    return MaxBatchSize(
        size=fits * unit,
        bytes=fits_bytes,
        next_size=fits * unit + 1,
        next_bytes=over_bytes if over == fits + 1 else None,
        budget=budget,
        compilations=compilations,
    )


def largest_below(
    peak: Callable[[int], int], budget: int
) -> tuple[int, int, int | None, int | None, int]:
    """Find the largest `n >= 1` with `peak(n) <= budget`, and the smallest known above it.

    **Returns:** `(fits, its bytes, over, its bytes, evaluations)`; `fits` is 0 where `peak(1)` is
    over the budget.
    """
    known: dict[int, int] = {}

    def measure(n: int) -> int:
        known[n] = peak(n)
        return known[n]

    if measure(1) > budget:
        return 0, known[1], 1, known[1], 1
    low: int = 1
    high: int | None = None
    candidate = 16
    while len(known) < MAX_COMPILATIONS:
        width = math.inf if high is None else high - low
        if measure(candidate) <= budget:
            low = max(low, candidate)
        else:
            high = candidate if high is None else min(high, candidate)
        # Done once a size fits and its neighbour does not.
        if high is not None and high - low == 1:
            break
        # If the last step did not halve the bracket, the curve is no guide here: bisect.
        stuck = high is not None and math.isfinite(width) and 2 * (high - low) > width
        if stuck and high is not None:
            candidate = (low + high) // 2
        else:
            candidate = _next_candidate(known, low, high, budget)
    return low, known[low], high, None if high is None else known[high], len(known)


def _next_candidate(known: dict[int, int], low: int, high: int | None, budget: int) -> int:
    """Return where the curve through the known points nearest to the budget crosses it.

    A parabola through three points: memory grows linearly in the batch for most losses, and with
    its square for losses that compare all pairs. The result stays inside the bracket.
    """
    near = sorted(known, key=lambda n: abs(known[n] - budget))[:3]
    guess = _crossing([(n, known[n] - budget) for n in near])
    top = low * 4096 if high is None else high - 1
    if guess is None:
        guess = min(low * 64, top) if high is None else (low + high) // 2
    if high is None:
        guess += 1  # the largest that fits is known only with one that does not
    return min(max(guess, low + 1), top)


def _crossing(points: list[tuple[int, int]]) -> int | None:
    """Return the floor of the zero of the parabola (or line) through points, or None."""
    (x0, y0), (x1, y1) = points[:2]
    slope = (y1 - y0) / (x1 - x0)
    bend = 0.0
    if len(points) == 3:
        x2, y2 = points[2]
        bend = ((y2 - y1) / (x2 - x1) - slope) / (x2 - x0)
    # y = y0 + slope (x - x0) + bend (x - x0) (x - x1), in t = x - x0
    linear = slope + bend * (x0 - x1)
    inside = linear * linear - 4 * bend * y0
    if linear <= 0 or inside < 0:
        return None
    t = -2 * y0 / (linear + math.sqrt(inside))  # the stable form, also where bend is 0
    return math.floor(x0 + t)


@dataclasses.dataclass(frozen=True)
class Throughput:
    """A point of a throughput curve: `size` examples, `seconds` per step (a median)."""

    size: int
    seconds: float

    @property
    def examples_per_second(self) -> float:
        """Examples per second at this size."""
        return self.size / self.seconds


@dataclasses.dataclass(frozen=True)
class FastestBatchSize:
    """Throughput by batch size; `int()` of it is the knee's size.

    **Fields:** `curve`, by increasing size; `knee`, the smallest size with 95 % of the best
    throughput: a larger batch gains (almost) no speed.
    """

    curve: tuple[Throughput, ...]
    knee: Throughput

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
    max_size: int | None = None,
    memory: float | str | None = None,
    repeats: int = 5,
    devices: Sequence[jax.Device] | None = None,
) -> FastestBatchSize:
    """Measure training throughput over batch sizes, and find the knee of the curve.

    Sizes double from the plan's smallest up to `max_size` (default: `max_batch_size`), and the
    measurement ends early once two sizes in a row bring no gain.

    **Arguments:** as for `max_batch_size`; `example` needs real arrays, whose rows are repeated to
    fill each batch; `repeats`, timed steps per size, of which the median counts.
    """
    check_alone("plurax.analysis.fastest_batch_size", MEASURE_IN_ONE)
    repeats = check_whole("plurax.analysis.fastest_batch_size", "repeats", repeats)
    mesh = make_mesh(plan, devices)
    unit = plan.parts
    if max_size is None:
        found = max_batch_size(task, optimizer, plan, example, memory=memory, devices=devices)
        max_size = found.size
    curve: list[Throughput] = []
    size = unit
    while size <= max(max_size, unit) and not _flat(curve):
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
