"""Kernels with several outputs: what XLA's GPU compiler computes at once, as it reads it once.

After it has fused operations into the kernels that read them (`plurax.trace.kernels`), it joins
kernels over the same numbers, so that what they share is read once:

    Adam, of one parameter        apart                         together
    m = b1 * m + (1 - b1) * g     reads m, g    writes m        reads p, m, v, g
    v = b2 * v + (1 - b2) * g²    reads v, g    writes v        writes p, m, v
    p = p - lr * m / sqrt(v)      reads p, m, v writes p        7 arrays moved for 10

Kernels are joined that go over equally many numbers, if one reads what the other reads or writes,
number by number, and nothing has to run in between. Reductions are among them: over the last dims a
kernel has whole rows, and may read what it reduced; over other dims only reductions are joined.

    a softmax, (B, T)             apart                         together
    m = max(x, -1)                reads x       writes (B,)     reads x
    s = sum(exp(x - m), -1)       reads x, m    writes (B,)     writes y, and m and s
    y = exp(x - m) / s            reads x, m, s writes y        2 arrays moved for 4

Source: XLA's `multi_output_fusion.cc` for GPUs, and programs compiled for H100.
"""

from collections.abc import Sequence
from typing import Any

from plurax.jaxpr.compat import REDUCTIONS
from plurax.jaxpr.product_dims import PRODUCTS
from plurax.trace.kernels import SAME, Kernel
from plurax.trace.step_trace import Value
from plurax.trace.xla_cpu import MOVES


def joined(kernels: Sequence[Kernel]) -> list[list[Kernel]]:
    """Return kernels, in order, in groups that run as one."""
    groups: list[list[Kernel]] = []
    # For each value the group that computes it; for each group those that have to run before it.
    source: dict[Value, int] = {}
    before: list[set[int]] = []
    candidates: dict[tuple[Any, Value], int] = {}
    for kernel in kernels:
        over, needs = _numbers(kernel), {source[v] for v in kernel.reads if v in source}
        shared = [] if over is None else _shared(kernel)
        home = next((candidates[over, v] for v in shared if (over, v) in candidates), None)
        apart = needs if over and over[1] else needs - {home}
        if home is not None and any(n == home or home in before[n] for n in apart):
            home = None
        if home is None:
            home = len(groups)
            groups.append([])
            before.append(set())
        groups[home].append(kernel)
        before[home] |= (needs - {home}).union(*(before[n] for n in needs))
        source.update(dict.fromkeys(kernel.outputs, home))
        for value in (*shared, *kernel.outputs) if over is not None else ():
            if value.size == over[0]:
                candidates[over, value] = home
    return groups


def _shared(kernel: Kernel) -> list[Value]:
    """Return the values that a kernel reads number by number."""
    if kernel.root.name not in REDUCTIONS:
        return [value for value, how in kernel.reads.items() if how == SAME]
    moved = not MOVES.isdisjoint(op.name for op in kernel.ops)
    size = kernel.root.inputs[0].size
    return [] if moved else [value for value in kernel.reads if value.size == size]


def _numbers(kernel: Kernel) -> Any:
    """Return over how many numbers a kernel goes, and of a reduction which dims; None if another
    kernel does not join it."""
    root = kernel.root
    if kernel.inner or not root.outputs or any(op.name in PRODUCTS for op in kernel.ops):
        return None
    if root.name in REDUCTIONS and root.inputs:
        axes, rank = tuple(root.params["axes"]), len(root.inputs[0].shape)
        rows = axes == tuple(range(rank - len(axes), rank))
        return root.inputs[0].size, None if rows else axes
    if root.name in kernel.rules.fusible - MOVES:
        return root.outputs[0].size, None
    return None


def unordered(groups: Sequence[Sequence[Kernel]], some: Sequence[int]) -> list[frozenset[int]]:
    """Return for each group which of `some` it may run beside: neither waits for the other.

    **Arguments:** `groups`, in order; `some`, the indices of a few of them. What is returned are
    places in `some`.
    """
    places = {group: 1 << place for place, group in enumerate(some)}
    source = {v: i for i, group in enumerate(groups) for one in group for v in one.outputs}
    # Sets of places as the bits of a number: of those before a group, and of those after it.
    before, after = [0] * len(groups), [0] * len(groups)
    needs = [
        {source[value] for one in group for value in one.reads if source.get(value, i) != i}
        for i, group in enumerate(groups)
    ]
    # A group stands where its first kernel does, and may need one that stands behind it.
    grown = True
    while grown:
        sizes = [*before, *after]
        for index, own in enumerate(needs):
            for need in own:
                before[index] |= before[need] | places.get(need, 0)
        for index, own in reversed([*enumerate(needs)]):
            for need in own:
                after[need] |= after[index] | places.get(index, 0)
        grown = sizes != [*before, *after]
    every = range(len(some))
    return [
        frozenset(place for place in every if not (b | a) >> place & 1)
        for b, a in zip(before, after, strict=True)
    ]
