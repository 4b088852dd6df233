"""A step of the transformer of `examples/language_model.py` on one device in bfloat16."""

import time
from typing import Any

import plurax as px
from benchmarks.networks import count_parameters
from benchmarks.workers.jax_divided import make_batch, make_optimizer, make_task
from benchmarks.workers.jax_setup import carry, need_devices
from benchmarks.workers.serve import Settings, Side, serve


def build(settings: Settings) -> tuple[dict[str, Side], dict[str, Any]]:
    need_devices(1)
    begun = time.perf_counter()
    plan, batch = px.Plan(precision="bfloat16"), make_batch(settings)
    program = px.compile(make_task(settings), make_optimizer(settings), plan, batch)
    facts = {
        "parameters": count_parameters(program.state_shapes.params),
        "plurax_compile_seconds": time.perf_counter() - begun,
        "peak_bytes": program.memory().peak,
    }
    ready = program.place_batch(batch)
    state, metrics = program.step_placed(program.init(0), ready)
    facts["first_loss"] = float(metrics["loss"])
    step = carry(lambda state: program.step_placed(state, ready)[0], state)
    return {"plurax": step}, facts


if __name__ == "__main__":
    serve(build)
