"""One transformer split over devices: a plan of plurax, and the same plan by hand, in one process.

Sides `plurax` and `by hand`, and where activations are split by token also `by hand, gathering
again`. The facts hold what each sends and how much memory it takes. All start from the same
parameters and drop the same activations, and after two steps their losses agree.
"""

import dataclasses
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from examples import language_model

import plurax as px
from benchmarks import split_by_hand
from benchmarks.networks import count_parameters
from benchmarks.workers.jax_setup import carry, need_devices
from benchmarks.workers.serve import Settings, Side, serve
from plurax.collective import Collective
from plurax.distributed.global_arrays import fetch, one_at_a_time
from plurax.hlo.compiled_collectives import collectives
from plurax.hlo.memory import Memory, memory

CLIP = 1.0
AGREE = 1e-4


def build(settings: Settings) -> tuple[dict[str, Side], dict[str, Any]]:
    split = split_by_hand.Split(**settings["split"])
    need_devices(split.data * split.tensor)
    return make_sides(settings, split)


def make_sides(
    settings: Settings, split: split_by_hand.Split
) -> tuple[dict[str, Side], dict[str, Any]]:
    """The sides and the facts, on the devices of one process or of several."""
    task, batch = make_task(settings), make_batch(settings)
    rules = language_model.shardings(split.sequence) if split.tensor > 1 else {}
    plan = px.Plan(data=split.data, tensor=split.tensor, zero=split.zero, shardings=rules)
    begun = time.perf_counter()
    program = px.compile(task, make_optimizer(settings), plan, batch)
    facts: dict[str, Any] = {"plurax_compile_seconds": time.perf_counter() - begun}
    state, ready = program.init(0), program.place_batch(batch)
    facts |= {
        "parameters": count_parameters(state.params),
        "plurax": costs(program.collectives(), program.memory()),
        "by hand": {},
    }
    hands = {"by hand": split}
    if split.sequence:
        hands["by hand, gathering again"] = dataclasses.replace(split, again=True)
    sides: dict[str, Side] = {}
    losses: dict[str, list[float]] = {}
    first = fetch((flat(state.params), jax.random.key_data(state.key)))
    for name, hand in hands.items():
        sides[name], losses[name], compiled = by_hand(settings, hand, batch["bytes"], *first)
        found = collectives(compiled.as_text() or "", hand.mesh)
        facts["by hand"][name] = costs(found, memory(compiled))

    mine = []
    for _ in range(2):
        state, metrics = program.step_placed(state, ready)
        mine.append(float(metrics["loss"]))
    for name, values in losses.items():
        np.testing.assert_allclose(mine, values, rtol=0, atol=AGREE, err_msg=name)
    facts["first_loss"] = mine[0]
    sides["plurax"] = carry(lambda state: program.step_placed(state, ready)[0], state)
    return sides, facts


def by_hand(
    settings: Settings, split: split_by_hand.Split, text: np.ndarray, params: Any, key: np.ndarray
) -> tuple[Side, list[float], jax.stages.Compiled]:
    """The same by hand, and its losses of two steps."""
    step, state, where = split_by_hand.make_step(
        split,
        _adamw(settings),
        CLIP,
        jax.tree.map(jnp.asarray, params),
        jax.random.wrap_key_data(key),
    )
    rows = jax.device_put(text, where)
    compiled = step.lower(state, rows).compile()  # type: ignore[attr-defined]
    losses = []
    for _ in range(2):
        state, loss = compiled(state, rows)
        losses.append(float(loss))

    def once(state: Any) -> Any:
        state, _ = compiled(state, rows)
        return one_at_a_time(state) if settings.get("waits", True) else state

    return carry(once, state), losses, compiled


def _adamw(settings: Settings) -> optax.GradientTransformation:
    return optax.adamw(settings["learning_rate"], b2=0.95, weight_decay=settings["weight_decay"])


def make_optimizer(settings: Settings) -> optax.GradientTransformation:
    """AdamW of clipped gradients."""
    return optax.chain(optax.clip_by_global_norm(CLIP), _adamw(settings))


def make_task(settings: Settings) -> px.Task:
    """The task of the example, at these sizes."""
    names = ("width", "depth", "heads", "window")
    return language_model.make_task(**{name: settings[name] for name in names})


def flat(params: Any) -> Any:
    """Its parameters as the splits by hand have them."""
    return {**params["embed"], "blocks": params["blocks"], **params["head"]}


def make_batch(settings: Settings) -> dict[str, np.ndarray]:
    """Windows of random bytes."""
    size, window = settings["batch"], settings["window"]
    rng = np.random.default_rng(0)
    return {
        "bytes": rng.integers(0, language_model.BYTES, (size, window + 1), np.uint8),
        "count": np.full(size, window, np.int32),
    }


def costs(collectives: list[Collective], memory: Memory) -> dict[str, Any]:
    """Bytes of one step on one device: of the results of collectives by kind, and of memory."""
    kinds: dict[str, int] = {}
    for found in collectives:
        assert found.trips is not None, found
        kinds[found.kind] = kinds.get(found.kind, 0) + found.bytes * found.trips
    return {
        "collectives": kinds,
        "collective_bytes": sum(kinds.values()),
        "temporaries": memory.temporaries,
        "arguments": memory.arguments,
    }


if __name__ == "__main__":
    serve(build)
