"""Translate XLA's out-of-memory error into the changes of the plan that need less."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax

from plurax import errors
from plurax.plan import Plan


@contextlib.contextmanager
def out_of_memory_said(program: Any, saved: Callable[[], str]) -> Iterator[None]:
    """Raise `PlanError` for XLA's RESOURCE_EXHAUSTED, with the plans that need less.

    `saved()` returns a sentence on what was saved.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        reason = str(error)
        if "RESOURCE_EXHAUSTED" not in reason:
            raise
        ways = _ways(program.plan, program.batch_size)
        short = program.plan.sizes_text()
        line = reason.splitlines()[0][:200]
        listed = "".join(f"\n  - {way}" for way in ways)
        raise errors.OutOfMemoryError(
            f"out of memory under Plan({short}){_needs(program)}. What needs less:{listed}\nplurax "
            f"plan FILE shows the memory of a plan before it runs. {saved()}\n  ({line})"
        ) from None


def _needs(program: Any) -> str:
    """Return a clause with the step's peak memory, or "" where it cannot be read."""
    with contextlib.suppress(Exception):
        memory = program.memory()
        return f", whose step needs {memory.peak:,} bytes on each device"
    return ""


def _ways(plan: Plan, batch_size: int) -> Iterator[str]:
    """Yield the fields of the plan that lower the peak, the cheapest first."""
    rows, more = -(-batch_size // plan.parts), tuple(2 * m for m in plan.replica_microbatches)
    if plan.chunk is not None and plan.chunk > 1:
        yield f"chunk={max(1, plan.chunk // 2)}: fewer members at a time"
    if rows > 1:
        yield (
            f"microbatches={more if len({*more}) > 1 else more[0]}: half of the {rows} examples at "
            "a time that a device works on now"
        )
    if plan.remat == "none":
        yield "remat='full': computes activations again instead of keeping them"
    if plan.data > 1 and plan.zero < 3:
        yield f"zero={plan.zero + 1}: splits more of parameters and optimizer over data"
    yield "a larger data, tensor or pipeline, on more devices"
