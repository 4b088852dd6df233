"""Matrix products.

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

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from plurax.jaxpr.cpu_forms import multiply
from plurax.jaxpr.interpret import bind
from plurax.partition.operators.common import (
    can_stay_partial,
    common_sharding,
    decided,
    reshaped_whole,
    result,
)
from plurax.partition.operators.elementwise import only_real
from plurax.partition.rule_context import RuleContext
from plurax.partition.values import Decision, Operand, ValueVersions
from plurax.sharding.spec import TensorSharding

SUMMED = ("sum", "window")
"""The kinds of labels over which a product sums; of a convolution also its window."""


def dot_general(context: RuleContext, eqn: Any, inputs: list[ValueVersions]) -> Decision:
    """Compute a product of shards; over a split contracted index the result is a partial sum."""
    if not eqn.outvars[0].aval.shape and (product := _inner_product(context, eqn, inputs)):
        return product
    (left_sum, right_sum), (left_batch, right_batch) = eqn.params["dimension_numbers"]
    left_rank, right_rank = (len(versions.shape) for versions in inputs)
    # Name each dim by its index in the product; equal names must be split alike.
    labels: list[dict[int, Any]] = [{}, {}]
    for kind, lefts, rights in (("sum", left_sum, right_sum), ("batch", left_batch, right_batch)):
        for i, (a, b) in enumerate(zip(lefts, rights, strict=True)):
            labels[0][a] = labels[1][b] = (kind, i)
    labels[0] |= {d: ("left", d) for d in range(left_rank) if d not in labels[0]}
    labels[1] |= {d: ("right", d) for d in range(right_rank) if d not in labels[1]}
    operands, split = match_operands(
        context, eqn, inputs, labels, filled=("sum", "batch", "left", "right")
    )
    operands, terms = _left_partial(context, eqn, inputs, operands)
    # The result's dims: batch, then the free dims of the left and of the right operand.
    out_labels = [("batch", i) for i in range(len(left_batch))]
    out_labels += [label for _, label in sorted(labels[0].items()) if label[0] == "left"]
    out_labels += [label for _, label in sorted(labels[1].items()) if label[0] == "right"]
    dims = tuple(split.get(label, ()) for label in out_labels)
    summed = frozenset(a for label, axes in split.items() if label[0] == "sum" for a in axes)
    decision = decided(context, eqn, inputs, operands, TensorSharding(dims, summed | terms))
    return _of_real(context, eqn, decision, (left_sum, right_sum))


def _of_real(
    context: RuleContext, eqn: Any, decision: Decision, sums: Sequence[Sequence[int]]
) -> Decision:
    """Return a product without what fills up the last shards of a dim that it sums over."""
    sizes = context.axes.sizes
    filled = [
        [d for d in one.sharding.indivisible_dims(one.versions.shape, sizes) if d in dims]
        for one, dims in zip(decision.operands, sums, strict=True)
    ]
    apply = multiply if context.axes.on_cpu else bind
    if not any(filled):
        return dataclasses.replace(decision, execute=lambda *shards: apply(eqn, shards))

    def execute(*shards: Array) -> list[Array]:
        # Of both: what is filled up may be anything, and zero times that is no zero.
        real = list(shards)
        for place, (one, dims) in enumerate(zip(decision.operands, filled, strict=True)):
            for d in dims:
                shape = one.versions.shape
                real[place] = only_real(context.axes, one.sharding, shape, real[place], d)
        return apply(eqn, real)

    return dataclasses.replace(decision, execute=execute)


def _left_partial(
    context: RuleContext, eqn: Any, inputs: list[ValueVersions], operands: list[Operand]
) -> tuple[list[Operand], frozenset[str]]:
    """Leave an operand a partial sum where the product is smaller and no device needs all of it.

    Returns the operands, and the axes over which one is partial.
    """
    used = {axis for operand in operands for axis in operand.sharding.axes}
    size = math.prod(eqn.outvars[0].aval.shape)
    for place, (atom, versions) in enumerate(zip(eqn.invars, inputs, strict=True)):
        if versions.deferred or not can_stay_partial(context, atom, versions):
            continue
        have = versions.value.sharding
        same = have.dims == operands[place].sharding.dims and not have.partial & used
        if have.partial and same and size < math.prod(versions.shape):
            operands = [*operands]
            operands[place] = Operand(versions, (have,))
            return operands, have.partial
    return operands, frozenset()


def _inner_product(context: RuleContext, eqn: Any, inputs: list[ValueVersions]) -> Decision | None:
    """Return the inner product of two flattened tensors from their shards, or None if not needed.

    It is needed if an operand was flattened from shards that are not contiguous in it, or has a dim
    with padding. The product is then that of the original tensors, with the padding set to zero.
    """
    if any(versions.data_varying for versions in inputs):
        return None
    sources = [
        one.deferred.sources[0] if one.deferred and one.deferred.flattened else None
        for one in inputs
    ]
    shape = next((source.shape for source in sources if source), inputs[0].shape)
    left, right = (
        source or _unflattened(versions, shape)
        for source, versions in zip(sources, inputs, strict=True)
    )
    if left is None or right is None or left.shape != right.shape:
        return None
    target = common_sharding(context, [left, right])
    padded = target.indivisible_dims(shape, context.axes.sizes)
    if not padded and not any(sources):
        return None
    dtype = eqn.outvars[0].aval.dtype

    def execute(*shards: Array) -> list[Array]:
        x, y = (shard.astype(dtype) for shard in shards)
        product = x * y
        for dim in padded:
            product = only_real(context.axes, target, shape, product, dim)
        return [jnp.sum(product)]

    both = [left, right]
    spec = result(context, eqn, both, TensorSharding((), frozenset(target.axes)))
    return Decision(tuple(Operand(one, (target,)) for one in both), (spec,), execute)


def _unflattened(versions: ValueVersions, shape: tuple[int, ...]) -> ValueVersions | None:
    """Return a 1-d tensor in the shape before flattening, or None if that would send anything."""
    if versions.shape == shape:
        return versions
    for value in versions.values:
        if not value.sharding.axes and not value.sharding.partial:
            whole = ValueVersions(value)
            return ValueVersions(reshaped_whole(whole, shape, lambda array: array.reshape(shape)))
    return None


def match_operands(
    context: RuleContext,
    eqn: Any,
    inputs: list[ValueVersions],
    labels: Sequence[dict[int, Any]],
    *,
    filled: Sequence[str] = (),
) -> tuple[list[Operand], dict[Any, tuple[str, ...]]]:
    """Decide on shardings of both operands in which dims with equal labels have equal axes.

    **Arguments:** `labels`, for each operand the label of each dim: equal labels are one index,
    None is a dim that must be replicated; `filled`, the kinds of labels of which devices need not
    divide the dims of activations.

    **Returns:** both operands, and the axes that split each label.
    """
    # Take all axes of one operand, and of the other those that are still free.
    proposals = []
    for first, second in ((0, 1), (1, 0)):
        for value in choices(inputs[first]):
            split = {
                labels[first][dim]: entry
                for dim, entry in enumerate(value.dims)
                if entry and labels[first][dim] is not None
            }
            used = {axis for entry in split.values() for axis in entry}
            for other in choices(inputs[second]):
                both = dict(split)
                for dim, entry in enumerate(other.dims):
                    free = tuple(a for a in entry if a not in used)
                    if free and labels[second][dim] is not None and labels[second][dim] not in both:
                        both[labels[second][dim]] = free
                if both not in proposals:
                    proposals.append(both)
    cost = functools.partial(_matching_cost, context, eqn, inputs, labels, filled)
    best = min(proposals, key=cost) if len(proposals) > 1 else proposals[0]
    operands = [
        Operand(versions, (_as_labelled(versions, label, best),))
        for versions, label in zip(inputs, labels, strict=True)
    ]
    return operands, best


def choices(versions: ValueVersions) -> list[TensorSharding]:
    """Return the shardings an operand has, with partial sums reduced."""
    if versions.deferred:
        whole = TensorSharding.replicated(len(versions.shape))
        return [versions.deferred.default_sharding, whole]
    return [TensorSharding(value.sharding.dims) for value in versions.values]


def _as_labelled(
    versions: ValueVersions, labels: dict[int, Any], split: dict[Any, Any]
) -> TensorSharding:
    """Return an operand's sharding from the axes of its labels."""
    rank = len(versions.shape)
    return TensorSharding(tuple(split.get(labels[dim], ()) for dim in range(rank)))


