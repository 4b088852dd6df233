"""Keep some of the matrix products, where memory or time is too short to keep all.

A search ranks plans that keep all products (`dots`) or none (`full`). Its fastest plan that
recomputes is tried again with a share of them, those with the most operations for each byte
(`plurax.jaxpr.kept_values`):

    GPT on 8 H100, 20 GB for activations    step        activations
    dots                                    -           31 GB: does not fit
    full                                    1.36 s      6 GB
    half of the products                    1.21 s      14 GB
    three quarters                          1.17 s      19 GB: taken

What is kept last has the fewest operations for its bytes: where memory bandwidth is what a step
waits for, a share is faster than all of them even where all of them fit.
"""

from collections.abc import Callable, Sequence

from plurax.planner.found import Ranked

_HALF, _MORE, _LESS = 0.5, 0.75, 0.25


def partly_kept(
    ranked: Sequence[Ranked], limit: float, estimated: Callable[[Ranked, float], Ranked | None]
) -> list[Ranked]:
    """Return plans that keep a share of their products, like the fastest that recomputes them.

    **Arguments:** `ranked`, fastest first; `limit`, the seconds that this plan may take;
    `estimated(plan, share)`, the plan with that share if it fits.
    """
    recomputing = [one for one in ranked if one.plan.remat in ("dots", "full")]
    if not recomputing or recomputing[0].seconds > limit:
        return []
    best = recomputing[0]
    half = estimated(best, _HALF)
    faster = half is not None and half.seconds < best.seconds
    other = estimated(best, _MORE if faster else _LESS)
    return [plan for plan in (half, other) if plan is not None and plan.seconds < best.seconds]
