"""Rows sent to experts over four devices, beside the same by hand and XLA's partitioner.

    python -m benchmarks.sent_experts                     # this machine: also processor seconds
    python -m benchmarks.sent_experts 4xH100 v5p:2x2x1    # compiled for machines that are not here

The mixture of `benchmarks.experts` with sorted rows, tokens split over four devices and experts,
too, a step of SGD in float32:

    plurax                plain code and a rule of the plan (`data=4`)
    by hand               `jax.shard_map` and all-to-all, room for twice the rows of a device; rows
                          beyond it are dropped, and hidden values kept for the backward pass
    kept on each device   plurax, without the rule: all experts' weights, whose gradients are added
    gathered              plurax, `zero=3`
    XLA's partitioner     the plain code in `jax.jit`, tokens and weights split by sharding

Bytes are what each device receives in one turn, read from the compiled program: of ragged exchanges
the room for rows. Memory is that of temporaries. Seconds are medians of steps in turns.
"""

import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import plurax as px
from benchmarks import experts
from benchmarks.experts import CHOICES, DEVICES, EXPERTS, RATE, TOKENS, WEIGHTS, WIDTH
from benchmarks.long_context import run
from plurax.hlo.compiled_collectives import collectives
from plurax.hlo.memory import memory

ROUNDS, HERE = 5, 512
"""Steps that are timed, and of how many tokens: on a CPU, a product of groups is dense."""


# --- By hand --------------------------------------------------------------------------------------


def _exchange(x: Any) -> Any:
    return lax.all_to_all(x, "data", 0, 0, tiled=True)


