"""Measure a population's chunk and batch dim, by compiled memory and short timed runs.

Only `plurax.ensemble.tune` uses this; without it no choice depends on a clock. The search is a
hill climb over chunks at one batch dim. Example, 100 members, chunk and batch dim both open:

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
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from plurax.execute.step import Metrics
from plurax.plan import BatchDim, Plan
from plurax.state import TrainState

FIRST_CHUNK = 16
SECONDS = 0.02
"""Minimum seconds of a timed run of fewer than `MOST_STEPS` steps; the best of three counts."""
MOST_STEPS = 64

Run = Callable[[int], Metrics]
"""A function that runs some steps and returns the metrics of the first, leaves `(K,)`."""


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
