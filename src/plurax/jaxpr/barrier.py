"""Order operations, so that XLA neither runs them earlier nor merges equal ones.

ZeRO-3 gathers a parameter twice, and rematerialization computes values twice, so that neither is
kept in memory in between. To XLA both are equal operations on equal operands, and it merges them:

    shard (256, 1024) over data=4, float32: 1 MiB; w (1024, 1024): 4 MiB

    w = all_gather(shard)        # forward
    y = x @ w
    ...                          # w is kept here, 4 MiB for each layer
    w = all_gather(shard)        # backward: merged with the first
    dx = dy @ w.T

With `(shard,) = order_after([shard], dy)` before the second gather, its operand depends on `dy`,
which the backward pass has only then: the gathers differ, and the second cannot run earlier.

`order_after` is one primitive, so that tracing it costs one equation. It is lowered to
`lax.optimization_barrier`
(https://docs.jax.dev/en/latest/_autosummary/jax.lax.optimization_barrier.html) or, on CPU, to a
selection.
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
    earlier, nor merge them with equal operations elsewhere.

    On accelerators this is an optimization barrier. XLA's CPU compiler drops barriers before it
    merges equal operations; there it is `where(cond, x, 0)`, with an always-true `cond` computed
    from `by`, which XLA cannot fold. The selection costs compile time and a pass over the array.

    **Arguments:**

    - `arrays`: of any shapes and dtypes. Arrays in host memory are returned as they are.
    - `by`: the array to wait for.
    - `free_on_cpu`: for each array whether it goes without the selection on CPU. Use it for
      parameters, which are kept in memory anyway.
    """
    free = free_on_cpu or [False] * len(arrays)
    here = [index for index, array in enumerate(arrays) if not _on_host(array)]
    if not here:
        return list(arrays)
    chosen = (arrays[index] for index in here)
    tied = order_after_p.bind(*chosen, by, free_on_cpu=tuple(free[index] for index in here))
    held = dict(zip(here, tied, strict=True))
    return [held.get(index, array) for index, array in enumerate(arrays)]


def pick_dependency(arrays: Sequence[Array]) -> Array:
    """Return the first non-empty floating-point array, else the first non-empty one.

    A floating-point array gives the condition for XLA's CPU compiler without a conversion.
    """
    floating = (a for a in arrays if a.size and jnp.issubdtype(a.dtype, jnp.floating))
    return next(floating, next((a for a in arrays if a.size), arrays[0]))


def order_after_cotangent(arrays: Sequence[Array], free_on_cpu: Sequence[bool]) -> list[Array]:
    """Return the inputs of a recomputed function, ordered after its cotangent.

    The cotangent is the last non-empty floating-point input; it is returned as it is.
    """
    by = pick_dependency(arrays[::-1])
    last = max(index for index, array in enumerate(arrays) if array is by)
    others = [index for index in range(len(arrays)) if index != last]
    tied = order_after([arrays[i] for i in others], by, [free_on_cpu[i] for i in others])
    tied.insert(last, by)
    return tied


def _on_host(array: Array) -> bool:
    """Whether an array is in host memory, in which nothing is computed."""
    return "host" in str(getattr(jax.typeof(array), "memory_space", "")).lower()


def _barred(*arrays: Array, free_on_cpu: tuple[bool, ...] = ()) -> list[Array]:
    """Lower to an optimization barrier over the arrays and `by`, without `by` in the result."""
    return list(lax.optimization_barrier(arrays)[:-1])


def _selected(*arrays: Array, free_on_cpu: tuple[bool, ...]) -> list[Array]:
    """Lower to selections, for XLA's CPU compiler."""
    *values, by = arrays
    if not by.size:
        return _barred(*arrays)
    if jnp.issubdtype(by.dtype, jax.dtypes.prng_key):
        by = jax.random.key_data(by)
    entry = lax.slice(by, (0,) * by.ndim, (1,) * by.ndim).reshape(())
    if not jnp.issubdtype(by.dtype, jnp.floating):
        # XLA folds comparisons of an integer with itself, but not of a number converted from it.
        entry = (jnp.real(entry) if jnp.iscomplexobj(entry) else entry).astype(jnp.float32)
    # True for all values, NaN included. NaN is also why XLA can fold neither comparison.
    true = (entry == entry) | (entry != entry)
    return [
        value if free else lax.select(jnp.broadcast_to(true, value.shape), value, _zeros(value))
        for value, free in zip(values, free_on_cpu, strict=True)
    ]


def _zeros(value: Array) -> Array:
    """Return zeros of an array's shape and dtype; random keys need zeros as key data."""
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(
            jnp.zeros_like(jax.random.key_data(value)), impl=jax.random.key_impl(value)
        )
    return jnp.zeros_like(value)


def _batched(args: Any, dims: Any, **params: Any) -> Any:
    """Return the arrays with the batch dims they had; no dim needs to match another."""
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
