"""What the rules of all operations share."""

from collections.abc import Callable, Sequence
from typing import Any

from jaxtyping import Array

from plurax.partition.values import Output, ShardedValue, ValueVersions
from plurax.sharding.spec import TensorSharding

Rule = Callable[[Any, Any, list[ValueVersions]], list[Output]]


def bind(eqn: Any, arrays: Sequence[Array], **changed: Any) -> list[Array]:
    """The operation on some arrays, with some of its parameters changed."""
    # How arrays lie is the divider's to say, not that of the mesh in which they were traced.
    lying = {name: None for name in ("sharding", "out_sharding") if name in eqn.params}
    params = eqn.primitive.get_bind_params({**eqn.params, **lying, **changed})
    out = eqn.primitive.bind(*arrays, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


def result(
    eqn: Any, inputs: list[ValueVersions], array: Array, sharding: TensorSharding, place: int = 0
) -> ShardedValue:
    """One result, varying as its inputs are."""
    values = [cell.value for cell in inputs if not cell.deferred]
    return ShardedValue(
        array,
        tuple(eqn.outvars[place].aval.shape),
        sharding,
        data_varying=any(value.data_varying for value in values),
        is_param=all(value.is_param for value in values),
    )


def by_default(divider: Any, eqn: Any, inputs: list[ValueVersions]) -> list[Output]:
    """Whole tensors in, whole tensors out. What is gathered for that is said."""
    before = len(divider.records)
    arrays = [divider.reshard(cell, TensorSharding.whole(len(cell.shape))).array for cell in inputs]
    divider.gathered_for(eqn, before)
    return [
        result(eqn, inputs, array, TensorSharding.whole(array.ndim), place)
        for place, array in enumerate(bind(eqn, arrays))
    ]


def fitting(cell: ValueVersions, target: TensorSharding) -> TensorSharding:
    """A sharding for an operand: scalars, and dims of size 1 that are spread, are whole."""
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
    """The sharding of one of some operands to which the fewest bytes move."""
    rank = max(len(cell.shape) for cell in cells)
    made = [cell for cell in cells if not cell.deferred and len(cell.shape) == rank]
    options = {TensorSharding(value.sharding.dims) for cell in made for value in cell.values}
    options = options or {
        cell.deferred.free for cell in cells if cell.deferred and cell.deferred.free is not None
    }
    if not options:
        return TensorSharding.whole(rank)
    if len(options) == 1:
        return next(iter(options))

    def cost(option: TensorSharding) -> tuple[float, float]:
        total = 0.0
        for cell in made:
            still = kept & cell.value.sharding.partial
            total += divider.cost(cell, TensorSharding(fitting(cell, option).dims, still))
        return total, -divider.axes.size(option.axes)

    allowed = [option for option in options if not kept & set(option.axes)]
    return min(sorted(allowed, key=repr), key=cost)


def can_stay_partial(cell: ValueVersions) -> bool:
    """Whether a sum may go on as terms: nothing else reads it, and it has not been added up."""
    return cell.uses <= 1 and all(value.sharding.partial for value in cell.values)


def maybe_partial(divider: Any, cell: ValueVersions) -> ShardedValue:
    """A value for an operation that is linear and only moves numbers: a sum may stay one."""
    return cell.value if can_stay_partial(cell) else divider.reduced(cell)


def replicate_dims(
    divider: Any, cell: ValueVersions, value: ShardedValue, dims: Sequence[int]
) -> ShardedValue:
    """The value with some dims whole."""
    axes = [axis for dim in dims for axis in value.sharding.dims[dim]]
    if not axes:
        return value
    entries = tuple(() if d in dims else e for d, e in enumerate(value.sharding.dims))
    moved: ShardedValue = divider.reshard(cell, TensorSharding(entries, value.sharding.partial))
    return moved


def rows_again(divider: Any, value: ShardedValue, came: TensorSharding) -> ShardedValue:
    """Rows that had to be whole for an operation, split over `data` again, so that what follows is
    divided; `came`, how they were split before it."""
    taken = {*value.sharding.axes, *value.sharding.partial}
    if not divider.joint or "data" in taken:
        return value
    for dim, entry in enumerate(came.dims):
        if "data" in entry and value.shape[dim] % divider.axes.size(["data"]) == 0:
            again: ShardedValue = divider.move(value, value.sharding.with_dim(dim, ("data",)))
            return again
    return value
