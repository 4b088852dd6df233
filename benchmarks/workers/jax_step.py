"""A training step of plurax and the same step by hand, in one process.

The batch comes as NumPy arrays, or is on the devices already: as `place_batch` returned it
(`placed`), or as arrays that `step` is given (`rows`). Of members there is one step for all, beside
`jax.vmap` of the step by hand.
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
    count = settings["members"]
    members = count and px.Members(seeds=count)
    plan = px.Plan(data=settings["devices"])
    program = px.compile(task, optimizer, plan, batch, members=members)
    compiled = time.perf_counter()
    ready = program.place_batch(batch)

    mesh = by_hand.make_mesh(settings["devices"])
    keys = jax.random.split(jax.random.key(0), count) if count else jax.random.key(0)
    params = (jax.vmap(task.init) if count else task.init)(keys)
    step = by_hand.make_step(task.loss, optimizer, mesh, members=bool(count))
    rows = by_hand.place_batch(batch, mesh)

    def fresh() -> by_hand.State:
        return by_hand.make_state(params, optimizer, mesh, members=bool(count))

    begun_by_hand = time.perf_counter()
    step.lower(fresh(), rows).compile()  # type: ignore[attr-defined]
    compiled_by_hand = time.perf_counter()

    def place_and_step(state: by_hand.State) -> by_hand.State:
        # On one device jit takes NumPy arrays as they are, which is faster than placing them.
        return step(state, batch if mesh.size == 1 else by_hand.place_batch(batch, mesh))[0]

    init = program.init if count else lambda: program.init(0)
    sides = {
        "plurax": carry(lambda state: program.step(state, batch)[0], init()),
        "plurax placed": carry(lambda state: program.step_placed(state, ready)[0], init()),
        "plurax rows": carry(lambda state: program.step(state, ready.rows)[0], init()),
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
