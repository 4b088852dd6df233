"""Pipeline schedules that cannot run, and networks that cannot be cut."""

from collections.abc import Sequence
from typing import Literal

from plurax.errors.kinds import PlanError


def schedule_deadlock(waiting: Sequence[str]) -> PlanError:
    return PlanError(
        "the schedule cannot run: devices wait for each other forever: "
        + "; ".join(waiting)
        + ". Put what they wait for earlier in the list."
    )


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


def too_few_layers(depth: int, pipeline: int, stages: int) -> PlanError:
    chunks = stages // pipeline
    near = max((n for n in range(1, pipeline + 1) if n * chunks <= depth), default=1)
    return PlanError(
        f"the plan has {stages} stages and the stack {depth} layers: every stage needs one. "
        f"pipeline={near} works" + (f", stages={near * chunks}." if chunks > 1 else ".")
    )


def optimizer_needs_stages(operation: str) -> PlanError:
    return PlanError(
        "under pipeline > 1 each stage's tensors are on that stage's devices only, and the "
        f"optimizer's {operation!r} reads tensors of several stages at once. Sums and norms over "
        "all parameters work; so does this optimizer with pipeline=1 and zero=1."
    )
