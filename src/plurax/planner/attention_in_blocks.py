"""Search plans for sequences that are too long for whole arrays of queries x keys.

Attention is computed in blocks (`Plan.stream`), and tokens may be split over devices as well
(`Plan.context`). An expert does so where there are fewer rows than devices, and leaves `tensor` to
models whose parameters need it. 16 layers 2,048 wide, 2 rows of 131,072 tokens, on 8 H100:

    nothing in blocks         does not fit
    whole tokens, in blocks   data=2, tensor=4      19.3 s
    over 4 devices            data=2, context=4     18.0 s
    over 8 devices            context=8             18.1 s: over more, none is tried
"""

import contextlib
import math
from collections.abc import Callable, Sequence

from plurax import errors
from plurax.execute.placement import leading_dim
from plurax.execute.transformed_task import has_attention
from plurax.machine import Machine
from plurax.planner.found import Found
from plurax.planner.sizes import doublings
from plurax.planner.wanted import Wanted

STREAM = 512
"""Keys of a block of attention, in plans for what fits in no other way."""

Search = Callable[[Wanted], Found]


def search_in_blocks(
    machine: Machine, wanted: Wanted, results: list[Found], search: Search
) -> list[Found]:
    """Return `results`, and what else is found with attention in blocks and split tokens.

    Both are looked at where there are no results, or a plan holds that has blocks: for every model
    they would take several times the evaluations. Tokens are split where a device would have less
    than a row, or none fits; over more devices as long as plans get faster. Raises `PlanError`,
    that of the most devices, if none fits; returns nothing where the task has no attention.
    """
    held, block = "stream" in wanted.fields, wanted.pinned.stream or STREAM
    if (wanted.pinned.stream is None) if held else results:
        return results
    if wanted.members is not None or not has_attention(wanted.task, wanted.batch, block):
        return results
    refusal: errors.PlanError | None = None
    if not held:
        wanted = wanted.holding(stream=block)
        try:
            results = [search(wanted)]
        except errors.PlanError as error:
            refusal = error
    held_context = {"context", "context_strategy"}.intersection(wanted.fields)
    others = wanted.pinned.data * wanted.pinned.pipeline * wanted.pinned.tensor
    splits = [] if held_context else doublings(machine.devices // others)[1:]
    if results:
        splits = [n for n in splits if machine.devices // n <= leading_dim(wanted.batch)]
        wanted = wanted.unless_held(tensor=1, pipeline=1)
    for split in splits:
        before = _fastest(results)
        try:
            results = [*results, *_over(split, wanted, search)]
        except errors.PlanError as error:
            refusal = error
            continue
        if _fastest(results) >= before:
            break
    if refusal is not None and not results:
        raise refusal
    return results


def _over(split: int, wanted: Wanted, search: Search) -> list[Found]:
    """Search plans with tokens over so many devices: a ring of keys, which holds least, and the
    best of these with keys gathered, and with heads exchanged."""
    ring = wanted.holding(context=split, context_strategy="ring")
    results = [search(ring)]
    for strategy in ("gather", "heads", "heads+ring"):
        plan = vars(results[0].best) | {"context_strategy": strategy}
        with contextlib.suppress(errors.PlanError):
            results.append(search(ring.holding(**plan)))
    return results


def _fastest(results: Sequence[Found]) -> float:
    return min((one.ranked[0].seconds for one in results), default=math.inf)
