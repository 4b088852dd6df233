"""Attention in blocks of keys beside attention as written, and beside such blocks written by hand.

    python -m benchmarks.long_context                     # this machine: seconds and memory
    python -m benchmarks.long_context 1xH100 v5e:2x2      # compiled for machines that are not here

A causal transformer layer after another, one sequence, the same network three times: attention as
equations; the same with `Plan(stream=...)`; and a `jax.custom_vjp` whose two loops are written by
hand, as in FlashAttention-2 (Dao 2023, https://arxiv.org/abs/2307.08691), on one device as plain
JAX. Seconds are medians of steps in turns.
"""

import argparse
import functools
import math
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import plurax as px

WIDTH, HEADS, LAYERS, BLOCK = 256, 4, 2, 512
HERE = (1024, 2048, 4096)
ELSEWHERE = (2048, 8192, 32768, 131072)
ROUNDS = 7


def as_written(q: Any, k: Any, v: Any) -> Any:
    """Causal attention of `(B, T, N, H)`, its softmax in float32."""
    scores = _product("btnh,bsnh->bnts", q, k) / math.sqrt(q.shape[-1])
    seen = jnp.tril(jnp.ones(scores.shape[2:], bool))[None, None]
    weights = jax.nn.softmax(jnp.where(seen, scores, -1e30)).astype(v.dtype)
    return jnp.einsum("bnts,bsnh->btnh", weights, v)


def _product(dims: str, x: Any, y: Any) -> Any:
    """A product of two arrays of one dtype, summed and returned in float32 or more."""
    return jnp.einsum(dims, x, y, preferred_element_type=jnp.promote_types(x.dtype, jnp.float32))


def _scores(q: Any, k: Any, start: Any) -> Any:
    """Scores of all queries and the block of keys from `start` on, masked."""
    scores = _product("bnth,bnsh->bnts", q, k) / math.sqrt(q.shape[-1])
    rows, columns = jnp.arange(q.shape[2])[:, None], start + jnp.arange(k.shape[2])[None]
    return jnp.where((columns <= rows)[None, None], scores, -1e30)


def _blocks(x: Any) -> Any:
    """`(B, N, S, H)` as blocks `(S / block, B, N, block, H)`."""
    b, n, s, h = x.shape
    return jnp.moveaxis(x.reshape(b, n, -1, min(BLOCK, s), h), 2, 0)


@jax.custom_vjp
def _by_hand(q: Any, k: Any, v: Any) -> Any:
    return _forward(q, k, v)[0]


def _forward(q: Any, k: Any, v: Any) -> Any:
    def add(carry: Any, block: Any) -> Any:
        top, total, out = carry
        k, v, start = block
        scores = _scores(q, k, start)
        new = jnp.maximum(top, scores.max(-1))
        weights = jnp.exp(scores - new[..., None])
        scale = jnp.exp(top - new)
        out = out * scale[..., None] + _product("bnts,bnsh->bnth", weights.astype(v.dtype), v)
        return (new, total * scale + weights.sum(-1), out), None

    rows = q.shape[:3]
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    start = jnp.full(rows, -jnp.inf, dtype), jnp.zeros(rows, dtype), jnp.zeros(q.shape, dtype)
    starts = jnp.arange(0, k.shape[2], min(BLOCK, k.shape[2]))
    (top, total, out), _ = lax.scan(add, start, (_blocks(k), _blocks(v), starts))
    out = (out / total[..., None]).astype(q.dtype)
    return out, (q, k, v, out, top + jnp.log(total))


def _backward(kept: Any, d_out: Any) -> Any:
    q, k, v, out, log_sum = kept
    delta = (d_out * out).astype(log_sum.dtype).sum(-1)

    def add(d_q: Any, block: Any) -> Any:
        k, v, start = block
        weights = jnp.exp(_scores(q, k, start) - log_sum[..., None])
        d_weights = _product("bnth,bnsh->bnts", d_out, v)
        d_scores = weights * (d_weights - delta[..., None]) / math.sqrt(q.shape[-1])
        d_scores, weights = d_scores.astype(q.dtype), weights.astype(q.dtype)
        d_q = d_q + _product("bnts,bnsh->bnth", d_scores, k)
        d_k = jnp.einsum("bnts,bnth->bnsh", d_scores, q)
        return d_q, (d_k, jnp.einsum("bnts,bnth->bnsh", weights, d_out))

    starts = jnp.arange(0, k.shape[2], min(BLOCK, k.shape[2]))
    d_q, rows = lax.scan(add, jnp.zeros(q.shape, delta.dtype), (_blocks(k), _blocks(v), starts))
    d_k, d_v = (jnp.moveaxis(x, 0, 2).reshape(k.shape) for x in rows)
    return d_q.astype(q.dtype), d_k, d_v


