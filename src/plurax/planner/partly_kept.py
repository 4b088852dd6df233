"""Keep some of the matrix products, where memory or time is too short to keep all.

A search ranks plans that keep all products (`dots`) or none (`full`). Its fastest plan that
recomputes is tried again with a share of them, those with the most operations for each byte
(`plurax.jaxpr.kept_values`):

    GPT on 8 H100, 20 GB for activations    step        activations
    dots                                    -           31 GB: does not fit
    full                                    1.36 s      6 GB
    half of the products                    -           21 GB: does not fit
    0.44 of them, 0.95 of what fits         1.25 s      19 GB: taken

What is kept last has the fewest operations for its bytes: where memory bandwidth is what a step
waits for, a share is faster than all of them even where all of them fit.
"""

import math
from collections.abc import Callable, Sequence

from plurax.planner.found import Ranked

_HALF, _MORE, _LESS = 0.5, 0.75, 0.25
_SAFE = 0.95
"""Of the share that would fill the memory, how much is tried."""


def partly_kept(
    ranked: Sequence[Ranked],
    seconds: float,
    memory: float,
    estimated: Callable[[Ranked, float], Ranked | None],
) -> Ranked | None:
    """Return the fastest plan with a share of its products kept, if it is faster with it.

    Half of them is tried, and then more if that is faster, fewer if it is slower; where half does
    not fit, as many as its bytes say that there is room for.

    **Arguments:** `ranked`, fastest first, of which the first that recomputes is tried; `seconds`,
    what it may take; `memory`, the bytes of a device; `estimated(plan, share)`, the plan with that
    share, whether it fits or not, or None if it cannot be.
    """
    best = next((one for one in ranked if one.plan.remat in ("dots", "full")), None)
    if best is None or best.seconds > seconds:
        return None
    half = estimated(best, _HALF)
    share = _LESS
    if half is not None and safe_bytes(half) > memory:
        room = (memory - safe_bytes(best)) / (safe_bytes(half) - safe_bytes(best))
        share = math.floor(100 * _SAFE * _HALF * room) / 100
    elif half is not None and half.seconds < best.seconds:
        share = _MORE
    other = estimated(best, share) if share > 0 else None
    faster = [
        plan
        for plan in (half, other)
        if plan is not None and plan.seconds < best.seconds and safe_bytes(plan) <= memory
    ]
    return min(faster, key=lambda plan: (plan.seconds, plan.memory), default=None)


def safe_bytes(plan: Ranked) -> float:
    """Return the bytes of an estimated plan, and what they may be off."""
    assert plan.estimate is not None
    return plan.estimate.peak + plan.estimate.margin
