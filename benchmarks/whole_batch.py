"""A loss that compares all examples of a step, in microbatches, beside GradCache by hand.

    python -m benchmarks.whole_batch                  # this machine: seconds and memory
    python -m benchmarks.whole_batch 8xH100 v5e:2x4   # compiled for machines that are not here

Perceptrons with a residual each, and a contrastive loss of what they return for each example, on
eight devices: `plurax.over_batch` with one microbatch and with eight; the same by `jax.shard_map`,
written as Gao et al. 2021 (https://arxiv.org/abs/2101.06983) do; and a loss of each microbatch
alone, which compares fewer examples. Seconds are the processor's, medians of steps in turns;
`apart` is the largest difference of new parameters to those of one microbatch.
"""

import functools
import sys
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

LAYERS, TOKENS, MICROBATCHES, DEVICES, RATE, ROUNDS = 4, 64, 8, 8, 1e-3, 9
HERE, ELSEWHERE = (256, 256), (1024, 512)
"""The width, and the examples of a step."""


def init(key: Any, width: int) -> Any:
    """The weights, of four hidden units for each number."""
    keys = jax.random.split(key, 3)
    shapes = {
        "up": (LAYERS, width, 4 * width),
        "down": (LAYERS, 4 * width, width),
        "out": (width, width // 4),
    }
    normal = jax.random.normal
    return {n: 0.05 * normal(k, shape) for k, (n, shape) in zip(keys, shapes.items(), strict=True)}


def embeddings(params: Any, x: Any) -> Any:
    """One vector of length one for each example `(B, T, D)`."""

    def layer(h: Any, p: Any) -> tuple[Any, None]:
        return h + jax.nn.gelu(h @ p["up"]) @ p["down"], None

    h, _ = lax.scan(layer, x, {name: params[name] for name in ("up", "down")})
    z = h.mean(1) @ params["out"]
    return z / jnp.linalg.norm(z, axis=1, keepdims=True)


def compared(z: Any, candidates: Any, first: Any = 0) -> Any:
    """The losses of examples `first`, `first + 1`, ... against all candidates."""
    places = first + jnp.arange(len(z))
    return optax.softmax_cross_entropy_with_integer_labels(10 * z @ candidates.T, places)


def losses(z: Any, batch: Any, mask: Any) -> Any:
    """The losses of all examples; there is no padding here."""
    return compared(z, jnp.where(mask[:, None], z, 0))


def by_hand(mesh: Mesh, examples: int) -> Any:
    """A step of parameters and rows, whose microbatches are computed twice."""

    def local(params: Any, x: Any) -> Any:
        rows = x.reshape(MICROBATCHES, -1, *x.shape[1:])
        cached = lax.map(functools.partial(embeddings, params), rows)

        def total(cached: Any) -> Any:
            z = cached.reshape(len(x), -1)
            every = lax.all_gather(z, "data", tiled=True)
            return compared(z, every, len(x) * lax.axis_index("data")).sum() / examples

        def add(grads: Any, part: Any) -> tuple[Any, None]:
            own, by = part
            _, back = jax.vjp(lambda p: embeddings(p, own), params)
            return jax.tree.map(jnp.add, grads, back(by)[0]), None

        zeros = jax.tree.map(jnp.zeros_like, params)
        grads, _ = lax.scan(add, zeros, (rows, jax.grad(total)(cached)))
        return jax.tree.map(lambda p, g: p - RATE * g, params, lax.psum(grads, "data"))

    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False
    )
    return jax.jit(mapped, donate_argnums=0)


def steps(devices: Any, width: int, examples: int) -> dict[str, CompiledStep]:
    """The compiled steps by name."""

    def outputs(params: Any, batch: Any, keys: Any) -> Any:
        return embeddings(params, batch["x"])

    def each(params: Any, batch: Any, keys: Any, mask: Any) -> Any:
        return losses(outputs(params, batch, keys), batch, mask)

    start = functools.partial(init, width=width)
    whole = px.Task(start, px.over_batch(outputs, losses))
    x = jax.ShapeDtypeStruct((examples, TOKENS, width), np.float32)
    mesh = jax.make_mesh((DEVICES,), ("data",), devices=devices)

    def placed(leaf: Any, spec: P) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    params = jax.eval_shape(start, jax.random.key(0))
    like = jax.tree.map(lambda leaf: placed(leaf, P()), params), placed(x, P("data"))

    def compiled(task: px.Task, microbatches: int) -> StepOfPlurax:
        plan = px.Plan(data=DEVICES, microbatches=microbatches)
        return StepOfPlurax(px.compile(task, optax.sgd(RATE), plan, {"x": x}, devices=devices))

    return {
        "over_batch, one microbatch": compiled(whole, 1),
        "over_batch": compiled(whole, MICROBATCHES),
        "by hand": StepOfJax(by_hand(mesh, examples), *like, mesh),
        "of each microbatch": compiled(px.Task(start, each, coupled=True), MICROBATCHES),
    }


def main(targets: list[str]) -> None:
    """Print a row for each step, on this machine or compiled for others."""
    px.virtual_devices(DEVICES)
    for target in targets:
        for name, step in steps(px.topology(target), *ELSEWHERE).items():
            print(f"{target:8} {name:28} {_compiled(step)}", flush=True)
    if not targets:
        every = steps(jax.devices()[:DEVICES], *HERE)
        width, examples = HERE
        x = np.random.default_rng(0).normal(size=(examples, TOKENS, width)).astype(np.float32)
        first = init(jax.random.split(jax.random.key(0))[0], width)
        for step in every.values():
            step.start(jax.device_get(first), x)
            step.step()
        exact = every["over_batch, one microbatch"].params
        apart = [_apart(step.params, exact) for step in every.values()]
        seconds = median_seconds([*every.values()], ROUNDS)
        for name, step, taken, far in zip(every, every.values(), seconds, apart, strict=True):
            print(f"{name:28} {taken:6.2f} s {far:.0e} apart {_compiled(step)}")


def _compiled(step: CompiledStep) -> str:
    sent = sum(one.bytes_sent * (one.trips or 1) for one in step.sent)
    return f"{step.temporaries / 2**20:8.0f} MiB of temporaries {sent / 2**20:6.1f} MiB sent"


def _apart(params: Any, others: Any) -> float:
    far = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), params, others)
    return max(jax.tree.leaves(far))


if __name__ == "__main__":
    main(sys.argv[1:])
