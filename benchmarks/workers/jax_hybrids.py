"""One transformer split in several ways at once, beside the same network split by hand.

A side for each of `settings["hybrids"]`, plans, and `settings["by_hand"]`, splits; the facts hold
how much memory each takes. All start from the same parameters and drop the same activations, and
after two steps their losses agree.
"""

from typing import Any

import jax
import numpy as np
from examples import language_model

import plurax as px
from benchmarks import sizes
from benchmarks.networks import count_parameters
from benchmarks.split_by_hand import Split
from benchmarks.workers.jax_divided import (
    AGREE,
    by_hand,
    flat,
    make_batch,
    make_optimizer,
    make_task,
)
from benchmarks.workers.jax_setup import carry, need_devices
from benchmarks.workers.serve import Settings, Side, serve
from plurax.hlo.memory import Memory, memory


def build(settings: Settings) -> tuple[dict[str, Side], dict[str, Any]]:
    need_devices(settings["devices"])
    task, optimizer, batch = make_task(settings), make_optimizer(settings), make_batch(settings)
    facts: dict[str, Any] = {"memory": {}}
    sides: dict[str, Side] = {}
    losses: dict[str, list[float]] = {}
    for name in settings["hybrids"]:
        axes = sizes.HYBRIDS[name]
        rules = language_model.shardings(sequence=False) if "tensor" in axes else {}
        plan = px.Plan(**axes, microbatches=settings["microbatches"], shardings=rules)
        program = px.compile(task, optimizer, plan, batch)
        facts["memory"][name] = _memory(program.memory())
        sides[name], losses[name] = _planned(program, batch)
    first = program.to_canonical(program.init(0))
    params, key = jax.device_get((flat(first.params), jax.random.key_data(first.key)))
    facts["parameters"] = count_parameters(params)
    for name in settings["by_hand"]:
        made = by_hand(settings, Split(**sizes.BY_HAND[name]), batch["bytes"], params, key)
        sides[name], losses[name], compiled = made
        facts["memory"][name] = _memory(memory(compiled))
        for plan in settings["hybrids"]:
            np.testing.assert_allclose(losses[name], losses[plan], rtol=0, atol=AGREE)
    return sides, facts


def _planned(program: px.Program, batch: Any) -> tuple[Side, list[float]]:
    """Steps of a plan, and the losses of two."""
    state, ready = program.init(0), program.place_batch(batch)
    losses = []
    for _ in range(2):
        state, metrics = program.step_placed(state, ready)
        losses.append(float(metrics["loss"]))
    return carry(lambda state: program.step_placed(state, ready)[0], state), losses


def _memory(memory: Memory) -> dict[str, int]:
    return {"arguments": memory.arguments, "temporaries": memory.temporaries}


if __name__ == "__main__":
    serve(build)
