"""Mixtures of experts over four devices, beside XLA's partitioner.

    python -m benchmarks.experts                     # compiled for virtual CPU devices
    python -m benchmarks.experts 4xH100 v5e:2x2      # compiled for machines that are not here

A dense layer and 8 experts of width 512 and 1,024 hidden units, 4,096 tokens, two experts for each,
a step of SGD in float32, weights split by expert over four devices:

    plurax                plain code and a rule of the plan (`tensor=4`)
    XLA's partitioner     the same code in `jax.jit`, the weights split by sharding

Bytes are what each device receives, read from the compiled program; memory is that of temporaries,
and work what the compiler counts, if it does, both of one device. Nothing is run.
"""

import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import plurax as px
from benchmarks.long_context import run
from plurax.hlo.compiled_collectives import collectives
from plurax.hlo.memory import memory

DEVICES, EXPERTS, CHOICES, TOKENS, WIDTH, HIDDEN = 4, 8, 2, 4096, 512, 1024
CAPACITY = TOKENS * CHOICES // EXPERTS
RATE = 1e-2
WEIGHTS = ("gate", "up", "down")

# --- Ways of dispatch -----------------------------------------------------------------------------


def init(key: Any) -> Any:
    shapes = {
        "in": (WIDTH, WIDTH),
        "router": (WIDTH, EXPERTS),
        "gate": (EXPERTS, WIDTH, HIDDEN),
        "up": (EXPERTS, WIDTH, HIDDEN),
        "down": (EXPERTS, HIDDEN, WIDTH),
    }
    keys = jax.random.split(key, len(shapes))
    pairs = zip(shapes.items(), keys, strict=True)
    return {name: 0.02 * jax.random.normal(key, shape) for (name, shape), key in pairs}


def _chosen(p: Any, x: Any) -> tuple[Any, Any]:
    return jax.lax.top_k(jax.nn.softmax(x @ p["router"]), CHOICES)


def _places(which: Any) -> Any:
    taken = jax.nn.one_hot(which.reshape(-1), EXPERTS, dtype=jnp.int32)
    return ((jnp.cumsum(taken, 0) - 1) * taken).sum(-1)


def _in_slots(p: Any, slots: Any) -> Any:
    gate, up = (jnp.einsum("ecd,edh->ech", slots, p[name]) for name in ("gate", "up"))
    return jnp.einsum("ech,ehd->ecd", jax.nn.silu(gate) * up, p["down"])


