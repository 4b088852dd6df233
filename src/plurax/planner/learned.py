"""What estimates teach a search about what it computes, and the least that a plan can take.

The solved graph has no temporaries, and a pipeline decides by rules what its stages hold. It counts
the kernels of products only, and a model that is small, or has many microbatches, spends its time
in starting the others. Plans of one remat policy, `tensor` and ZeRO level differ alike, so one
estimate corrects the others.

    computed     microbatches=4, data=4 and 8: 1.0 ms, 1.1 ms
    estimate     data=4: 2.4 ms, of which 0.8 ms start kernels, 0.2 ms for each microbatch
    so           ratio 2.4 / (1.0 + 0.8); data=8: (1.1 + 4 x 0.2) x 1.33 = 2.5 ms

The bounds of candidates count the kernels of products only, too. A plan that splits a model starts
no fewer kernels for a microbatch than one on fewer devices, so that an estimate raises the bounds
of those of its policy: `data=8` above takes at least what its bound says and 0.8 ms.

How long kernels take to start is learned from plans without stages, and where a search has none,
from a stage: the whole model starts as many times more kernels as there are stages.

Of a policy without an estimate on so few devices, those of another one say it, less what plans that
send alike show that it starts fewer. Kernels that start, of a transformer on an A100:

    data=8, zero=1    none 4.9 ms, dots 4.4 ms    so `dots` starts 0.5 ms less of them
    one device        none 4.8 ms                 dots at least 4.3 ms
"""

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Mapping
from typing import Any, final

from plurax.analysis.estimate import Estimate
from plurax.plan import Plan, Remat
from plurax.planner.sizes import Sizes


@dataclasses.dataclass(frozen=True)
class Computed:
    """What a candidate takes on the solved graph: `seconds`; bytes of its `own` parameters with
    gradients and optimizer state, and those `kept` for the backward pass."""

    seconds: float
    own: float
    kept: float


