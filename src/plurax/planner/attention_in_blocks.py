"""Search plans without whole arrays of queries x keys, where those do not fit or take longer.

Attention is computed in blocks (`Plan.stream`), and tokens may be split over devices as well
(`Plan.context`). An expert does so where there are fewer rows than devices, and leaves `tensor` to
models whose parameters need it. 16 layers 2,048 wide, 2 rows of 131,072 tokens, on 8 H100:

    nothing in blocks         does not fit
    whole tokens, in blocks   data=2, tensor=4      19.3 s
    over 4 devices            data=2, context=4     18.0 s
    over 8 devices            context=8             18.1 s: over more, none is tried
"""

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import get_args

from plurax import errors
from plurax.execute.placement import leading_dim
from plurax.execute.transformed_task import most_keys
from plurax.machine import Machine
from plurax.plan import ContextStrategy, Plan, Remat
from plurax.planner.found import Found, Ranked
from plurax.planner.sizes import doublings
from plurax.planner.wanted import Wanted

STREAM = 512
"""Keys of a block of attention, the fewest that a search looks at."""

Search = Callable[[Wanted], Found]


def search_in_blocks(
    machine: Machine, wanted: Wanted, results: list[Found], search: Search
) -> list[Found]:
    """Return `results`, and what else is found with attention in blocks and split tokens.

    Blocks are searched where there are no results, a plan holds that has them, or one that was
    found is faster in them. Tokens over devices are where there are fewer rows than devices, or no
    results: over more of them as long as plans get faster. Raises `PlanError`, that of the most
    devices, if none fits; returns `results` where the task has no attention.
    """
    held, block, fits = "stream" in wanted.fields, wanted.pinned.stream or STREAM, bool(results)
    rows, devices = leading_dim(wanted.batch), machine.devices
    few = rows < devices
    if held and wanted.pinned.stream is None:
        return results
    members = wanted.members is not None
    written, of_kernels = (0, 0) if members else most_keys(wanted.task, wanted.batch)
    keys, in_blocks = max(written, of_kernels), written > block
    if in_blocks and fits and not held:
        results, in_blocks = _look_in_blocks(results, block)
    if not (keys if held or (fits and few) else in_blocks):
        return results
    refusal: errors.PlanError | None = None
    first: ContextStrategy = "ring"  # which holds least
    if not held and in_blocks:
        wanted = wanted.holding(stream=block)
        try:
            results = [*results, search(wanted)]
        except errors.PlanError as error:
            refusal = error
    elif not held:  # it fits as it is written
        wanted, first = wanted.holding(stream=keys), "gather"
    held_context = {"context", "context_strategy"}.intersection(wanted.fields)
    others = wanted.pinned.data * wanted.pinned.pipeline * wanted.pinned.tensor
    splits = [] if held_context else doublings(devices // others)[1:]
    if fits and not held and not few:
        splits = []
    elif results:
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
    return results if held else _with_larger_blocks(written, wanted, results, search)


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


def _look_in_blocks(results: list[Found], block: int) -> tuple[list[Found], bool]:
    """Return results that count what is looked at, and whether plans may be faster in blocks.

    Estimated is the fastest plan without strategies of equations, which are others in blocks, and
    that of another remat policy: `full` computes attention again, which takes longer in blocks, and
    where others write whole arrays, blocks save most. Without any the answer is yes.
    """
    fastest = min(results, key=lambda one: one.ranked[0].seconds)
    if fastest.stopped or fastest.estimated is None:
        return results, False
    plans: dict[Remat, Plan] = {}
    for ranked in sorted([*fastest.ranked, *fastest.slower], key=Ranked.place):
        if ranked.plan.strategies is None:
            plans.setdefault(ranked.plan.remat, dataclasses.replace(ranked.plan, stream=block))
    looks, faster = 0, not plans
    for plan in itertools.islice(plans.values(), 2):
        if not faster:
            looks += 1
            with contextlib.suppress(errors.PlanError, errors.MachineError):
                faster = fastest.estimated(plan).seconds < fastest.ranked[0].seconds
    counted = dataclasses.replace(fastest, evaluations=fastest.evaluations + looks)
    return [counted if one is fastest else one for one in results], faster


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
