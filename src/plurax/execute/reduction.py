"""Reduce partial sums over devices, all that share axes in one collective."""

import functools
from collections.abc import Sequence
from typing import Any

from jaxtyping import Array

from plurax.partition.buckets import together as bucketed
from plurax.partition.partitioner import Partitioner
from plurax.partition.values import ShardedValue
from plurax.sharding.in_turn import psum_in_turn
from plurax.sharding.reshard import plan_reshard
from plurax.sharding.spec import TensorSharding


def reduced(
    values: Sequence[ShardedValue], targets: Sequence[TensorSharding], partitioner: Partitioner
) -> list[Array]:
    """Reduce values that are partial sums (`sharding.partial`) to the target shardings.

    Values that need a plain all-reduce over the same axes share one `psum`; the others (such as
    reduce-scatters) are reduced in buckets. Example:

        gradient w   (64, 32)  partial over data -> replicated       } one psum over `data`
        gradient b   (32,)     partial over data -> replicated       }
        gradient e   (512, 8)  partial over data -> split over data  reduce-scatter, in a bucket
        norm         ()        not partial                           unchanged

    **Returns:** the arrays in the order of `values`.
    """
    results: list[Any] = [None] * len(values)
    together: dict[tuple[str, ...], list[int]] = {}
    for index, (value, target) in enumerate(zip(values, targets, strict=True)):
        moves = plan_reshard(
            value.sharding, target, value.shape, value.array.dtype.itemsize, partitioner.axes
        )
        if [move.kind for move in moves] == ["all-reduce"]:
            together.setdefault(moves[0].axes, []).append(index)
        results[index] = value if moves else value.array
    for axes, indices in together.items():
        some = [values[index] for index in indices]
        specs = [
            partitioner.context.spec(value.shape, value.dtype, targets[index])
            for index, value in zip(indices, some, strict=True)
        ]
        names, groups = partitioner.axes.group(axes)
        psum = functools.partial(_psum, names, groups, partitioner.axes.platform)
        sums = partitioner.run(psum, [value.array for value in some], specs)
        for index, value in zip(indices, sums, strict=True):
            results[index] = value.array
    rest = [index for index, result in enumerate(results) if isinstance(result, ShardedValue)]
    apart = partitioner.axes.platform == "gpu"
    moved = bucketed(
        partitioner, [values[p] for p in rest], [targets[p] for p in rest], apart=apart
    )
    for index, value in zip(rest, moved, strict=True):
        results[index] = value.array
    return results


def _psum(names: Any, groups: Any, platform: str | None, *arrays: Array) -> Sequence[Array]:
    return psum_in_turn(arrays, names, groups, platform)
