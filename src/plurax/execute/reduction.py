"""Reduce partial sums over devices, all that share axes in one collective."""

from collections.abc import Sequence
from typing import Any

from jax import lax
from jaxtyping import Array

from plurax.partition.buckets import together as bucketed
from plurax.partition.partitioner import Partitioner
from plurax.partition.values import ShardedValue
from plurax.sharding.reshard import plan_reshard
from plurax.sharding.spec import TensorSharding


def reduced(
    values: Sequence[ShardedValue], targets: Sequence[TensorSharding], divider: Partitioner
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
    for place, (value, target) in enumerate(zip(values, targets, strict=True)):
        moves = plan_reshard(
            value.sharding, target, value.shape, value.array.dtype.itemsize, divider.axes
        )
        if [move.kind for move in moves] == ["all-reduce"]:
            together.setdefault(moves[0].axes, []).append(place)
        results[place] = value if moves else value.array
    for axes, places in together.items():
        names, groups = divider.axes.group(axes)
        sums = lax.psum([values[p].array for p in places], names, axis_index_groups=groups)
        for place, array in zip(places, sums, strict=True):
            results[place] = array
            divider.record_all_reduce(axes, array)
    rest = [place for place, result in enumerate(results) if isinstance(result, ShardedValue)]
    moved = bucketed(divider, [values[p] for p in rest], [targets[p] for p in rest])
    for place, value in zip(rest, moved, strict=True):
        results[place] = value.array
    return results
