"""Shardings and shard strategies that do not fit."""

from typing import Any

from plurax.errors.kinds import PlanError


def spec_too_long(spec: tuple[Any, ...], rank: int, name: str = "the tensor") -> PlanError:
    return PlanError(
        f"the sharding {spec} has {len(spec)} entries and {name} has {rank} "
        f"dim{'s' if rank != 1 else ''}: give one entry for each dim, None for a dim that is not "
        "split."
    )


def sharding_wrong_rank(what: str, shape: tuple[int, ...], sharding: str) -> PlanError:
    return PlanError(
        f"{what} has the shape {shape}, {len(shape)} dims, and the sharding {sharding} has another "
        "number of entries: give one for each dim, None for a dim that is not split."
    )


def sharding_unknown_axis(what: str, axis: str, axes: tuple[str, ...]) -> PlanError:
    return PlanError(
        f"the sharding of {what} names the mesh axis {axis!r}; the axes are {', '.join(axes)}."
    )


def by_hand_over_data(spec: Any) -> PlanError:
    return PlanError(
        f"jax.shard_map in the model splits over 'data' by {spec}, but the loss already gets "
        "the rows of one device only, and plurax sums over devices. Leave 'data' out of in_specs "
        "and out_specs."
    )
