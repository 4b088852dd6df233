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
from typing import get_args

from plurax import errors
from plurax.execute.placement import leading_dim
from plurax.execute.transformed_task import most_keys
from plurax.machine import Machine
from plurax.plan import ContextStrategy
from plurax.planner.found import Found
from plurax.planner.sizes import doublings
from plurax.planner.wanted import Wanted

STREAM = 512
"""Keys of a block of attention, the fewest, in plans for what fits in no other way."""

Search = Callable[[Wanted], Found]


def search_in_blocks(
    machine: Machine, wanted: Wanted, results: list[Found], search: Search
) -> list[Found]:
    """Return `results`, and what else is found with attention in blocks and split tokens.

    Blocks are looked at where there are no results, or a plan holds that has them: for every model
    they would take several times the evaluations. So are tokens over devices, and where there are
    fewer rows than devices: over more of them as long as plans get faster. Raises `PlanError`, that
    of the most devices, if none fits; returns nothing where the task has no attention.
    """
    held, block = "stream" in wanted.fields, wanted.pinned.stream or STREAM
    rows, devices = leading_dim(wanted.batch), machine.devices
    if (wanted.pinned.stream is None) if held else results and rows >= devices:
        return results
    keys = 0 if wanted.members is not None else most_keys(wanted.task, wanted.batch)
    if keys <= (0 if results else block):
        return results
    refusal: errors.PlanError | None = None
    first: ContextStrategy = "ring"  # which holds least
    if not held and results:  # it fits as it is written
        wanted, first = wanted.holding(stream=keys), "gather"
    elif not held:
        wanted = wanted.holding(stream=block)
        try:
            results = [search(wanted)]
        except errors.PlanError as error:
            refusal = error
    held_context = {"context", "context_strategy"}.intersection(wanted.fields)
    others = wanted.pinned.data * wanted.pinned.pipeline * wanted.pinned.tensor
    splits = [] if held_context else doublings(devices // others)[1:]
    if results:
        splits = [n for n in splits if devices // n <= rows]
        wanted = wanted.unless_held(tensor=1, pipeline=1)
    for split in splits:
        before = _fastest(results)
        try:
            results = [*results, *_over(split, wanted, first, search)]
        except errors.PlanError as error:
            refusal = error
            continue
        if _fastest(results) >= before:
            break
    if refusal is not None and not results:
        raise refusal
    return results if held else _with_larger_blocks(keys, wanted, results, search)


def _over(split: int, wanted: Wanted, first: ContextStrategy, search: Search) -> list[Found]:
    """Search plans with tokens over so many devices, and the best of these with the other ways in
    which queries meet keys."""
    wanted = wanted.holding(context=split, context_strategy=first)
    results = [search(wanted)]
    for strategy in get_args(ContextStrategy):
        if strategy != first:
            plan = vars(results[0].best) | {"context_strategy": strategy}
            with contextlib.suppress(errors.PlanError):
                results.append(search(wanted.holding(**plan)))
    return results


def _with_larger_blocks(
    keys: int, wanted: Wanted, results: list[Found], search: Search
) -> list[Found]:
    """Return `results`, and the fastest with blocks of twice as many keys while it gets faster."""
    fastest = min(results, key=lambda found: found.ranked[0].seconds).best
    with contextlib.suppress(errors.PlanError):
        while fastest.stream is not None and fastest.stream < keys:
            before = _fastest(results)
            plan = vars(fastest) | {"stream": 2 * fastest.stream}
            results = [*results, search(wanted.holding(**plan))]
            if _fastest(results) >= before:
                break
            fastest = results[-1].best
    return results


def _fastest(results: Sequence[Found]) -> float:
    return min((one.ranked[0].seconds for one in results), default=math.inf)
