"""The rock domains in plurax: training over data-parallel devices, and inference.

`settings["work"]` is `train` (sides `step` and `epoch`) or `predict` (sides `plurax` and `by hand`,
and for each the same over all rows).
"""

import time
from typing import Any

import jax
import numpy as np
import optax
from examples import domains

import plurax as px
from benchmarks import by_hand, sizes
from benchmarks.networks import count_parameters, make_batch, make_task
from benchmarks.workers.jax_setup import carry, need_devices
from benchmarks.workers.serve import Settings, Side, serve


def build(settings: Settings) -> tuple[dict[str, Side], dict[str, Any]]:
    need_devices(settings["devices"])
    network = sizes.Domains(settings["width"])
    task, batch = make_task(network), make_batch(network, settings["batch"])
    optimizer = optax.adamw(sizes.LEARNING_RATE, weight_decay=sizes.WEIGHT_DECAY)
    begun = time.perf_counter()
    program = px.compile(task, optimizer, px.Plan(data=settings["devices"]), batch)
    seconds = time.perf_counter() - begun
    facts = {
        "parameters": count_parameters(program.init(0).params),
        "plurax_compile_seconds": seconds,
        "network": {
            "frequencies": np.asarray(domains.FREQUENCIES, float).tolist(),
            "extent": np.asarray(domains.EXTENT, float).tolist(),
            "classes": len(domains.DOMAINS),
        },
    }
    work = _train if settings["work"] == "train" else _predict
    return work(settings, program, network), facts


def _train(settings: Settings, program: px.Program, network: sizes.Domains) -> dict[str, Side]:
    size, steps = settings["batch"], settings["steps"]
    batch = make_batch(network, size)
    data = program.place_data(make_batch(network, size * steps))
    counts = np.full(steps, size)
    rng = np.random.default_rng(0)

    def epoch(state: px.train.TrainState) -> px.train.TrainState:
        rows = rng.permutation(size * steps).reshape(steps, size)
        return program.loop(state, data, program.place_epoch(rows, counts), 0, steps)[0]

    return {
        "step": carry(lambda state: program.step(state, batch)[0], program.init(0)),
        "epoch": carry(epoch, program.init(0)),
    }


def _predict(settings: Settings, program: px.Program, network: sizes.Domains) -> dict[str, Side]:
    state, chunk = program.init(0), settings["batch"]
    logits = jax.jit(domains.logits)

    def plurax(rows: int) -> Side:
        inputs = {"xyz_cm": make_batch(network, rows)["xyz_cm"]}

        def run(units: int) -> None:
            for _ in range(units):
                program.predict(state, inputs, chunk=chunk)

        return run

    def hand(rows: int) -> Side:
        inputs = make_batch(network, rows)["xyz_cm"]

        def run(units: int) -> None:
            for _ in range(units):
                by_hand.predict_all(logits, state.params, inputs, chunk)

        return run

    few, all_ = settings["rows"], settings["all_rows"]
    return {
        "plurax": plurax(few),
        "by hand": hand(few),
        "plurax, all": plurax(all_),
        "by hand, all": hand(all_),
    }


if __name__ == "__main__":
    serve(build)
