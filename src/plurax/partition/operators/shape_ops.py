"""Operations that rearrange entries: reshape, transpose, slice, concatenate, and the like.

They are linear, so a partial sum usually passes through. A dim that the operation does not change
stays split; a dim that it cuts, joins or reorders is replicated first. A reshape keeps a dim split
if the dim is the major one of those it is merged with, or is split into.

    mesh tensor=4

    operation                          sharding before       sharding after
    reshape (8, 12) -> (96)            (tensor, None)        (tensor): rows are contiguous
    reshape (8, 12) -> (96)            (None, tensor)        deferred: columns are not contiguous
    reshape (96) -> (8, 12)            (tensor)              (tensor, None)
    transpose (8, 12) -> (12, 8)       (tensor, None)        (None, tensor)
    slice (8, 12) -> (8, 6)            (tensor, None)        (tensor, None)
    slice (8, 12) -> (8, 6)            (None, tensor)        (None, None) after an all-gather
"""

import dataclasses
import math
from typing import Any

from plurax.jaxpr.interpret import bind
from plurax.partition.operators.common import (
    Rule,
    common_sharding,
    maybe_partial,
    replicate_dims,
    result,
    rows_again,
)
from plurax.partition.values import DeferredValue, Output, ShardedValue, ValueVersions
from plurax.sharding.spec import TensorSharding


def broadcast_in_dim(divider: Any, eqn: Any, inputs: list[ValueVersions]) -> list[Output]:
    """Broadcast a value; new dims are replicated, and zeros stay deferred."""
    cell, shape = inputs[0], tuple(eqn.outvars[0].aval.shape)
    if cell.is_zero:
        return [divider.zeros(shape, eqn.outvars[0].aval.dtype)]
    grows = math.prod(shape) > math.prod(cell.shape)
    # A partial sum is smaller before it is repeated: reduce it now.
    value = divider.reduced(cell) if grows else maybe_partial(divider, cell)
    places = eqn.params["broadcast_dimensions"]
    # A dim of size 1 that grows is the same on all devices.
    widened = [d for d, place in enumerate(places) if value.shape[d] != shape[place]]
    value = replicate_dims(divider, cell, value, widened)
    entries: list[tuple[str, ...]] = [()] * len(shape)
    for dim, place in enumerate(places):
        entries[place] = value.sharding.dims[dim]
    sharding = TensorSharding(tuple(entries), value.sharding.partial)

    def repeated(value: ShardedValue, sharding: TensorSharding) -> ShardedValue:
        local = sharding.shard_shape(shape, divider.axes.sizes)
        array = bind(eqn, [value.array], shape=local)[0]
        return dataclasses.replace(value, array=array, shape=shape, sharding=sharding)

    if not (grows and divider.joint and "data" in sharding.axes and not value.is_param):
        return [repeated(value, sharding)]

    def make(target: TensorSharding) -> ShardedValue:
        # Reshard the rows, not the larger tensor in which they are repeated.
        dims = [() if d in widened else target.dims[place] for d, place in enumerate(places)]
        there = divider.reshard(ValueVersions(value), TensorSharding(tuple(dims)))
        return repeated(there, TensorSharding(target.dims))

    return [DeferredValue(shape, make, source=value, free=sharding)]


def reshape(divider: Any, eqn: Any, inputs: list[ValueVersions]) -> list[Output]:
    """Reshape a value, keeping a split dim split if it is the major one of its group.

    If that fails for a reshape to one dim, the result stays deferred: a sum over it, or its inner
    product with another such tensor, only needs the shards.
    """
    cell, shape = inputs[0], tuple(eqn.outvars[0].aval.shape)
    value = maybe_partial(divider, cell)
    entries: list[tuple[str, ...]] = [()] * len(shape)
    lost = []
    for dim, entry in enumerate(value.sharding.dims):
        if not entry:
            continue
        before = math.prod(value.shape[:dim])
        ways = value.sharding.num_shards(dim, divider.axes.sizes)
        # A new dim can take over the split if it starts at the same stride and divides evenly.
        to = [
            place
            for place, size in enumerate(shape)
            if math.prod(shape[:place]) == before and size % ways == 0 and not entries[place]
        ]
        if to and eqn.params["dimensions"] is None and value.shape[dim] % ways == 0:
            entries[to[-1]] = entry
        else:
            lost.append(dim)
    if lost and len(shape) == 1 and not value.sharding.partial:
        return [_flattened(divider, eqn, cell)]
    value = replicate_dims(divider, cell, value, lost)
    sharding = TensorSharding(tuple(entries), value.sharding.partial)
    local = sharding.shard_shape(shape, divider.axes.sizes)
    return [result(eqn, inputs, bind(eqn, [value.array], new_sizes=local)[0], sharding)]


def _flattened(divider: Any, eqn: Any, cell: ValueVersions) -> DeferredValue:
    """Return the deferred reshape to one dim, which is gathered when another operation reads it."""

    def make(sharding: TensorSharding) -> ShardedValue:
        whole = divider.reshard(cell, TensorSharding.replicated(len(cell.shape)))
        array = bind(eqn, [whole.array])[0]
        return divider.move(result(eqn, [cell], array, TensorSharding.replicated(1)), sharding)

    shape = tuple(eqn.outvars[0].aval.shape)
    return DeferredValue(shape, make, flattened=cell, data_varying=cell.data_varying)


