"""Which values of a block stay in a TPU's fast memory, and so cost no traffic.

Beside the matrix units of a TPU lies a memory that is faster than the large one, of 64 or 128 MiB
(`presets.toml`). Its compiler places there what one kernel computes and later ones read, as long as
there is room; those in use the shortest come first, as in the plan of memory
(`plurax.trace.liveness`).

    128 MiB, less 16 for kernels            bytes      computed, last read   traffic
    h = x w      (4096, 4096) float32       64 MiB     0, 1                  none
    a = gelu(h)  (4096, 4096) float32       64 MiB     1, 5                  written and read

Arguments and results of a block are in the large memory, and what a loop or a collective reads. But
what every iteration of a loop reads, its carry too, is there if it takes no more than half of it:
the weights of a recurrent network are fetched once.

Source: XLA's memory space assignment, `memory_space_assignment.h`.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TypeVar

from plurax.trace.kernels import Kernel
from plurax.trace.step_trace import COLLECTIVES, Value


def near_values(kernels: Sequence[Kernel], fast_memory: float) -> set[Value]:
    """Return the values computed by a block's kernels that stay in a fast memory of so many bytes.

    A value that no kernel of these reads is a result, and not among them.
    """
    if not fast_memory:
        return set()
    far: set[Value] = set()
    computed: dict[Value, int] = {}
    last: dict[Value, int] = {}
    for index, kernel in enumerate(kernels):
        if kernel.inner or kernel.root.name in COLLECTIVES or kernel.root.name == "stack":
            far.update((*kernel.reads, *kernel.outputs))
        last.update(dict.fromkeys(kernel.reads, index))
        computed.update(dict.fromkeys(kernel.outputs, index))
    spans = {v: range(at, last[v] + 1) for v, at in computed.items() if v in last and v not in far}
    return placed(spans, {value: value.bytes for value in spans}, fast_memory)


def resident_values(loop: Kernel, fast_memory: float) -> set[Value]:
    """Return the values that stay in a fast memory of so many bytes through all of a loop."""
    (body,) = loop.root.blocks
    own = {value for kernel in loop.inner[0] for value in kernel.outputs}
    rows = {value for op in body.ops if op.name == "row" for value in op.inputs}
    read = {value for kernel in loop.inner[0] for value in kernel.reads} - own - rows
    if sum(value.bytes for value in read) > fast_memory / 2:
        return set()
    return read | {end for start, end in body.carried if start in read and end is not None}


Held = TypeVar("Held")


def placed(spans: Mapping[Held, range], sizes: Mapping[Held, int], room: float) -> set[Held]:
    """Return what there is room for while it is in use, `spans` of kernels; the shortest first."""
    used: Counter[int] = Counter()
    inside = set()
    for held, span in sorted(spans.items(), key=lambda item: len(item[1])):
        if max(used[index] for index in span) + sizes[held] <= room:
            used.update(dict.fromkeys(span, sizes[held]))
            inside.add(held)
    return inside
