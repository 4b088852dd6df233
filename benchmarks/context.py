"""Tokens over devices beside the same written by hand, and beside XLA's partitioner.

    python -m benchmarks.context                          # 8 virtual CPU devices
    python -m benchmarks.context 8xH100 v5e:2x4           # compiled for machines that are not here

A transformer of two layers on one sequence, rematerialized layer by layer, one step of SGD, with
attention to all keys and under a causal mask:

    ring, gather, heads             `Plan(context=8, context_strategy=..., stream=512)`, from
                                    attention as equations
    heads+ring                      the same with two heads, exchanged within four groups of devices
    ... by hand                     `jax.shard_map`, with the loops of FlashAttention-2 on blocks;
                                    under the mask they compute hidden keys, too, and JAX keeps the
                                    mask of all blocks when it rematerializes a layer
    XLA's partitioner               attention as equations in `jax.jit`, tokens split by sharding

Seconds are processor seconds, medians of steps in turns; bytes are what each device receives, read
from the compiled program; the error is the largest of the new weights, beside one device as
written, by the largest weight.

Sources: Liu et al. 2023, "Ring Attention", https://arxiv.org/abs/2310.01889; Jacobs et al. 2023,
"DeepSpeed Ulysses", https://arxiv.org/abs/2309.14509; Fang and Zhao 2024, "USP",
https://arxiv.org/abs/2405.07719.
"""

import functools
import itertools
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import plurax as px
from benchmarks.compiled_steps import CompiledStep, StepOfJax, StepOfPlurax, median_seconds
from benchmarks.long_context import WIDTH, as_written, run, task_of, transformer_layer

DEVICES, HEADS, BLOCK, RATE = 8, 8, 512, 1e-3
HERE = (2048, 4096)
ELSEWHERE = (32768, 131072)
ROUNDS = 5
STRATEGIES = ("ring", "gather", "heads", "heads+ring")
FEWER = 2
"""The heads with `heads+ring`, so that keys go around four groups of devices."""

# --- By hand --------------------------------------------------------------------------------------
# Arrays are (B, N, T, H); a carry is the maximum and the sum of weights (B, N, T), and the output.


def _scores(q: Any, k: Any, first_query: Any, first_key: Any) -> Any:
    """Scores, those of later keys masked; of all keys where `first_query` is None."""
    scores = jnp.einsum("bnth,bnsh->bnts", q, k) / np.sqrt(q.shape[-1])
    if first_query is None:
        return scores
    rows = first_query + jnp.arange(q.shape[2])[:, None]
    return jnp.where(first_key + jnp.arange(k.shape[2])[None] <= rows, scores, -1e30)


