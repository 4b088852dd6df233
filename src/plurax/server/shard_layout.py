"""Deal the parameters of a network out to servers, each server's as one vector for each dtype.

Each parameter is on one shard, the largest dealt first, each to the shard that has least so far
(Graham 1969, "Bounds on Multiprocessing Timing Anomalies": at most 4/3 of the best possible). A
message is a few large arrays rather than many small ones: what is sent costs by the array as well
as by the byte.

    parameters             a (10, 10) f32   b (75,) f32   c (50,) f32   d (50,) bf16     2 shards
    bytes                  400              300           200           100
    dealt                  a -> 0           b -> 1        c -> 1        d -> 0
    vectors of shard 0     bfloat16 (50,): d       float32 (100,): a
    vectors of shard 1     float32 (125,): b c
"""

import heapq
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from plurax.pipeline.packing import key_impl

Vectors = tuple[Array, ...]
"""One vector for each dtype of a shard's parameters, in the order of the dtypes' names."""


def deal(sizes: Sequence[int], shards: int) -> list[int]:
    """Return for each tensor its shard.

    **Arguments:** `sizes`, of the tensors in bytes; `shards`, how many there are.

    >>> deal([400, 300, 200, 200], 2)
    [0, 1, 1, 0]
    """
    loads = [(0, shard) for shard in range(shards)]
    homes = [0] * len(sizes)
    # Of equal tensors the first comes first: the same parameters are dealt alike on every machine.
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        load, shard = heapq.heappop(loads)
        homes[index] = shard
        heapq.heappush(loads, (load + sizes[index], shard))
    return homes


class ShardLayout:
    """Which parameters each shard holds, and where in its vectors.

    **Arguments:** `leaves`, the parameters as arrays or `jax.ShapeDtypeStruct`s; `shards`.

    **Attributes:** `homes`, for each parameter its shard.
    """

    def __init__(self, leaves: Sequence[Any], shards: int) -> None:
        self._leaves = leaves
        self.shards = shards
        self.homes = deal([math.prod(x.shape) * x.dtype.itemsize for x in leaves], shards)

    def lengths(self, shard: int) -> dict[str, int]:
        """Return the lengths of a shard's vectors by dtype."""
        return {
            dtype: sum(math.prod(self._leaves[index].shape) for index in held)
            for dtype, held in self._groups(shard).items()
        }

    def join(self, shard: int, leaves: Mapping[int, Array]) -> Vectors:
        """Return a shard's vectors from its parameters, or from gradients like them, by index."""
        return tuple(
            jnp.concatenate([jnp.ravel(leaves[index]) for index in held])
            for held in self._groups(shard).values()
        )

    def split(self, shard: int, vectors: Sequence[Array]) -> dict[int, Array]:
        """Return a shard's parameters by index, from its vectors."""
        leaves = {}
        for held, vector in zip(self._groups(shard).values(), vectors, strict=True):
            at = 0
            for index in held:
                shape = self._leaves[index].shape
                leaves[index] = vector[at : at + math.prod(shape)].reshape(shape)
                at += math.prod(shape)
        return leaves

    def _groups(self, shard: int) -> dict[str, list[int]]:
        """Return the indices of a shard's parameters by the names of their dtypes."""
        groups: dict[str, list[int]] = {}
        for index, home in enumerate(self.homes):
            if home == shard:
                groups.setdefault(str(self._leaves[index].dtype), []).append(index)
        return dict(sorted(groups.items()))


def to_bytes(array: Array) -> np.ndarray:
    """Return an array's bytes, without a copy where it is on the host.

    Arrays of bytes are what every transport sends without a copy: of bfloat16 and the like it would
    send an object.
    """
    return np.ascontiguousarray(np.asarray(array)).view(np.uint8)


def from_bytes(content: np.ndarray, dtype: str) -> np.ndarray:
    """Return the vector of a dtype, by name, whose bytes these are."""
    return content.view(jnp.dtype(dtype))


def to_host(leaf: Array) -> np.ndarray:
    """Return a leaf of a state as a NumPy array; a random key as its data."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf)


def from_host(content: np.ndarray, like: Any) -> Array:
    """Return the leaf of a state that `to_host` gave, for a leaf like `like`."""
    if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(jnp.asarray(content), impl=key_impl(like))
    # A copy: what arrives from another process may be read-only memory that others share.
    return jnp.array(content)
