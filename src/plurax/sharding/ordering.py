"""Keeping a compiler from doing something earlier than it is written, or only once for two."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array


def after(arrays: Sequence[Array], by: Array) -> list[Array]:
    """The arrays, unchanged, but not to be had before `by` is.

    What is computed from them is then neither done ahead of time nor joined with the same
    computation elsewhere. XLA's CPU compiler drops optimization barriers before it joins equal
    operations; there each array passes a selection that is always true, which only `by` tells.
    """
    here = [place for place, array in enumerate(arrays) if not _on_host(array)]
    tied = lax.platform_dependent(
        *(arrays[place] for place in here), by, cpu=_selected, default=_barred
    )
    held = dict(zip(here, tied, strict=True))
    return [held.get(place, array) for place, array in enumerate(arrays)]


def telling(arrays: Sequence[Array]) -> Array:
    """The first of some arrays that holds floating numbers, else the first."""
    floating = (a for a in arrays if a.size and jnp.issubdtype(a.dtype, jnp.floating))
    return next(floating, arrays[0])


def _on_host(array: Array) -> bool:
    """Whether an array waits in the host's memory, where nothing is computed."""
    return "host" in str(getattr(jax.typeof(array), "memory_space", "")).lower()


def _barred(*arrays: Array) -> tuple[Array, ...]:
    return tuple(lax.optimization_barrier(arrays)[:-1])


def _selected(*arrays: Array) -> tuple[Array, ...]:
    *values, by = arrays
    if not by.size:
        return _barred(*arrays)
    one = lax.slice(by, (0,) * by.ndim, (1,) * by.ndim).reshape(())
    if not jnp.issubdtype(one.dtype, jnp.floating):
        return _barred(*arrays)
    # True for every number and for NaN.
    true = (one == one) | (one != one)
    return tuple(jax.tree.map(lambda value: jnp.where(true, value, _other(value)), values))


def _other(value: Array) -> Array:
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(
            jnp.zeros_like(jax.random.key_data(value)), impl=jax.random.key_impl(value)
        )
    return jnp.zeros_like(value)