_by_hand.defvjp(_forward, _backward)


def by_hand(q: Any, k: Any, v: Any) -> Any:
    """The same attention, its blocks written by hand."""
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    return _by_hand(q, k, v).swapaxes(1, 2)


def transformer_layer(attention: Callable[..., Any], x: Any, p: Any) -> Any:
    """Return the output of a layer, and no row: the body of a loop over layers."""
    q, k, v = jnp.einsum("btd,dcnh->cbtnh", x, p["qkv"])
    x = x + jnp.einsum("btnh,nhd->btd", attention(q, k, v), p["out"])
    return x + jax.nn.gelu(x @ p["up"]) @ p["down"], None


def task_of(attention: Callable[..., Any], heads: int = HEADS) -> px.Task:
    """A causal transformer on sequences of vectors `(B, T, width)`."""

    def init(key: Any) -> Any:
        keys, shape = jax.random.split(key, 4), (LAYERS, WIDTH, 3, heads, WIDTH // heads)

        def normal(key: Any, *shape: int) -> Any:
            return jax.random.normal(key, shape) * 0.05

        return {
            "qkv": normal(keys[0], *shape),
            "out": normal(keys[1], LAYERS, heads, WIDTH // heads, WIDTH),
            "up": normal(keys[2], LAYERS, WIDTH, 4 * WIDTH),
            "down": normal(keys[3], LAYERS, 4 * WIDTH, WIDTH),
        }

    def loss(params: Any, batch: Any, keys: Any) -> Any:
        layer = functools.partial(transformer_layer, attention)
        x, _ = lax.scan(layer, batch["x"], params)
        return (x**2).mean((1, 2))

    return px.Task(init=init, loss=loss)


VARIANTS: dict[str, tuple[Callable[..., Any], int | None]] = {
    "as written": (as_written, None),
    "in blocks": (as_written, BLOCK),
    "by hand": (by_hand, None),
}


def compiled(name: str, tokens: int, devices: Any = None) -> px.Program:
    """Return the compiled program of a variant for sequences of so many tokens."""
    attention, block = VARIANTS[name]
    batch = {"x": jax.ShapeDtypeStruct((1, tokens, WIDTH), jnp.float32)}
    plan = px.Plan(stream=block, remat="full")
    return px.compile(task_of(attention), optax.sgd(1e-3), plan, batch, devices=devices)


def here() -> None:
    """Print seconds and memory on this machine."""
    for tokens in HERE:
        batch = {"x": np.random.default_rng(0).normal(size=(1, tokens, WIDTH)).astype(np.float32)}
        steps, times, held = {}, {}, {}
        for name in VARIANTS:
            program = compiled(name, tokens)
            held[name], times[name] = program.memory().temporaries, []
            steps[name] = functools.partial(_step, program, [program.init(seed=0)], batch)
            steps[name]()
        for _ in range(ROUNDS):
            for name, step in steps.items():
                started = time.process_time()
                step()
                times[name].append(time.process_time() - started)
        median = {name: statistics.median(each) for name, each in times.items()}
        for name in VARIANTS:
            print(f"{tokens:7,} tokens, {name:10} {median[name]:6.2f} s of processor time, "
                  f"{median[name] / median['by hand']:5.2f} x by hand, "
                  f"{held[name] / 2**20:7.0f} MiB", flush=True)  # fmt: skip


def _step(program: px.Program, state: list[Any], batch: Any) -> None:
    state[0], metrics = program.step(state[0], batch)
    jax.block_until_ready(metrics["loss"])


def elsewhere(target: str) -> None:
    """Print the memory that a machine's compiler gives one of its devices."""
    devices = px.topology(target)[:1]
    for tokens in ELSEWHERE:
        for name in VARIANTS:
            if name == "as written" and tokens > ELSEWHERE[1]:
                continue
            try:
                held = compiled(name, tokens, devices).memory().temporaries
            except px.errors.OutOfMemoryError:
                print(f"{target:8} {tokens:7,} tokens, {name:10} does not fit", flush=True)
                continue
            print(f"{target:8} {tokens:7,} tokens, {name:10} {held / 2**20:9,.0f} MiB, "
                  f"{held / tokens / 1024:7,.0f} KiB a token", flush=True)  # fmt: skip


def run(text: str, here: Callable[[], None], elsewhere: Callable[[str], None]) -> int:
    """Measure here, or compile for the machines that the command line names."""
    parser = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("targets", nargs="*")
    jax.config.update("jax_platforms", "cpu")
    targets = parser.parse_args().targets
    for target in targets:
        elsewhere(target)
    if not targets:
        here()
    return 0


if __name__ == "__main__":
    sys.exit(run(str(__doc__), here, elsewhere))
