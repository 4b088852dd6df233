"""Several microbatches to an update: a plan, and `optax.MultiSteps` in a data-parallel step."""

import time
from typing import Any

import jax
import numpy as np
import optax

import plurax as px
from benchmarks import by_hand, sizes
from benchmarks.networks import count_parameters, make_batch, make_task
from benchmarks.workers.jax_setup import carry, need_devices
from benchmarks.workers.serve import Settings, Side, serve


def build(settings: Settings) -> tuple[dict[str, Side], dict[str, Any]]:
    devices, microbatches = settings["devices"], settings["microbatches"]
    need_devices(devices)
    network = sizes.from_json(settings["network"])
    task, batch = make_task(network), make_batch(network, settings["batch"])
    optimizer = optax.adamw(sizes.LEARNING_RATE, weight_decay=sizes.WEIGHT_DECAY)

    begun = time.perf_counter()
    program = px.compile(task, optimizer, px.Plan(data=devices, microbatches=microbatches), batch)
    compiled = time.perf_counter()
    ready = program.place_batch(batch)

    mesh = by_hand.make_mesh(devices)
    params = task.init(jax.random.key(0))
    pieces = [
        by_hand.place_batch(dict(zip(batch, parts, strict=True)), mesh)
        for parts in zip(*(np.split(leaf, microbatches) for leaf in batch.values()), strict=True)
    ]
    every = optax.MultiSteps(optimizer, microbatches)
    step = by_hand.make_step(task.loss, every, mesh)
    state = by_hand.make_state(params, every, mesh)
    begun_by_hand = time.perf_counter()
    step.lower(state, pieces[0]).compile()  # type: ignore[attr-defined]
    compiled_by_hand = time.perf_counter()

    sides = {
        "plurax": carry(lambda state: program.step_placed(state, ready)[0], program.init(0)),
        "optax.MultiSteps": carry(
            lambda state: by_hand.accumulated_step(step, state, pieces), state
        ),
    }
    facts = {
        "parameters": count_parameters(params),
        "plurax_compile_seconds": compiled - begun,
        "other_compile_seconds": compiled_by_hand - begun_by_hand,
    }
    return sides, facts


if __name__ == "__main__":
    serve(build)
