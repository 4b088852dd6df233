"""Plans of one network, or of a population, on one device: a step predicted and measured.

The machine is measured in this process first. All plans are compiled; then they take turns, so that
a disturbance falls on all. In a turn of a network one step is called by itself, and a call runs as
many as `fit` would: XLA takes the memory of a call from the system anew.
"""

import functools
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
from plurax.loop.iterate import SECONDS_PER_CALL


def build(settings: Settings) -> tuple[dict[str, Side], dict[str, Any]]:
    need_devices(1)
    network = sizes.from_json(settings["network"])
    task, batch = make_task(network), make_batch(network, settings["batch"])
    optimizer = optax.adamw(sizes.LEARNING_RATE, weight_decay=sizes.WEIGHT_DECAY)
    count = settings["members"]
    members = None if count is None else px.Members(count)
    machine = px.analysis.measure_machine()
    states, sides, predicted, memory = {}, {}, {}, {}
    for fields in settings["plans"]:
        plan = px.Plan(**fields)
        estimate = px.estimate(task, optimizer, plan, batch, machine, members)
        program = px.compile(task, optimizer, plan, batch, members=members)
        name = plan.sizes_text()
        predicted[name] = {"seconds": estimate.seconds, "bytes": estimate.peak}
        memory[name] = program.memory().peak
        step = loop = functools.partial(_step, program, batch)
        state, steps = program.init() if members else program.init(0), 1
        for _ in range(2):  # the first call is slower
            state, seconds = _timed(step, state)
        if members is None:
            steps = max(1, round(SECONDS_PER_CALL / seconds))
            loop = _loop(program, batch, settings["batch"], steps)
            state, _ = _timed(loop, state)
        states[name], sides[name] = state, (step, loop, steps)
    turns: dict[str, list[float]] = {name: [] for name in sides}
    alone: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(settings["repeats"]):
        for name, (step, loop, steps) in sides.items():
            states[name], seconds = _timed(step, states[name])
            alone[name].append(seconds)
            states[name], seconds = _timed(loop, states[name])
            turns[name].append(seconds / steps)
    measured = {
        name: {"turns": turns[name], "alone": alone[name], "bytes": memory[name]} for name in sides
    }
    return {}, {"machine": machine.to_toml(), "predicted": predicted, "measured": measured}


def _step(program: px.Program, batch: Any, state: Any) -> tuple[Any, Any]:
    return program.step(state, batch)


def _loop(program: px.Program, batch: Any, size: int, steps: int) -> Callable[[Any], Any]:
    """Return a function that runs so many steps on a batch in one call."""
    rows = np.tile(np.arange(size), (steps, 1))
    data, order = program.place_data(batch), program.place_epoch(rows, np.full(steps, size))
    return lambda state: program.loop(state, data, order, 0, steps)


def _timed(call: Callable[[Any], Any], state: Any) -> tuple[Any, float]:
    """Return the next state, and the seconds of a call."""
    begun = time.perf_counter()
    state, metrics = call(state)
    jax.block_until_ready((state, metrics))
    return state, time.perf_counter() - begun


if __name__ == "__main__":
    serve(build)