def _blocks(x: Any) -> Any:
    b, n, s, h = x.shape
    block = min(BLOCK, s)
    return jnp.moveaxis(x.reshape(b, n, s // block, block, h), 2, 0)


def _empty(q: Any) -> Any:
    rows = q.shape[:3]
    return jnp.full(rows, -jnp.inf), jnp.zeros(rows), jnp.zeros(q.shape)


def _add_keys(carry: Any, q: Any, k: Any, v: Any, first_query: Any, first_key: Any) -> Any:
    """Add keys to the maximum and the sums of queries, block by block."""

    def add(carry: Any, block: Any) -> Any:
        top, total, out = carry
        k, v, start = block
        scores = _scores(q, k, first_query, start)
        new = jnp.maximum(top, scores.max(-1))
        weights, scale = jnp.exp(scores - new[..., None]), jnp.exp(top - new)
        out = out * scale[..., None] + jnp.einsum("bnts,bnsh->bnth", weights, v)
        return (new, total * scale + weights.sum(-1), out), None

    stacked = _blocks(k)
    starts = first_key + stacked.shape[3] * jnp.arange(stacked.shape[0])
    return lax.scan(add, carry, (stacked, _blocks(v), starts))[0]


def _finished(carry: Any) -> Any:
    top, total, out = carry
    return out / total[..., None], top + jnp.log(total)


def _gradients(
    d_q: Any, kept: Sequence[Any], k: Any, v: Any, first_query: Any, first_key: Any
) -> Any:
    """Return the gradient of queries with what keys add to it, and those of keys and values."""
    q, log_sum, delta, d_out = kept

    def add(d_q: Any, block: Any) -> Any:
        k, v, start = block
        weights = jnp.exp(_scores(q, k, first_query, start) - log_sum[..., None])
        d_weights = jnp.einsum("bnth,bnsh->bnts", d_out, v)
        d_scores = weights * (d_weights - delta[..., None]) / np.sqrt(q.shape[-1])
        d_q = d_q + jnp.einsum("bnts,bnsh->bnth", d_scores, k)
        d_k = jnp.einsum("bnts,bnth->bnsh", d_scores, q)
        return d_q, (d_k, jnp.einsum("bnts,bnth->bnsh", weights, d_out))

    stacked = _blocks(k)
    starts = first_key + stacked.shape[3] * jnp.arange(stacked.shape[0])
    d_q, rows = lax.scan(add, d_q, (stacked, _blocks(v), starts))
    return d_q, *(jnp.moveaxis(x, 0, 2).reshape(k.shape) for x in rows)


def _whole_attention(first_query: Callable[[Any], Any]) -> Callable[..., Any]:
    """Return attention to gathered keys; `first_query` of a device's queries' first token."""

    @jax.custom_vjp
    def attention(q: Any, k: Any, v: Any) -> Any:
        return forward(q, k, v)[0]

    def forward(q: Any, k: Any, v: Any) -> Any:
        out, log_sum = _finished(_add_keys(_empty(q), q, k, v, first_query(q), 0))
        return out, (q, k, v, out, log_sum)

    def backward(kept: Any, d_out: Any) -> Any:
        q, k, v, out, log_sum = kept
        some = q, log_sum, (d_out * out).sum(-1), d_out
        return _gradients(jnp.zeros(q.shape), some, k, v, first_query(q), 0)

    attention.defvjp(forward, backward)
    return attention


def gather_by_hand(causal: bool, q: Any, k: Any, v: Any) -> Any:
    """Attention of a device's tokens (B, t, N, H), with all keys and values gathered."""
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    k, v = (lax.all_gather(x, "context", axis=2, tiled=True) for x in (k, v))
    first = (lambda q: lax.axis_index("context") * q.shape[2]) if causal else lambda _: None
    return _whole_attention(first)(q, k, v).swapaxes(1, 2)


def heads_by_hand(causal: bool, q: Any, k: Any, v: Any) -> Any:
    """Attention of all tokens for a share of the heads, exchanged and back."""
    q, k, v = (
        lax.all_to_all(x.swapaxes(1, 2), "context", split_axis=1, concat_axis=2, tiled=True)
        for x in (q, k, v)
    )
    out = _whole_attention(lambda _: 0 if causal else None)(q, k, v)
    out = lax.all_to_all(out, "context", split_axis=2, concat_axis=1, tiled=True)
    return out.swapaxes(1, 2)


def _next(*arrays: Any) -> Any:
    devices = lax.axis_size("context")
    pairs = [(device, (device + 1) % devices) for device in range(devices)]
    return tuple(lax.ppermute(x, "context", pairs) for x in arrays)


def _first_tokens(causal: bool, q: Any, turn: Any) -> tuple[Any, Any]:
    """Return the first token of a device's queries, and of the keys that it has in a turn."""
    if not causal:
        return None, 0
    device, devices = lax.axis_index("context"), lax.axis_size("context")
    return device * q.shape[2], (device - turn) % devices * q.shape[2]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring(causal: bool, q: Any, k: Any, v: Any) -> Any:
    return _ring_forward(causal, q, k, v)[0]


def _ring_forward(causal: bool, q: Any, k: Any, v: Any) -> Any:
    def turn(state: Any, number: Any) -> Any:
        carry, k, v = state
        following = _next(k, v)
        return (_add_keys(carry, q, k, v, *_first_tokens(causal, q, number)), *following), None

    turns = lax.axis_size("context") - 1
    (carry, *last), _ = lax.scan(turn, (_empty(q), k, v), jnp.arange(turns))
    out, log_sum = _finished(_add_keys(carry, q, *last, *_first_tokens(causal, q, turns)))
    return out, (q, k, v, out, log_sum)


def _ring_backward(causal: bool, kept: Any, d_out: Any) -> Any:
    q, k, v, out, log_sum = kept
    some = q, log_sum, (d_out * out).sum(-1), d_out

    def turn(state: Any, number: Any) -> Any:
        d_q, k, v, d_k, d_v = state
        following = _next(k, v)
        d_q, more_k, more_v = _gradients(d_q, some, k, v, *_first_tokens(causal, q, number))
        return (d_q, *following, *_next(d_k + more_k, d_v + more_v)), None

    zeros = jnp.zeros(q.shape), k, v, jnp.zeros(k.shape), jnp.zeros(v.shape)
    turns = lax.axis_size("context") - 1
    (d_q, k, v, d_k, d_v), _ = lax.scan(turn, zeros, jnp.arange(turns))
    d_q, more_k, more_v = _gradients(d_q, some, k, v, *_first_tokens(causal, q, turns))
    return d_q, *_next(d_k + more_k, d_v + more_v)


_ring.defvjp(_ring_forward, _ring_backward)


def ring_by_hand(causal: bool, q: Any, k: Any, v: Any) -> Any:
    """Attention of a device's tokens (B, t, N, H), keys and values in a ring."""
    return _ring(causal, *(x.swapaxes(1, 2) for x in (q, k, v))).swapaxes(1, 2)


def both_by_hand(causal: bool, q: Any, k: Any, v: Any) -> Any:
    """The same after heads were exchanged for the tokens of the mesh axis `group`, and back."""
    q, k, v = (
        lax.all_to_all(x.swapaxes(1, 2), "group", split_axis=1, concat_axis=2, tiled=True)
        for x in (q, k, v)
    )
    out = lax.all_to_all(_ring(causal, q, k, v), "group", split_axis=2, concat_axis=1, tiled=True)
    return out.swapaxes(1, 2)


def _to_all_keys(q: Any, k: Any, v: Any) -> Any:
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(q.shape[-1])
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), v)


