"""Steps on this machine's device in float64, beside steps by hand on its processor.

Side `compare` builds every case, runs three steps on each side, and answers with the largest
difference of parameters by case, as a share of the largest number, or with what went wrong.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import plurax as px
from benchmarks import absent_models, experts, long_context, networks
from benchmarks.sizes import Mlp
from benchmarks.workers.serve import Settings, Side, serve

STEPS = 3
OPTIMIZER = optax.adam(1e-2)
Case = tuple[px.Task, Any, px.Plan, int | None]


def build(settings: Settings) -> tuple[dict[str, Side], dict[str, Any]]:
    jax.config.update("jax_enable_x64", True)
    names = list(CASES)[:2] if settings["quick"] else list(CASES)

    def compare(units: int) -> dict[str, Any]:
        return {"differences": {name: _difference(name) for name in names}}

    return {"compare": compare}, {"device": jax.devices()[0].device_kind}


def _difference(name: str) -> float | str:
    try:
        return _compared(*CASES[name]())
    except Exception as error:  # told, row by row
        return f"{type(error).__name__}: {str(error)[:300]}"


def _compared(task: px.Task, batch: Any, plan: px.Plan, count: int | None) -> float:
    members = None if count is None else px.Members(seeds=count)
    program = px.compile(task, OPTIMIZER, plan, batch, members=members)
    state = program.init() if count else program.init(0)
    params = jax.device_get(state.params)
    for _ in range(STEPS):
        state, _ = program.step(state, batch)
    ours = jax.device_get(state.params)
    with jax.default_device(jax.devices("cpu")[0]):
        step = jax.jit(jax.vmap(functools.partial(_by_hand, task, batch)) if count else
                       functools.partial(_by_hand, task, batch))  # fmt: skip
        own = jax.tree.map(jnp.asarray, params)
        opt_state = (jax.vmap(OPTIMIZER.init) if count else OPTIMIZER.init)(own)
        for _ in range(STEPS):
            own, opt_state = step(own, opt_state)
        theirs = jax.device_get(own)
    pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True)
    return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs)


def _by_hand(task: px.Task, batch: Any, params: Any, opt_state: Any) -> Any:
    grads = jax.grad(lambda p: task.loss(p, batch, None).mean())(params)
    updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


# --- Cases ----------------------------------------------------------------------------------------


def _doubled(task: px.Task) -> px.Task:
    """The task with parameters in float64."""

    def init(key: Any) -> Any:
        return jax.tree.map(lambda x: x.astype(jnp.float64), task.init(key))

    return px.Task(init=init, loss=task.loss)


def _perceptron(count: int | None = None, **plan: Any) -> Case:
    task = networks.make_task(Mlp((6, 32, 32, 4)))
    rng = np.random.default_rng(0)
    batch = {"x": rng.normal(size=(16, 6)), "y": rng.integers(0, 4, 16, np.int32)}
    return _doubled(task), batch, px.Plan(**plan), count


def _attention(**plan: Any) -> Case:
    sizes = {"qkv": (16, 3, 2, 8), "out": (2, 8, 16), "up": (16, 64), "down": (64, 16)}

    def init(key: Any) -> Any:
        rows = [absent_models.matrices(k, sizes, jnp.float64) for k in jax.random.split(key, 2)]
        return jax.tree.map(lambda *x: 10 * jnp.stack(x), *rows)

    def loss(params: Any, batch: Any, keys: Any) -> Any:
        layer = functools.partial(long_context.transformer_layer, long_context.as_written)
        x, _ = jax.lax.scan(layer, batch["x"], params)
        return jnp.mean(x**2, (1, 2))

    x = np.random.default_rng(0).normal(size=(4, 48, 16))
    return px.Task(init=init, loss=loss), {"x": x}, px.Plan(**plan), None


def _mixture(**plan: Any) -> Case:
    def loss(params: Any, batch: Any, keys: Any = None) -> Any:
        x = batch["x"]
        y = experts.sorted_rows(params, jnp.tanh(x @ params["in"]).reshape(-1, experts.WIDTH))
        return jnp.mean((y.reshape(x.shape) - x) ** 2, (1, 2))

    x = np.random.default_rng(0).normal(size=(4, 16, experts.WIDTH))
    task = px.Task(init=experts.init, loss=loss)
    return _doubled(task), {"x": x}, px.Plan(**plan), None


def _images(**plan: Any) -> Case:
    def init(key: Any) -> Any:
        sizes = {"stem": (3, 3, 3, 8), "deep": (3, 3, 8, 8), "head": (8, 4)}
        return jax.tree.map(lambda x: 10 * x, absent_models.matrices(key, sizes, jnp.float64))

    def loss(params: Any, batch: Any, keys: Any) -> Any:
        def conv(x: Any, kernel: Any) -> Any:
            dims = ("NHWC", "HWIO", "NHWC")
            return jax.lax.conv_general_dilated(x, kernel, (2, 2), "SAME", dimension_numbers=dims)

        x = jax.nn.silu(conv(batch["image"], params["stem"]))
        x = jax.nn.silu(conv(x, params["deep"]))
        return optax.softmax_cross_entropy_with_integer_labels(
            x.mean((1, 2)) @ params["head"], batch["label"]
        )

    rng = np.random.default_rng(0)
    batch = {"image": rng.normal(size=(8, 16, 16, 3)), "label": rng.integers(0, 4, 8, np.int32)}
    return px.Task(init=init, loss=loss), batch, px.Plan(**plan), None


CASES: dict[str, Callable[[], Case]] = {
    "perceptron": _perceptron,
    "transformer": _attention,
    "perceptron, microbatches=4": lambda: _perceptron(microbatches=4),
    "transformer, microbatches=2, remat=full": lambda: _attention(microbatches=2, remat="full"),
    "transformer, remat=dots": lambda: _attention(remat="dots"),
    "transformer, remat=offload": lambda: _attention(remat="offload"),
    "transformer, stream=16": lambda: _attention(stream=16),
    "transformer, stream=16, remat=full": lambda: _attention(stream=16, remat="full"),
    "experts": _mixture,
    "experts, microbatches=2": lambda: _mixture(microbatches=2),
    "convolutions": _images,
    "convolutions, microbatches=2": lambda: _images(microbatches=2),
    "five perceptrons": lambda: _perceptron(5),
    "five perceptrons, chunk=2": lambda: _perceptron(5, chunk=2),
    "five perceptrons, batch_dim=minor": lambda: _perceptron(5, batch_dim="minor"),
    "five perceptrons, microbatches=2": lambda: _perceptron(5, microbatches=2),
}


if __name__ == "__main__":
    serve(build)
