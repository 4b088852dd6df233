"""Assign the parameters of a network to servers, each server's as a few vectors.

Each parameter is on one shard; the largest is assigned first, each to the shard that has least yet
(Graham 1969, "Bounds on Multiprocessing Timing Anomalies": at most 4/3 of the best possible). A
message is a few large arrays rather than many small ones: what is sent costs by the array as well
as by the byte. A large parameter is a vector by itself, and so is never copied to be sent.

    parameters, f32        a (500, 500)     b (300, 500)     c (50,)     d (50,), bf16     2 shards
    bytes                  1,000,000        600,000          200         100
    shard                  0                1                1           1
    vectors of shard 0     float32: a
    vectors of shard 1     bfloat16 (50,): d      float32 (50,): c      float32: b

Where whole parameters would leave the shards uneven, the large ones are cut into chunks of rows, of
at most 4 MiB, which are assigned as the others are; the rows of a shard are contiguous. An
embedding of (50000, 256), 51 MB, and little else, on 2 shards:

    chunks       13 of 3,572 rows, 3.7 MB each, and one of 3,564
    shard 0      rows 0 to 25,003                   shard 1      rows 25,004 to 49,999
"""

import dataclasses
import heapq
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from plurax.jaxpr.homes import Place, RowSplit
from plurax.pipeline.packing import key_impl
from plurax.tree import byte_count

Vectors = tuple[Array, ...]
"""A shard's parameters, or gradients like them; a vector of one parameter has its shape."""

LARGE_BYTES = 1 << 16
"""Of a parameter that is a vector by itself."""
CHUNK_BYTES = 4 << 20
"""Of a piece of a parameter that is cut, at most."""
UNEVEN = 1.1
"""Times its fair share, that a shard may have before parameters are cut."""


def assign_shards(sizes: Sequence[int], shards: int) -> list[int]:
    """Return for each tensor its shard.

    **Arguments:** `sizes`, of the tensors in bytes; `shards`, how many there are.

    >>> assign_shards([400, 300, 200, 200], 2)
    [0, 1, 1, 0]
    """
    loads = [(0, shard) for shard in range(shards)]
    homes = [0] * len(sizes)
    # Of equal tensors the first comes first, so that every machine assigns them alike.
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        load, shard = heapq.heappop(loads)
        homes[index] = shard
        heapq.heappush(loads, (load + sizes[index], shard))
    return homes


