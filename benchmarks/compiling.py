"""How long plans take to compile beside the same by hand, and what a step costs the host."""

import dataclasses
import statistics
from collections.abc import Iterator

from benchmarks import sizes
from benchmarks.harness import Check, Row, Side, Skipped, WorkerSkippedError, compare, take_turns
from benchmarks.run import Run

TARGET = 1 / 1.5
"""As a speed: a plan may take 1.5 times as long to compile as the step by hand."""
MOST_ON_HOST = 1e-4
"""Seconds that a step may take the host longer than a call of what was compiled."""


def compiling(run: Run) -> Iterator[Row]:
    """A transformer of unrolled layers compiled under each plan; steps of many small arrays."""
    case = run.sizes.compiling
    for plan in case.plans:
        yield from _plan(run, case, plan)
    for leaves in case.leaves:
        for plan in case.host_plans:
            yield _host(run, case, plan, leaves)


def _plan(run: Run, case: sizes.CompilingCase, plan: str) -> Iterator[Row]:
    name = f"{case.name}, {plan}"
    settings = {"network": dataclasses.asdict(case.network), "plan": sizes.COMPILED[plan]}
    try:
        worker = run.jax("jax_compiling", settings)
    except WorkerSkippedError as reason:
        yield Skipped("compile", name, str(reason))
        return
    with worker:
        sides = [Side(worker, "plurax"), Side(worker, "by hand")]
        ours, theirs = take_turns(sides, case.repeats, warm_up=0)
        used = {name: statistics.median(taken) for name, taken in worker.processor_seconds.items()}
        facts = worker.facts | {"processor_seconds": used}
        worker.run("agree")
        yield compare("compile", name, "JAX by hand", ours, theirs, TARGET, facts)


def _host(run: Run, case: sizes.CompilingCase, plan: str, leaves: int) -> Row:
    """A step beside its compiled call: the difference is what plurax does in Python."""
    name = f"host time of a step, {leaves} arrays of parameters, {plan}"
    settings = {"plan": sizes.HOST_PLANS[plan], "leaves": leaves, "rounds": case.rounds}
    try:
        worker = run.jax("jax_host", settings)
    except WorkerSkippedError as reason:
        return Skipped("compile", name, str(reason))
    with worker:
        seconds = worker.facts["seconds"]
    kinds = [kind for kind in seconds if not kind.endswith(", bare")]
    more = {kind: seconds[kind] - seconds[f"{kind}, bare"] for kind in kinds}
    found = "; ".join(
        f"{kind} {1e6 * seconds[kind]:,.0f} µs, the compiled call alone "
        f"{1e6 * seconds[f'{kind}, bare']:,.0f} µs"
        for kind in kinds
    )
    return Check(
        group="compile",
        name=name,
        found=found,
        wanted=f"at most {1e6 * MOST_ON_HOST:.0f} µs longer than the compiled call",
        reached=max(more.values()) <= MOST_ON_HOST,
        facts={"seconds": seconds, "more": more},
    )
