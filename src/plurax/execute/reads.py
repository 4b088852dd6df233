"""Compute which rows of resident data each member reads in each step, on each device.

A member's order is a function of `(seed, member, epoch, position)` (`plurax.resample`), computed
inside the compiled loop. For a single step that costs more in starting small loops than in
arithmetic, so the loop carries the rows of a block of steps and computes the next block when it
reaches it. Example: 10 rows, `batch_size=4`, `Plan(data=2)`, steps = 3, all in one block:

    positions of the epoch    0 1 2 3 | 4 5 6 7 | 8 9          3 steps; the last has 2 real rows
    count(index)              4         4         2
    rows per device (size)    2: device 0 has the first two of each step, device 1 the others
    block_rows on device 0    (3, 2)   positions [[0 1] [4 5] [8 9]]
    block_rows on device 1    (3, 2)   positions [[2 3] [6 7] [8 9]]    padding repeats the batch
    each position -> row      `stream_row`: shuffled, then resampled

The gathered rows pass through an optimization barrier. Without it XLA fuses the gather into every
loop that reads the rows; into the first matrix product it does so once for each column.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree

from plurax.execute.rows import first_row
from plurax.members import MemberArrays
from plurax.resample import Bootstrap, Everything, Resample, stream_row

ORDERED = 4096
"""The number of rows per member whose order is computed at once."""


@dataclasses.dataclass(frozen=True)
class EpochSpec:
    """How members read data that stay on the devices.

    **Fields:** `resample`; `count`, rows of the data; `length`, draws in an epoch, equal for all
    members; `batch_size`; `steps` of an epoch; `shuffle`.
    """

    resample: Resample
    count: int
    length: int
    batch_size: int
    steps: int
    shuffle: bool

    @property
    def reorders(self) -> bool:
        """Whether the order changes between epochs; not if every member's one batch is all rows.

        `stream_row` decides it per member where members have different sizes.
        """
        equal = isinstance(self.resample, Everything | Bootstrap) and self.length == self.count
        return self.shuffle and not (equal and self.length <= self.batch_size)


@dataclasses.dataclass(frozen=True)
class Reads:
    """An `EpochSpec` on one device of `data`: the rows of each step that this device reads.

    **Fields:** `reading`; `rows`, of a step on all devices, padding included; `parts`, the number
    of microbatches of each device of the mesh axis `data`.
    """

    reading: EpochSpec
    rows: int
    parts: Sequence[int]

    @property
    def size(self) -> int:
        """The number of rows of a step on this device."""
        return self.rows // len(self.parts)

    @property
    def block(self) -> int:
        """The number of steps whose order is computed at once."""
        return max(1, min(self.reading.steps, ORDERED // self.size))

    @property
    def fixed(self) -> bool:
        """Whether every step reads the same rows."""
        return self.reading.steps == 1 and not self.reading.reorders

    @property
    def _as_they_lie(self) -> bool:
        """Whether a step reads all data in their stored order, so that no gather is needed."""
        reading = self.reading
        unsampled = isinstance(reading.resample, Everything) and not reading.reorders
        return unsampled and self.size == reading.count == self.rows == reading.length

    def count(self, index: Array) -> Array:
        """Return how many rows of an epoch's step are real; elementwise over `index`."""
        reading = self.reading
        # Only the last step of an epoch can be smaller. Where none is, return a constant, which XLA
        # can fold.
        if reading.length % reading.batch_size == 0:
            return jnp.full_like(index, reading.batch_size, jnp.int32)
        left = reading.length - index * reading.batch_size
        return jnp.clip(left, 1, reading.batch_size).astype(jnp.int32)

    def block_end(self, t: Array) -> Array:
        """Return the first step behind the block that contains step `t`; it ends with the epoch."""
        index = t % self.reading.steps
        return t + jnp.minimum(self.block - index % self.block, self.reading.steps - index)

    def block_rows(self, member: MemberArrays, t: Array) -> Int[Array, "S B"]:
        """Return the rows `(S, B)` of a member for the block of S steps that contains step `t`."""
        reading = self.reading
        index = t % reading.steps
        index_S = index - index % self.block + jnp.arange(self.block, dtype=jnp.int32)
        place_B = first_row(self.parts, self.size) + jnp.arange(self.size, dtype=jnp.int32)
        place_SB = place_B[None, :] % self.count(index_S)[:, None]
        return stream_row(
            reading.resample,
            reading.count,
            jnp.uint32(reading.count) if isinstance(reading.resample, Everything) else member.sizes,
            member.seeds,
            member.indices,
            (t // reading.steps).astype(jnp.uint32),
            (index_S[:, None] * reading.batch_size + place_SB).astype(jnp.uint32),
            shuffle=reading.reorders,
            whole=reading.length if reading.length <= reading.batch_size else None,
        )

    def take(self, data: PyTree, rows: Int[Array, "S B"], t: Array) -> PyTree:
        """Gather the rows of step `t` from its block, once for all operations that read them."""
        if self._as_they_lie:
            return data
        row = rows[t % self.reading.steps % self.block]
        taken = jax.tree.map(lambda leaf: leaf.at[row].get(mode="promise_in_bounds"), data)
        return jax.lax.optimization_barrier(taken)