def sorted_rows(p: Any, x: Any) -> Any:
    """Rows in the order of their experts; none is dropped."""
    weights, which = _chosen(p, x)
    order = jnp.argsort(which.reshape(-1))
    sizes = jnp.bincount(which.reshape(-1), length=EXPERTS)
    rows = x[order // CHOICES]
    gate, up = (jax.lax.ragged_dot(rows, p[name], sizes) for name in ("gate", "up"))
    y = jax.lax.ragged_dot(jax.nn.silu(gate) * up, p["down"], sizes)[jnp.argsort(order)]
    return jnp.einsum("nkd,nk->nd", y.reshape(-1, CHOICES, WIDTH), weights)


def in_buffers(p: Any, x: Any) -> Any:
    """By indices into buffers `(E, C, D)`."""
    weights, which = _chosen(p, x)
    at = which.reshape(-1), _places(which)
    zeros = jnp.zeros((EXPERTS, CAPACITY, WIDTH), x.dtype)
    slots = zeros.at[at].add(jnp.repeat(x, CHOICES, 0), mode="drop")
    y = _in_slots(p, slots).at[at].get(mode="fill", fill_value=0)
    return jnp.einsum("nkd,nk->nd", y.reshape(-1, CHOICES, WIDTH), weights)


def one_hot(p: Any, x: Any, named: Callable[[Any], Any] = lambda choices: choices) -> Any:
    """By products with zeros and ones."""
    weights, which = _chosen(p, x)
    slot = jax.nn.one_hot(_places(which), CAPACITY, dtype=x.dtype)
    expert = named(jax.nn.one_hot(which.reshape(-1), EXPERTS, dtype=x.dtype))
    sent = (expert[:, :, None] * slot[:, None]).reshape(-1, CHOICES, EXPERTS, CAPACITY)
    y = _in_slots(p, jnp.einsum("nkec,nd->ecd", sent, x))
    return jnp.einsum("nkec,nk,ecd->nd", sent, weights, y)


def one_hot_named(p: Any, x: Any) -> Any:
    """The same, with a name by which a plan splits the choices."""
    return one_hot(p, x, lambda choices: px.sharding.name(choices, "choices"))


def grouped(
    p: Any,
    x: Any,
    there: Callable[[Any], Any] = lambda slots: slots,
    home: Callable[[Any], Any] = lambda slots: slots,
) -> Any:
    """By products with zeros and ones, buffers of each example `(E, B, C, D)` (GShard).

    `x` (B, T, D); `there` and `home` send buffers to their experts and back.
    """
    weights, which = _chosen(p, x)
    capacity = x.shape[1] * CHOICES // EXPERTS
    places = jax.vmap(_places)(which).reshape(which.shape)
    slot = jax.nn.one_hot(places, capacity, dtype=x.dtype)
    expert = jax.nn.one_hot(which, EXPERTS, dtype=x.dtype)
    slots = there(jnp.einsum("btec,btd->ebcd", jnp.einsum("btke,btkc->btec", expert, slot), x))
    gate, up = (jnp.einsum("ebcd,edh->ebch", slots, p[name]) for name in ("gate", "up"))
    y = home(jnp.einsum("ebch,ehd->ebcd", jax.nn.silu(gate) * up, p["down"]))
    weighted = jnp.einsum("btke,btkc,btk->btec", expert, slot, weights)
    return jnp.einsum("btec,ebcd->btd", weighted, y)


DISPATCHES = {
    "sorted rows": sorted_rows,
    "buffers": in_buffers,
    "one-hot": one_hot,
    "one-hot, named": one_hot_named,
}


def layer(p: Any, x: Any, dispatch: Callable[..., Any]) -> Any:
    x = jnp.tanh(x @ p["in"])
    return x + dispatch(p, x)


def task_of(dispatch: Callable[..., Any]) -> px.Task:
    """Return the task that trains a layer on batches `{"x": (B, T, WIDTH)}`."""

    def loss(params: Any, batch: Any, keys: Any) -> Any:
        x = batch["x"]
        return (layer(params, x.reshape(-1, WIDTH), dispatch) ** 2).reshape(x.shape).mean((1, 2))

    return px.Task(init=init, loss=loss)


# --- Compiled -------------------------------------------------------------------------------------


def _by_plurax(dispatch: Callable[..., Any], mesh: Mesh) -> Any:
    task = task_of(dispatch)
    rules: dict[str, Any] = dict.fromkeys(WEIGHTS, ("tensor", None, None))
    if dispatch is one_hot_named:
        rules["choices"] = (None, "tensor")
    plan = px.Plan(tensor=DEVICES, shardings=rules)
    batch = {"x": jax.ShapeDtypeStruct((8, TOKENS // 8, WIDTH), jnp.float32)}
    devices = list(mesh.devices.flat)
    return px.compile(task, optax.sgd(RATE), plan, batch, devices=devices).compiled_step


def _by_xla(dispatch: Callable[..., Any], mesh: Mesh) -> Any:
    whole, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("tensor"))

    def step(params: Any, x: Any) -> Any:
        grads = jax.grad(lambda params: (layer(params, x, dispatch) ** 2).mean())(params)
        return jax.tree.map(lambda p, g: p - RATE * g, params, grads)

    like = jax.eval_shape(init, jax.random.key(0))
    shardings = {name: split if name in WEIGHTS else whole for name in like}
    jitted = jax.jit(
        step, in_shardings=(shardings, whole), out_shardings=shardings, donate_argnums=0
    )
    return jitted.lower(like, jax.ShapeDtypeStruct((TOKENS, WIDTH), jnp.float32)).compile()


def _measured(target: str, devices: Any) -> None:
    mesh = Mesh(np.asarray(devices), ("tensor",))
    for name, dispatch in DISPATCHES.items():
        for who, compiled in (("plurax", _by_plurax), ("XLA's partitioner", _by_xla)):
            program = compiled(dispatch, mesh)
            sent = sum(one.bytes * one.trips for one in collectives(program.as_text(), mesh))
            held, counted = memory(program).temporaries, program.cost_analysis()
            # The compiler of GPUs counts nothing.
            work = f", {counted['flops'] / 1e9:4,.0f} GFLOP" if counted else ""
            text = f"{sent / 2**20:6.1f} MiB received, {held / 2**20:5,.0f} MiB held{work}"
            print(f"{target:8} {name:14} {who:17} {text}", flush=True)


def here() -> None:
    """Print what XLA's CPU compiler makes of each."""
    px.virtual_devices(DEVICES)
    _measured("CPU", jax.devices()[:DEVICES])


def elsewhere(target: str) -> None:
    """Print what a machine's compiler makes of each."""
    _measured(target, px.topology(target)[:DEVICES])


if __name__ == "__main__":
    sys.exit(run(str(__doc__), here, elsewhere))
