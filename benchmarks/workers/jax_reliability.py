"""Seconds of a step, of a comparison of all copies, and of what the watchdog does.

A comparison is timed while the devices have nothing else to do, its result waited for; in training
it is dispatched behind a step. The watchdog writes a status file, as under a launcher.
"""

import inspect
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import optax

import plurax as px
from benchmarks import sizes
from benchmarks.networks import make_batch, make_task
from benchmarks.workers.jax_setup import need_devices
from benchmarks.workers.serve import Settings, Side, serve
from plurax.guards.status import StatusFile
from plurax.guards.watchdog import Watchdog
from plurax.timeouts import TIMEOUTS

ITEMS = 100_000


class Item(NamedTuple):
    """What the training loop yields."""

    step: int


def build(settings: Settings) -> tuple[dict[str, Side], dict[str, Any]]:
    plan = px.Plan(**settings["plan"])
    need_devices(plan.devices)
    network = sizes.Mlp(tuple(settings["network"]["widths"]))
    batch = make_batch(network, settings["batch"])
    program = px.compile(make_task(network), optax.adam(sizes.LEARNING_RATE), plan, batch)
    seconds = trained(program, program.place_batch(batch), settings["rounds"], settings["steps"])
    every = inspect.signature(px.fit).parameters["check_replicas_every"].default
    return {}, seconds | watched() | {"every": every, "between_looks": TIMEOUTS.look}


def trained(program: px.Program, placed: Any, rounds: int, steps: int) -> dict[str, float]:
    """Median seconds of a step, and of a comparison, which take turns."""
    state = program.init(0)
    taken: dict[str, list[float]] = {"step": [], "compare": []}
    for round_ in range(rounds + 1):
        begun = time.perf_counter()
        for _ in range(steps):
            state, _ = program.step_placed(state, placed)
        jax.block_until_ready(state)
        stepped = time.perf_counter()
        assert not program.replicas.check(state)
        compared = time.perf_counter()
        if round_:  # the first compiles
            taken["step"].append((stepped - begun) / steps)
            taken["compare"].append(compared - stepped)
    return {name: statistics.median(values) for name, values in taken.items()}


def watched() -> dict[str, float]:
    """Seconds that the watchdog takes from a step, and that a look of its thread takes."""

    def items() -> Iterator[Item]:
        for number in range(ITEMS):
            yield Item(number)

    begun = time.perf_counter()
    for _ in items():
        pass
    bare = time.perf_counter() - begun
    with tempfile.TemporaryDirectory() as path, Watchdog(status=StatusFile(Path(path), 0)) as dog:
        begun = time.perf_counter()
        for _ in dog.watch(items()):
            pass
        seconds = time.perf_counter() - begun
        looks = []
        for _ in range(100):
            with dog.work("evaluate"):  # something new to write each time
                begun = time.perf_counter()
                dog.look()
                looks.append(time.perf_counter() - begun)
    return {"watchdog": (seconds - bare) / ITEMS, "look": statistics.median(looks)}


if __name__ == "__main__":
    serve(build)
