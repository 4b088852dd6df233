"""Matrix products and convolutions.

A product may be split over any of its indices. Over a free or a batch index each device computes a
block of the result and nothing is sent; over a contracted index each device has a partial sum that
is reduced later. The rule reshards the operands so that equal indices have equal axes, trying all
combinations of the operands' shardings, and takes the cheapest.

    mesh tensor=4; float32; x (64, 128) is replicated, w is (128, 256)

    sharding of w        x is resharded to     on one device               result
    (None, tensor)       (None, None)          (64, 128) @ (128, 64)       (None, tensor)
    (tensor, None)       (None, tensor)        (64, 32) @ (32, 256)        partial={tensor}
    (None, None)         (None, None)          (64, 128) @ (128, 256)      (None, None)

The bytes to reshard parameters are compared first, because the plan has chosen their shardings;
then all bytes, in which a partial sum counts with twice the bytes of its all-reduce.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from plurax.jaxpr.interpret import bind
from plurax.partition.operators.common import common_sharding, result
from plurax.partition.operators.elementwise import only_real
from plurax.partition.values import Output, ShardedValue, ValueVersions
from plurax.sharding.spec import TensorSharding


def dot_general(divider: Any, eqn: Any, inputs: list[ValueVersions]) -> list[Output]:
    """Compute a product of shards; over a split contracted index the result is a partial sum."""
    if not eqn.outvars[0].aval.shape and (product := inner_product(divider, eqn, inputs)):
        return [product]
    (left_sum, right_sum), (left_batch, right_batch) = eqn.params["dimension_numbers"]
    left_rank, right_rank = (len(cell.shape) for cell in inputs)
    # Name each dim by its index in the product; equal names must be split alike.
    labels: list[dict[int, Any]] = [{}, {}]
    for kind, lefts, rights in (("sum", left_sum, right_sum), ("batch", left_batch, right_batch)):
        for i, (a, b) in enumerate(zip(lefts, rights, strict=True)):
            labels[0][a] = labels[1][b] = (kind, i)
    labels[0] |= {d: ("left", d) for d in range(left_rank) if d not in labels[0]}
    labels[1] |= {d: ("right", d) for d in range(right_rank) if d not in labels[1]}
    left, right, split = match_operands(divider, inputs, labels, eqn.outvars[0].aval)
    array = bind(eqn, [left.array, right.array])[0]
    # The result's dims: batch, then the free dims of the left and of the right operand.
    out_labels = [("batch", i) for i in range(len(left_batch))]
    out_labels += [label for _, label in sorted(labels[0].items()) if label[0] == "left"]
    out_labels += [label for _, label in sorted(labels[1].items()) if label[0] == "right"]
    dims = tuple(split.get(label, ()) for label in out_labels)
    summed = [a for label, axes in split.items() if label[0] == "sum" for a in axes]
    return [result(eqn, inputs, array, TensorSharding(dims, frozenset(summed)))]


def inner_product(divider: Any, eqn: Any, inputs: list[ValueVersions]) -> ShardedValue | None:
    """Return the inner product of two flattened tensors from their shards, or None if not needed.

    It is needed if an operand was flattened from shards that are not contiguous in it, or has a dim
    with padding. The product is then that of the original tensors, with the padding set to zero.
    """
    if any(cell.data_varying for cell in inputs):
        return None
    sources = [cell.deferred.flattened if cell.deferred else None for cell in inputs]
    shape = next((source.shape for source in sources if source), inputs[0].shape)
    cells = [
        source or _unflattened(cell, shape) for source, cell in zip(sources, inputs, strict=True)
    ]
    left, right = cells
    if left is None or right is None or left.shape != right.shape:
        return None
    target = common_sharding(divider, [left, right])
    uneven = target.indivisible_dims(shape, divider.axes.sizes)
    if not uneven and not any(sources):
        return None
    dtype = eqn.outvars[0].aval.dtype
    arrays = [divider.reshard(cell, target).array.astype(dtype) for cell in (left, right)]
    array = arrays[0] * arrays[1]
    for dim in uneven:
        array = only_real(divider, target, shape, array, dim)
    return result(eqn, [left, right], jnp.sum(array), TensorSharding((), frozenset(target.axes)))


def _unflattened(cell: ValueVersions, shape: tuple[int, ...]) -> ValueVersions | None:
    """Return a 1-d tensor in the shape before flattening, or None if that would send anything."""
    if cell.shape == shape:
        return cell
    for value in [] if cell.deferred else cell.values:
        if not value.sharding.axes and not value.sharding.partial:
            array = value.array.reshape(shape)
            sharding = TensorSharding.replicated(len(shape))
            return ValueVersions(
                ShardedValue(array, shape, sharding, value.data_varying, value.is_param)
            )
    return None


def match_operands(
    divider: Any, inputs: list[ValueVersions], labels: Sequence[dict[int, Any]], out: Any
) -> tuple[ShardedValue, ShardedValue, dict[Any, tuple[str, ...]]]:
    """Reshard both operands so that dims with equal labels have equal axes.

    **Arguments:** `labels`, for each operand the label of each dim: equal labels are one index,
    None is a dim that must be replicated; `out`, the result's shape and dtype.

    **Returns:** both operands, and the axes that split each label.
    """
    # Take all axes of one operand, and of the other those that are still free.
    proposals = []
    for first, second in ((0, 1), (1, 0)):
        for value in _choices(divider, inputs[first]):
            split = {
                labels[first][dim]: entry
                for dim, entry in enumerate(value.dims)
                if entry and labels[first][dim] is not None
            }
            used = {axis for entry in split.values() for axis in entry}
            for other in _choices(divider, inputs[second]):
                both = dict(split)
                for dim, entry in enumerate(other.dims):
                    free = tuple(a for a in entry if a not in used)
                    if free and labels[second][dim] is not None and labels[second][dim] not in both:
                        both[labels[second][dim]] = free
                proposals.append(both)
    best = min(proposals, key=lambda split: _matching_cost(divider, inputs, labels, split, out))
    left, right = (
        divider.reshard(cell, _as_labelled(cell, label, best))
        for cell, label in zip(inputs, labels, strict=True)
    )
    return left, right, best


def _choices(divider: Any, cell: ValueVersions) -> list[TensorSharding]:
    """Return the shardings an operand has, with partial sums reduced."""
    if cell.deferred:
        return [TensorSharding.replicated(len(cell.shape))]
    return [TensorSharding(value.sharding.dims) for value in cell.values]


def _as_labelled(
    cell: ValueVersions, labels: dict[int, Any], split: dict[Any, Any]
) -> TensorSharding:
    """Return an operand's sharding from the axes of its labels."""
    rank = len(cell.shape)
    return TensorSharding(tuple(split.get(labels[dim], ()) for dim in range(rank)))


