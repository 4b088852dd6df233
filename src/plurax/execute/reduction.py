"""Reduce partial sums over devices, all that share axes in one collective."""

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
    values: Sequence[ShardedValue],
    targets: Sequence[TensorSharding],
    partitioner: Partitioner,
    *,
    exact: int = 0,
) -> list[Array]:
    """Reduce values that are partial sums (`sharding.partial`) to the target shardings.

    Values that need a plain all-reduce over the same axes share one `psum`; the others (such as
    reduce-scatters) are reduced in buckets. Example:

        gradient w   (64, 32)  partial over data -> replicated       } one psum over `data`
        gradient b   (32,)     partial over data -> replicated       }
        gradient e   (512, 8)  partial over data -> split over data  reduce-scatter, in a bucket
        norm         ()        not partial                           unchanged

    The first `exact` values are no gradients, and never rounded for it.

    **Returns:** the arrays in the order of `values`.
    """
    sent = [*values[:exact], *map(partitioner.rounded_to_send, values[exact:], targets[exact:])]
    totals = dict(enumerate(sent))
    together: dict[tuple[str, ...], list[int]] = {}
    rest = []
    for index, (value, target) in enumerate(zip(sent, targets, strict=True)):
        moves = plan_reshard(
            value.sharding, target, value.shape, value.array.dtype.itemsize, partitioner.axes
        )
        if [move.kind for move in moves] == ["all-reduce"]:
            together.setdefault(moves[0].axes, []).append(index)
        elif moves:
            rest.append(index)
    platform = partitioner.axes.platform
    for axes, indices in together.items():
        spec = partitioner.context.spec
        specs = [spec(sent[p].shape, sent[p].dtype, targets[p]) for p in indices]
        names, groups = partitioner.axes.group(axes)

        def add_up(*arrays: Array, over: Any = names, groups: Any = groups) -> list[Array]:
            return psum_in_turn(arrays, over, groups, platform)

        sums = partitioner.run(add_up, [sent[index].array for index in indices], specs)
        totals.update(zip(indices, sums, strict=True))
    apart = platform == "gpu"
    moved = bucketed(partitioner, [sent[p] for p in rest], [targets[p] for p in rest], apart=apart)
    totals.update(zip(rest, moved, strict=True))
    return [one.array for one in map(partitioner.rounded_sum, totals.values(), sent, values)]
