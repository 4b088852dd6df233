"""What a step costs the host, beside a call of the same compiled step with nothing around it.

The parameters are many small arrays, so that there is little to compute and much to hand over. The
facts hold seconds until a call returns, its result waited for outside of the clock.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array

import plurax as px
from benchmarks import sizes
from benchmarks.workers.jax_setup import need_devices
from benchmarks.workers.serve import Settings, Side, serve

WARM_UP = 20
ROWS = 4


def build(settings: Settings) -> tuple[dict[str, Side], dict[str, Any]]:
    plan = px.Plan(**settings["plan"])
    need_devices(plan.data)

    def init(key: Array) -> dict[str, Array]:
        return {f"layer{i}": jnp.full((2, 4), 0.01) for i in range(settings["leaves"])}

    def loss(params: dict[str, Array], batch: dict[str, Array], keys: Array) -> Array:
        return sum(jnp.sum(batch["x"] @ w, axis=1) ** 2 for w in params.values())

    batch = {"x": np.ones((ROWS, 2), np.float32)}
    optimizer = optax.sgd(sizes.LEARNING_RATE, momentum=0.9)
    program = px.compile(px.Task(init=init, loss=loss), optimizer, plan, batch)
    placed, compiled, size = program.place_batch(batch), program.compiled_step, np.int32(ROWS)
    calls = {
        "NumPy batch": lambda state: program.step(state, batch),
        "NumPy batch, bare": lambda state: compiled(state, batch, size),
        "batch on the devices": lambda state: program.step_placed(state, placed),
        "batch on the devices, bare": lambda state: compiled(state, *placed),
    }
    return {}, {"seconds": measure(calls, program.init(0), settings["rounds"])}


def measure(
    calls: dict[str, Callable[[Any], tuple[Any, Any]]], state: Any, rounds: int
) -> dict[str, float]:
    """Median seconds until each call returns; all take turns, on one state."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for round_ in range(WARM_UP + rounds):
        for name, call in calls.items():
            begun = time.perf_counter()
            state, metrics = call(state)
            taken = time.perf_counter() - begun
            metrics["loss"].block_until_ready()
            if round_ >= WARM_UP:
                seconds[name].append(taken)
    return {name: statistics.median(taken) for name, taken in seconds.items()}


if __name__ == "__main__":
    serve(build)