WRITTEN = {False: _to_all_keys, True: as_written}
"""Attention as equations, to all keys and under a causal mask."""

BY_HAND = {
    "ring": ring_by_hand, "gather": gather_by_hand, "heads": heads_by_hand,
    "heads+ring": both_by_hand,
}  # fmt: skip


def _loss(params: Any, x: Any, attention: Callable[..., Any], tokens: int) -> Any:
    layer = jax.checkpoint(functools.partial(transformer_layer, attention))
    x, _ = lax.scan(layer, x, params)
    return (x**2).sum() / (tokens * WIDTH)


def _sgd(params: Any, grads: Any) -> Any:
    return jax.tree.map(lambda p, g: p - RATE * g, params, grads)


def step_by_hand(strategy: str, causal: bool, tokens: int, mesh: Mesh) -> Any:
    """Return the jitted step `(params, x) -> params`."""

    def step(params: Any, x: Any) -> Any:
        attention = functools.partial(BY_HAND[strategy], causal)
        grads = jax.grad(_loss)(params, x, attention, tokens)
        return _sgd(params, lax.psum(grads, mesh.axis_names))

    split = P(None, mesh.axis_names)
    mapped = jax.shard_map(step, mesh=mesh, in_specs=(P(), split), out_specs=P(), check_vma=False)
    return jax.jit(mapped, donate_argnums=0)


def step_by_xla(causal: bool, tokens: int, mesh: Mesh) -> Any:
    """Return the step with attention as written, its tokens split by XLA's partitioner."""
    whole, split = NamedSharding(mesh, P()), NamedSharding(mesh, P(None, "context"))

    def step(params: Any, x: Any) -> Any:
        return _sgd(params, jax.grad(_loss)(params, x, WRITTEN[causal], tokens))

    return jax.jit(step, in_shardings=(whole, split), out_shardings=whole, donate_argnums=0)


# --- Measured -------------------------------------------------------------------------------------


