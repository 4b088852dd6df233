"""The plans that an expert would try first, for any model and machine.

A search ends after so many evaluations. These have as many of their own, and are looked at until
none of them is expected to be faster than the fastest estimate.

    mesh          devices            data; data x tensor in a node; these x a pipeline
    devices       all, the largest power of two, a node, those of one kind where they differ, one
    microbatches  of 1, 2, 4 or 8 rows, or one; where devices differ, in proportion to their speed
    zero, remat   every level, every policy
    schedule      1f1b, eager-1f1b, gpipe

    2 nodes of 8, 64 rows    data=16; data=8; data=8, tensor=2; data=2, tensor=8;
                             data=4, pipeline=2, tensor=2, microbatches=16; ...

Of tensor parallelism the shardings are those of the integer program: as good as Megatron's where
bytes count (`tests/unit/test_golden_plans.py`), not always where starting kernels does (decision
0066).

Sources: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM", section 3 (tensor in a node, pipelines across nodes, microbatches of few rows);
Rajbhandari et al. 2020, "ZeRO".
"""

import dataclasses
import heapq
import itertools
import math
import operator
from collections.abc import Sequence

from plurax import errors
from plurax.machine import Machine
from plurax.machine_fields import Level
from plurax.planner.sizes import Sizes

ROWS = (1, 2, 4, 8)
"""The rows of a microbatch on one device that experts try."""

_SCHEDULES = ("1f1b", "eager-1f1b", "gpipe")


def used_devices(machine: Machine) -> frozenset[int]:
    """Return the numbers of devices that an expert uses of a machine.

    >>> sorted(used_devices(Machine.preset("36xGB200-186GB", nodes=2)))
    [1, 36, 64, 72]
    """
    node = machine.levels[0].devices if machine.levels else 1
    kinds = (count for count, _ in machine.groups)
    return frozenset({machine.devices, 1 << machine.devices.bit_length() - 1, node, 1, *kinds})


def is_expert(sizes: Sizes, machine: Machine, batch_size: int) -> bool:
    """Whether sizes are those of a plan in the table above."""
    node = machine.levels[0].devices if machine.levels else 1
    rows = -(-batch_size // sizes.parts)
    return (
        sizes.devices in used_devices(machine)
        and sizes.tensor <= node
        and (sizes.microbatches == 1 or rows in ROWS or isinstance(sizes.microbatches, tuple))
        and sizes.schedule in _SCHEDULES
    )


def is_plain(sizes: Sizes) -> bool:
    """Whether sizes are of data parallelism alone, as one writes it without thinking of memory."""
    alone = sizes.pipeline == sizes.tensor == sizes.microbatches == 1
    return alone and sizes.zero == 0 and sizes.remat == "none"


def in_proportion(
    machine: Machine, data: int, tensor: int, batch_size: int, dtype: str
) -> list[tuple[int, ...]]:
    """Return numbers of microbatches for replicas on devices that differ, few microbatches first.

    Each microbatch goes to the replica that is the first to be done with it. More of them are taken
    only where the slowest replica is done earlier for it: they make smaller products.

    >>> kinds = [(1, Machine.preset("A100-80GB")), (1, Machine.preset("V100-32GB"))]
    >>> pair = Machine.uneven("pair", kinds, [Level("node", 2, 1e11)])
    >>> in_proportion(pair, 2, 1, 64, "float32"), in_proportion(pair, 2, 1, 12, "float16")
    ([(3, 1), (7, 1), (15, 1)], [(2, 1), (3, 1)])
    """
    if not machine.groups or data * tensor != machine.devices:
        return []
    try:
        rates = [
            machine.rates_of(range(index * tensor, (index + 1) * tensor)) for index in range(data)
        ]
    except errors.MachineError:
        return []
    seconds = [one.product_seconds(4096, 4096, 4096, dtype) for one in rates]
    proportions: list[tuple[int, ...]] = []
    fastest = max(seconds) / data  # of equal rows
    for parts in range(data + 1, min(batch_size, _MOST_PARTS * data) + 1):
        if batch_size % parts:
            continue
        counts, ends = [1] * data, [(2 * one, index) for index, one in enumerate(seconds)]
        heapq.heapify(ends)
        for _ in range(parts - data):
            end, index = heapq.heappop(ends)
            counts[index] += 1
            heapq.heappush(ends, (end + seconds[index], index))
        length = max(map(operator.mul, counts, seconds)) / parts
        if len({*counts}) > 1 and length < fastest * _FASTER:
            proportions.append(tuple(counts))
            fastest = length
    return proportions


_MOST_PARTS = 32
"""The most microbatches for each replica, on the average."""

_FASTER = 0.98
"""Of a step, what it takes at most with more microbatches."""


def machines_of_kinds(machine: Machine) -> list[Machine]:
    """Return for each kind of a machine's devices the machine that they are alone.

    >>> from plurax.machine_fields import Level
    >>> kinds = [(4, Machine.preset("A100-80GB")), (12, Machine.preset("V100-32GB"))]
    >>> lab = Machine.uneven("lab", kinds, [Level("node", 8, 1e11), Level("rack", 16, 6e9)])
    >>> for some in machines_of_kinds(lab):
    ...     print(some.name, [level.devices for level in some.levels])
    devices 0 to 3 of lab, A100-80GB [4]
    devices 4 to 15 of lab, V100-32GB [4, 12]
    """
    ends = list(itertools.accumulate(count for count, _ in machine.groups))
    machines = []
    for (count, kind), end in zip(machine.groups, ends, strict=True):
        name = f"devices {end - count} to {end - 1} of {machine.name}, {kind.name}"
        machines.append(part_of(machine.levels, kind, name, end - count, count))
    return machines


def part_of(levels: Sequence[Level], kind: Machine, name: str, first: int, count: int) -> Machine:
    """Return the machine that `count` devices of a kind are alone, from the `first` on, of those
    that `levels` of links join."""
    inside: list[Level] = []
    for level in levels:
        # A group that begins inside a node has blocks of the devices that it shares with one.
        devices = min(math.gcd(level.devices, first), count)
        if level is levels[-1]:
            devices = count
        if devices > (inside[-1].devices if inside else 1):
            inside.append(dataclasses.replace(level, devices=devices))
    return dataclasses.replace(kind, name=name, levels=inside)
