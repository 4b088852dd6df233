"""The least seconds in which the devices of `tensor` send to each other, by what was solved.

What each device sends for a row grows with the number of devices, so what is known of a smaller
`tensor` bounds a larger one, over the links that this one spans. By the links of 8 A100 a node, 4
MiB take 1.3 times as long over 8 devices as over 2, and over 16, in two nodes, 2.2 times:

    solved       tensor=2, microbatches of 4 rows: 2.0 ms for a row
    bound        tensor=16, microbatches of 4 rows, 32 in a step: at least 32 x 2.2 x 2.0 = 141 ms

But devices may also divide the rows of a microbatch instead of its weights, and send the gradients
of these, once for any number of rows. Of larger microbatches no more is known than the shorter one:

    gradients    40 ms over 16 devices
    bound        tensor=16, microbatches of 16 rows, 32 in a step: 2 x min(16 x 4.4, 40) = 80 ms
"""

from typing import final

from plurax.machine import Machine
from plurax.plan import Remat


@final
class TensorBound:
    """What is known of each size of `tensor`, on one machine.

    **Arguments:** `gradients`, the bytes of those of all parameters.
    """

    def __init__(self, machine: Machine, gradients: float) -> None:
        self._machine, self._gradients = machine, gradients
        # By the size and the remat policy, rows of a microbatch and the seconds for one of them.
        self._sent: dict[int, dict[Remat, set[tuple[float, float]]]] = {}
        self._least: dict[tuple[int, float], float] = {}  # what `of_row` says by what is known

    def add(self, size: int, remat: Remat, rows: float, sent: float) -> None:
        """Note the seconds of the collectives over so many devices for one row of a microbatch."""
        known = self._sent.setdefault(size, {}).setdefault(remat, set())
        if (rows, sent) not in known:
            known.add((rows, sent))
            self._least.clear()

    def of_row(self, size: int, rows: float) -> float:
        """Return the least seconds of the collectives over so many devices for one of the rows of
        a microbatch."""
        if (size, rows) in self._least:  # a hundred thousand candidates have few of them
            return self._least[size, rows]
        least = 0.0
        for smaller, policies in self._sent.items():
            if smaller <= size:
                longer = self._all_reduce(size, _MESSAGE) / self._all_reduce(smaller, _MESSAGE)
                of_policies = (
                    max(self._for_rows(size, rows, known, longer * sent) for known, sent in some)
                    for some in policies.values()
                )
                least = max(least, min(of_policies))
        self._least[size, rows] = least
        return least

    def _for_rows(self, size: int, rows: float, known: float, sent: float) -> float:
        """Return what one of some rows takes at the least, by what one of `known` rows takes."""
        if rows <= known:
            return sent
        gradients = self._all_reduce(size, 2 * (size - 1) / size * self._gradients)
        return min(sent, max(known * sent, gradients) / rows)

    def _all_reduce(self, size: int, sent: float) -> float:
        """Return the seconds of one all-reduce over devices beside each other."""
        machine = self._machine
        return machine.collective_seconds("all-reduce", sent, size, 1, mesh_devices=machine.devices)


_MESSAGE = 2**22
"""Bytes that a device sends in the all-reduce by which sizes of `tensor` are compared."""
