"""Elementwise operations, and reductions over dims.

Elementwise operations bring all operands to one sharding. If the operation is linear, a partial sum
passes through it unreduced. A sum over a split dim gives a partial sum; a maximum or minimum over
one is all-reduced at once; other reductions replicate the dim first.

    mesh tensor=4; a and b (8, 64), both partial={tensor}; c (8, 64), (None, tensor); k a scalar
    each equation taken alone, as the only reader of its operands

    equation              result                    why
    a + b                 partial={tensor}          the sum of partial sums is a partial sum
    a * k                 partial={tensor}          linear in a
    tanh(a)               (None, None)              not linear: a is all-reduced first
    a + c                 (None, tensor)            a is reduce-scattered first
    sum(c, axis=1)        (None), partial={tensor}  each device sums its 16 columns
    max(c, axis=1)        (None)                    maxima of 16 columns, then all-reduce (max)
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from plurax.jaxpr.block_arrays import neutral as of_extreme
from plurax.jaxpr.compat import is_linear
from plurax.jaxpr.interpret import bind
from plurax.partition.operators.common import (
    can_stay_partial,
    common_sharding,
    decided,
    fitting,
    maybe_partial,
    result,
    with_replicated,
)
from plurax.partition.rule_context import RuleContext
from plurax.partition.values import Decision, DeferredValue, InnerCollective, Operand, ValueVersions
from plurax.sharding.axes import Axes
from plurax.sharding.spec import TensorSharding

_SUMS = frozenset(["add", "sub", "add_any", "complex"])


def elementwise(
    context: RuleContext, eqn: Any, inputs: list[ValueVersions]
) -> Decision | DeferredValue:
    """Reshard all operands to the sharding that sends the fewest bytes."""
    aval = eqn.outvars[0].aval
    if is_linear(eqn) and inputs[0].is_zero:
        return context.zeros(tuple(aval.shape), aval.dtype)
    deferred = inputs[0].deferred
    if deferred and is_linear(eqn) and not (deferred.repeats or deferred.flattened):
        decide = functools.partial(_of_created, eqn=eqn)
        return dataclasses.replace(deferred, dtype=aval.dtype, decide=decide, sources=(inputs[0],))
    kept = _kept_partial(context, eqn, inputs)
    target = common_sharding(context, inputs, kept)
    operands = []
    for atom, versions in zip(eqn.invars, inputs, strict=True):
        # A partial sum that other equations read too is reduced, even if the others stay partial.
        stays = not versions.deferred and can_stay_partial(context, atom, versions)
        dims = fitting(versions, target, aval.shape).dims
        operands.append(Operand(versions, (TensorSharding(dims, kept if stays else frozenset()),)))
    return decided(context, eqn, inputs, operands, TensorSharding(target.dims, kept))


def _of_created(
    context: RuleContext, sources: Sequence[ValueVersions], wanted: TensorSharding, *, eqn: Any
) -> Decision:
    """Decide on a linear operation on a value that is created as its result is wanted.

    The gradient of a table of bfloat16 is cast: scattered into the shard of its parameter first.
    """
    (versions,) = sources
    deferred = versions.deferred
    if deferred is None:
        have = context.cheapest(versions, TensorSharding(wanted.dims)).sharding
    else:
        have = deferred.decide(context, deferred.sources, wanted).outputs[0].sharding
    if not _rounds_only(eqn):
        have = TensorSharding(have.dims)
    return decided(context, eqn, sources, [Operand(versions, (have,))], have)


def _kept_partial(context: RuleContext, eqn: Any, inputs: list[ValueVersions]) -> frozenset[str]:
    """Return the axes over which the result stays a partial sum, because the operation is linear.

    Only operands that no other equation reads count: another reader could reduce them again.
    """
    name, every = eqn.primitive.name, inputs
    sums = [
        versions.value.sharding.partial
        if not versions.deferred and can_stay_partial(context, atom, versions)
        else frozenset()
        for atom, versions in zip(eqn.invars, inputs, strict=True)
    ]
    # A selection is linear in its cases if the predicate is no partial sum.
    if name == "select_n" and not sums[0]:
        sums, inputs, name = sums[1:], inputs[1:], "add"
    if name in _SUMS:
        # Zeros can be a partial sum over any axes. All other terms must agree.
        real = [
            axes
            for axes, one in zip(sums, inputs, strict=True)
            if not (one.deferred and one.deferred.zero)
        ]
        common = real[0] if real and all(axes == real[0] for axes in real) else frozenset()
    elif is_linear(eqn) or (name == "div" and not sums[1] and _rounds_only(eqn)):
        common = sums[0]
    elif name == "mul" and bool(sums[0]) != bool(sums[1]):
        common = sums[0] | sums[1]
    else:
        return frozenset()
    if name == "convert_element_type" and not _rounds_only(eqn):
        return frozenset()
    # An axis cannot both split a dim of the result and have it partial.
    others = [axis for one in every if not one.deferred for axis in one.value.sharding.axes]
    return frozenset() if common & set(others) else common


def _rounds_only(eqn: Any) -> bool:
    """Whether all dtypes are inexact: the operation is linear up to rounding.

    On integers it is not: a division truncates, and a conversion may wrap around.
    """
    dtypes = [var.aval.dtype for var in (*eqn.invars, *eqn.outvars)]
    return all(jnp.issubdtype(dtype, jnp.inexact) for dtype in dtypes)


def reduction(context: RuleContext, eqn: Any, inputs: list[ValueVersions]) -> Decision:
    """Reduce over dims: sums stay partial, maxima and minima are all-reduced, others gather."""
    name, dims = eqn.primitive.name, tuple(eqn.params["axes"])
    versions, start = inputs[0], neutral(name, inputs[0].dtype)
    # A reduction of a flattened tensor is one over all dims of the original, on its shards. But an
    # argmax, for example, is an index into the flat tensor.
    if versions.deferred and versions.deferred.flattened and dims and start is not None:
        (versions,) = versions.deferred.sources
        dims = tuple(range(len(versions.shape)))
    if name == "reduce_sum":
        have = maybe_partial(context, eqn.invars[0], versions)
    else:
        have = context.reduced(versions)
    operand = with_replicated(versions, have, dims if start is None else ())
    sharding = operand.sharding
    over = tuple(axis for dim in dims for axis in sharding.dims[dim])
    kept = tuple(entry for dim, entry in enumerate(sharding.dims) if dim not in dims)
    # A sum over a split dim is left partial; without a neutral element no such dim is left.
    terms = sharding.partial | set(over) if name == "reduce_sum" else sharding.partial
    joined = () if name == "reduce_sum" else over
    spec = result(context, eqn, [versions], TensorSharding(kept, terms))
    padded = set(sharding.indivisible_dims(versions.shape, context.axes.sizes)) & set(dims)

    def execute(array: Array) -> list[Array]:
        # Padding must not enter the reduction.
        for dim in sorted(padded):
            array = only_real(context.axes, sharding, versions.shape, array, dim, start)
        (array,) = bind(eqn, [array], axes=dims)
        return [_all_reduced(context.axes, array, joined, name)]

    # Booleans are all-reduced as integers.
    dtype = jnp.int32 if spec.dtype == jnp.bool_ else spec.dtype
    like = jax.ShapeDtypeStruct(spec.array.shape, dtype)
    groups = _groups(context.axes, joined)
    sent = tuple(InnerCollective("all-reduce", tuple(axes), like) for axes in groups)
    return Decision((operand,), (spec,), execute, sent)


def neutral(name: str, dtype: Any) -> Any:
    """Return the neutral element of a reduction, or None if shards cannot be reduced separately."""
    if name == "reduce_sum":
        return 0
    truth = jnp.issubdtype(dtype, jnp.bool_)
    if name in ("reduce_max", "reduce_min") or (name in ("reduce_and", "reduce_or") and truth):
        return of_extreme(name, dtype)
    return None


def _groups(axes: Axes, over: tuple[str, ...]) -> list[list[str]]:
    """Return the axes of each all-reduce over some axes.

    One collective cannot span parts of two mesh axes: then it is one for each axis.
    """
    if not over:
        return []
    return [list(over)] if axes.together(over) else [[axis] for axis in over]


def _all_reduced(axes: Axes, array: Array, over: tuple[str, ...], name: str) -> Array:
    """All-reduce the shards' maxima or minima; booleans are reduced as integers."""
    if not over:
        return array
    op: Callable[..., Array] = lax.pmax if name in ("reduce_max", "reduce_or") else lax.pmin
    truth = array.dtype == jnp.bool_
    total = array.astype(jnp.int32) if truth else array
    for some in _groups(axes, over):
        names, groups = axes.group(some)
        total = op(total, names, axis_index_groups=groups)
    return total.astype(jnp.bool_) if truth else total


def only_real(
    axes: Axes,
    sharding: TensorSharding,
    shape: tuple[int, ...],
    array: Array,
    dim: int,
    neutral: Any = 0,
) -> Array:
    """Replace the padding of a shard along `dim` by `neutral`.

    A dim of size 10 over 4 devices has shards of 3: the last two entries of device 3 are padding.
    """
    size = array.shape[dim]
    first = axes.index(sharding.dims[dim]) * size
    index = first + lax.broadcasted_iota(jnp.int32, array.shape, dim)
    return jnp.where(index < shape[dim], array, jnp.asarray(neutral, array.dtype))
