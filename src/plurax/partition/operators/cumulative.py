"""Cumulative sums, products, maxima and the like along a dim that is split.

Each device computes its own part, and gathers the last value of each device: what came before its
part is a combination of those of the devices before it.

    mesh context=4; x (8,) is (context); cumsum

    device                        0         1         2         3
    x                             1 2       3 4       5 6       7 8
    of its own part               1 3       3 7       5 11      7 15
    gathered                      3 7 11 15 on each device
    before its part               0         3         10        21
    cumsum(x)                     1 3       6 10      15 21     28 36

So `n` values without the dim are sent, not the whole tensor. In reverse, first and last, before and
behind change places. This is the first of the algorithms of Blelloch 1990, "Prefix Sums and Their
Applications", with a gather in place of a tree.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from plurax.jaxpr.interpret import bind
from plurax.partition.operators.common import local_shape, maybe_partial, result, with_rows_split
from plurax.partition.operators.elementwise import neutral, only_real
from plurax.partition.rule_context import RuleContext
from plurax.partition.values import Decision, InnerCollective, Operand, ValueVersions
from plurax.sharding.reshard import moved

_Join = Callable[[Array, Array], Array]
_REDUCED: dict[str, tuple[Callable[..., Array], _Join]] = {
    "cumsum": (jnp.sum, lax.add),
    "cumprod": (jnp.prod, lax.mul),
    "cummax": (jnp.max, lax.max),
    "cummin": (jnp.min, lax.min),
    "cumlogsumexp": (jax.nn.logsumexp, jnp.logaddexp),
}
"""The reduction of which an operation returns all stages, and how two of its results join."""


def _start(name: str, dtype: Any) -> Any:
    """Return what an operation begins with."""
    if name in ("cumsum", "cumprod"):
        return 0 if name == "cumsum" else 1
    return neutral("reduce_min" if name == "cummin" else "reduce_max", dtype)


def cumulative(context: RuleContext, eqn: Any, inputs: list[ValueVersions]) -> Decision:
    """Compute each device's part, and join it with what came before it on other devices."""
    (versions,), name, axes = inputs, eqn.primitive.name, context.axes
    dim, reverse = eqn.params["axis"], eqn.params["reverse"]
    if name == "cumsum":
        have = maybe_partial(context, eqn.invars[0], versions)
    else:
        have = context.reduced(versions)
    over = have.dims[dim]
    # One collective cannot span parts of two mesh axes.
    sharding = have if axes.together(over) else have.with_dim(dim, ())
    over = sharding.dims[dim]
    operand = Operand(versions, tuple(dict.fromkeys((have, sharding))))
    spec = result(context, eqn, inputs, sharding)
    reduce, join = _REDUCED[name]
    start = _start(name, versions.dtype)
    padded = dim in sharding.indivisible_dims(versions.shape, axes.sizes)

    def execute(array: Array) -> list[Array]:
        if reverse and padded:  # what fills up the last shards would come first
            array = only_real(axes, sharding, versions.shape, array, dim, start)
        (own,) = bind(eqn, [array])
        if not over:
            return [own]
        names, groups = axes.group(over)
        last = 0 if reverse else own.shape[dim] - 1
        edge = lax.slice_in_dim(own, last, last + 1, axis=dim)
        edges = moved(
            lambda x: lax.all_gather(x, names, axis=dim, tiled=True, axis_index_groups=groups),
            edge, axes,
        )  # fmt: skip
        device = lax.broadcasted_iota(jnp.int32, edges.shape, dim)
        here = jnp.asarray(axes.index(over), jnp.int32)
        before = device > here if reverse else device < here
        others = jnp.where(before, edges, jnp.asarray(start, edges.dtype))
        total = reduce(others, axis=dim, keepdims=True).astype(own.dtype)
        return [join(own, jnp.broadcast_to(total, own.shape))]

    shape = list(local_shape(context, operand))
    shape[dim] = 1
    edge = jax.ShapeDtypeStruct(tuple(shape), versions.dtype)
    sent = (InnerCollective("all-gather", over, edge),) if over else ()
    decision = Decision((operand,), (spec,), execute, sent)
    return decision if over else with_rows_split(context, decision, have)
