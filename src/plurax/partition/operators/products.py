"""Matrix products and convolutions."""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from plurax.partition.operators.common import bind, common_sharding, result
from plurax.partition.operators.elementwise import only_real
from plurax.partition.values import Output, ShardedValue, ValueVersions
from plurax.sharding.spec import TensorSharding


def dot_general(divider: Any, eqn: Any, inputs: list[ValueVersions]) -> list[Output]:
    """Split over a free or batch dim: no bytes. Over the summed dim: terms of a sum."""
    if not eqn.outvars[0].aval.shape and (product := inner_product(divider, eqn, inputs)):
        return [product]
    (left_sum, right_sum), (left_batch, right_batch) = eqn.params["dimension_numbers"]
    left_rank, right_rank = (len(cell.shape) for cell in inputs)
    labels: list[dict[int, Any]] = [{}, {}]
    for kind, lefts, rights in (("sum", left_sum, right_sum), ("batch", left_batch, right_batch)):
        for i, (a, b) in enumerate(zip(lefts, rights, strict=True)):
            labels[0][a] = labels[1][b] = (kind, i)
    labels[0] |= {d: ("left", d) for d in range(left_rank) if d not in labels[0]}
    labels[1] |= {d: ("right", d) for d in range(right_rank) if d not in labels[1]}
    left, right, split = match_operands(divider, inputs, labels, eqn.outvars[0].aval)
    array = bind(eqn, [left.array, right.array])[0]
    out_labels = [("batch", i) for i in range(len(left_batch))]
    out_labels += [label for _, label in sorted(labels[0].items()) if label[0] == "left"]
    out_labels += [label for _, label in sorted(labels[1].items()) if label[0] == "right"]
    dims = tuple(split.get(label, ()) for label in out_labels)
    summed = [a for label, axes in split.items() if label[0] == "sum" for a in axes]
    return [result(eqn, inputs, array, TensorSharding(dims, frozenset(summed)))]


def inner_product(divider: Any, eqn: Any, inputs: list[ValueVersions]) -> ShardedValue | None:
    """Of two tensors in one dim, on shards that are no runs of it or are filled up; else None."""
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
    """A tensor of one dim as it was before it was flattened; None where that would move it."""
    if cell.shape == shape:
        return cell
    for value in [] if cell.deferred else cell.values:
        if not value.sharding.axes and not value.sharding.partial:
            array = value.array.reshape(shape)
            lies = TensorSharding.whole(len(shape))
            return ValueVersions(
                ShardedValue(array, shape, lies, value.data_varying, value.is_param)
            )
    return None


def match_operands(
    divider: Any, inputs: list[ValueVersions], labels: Sequence[dict[int, Any]], out: Any
) -> tuple[ShardedValue, ShardedValue, dict[Any, tuple[str, ...]]]:
    """Both operands brought to shardings that fit each other.

    `labels`: for each operand, for each dim, what it is; equal labels are one index; None is a dim
    that must be whole. `out`, the shape and dtype of the result. Returns the operands and the axes
    that split each label.
    """
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
    """Where an operand may lie without being made whole."""
    if cell.deferred:
        return [TensorSharding.whole(len(cell.shape))]
    return [TensorSharding(value.sharding.dims) for value in cell.values]


def _as_labelled(
    cell: ValueVersions, labels: dict[int, Any], split: dict[Any, Any]
) -> TensorSharding:
    rank = len(cell.shape)
    return TensorSharding(tuple(split.get(labels[dim], ()) for dim in range(rank)))


def _matching_cost(
    divider: Any,
    inputs: list[ValueVersions],
    labels: Any,
    split: dict[Any, tuple[str, ...]],
    out: Any,
) -> tuple[float, float, float]:
    """Bytes by which parameters move; all bytes, adding up the result included; -shards."""
    moved, is_param = 0.0, 0.0
    for cell, label in zip(inputs, labels, strict=True):
        target = _as_labelled(cell, label, split)
        if target.indivisible_dims(cell.shape, divider.axes.sizes):
            return math.inf, math.inf, 0.0
        # What several equations read is moved once for all of them.
        cost = divider.cost(cell, target) / max(1, cell.uses)
        moved += cost
        if not cell.deferred and cell.value.is_param:
            is_param += cost
    ways = divider.axes.size([axis for entry in split.values() for axis in entry])
    terms = divider.axes.size([a for label, e in split.items() if label[0] == "sum" for a in e])
    size = math.prod(out.shape) * out.dtype.itemsize / (ways / terms)
    # Twice what adding up sends: until then every device has a term of the whole result.
    return is_param, moved + 4 * size * (terms - 1) / terms, -ways


def convolution(divider: Any, eqn: Any, inputs: list[ValueVersions]) -> list[Output]:
    """Split over batch and channels; the places of the image stay whole, and what is grouped."""
    numbers = eqn.params["dimension_numbers"]
    by_feature = eqn.params["feature_group_count"] > 1
    by_batch = eqn.params["batch_group_count"] > 1
    lhs, rhs, out = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
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
