"""What XLA's GPU compiler keeps in memory: rules as data, beside those of CPUs (`xla_cpu`).

It decides by the time that it expects a kernel to take, which is that of its memory traffic: an
operation that reads `r` arrays as large as its result, and is read by `n` kernels, is computed in
each of them where that moves fewer bytes,

    r · n  <  r + 1 + n        read r, write 1, and read it n times

so a `tanh` of one array is never kept, and a sum of two is where three kernels read it.

Sources: XLA's `priority_fusion.cc`, and programs compiled for H100
(`benchmarks/absent_memory.py`).
"""

import dataclasses

from plurax.trace import xla_cpu

RULES = dataclasses.replace(
    xla_cpu.RULES,
    expensive=frozenset(),
    is_copied=lambda arrays, readers: arrays * readers < arrays + 1 + readers,
    overwrites_reduced=False,
    hoists_masks=True,
    order="depth first",
    margin=0.12,
)
"""Memory on GPUs."""
