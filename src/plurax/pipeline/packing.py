"""Pack tensors of many shapes into flat buffers, one for each dtype.

Inside `shard_map` every device has arrays of the same shapes, but the stages of a network have
tensors of different shapes: an embedding's table on one device, a head's kernel on another. So each
device packs the tensors of its stages into flat buffers, as long on all devices as the longest
stage needs, and each stage reads its tensors at its own offsets.

Example: device 0 has `f32[100, 8]` and `i32[4]`, device 1 has `f32[8, 10]` and `f32[10]`:

    Packing of device 0    lengths {"float32": 800, "int32": 4}
    Packing of device 1    lengths {"float32": 90}
    buffers on both        float32 (800,), int32 (4,)      `max_lengths`, `zeros`
    device 1               float32[0:80] -> (8, 10), float32[80:90] -> (10,), the rest unused

Buffers of shape `(rows, length)` store one such packing per row: the slots of residuals.

What is the same on all devices, such as the residuals of a layer, needs no flat buffers: `apart`,
each tensor has a buffer of its own shape, as the stacks of a `lax.scan`. A TPU computes on tiles of
8 x 128 numbers, and copies what becomes flat.

Offsets are int32, as all indices of JAX. Where the tensors of a dtype have more elements, those
beyond `MAX_OFFSET` are in further buffers: "float32", "float32/1", and so on.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from plurax.tree import sum_dtype

Buffers = dict[str, Array]
Lengths = dict[str, int]
Shapes = dict[str, tuple[int, ...]]

MAX_OFFSET = 2**31 - 1
"""The largest offset of a tensor's end in a buffer that has several tensors."""


