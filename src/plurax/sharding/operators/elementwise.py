"""Operations on one number of each operand, and sums, maxima and the like over dims."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from plurax.sharding.operators.common import agreed, bind, fitting, result, stays
from plurax.sharding.sharding import Sharding
from plurax.sharding.values import Cell, Output, Value

_SUMS = frozenset(["add", "sub", "add_any"])
_LINEAR = frozenset(["neg", "convert_element_type", "copy", "copy_p", "real", "imag", "name"])


def elementwise(divider: Any, eqn: Any, inputs: list[Cell]) -> list[Output]:
    """All operands in one sharding: the one to which the fewest bytes move."""
    shape = tuple(eqn.outvars[0].aval.shape)
    if eqn.primitive.name in _LINEAR and inputs[0].made_zero:
        return [divider.zeros(shape, eqn.outvars[0].aval.dtype)]
    kept = _kept_partial(eqn, inputs)
    target = agreed(divider, inputs, kept)
    arrays = []
    for cell in inputs:
        still = kept if not cell.unmade and cell.value.sharding.partial else frozenset()
        arrays.append(divider.to(cell, Sharding(fitting(cell, target).dims, still)).array)
    array = bind(eqn, arrays)[0]
    assert len(target.dims) == len(shape)
    return [result(eqn, inputs, array, Sharding(target.dims, kept))]


def _kept_partial(eqn: Any, inputs: list[Cell]) -> frozenset[str]:
    """The axes over which a result may stay a sum: where the operation is linear in it.

    Only of values that nothing else reads: another reader might have them added up a second time.
    """
    name, every = eqn.primitive.name, inputs
    sums = [
        cell.value.sharding.partial if not cell.unmade and stays(cell) else frozenset()
        for cell in inputs
    ]
    if name == "select_n" and not sums[0]:
        sums, inputs, name = sums[1:], inputs[1:], "add"
    if name in _SUMS:
        real = [s for s, c in zip(sums, inputs, strict=True) if not (c.unmade and c.unmade.zero)]
        common = real[0] if real and all(s == real[0] for s in real) else frozenset()
    elif name in _LINEAR or (name == "div" and not sums[1]):
        common = sums[0]
    elif name == "mul" and bool(sums[0]) != bool(sums[1]):
        common = sums[0] | sums[1]
    else:
        return frozenset()
    if name == "convert_element_type" and not jnp.issubdtype(eqn.params["new_dtype"], jnp.inexact):
        return frozenset()
    others = [axis for cell in every if not cell.unmade for axis in cell.value.sharding.axes]
    return frozenset() if common & set(others) else common


def reduction(divider: Any, eqn: Any, inputs: list[Cell]) -> list[Output]:
    """Sums stay terms; maxima and minima are joined at once; others take the dim whole."""
    name, dims = eqn.primitive.name, tuple(eqn.params["axes"])
    cell = inputs[0]
    value = cell.value if name == "reduce_sum" and stays(cell) else divider.settled(cell)
    over = tuple(axis for dim in dims for axis in value.sharding.dims[dim])
    joined = name in ("reduce_sum", "reduce_max", "reduce_min")
    uneven = set(value.sharding.uneven(value.shape, divider.axes.sizes)) & set(dims)
    if over and (not joined or (uneven and name != "reduce_sum")):
        value = divider.to(cell, value.sharding.without(over))
        over, uneven = (), set()
    array = value.array
    for dim in uneven:
        array = _only_real(divider, value, array, dim)
    array = bind(eqn, [array])[0]
    partial = value.sharding.partial
    if over and name == "reduce_sum":
        partial = partial | set(over)
    elif over:
        array = divider.all_reduced(array, over, lax.pmax if name == "reduce_max" else lax.pmin)
    kept = tuple(e for dim, e in enumerate(value.sharding.dims) if dim not in dims)
    return [result(eqn, inputs, array, Sharding(kept, partial))]


def _only_real(divider: Any, value: Value, array: Array, dim: int) -> Array:
    """Zero where an uneven shard is filled up."""
    size = array.shape[dim]
    first = divider.axes.index(value.sharding.dims[dim]) * size
    place = first + lax.broadcasted_iota(jnp.int32, array.shape, dim)
    return jnp.where(place < value.shape[dim], array, jnp.zeros((), array.dtype))
