"""Rows sent to experts over eight devices, beside the same by hand and XLA's partitioner.

    python -m benchmarks.sent_experts                     # this machine: also processor seconds
    python -m benchmarks.sent_experts 8xH100 v5p:2x2x2    # compiled for machines that are not here

The mixture of `benchmarks.experts` with sorted rows; the same with a loss that balances the load of
all tokens, and so couples examples; and with buffers of the experts that products with one-hot
arrays fill for each example (GShard). Tokens are split over eight devices and so are experts, a
step of SGD in float32:

    plurax                plain code and a rule of the plan (`data=8`)
    by hand               `jax.shard_map` and all-to-all, of sorted rows with room for twice the
                          rows of a device; rows beyond it are dropped, and hidden values kept for
                          the backward pass
    kept on each device   plurax, without the rule: all experts' weights, whose gradients are added
    gathered              plurax, `zero=3`
    XLA's partitioner     the plain code in `jax.jit`, tokens and weights split by sharding, and the
                          buffers constrained to those of the device's experts, as GShard does

Bytes are what each device receives in the first turn, read from the compiled program: of ragged
exchanges the room for rows. Memory is that of temporaries. Seconds are medians of steps in turns.
"""

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import plurax as px
from benchmarks import experts
from benchmarks.compiled_steps import CompiledStep, StepOfJax, StepOfPlurax, median_seconds
from benchmarks.experts import CHOICES, EXPERTS, RATE, TOKENS, WEIGHTS, WIDTH
from benchmarks.long_context import run

DEVICES = 8
ROUNDS, HERE = 11, 512
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


def sorted_by_hand(p: Any, x: Any) -> Any:
    return mixture_by_hand(p, x.reshape(-1, WIDTH)).reshape(x.shape)


def _balance(p: Any, x: Any, share: Callable[[Any], Any]) -> Any:
    """The sum over experts of the share of tokens that chose each, and the mean of its scores.

    `share(sums)` returns sums over all tokens divided by their number. It has no derivative.
    """
    scores = jax.nn.softmax(x.reshape(-1, WIDTH) @ p["router"])
    picked = jax.nn.one_hot(jax.lax.top_k(scores, CHOICES)[1], EXPERTS).sum((0, 1))
    return 0.01 * EXPERTS * (share(picked) * scores.sum(0)).sum()


def _there(slots: Any) -> Any:
    """Buffers `(E, b, C, D)` to their experts: `(E / n, n b, C, D)`."""
    return lax.all_to_all(slots, "data", 0, 1, tiled=True)


def _home(slots: Any) -> Any:
    return lax.all_to_all(slots, "data", 1, 0, tiled=True)


def _step_by_hand(mesh: Mesh, tokens: int, way: "Way") -> Any:
    def local(params: Any, x: Any) -> Any:
        def loss(p: Any) -> Any:
            hidden = jnp.tanh(x @ p["in"])
            total = ((hidden + way.by_hand(p, hidden)) ** 2).sum() / (tokens * WIDTH)
            if not way.balanced:
                return total
            return total + _balance(p, hidden, lambda sums: lax.psum(sums, "data") / tokens**2)

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
    return jax.eval_shape(experts.init, jax.random.key(0))


PLANS = {
    "plurax": px.Plan(data=DEVICES, shardings=dict.fromkeys(WEIGHTS, ("data", None, None))),
    "kept on each device": px.Plan(data=DEVICES),
    "gathered": px.Plan(data=DEVICES, zero=3),
}


class Way(NamedTuple):
    """A way of dispatch: plain code, by hand, and for XLA's partitioner; with a balanced load?"""

    plain: Callable[[Any, Any], Any]
    by_hand: Callable[[Any, Any], Any]
    by_xla: Callable[[Mesh], Callable[[Any, Any], Any]]
    balanced: bool = False


def _sorted(p: Any, x: Any) -> Any:
    return experts.sorted_rows(p, x.reshape(-1, WIDTH)).reshape(x.shape)


def _grouped_by_xla(mesh: Mesh) -> Callable[[Any, Any], Any]:
    def split(*names: str | None) -> Callable[[Any], Any]:
        sharding = NamedSharding(mesh, P(*names))
        return lambda slots: lax.with_sharding_constraint(slots, sharding)

    return lambda p, x: experts.grouped(p, x, split("data"), split(None, "data"))