class Packing:
    """The offsets of some tensors in flat buffers.

    **Arguments:** `leaves`, arrays or `jax.ShapeDtypeStruct`s of one device's tensors; `apart`,
    whether each has a buffer of its own shape.

    **Attributes:** `leaves`, as `jax.ShapeDtypeStruct`s; `apart`; `lengths`, the number of elements
    of each buffer by its name, which begins with the dtype's (see `buffer_dtype`).

    >>> packing = Packing([jnp.ones((2, 3)), jnp.ones(4), jnp.ones(2, jnp.int32)])
    >>> packing.lengths
    {'float32': 10, 'int32': 2}
    """

    def __init__(self, leaves: Sequence[Any], *, apart: bool = False) -> None:
        self.apart = apart
        self.leaves = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
        self.lengths: Lengths = {}
        self._at: list[tuple[str, int, tuple[int, ...]]] = []
        latest: dict[str, str] = {}
        for leaf in self.leaves:
            # A random key is stored as its uint32 data.
            data = jax.eval_shape(jax.random.key_data, leaf) if _is_key(leaf) else leaf
            dtype, size = str(data.dtype), math.prod(data.shape)
            name = latest.setdefault(dtype, dtype)
            full = self.lengths.get(name, 0) > 0 and self.lengths[name] + size > MAX_OFFSET
            if full or (apart and name in self.lengths):
                number = sum(buffer_dtype(other) == dtype for other in self.lengths)
                name = latest[dtype] = f"{dtype}/{number}"
            offset = self.lengths.get(name, 0)
            self._at.append((name, offset, data.shape))
            self.lengths[name] = offset + size

    @property
    def shapes(self) -> Shapes:
        """The shape of each buffer by its name."""
        if self.apart:
            return {name: shape for name, _, shape in self._at}
        return flat_shapes(self.lengths)

    def read(
        self, buffers: Mapping[str, Array], indices: Sequence[int] | None = None
    ) -> list[Array]:
        """Return the tensors in buffers of at least these lengths, or only those of `indices`.

        The tensors have the dtype of the buffer, which is wider where it contains gradient sums.
        """
        arrays = []
        for index in range(len(self.leaves)) if indices is None else indices:
            leaf, (name, offset, shape) = self.leaves[index], self._at[index]
            end = offset + math.prod(shape)
            flat = buffers[name] if self.apart else lax.slice(buffers[name], (offset,), (end,))
            # Not cast to the leaf's dtype: a buffer of gradient sums is float32 for bfloat16 too.
            array = flat.reshape(shape)
            if _is_key(leaf):
                array = jax.random.wrap_key_data(array, impl=key_impl(leaf))
            arrays.append(array)
        return arrays

    def write(self, buffers: Buffers, arrays: Sequence[Array]) -> Buffers:
        """Return the buffers with all tensors written at their offsets, cast to their dtypes."""
        buffers = dict(buffers)
        for array, (name, offset, _) in zip(arrays, self._at, strict=True):
            data = _data(array).astype(buffers[name].dtype)
            if self.apart:
                buffers[name] = data
                continue
            buffers[name] = lax.dynamic_update_slice(buffers[name], data.ravel(), (offset,))
        return buffers

    def write_row(self, buffers: Buffers, row: Any, arrays: Sequence[Array]) -> Buffers:
        """Return buffers `(rows, length)` with all tensors written in row `row`."""
        buffers = dict(buffers)
        for array, (name, offset, _) in zip(arrays, self._at, strict=True):
            if self.apart:
                data = _data(array)
                buffers[name] = lax.dynamic_update_index_in_dim(buffers[name], data, row, 0)
                continue
            flat = _data(array).reshape(1, -1)
            buffers[name] = lax.dynamic_update_slice(buffers[name], flat, (row, np.int32(offset)))
        return buffers

    def read_row(self, buffers: Mapping[str, Array], row: Any) -> list[Array]:
        """Return the tensors in row `row` of buffers `(rows, length)`."""
        arrays = []
        for leaf, (name, offset, shape) in zip(self.leaves, self._at, strict=True):
            if self.apart:
                array = lax.dynamic_index_in_dim(buffers[name], row, keepdims=False)
            else:
                start, size = (row, np.int32(offset)), (1, math.prod(shape))
                array = lax.dynamic_slice(buffers[name], start, size).reshape(shape)
            if _is_key(leaf):
                array = jax.random.wrap_key_data(array, impl=key_impl(leaf))
            arrays.append(array)
        return arrays

    def add(self, buffers: Buffers, arrays: Sequence[Array], indices: Sequence[int]) -> Buffers:
        """Return the buffers with arrays added to the tensors `leaves[i]` for `i` in `indices`.

        The sums have the buffers' dtypes.
        """
        buffers = dict(buffers)
        for array, index in zip(arrays, indices, strict=True):
            name, offset, shape = self._at[index]
            size = (math.prod(shape),)
            old = lax.dynamic_slice(buffers[name], (offset,), size)
            new = old + array.ravel().astype(old.dtype)
            buffers[name] = lax.dynamic_update_slice(buffers[name], new, (offset,))
        return buffers


def max_lengths(lengths: Iterable[Lengths]) -> Lengths:
    """Return by name the length of buffers in which packings of each of these lengths fit."""
    longest: Lengths = {}
    for one in lengths:
        for name, length in one.items():
            longest[name] = max(length, longest.get(name, 0))
    return longest


def flat_shapes(lengths: Lengths) -> Shapes:
    """Return the shapes of flat buffers of these lengths."""
    return {name: (length,) for name, length in lengths.items()}


def zeros(shapes: Shapes, rows: int | None = None, *, wide: bool = False) -> Buffers:
    """Return buffers of zeros, of these shapes or `(rows, *shape)`; `wide`: float32 or wider."""
    first = () if rows is None else (rows,)
    return {
        name: jnp.zeros((*first, *shape), sum_dtype(dtype) if wide else dtype)
        for name, shape in shapes.items()
        for dtype in [buffer_dtype(name)]
    }


def buffer_dtype(name: str) -> str:
    """Return the name of the dtype of a buffer."""
    return name.partition("/")[0]


def buffer_bytes(lengths: Lengths) -> int:
    """Return the bytes of buffers of these lengths."""
    return sum(length * jnp.dtype(buffer_dtype(name)).itemsize for name, length in lengths.items())


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _data(array: Array) -> Array:
    return jax.random.key_data(array) if _is_key(array) else array


def key_impl(leaf: Any) -> Any:
    """Return the random number generator of a key's dtype, as `jax.random.key_impl` does."""
    found: list[Any] = []
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), leaf)
    return found[0]
