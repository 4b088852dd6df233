"""Plans of one network, or of a population, on one device: a step predicted and measured.

The machine is measured in this process first. All plans are compiled; then they take turns, so that
a disturbance falls on all.
"""

import time
from typing import Any

import jax
import optax

import plurax as px
from benchmarks import sizes
from benchmarks.networks import make_batch, make_task
from benchmarks.workers.jax_setup import need_devices
from benchmarks.workers.serve import Settings, Side, serve


def build(settings: Settings) -> tuple[dict[str, Side], dict[str, Any]]:
    need_devices(1)
    network = sizes.from_json(settings["network"])
    task, batch = make_task(network), make_batch(network, settings["batch"])
    optimizer = optax.adamw(sizes.LEARNING_RATE, weight_decay=sizes.WEIGHT_DECAY)
    count = settings["members"]
    members = None if count is None else px.Members(count)
    machine = px.analysis.measure_machine()
    programs, predicted, memory = {}, {}, {}
    for fields in settings["plans"]:
        plan = px.Plan(**fields)
        estimate = px.estimate(task, optimizer, plan, batch, machine, members)
        program = px.compile(task, optimizer, plan, batch, members=members)
        name = plan.sizes_text()
        predicted[name] = {"seconds": estimate.seconds, "bytes": estimate.peak}
        memory[name] = program.memory().peak
        programs[name] = (program, program.init() if members else program.init(0))
    turns: dict[str, list[float]] = {name: [] for name in programs}
    for turn in range(settings["repeats"] + 1):
        for name, (program, state) in programs.items():
            begun = time.perf_counter()
            state, metrics = program.step(state, batch)
            jax.block_until_ready((state, metrics))
            if turn:
                turns[name].append(time.perf_counter() - begun)
            programs[name] = (program, state)
    measured = {name: {"turns": turns[name], "bytes": memory[name]} for name in programs}
    return {}, {"machine": machine.to_toml(), "predicted": predicted, "measured": measured}


if __name__ == "__main__":
    serve(build)
