"""What XLA's TPU compiler keeps in memory: rules as data, beside those of GPUs (`xla_gpu`).

Two things are a TPU's own. An array lies in tiles of 8 × 128 numbers: the last two dims of its
layout are padded to multiples of these. The compiler chooses the layout, and so which dims the last
two are; it is taken to choose those that need the fewest bytes:

    f32[6, 96, 3, 12, 64]      64 × 96 last:     6 · 3 · 12 · 64 · 128 numbers, a third padded
    f32[512, 96]               96 × 512 last:    96 · 512 numbers, nothing padded
    f32[16, 6, 197, 197]       16 × 197 last:    6 · 197 · 16 · 256 numbers

And float32 that only products read is kept in bfloat16 (`plurax.trace.product_operands`).

A product computes elementwise what it multiplies, and what follows it: of a dense layer the sum
before GELU is in memory and not what GELU returns, of attention the scores and not the weights. One
number of each row that is scattered into zeros, as by the gradient of a cross entropy, is selected
so, and a product of bfloat16 is written in float32 if that is what is read.

A loop's body rounds nothing that is the same in every iteration: weights that it only multiplies
are rounded once, before the loop, and a stack of them is in memory in bfloat16 too until the last
loop that reads it. An all-reduce writes where it reads; what a barrier orders is written.

What is in the fast memory beside the matrix unit needs none of the large one, in loops as
elsewhere, a loop's carry and stacks too (`plurax.trace.liveness.outside`). Of a small network
nearly all is there:

    32,768 words × 256, four microbatches, on v5e       large memory     fast memory
    table of words, an argument                         32 MiB           32 MiB, fetched
    sum of its gradient, in the carry                                    32 MiB
    logits, (2, 128, 32768) float32                                      32 MiB

Sources: XLA's documentation of tiled layouts (https://openxla.org/xla/tiled_layout), and programs
compiled for v5e and v5p (`benchmarks/absent_memory.py`).
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence

import jax.numpy as jnp

from plurax.trace import xla_cpu, xla_gpu
from plurax.trace.step_trace import Value

ROWS, COLUMNS = 8, 128
"""The numbers of a tile, along the last two dims of a layout."""

SMALL = 512
"""The bytes from which on an array's memory begins."""


def tiled_size(shape: Sequence[int]) -> int:
    """Return how many numbers an array has in memory, padded to whole tiles.

    >>> tiled_size((512, 96)) == 512 * 96, tiled_size((3,)), tiled_size((2, 197, 197))
    (True, 128, 102400)
    """
    dims = [dim for dim in shape if dim != 1]
    if len(dims) < 2:
        return _padded(math.prod(dims), COLUMNS)
    size = math.prod(dims)
    return min(
        size // max(a * b, 1) * _padded(a, ROWS) * _padded(b, COLUMNS)
        for a, b in itertools.permutations(dims, 2)
    )


def _padded(size: int, tile: int) -> int:
    return -(-size // tile) * tile


def _bytes(value: Value, multiplied: bool) -> int:
    if jnp.issubdtype(value.dtype, jnp.number) or value.dtype == bool:
        return max(tiled_size(value.shape) * (2 if multiplied else value.dtype.itemsize), SMALL)
    return value.bytes


RULES = dataclasses.replace(
    xla_gpu.RULES,
    fusible=xla_cpu.FUSIBLE - {"order_after"},
    hoists_casts=True,
    hoists_masks=False,
    fuses_operands=True,
    overlaps=False,
    sums_in_place=True,
    skips_groups=True,
    size=_bytes,
    margin=0.3,
    least_margin=64 * 2**20,
)
"""Memory on TPUs."""
