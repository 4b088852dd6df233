"""Rows of experts: what a device computes for the rows of its own groups stays with it.

In `y = lax.ragged_dot(x, w, sizes)` rows are sorted by group, and row `i` meets the weights of its
group. If the weights are split by group, a device has the weights of some rows only, which are one
range of all rows. It computes these and zeros for the others: `y` is a partial sum of which each
row has one term. Between two such products stand operations that work row by row and are not
linear, such as `silu(y)`. A partial sum would be reduced for them; here each device applies them to
its own rows, since no other device has a term of these.

    mesh tensor=2; 4 experts; w, v split by expert; x (6, 8), sizes [2, 1, 0, 3]

    equation                    device 0: experts 0, 1      device 1: experts 2, 3
    a = ragged_dot(x, w, sizes) rows 0 to 2 of a, 0, 0, 0   0, 0, 0, rows 3 to 5 of a
    h = exp(a)                  exp of rows 0 to 2, 0, 0, 0 0, 0, 0, exp of rows 3 to 5
    y = ragged_dot(h, v, sizes) rows 0 to 2 of y, 0, 0, 0   0, 0, 0, rows 3 to 5 of y
    z = x + tanh(y.T @ y)       all-reduce y                all-reduce y

So nothing is sent until a reader mixes rows, and that reader finds a partial sum like any other.
The groups of rows are those of MegaBlocks (Gale et al. 2022, https://arxiv.org/abs/2211.15841).
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from plurax.jaxpr.compat import ELEMENTWISE
from plurax.jaxpr.interpret import bind
from plurax.jaxpr.row_by_row import ROW_BY_ROW, row_of_result
from plurax.partition.operators.common import fitting, result
from plurax.partition.rule_context import RuleContext
from plurax.partition.values import Decision, Operand, OwnRows, ValueVersions
from plurax.sharding.axes import Axes
from plurax.sharding.spec import TensorSharding


def owner(versions: ValueVersions) -> OwnRows | None:
    """Return whose rows a value has, or None if it is no partial sum of rows."""
    return None if versions.deferred else versions.value.own_rows


def by_own_rows(context: RuleContext, eqn: Any, inputs: list[ValueVersions]) -> Decision | None:
    """Evaluate an operation that works row by row on each device's own rows.

    Returns None if it is no such operation, or no operand has rows of single devices.
    """
    name = eqn.primitive.name
    place, own = next(((i, o) for i, o in enumerate(map(owner, inputs)) if o), (0, None))
    if own is None or not (name in ELEMENTWISE or name in ROW_BY_ROW):
        return None
    to, dims = row_of_result(eqn, place, own.dim), inputs[place].value.sharding.dims
    # The parameters of other operations are those of whole dims.
    if to is None or (name not in ELEMENTWISE and any(dims)):
        return None
    operands = [Operand(own.sizes, (TensorSharding.replicated(1),))]
    for versions in inputs:
        target = _whole(versions)
        if any(dims):
            target = fitting(versions, TensorSharding(dims), inputs[place].shape)
        if owner(versions) is not None:
            have = versions.value.sharding
            if owner(versions) != own or have.dims != dims:
                return None
            target = have
        operands.append(Operand(versions, (target,)))
    entries = dims if name in ELEMENTWISE else ((),) * len(eqn.outvars[0].aval.shape)
    sharding = TensorSharding(entries, frozenset(own.axes))
    read, rows = [*inputs, own.sizes], dataclasses.replace(own, dim=to)
    outputs = [result(context, eqn, read, sharding, index) for index in range(len(eqn.outvars))]

    def execute(sizes: Array, *shards: Array) -> list[Array]:
        arrays, count = bind(eqn, shards), outputs[0].array.shape[to]
        sizes, start = own_groups(context.axes, own.axes, entries[to], count, sizes)
        end = start + sizes.sum(dtype=sizes.dtype)
        # Rows behind all groups are zeros in a product, and the last device's from there on.
        last = context.axes.index(own.axes) == context.axes.size(own.axes) - 1
        end = jnp.where(last, jnp.asarray(count, end.dtype), end)
        return [only_own(array, to, start, end) for array in arrays]

    owned = tuple(dataclasses.replace(output, rows=rows) for output in outputs)
    return Decision(tuple(operands), owned, execute)


def _whole(versions: ValueVersions) -> TensorSharding:
    return TensorSharding.replicated(len(versions.shape))


def own_groups(
    axes: Axes,
    over: Sequence[str],
    rows_over: Sequence[str],
    rows: int,
    sizes: Int[Array, "groups"],
) -> tuple[Int[Array, "own_groups"], Int[Array, ""]]:
    """Return the sizes of this device's groups among its rows, and where the first one begins.

    **Arguments:** `over`, the axes that split the groups; `rows_over`, those that split the rows,
    of which a device has `rows`; `sizes` of all groups.
    """
    if rows_over:
        first = jnp.asarray(axes.index(rows_over) * rows, sizes.dtype)
        ends = jnp.cumsum(sizes)
        starts = ends - sizes
        sizes = jnp.clip(ends, first, first + rows) - jnp.clip(starts, first, first + rows)
    count = sizes.shape[0] // axes.size(over)
    first = jnp.asarray(axes.index(over) * count, jnp.int32)
    before = jnp.arange(sizes.shape[0], dtype=jnp.int32) < first
    start = jnp.where(before, sizes, jnp.zeros((), sizes.dtype)).sum(dtype=sizes.dtype)
    return lax.dynamic_slice_in_dim(sizes, first, count), start


def only_own(array: Array, dim: int, start: Array, end: Array) -> Array:
    """Return an array with zeros in place of rows that are not in a range of this device."""
    index = lax.broadcasted_iota(start.dtype, array.shape, dim)
    return jnp.where((index >= start) & (index < end), array, jnp.zeros((), array.dtype))


def turned(array: Array, dim: int, start: Array) -> Array:
    """Return an array whose rows begin with row `start`, followed by those before it."""
    twice = jnp.concatenate([array, array], dim)
    return lax.dynamic_slice_in_dim(twice, start, array.shape[dim], dim)
