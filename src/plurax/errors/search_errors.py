"""Searches that have no answer."""

from collections.abc import Sequence

from plurax.errors import hints
from plurax.errors.kinds import PlanError


def pin_of_nothing(path: str, paths: Sequence[str]) -> PlanError:
    hint = hints.did_you_mean(path, paths)
    return PlanError(
        f"the strategy pinned for {path!r} belongs to no equation and no parameter of this "
        f"step.{hint}"
    )


def pins_contradict(pinned: Sequence[str]) -> PlanError:
    return PlanError(
        f"no choice of strategies keeps what is pinned for {', '.join(pinned)}: a sum that is not "
        "partial cannot become partial again. Leave one of them open."
    )


def search_splits_nothing(plan: str) -> PlanError:
    return PlanError(
        f"Plan({plan}): splitting tensors or operators over `tensor` costs more than it saves, so "
        "there is nothing to split."
    )
