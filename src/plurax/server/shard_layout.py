"""Deal the parameters of a network out to servers, each server's as a few vectors.

Each parameter is on one shard, the largest dealt first, each to the shard that has least so far
(Graham 1969, "Bounds on Multiprocessing Timing Anomalies": at most 4/3 of the best possible). A
message is a few large arrays rather than many small ones: what is sent costs by the array as well
as by the byte. A large parameter is a vector by itself, and so is never copied to be sent.

    parameters, f32        a (500, 500)     b (300, 500)     c (50,)     d (50,), bf16     2 shards
    bytes                  1,000,000        600,000          200         100
    dealt                  a -> 0           b -> 1           c -> 1      d -> 1
    vectors of shard 0     float32: a
    vectors of shard 1     bfloat16 (50,): d      float32 (50,): c      float32: b
"""

import heapq
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from plurax.pipeline.packing import key_impl

Vectors = tuple[Array, ...]
"""A shard's parameters, or gradients like them; a vector of one parameter has its shape."""

LARGE_BYTES = 1 << 16
"""Of a parameter that is a vector by itself."""


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

    **Attributes:** `homes`, for each parameter its shard; None where all shards have it: of a
    single shard, and a parameter of one number, on which an optimizer's numbers may depend.
    """

    def __init__(self, leaves: Sequence[Any], shards: int) -> None:
        self._leaves = leaves
        self.shards = shards
        dealt = deal([_bytes_of(leaf) for leaf in leaves], shards)
        self.homes = [
            None if shards == 1 or math.prod(leaf.shape) == 1 else home
            for leaf, home in zip(leaves, dealt, strict=True)
        ]

    @property
    def sent_bytes(self) -> int:
        """How many bytes the vectors of all shards have."""
        return sum(
            length * jnp.dtype(dtype).itemsize
            for shard in range(self.shards)
            for dtype, length in self.lengths(shard)
        )

    def lengths(self, shard: int) -> list[tuple[str, int]]:
        """Return the dtype and the length of each of a shard's vectors."""
        return [
            (
                str(self._leaves[held[0]].dtype),
                sum(math.prod(self._leaves[index].shape) for index in held),
            )
            for held in self._vectors(shard)
        ]

    def join(self, shard: int, leaves: Mapping[int, Array]) -> Vectors:
        """Return a shard's vectors from its parameters, or from gradients like them, by index.

        A vector of one parameter is that parameter, in its shape: it is not copied.
        """
        return tuple(
            leaves[held[0]] if len(held) == 1 else _concatenated([leaves[i] for i in held])
            for held in self._vectors(shard)
        )

    def split(self, shard: int, vectors: Sequence[Any]) -> dict[int, Any]:
        """Return a shard's parameters by index, from its vectors, of JAX or of NumPy."""
        leaves = {}
        for held, vector in zip(self._vectors(shard), vectors, strict=True):
            at = 0
            for index in held:
                shape = self._leaves[index].shape
                one = vector if len(held) == 1 else vector[at : at + math.prod(shape)]
                leaves[index] = one.reshape(shape)
                at += math.prod(shape)
        return leaves

    def _vectors(self, shard: int) -> list[list[int]]:
        """Return which parameters are in each vector: the small ones of a dtype in one."""
        small: dict[str, list[int]] = {}
        large = []
        for index, home in enumerate(self.homes):
            if home not in (None, shard):
                continue
            if _bytes_of(self._leaves[index]) < LARGE_BYTES:
                small.setdefault(str(self._leaves[index].dtype), []).append(index)
            else:
                large.append([index])
        return [*dict(sorted(small.items())).values(), *large]


def _bytes_of(leaf: Any) -> int:
    return math.prod(leaf.shape) * leaf.dtype.itemsize


@jax.jit
def _concatenated(leaves: Sequence[Array]) -> Array:
    return jnp.concatenate([jnp.ravel(leaf) for leaf in leaves])


def all_finite(leaves: Sequence[Array]) -> Bool[Array, ""]:
    """Return whether all elements of all leaves are finite."""
    # On CPU XLA adds up floats at twice the speed at which it combines truths; inf * 0 is nan.
    return jnp.all(jnp.stack([jnp.sum(leaf * 0) == 0 for leaf in leaves]))


def to_bytes(array: Array) -> np.ndarray:
    """Return an array's bytes `(n,)`, without a copy where it is on the host.

    Arrays of bytes are what every transport sends without a copy: of bfloat16 and the like it would
    send an object.
    """
    return np.ascontiguousarray(np.asarray(array)).reshape(-1).view(np.uint8)


def from_bytes(content: np.ndarray, dtype: str) -> np.ndarray:
    """Return the vector of a dtype, by name, whose bytes these are; it is not copied."""
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
