"""The random bits of a block, equal to those of the whole array.

JAX's default generator, Threefry, draws the bits of an entry from the key and the entry's index in
row-major order (`jax_threefry_partitionable`), so that those of a block need no others:

    jax.random.bits(key, (8, 4096, 4096)), keys 512 to 1023 of the last dim
    index of entry (h, t, s) = (h · 4096 + t) · 4096 + s, as two halves of 32 bits
    bits = threefry2x32(key, halves of the index)

Source: JEP 263, https://docs.jax.dev/en/latest/jep/263-prng.html; Salmon et al. 2011, "Parallel
random numbers: as easy as 1, 2, 3", https://doi.org/10.1145/2063384.2063405.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.random import threefry2x32_p
from jaxtyping import Array, Key, UInt

from plurax.jaxpr.equal_dims import shape_of

Halves = tuple[Array, Array]
"""A number of 64 bits, modulo 2 ** 64: the upper and the lower 32."""


def draws_apart(eqn: Any) -> bool:
    """Whether an equation draws bits of which a block can be drawn alone."""
    partitionable = jax.config.jax_threefry_partitionable  # type: ignore[attr-defined]
    if eqn.primitive.name != "random_bits" or not partitionable:
        return False
    threefry = jax.eval_shape(lambda: jax.random.key(0, impl="threefry2x32"))
    return bool(eqn.invars[0].aval.dtype == threefry.dtype)


def bits_of_block(
    eqn: Any,
    keys: Key[Array, "..."],
    sizes: Sequence[int],
    places: Callable[[Array, int], Array],
) -> UInt[Array, "..."]:
    """Return the bits that an equation draws, of a block of the entries.

    **Arguments:** `keys`, of any shape: each draws its own bits; `sizes`, the shape of the block;
    `places`, from an index along a dim of the block, uint32, and the dim, to the place in the whole
    array.
    """
    lead = keys.ndim
    whole, shape = shape_of(eqn.outvars[0])[lead:], list(sizes[lead:])
    high, low = jnp.uint32(0), jnp.uint32(0)
    for d, count in enumerate(shape):
        place = places(jnp.arange(count, dtype=jnp.uint32), lead + d)
        place = place.reshape([count if d == other else 1 for other in range(len(shape))])
        high, low = _sum((high, low), _product(place, math.prod(whole[d + 1 :])))
    data = jax.random.key_data(keys).reshape(*keys.shape, *(1,) * len(shape), 2)
    full = (*keys.shape, *shape)
    operands = (data[..., 0], data[..., 1], high, low)
    first, second = threefry2x32_p.bind(*(jnp.broadcast_to(one, full) for one in operands))
    width, dtype = eqn.params["bit_width"], eqn.outvars[0].aval.dtype
    if width == 64:
        return first.astype(dtype) << jnp.asarray(32, dtype) | second.astype(dtype)
    return (first ^ second).astype(dtype)


def _product(places: Array, stride: int) -> Halves:
    """Return places times a stride; of 32 bits, from products of 16."""
    half = jnp.uint32(0xFFFF)
    upper, lower = places >> 16, places & half
    a, b = jnp.uint32(stride >> 16 & 0xFFFF), jnp.uint32(stride & 0xFFFF)
    cross = upper * b + (lower * b >> 16)
    other = lower * a + (cross & half)
    high = upper * a + (cross >> 16) + (other >> 16) + places * jnp.uint32(stride >> 32)
    return high, places * jnp.uint32(stride & 0xFFFFFFFF)


def _sum(one: Halves, other: Halves) -> Halves:
    low = one[1] + other[1]
    return one[0] + other[0] + (low < other[1]).astype(jnp.uint32), low
