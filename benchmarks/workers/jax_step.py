"""A training step of plurax and the same step by hand, in one process.

The batch comes as NumPy arrays, or (`placed`) is on the devices already.
"""

import time
from typing import Any

import jax
import optax

import plurax as px
from benchmarks import by_hand, sizes
from benchmarks.networks import count_parameters, make_batch, make_task
from benchmarks.workers.jax_setup import carry, need_devices
from benchmarks.workers.serve import Settings, Side, serve


def build(settings: Settings) -> tuple[dict[str, Side], dict[str, Any]]:
    need_devices(settings["devices"])
    network = sizes.from_json(settings["network"])
    task, batch = make_task(network), make_batch(network, settings["batch"])
    optimizer = optax.adamw(sizes.LEARNING_RATE, weight_decay=sizes.WEIGHT_DECAY)

    begun = time.perf_counter()
    program = px.compile(task, optimizer, px.Plan(data=settings["devices"]), batch)
    compiled = time.perf_counter()
    ready = program.place_batch(batch)

    mesh = by_hand.make_mesh(settings["devices"])
    params = task.init(jax.random.key(0))
    step = by_hand.make_step(task.loss, optimizer, mesh)
    rows = by_hand.place_batch(batch, mesh)
    begun_by_hand = time.perf_counter()
    step.lower(by_hand.make_state(params, optimizer, mesh), rows).compile()  # type: ignore[attr-defined]
    compiled_by_hand = time.perf_counter()

    def fresh() -> by_hand.State:
        return by_hand.make_state(params, optimizer, mesh)

    def place_and_step(state: by_hand.State) -> by_hand.State:
        # On one device jit takes NumPy arrays as they are, which is faster than placing them.
        return step(state, batch if mesh.size == 1 else by_hand.place_batch(batch, mesh))[0]

    sides = {
        "plurax": carry(lambda state: program.step(state, batch)[0], program.init(0)),
        "plurax placed": carry(lambda state: program.step_placed(state, ready)[0], program.init(0)),
        "by hand": carry(place_and_step, fresh()),
        "by hand placed": carry(lambda state: step(state, rows)[0], fresh()),
    }
    facts = {
        "parameters": count_parameters(params),
        "plurax_compile_seconds": compiled - begun,
        "other_compile_seconds": compiled_by_hand - begun_by_hand,
    }
    return sides, facts


if __name__ == "__main__":
    serve(build)