def transpose(divider: Any, eqn: Any, inputs: list[ValueVersions]) -> list[Output]:
    """Transpose the shards."""
    value = maybe_partial(divider, inputs[0])
    dims = tuple(value.sharding.dims[d] for d in eqn.params["permutation"])
    array = bind(eqn, [value.array])[0]
    return [result(eqn, inputs, array, TensorSharding(dims, value.sharding.partial))]


def squeeze(divider: Any, eqn: Any, inputs: list[ValueVersions]) -> list[Output]:
    """Remove dims of size 1."""
    gone = [d % len(inputs[0].shape) for d in eqn.params["dimensions"]]
    value = replicate_dims(divider, inputs[0], maybe_partial(divider, inputs[0]), gone)
    dims = tuple(e for d, e in enumerate(value.sharding.dims) if d not in gone)
    array = bind(eqn, [value.array])[0]
    return [result(eqn, inputs, array, TensorSharding(dims, value.sharding.partial))]


def rev(divider: Any, eqn: Any, inputs: list[ValueVersions]) -> list[Output]:
    """Reverse dims, which are replicated first."""
    dims = list(eqn.params["dimensions"])
    came = maybe_partial(divider, inputs[0])
    value = replicate_dims(divider, inputs[0], came, dims)
    turned = result(eqn, inputs, bind(eqn, [value.array])[0], value.sharding)
    return [rows_again(divider, turned, came.sharding)]


def slice_(divider: Any, eqn: Any, inputs: list[ValueVersions]) -> list[Output]:
    """Slice dims, which are replicated first; dims taken as a whole stay split."""
    params, shape = eqn.params, inputs[0].shape
    strides = params["strides"] or (1,) * len(shape)
    bounds = list(zip(params["start_indices"], params["limit_indices"], strides, strict=True))
    cut = [d for d, bound in enumerate(bounds) if bound != (0, shape[d], 1)]
    came = maybe_partial(divider, inputs[0])
    value = replicate_dims(divider, inputs[0], came, cut)
    # Along split dims the whole shard is taken.
    limits = tuple(bound[1] if d in cut else value.array.shape[d] for d, bound in enumerate(bounds))
    array = bind(eqn, [value.array], limit_indices=limits)[0]
    return [rows_again(divider, result(eqn, inputs, array, value.sharding), came.sharding)]


def dynamic_slice(divider: Any, eqn: Any, inputs: list[ValueVersions]) -> list[Output]:
    """Slice at dynamic indices; the dims that are cut are replicated first."""
    shape, sizes = inputs[0].shape, eqn.params["slice_sizes"]
    cut = [d for d, size in enumerate(sizes) if size != shape[d]]
    value = replicate_dims(divider, inputs[0], maybe_partial(divider, inputs[0]), cut)
    at = [
        divider.reshard(cell, TensorSharding.replicated(len(cell.shape))).array
        for cell in inputs[1:]
    ]
    local = tuple(size if d in cut else value.array.shape[d] for d, size in enumerate(sizes))
    array = bind(eqn, [value.array, *at], slice_sizes=local)[0]
    return [result(eqn, inputs, array, value.sharding)]


def dynamic_update_slice(divider: Any, eqn: Any, inputs: list[ValueVersions]) -> list[Output]:
    """Update a slice; the dims that it cuts are replicated, the others match in both operands."""
    into, part, *places = inputs
    cut = [d for d, size in enumerate(part.shape) if size != into.shape[d]]
    target = common_sharding(
        divider, [cell for cell in (part, into) if not cell.deferred] or [part]
    )
    target = TensorSharding(tuple(() if d in cut else e for d, e in enumerate(target.dims)))
    arrays = [divider.reshard(cell, target).array for cell in (into, part)]
    at = [divider.reshard(cell, TensorSharding.replicated(0)).array for cell in places]
    return [result(eqn, inputs, bind(eqn, [*arrays, *at])[0], target)]


def pad(divider: Any, eqn: Any, inputs: list[ValueVersions]) -> list[Output]:
    """Pad dims, which are replicated first."""
    filled = [d for d, edge in enumerate(eqn.params["padding_config"]) if edge != (0, 0, 0)]
    came = divider.reduced(inputs[0])
    value = replicate_dims(divider, inputs[0], came, filled)
    # The padding value is added on every device, so a partial sum would count it several times:
    # `came` is reduced above.
    edge = divider.reshard(inputs[1], TensorSharding.replicated(0)).array
    made = result(eqn, inputs, bind(eqn, [value.array, edge])[0], value.sharding)
    return [rows_again(divider, made, came.sharding)]


def concatenate(divider: Any, eqn: Any, inputs: list[ValueVersions]) -> list[Output]:
    """Concatenate along a dim that is replicated first; the other dims match in all operands."""
    dim = eqn.params["dimension"]
    came = common_sharding(divider, [cell for cell in inputs if not cell.deferred] or inputs)
    target = came.with_dim(dim, ())
    arrays = [divider.reshard(cell, target).array for cell in inputs]
    return [rows_again(divider, result(eqn, inputs, bind(eqn, arrays)[0], target), came)]


