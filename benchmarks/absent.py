"""A step compiled for machines that are not here: by plurax, and by hand in plain JAX.

    python -m benchmarks.absent 8xH100 v5e:2x4 --plans data zero3     one line for each side

Both sides are read alike, by the walk of `plurax.analysis.compiled_for`: temporaries of a device,
bytes that it sends, the share of the sending that is hidden, and the seconds of a step, an
estimate. By hand is what users of Flax and MaxText write: `jit`, `NamedSharding` and constraints.
Run it where the compilers are installed: pip install 'plurax[tpu,cuda]'.
"""

import argparse
import dataclasses
import functools
import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import plurax as px
from plurax.analysis.compiled_schedule import walk_schedule
from plurax.hlo.memory import Memory, memory
from plurax.hlo.text import parse
from plurax.targets import Target

OPTIMIZER = optax.adamw(1e-4)


@dataclasses.dataclass(frozen=True)
class Transformer:
    """A decoder in bfloat16 whose layers are scanned; parameters are float32.

    `constrain(x, kind)` is applied to the `residual` behind attention and behind each layer, to the
    `heads` of queries, keys and values, to what is `hidden` in a perceptron, and to the `logits`:
    by hand that is a constraint on the sharding, for plurax a name.
    """

    width: int = 1024
    depth: int = 8
    words: int = 8192
    tokens: int = 1024
    heads: int = 8
    constrain: Callable[[jax.Array, str], jax.Array] = lambda x, kind: x

    def init(self, key: Any) -> Any:
        """Return the parameters, layers stacked."""
        table, head, layers = jax.random.split(key, 3)
        return {
            "table": jax.random.normal(table, (self.words, self.width)) * 0.02,
            "layers": jax.vmap(self.init_layer)(jax.random.split(layers, self.depth)),
            "head": jax.random.normal(head, (self.width, self.words)) * 0.02,
        }

    def init_layer(self, key: Any) -> Any:
        """Return the parameters of one layer."""
        keys = jax.random.split(key, 4)
        width, heads = self.width, self.heads
        shapes = {
            "qkv": (width, 3, heads, width // heads),
            "out": (heads, width // heads, width),
            "up": (width, 4 * width),
            "down": (4 * width, width),
        }
        weights = {
            name: jax.random.normal(key, shape) * 0.02
            for key, (name, shape) in zip(keys, shapes.items(), strict=True)
        }
        return {**weights, "norms": jnp.ones((2, width))}

    def layer(self, p: Any, x: jax.Array) -> jax.Array:
        """Return activations `(B, T, D)` after one layer."""
        h = normed(x, p["norms"][0])
        qkv = (jnp.einsum("btd,dhk->bthk", h, p["qkv"][:, i].astype(x.dtype)) for i in range(3))
        q, k, v = (self.constrain(one, "heads") for one in qkv)
        scores = jnp.einsum("bthk,bshk->bhts", q, k).astype(jnp.float32)
        scores *= (self.width // self.heads) ** -0.5
        causal = jnp.tril(jnp.ones((self.tokens, self.tokens), bool))
        weights = jax.nn.softmax(jnp.where(causal, scores, -1e30)).astype(x.dtype)
        mixed = jnp.einsum("bhts,bshk->bthk", weights, v)
        x = x + jnp.einsum("bthk,hkd->btd", mixed, p["out"].astype(x.dtype))
        x = self.constrain(x, "residual")
        h = normed(x, p["norms"][1])
        hidden = self.constrain(h @ p["up"].astype(x.dtype), "hidden")
        x = x + jax.nn.gelu(hidden) @ p["down"].astype(x.dtype)
        return self.constrain(x, "residual")

    def loss(self, p: Any, batch: Any, keys: Any = None, *, remat: bool = False) -> jax.Array:
        """Return losses `(B,)`."""
        layer = jax.checkpoint(self.layer) if remat else self.layer
        x = p["table"].astype(jnp.bfloat16)[batch["tokens"][:, :-1]]
        x = self.constrain(x, "residual")
        x, _ = jax.lax.scan(lambda x, p: (layer(p, x), None), x, p["layers"])
        logits = self.constrain((x @ p["head"].astype(x.dtype)).astype(jnp.float32), "logits")
        entropy = optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:])
        return entropy.mean(-1)

    def batch(self, size: int) -> Any:
        """Return the shapes of a batch."""
        return {"tokens": jax.ShapeDtypeStruct((size, self.tokens + 1), jnp.int32)}


def normed(x: jax.Array, gain: jax.Array) -> jax.Array:
    """Return activations divided by their root mean square."""
    scale = jax.lax.rsqrt(jnp.mean(x.astype(jnp.float32) ** 2, -1, keepdims=True) + 1e-6)
    return x * scale.astype(x.dtype) * gain.astype(x.dtype)


# --- By hand --------------------------------------------------------------------------------------


MEGATRON = {
    "qkv": (None, None, None, "tensor", None),
    "out": (None, "tensor", None, None),
    "up": (None, None, "tensor"),
    "down": (None, "tensor", None),
    "head": (None, "tensor"),
}
"""By the last part of a parameter's path, the axes of its dims; the first of a stack: layers."""


def constraints(name: str) -> dict[str, P]:
    """Return how activations are split, by kind, as users of plain JAX write it for a plan.

    Without any the compiler splits them as the parameters are, and sends far more. Of tokens that
    are split between layers it gathers what is smaller, here weights; that heads and what is hidden
    are split keeps it to Megatron's plan.
    """
    if name == "context":
        return {"residual": P("data", "context"), "logits": P("data", "context")}
    tokens = "tensor" if name.startswith("sequence") else None
    split = {"residual": P("data", tokens), "logits": P("data", None, "tensor")}
    if name == "sequence, hidden constrained":
        split |= {"heads": P("data", None, "tensor"), "hidden": P("data", None, "tensor")}
    return split


def by_hand(
    model: Transformer, devices: Sequence[Any], size: int, plan: px.Plan, name: str
) -> tuple[jax.stages.Compiled, Mesh]:
    """Compile the step of a plan over two axes as users of plain JAX write it."""
    second = "context" if plan.context > 1 else "tensor"
    grid = np.array(devices).reshape(plan.data, -1)
    mesh = Mesh(grid, ("data", second), axis_types=(AxisType.Auto, AxisType.Auto))
    replicas = ("data", "context") if plan.context > 1 else ("data",)
    remat, pieces = plan.remat == "full", plan.microbatches
    rows = NamedSharding(mesh, P("data"))
    activations = constraints(name)

    def constrain(x: jax.Array, kind: str) -> jax.Array:
        if kind not in activations:
            return x
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, activations[kind]))

    model = dataclasses.replace(model, constrain=constrain)

    def sharded(path: Any, leaf: Any, *, split: bool) -> NamedSharding:
        """Split by `tensor`, and of the other dims the largest that divides; not the layers."""
        name = path[-1].key if path and hasattr(path[-1], "key") else ""
        axes: list[Any] = [None] * leaf.ndim
        if second == "tensor":
            axes = list(MEGATRON.get(name, axes))[: leaf.ndim]
        count = math.prod(mesh.shape[axis] for axis in replicas)
        dims = [d for d in range(leaf.ndim) if leaf.shape[d] % count == 0 and axes[d] is None]
        dims = [d for d in dims if leaf.ndim < 3 or d > 0]
        if split and dims and math.prod(leaf.shape) >= 2**16:
            axes[max(dims, key=lambda d: leaf.shape[d])] = replicas
        return NamedSharding(mesh, P(*axes))

    params = jax.eval_shape(model.init, jax.random.key(0))
    state = jax.eval_shape(OPTIMIZER.init, params)

    def shardings(tree: Any, *, split: bool) -> Any:
        return jax.tree_util.tree_map_with_path(functools.partial(sharded, split=split), tree)

    own = shardings(params, split=plan.zero == 3)
    kept = shardings(state, split=plan.zero >= 1)

    def step(params: Any, state: Any, batch: Any) -> Any:
        def mean_loss(params: Any, batch: Any) -> jax.Array:
            return model.loss(params, batch, remat=remat).mean()

        if pieces == 1:
            loss, grads = jax.value_and_grad(mean_loss)(params, batch)
        else:
            # Microbatches of every device's own rows.
            parts = jax.tree.map(
                lambda x: jax.lax.with_sharding_constraint(
                    x.reshape(plan.data, pieces, -1, *x.shape[1:])
                    .swapaxes(0, 1)
                    .reshape(pieces, -1, *x.shape[1:]),
                    NamedSharding(mesh, P(None, "data")),
                ),
                batch,
            )

            def add(sums: Any, part: Any) -> Any:
                loss, grads = jax.value_and_grad(mean_loss)(params, part)
                grads = jax.lax.with_sharding_constraint(grads, own)
                return jax.tree.map(jnp.add, sums, (loss, grads)), None

            zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), params)
            zeros = jax.lax.with_sharding_constraint(zeros, own)
            (loss, grads), _ = jax.lax.scan(add, (jnp.float32(0), zeros), parts)
            loss, grads = jax.tree.map(lambda x: x / pieces, (loss, grads))
        if plan.zero:
            wanted = shardings(params, split=True)
            grads = jax.lax.with_sharding_constraint(grads, wanted)
        updates, state = OPTIMIZER.update(grads, state, params)
        norm = optax.tree.norm(grads)
        return optax.apply_updates(params, updates), state, (loss, norm)

    whole = NamedSharding(mesh, P())
    jitted = jax.jit(
        step,
        in_shardings=(own, kept, rows),
        out_shardings=(own, kept, (whole, whole)),
        donate_argnums=(0, 1),
    )
    return jitted.lower(params, state, model.batch(size)).compile(), mesh


