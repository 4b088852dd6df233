"""Collect batches in one piece of memory, for a loop of several steps in one call.

Of small batches a step computes for less time than a call costs the host. Batches that arrive one
by one are therefore written one behind the other, placed on the devices together, and taken by
`Program.loop` as the steps of a short epoch. Example, a buffer of 4 slots for batches of 2, three
of them filled, the third with one example:

    rows      x (8, ...)     0 1 | 2 3 | 4 - | - -
    order     rows (4, 2)    [0 1] [2 3] [4 4] [6 7]     counts (4,)    2 2 1 2
    the call  loop(state, rows, order, first=0, stop=3)

What no batch has been written to is never read.
"""

import functools
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Int, PyTree

from plurax.distributed.global_arrays import process_count
from plurax.execute.placement import Placed, Placement, device_data, is_key
from plurax.mesh import replicated

BYTES = 4 * 2**20
"""The most bytes of a buffer. Batches that are larger cost more to compute than to call."""

MOST_SLOTS = 64
FEWEST_SLOTS = 4
"""With fewer batches in a buffer a call would save too little."""

ALIGNMENT = 64
"""Bytes; an array that begins at a multiple of them JAX does not copy to a CPU device."""


class BatchBuffer:
    """Memory for `slots` batches of the largest size that a placement takes.

    **Attributes:** `counts`, the number of examples in each batch written so far.
    """

    def __init__(self, placement: Placement, slots: int) -> None:
        self._placement = placement
        self._slots = slots
        self._size = placement.size
        self._leaves = [
            _aligned((slots * self._size, *leaf.shape[1:]), leaf.dtype)
            for leaf in jax.tree.leaves(placement.like)
        ]
        self.counts: list[int] = []

    def __len__(self) -> int:
        return len(self.counts)

    @property
    def is_full(self) -> bool:
        """Whether no slot is left."""
        return len(self.counts) == self._slots

    def write(self, batch: PyTree) -> None:
        """Copy a batch into the next slot. Raises `BatchError` where it does not fit."""
        begin = len(self.counts) * self._size
        self.counts.append(self._placement.write(batch, self._leaves, begin))

    @property
    def rows(self) -> PyTree:
        """All slots, a tree of arrays `(slots * size, ...)`."""
        return jax.tree.unflatten(self._placement.structure, self._leaves)

    def order(self) -> tuple[Int[np.ndarray, "slots size"], Int[np.ndarray, "slots"]]:
        """Return the rows of each slot, and how many of them are real; of an empty slot all."""
        rows = np.arange(self._slots * self._size).reshape(self._slots, self._size)
        counts = np.full(self._slots, self._size)
        counts[: len(self.counts)] = self.counts
        return rows, counts


class Buffers:
    """Makes buffers of `slots` batches, and puts them on the devices."""

    def __init__(self, placement: Placement, mesh: Mesh, slots: int) -> None:
        self._placement, self._mesh, self.slots = placement, mesh, slots

    @classmethod
    def of(cls, placement: Placement, mesh: Mesh) -> "Buffers | None":
        """Return buffers for batches that a placement takes; None where batches are too large.

        None of several processes either: each reads the rows of its own devices alone; nor of
        random keys, which are no NumPy arrays.
        """
        leaves = jax.tree.leaves(placement.like)
        if any(is_key(leaf) for leaf in leaves):
            return None
        size = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
        slots = min(MOST_SLOTS, BYTES // max(1, size))
        return (
            cls(placement, mesh, slots) if slots >= FEWEST_SLOTS and process_count() == 1 else None
        )

    def new(self) -> BatchBuffer:
        """Return an empty buffer."""
        return BatchBuffer(self._placement, self.slots)

    def place(self, buffer: BatchBuffer) -> tuple[PyTree, Placed]:
        """Put a buffer on every device; return data and order for `Program.loop`.

        The buffer may not be written to from now on.
        """
        full = buffer.is_full and set(buffer.counts) == {self._placement.size}
        order = self._full_order if full else self._placement.place_order(*buffer.order())
        return device_data(buffer.rows, replicated(self._mesh)), order

    @functools.cached_property
    def _full_order(self) -> Placed:
        return self._placement.place_order(*self.new().order())


def _aligned(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Return an array whose memory begins at a multiple of `ALIGNMENT`."""
    size = int(np.prod(shape)) * dtype.itemsize
    memory = np.empty(size + ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % ALIGNMENT
    return memory[begin : begin + size].view(dtype).reshape(shape)
