"""A transformer written out layer by layer, compiled under a plan of plurax and by hand.

Sides `plurax` and `by hand`: from the functions to an executable (traced, lowered and compiled),
nothing of it known from before. Side `agree` fails where what they compiled last does not compute
the same: two steps from the same parameters.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax

import plurax as px
from benchmarks import sizes, unrolled_by_hand
from benchmarks.networks import count_parameters
from benchmarks.workers.jax_divided import AGREE, make_batch
from benchmarks.workers.jax_setup import need_devices
from benchmarks.workers.serve import Settings, Side, serve


def build(settings: Settings) -> tuple[dict[str, Side], dict[str, Any]]:
    network = sizes.Bytewise(**settings["network"])
    split = unrolled_by_hand.Split(**settings["plan"], depth=network.depth)
    need_devices(split.data * split.tensor)
    jax.config.update("jax_enable_compilation_cache", False)
    optimizer = optax.adamw(sizes.LEARNING_RATE, weight_decay=sizes.WEIGHT_DECAY)
    init = unrolled_by_hand.make_init(network)
    task = px.Task(
        init=init, loss=lambda params, batch, keys: unrolled_by_hand.losses(params, batch["bytes"])
    )
    rules = unrolled_by_hand.MEGATRON if split.tensor > 1 else {}
    plan = px.Plan(**settings["plan"], shardings=rules)
    batch = {"bytes": make_batch(settings["network"])["bytes"]}
    like = jax.eval_shape(init, jax.random.key(0))

    made: dict[str, Any] = {}

    def compile_plurax() -> None:
        made["plurax"] = program = px.compile(task, optimizer, plan, batch)
        program.compiled_step  # noqa: B018  compiled here, were it not by now

    def compile_by_hand() -> None:
        step, lies, rows = unrolled_by_hand.make_step(split, optimizer, like, network.batch)
        whole = (like, jax.eval_shape(optimizer.init, like), jax.ShapeDtypeStruct((), np.int32))
        state, text = jax.tree.map(_lying, (whole, batch["bytes"]), (lies, rows))
        made["by hand"] = step.lower(state, text).compile()

    sides = {
        "plurax": _anew(compile_plurax),
        "by hand": _anew(compile_by_hand),
        "agree": lambda units: check_same(made["plurax"], made["by hand"], optimizer, batch),
    }
    return sides, {"parameters": count_parameters(like)}


def check_same(
    program: px.Program,
    compiled: jax.stages.Compiled,
    optimizer: optax.GradientTransformation,
    batch: dict[str, np.ndarray],
) -> None:
    """Loss and gradient norm of two steps."""
    mine = program.init(0)
    params = jax.device_get(mine.params)
    theirs = (params, optimizer.init(params), np.int32(0))
    theirs, text = jax.device_put((theirs, batch["bytes"]), compiled.input_shardings[0])
    for _ in range(2):
        mine, metrics = program.step(mine, batch)
        theirs, (loss, norm) = compiled(theirs, text)
        np.testing.assert_allclose(metrics["loss"], loss, rtol=AGREE)
        np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=AGREE)


def _lying(leaf: Any, where: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)


def _anew(work: Callable[[], None]) -> Side:
    """Done as in a process of its own: what was traced before is forgotten."""

    def run(units: int) -> None:
        for _ in range(units):
            jax.clear_caches()
            work()

    return run


if __name__ == "__main__":
    serve(build)
