"""Tensors of many shapes in one flat buffer of each dtype.

Every device of a mesh has arrays of the same shapes, and the stages of a network do not. So what
belongs to one stage lies, on its device, in a buffer as long as the longest stage needs.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

Buffers = dict[str, Array]
Lengths = dict[str, int]


class Packing:
    """Where each of some tensors lies in the flat buffers of its dtype.

    **Arguments:** `leaves`, arrays or `jax.ShapeDtypeStruct`s of what one device has.

    **Attributes:** `leaves`, as `jax.ShapeDtypeStruct`s; `lengths` of the buffers by dtype.

    >>> packing = Packing([jnp.ones((2, 3)), jnp.ones(4), jnp.ones(2, jnp.int32)])
    >>> packing.lengths
    {'float32': 10, 'int32': 2}
    """

    def __init__(self, leaves: Sequence[Any]) -> None:
        self.leaves = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
        self.lengths: Lengths = {}
        self._at: list[tuple[str, int, tuple[int, ...]]] = []
        for leaf in self.leaves:
            # A random key is stored as its numbers.
            data = jax.eval_shape(jax.random.key_data, leaf) if _is_key(leaf) else leaf
            name = str(data.dtype)
            offset = self.lengths.get(name, 0)
            self._at.append((name, offset, data.shape))
            self.lengths[name] = offset + math.prod(data.shape)

    def read(
        self, buffers: Mapping[str, Array], places: Sequence[int] | None = None
    ) -> list[Array]:
        """The tensors in buffers of at least these lengths, or those in some places."""
        found = []
        for place in range(len(self.leaves)) if places is None else places:
            leaf, (name, offset, shape) = self.leaves[place], self._at[place]
            flat = lax.slice(buffers[name], (offset,), (offset + math.prod(shape),))
            # Of another dtype where it is a sum of them.
            array = flat.reshape(shape)
            if _is_key(leaf):
                array = jax.random.wrap_key_data(array, impl=_impl(leaf))
            found.append(array)
        return found

    def write(self, buffers: Buffers, arrays: Sequence[Array]) -> Buffers:
        """The buffers with tensors in their places."""
        buffers = dict(buffers)
        for array, (name, offset, _) in zip(arrays, self._at, strict=True):
            flat = _data(array).ravel().astype(buffers[name].dtype)
            buffers[name] = lax.dynamic_update_slice(buffers[name], flat, (offset,))
        return buffers

    def write_row(self, buffers: Buffers, row: Any, arrays: Sequence[Array]) -> Buffers:
        """The same in one row of buffers `(rows, length)`."""
        buffers = dict(buffers)
        for array, (name, offset, _) in zip(arrays, self._at, strict=True):
            flat = _data(array).reshape(1, -1)
            buffers[name] = lax.dynamic_update_slice(buffers[name], flat, (row, jnp.int32(offset)))
        return buffers

    def read_row(self, buffers: Mapping[str, Array], row: Any) -> list[Array]:
        """The tensors in one row of buffers `(rows, length)`."""
        found = []
        for leaf, (name, offset, shape) in zip(self.leaves, self._at, strict=True):
            size = (1, math.prod(shape))
            array = lax.dynamic_slice(buffers[name], (row, jnp.int32(offset)), size).reshape(shape)
            if _is_key(leaf):
                array = jax.random.wrap_key_data(array, impl=_impl(leaf))
            found.append(array)
        return found

    def add(self, buffers: Buffers, arrays: Sequence[Array], places: Sequence[int]) -> Buffers:
        """The buffers with tensors added in some places."""
        buffers = dict(buffers)
        for array, place in zip(arrays, places, strict=True):
            name, offset, shape = self._at[place]
            size = (math.prod(shape),)
            old = lax.dynamic_slice(buffers[name], (offset,), size)
            new = old + array.ravel().astype(old.dtype)
            buffers[name] = lax.dynamic_update_slice(buffers[name], new, (offset,))
        return buffers


def longest(packings: Iterable[Packing]) -> Lengths:
    """The lengths of buffers in which any of some packings fits."""
    lengths: Lengths = {}
    for packing in packings:
        for name, length in packing.lengths.items():
            lengths[name] = max(length, lengths.get(name, 0))
    return lengths


def empty(lengths: Lengths, rows: int | None = None, *, wide: bool = False) -> Buffers:
    """Buffers of zeros, `(length,)` or `(rows, length)`; for sums in float32 or wider."""
    shape = () if rows is None else (rows,)
    return {
        name: jnp.zeros((*shape, length), jnp.promote_types(name, "float32") if wide else name)
        for name, length in lengths.items()
    }


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _data(array: Array) -> Array:
    return jax.random.key_data(array) if _is_key(array) else array


def _impl(leaf: Any) -> Any:
    """By which algorithm the random numbers of a key's dtype are made."""
    found: list[Any] = []
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), leaf)
    return found[0]