def mixture_by_hand(p: Any, x: Any) -> Any:
    """Sort, send to the experts' devices, compute, send back; inside `jax.shard_map`."""
    weights, which = jax.lax.top_k(jax.nn.softmax(x @ p["router"]), CHOICES)
    order = jnp.argsort(which.reshape(-1))
    expert = which.reshape(-1)[order]
    per_device = EXPERTS // DEVICES
    counts = jnp.bincount(expert // per_device, length=DEVICES)
    first = jnp.cumsum(counts) - counts
    count = len(expert)
    slot = jnp.arange(2 * count // DEVICES)
    index = jnp.minimum(first[:, None] + slot, count - 1)
    filled = slot < counts[:, None]
    rows = x[order // CHOICES]
    received = _exchange(jnp.where(filled[:, :, None], rows[index], 0).reshape(-1, WIDTH))
    group = _exchange(jnp.where(filled, expert[index] % per_device, per_device).reshape(-1))
    by_group = jnp.argsort(group)
    sizes = jnp.bincount(group, length=per_device)
    hidden = received[by_group]
    gate, up = (jax.lax.ragged_dot(hidden, p[name], sizes) for name in ("gate", "up"))
    y = jax.lax.ragged_dot(jax.nn.silu(gate) * up, p["down"], sizes)
    y = _exchange(y[jnp.argsort(by_group)])
    place = jnp.where(filled, index, count).reshape(-1)
    back = jnp.zeros_like(rows).at[place].set(y, mode="drop")[jnp.argsort(order)]
    return jnp.einsum("nkd,nk->nd", back.reshape(-1, CHOICES, WIDTH), weights)


def _step_by_hand(mesh: Mesh, tokens: int) -> Any:
    def local(params: Any, x: Any) -> Any:
        def loss(p: Any) -> Any:
            hidden = jnp.tanh(x @ p["in"])
            return ((hidden + mixture_by_hand(p, hidden)) ** 2).sum() / (tokens * WIDTH)

        grads = jax.grad(loss)(params)
        shared = {name: g for name, g in grads.items() if name not in WEIGHTS}
        grads |= lax.psum(shared, "data")
        return jax.tree.map(lambda p, g: p - RATE * g, params, grads)

    specs = {name: P("data") if name in WEIGHTS else P() for name in _like()}
    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=(specs, P("data")), out_specs=specs, check_vma=False
    )
    return jax.jit(mapped, donate_argnums=0)


# --- The others -----------------------------------------------------------------------------------


def _like() -> Any:
    return jax.eval_shape(experts._init, jax.random.key(0))


def _loss(params: Any, batch: Any, keys: Any) -> Any:
    x = batch["x"]
    y = experts._layer(params, x.reshape(-1, WIDTH), experts.sorted_rows)
    return (y**2).reshape(x.shape).mean((1, 2))


PLANS = {
    "plurax": px.Plan(data=DEVICES, shardings=dict.fromkeys(WEIGHTS, ("data", None, None))),
    "kept on each device": px.Plan(data=DEVICES),
    "gathered": px.Plan(data=DEVICES, zero=3),
}


def _step_by_xla() -> Any:
    def step(params: Any, x: Any) -> Any:
        def loss(p: Any) -> Any:
            return (experts._layer(p, x, experts.sorted_rows) ** 2).mean()

        return jax.tree.map(lambda p, g: p - RATE * g, params, jax.grad(loss)(params))

    return jax.jit(step, donate_argnums=0)


class Case:
    """A step, compiled; `run` runs it and returns its processor seconds."""

    def __init__(self, name: str, devices: Sequence[Any], tokens: int = TOKENS) -> None:
        self.name, mesh = name, Mesh(np.asarray(devices), ("data",))
        self.program: Any = None
        batch = {"x": jax.ShapeDtypeStruct((8, tokens // 8, WIDTH), jnp.float32)}
        if name in PLANS:
            task = px.Task(init=experts._init, loss=_loss)
            optimizer = optax.sgd(RATE)
            self.program = px.compile(task, optimizer, PLANS[name], batch, devices=devices)
            self.compiled = self.program.compiled_step
        else:
            self.split = NamedSharding(mesh, P("data"))
            self.shardings = {
                k: self.split if k in WEIGHTS else NamedSharding(mesh, P()) for k in _like()
            }
            params = jax.tree.map(
                lambda leaf, at: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at),
                _like(), self.shardings,
            )  # fmt: skip
            x = jax.ShapeDtypeStruct((tokens, WIDTH), jnp.float32, sharding=self.split)
            step = _step_by_hand(mesh, tokens) if name == "by hand" else _step_by_xla()
            self.compiled = step.lower(params, x).compile()
        self.sent: Counter[str] = Counter()
        for one in collectives(self.compiled.as_text(), mesh, unknown_trips=1):
            self.sent[one.kind] += one.bytes * (one.trips or 1)

    def start(self, params: Any, x: Any) -> None:
        """Place what the step takes."""
        if self.program is not None:
            self.state = self.program.init(seed=0)
            self.x = {"x": x.reshape(8, -1, WIDTH)}
            return
        self.state = jax.device_put(params, self.shardings)
        self.x = jax.device_put(x, self.split)

    def run(self) -> float:
        """Run a step."""
        started = time.process_time()
        if self.program is not None:
            self.state, _ = self.program.step(self.state, self.x)
            jax.block_until_ready(self.state.params)
        else:
            self.state = jax.block_until_ready(self.compiled(self.state, self.x))
        return time.process_time() - started

    def text(self) -> str:
        """What the compiled program sends and holds."""
        sent = ", ".join(f"{kind} {size / 2**20:5.1f}" for kind, size in sorted(self.sent.items()))
        return f"{self.name:20} {memory(self.compiled).temporaries / 2**20:6,.0f} MiB; {sent} MiB"


NAMES = (*PLANS, "by hand", "XLA's partitioner")


def here() -> None:
    """Print what each takes on four virtual devices of this machine."""
    px.virtual_devices(DEVICES)
    cases = [Case(name, jax.devices()[:DEVICES], HERE) for name in NAMES]
    x = np.random.default_rng(0).normal(size=(HERE, WIDTH)).astype(np.float32)
    params = jax.device_get(cases[0].program.init(seed=0).params)
    times: dict[str, list[float]] = {name: [] for name in NAMES}
    for case in cases:
        case.start(params, x)
        case.run()
    for _ in range(ROUNDS):
        for case in cases:
            times[case.name].append(case.run())
    median = {name: statistics.median(each) for name, each in times.items()}
    exact = cases[NAMES.index("kept on each device")].state.params
    for case in cases:
        state = case.state if case.program is None else case.state.params
        apart = max(float(np.abs(np.asarray(state[k]) - np.asarray(exact[k])).max()) for k in exact)
        ratio = median[case.name] / median["by hand"]
        print(f"{case.text()}; {median[case.name]:5.2f} s of processor time, {ratio:4.2f} x by "
              f"hand; {apart:.0e} apart", flush=True)  # fmt: skip


def elsewhere(target: str) -> None:
    """Print what a machine's compiler makes of each."""
    for name in NAMES:
        print(f"{target:10} {Case(name, px.topology(target)[:DEVICES]).text()}", flush=True)


if __name__ == "__main__":
    sys.exit(run(str(__doc__), here, elsewhere))
