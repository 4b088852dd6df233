"""Steps on one GPU: networks, the plans they train under, and the same steps by hand.

A row is built when it is measured. Each side by hand is the plain step that one would write: the
losses' gradient, an update of Optax, the state donated; with `bfloat16` the parameters and floats
of the batch are cast before the losses, as a plan with `precision="bfloat16"` casts them.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import plurax as px
from benchmarks import absent_memory, absent_models, experts, gpt, long_context, networks
from benchmarks.sizes import Mlp

Losses = Callable[[Any, Any], Any]
OPTIMIZER = optax.adamw(1e-4)


@dataclasses.dataclass(frozen=True)
class GpuRow:
    """A task under a plan, and by name its losses by hand.

    **Fields:** `batch` of shapes, filled with random numbers; `accumulated`, by hand in so many
    microbatches; `words`, integers of the batch are below.
    """

    task: px.Task
    batch: Any
    plan: px.Plan
    by_hand: Mapping[str, Losses]
    accumulated: int = 1
    words: int = 8


def random_batch(row: GpuRow) -> Any:
    """Return a batch of the shapes of a row, on the host."""
    rng = np.random.default_rng(0)

    def random(leaf: Any) -> Any:
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            return rng.integers(0, row.words, leaf.shape).astype(leaf.dtype)
        return rng.standard_normal(leaf.shape, np.float32).astype(leaf.dtype)

    return jax.tree.map(random, row.batch)


def step_by_hand(row: GpuRow, losses: Losses) -> Callable[[Any, Any], Any]:
    """Return `((params, opt_state), batch) -> ((params, opt_state), loss)`, jitted."""

    def cast(tree: Any) -> Any:
        if row.plan.precision != "bfloat16":
            return tree
        return jax.tree.map(
            lambda x: x.astype(jnp.bfloat16) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree
        )

    def gradient(params: Any, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            return losses(cast(params), cast(batch)).astype(jnp.float32).mean()

        return jax.value_and_grad(loss)(params)

    def accumulated(params: Any, batch: Any) -> Any:
        def add(total: Any, part: Any) -> Any:
            return jax.tree.map(jnp.add, total, gradient(params, part)), None

        count = row.accumulated
        parts = jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), batch)
        zeros = jax.tree.map(jnp.zeros_like, (jnp.float32(0), params))
        total, _ = lax.scan(add, zeros, parts)
        return jax.tree.map(lambda x: x / count, total)

    def step(state: Any, batch: Any) -> Any:
        params, opt_state = state
        loss, grads = (gradient if row.accumulated == 1 else accumulated)(params, batch)
        updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    return jax.jit(step, donate_argnums=0)


# --- Networks -------------------------------------------------------------------------------------


def _of_model(name: str, share: int, words: int = 8, **plan: Any) -> GpuRow:
    """A model of `absent_memory`, whose batch is for eight devices, on `1 / share` of its rows."""
    model = absent_memory.MODELS[name]()
    task, batch = model.task, _share(model.batch, share)
    by_hand = {"JAX by hand": lambda params, batch: task.loss(params, batch, None)}
    return GpuRow(task, batch, px.Plan(**plan), by_hand, words=words)


def _of_drawn(name: str, share: int, words: int = 8, **plan: Any) -> GpuRow:
    """A model of `absent_models`, on `1 / share` of its rows."""
    task, batch, _ = absent_models.MODELS[name]()
    by_hand = {"JAX by hand": lambda params, batch: task.loss(params, batch, None)}
    return GpuRow(task, _share(batch, share), px.Plan(**plan), by_hand, words=words)


def _share(batch: Any, share: int) -> Any:
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((x.shape[0] // share, *x.shape[1:]), x.dtype), batch
    )


GPT2 = gpt.Gpt(depth=12, width=768, heads=12, vocabulary=50304, tokens=1024)
GPT_XL = gpt.Gpt(depth=24, width=2048, heads=16, vocabulary=50304, tokens=1024)
TINY_GPT = gpt.Gpt(depth=2, width=32, heads=2, vocabulary=64, tokens=32)
_POLICIES = {"dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable, "full": None}


def _gpt(model: gpt.Gpt, rows: int, **plan: Any) -> GpuRow:
    """GPT, by hand a scan over its layers, with `jax.checkpoint` where the plan has `remat`."""
    remat = plan.get("remat", "none")

    def losses(params: Any, batch: Any) -> Any:
        def layer(x: Any, p: Any) -> Any:
            return gpt.block(p, x, batch, None), None

        if remat != "none":
            layer = jax.checkpoint(layer, policy=_POLICIES[remat], prevent_cse=False)
        x = gpt.embed(params["embed"], batch, None)
        x, _ = lax.scan(layer, x, params["blocks"])
        return gpt.losses({**params["head"], "table": params["embed"]["table"]}, x, batch, None)

    count = plan.get("microbatches", 1)
    by_hand = {"JAX by hand": losses}
    return GpuRow(
        model.task(), model.batch(rows), px.Plan(**plan), by_hand, count, model.vocabulary
    )


def _cudnn(q: Any, k: Any, v: Any) -> Any:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")


def _long(tokens: int, *, width: int = 1024, fused: bool = True, written: bool = True) -> GpuRow:
    """Attention as equations, in blocks by the plan; by hand in blocks and by cuDNN's kernel."""
    heads, layers = width // 128 if width >= 128 else 2, 4
    sizes = {
        "qkv": (width, 3, heads, width // heads), "out": (heads, width // heads, width),
        "up": (width, 4 * width), "down": (4 * width, width),
    }  # fmt: skip

    def init(key: Any) -> Any:
        rows = [absent_models.matrices(key, sizes) for key in jax.random.split(key, layers)]
        return jax.tree.map(lambda *x: jnp.stack(x), *rows)

    def losses(attention: Callable[..., Any], params: Any, batch: Any) -> Any:
        layer = functools.partial(long_context.transformer_layer, attention)
        x, _ = lax.scan(jax.checkpoint(layer, prevent_cse=False), batch["x"], params)
        return jnp.mean(x.astype(jnp.float32) ** 2, (1, 2))

    def plain(params: Any, batch: Any, keys: Any) -> Any:
        layer = functools.partial(long_context.transformer_layer, long_context.as_written)
        x, _ = lax.scan(layer, batch["x"], params)
        return jnp.mean(x.astype(jnp.float32) ** 2, (1, 2))

    by_hand = {"JAX by hand, its blocks by hand": functools.partial(losses, long_context.by_hand)}
    if written:
        by_hand["JAX by hand, as written"] = functools.partial(losses, long_context.as_written)
    if fused:
        by_hand["JAX by hand, cuDNN's attention"] = functools.partial(losses, _cudnn)
    plan = px.Plan(stream=512 if fused else 16, remat="full", precision="bfloat16")
    batch = {"x": jax.ShapeDtypeStruct((2, tokens, width), jnp.float32)}
    return GpuRow(px.Task(init=init, loss=plain), batch, plan, by_hand)


def _kernel(tokens: int, width: int = 1024) -> GpuRow:
    """The same with cuDNN's attention in the user's code, under a plan and by hand."""
    row = _long(tokens, width=width)
    fused = row.by_hand["JAX by hand, cuDNN's attention"]
    task = px.Task(init=row.task.init, loss=lambda params, batch, keys: fused(params, batch))
    plan = px.Plan(precision="bfloat16")
    return GpuRow(task, row.batch, plan, {"JAX by hand": fused})


def _mixture(tokens: int, **plan: Any) -> GpuRow:
    """The mixture of `benchmarks.experts`, its rows sorted by expert."""

    def loss(params: Any, batch: Any, keys: Any = None) -> Any:
        x = batch["x"]
        hidden = jnp.tanh(x @ params["in"])
        y = experts.sorted_rows(params, hidden.reshape(-1, experts.WIDTH))
        return jnp.mean((y.reshape(x.shape) - x).astype(jnp.float32) ** 2, (1, 2))

    batch = {"x": jax.ShapeDtypeStruct((8, tokens // 8, experts.WIDTH), jnp.float32)}
    by_hand = {"JAX by hand": loss}
    return GpuRow(px.Task(init=experts.init, loss=loss), batch, px.Plan(**plan), by_hand)


def _layers(count: int, width: int, rows: int) -> GpuRow:
    """A perceptron of `count` layers: twice as many small arrays of parameters."""
    task = networks.make_task(Mlp((width,) * (count + 1)))
    batch = {
        "x": jax.ShapeDtypeStruct((rows, width), jnp.float32),
        "y": jax.ShapeDtypeStruct((rows,), jnp.int32),
    }
    return GpuRow(task, batch, px.Plan(), {"JAX by hand": lambda p, batch: task.loss(p, batch)})


HALF: dict[str, Any] = {"precision": "bfloat16"}
ROWS: dict[str, Callable[[], GpuRow]] = {
    "GPT-2, 8 × 1,024, bfloat16": lambda: _gpt(GPT2, 8, **HALF),
    "perceptron, 6 layers of 2,048, bfloat16": lambda: _of_model("mlp", 1, **HALF),
    "perceptron, 150 layers of 256: 300 arrays": lambda: _layers(150, 256, 512),
    "ResNet, 256 images, bfloat16": lambda: _of_model("resnet", 1, **HALF),
    "ViT, 128 images, bfloat16": lambda: _of_model("vit", 1, **HALF),
    "GPT of 1.3B, 8 × 1,024, bfloat16, remat=full": lambda: _gpt(GPT_XL, 8, remat="full", **HALF),
    "2 × 8,192 tokens, stream=512, bfloat16": lambda: _long(8192),
    "experts, 16,384 tokens, bfloat16": lambda: _mixture(16384, **HALF),
    "GPT-2, 32 × 1,024, bfloat16, microbatches=4": (lambda: _gpt(GPT2, 32, microbatches=4, **HALF)),
    "perceptron, 6 layers of 2,048, float32": lambda: _of_model("mlp", 1),
    "2 × 8,192 tokens, cuDNN's attention, bfloat16": lambda: _kernel(8192),
    "perceptron, 5 layers of 1,024, one step of 1 ms": lambda: _layers(5, 1024, 4096),
    "GPT-2, 8 × 1,024, float32": lambda: _gpt(GPT2, 8),
    "LSTM, 512 × 128, float32": lambda: _of_model("lstm", 1, 1024),
    "GPT-2, 16 × 1,024, bfloat16, remat=dots": lambda: _gpt(GPT2, 16, remat="dots", **HALF),
    "U-Net, 128 images, float32": lambda: _of_model("unet", 1),
    "32,768 words, 64 × 128, float32": lambda: _of_drawn("many words", 1, 32768),
    "grouped attention, 32 × 512, bfloat16": lambda: _of_drawn("grouped", 1, 4096, **HALF),
    "GPT-2, 32 × 1,024, bfloat16, remat=full": lambda: _gpt(GPT2, 32, remat="full", **HALF),
    "ViT, 128 images, float32": lambda: _of_model("vit", 1),
    "ResNet, 256 images, float32": lambda: _of_model("resnet", 1),
    "2 × 32,768 tokens, stream=512, bfloat16": lambda: _long(32768, written=False),
    "experts, 16,384 tokens, float32": lambda: _mixture(16384),
}
"""In the order in which they are measured; what does not fit the time is left out from the end."""

QUICK: dict[str, Callable[[], GpuRow]] = {
    "tiny GPT, bfloat16, remat=full": lambda: _gpt(TINY_GPT, 4, remat="full", **HALF),
    "tiny GPT, microbatches=2": lambda: _gpt(TINY_GPT, 4, microbatches=2),
    "32 tokens, stream=16": lambda: _long(32, width=32, fused=False),
}