def stack(divider: Any, eqn: Any, inputs: list[ValueVersions]) -> list[Output]:
    """Stack operands of one sharding along a new, replicated dim."""
    target = common_sharding(divider, [cell for cell in inputs if not cell.deferred] or inputs)
    arrays = [divider.reshard(cell, target).array for cell in inputs]
    axis = eqn.params["axis"]
    dims = (*target.dims[:axis], (), *target.dims[axis:])
    return [result(eqn, inputs, bind(eqn, arrays)[0], TensorSharding(dims))]


def unstack(divider: Any, eqn: Any, inputs: list[ValueVersions]) -> list[Output]:
    """Unstack along a dim that is replicated first."""
    axis = eqn.params["axis"]
    value = replicate_dims(divider, inputs[0], maybe_partial(divider, inputs[0]), [axis])
    dims = (*value.sharding.dims[:axis], *value.sharding.dims[axis + 1 :])
    sharding = TensorSharding(dims, value.sharding.partial)
    return [
        result(eqn, inputs, array, sharding, place)
        for place, array in enumerate(bind(eqn, [value.array]))
    ]


def tile(divider: Any, eqn: Any, inputs: list[ValueVersions]) -> list[Output]:
    """Tile dims; those that are repeated are replicated first."""
    repeated = [dim for dim, count in enumerate(eqn.params["reps"]) if count > 1]
    value = replicate_dims(divider, inputs[0], maybe_partial(divider, inputs[0]), repeated)
    return [result(eqn, inputs, bind(eqn, [value.array])[0], value.sharding)]


def fft(divider: Any, eqn: Any, inputs: list[ValueVersions]) -> list[Output]:
    """Transform dims, which are replicated first. The transform is linear, so partial sums stay."""
    rank = len(inputs[0].shape)
    dims = list(range(rank - len(eqn.params["fft_lengths"]), rank))
    value = replicate_dims(divider, inputs[0], maybe_partial(divider, inputs[0]), dims)
    return [result(eqn, inputs, bind(eqn, [value.array])[0], value.sharding)]


def matrices(divider: Any, eqn: Any, inputs: list[ValueVersions]) -> list[Output]:
    """Decompose or solve matrices; the two minor dims are replicated, batch dims stay split."""
    before = len(inputs[0].shape) - 2
    # The operands of a solve share their batch dims; the ranks of pivots and eigenvalues differ.
    dims = common_sharding(divider, inputs).dims[:before]

    def behind(rank: int) -> TensorSharding:
        return TensorSharding((*dims, *((),) * (rank - before)))

    arrays = [divider.reshard(cell, behind(len(cell.shape))).array for cell in inputs]
    return [
        result(eqn, inputs, array, behind(array.ndim), place)
        for place, array in enumerate(bind(eqn, arrays))
    ]


def single_dim_rule(parameter: str, *, last: bool = False) -> Rule:
    """Return the rule for operations along one dim, such as a sort: that dim is replicated.

    `parameter` is the name of the equation's parameter with the dim; `last` for the last dim.
    """

    def rule(divider: Any, eqn: Any, inputs: list[ValueVersions]) -> list[Output]:
        rank = len(inputs[0].shape)
        dim = rank - 1 if last else eqn.params[parameter] % rank
        came = common_sharding(divider, inputs)
        target = came.with_dim(dim, ())
        arrays = [divider.reshard(cell, target).array for cell in inputs]
        return [
            rows_again(divider, result(eqn, inputs, array, target, place), came)
            for place, array in enumerate(bind(eqn, arrays))
        ]

    return rule


def reduce_window(divider: Any, eqn: Any, inputs: list[ValueVersions]) -> list[Output]:
    """Pool; dims without a window stay split."""
    sizes, out = eqn.params["window_dimensions"], eqn.outvars[0].aval.shape
    # The backward pass of max pooling has a cotangent and an operand: follow the operand.
    target = common_sharding(divider, [cell for cell in inputs if cell.shape == inputs[-1].shape])
    for dim, size in enumerate(sizes):
        if size > 1 or any(cell.shape[dim] != out[dim] for cell in inputs):
            target = target.with_dim(dim, ())
    arrays = [divider.reshard(cell, target).array for cell in inputs]
    return [result(eqn, inputs, bind(eqn, arrays)[0], target)]


def barrier(divider: Any, eqn: Any, inputs: list[ValueVersions]) -> list[Output]:
    """Apply an optimization barrier; shardings stay as they are."""
    values = [cell.value for cell in inputs]
    arrays = bind(eqn, [value.array for value in values])
    return [
        result(eqn, [cell], array, value.sharding, place)
        for place, (cell, value, array) in enumerate(zip(inputs, values, arrays, strict=True))
    ]


def as_it_lies(_divider: Any, _eqn: Any, inputs: list[ValueVersions]) -> list[Output]:
    """Return the input unchanged."""
    return [inputs[0].deferred or inputs[0].value]
