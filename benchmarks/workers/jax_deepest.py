"""The deepest GPT that a plan is said to fit on this machine's device: does it train, and in what?

The facts hold what was planned and what was there, of a network as deep as the plan allows.
"""

import dataclasses
import time
from typing import Any

import jax
import numpy as np
import optax

import plurax as px
from benchmarks.gpt import Gpt
from benchmarks.networks import count_parameters
from benchmarks.workers.serve import Settings, Side, serve
from plurax.mesh import make_mesh, memory_budget

OPTIMIZER = optax.adamw(1e-4)


def build(settings: Settings) -> tuple[dict[str, Side], dict[str, Any]]:
    model, rows = Gpt(**settings["model"]), settings["rows"]
    limit = settings["memory"] or memory_budget(make_mesh(px.Plan()))
    machine = dataclasses.replace(px.Machine.preset("H100-80GB"), memory=limit)
    plan = px.Plan(precision="bfloat16", remat=settings["remat"])

    def estimate(depth: int) -> px.analysis.Estimate:
        deep = dataclasses.replace(model, depth=depth)
        return px.estimate(deep.task(), OPTIMIZER, plan, deep.batch(rows), machine)

    low, high = 1, 2
    while high <= settings["deepest"] and estimate(high).fits:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if estimate(middle).fits else (low, middle)

    planned = estimate(low)
    deep = dataclasses.replace(model, depth=low)
    shape = rows, model.tokens + 1
    tokens = np.random.default_rng(0).integers(0, model.vocabulary, shape).astype(np.int32)
    facts: dict[str, Any] = {
        "depth": low,
        "planned_peak": planned.peak,
        "margin": planned.margin,
        "memory": limit,
        "estimated": planned.seconds,
    }
    try:
        program = px.compile(deep.task(), OPTIMIZER, plan, {"tokens": tokens})
        facts["compiled_peak"] = program.memory().peak
        state = program.init(0)
        facts["parameters"] = count_parameters(state.params)
        for _ in range(3):
            begun = time.perf_counter()
            state, metrics = program.step(state, {"tokens": tokens})
            jax.block_until_ready((state, metrics))
            facts["seconds"] = time.perf_counter() - begun
    except (px.errors.OutOfMemoryError, jax.errors.JaxRuntimeError) as error:
        facts["failed"] = str(error)[:600]
    stats = jax.devices()[0].memory_stats() or {}
    facts["peak_in_use"] = stats.get("peak_bytes_in_use")
    return {}, facts


if __name__ == "__main__":
    serve(build)