# --- Both sides -----------------------------------------------------------------------------------

PLANS: dict[str, dict[str, Any]] = {
    "data": {"remat": "full", "microbatches": 2},
    "data, one microbatch": {"remat": "full"},
    "zero1": {"zero": 1, "remat": "full", "microbatches": 2},
    "zero2": {"zero": 2, "remat": "full", "microbatches": 2},
    "zero3": {"zero": 3, "remat": "full", "microbatches": 2},
    "zero3, no remat": {"zero": 3, "microbatches": 2},
    "tensor": {"tensor": 4, "remat": "full"},
    "sequence": {"tensor": 4, "remat": "full"},
    "sequence, hidden constrained": {"tensor": 4, "remat": "full"},
    "context": {"context": 4, "stream": 1024, "zero": 3, "remat": "full"},
}
# By hand the compiler moves the cast to bfloat16 before the reduction, where it may.
PLANS |= {
    f"{name}, sums in bfloat16": {**PLANS[name], "reduce_dtype": "bfloat16"}
    for name in ("data", "data, one microbatch", "zero1", "zero2", "zero3")
}


def make_plan(fields: Mapping[str, Any], devices: int, *, sequence: bool = False) -> px.Plan:
    """Return the plan of these fields over so many devices, with Megatron's rules for `tensor`."""
    fields = dict(fields)
    if "tensor" in fields:
        fields["shardings"] = px.sharding.megatron(
            column={"layers/qkv": (..., "tensor", None), "layers/up": (..., "tensor")},
            row={"layers/out": (..., "tensor", None, None), "layers/down": (..., "tensor", None)},
            head=["head"],
            sequence=["residual"] if sequence else (),
        )
    return px.Plan(data=devices // fields.get("tensor", fields.get("context", 1)), **fields)


def figures(compiled: jax.stages.Compiled, mesh: Mesh, target: Target) -> dict[str, Any]:
    """Return what is compared of a program for a machine."""
    return read_program(compiled.as_text() or "", memory(compiled), mesh, target)


def read_program(text: str, held: Memory, mesh: Mesh, target: Target) -> dict[str, Any]:
    """Return what is compared of a program's text and memory, which this JAX need not have made."""
    schedule = walk_schedule(parse(text), mesh, target.machine, target.clock)
    return {
        "temporaries_mib": held.temporaries / 2**20,
        "copied_mib": (held.outputs - held.aliased) / 2**20,
        "sent_mib": sum(
            one.collective.bytes_sent * (one.collective.trips or 1) for one in schedule.collectives
        )
        / 2**20,
        "hidden": schedule.hidden,
        "step_ms": schedule.seconds * 1e3,
        "computing_ms": schedule.computing * 1e3,
    }


def measure(target: Target, name: str, model: Transformer, sides: Sequence[str]) -> dict[str, Any]:
    """Compile one plan for one machine, by the sides asked for."""
    devices = target.devices()
    sequence, size = name.startswith("sequence"), 8 * len(devices)
    plan = make_plan(PLANS[name], len(devices), sequence=sequence)
    found: dict[str, Any] = {}
    for side in sides:
        started = time.perf_counter()
        if side == "plurax":
            named = dataclasses.replace(model, constrain=px.sharding.name) if sequence else model
            task = px.Task(init=named.init, loss=named.loss)
            program = px.compile(task, OPTIMIZER, plan, model.batch(size), devices=devices)
            compiled, mesh = program.compiled_step, program.mesh
        else:
            compiled, mesh = by_hand(model, devices, size, plan, name)
        found[side] = figures(compiled, mesh, target) | {"seconds": time.perf_counter() - started}
    return found


def main() -> int:
    """Compile, and print a line for each machine, plan and side, in JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.absent", description=__doc__)
    parser.add_argument("machines", nargs="+")
    parser.add_argument("--plans", nargs="+", default=list(PLANS), choices=list(PLANS))
    parser.add_argument("--sides", nargs="+", default=["plurax", "plain JAX"])
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--depth", type=int, default=8)
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    model = Transformer(width=options.width, depth=options.depth)
    for machine in options.machines:
        for name in options.plans:
            found = measure(Target.of(machine), name, model, options.sides)
            for side, values in found.items():
                line = {"machine": machine, "plan": name, "side": side, **values}
                print(json.dumps(line), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