def compiled(
    name: str, causal: bool, tokens: int, devices: Sequence[Any]
) -> tuple[CompiledStep, float]:
    """Return the step of a name, and the seconds it took to compile."""
    strategy, _, by_hand = name.partition(" ")
    task, started = task_of(WRITTEN[causal], heads=_heads(name)), time.perf_counter()
    step: CompiledStep
    if strategy in STRATEGIES and not by_hand:
        batch = {"x": jax.ShapeDtypeStruct((1, tokens, WIDTH), jnp.float32)}
        plan = px.Plan(context=DEVICES, context_strategy=strategy, stream=BLOCK, remat="full")
        step = StepOfPlurax(px.compile(task, optax.sgd(RATE), plan, batch, devices=devices))
    else:
        mesh = Mesh(np.asarray(devices), ("context",))
        if strategy == "heads+ring":
            mesh = Mesh(np.asarray(devices).reshape(-1, FEWER), ("context", "group"))
        hand = strategy in STRATEGIES
        own = functools.partial(step_by_hand, strategy) if hand else step_by_xla
        jitted = own(causal, tokens, mesh)
        whole, split = NamedSharding(mesh, P()), NamedSharding(mesh, P(None, mesh.axis_names))
        params = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole),
            jax.eval_shape(task.init, jax.random.key(0)),
        )
        x = jax.ShapeDtypeStruct((1, tokens, WIDTH), jnp.float32, sharding=split)
        step = StepOfJax(jitted, params, x, mesh)
    return step, time.perf_counter() - started


def _heads(name: str) -> int:
    return FEWER if name.startswith("heads+ring") else HEADS


def _on_one_device(causal: bool, heads: int, x: Any) -> tuple[Any, Any]:
    """Return the parameters before and after a step of attention as written."""
    task = task_of(WRITTEN[causal], heads=heads)
    alone = px.compile(task, optax.sgd(RATE), px.Plan(remat="full"), {"x": x})
    state = alone.init(seed=0)
    params = jax.device_get(state.params)
    state, _ = alone.step(state, {"x": x})
    return params, jax.device_get(state.params)


NAMES = (*STRATEGIES, *(f"{name} by hand" for name in STRATEGIES), "XLA's partitioner")


def here() -> None:
    """Print what each takes on 8 virtual devices of this machine."""
    px.virtual_devices(DEVICES)
    for tokens, causal in itertools.product(HERE, WRITTEN):
        x = np.random.default_rng(0).normal(size=(1, tokens, WIDTH)).astype(np.float32)
        steps = {name: compiled(name, causal, tokens, jax.devices()[:DEVICES]) for name in NAMES}
        errors, on_one = {}, {heads: _on_one_device(causal, heads, x) for heads in (HEADS, FEWER)}
        for name, (step, _) in steps.items():
            params, exact = on_one[_heads(name)]
            step.start(params, x)
            step.step()
            errors[name] = _largest(step.params, exact)
        seconds = median_seconds([step for step, _ in steps.values()], ROUNDS)
        median = dict(zip(steps, seconds, strict=True))
        for name, case in steps.items():
            beside = median.get(f"{name} by hand")
            ratio = f", {median[name] / beside:4.2f} x by hand" if beside else ""
            print(f"{_case(tokens, causal)}, {_text(name, *case)}, {median[name]:6.2f} s of "
                  f"processor time{ratio}, error {errors[name]:.0e}", flush=True)  # fmt: skip


def _largest(params: Any, exact: Any) -> float:
    """Return the largest difference, by the largest weight."""
    pairs = zip(jax.tree.leaves(params), jax.tree.leaves(exact), strict=True)
    return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs)


def _text(name: str, step: CompiledStep, seconds: float) -> str:
    received = sum(one.bytes * (one.trips or 1) for one in step.sent if one.kind != "all-reduce")
    return (
        f"{name:17} {step.temporaries / 2**20:8,.0f} MiB, {received / 2**20:7,.1f} MiB "
        f"received, compiled in {seconds:3.0f} s"
    )


def elsewhere(target: str) -> None:
    """Print what a machine's compiler makes of each."""
    for tokens, causal, name in itertools.product(ELSEWHERE, WRITTEN, NAMES):
        start = f"{target:8} {_case(tokens, causal)}"
        try:
            case = compiled(name, causal, tokens, px.topology(target)[:DEVICES])
        except (px.errors.OutOfMemoryError, jax.errors.JaxRuntimeError) as error:
            reason = "does not fit" if "emory" in str(error) else str(error).splitlines()[0]
            print(f"{start}, {name:17} {reason[:80]}", flush=True)
            continue
        print(f"{start}, {_text(name, *case)}", flush=True)


def _case(tokens: int, causal: bool) -> str:
    return f"{tokens:7,} tokens, {'causal' if causal else 'all keys'}"


if __name__ == "__main__":
    sys.exit(run(str(__doc__), here, elsewhere))
