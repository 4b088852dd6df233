"""What the JAX workers share: devices, and sides that carry a state."""

from collections.abc import Callable
from typing import TypeVar

import jax

from benchmarks.workers.serve import Side, SkippedError
from plurax.mesh import cpu_devices

State = TypeVar("State")


def need_devices(count: int) -> None:
    """Virtual devices where JAX runs on the CPU; elsewhere there must be enough. First use of JAX.

    Raises `SkippedError`.
    """
    cpu_devices(count)
    if len(jax.devices()) < count:
        have, kind = len(jax.devices()), jax.devices()[0].device_kind
        raise SkippedError(f"needs {count} devices, and this machine has {have} ({kind})")


def carry(step: Callable[[State], State], state: State) -> Side:
    """A side of which each unit takes the state from the one before; the last is waited for."""

    def run(units: int) -> None:
        nonlocal state
        for _ in range(units):
            state = step(state)
        jax.block_until_ready(state)

    return run
