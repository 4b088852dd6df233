"""Plans of one network on 8 virtual devices: what was predicted, and what a step takes and holds.

The machine is measured in this process first. All plans are compiled; then they take turns, so that
a disturbance falls on all.
"""

import statistics
import time
from typing import Any

import jax
import numpy as np
import optax

import plurax as px
from benchmarks import sizes
from benchmarks.networks import make_batch, make_task
from benchmarks.workers.jax_setup import need_devices
from benchmarks.workers.serve import Settings, Side, serve


def build(settings: Settings) -> tuple[dict[str, Side], dict[str, Any]]:
    need_devices(settings["devices"])
    network = sizes.from_json(settings["network"])
    task, batch = make_task(network), make_batch(network, settings["batch"])
    optimizer = optax.adamw(sizes.LEARNING_RATE, weight_decay=sizes.WEIGHT_DECAY)
    machine = px.analysis.measure_machine()
    programs, predicted, memory = {}, {}, {}
    for given in settings["plans"]:
        rules = settings["rules"] if given.get("tensor", 1) > 1 else {}
        plan = px.Plan(**given, shardings=rules)
        found = px.estimate(task, optimizer, plan, batch, machine)
        program = px.compile(task, optimizer, plan, batch)
        name = plan.sizes_text()
        predicted[name] = {"seconds": found.seconds, "bytes": found.peak}
        memory[name] = program.memory().peak
        programs[name] = (program, program.init(0))
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for round_ in range(settings["repeats"] + 1):
        for name, (program, state) in programs.items():
            begun = time.perf_counter()
            state, metrics = program.step(state, batch)
            jax.block_until_ready((state, metrics))
            if round_:
                seconds[name].append(time.perf_counter() - begun)
            programs[name] = (program, state)
    measured = {
        name: {"seconds": statistics.median(taken), "bytes": memory[name]}
        for name, taken in seconds.items()
    }
    facts = {"machine": machine.to_toml(), "predicted": predicted, "measured": measured}
    return {}, facts | {"parameters": int(np.sum([x.size for x in _leaves(task)]))}


def _leaves(task: px.Task) -> list[Any]:
    return jax.tree.leaves(jax.eval_shape(task.init, jax.random.key(0)))


if __name__ == "__main__":
    serve(build)
