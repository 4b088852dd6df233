"""What XLA's TPU compiler keeps in memory: rules as data, beside those of GPUs (`xla_gpu`).

Two things are a TPU's own. An array lies in tiles of 8 × 128 numbers: the last two dims of its
layout are padded to multiples of these. The compiler chooses the layout, and so which dims the last
two are; it is taken to choose those that need the fewest bytes:

    f32[6, 96, 3, 12, 64]      64 × 96 last:     6 · 3 · 12 · 64 · 128 numbers, a third padded
    f32[512, 96]               96 × 512 last:    96 · 512 numbers, nothing padded
    f32[16, 6, 197, 197]       16 × 197 last:    6 · 197 · 16 · 256 numbers

And float32 that only products read is kept in bfloat16 (`plurax.trace.product_operands`).

A product computes elementwise what it multiplies, and what follows it: of a dense layer the sum
before GELU is in memory and not what GELU returns, of attention the scores and not the weights. And
what is in the fast memory beside the matrix unit needs none of the large one
(`plurax.trace.liveness.outside`).

Neither is counted on in a program that has a loop. The compiler reports more temporaries for those
than its own table of buffers has, 369 MiB for 252 of a GPT under ZeRO 3, for which no reason was
found.

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


LOOPS = dataclasses.replace(
    xla_gpu.RULES,
    moves=xla_cpu.MOVES,
    hoists_masks=False,
    fuses_chains=False,
    fuses_epilogues=False,
    overlaps=False,
    skips_groups=True,
    order="depth first",
    size=_bytes,
    margin=0.23,
)
"""Memory on TPUs, of programs with loops too."""

RULES = dataclasses.replace(
    LOOPS,
    without_loops=dataclasses.replace(
        LOOPS,
        moves=frozenset(),
        fuses_chains=True,
        fuses_epilogues=True,
        fuses_operands=True,
    ),
)
"""Memory on TPUs."""
