"""Candidates that are estimated at the end of a search though their bounds do not ask for it.

A bound counts as traffic what a compiler may fuse, and what is computed may be a third too much. So
a search that has found its best plan looks at a few others, one of each kind that was left out:

    of 8 devices, best data=4, tensor=2, zero=1        why
    data=8, bound 1.01 of the best, computed 0.98      the plan that everybody knows
    data=2, tensor=4, no tensor=4 was estimated        what is computed may be too much
    data=4, tensor=2, zero=2, no effort was left       other ZeRO levels send otherwise
"""

import operator
from collections.abc import Collection, Sequence
from typing import Any

from plurax.planner.candidates import CandidatePlan
from plurax.planner.experts import is_plain
from plurax.planner.sizes import Sizes

Bounded = tuple[float, CandidatePlan]
"""A candidate after the least seconds that it can take."""


def plain_near(
    fitting: Sequence[CandidatePlan], known: Collection[Sizes], seconds: float
) -> list[Bounded]:
    """Return the fastest of data parallelism alone by its bound, if below `seconds` and unknown."""
    plain = ((one.seconds, one) for one in fitting if is_plain(one.sizes))
    least, first = min(plain, key=operator.itemgetter(0), default=(seconds, None))
    return [(least, first)] if first and least < seconds and first.sizes not in known else []


def others_beside(
    left: Sequence[Bounded], known: Collection[Sizes], best: Sizes, *, zeros: bool
) -> list[Bounded]:
    """Return of candidates that were left out the fastest of each size of `tensor`, without stages,
    of which none was estimated and, if `zeros`, the best under each other ZeRO level."""
    sizes_known = {sizes.tensor for sizes in known if sizes.pipeline == 1}
    first: dict[Any, Bounded] = {}
    for least, candidate in left:
        sizes, kind = candidate.sizes, None
        if sizes.pipeline == 1 and sizes.tensor not in sizes_known:
            kind = "tensor", sizes.tensor
        if zeros and sizes[:4] == best[:4] and sizes._replace(zero=best.zero) == best:
            kind = "zero", sizes.zero
        if kind and (kind not in first or least < first[kind][0]):
            first[kind] = least, candidate
    return sorted(first.values(), key=operator.itemgetter(0))
