"""Keeping a compiler from doing something earlier than it is written, or only once for two.

ZeRO-3 gathers a parameter twice and rematerialization computes values twice, so that neither is
kept in between. To a compiler both are equal operations on equal operands, which it joins into one:

    w = all_gather(shard)        # forward
    ...
    w = all_gather(shard)        # backward: joined with the first, and `w` is kept

`order_after` gives the second a data dependency on what must come first. It is one primitive, so
that it costs one equation to trace, and is written out where it is lowered.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jaxtyping import Array


def order_after(
    arrays: Sequence[Array], by: Array, free_on_cpu: Sequence[bool] | None = None
) -> list[Array]:
    """Return the arrays with a data dependency on `by`, so that XLA cannot schedule their users
    earlier, nor join these with equal operations elsewhere.

    On accelerators an optimization barrier. XLA's CPU compiler drops barriers before it joins equal
    operations; there each array passes `where(true, array, 0)`, with a `true` computed from `by`
    that XLA cannot fold. A selection costs XLA time to compile and the program a pass over the
    array, so those said to be `free_on_cpu` (parameters, which are kept anyway) go without. Arrays
    in the host's memory are returned as they are.
    """
    free = free_on_cpu or [False] * len(arrays)
    here = [place for place, array in enumerate(arrays) if not _on_host(array)]
    if not here:
        return list(arrays)
    chosen = (arrays[place] for place in here)
    tied = order_after_p.bind(*chosen, by, free_on_cpu=tuple(free[place] for place in here))
    held = dict(zip(here, tied, strict=True))
    return [held.get(place, array) for place, array in enumerate(arrays)]


def pick_dependency(arrays: Sequence[Array]) -> Array:
    """The first of some arrays that holds floating numbers, else the first."""
    floating = (a for a in arrays if a.size and jnp.issubdtype(a.dtype, jnp.floating))
    return next(floating, arrays[0])


def order_after_cotangent(arrays: Sequence[Array], free_on_cpu: Sequence[bool]) -> list[Array]:
    """The inputs of a recomputed function, ordered after the last: cotangents come last."""
    by = pick_dependency(arrays[::-1])
    last = max(place for place, array in enumerate(arrays) if array is by)
    others = [place for place in range(len(arrays)) if place != last]
    tied = order_after([arrays[p] for p in others], by, [free_on_cpu[p] for p in others])
    tied.insert(last, by)
    return tied


def _on_host(array: Array) -> bool:
    """Whether an array waits in the host's memory, where nothing is computed."""
    return "host" in str(getattr(jax.typeof(array), "memory_space", "")).lower()


def _barred(*arrays: Array, free_on_cpu: tuple[bool, ...] = ()) -> list[Array]:
    return list(lax.optimization_barrier(arrays)[:-1])


def _selected(*arrays: Array, free_on_cpu: tuple[bool, ...]) -> list[Array]:
    *values, by = arrays
    if not by.size or not jnp.issubdtype(by.dtype, jnp.floating):
        return _barred(*arrays)
    one = lax.slice(by, (0,) * by.ndim, (1,) * by.ndim).reshape(())
    # True for every number and for NaN.
    true = (one == one) | (one != one)
    return [
        value if free else lax.select(jnp.broadcast_to(true, value.shape), value, _zeros(value))
        for value, free in zip(values, free_on_cpu, strict=True)
    ]


def _zeros(value: Array) -> Array:
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(
            jnp.zeros_like(jax.random.key_data(value)), impl=jax.random.key_impl(value)
        )
    return jnp.zeros_like(value)


def _batched(args: Any, dims: Any, **params: Any) -> Any:
    """Whatever dims vmap added: each array comes out as it went in."""
    return order_after_p.bind(*args, **params), list(dims[:-1])


order_after_p = Primitive("order_after")
order_after_p.multiple_results = True
order_after_p.def_impl(_barred)
order_after_p.def_abstract_eval(lambda *avals, **_: list(avals[:-1]))
batching.primitive_batchers[order_after_p] = _batched
mlir.register_lowering(order_after_p, mlir.lower_fun(_barred, multiple_results=True))
mlir.register_lowering(
    order_after_p, mlir.lower_fun(_selected, multiple_results=True), platform="cpu"
)
