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


def search_without_candidates(pinned: str, devices: int, batch_size: int) -> PlanError:
    return PlanError(
        f"no plan for {devices} devices and {batch_size} examples agrees with {pinned}: the sizes "
        "of its mesh axes must multiply to a divisor of the devices, and `data` must divide the "
        "examples. Leave an axis out to have it chosen."
    )


def search_nothing_fits(memory: float, least: Sequence[tuple[str, float, str]]) -> PlanError:
    some = "".join(
        f"\n  {plan}: " + (f"at least {size:,.0f} bytes" if why == "memory" else why)
        for plan, size, why in least
    )
    if all(why != "memory" for _, _, why in least):
        return PlanError(f"no plan that agrees with what is pinned can be:{some}")
    return PlanError(
        f"no plan fits in {memory:,.0f} bytes per device. The nearest:{some}\n"
        "More devices, a smaller batch or bfloat16 need less."
    )


def search_one_network() -> PlanError:
    return PlanError(
        "plurax plan --search finds the plan of one network, and this experiment has members. "
        "Members never communicate: Plan(member=N) uses N devices, and --tune chooses the rest."
    )


def option_needs_search(name: str) -> PlanError:
    return PlanError(
        f"--{name} is an option of a search, and `plurax plan` shows the plan as it is: add "
        f"--search, or leave --{name} out."
    )