WAYS = {
    "sorted rows": Way(_sorted, sorted_by_hand, lambda _: _sorted),
    "balanced": Way(_sorted, sorted_by_hand, lambda _: _sorted, balanced=True),
    "buffers": Way(
        experts.grouped,
        lambda p, x: experts.grouped(p, x, _there, _home),
        _grouped_by_xla,
    ),
}


def _task(way: Way) -> px.Task:
    def loss(params: Any, batch: Any, keys: Any) -> Any:
        return (experts.layer(params, batch["x"], way.plain) ** 2).mean((1, 2))

    def balanced(params: Any, batch: Any, keys: Any, mask: Any) -> Any:
        hidden, tokens = jnp.tanh(batch["x"] @ params["in"]), batch["x"][:, :, 0].size
        balance = _balance(params, hidden, lambda sums: sums / tokens**2)
        return loss(params, batch, keys) + balance

    if way.balanced:
        return px.Task(init=experts.init, loss=balanced, coupled=True)
    return px.Task(init=experts.init, loss=loss)


def _step_by_xla(way: Way, mesh: Mesh) -> Any:
    dispatch = way.by_xla(mesh)

    def step(params: Any, x: Any) -> Any:
        def loss(p: Any) -> Any:
            total = (experts.layer(p, x, dispatch) ** 2).mean()
            hidden, tokens = jnp.tanh(x @ p["in"]), x[:, :, 0].size
            if not way.balanced:
                return total
            return total + _balance(p, hidden, lambda sums: sums / tokens**2)

        return jax.tree.map(lambda p, g: p - RATE * g, params, jax.grad(loss)(params))

    return jax.jit(step, donate_argnums=0)


NAMES = (*PLANS, "by hand", "XLA's partitioner")


def compiled(way: Way, name: str, devices: Sequence[Any], tokens: int) -> CompiledStep:
    """Return the step of a name for so many tokens."""
    shape = (8, tokens // 8, WIDTH)
    if name in PLANS:
        batch = {"x": jax.ShapeDtypeStruct(shape, jnp.float32)}
        task, optimizer = _task(way), optax.sgd(RATE)
        return StepOfPlurax(px.compile(task, optimizer, PLANS[name], batch, devices=devices))
    mesh = Mesh(np.asarray(devices), ("data",))
    split, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    params = {
        key: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=split if key in WEIGHTS else whole
        )
        for key, leaf in _like().items()
    }
    x = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=split)
    if name == "by hand":
        return StepOfJax(_step_by_hand(mesh, tokens, way), params, x, mesh)
    return StepOfJax(_step_by_xla(way, mesh), params, x, mesh)


def _text(name: str, step: CompiledStep) -> str:
    sent = Counter[str]()
    for one in step.sent:
        sent[one.kind] += one.bytes * (one.trips or 0)  # later turns are in a loop
    sizes = ", ".join(f"{kind} {size / 2**20:5.1f}" for kind, size in sorted(sent.items()))
    return f"{name:20} {step.temporaries / 2**20:6,.0f} MiB; {sizes} MiB"


def here() -> None:
    """Print what each takes on eight virtual devices of this machine."""
    px.virtual_devices(DEVICES)
    for title, way in WAYS.items():
        print(f"{title}:")
        _time(way)


def _time(way: Way) -> None:
    """Print what a way of dispatch takes by each name."""
    steps = {name: compiled(way, name, jax.devices()[:DEVICES], HERE) for name in NAMES}
    x = np.random.default_rng(0).normal(size=(8, HERE // 8, WIDTH)).astype(np.float32)
    plain = steps["kept on each device"]
    plain.start(None, x)
    params = plain.params
    for step in steps.values():
        step.start(params, x)
        step.step()
    seconds = dict(zip(steps, median_seconds([*steps.values()], ROUNDS), strict=True))
    exact = plain.params
    for name, step in steps.items():
        found = step.params
        apart = max(float(np.abs(found[key] - exact[key]).max()) for key in exact)
        print(f"{_text(name, step)}; {seconds[name]:5.2f} s of processor time, "
              f"{seconds[name] / seconds['by hand']:4.2f} x by hand; {apart:.0e} apart",
              flush=True)  # fmt: skip


def elsewhere(target: str) -> None:
    """Print what a machine's compiler makes of each."""
    for title, way in WAYS.items():
        for name in NAMES:
            step = compiled(way, name, px.topology(target)[:DEVICES], TOKENS)
            print(f"{target:10} {title:12} {_text(name, step)}", flush=True)


if __name__ == "__main__":
    sys.exit(run(str(__doc__), here, elsewhere))
