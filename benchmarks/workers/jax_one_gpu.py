"""The transformer of `examples/language_model.py` on one GPU in bfloat16.

`settings["work"]` is `time` (side `plurax`) or `depth`: the largest depth that trains with
`settings["remat"]`, as facts. A depth trains where the compiled step fits in memory, by the
compiler's numbers; the largest then makes a step.
"""

import time
from typing import Any

import jax
import optax

import plurax as px
from benchmarks.networks import count_parameters
from benchmarks.workers.jax_divided import make_batch, make_optimizer, make_task
from benchmarks.workers.jax_setup import carry, need_devices
from benchmarks.workers.serve import Settings, Side, SkippedError, serve
from plurax.mesh import make_mesh, memory_budget


def build(settings: Settings) -> tuple[dict[str, Side], dict[str, Any]]:
    need_devices(1)
    work = _time if settings["work"] == "time" else _depth
    return work(settings)


def _compiled(settings: Settings, **changed: Any) -> px.Program:
    given = settings | changed
    optimizer: optax.GradientTransformation = make_optimizer(given)
    plan = px.Plan(precision="bfloat16", remat=given.get("remat", "none"))
    return px.compile(make_task(given), optimizer, plan, make_batch(given))


def _time(settings: Settings) -> tuple[dict[str, Side], dict[str, Any]]:
    begun = time.perf_counter()
    program = _compiled(settings)
    seconds = time.perf_counter() - begun
    ready = program.place_batch(make_batch(settings))
    facts = {
        "parameters": count_parameters(program.state_shapes.params),
        "plurax_compile_seconds": seconds,
        "peak_bytes": program.memory().peak,
    }
    state, metrics = program.step_placed(program.init(0), ready)
    facts["first_loss"] = float(metrics["loss"])
    step = carry(lambda state: program.step_placed(state, ready)[0], state)
    return {"plurax": step}, facts


def _depth(settings: Settings) -> tuple[dict[str, Side], dict[str, Any]]:
    memory = settings.get("memory") or memory_budget(make_mesh(px.Plan()))

    def fits(depth: int) -> bool:
        try:
            return _compiled(settings, depth=depth).memory().peak <= memory
        except jax.errors.JaxRuntimeError:  # the compiler has no room for its temporaries
            return False

    if not fits(1):
        raise SkippedError(f"one block does not fit in {memory:,} bytes")
    low, high = 1, 2
    while high <= settings["deepest"] and fits(high):
        low, high = high, 2 * high
    high = min(high, settings["deepest"] + 1)
    # To a sixteenth: each answer is a compilation.
    while high - low > max(1, low // 16):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)

    program = _compiled(settings, depth=low)
    state, batch = program.init(0), make_batch(settings)
    for _ in range(2):
        begun = time.perf_counter()
        state, metrics = program.step(state, batch)
        jax.block_until_ready(metrics)
        seconds = time.perf_counter() - begun
    return {}, {
        "depth": low,
        "parameters": count_parameters(state.params),
        "peak_bytes": program.memory().peak,
        "memory": memory,
        "seconds": seconds,
    }


if __name__ == "__main__":
    serve(build)
