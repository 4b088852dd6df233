"""Helpers that the rules of several operations share.

Most rules do three things: choose a common sharding for the operands, reshard them to it, and apply
the operation to the shards. The choice is between the shardings that the operands already have, and
the one that sends the fewest bytes wins.

    mesh tensor=4; a (8, 64) is split as (None, tensor), b (8, 64) is (None, None); float32

    candidate            to reshard a                     to reshard b      chosen
    (None, tensor)       nothing                          a slice, 0        yes
    (None, None)         an all-gather, 1536 bytes        nothing

An operand that is a partial sum may stay one if the operation is linear and no other equation reads
the operand: another reader could need it reduced, and it would then be reduced twice.
"""

from collections.abc import Callable, Sequence
from typing import Any

from jaxtyping import Array

from plurax.jaxpr.interpret import bind
from plurax.partition.values import Output, ShardedValue, ValueVersions
from plurax.sharding.spec import TensorSharding

Rule = Callable[[Any, Any, list[ValueVersions]], list[Output]]


def result(
    eqn: Any, inputs: list[ValueVersions], array: Array, sharding: TensorSharding, place: int = 0
) -> ShardedValue:
    """Return a result of an equation; `data_varying` and `is_param` follow from the inputs."""
    values = [cell.value for cell in inputs if not cell.deferred]
    return ShardedValue(
        array,
        tuple(eqn.outvars[place].aval.shape),
        sharding,
        data_varying=any(value.data_varying for value in values),
        is_param=all(value.is_param for value in values),
    )


def by_default(divider: Any, eqn: Any, inputs: list[ValueVersions]) -> list[Output]:
    """Apply an operation without a rule to replicated operands, and record the gathers."""
    before = len(divider.records)
    arrays = [
        divider.reshard(cell, TensorSharding.replicated(len(cell.shape))).array for cell in inputs
    ]
    divider.gathered_for(eqn, before)
    return [
        result(eqn, inputs, array, TensorSharding.replicated(array.ndim), place)
        for place, array in enumerate(bind(eqn, arrays))
    ]


def fitting(cell: ValueVersions, target: TensorSharding) -> TensorSharding:
    """Return an operand's sharding for a result sharded as `target`.

    Scalars are replicated, and so are dims of size 1, which broadcast.
    """
    if not cell.shape:
        return TensorSharding(())
    return TensorSharding(
        tuple(
            entry if size > 1 else () for size, entry in zip(cell.shape, target.dims, strict=True)
        )
    )


def common_sharding(
    divider: Any, cells: list[ValueVersions], kept: frozenset[str] = frozenset()
) -> TensorSharding:
    """Return the operand sharding to which all operands are resharded for the fewest bytes.

    Partial sums over the axes in `kept` may stay, so they cost nothing. With equal bytes the
    sharding with the most shards wins.
    """
    rank = max(len(cell.shape) for cell in cells)
    made = [cell for cell in cells if not cell.deferred and len(cell.shape) == rank]
    # Partial sums are candidates in their reduced form.
    options = {TensorSharding(value.sharding.dims) for cell in made for value in cell.values}
    options = options or {
        cell.deferred.free for cell in cells if cell.deferred and cell.deferred.free is not None
    }
    if not options:
        return TensorSharding.replicated(rank)
    if len(options) == 1:
        return next(iter(options))

    def cost(option: TensorSharding) -> tuple[float, float]:
        total = 0.0
        for cell in made:
            still = kept & cell.value.sharding.partial
            total += divider.cost(cell, TensorSharding(fitting(cell, option).dims, still))
        return total, -divider.axes.size(option.axes)

    allowed = [option for option in options if not kept & set(option.axes)]
    # Sets have no fixed order: sorting makes the choice the same in every process.
    return min(sorted(allowed, key=repr), key=cost)


def can_stay_partial(cell: ValueVersions) -> bool:
    """Whether a partial sum may stay unreduced: it has one reader and no reduced version."""
    return cell.uses <= 1 and all(value.sharding.partial for value in cell.values)


def maybe_partial(divider: Any, cell: ValueVersions) -> ShardedValue:
    """Return a value for a linear operation that only moves entries, partial if possible."""
    return cell.value if can_stay_partial(cell) else divider.reduced(cell)


def replicate_dims(
    divider: Any, cell: ValueVersions, value: ShardedValue, dims: Sequence[int]
) -> ShardedValue:
    """Reshard a value so that some of its dims are replicated."""
    axes = [axis for dim in dims for axis in value.sharding.dims[dim]]
    if not axes:
        return value
    entries = tuple(() if d in dims else e for d, e in enumerate(value.sharding.dims))
    moved: ShardedValue = divider.reshard(cell, TensorSharding(entries, value.sharding.partial))
    return moved


def rows_again(divider: Any, value: ShardedValue, came: TensorSharding) -> ShardedValue:
    """Split over `data` the rows that an operation needed whole, to keep later equations parallel.

    `came` is the sharding before the operation. This applies in `joint` mode only, in which rows
    are one dim split over `data`.
    """
    taken = {*value.sharding.axes, *value.sharding.partial}
    if not divider.joint or "data" in taken:
        return value
    for dim, entry in enumerate(came.dims):
        if "data" in entry and value.shape[dim] % divider.axes.size(["data"]) == 0:
            again: ShardedValue = divider.move(value, value.sharding.with_dim(dim, ("data",)))
            return again
    return value