def _matching_cost(
    divider: Any,
    inputs: list[ValueVersions],
    labels: Any,
    split: dict[Any, tuple[str, ...]],
    out: Any,
) -> tuple[float, float, float]:
    """Return a sort key: bytes to reshard parameters, all bytes with the reduction, -shards."""
    moved, is_param = 0.0, 0.0
    for cell, label in zip(inputs, labels, strict=True):
        target = _as_labelled(cell, label, split)
        # Shards with padding are not allowed: the padding would enter the contraction.
        if target.indivisible_dims(cell.shape, divider.axes.sizes):
            return math.inf, math.inf, 0.0
        # The resharded version is kept: several readers share its cost.
        cost = divider.cost(cell, target) / max(1, cell.uses)
        moved += cost
        if not cell.deferred and cell.value.is_param:
            is_param += cost
    ways = divider.axes.size([axis for entry in split.values() for axis in entry])
    terms = divider.axes.size([a for label, e in split.items() if label[0] == "sum" for a in e])
    size = math.prod(out.shape) * out.dtype.itemsize / (ways / terms)
    # Twice what the all-reduce sends: until then each device holds a term of the result's size.
    return is_param, moved + 4 * size * (terms - 1) / terms, -ways


def convolution(divider: Any, eqn: Any, inputs: list[ValueVersions]) -> list[Output]:
    """Convolve with batch and channels split; spatial dims and grouped dims are replicated."""
    numbers = eqn.params["dimension_numbers"]
    by_feature = eqn.params["feature_group_count"] > 1
    by_batch = eqn.params["batch_group_count"] > 1
    lhs, rhs, out = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    # Spatial dims are None: neighbors in an image would have to be exchanged between devices.
    labels: list[dict[int, Any]] = [dict.fromkeys(lhs), dict.fromkeys(rhs)]
    if not by_batch:
        labels[0][lhs[0]] = ("batch", 0)
    if not by_feature:
        labels[0][lhs[1]] = labels[1][rhs[1]] = ("sum", 0)
    if not by_batch and not by_feature:
        labels[1][rhs[0]] = ("right", 0)
    left, right, split = match_operands(divider, inputs, labels, eqn.outvars[0].aval)
    array = bind(eqn, [left.array, right.array])[0]
    dims: list[tuple[str, ...]] = [()] * len(out)
    dims[out[0]], dims[out[1]] = split.get(("batch", 0), ()), split.get(("right", 0), ())
    summed = frozenset(split.get(("sum", 0), ()))
    return [result(eqn, inputs, array, TensorSharding(tuple(dims), summed))]
