"""Searches that have no answer."""

import difflib
from collections.abc import Sequence

from plurax.errors.kinds import PlanError


def pin_of_nothing(path: str, paths: Sequence[str]) -> PlanError:
    close = difflib.get_close_matches(path, paths, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return PlanError(
        f"the strategy pinned for {path!r} belongs to no equation and no parameter of this "
        f"step.{hint}"
    )


def pin_is_no_strategy(
    path: str, inputs: Sequence[object], strategies: Sequence[object]
) -> PlanError:
    some = "".join(f"\n  {one}" for one in strategies[:12])
    return PlanError(
        f"{path!r} cannot be computed from the inputs pinned for it, {tuple(inputs)}. "
        f"It can be from:{some}"
    )


def pins_contradict(pinned: Sequence[str]) -> PlanError:
    return PlanError(
        f"no choice of strategies keeps what is pinned for {', '.join(pinned)}: a sum that is not "
        "partial cannot become partial again. Leave one of them open."
    )


def solver_out_of_time(seconds: float) -> PlanError:
    return PlanError(
        f"the exact solver found no choice of strategies in {seconds:g} seconds. Give it more, or "
        "choose solver='recursive', which proves nothing and needs a second."
    )


def nothing_fits(budget: float) -> PlanError:
    return PlanError(
        "no choice of strategies keeps parameters, gradients, optimizer state and kept "
        f"activations within {budget:,.0f} bytes per device. More devices, a higher ZeRO stage, "
        "rematerialization or more microbatches make them smaller."
    )


def search_splits_nothing(plan: str) -> PlanError:
    return PlanError(
        f"Plan({plan}): splitting tensors or operators over `tensor` costs more than it saves, so "
        "there is nothing to split."
    )
