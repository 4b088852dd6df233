"""How many calls may be under way at once."""

from collections import deque

import jax
from jax.sharding import Mesh

MOST_ON_CPU = 16
"""XLA's CPU client takes 32 computations per device. One device that is refused the next while the
others wait for it in a reduction makes them wait until XLA aborts the process (seen with JAX 0.10).
"""


class DispatchLimiter:
    """Keeps calls under way on several CPU devices below XLA's limit; elsewhere does nothing."""

    def __init__(self, mesh: Mesh) -> None:
        self._limited = mesh.size > 1 and mesh.devices.flat[0].platform == "cpu"
        self._waiting: deque[jax.Array] = deque()

    def started(self, result: jax.Array) -> None:
        """Note a call by one of its results; wait for an earlier one where too many run."""
        if self._limited:
            self._waiting.append(result)
            if len(self._waiting) > MOST_ON_CPU:
                self._waiting.popleft().block_until_ready()
