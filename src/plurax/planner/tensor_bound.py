"""The least seconds in which the devices of `tensor` send to each other, by what was solved.

What each device sends for a row grows with the number of devices, so what is known of a smaller
`tensor` bounds a larger one, over the links that this one spans. By the links of 8 A100 a node, 4
MiB take 1.3 times as long over 8 devices as over 2, and over 16, in two nodes, 2.2 times:

    solved       tensor=2: 2.0 ms for a row
    bound        tensor=16, 32 rows: at least 32 x 2.2 x 2.0 ms = 141 ms
"""

import math
from typing import final

from plurax.machine import Machine

_MESSAGE = 2**22
"""Bytes that a device sends in the all-reduce by which sizes of `tensor` are compared."""


@final
class TensorBound:
    """What is known of each size of `tensor`, on one machine."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._sent: dict[int, float] = {}  # by the size, the seconds of its collectives for one row
        self._seconds: dict[int, float] = {}  # of an all-reduce

    def add(self, size: int, sent: float) -> None:
        """Note the seconds of the collectives over so many devices for one row."""
        self._sent[size] = min(sent, self._sent.get(size, math.inf))

    def of_row(self, size: int) -> float:
        """Return the least seconds of the collectives over so many devices for one row."""
        return max(
            (
                sent * self._all_reduce(size) / self._all_reduce(known)
                for known, sent in self._sent.items()
                if known <= size
            ),
            default=0.0,
        )

    def _all_reduce(self, size: int) -> float:
        """Return the seconds of one all-reduce over devices beside each other."""
        if size not in self._seconds:
            self._seconds[size] = self._machine.collective_seconds(
                "all-reduce", _MESSAGE, size, 1, mesh_devices=self._machine.devices
            )
        return self._seconds[size]