@final
class Learned:
    """What estimates have taught so far.

    **Arguments:** `products`, for each remat policy the seconds in which the kernels of a
    microbatch's products start, which bounds count.
    """

    def __init__(self, products: Mapping[Remat, float]) -> None:
        self._products = products
        # For a remat policy, the least that an estimate was by what `least` said.
        self._shares: dict[Remat, float] = {}
        self._ratios: dict[Any, tuple[float, float]] = {}
        # For a remat policy, the seconds in which the kernels of a microbatch start; and of a step
        # those of the update.
        self._starts: dict[Remat, float] = {}
        # The same of stages, where no plan without them is estimated.
        self._staged_starts: dict[Remat, float] = {}
        self._bounding: list[tuple[Sizes, float]] = []  # by the sizes of plans that were estimated
        self._least_starts = functools.cache(self._starts_at_least)
        self._updates: list[tuple[int, float]] = []  # those of the update, by the ZeRO level
        self._update_starts: float | None = None

    def add(
        self, plan: Plan, sizes: Sizes, computed: Computed, estimated: Estimate, bound: float
    ) -> None:
        """Compare what was computed, and a candidate's `bound`, with an estimate."""
        update = estimated.update.overhead
        self._update_starts = min(update, self._update_starts or update)
        self._updates.append((sizes.zero, update))
        starts = estimated.gradient.overhead / plan.most_microbatches * plan.pipeline
        known = self._starts if plan.pipeline == 1 else self._staged_starts
        known[plan.remat] = min(known.get(plan.remat, starts), starts)
        if plan.pipeline == 1:
            self._bounding.append((sizes, starts))
            self._least_starts.cache_clear()
        share = estimated.seconds / self._least(sizes, bound)
        self._shares[plan.remat] = min(share, self._shares.get(plan.remat, 1.0))
        kept = max(estimated.peak - computed.own, 0) / max(computed.kept, 1.0)
        alike, tensor = self._alike(plan)
        now = estimated.seconds / self._with_starts(plan, computed), kept
        for key in ((alike, tensor), (alike, None), (alike[:2], None)):
            # Of several the least, so that no plan is left out for what another one lacked.
            seconds, bytes_ = self._ratios.get(key, now)
            self._ratios[key] = min(seconds, now[0]), min(bytes_, kept)

    def least(self, sizes: Sizes, bound: float) -> float:
        """Return the least seconds of a plan, from the `bound` that counts products' kernels only.

        Where an estimate was below it, since kernels are fused, that is taken off all of a policy.
        """
        return self._least(sizes, bound) * self.share(sizes.remat)

    def share(self, remat: Remat) -> float:
        """Return the least that an estimate of a remat policy was by its bound, at the most 1."""
        return self._shares.get(remat, 1.0)

    def _least(self, sizes: Sizes, bound: float) -> float:
        others = self._least_starts(sizes.remat, sizes.devices) - self._products[sizes.remat]
        # An update of shards starts no fewer kernels than one of whole parameters.
        update = min((update for zero, update in self._updates if zero <= sizes.zero), default=0.0)
        starts = sizes.most_microbatches * max(0.0, others) + update
        return bound + starts / sizes.pipeline

    def _starts_at_least(self, remat: Remat, devices: int) -> float:
        """Return the seconds in which the kernels of a microbatch start at the least."""
        # What gradients are sent by are kernels, too: those of plans on more devices do not count.
        known = [(sizes, starts) for sizes, starts in self._bounding if sizes.devices <= devices]
        own = [starts for sizes, starts in known if sizes.remat == remat]
        others = (starts + self._more(remat, sizes.remat) for sizes, starts in known)
        return min(own or others, default=0.0)

    def _more(self, remat: Remat, other: Remat) -> float:
        """Return by how much the starts of a policy are longer than another's, at the least."""
        every = itertools.product(self._bounding, self._bounding)
        return max(
            (own - starts for (sizes, own), (alike, starts) in every
             if (sizes.remat, alike.remat) == (remat, other)
             and all(map(operator.le, _sending(sizes), _sending(alike)))),
            default=-math.inf,
        )  # fmt: skip

    def _with_starts(self, plan: Plan, computed: Computed) -> float:
        known = self._starts or (self._staged_starts if plan.pipeline > 1 else {})
        starts = known.get(plan.remat, min(known.values(), default=0.0))
        starts = plan.most_microbatches * starts + (self._update_starts or 0.0)
        return computed.seconds + starts / plan.pipeline

    def seconds(self, plan: Plan, computed: Computed) -> float:
        """Return the seconds of a step that an estimate is expected to say."""
        return self._with_starts(plan, computed) * self._ratio(plan)[0]

    def memory(self, plan: Plan, computed: Computed) -> float:
        """Return the bytes that a plan needs at the least."""
        _, ratio, doubt = self._ratio(plan)
        return (computed.own + computed.kept * ratio) / doubt

    def knows(self, plan: Plan) -> bool:
        """Whether a plan alike was estimated."""
        return self._alike(plan) in self._ratios

    def _ratio(self, plan: Plan) -> tuple[float, float, float]:
        """Return the ratios of seconds and of bytes, and how much more than the limit plans may
        seem to need that are estimated nevertheless."""
        alike, tensor = self._alike(plan)
        if (alike, tensor) in self._ratios:
            return *self._ratios[alike, tensor], 1.05
        for key in ((alike, None), (alike[:2], None)):
            if key in self._ratios:
                return *self._ratios[key], 1.2
        return 1.0, 1.0, 1.2

    def _alike(self, plan: Plan) -> tuple[Any, int]:
        return (plan.remat, plan.pipeline > 1, plan.zero), plan.tensor


def _sending(sizes: Sizes) -> tuple[int, ...]:
    """Return what is no larger of a plan that starts no more kernels to send for a microbatch."""
    return sizes.devices, sizes.tensor, sizes.zero, -sizes.most_microbatches
