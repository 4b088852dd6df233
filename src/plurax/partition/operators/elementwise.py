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

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from plurax.jaxpr.interpret import bind
from plurax.partition.operators.common import (
    can_stay_partial,
    common_sharding,
    fitting,
    result,
)
from plurax.partition.values import Output, ValueVersions
from plurax.sharding.spec import TensorSharding

_SUMS = frozenset(["add", "sub", "add_any", "complex"])
_LINEAR = frozenset(["neg", "convert_element_type", "copy", "real", "imag", "conj", "name"])


def elementwise(divider: Any, eqn: Any, inputs: list[ValueVersions]) -> list[Output]:
    """Reshard all operands to the sharding that sends the fewest bytes."""
    shape = tuple(eqn.outvars[0].aval.shape)
    if eqn.primitive.name in _LINEAR and inputs[0].is_zero:
        return [divider.zeros(shape, eqn.outvars[0].aval.dtype)]
    kept = _kept_partial(eqn, inputs)
    target = common_sharding(divider, inputs, kept)
    arrays = []
    for cell in inputs:
        # A partial sum that other equations read too is reduced, even if the others stay partial.
        still = kept if not cell.deferred and can_stay_partial(cell) else frozenset()
        arrays.append(
            divider.reshard(cell, TensorSharding(fitting(cell, target).dims, still)).array
        )
    array = bind(eqn, arrays)[0]
    assert len(target.dims) == len(shape)
    return [result(eqn, inputs, array, TensorSharding(target.dims, kept))]


def _kept_partial(eqn: Any, inputs: list[ValueVersions]) -> frozenset[str]:
    """Return the axes over which the result stays a partial sum, because the operation is linear.

    Only operands that no other equation reads count: another reader could reduce them again.
    """
    name, every = eqn.primitive.name, inputs
    sums = [
        cell.value.sharding.partial if not cell.deferred and can_stay_partial(cell) else frozenset()
        for cell in inputs
    ]
    # A selection is linear in its cases if the predicate is no partial sum.
    if name == "select_n" and not sums[0]:
        sums, inputs, name = sums[1:], inputs[1:], "add"
    if name in _SUMS:
        # Zeros can be a partial sum over any axes. All other terms must agree.
        real = [
            s for s, c in zip(sums, inputs, strict=True) if not (c.deferred and c.deferred.zero)
        ]
        common = real[0] if real and all(s == real[0] for s in real) else frozenset()
    elif name in _LINEAR or (name == "div" and not sums[1] and _rounds_only(eqn)):
        common = sums[0]
    elif name == "mul" and bool(sums[0]) != bool(sums[1]):
        common = sums[0] | sums[1]
    else:
        return frozenset()
    if name == "convert_element_type" and not _rounds_only(eqn):
        return frozenset()
    # An axis cannot both split a dim of the result and have it partial.
    others = [axis for cell in every if not cell.deferred for axis in cell.value.sharding.axes]
    return frozenset() if common & set(others) else common


def _rounds_only(eqn: Any) -> bool:
    """Whether all dtypes are inexact: the operation is linear up to rounding.

    On integers it is not: a division truncates, and a conversion may wrap around.
    """
    dtypes = [var.aval.dtype for var in (*eqn.invars, *eqn.outvars)]
    return all(jnp.issubdtype(dtype, jnp.inexact) for dtype in dtypes)


def reduction(divider: Any, eqn: Any, inputs: list[ValueVersions]) -> list[Output]:
    """Reduce over dims: sums stay partial, maxima and minima are all-reduced, others gather."""
    name, dims = eqn.primitive.name, tuple(eqn.params["axes"])
    cell = inputs[0]
    # A reduction of a flattened tensor is one over all dims of the original, on its shards.
    if cell.deferred is not None and cell.deferred.flattened is not None and dims:
        cell = cell.deferred.flattened
        dims = tuple(range(len(cell.shape)))
    value = cell.value if name == "reduce_sum" and can_stay_partial(cell) else divider.reduced(cell)
    over = tuple(axis for dim in dims for axis in value.sharding.dims[dim])
    neutral = _neutral(name, value.array.dtype)
    if cell is not inputs[0] and neutral is None:
        # An argmax, for example, is an index into the flat tensor: it needs that tensor whole.
        return reduction(
            divider, eqn, [ValueVersions(divider.reshard(inputs[0], TensorSharding.replicated(1)))]
        )
    if over and neutral is None:
        value = divider.reshard(cell, value.sharding.without(over))
        over = ()
    array = value.array
    # Padding must not enter the reduction.
    for dim in set(value.sharding.indivisible_dims(value.shape, divider.axes.sizes)) & set(dims):
        array = only_real(divider, value.sharding, value.shape, array, dim, neutral)
    array = bind(eqn, [array], axes=dims)[0]
    partial = value.sharding.partial
    if over and name == "reduce_sum":
        partial = partial | set(over)
    elif over:
        array = _joined(divider, array, over, name)
    kept = tuple(e for dim, e in enumerate(value.sharding.dims) if dim not in dims)
    return [result(eqn, [cell], array, TensorSharding(kept, partial))]


def _neutral(name: str, dtype: Any) -> Any:
    """Return the neutral element of a reduction, or None if shards cannot be reduced separately."""
    truth = jnp.issubdtype(dtype, jnp.bool_)
    if name in ("reduce_and", "reduce_or"):
        return (name == "reduce_and") if truth else None
    if name == "reduce_sum":
        return 0
    if name not in ("reduce_max", "reduce_min"):
        return None
    least = name == "reduce_max"
    if truth:
        return not least
    if jnp.issubdtype(dtype, jnp.inexact):
        return -jnp.inf if least else jnp.inf
    limits = np.iinfo(dtype)
    return limits.min if least else limits.max


def _joined(divider: Any, array: Array, over: tuple[str, ...], name: str) -> Array:
    """All-reduce the shards' maxima or minima; booleans are reduced as integers."""
    op = lax.pmax if name in ("reduce_max", "reduce_or") else lax.pmin
    if not jnp.issubdtype(array.dtype, jnp.bool_):
        return divider.all_reduced(array, over, op)
    return divider.all_reduced(array.astype(jnp.int32), over, op).astype(jnp.bool_)


def only_real(
    divider: Any,
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
    first = divider.axes.index(sharding.dims[dim]) * size
    place = first + lax.broadcasted_iota(jnp.int32, array.shape, dim)
    return jnp.where(place < shape[dim], array, jnp.asarray(neutral, array.dtype))
