"""Why a search finds no plan, and what would change that."""

from collections.abc import Iterator, Sequence

from plurax import errors
from plurax.machine import Machine
from plurax.plan import Plan
from plurax.planner.candidates import Model, candidates
from plurax.planner.experts import used_devices
from plurax.planner.fewest import minimal
from plurax.planner.found import Ranked
from plurax.planner.sizes import Sizes


def nothing_agrees(
    model: Model, machine: Machine, pinned: Plan, fields: Sequence[str]
) -> errors.PlanError:
    """Return the error that names the fewest pins that no plan has, and what they may be."""

    def sizes_with(kept: Sequence[str]) -> Iterator[Sizes | None]:
        try:
            plan = Plan(**{name: getattr(pinned, name) for name in kept})
        except errors.PlanError:
            yield None  # these need the others, too
            return
        for one in candidates(model, machine, machine.devices, plan, kept):
            yield one.sizes

    few = minimal(list(fields), lambda kept: not any(True for _ in sizes_with(kept)))
    ways = []
    for name in few:
        known = [one for one in sizes_with([field for field in fields if field != name]) if one]
        values = {getattr(one, name) for one in known} if name in Sizes._fields else set()
        every = sorted(value for value in values if not isinstance(value, tuple))
        ways.append(f"{name} can be {', '.join(map(str, every))}" if every else f"leave {name} out")
    long = dict.fromkeys(("shardings", "strategies"), "...")
    wanted = ", ".join(f"{name}={long.get(name, repr(getattr(pinned, name)))}" for name in few)
    more = "".join(f" or {n}" for n in sorted(used_devices(machine)) if machine.devices % n)
    return errors.PlanError(
        f"no plan agrees with Plan({wanted}): data × pipeline × tensor must be a divisor of the "
        f"{machine.devices} devices{more}, data {'at most' if model.pads else 'a divisor of'} the "
        f"{model.batch_size} examples, and pipeline at most {model.layers}, the stages into which "
        "the model can be cut (plurax.stack, plurax.pipeline.stage_boundary). With the rest of "
        f"what is pinned, {', or '.join(ways)}."
    )


def nothing_fits(memory: float, refused: Sequence[Ranked], less: str = "") -> errors.PlanError:
    """Return the error that names the three plans nearest to fitting, and what needs `less`."""
    if not refused:
        return errors.PlanError(
            "every plan that agrees with what is pinned has tensor > 1, and none splits a matrix "
            "product: for this model and batch the devices would send each other for longer than "
            "they save. Leave `tensor` out of what is pinned, or give a larger batch."
        )
    # Of equal reasons one.
    unlike = {f"{one.why} {one.memory if one.why == 'memory' else ''}": one for one in refused}
    nearest = sorted(unlike.values(), key=lambda one: (one.why != "memory", one.memory))[:3]
    some = "".join(
        f"\n  {one.plan.sizes_text()}: "
        + (f"at least {one.memory:,.0f} bytes" if one.why == "memory" else one.why)
        for one in nearest
    )
    if all(one.why != "memory" for one in nearest):
        return errors.PlanError(f"no plan that agrees with what is pinned can be:{some}")
    return errors.PlanError(
        f"no plan fits in {memory:,.0f} bytes per device. The nearest:{some}\nMore devices, {less}"
        "a smaller batch or bfloat16 need less."
    )
