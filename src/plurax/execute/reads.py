"""Which rows of resident data each step of each member reads, on each device.

A member's order is a function of `(seed, member, epoch, position)` (`plurax.resample`). Working it
out for one step costs more in starting small loops than in arithmetic, so a member keeps the rows
of a block of steps, and works out the next block when it gets there. What is gathered is gathered
once: without a barrier the compiler would gather again in every loop that reads it, for the first
product once for each of its columns.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree

from plurax.members import MemberArrays
from plurax.resample import Bootstrap, Everything, Resample, stream_row

ORDERED = 4096
"""Rows of a member whose order is worked out at once."""


@dataclasses.dataclass(frozen=True)
class EpochSpec:
    """How members read data that stay on the devices.

    **Fields:** `resample`; `count`, rows of the data; `length`, draws in an epoch, the same for all
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
        """Whether the order of an epoch changes: not where every member's one batch is all of it.

        What members of unequal sizes do is decided for each, in `stream_row`.
        """
        equal = isinstance(self.resample, Everything | Bootstrap) and self.length == self.count
        return self.shuffle and not (equal and self.length <= self.batch_size)


@dataclasses.dataclass(frozen=True)
class Reads:
    """A `EpochSpec` on one device of `split`: which rows, of each step the device's own part.

    **Fields:** `rows`, of a step on all devices, filled up.
    """

    reading: EpochSpec
    rows: int
    split: int

    @property
    def size(self) -> int:
        """Rows of a step on this device."""
        return self.rows // self.split

    @property
    def block(self) -> int:
        """Steps whose order is worked out at once."""
        return max(1, min(self.reading.steps, ORDERED // self.size))

    @property
    def fixed(self) -> bool:
        """Whether every step reads the same rows."""
        return self.reading.steps == 1 and not self.reading.reorders

    @property
    def _as_they_lie(self) -> bool:
        reading = self.reading
        unsampled = isinstance(reading.resample, Everything) and not reading.reorders
        return unsampled and self.size == reading.count == self.rows == reading.length

    def count(self, index: Array) -> Array:
        """How many rows of an epoch's step are real; elementwise."""
        reading = self.reading
        # Whole epochs have equal steps but the last; `count` is a constant where it can be.
        if reading.length % reading.batch_size == 0:
            return jnp.full_like(index, reading.batch_size, jnp.int32)
        left = reading.length - index * reading.batch_size
        return jnp.clip(left, 1, reading.batch_size).astype(jnp.int32)

    def block_rows(self, member: MemberArrays, t: Array) -> Int[Array, "S B"]:
        """The rows of a member's steps, of the whole block in which step `t` is."""
        reading = self.reading
        index = t % reading.steps
        index_S = index - index % self.block + jnp.arange(self.block, dtype=jnp.int32)
        first = jax.lax.axis_index("data") * self.size if self.split > 1 else 0
        place_B = first + jnp.arange(self.size, dtype=jnp.int32)
        place_SB = place_B % self.count(index_S)[:, None]
        return stream_row(
            reading.resample,
            reading.count,
            jnp.uint32(reading.count) if isinstance(reading.resample, Everything) else member.sizes,
            member.seeds,
            member.numbers,
            (t // reading.steps).astype(jnp.uint32),
            (index_S[:, None] * reading.batch_size + place_SB).astype(jnp.uint32),
            shuffle=reading.reorders,
            whole=reading.length if reading.length <= reading.batch_size else None,
        )

    def take(self, data: PyTree, rows: Int[Array, "S B"], t: Array) -> PyTree:
        """The rows of step `t` of a block, gathered once: not again in whatever reads them."""
        if self._as_they_lie:
            return data
        row = rows[t % self.reading.steps % self.block]
        taken = jax.tree.map(lambda leaf: leaf.at[row].get(mode="promise_in_bounds"), data)
        return jax.lax.optimization_barrier(taken)
