"""Add up gradients over devices in fewer bits than they are computed in.

Each device has a sum over its own rows, in float32. With `Plan(reduce_dtype="bfloat16")` it rounds
that sum, devices add up what is rounded, and the result is float32 again: half the bytes are sent.
Example, a gradient `f32[512, 512]` under `Plan(data=4)`:

    platform    on each device                      sent
    gpu, tpu    convert to bf16, psum, convert      all-reduce bf16[512, 512]    512 KiB
    cpu         reduce_precision, psum, again       all-reduce f32[512, 512]     1 MiB

XLA's CPU compiler adds up nothing in bfloat16 over devices (within a partly manual `shard_map` it
aborts), so CPUs round to the same numbers and send them as they are. Both give the same result, but
for how the sum itself rounds: a CPU rounds it once at the end, others after each addition, too.

Only float32 and float64 are rounded. bfloat16 and float16 travel as they are; so do complex
numbers, which no collective adds up in bfloat16.
"""

import dataclasses
from collections.abc import Callable, Collection, Sequence

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

_ROUNDED = (jnp.float32, jnp.float64)
"""The dtypes of sums that are rounded."""
_EXPONENT_BITS, _MANTISSA_BITS = 8, 7
"""Those of bfloat16."""


@dataclasses.dataclass(frozen=True)
class SumRounding:
    """Rounds what devices add up, and their sums.

    **Fields:** `dtype`, `bfloat16`, or None to round nothing; `platform` of the devices, as
    `Axes.platform`.
    """

    dtype: str | None = None
    platform: str | None = None

    def term(self, array: Array) -> Array:
        """Return a device's array as it is sent: of bfloat16's numbers, on accelerators also of
        its dtype."""
        if not self.rounds(array.dtype):
            return array
        return _rounded(array) if self.platform == "cpu" else array.astype(self.dtype)

    def total(self, total: Array, dtype: jnp.dtype) -> Array:
        """Return the sum of the terms of arrays of a dtype, in that dtype."""
        if not self.rounds(dtype):
            return total
        return _rounded(total) if self.platform == "cpu" else total.astype(dtype)

    def sums(
        self, add_up: Callable[[list[Array]], Sequence[Array]], arrays: Sequence[Array],
        exact: Collection[int] = (),
    ) -> list[Array]:  # fmt: skip
        """Return `add_up(arrays)`, all rounded but those at the indices `exact`."""
        own = [EXACT if index in exact else self for index in range(len(arrays))]
        sums = add_up([one.term(array) for one, array in zip(own, arrays, strict=True)])
        each = zip(own, sums, arrays, strict=True)
        return [one.total(total, array.dtype) for one, total, array in each]

    def rounds(self, dtype: jnp.dtype) -> bool:
        """Return whether arrays of a dtype are rounded."""
        return self.dtype is not None and dtype in _ROUNDED


EXACT = SumRounding()
"""Rounds nothing."""


def _rounded(array: Array) -> Array:
    return lax.reduce_precision(array, _EXPONENT_BITS, _MANTISSA_BITS)
