"""Plans of one network, or of a population, on one device: a step predicted and measured.

The machine is measured in this process first. All plans are compiled; then they take turns, so that
a disturbance falls on all. In a turn a network's steps run in one call of `STEPS`, as `fit` runs
them, and one is called by itself: XLA takes the memory of a call from the system anew.
"""

import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax

import plurax as px
from benchmarks import sizes
from benchmarks.networks import make_batch, make_task
from benchmarks.workers.jax_setup import need_devices
from benchmarks.workers.serve import Settings, Side, serve

STEPS = 4
"""Steps of one call of the loop."""


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
    alone: dict[str, list[float]] = {name: [] for name in programs}
    for turn in range(settings["repeats"] + 1):
        for name, (program, state) in programs.items():
            state, single = _timed(lambda state, by=program: by.step(state, batch), state)
            seconds = single
            if members is None:
                state, seconds = _timed(_loop(program, batch, settings["batch"]), state)
                seconds /= STEPS
            if turn:
                turns[name].append(seconds)
                alone[name].append(single)
            programs[name] = (program, state)
    measured = {
        name: {"turns": turns[name], "alone": alone[name], "bytes": memory[name]}
        for name in programs
    }
    return {}, {"machine": machine.to_toml(), "predicted": predicted, "measured": measured}


def _loop(program: px.Program, batch: Any, size: int) -> Callable[[Any], Any]:
    """Return a function that runs `STEPS` steps on a batch in one call."""
    rows = np.tile(np.arange(size), (STEPS, 1))
    data, order = program.place_data(batch), program.place_epoch(rows, np.full(STEPS, size))
    return lambda state: program.loop(state, data, order, 0, STEPS)


def _timed(call: Callable[[Any], Any], state: Any) -> tuple[Any, float]:
    """Return the next state, and the seconds of a call."""
    begun = time.perf_counter()
    state, metrics = call(state)
    jax.block_until_ready((state, metrics))
    return state, time.perf_counter() - begun


if __name__ == "__main__":
    serve(build)
