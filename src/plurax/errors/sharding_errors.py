"""Shardings and shard strategies that do not fit."""

from collections.abc import Sequence
from typing import Any

from plurax.errors.kinds import PlanError


def axis_used_twice(sharding: str, axis: str) -> PlanError:
    return PlanError(
        f"{sharding} names the mesh axis {axis!r} twice. An axis can split only one dim of a "
        "tensor: remove it from the other."
    )


def gathered_whole(operation: str, size: int, where: str) -> str:
    return (
        f"`{operation}` at {where} has no sharding rule: {size:,} bytes of its operands are "
        "gathered on every device each time, and all devices compute the same. The result is "
        "right. To split the work, put the operation into a `jax.shard_map`; to avoid the gather, "
        "replicate its operands by a rule in Plan(shardings=...)."
    )


def spec_too_long(spec: tuple[Any, ...], rank: int, name: str = "the tensor") -> PlanError:
    return PlanError(
        f"the sharding {spec} has {len(spec)} entries and {name} has {rank} "
        f"dim{'s' if rank != 1 else ''}: give one entry for each dim, None for a dim that is not "
        "split."
    )


def tensor_map_outside(tensor_map: tuple[Any, ...], device_matrix: tuple[int, ...]) -> PlanError:
    last = len(device_matrix) - 1
    return PlanError(
        f"the tensor map {tensor_map} does not fit the device matrix {device_matrix}: its entries "
        f"are indices of the device matrix counted from its end, 0 to {last}, or -1 for a dim that "
        "is not split."
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


def sharding_indivisible(what: str, shape: tuple[int, ...], dim: int, num_shards: int) -> PlanError:
    fits = max(n for n in range(1, num_shards + 1) if shape[dim] % n == 0)
    return PlanError(
        f"dim {dim} of {what} with shape {shape} has size {shape[dim]} and cannot be split "
        f"into {num_shards} shards; {fits} would fit."
    )


def by_hand_over_data(spec: Any) -> PlanError:
    return PlanError(
        f"jax.shard_map in the model splits over 'data' by {spec}, but the loss already gets "
        "the rows of one device only, and plurax sums over devices. Leave 'data' out of in_specs "
        "and out_specs."
    )


def ordered_print(where: str, devices: int) -> PlanError:
    return PlanError(
        f"jax.debug.print or jax.debug.callback with ordered=True at {where}: JAX orders them on "
        f"one device only, and the plan has {devices}. Leave out ordered=True, or train on one "
        "device, Plan()."
    )


def strategy_wrong_arguments(strategy: Sequence[Any], given: int) -> PlanError:
    return PlanError(
        f"shard(strategy={tuple(strategy)}) has counts for {len(strategy)} arguments and the "
        f"operator was called with {given}: give one tuple of counts for each, or None."
    )


def strategy_wrong_rank(strategy: Sequence[Any], place: int, shape: tuple[int, ...]) -> PlanError:
    return PlanError(
        f"shard(strategy={tuple(strategy)}): argument {place} has the shape {tuple(shape)}, so "
        f"its counts must be {len(shape)}, one for each dim; 1 leaves a dim unsplit."
    )


def strategy_uneven(strategy: Sequence[Any], place: int, dim: int, other: int) -> PlanError:
    return PlanError(
        f"shard(strategy={tuple(strategy)}): dim {dim} of argument {place} is the same index of "
        f"the operator as a dim that is split into {other} shards: give both the same count."
    )


def strategy_indivisible(
    strategy: Sequence[Any], place: int, shape: tuple[int, ...], dim: int
) -> PlanError:
    return PlanError(
        f"shard(strategy={tuple(strategy)}): dim {dim} of argument {place} with shape "
        f"{tuple(shape)} has size {shape[dim]}, which its count does not divide."
    )


def strategy_not_of_tensor(counts: tuple[int, ...], tensor: int) -> PlanError:
    return PlanError(
        f"shard splits an operator into {' × '.join(map(str, counts))} shards and the plan has "
        f"tensor={tensor}: the product of the counts must be {tensor} or a divisor of it, and each "
        "count a product of its prime factors."
    )


def annotated_no_array(given: str) -> PlanError:
    return PlanError(
        f"{given} is no array; plurax.name, plurax.stage_boundary and plurax.shard take an array "
        "of numbers, or a tree of such arrays."
    )
