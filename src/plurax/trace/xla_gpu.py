"""What XLA's GPU compiler keeps in memory: rules as data, beside those of CPUs (`xla_cpu`).

It decides by the time that it expects a kernel to take, which is that of its memory traffic: an
operation that reads `r` arrays as large as its result, and is read by `n` kernels, is computed in
each of them where that moves fewer bytes,

    r · n  <  r + 1 + n        read r, write 1, and read it n times

so a `tanh` of one array is never kept, and a sum of two is where three kernels read it. What was
computed for that operation alone is fused first: `x + x³` reads one array. Arrays count by their
bytes: of bfloat16 two are as one of a float32 result.

- A product computes the elementwise operations after it (`plurax.trace.product_epilogues`), and
  nothing of what it multiplies.
- A reduction reads a part of an array where it is: a bucket of gathered parameters is held as long
  as a bias is read from it, and not copied out.
- Of three orders of all kernels the one is taken that needs the least memory; then gradients of
  weights are moved to where they hide a collective (`plurax.trace.kernel_order`).

Kernels of a real GPU are tuned by measurement, where another one may be chosen for a product.

Sources: XLA's `priority_fusion.cc`, and programs compiled for H100
(`benchmarks/absent_memory.py`).
"""

import dataclasses

from plurax.trace import xla_cpu

RULES = dataclasses.replace(
    xla_cpu.RULES,
    moves=frozenset(),
    expensive=frozenset(),
    is_copied=lambda arrays, readers: arrays * readers < arrays + 1 + readers,
    overwrites_reduced=False,
    hoists_masks=True,
    fuses_epilogues=True,
    joins_kernels=True,
    overlaps=True,
    skips_groups=False,
    order="least memory",
    margin=0.12,
)
"""Memory on GPUs."""
