"""Limit the number of computations dispatched at once on several CPU devices."""

from collections import deque

import jax
from jax.sharding import Mesh

from plurax.distributed.global_arrays import one_at_a_time, own_devices

MOST_ON_CPU = 16
"""The largest number of computations in flight; XLA's CPU client accepts 32 per device.

At the limit one device cannot start the next computation while the others wait for that device
inside a collective, until XLA aborts the process (seen with JAX 0.10).
"""


class DispatchLimiter:
    """Keep computations in flight on several CPU devices below XLA's limit.

    On one device, and on other platforms, it does nothing; on the CPUs of several processes it lets
    them run one at a time (`one_at_a_time`).
    """

    def __init__(self, mesh: Mesh) -> None:
        # Decided once: this runs in every step.
        devices = mesh.devices.flatten().tolist()
        on_cpu = devices[0].platform == "cpu"
        self._one_at_a_time = on_cpu and len(own_devices(devices)) < len(devices)
        self._limited = on_cpu and not self._one_at_a_time and len(devices) > 1
        self._waiting: deque[jax.Array] = deque()

    def started(self, result: jax.Array) -> None:
        """Record a dispatched computation by a result; above the limit block on the oldest."""
        if self._one_at_a_time:
            one_at_a_time(result)
        elif self._limited:
            self._waiting.append(result)
            if len(self._waiting) > MOST_ON_CPU:
                self._waiting.popleft().block_until_ready()