class ShardLayout:
    """Which parameters each shard holds, and where in its vectors.

    **Arguments:** `leaves`, the parameters as arrays or `jax.ShapeDtypeStruct`s; `shards`; `whole`,
    the indices of those that must not be cut.

    **Attributes:** `homes`, for each parameter its shard, or `RowSplit`; None where all shards have
    it: of a single shard, and a parameter of one number, on which an optimizer's numbers may
    depend.
    """

    def __init__(self, leaves: Sequence[Any], shards: int, whole: Collection[int] = ()) -> None:
        self._leaves = leaves
        self.shards = shards
        self._cuts: dict[int, _Cuts] = {}
        sizes = [byte_count(leaf) for leaf in leaves]
        assigned = assign_shards(sizes, shards)
        loads = [0] * shards
        for size, shard in zip(sizes, assigned, strict=True):
            loads[shard] += size
        if max(loads) * shards > UNEVEN * sum(sizes):
            self._cut(sizes, whole)
        self.homes: list[Place] = [
            RowSplit(index) if index in self._cuts else shard
            for index, shard in enumerate(assigned)
        ]
        for index, leaf in enumerate(leaves):
            if shards == 1 or math.prod(leaf.shape) == 1:
                self.homes[index] = None

    def _cut(self, sizes: Sequence[int], whole: Collection[int]) -> None:
        """Cut the large parameters, and assign their chunks with the others."""
        items: list[tuple[int, int]] = []
        for index, leaf in enumerate(self._leaves):
            if sizes[index] <= CHUNK_BYTES or index in whole:
                items.append((index, sizes[index]))
                continue
            count = -(-sizes[index] // CHUNK_BYTES)
            dim = next((d for d, n in enumerate(leaf.shape) if n >= count), leaf.ndim - 1)
            row_bytes = sizes[index] // leaf.shape[dim]
            max_rows = max(CHUNK_BYTES // row_bytes, 1)
            # As many chunks for one shard as for another, where nothing else makes a difference.
            per_shard = -(-leaf.shape[dim] // (max_rows * self.shards))
            rows = -(-leaf.shape[dim] // (per_shard * self.shards))
            self._cuts[index] = _Cuts(dim, rows, leaf.shape[dim], [0] * self.shards)
            items += [
                (index, row_bytes * min(rows, leaf.shape[dim] - first))
                for first in range(0, leaf.shape[dim], rows)
            ]
        assigned = assign_shards([size for _, size in items], self.shards)
        for (index, _), shard in zip(items, assigned, strict=True):
            if index in self._cuts:
                self._cuts[index].chunks[shard] += 1

    def piece(self, index: int, shard: int, leaf: Any) -> Any:
        """Return what a shard has of a parameter, or of a tensor like it."""
        if index not in self._cuts:
            return leaf
        cuts = self._cuts[index]
        first, end = cuts.rows_of(shard)
        return leaf[(slice(None),) * cuts.dim + (slice(first, end),)]

    def pieces(self, shard: int, leaves: Mapping[int, Any]) -> dict[int, Any]:
        """Return what a shard has of whole parameters, or of tensors like them, by index."""
        return {
            index: self.piece(index, shard, leaf)
            for index, leaf in leaves.items()
            if isinstance(self.homes[index], RowSplit) or self.homes[index] in (None, shard)
        }

    def joined(self, index: int, pieces: Sequence[Any]) -> Any:
        """Return a parameter, or a tensor like it, from what each shard has of it, on the host."""
        return np.concatenate([np.asarray(piece) for piece in pieces], self._cuts[index].dim)

    def whole(self, parts: Sequence[Mapping[int, Any]]) -> dict[int, Any]:
        """Return whole parameters by index, from what each shard has of them."""
        leaves = {index: leaf for part in parts for index, leaf in part.items()}
        return leaves | {
            index: self.joined(index, [part[index] for part in parts]) for index in self._cuts
        }

    def _shape(self, index: int, shard: int) -> tuple[int, ...]:
        shape: tuple[int, ...] = self._leaves[index].shape
        if index not in self._cuts:
            return shape
        cuts = self._cuts[index]
        first, end = cuts.rows_of(shard)
        return (*shape[: cuts.dim], end - first, *shape[cuts.dim + 1 :])

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
                sum(math.prod(self._shape(index, shard)) for index in held),
            )
            for held in self._vectors(shard)
        ]

    def join(self, shard: int, leaves: Mapping[int, Array]) -> Vectors:
        """Return a shard's vectors from its pieces of parameters, or of gradients, by index.

        A vector of one parameter is that parameter, in its shape: it is not copied.
        """
        return tuple(
            leaves[held[0]] if len(held) == 1 else _concatenated([leaves[i] for i in held])
            for held in self._vectors(shard)
        )

    def split(self, shard: int, vectors: Sequence[Any]) -> dict[int, Any]:
        """Return a shard's pieces of parameters by index, from its vectors, of JAX or of NumPy."""
        leaves = {}
        for held, vector in zip(self._vectors(shard), vectors, strict=True):
            at = 0
            for index in held:
                shape = self._shape(index, shard)
                leaf = vector if len(held) == 1 else vector[at : at + math.prod(shape)]
                leaves[index] = leaf.reshape(shape)
                at += math.prod(shape)
        return leaves

    def _vectors(self, shard: int) -> list[list[int]]:
        """Return which parameters are in each vector: the small ones of a dtype in one."""
        small: dict[tuple[str, bool], list[int]] = {}
        large = []
        for index, home in enumerate(self.homes):
            if home not in (None, shard) and index not in self._cuts:
                continue
            size = math.prod(self._shape(index, shard)) * self._leaves[index].dtype.itemsize
            if size < LARGE_BYTES:
                # What all shards have is a vector by itself, and so compressed alike on each.
                shared = home is None and self.shards > 1
                small.setdefault((str(self._leaves[index].dtype), shared), []).append(index)
            else:
                large.append([index])
        return [*dict(sorted(small.items())).values(), *large]


@dataclasses.dataclass(frozen=True)
class _Cuts:
    """How a parameter is cut.

    **Fields:** `dim`, which is cut; `rows`, of a chunk; `size`, of the dim; `chunks`, how many of
    them each shard has.
    """

    dim: int
    rows: int
    size: int
    chunks: list[int]

    def rows_of(self, shard: int) -> tuple[int, int]:
        """Return a shard's first row, and the end of its rows."""
        first = self.rows * sum(self.chunks[:shard])
        end = first + self.rows * self.chunks[shard]
        return min(first, self.size), min(end, self.size)


@jax.jit
def _concatenated(leaves: Sequence[Array]) -> Array:
    return jnp.concatenate([jnp.ravel(leaf) for leaf in leaves])


def all_finite(leaves: Sequence[Array]) -> Bool[Array, ""]:
    """Return whether all elements of all leaves are finite."""
    # On CPU XLA adds up floats at twice the speed at which it combines truths; inf * 0 is nan.
    finite = [jnp.sum(leaf * 0) == 0 for leaf in leaves]
    return jnp.all(jnp.stack(finite)) if finite else jnp.array(True)


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
