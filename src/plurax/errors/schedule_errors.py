"""Pipeline schedules that cannot run, and networks that cannot be cut."""

from collections.abc import Sequence
from typing import Literal

from plurax.errors.kinds import PlanError


def layers_wrong_sum(
    layers: Sequence[int], found: int, model: Literal["stack", "boundaries"], even: Sequence[int]
) -> PlanError:
    there = {
        "stack": f"the stack has {found} layers",
        "boundaries": f"the model's plurax.stage_boundary calls split it into {found}, one after "
        "another",
    }
    works = f"layers={tuple(even)} works, the default" if all(even) else "take fewer stages"
    return PlanError(
        f"Plan(layers={tuple(layers)}) adds up to {sum(layers)} layers, and {there[model]}: "
        f"{works}."
    )


def optimizer_needs_stages(operation: str) -> PlanError:
    return PlanError(
        "under pipeline > 1 each stage's tensors are on that stage's devices only, and the "
        f"optimizer's {operation!r} reads tensors of several stages at once. Sums and norms over "
        "all parameters work; so does this optimizer with pipeline=1 and zero=1."
    )