def _matching_cost(
    context: RuleContext,
    eqn: Any,
    inputs: list[ValueVersions],
    labels: Any,
    filled: Sequence[str],
    split: dict[Any, tuple[str, ...]],
) -> tuple[float, float, float]:
    """Return a sort key: bytes to reshard parameters, all bytes with the reduction, -shards.

    Where operands are taken as given, it starts with the number of those that are not.
    """
    moved, of_params = 0.0, 0.0
    for atom, versions, label in zip(eqn.invars, inputs, labels, strict=True):
        target = _as_labelled(versions, label, split)
        if context.as_given:
            of_params += context.first(versions).sharding != target
        # But where what fills up the last shard is known not to.
        indivisible = target.indivisible_dims(versions.shape, context.axes.sizes)
        if any(versions.is_param or label[dim][0] not in filled for dim in indivisible):
            return math.inf, math.inf, 0.0
        # The resharded version is kept: several readers share its cost.
        cost = context.cost(versions, target) / context.num_readers(atom)
        moved += cost
        if not versions.deferred and versions.is_param:
            of_params += cost
    num_shards = context.axes.size([axis for entry in split.values() for axis in entry])
    terms = context.axes.size([a for label, e in split.items() if label[0] in SUMMED for a in e])
    out = eqn.outvars[0].aval
    size = math.prod(out.shape) * out.dtype.itemsize / (num_shards / terms)
    # Twice what the all-reduce sends: until then each device holds a term of the result's size.
    return of_params, moved + 4 * size * (terms - 1) / terms, -num_shards
