"""Keep some of the matrix products, where memory or time is too short to keep all.

A search ranks plans that keep all products (`dots`) or none (`full`). Its fastest plan that
recomputes is tried again with a share of them, those with the most operations for each byte
(`plurax.jaxpr.kept_values`); where it gains nothing, the fastest of the other policy is. What is
kept last has the fewest: the scores of attention, for which memory is what a step waits for, so a
share may be faster than all of them. And where it takes less memory than all, fewer microbatches
may fit; where it takes more than none, more of them may let it fit. GPT of 1.7 billion parameters
on 32 A100 of 80 GB:

    4 microbatches   dots     2.85 s    48 GB
                     half     2.67 s    27 GB    faster, with room for fewer microbatches
    2                half     2.61 s    41 GB
    1                half     2.58 s    70 GB    taken; three quarters are the same products

Of 39 billion on 64 of them half does not fit, but what its bytes leave room for:

    3 microbatches   full     71.4 s    61 GB
                     half     -         185 GB
                     0.07     68.7 s    69 GB
    6                half     -         100 GB
    12               half     67.7 s    58 GB    taken
"""

import functools
import math
from collections.abc import Callable, Sequence

from plurax.plan import Remat
from plurax.planner.found import Ranked

_HALF, _MORE, _LESS = 0.5, 0.75, 0.25
_SAFE = 0.95
"""Of the share that would fill the memory, how much is tried."""

Estimated = Callable[[Ranked, float, float], Ranked | None]
"""`(plan, share, microbatches)`: a plan with that share, and so many times as many microbatches,
whether it fits or not; None if it cannot be."""


def partly_kept(
    ranked: Sequence[Ranked], seconds: float, memory: float, estimated: Estimated
) -> Ranked | None:
    """Return the fastest plan with a share of its products kept, if it is faster with it.

    **Arguments:** `ranked`, fastest first, of which the first that recomputes is tried, and where
    it is none the faster, the first of the other policy; `seconds`, what these may take;
    `memory`, the bytes of a device.
    """
    first: dict[Remat, Ranked] = {}
    for plan in ranked:
        if plan.plan.remat in ("dots", "full") and plan.seconds <= seconds:
            first.setdefault(plan.plan.remat, plan)
    tried = (_partly_kept(plan, memory, estimated) for plan in first.values())
    return next((plan for plan in tried if plan is not None), None)


def _partly_kept(best: Ranked, memory: float, estimated: Estimated) -> Ranked | None:
    """Return a plan with the share of its products that is fastest, or None."""
    again = functools.partial(estimated, best)
    half = again(_HALF, 1)
    tried = [half]
    if half is not None and safe_bytes(half) > memory:
        room = (memory - safe_bytes(best)) / (safe_bytes(half) - safe_bytes(best))
        if (share := math.floor(100 * _SAFE * _HALF * room) / 100) > 0:
            tried.append(again(share, 1))
        microbatches = 2
        while (more := again(_HALF, microbatches)) is not None:
            tried.append(more)
            if safe_bytes(more) <= memory:
                break
            microbatches *= 2
    elif half is not None and half.seconds < best.seconds:
        fewest, fastest = 1.0, half
        while (fewer := again(_HALF, fewest / 2)) is not None:
            tried.append(fewer)
            if safe_bytes(fewer) > memory or fewer.seconds >= fastest.seconds:
                break
            fewest, fastest = fewest / 2, fewer
        tried.append(again(_MORE, fewest))
    else:
        tried.append(again(_LESS, 1))
    faster = [
        plan
        for plan in tried
        if plan is not None and plan.seconds < best.seconds and safe_bytes(plan) <= memory
    ]
    return min(faster, key=lambda plan: (plan.seconds, plan.memory), default=None)


def safe_bytes(plan: Ranked) -> float:
    """Return the bytes of an estimated plan, and what they may be off."""
    assert plan.estimate is not None
    return plan.estimate.peak + plan.estimate.margin
