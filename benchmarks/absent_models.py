"""Models of drawn rows of `benchmarks.absent_memory`: other models, plans and optimizers.

Grouped attention with rotated positions and a gated MLP, convolutions with batch norm, a gated
recurrent network, a mixture of experts, a large vocabulary with a tied softmax, and long sequences
in bfloat16; each small enough to be compiled in seconds.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

import plurax as px


def matrices(key: Any, sizes: Mapping[str, tuple[int, ...]], dtype: Any = jnp.float32) -> Any:
    """Return a parameter of each of these shapes."""
    keys = jax.random.split(key, len(sizes))
    return {
        name: (0.02 * jax.random.normal(key, shape)).astype(dtype)
        for key, (name, shape) in zip(keys, sizes.items(), strict=True)
    }


def entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the losses of logits, in float32."""
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels)


def rms(x: jax.Array, gain: jax.Array) -> jax.Array:
    """Return rows of length one, times gains."""
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(x32**2, -1, keepdims=True) + 1e-6)
    return (x32 * scale).astype(x.dtype) * gain


def rotated(x: jax.Array) -> jax.Array:
    """Rotate pairs of numbers of `(B, T, N, H)` by the position."""
    size = x.shape[-1] // 2
    angle = jnp.arange(x.shape[1])[:, None, None] * 1e4 ** (-jnp.arange(size) / size)
    cos, sin = jnp.cos(angle).astype(x.dtype), jnp.sin(angle).astype(x.dtype)
    a, b = x[..., :size], x[..., size:]
    return jnp.concatenate([a * cos[None] - b * sin[None], b * cos[None] + a * sin[None]], -1)


def grouped(depth: int = 4, width: int = 512, scanned: bool = True) -> tuple[px.Task, Any, Any]:
    """A decoder whose eight heads share keys by fours."""
    heads, shared, size, words, tokens = 8, 2, width // 8, 4096, 512
    sizes = {
        "q": (width, heads, size), "k": (width, shared, size), "v": (width, shared, size),
        "out": (heads, size, width), "gate": (width, 3 * width), "up": (width, 3 * width),
        "down": (3 * width, width),
    }  # fmt: skip

    def init(key: Any) -> Any:
        top, *keys = jax.random.split(key, depth + 1)
        ones = {"norm1": jnp.ones(width), "norm2": jnp.ones(width)}
        layers: Any = [{**matrices(key, sizes), **ones} for key in keys]
        if scanned:
            layers = jax.tree.map(lambda *x: jnp.stack(x), *layers)
        outer = matrices(top, {"table": (words, width), "head": (width, words)})
        return {**outer, "layers": layers, "norm": jnp.ones(width)}

    def layer(x: jax.Array, p: Any) -> jax.Array:
        h = rms(x, p["norm1"])
        q, k, v = (jnp.einsum("btd,dnh->btnh", h, p[name]) for name in "qkv")
        q, k = rotated(q).reshape(*q.shape[:2], shared, -1, size), rotated(k)
        scores = jnp.einsum("btngh,bsnh->bngts", q, k) * size**-0.5
        seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))[None, None, None]
        weights = jax.nn.softmax(jnp.where(seen, scores.astype(jnp.float32), -1e30))
        mixed = jnp.einsum("bngts,bsnh->btngh", weights.astype(v.dtype), v)
        x = x + jnp.einsum("btnh,nhd->btd", mixed.reshape(*x.shape[:2], heads, size), p["out"])
        h = rms(x, p["norm2"])
        return x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]

    def loss(params: Any, batch: Any, keys: Any) -> jax.Array:
        x = params["table"][batch["words"][:, :-1]]
        if scanned:
            x, _ = jax.lax.scan(lambda x, p: (layer(x, p), None), x, params["layers"])
        else:
            for p in params["layers"]:
                x = layer(x, p)
        logits = rms(x, params["norm"]) @ params["head"]
        return entropy(logits, batch["words"][:, 1:]).mean(1)

    batch = {"words": jax.ShapeDtypeStruct((32, tokens + 1), jnp.int32)}
    split = {
        "q": (None, "tensor", None), "k": (None, "tensor", None), "v": (None, "tensor", None),
        "out": ("tensor", None, None), "gate": (None, "tensor"), "up": (None, "tensor"),
        "down": ("tensor", None),
    }  # fmt: skip
    stack: Any = (None,) if scanned else ()
    pattern = "layers/" if scanned else "layers/*/"
    rules = {pattern + name: (*stack, *spec) for name, spec in split.items()}
    return px.Task(init=init, loss=loss), batch, {**rules, "head": (None, "tensor")}


def batch_normed() -> tuple[px.Task, Any, Any]:
    """A residual network with batch norm on images of 32 x 32."""
    stages = [(32, 32, 1), (32, 64, 2), (64, 128, 2)]

    def norm(x: jax.Array, p: Any, share: jax.Array) -> jax.Array:
        x32 = x.astype(jnp.float32)
        mean = jnp.sum(x32 * share, (0, 1, 2), keepdims=True) / (x.shape[1] * x.shape[2])
        own = (x32 - mean) ** 2 * share
        var = jnp.sum(own, (0, 1, 2), keepdims=True) / (x.shape[1] * x.shape[2])
        return ((x32 - mean) * jax.lax.rsqrt(var + 1e-5)).astype(x.dtype) * p["gain"] + p["bias"]

    def conv(x: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
        dims = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(
            x, kernel, (stride, stride), "SAME", dimension_numbers=dims
        )

    def init(key: Any) -> Any:
        top, *keys = jax.random.split(key, 1 + len(stages))
        blocks = []
        for key, (rows, columns, _) in zip(keys, stages, strict=True):
            sizes = {"first": (3, 3, rows, columns), "second": (3, 3, columns, columns)}
            sizes["skip"] = (1, 1, rows, columns)
            own = {"gain": jnp.ones(columns), "bias": jnp.zeros(columns)}
            blocks.append({**matrices(key, sizes), "norm1": own, "norm2": own})
        outer = matrices(top, {"stem": (3, 3, 3, 32), "head": (128, 100)})
        return {**outer, "blocks": blocks}

    def loss(params: Any, batch: Any, keys: Any, mask: jax.Array) -> jax.Array:
        share = (mask / jnp.sum(mask)).astype(jnp.float32)[:, None, None, None]
        x = conv(batch["image"], params["stem"])
        for p, (_, _, stride) in zip(params["blocks"], stages, strict=True):
            y = jax.nn.relu(norm(conv(x, p["first"], stride), p["norm1"], share))
            y = norm(conv(y, p["second"]), p["norm2"], share)
            x = jax.nn.relu(conv(x, p["skip"], stride) + y)
        return entropy(x.mean((1, 2)) @ params["head"], batch["label"])

    images = jax.ShapeDtypeStruct((1024, 32, 32, 3), jnp.float32)
    batch = {"image": images, "label": jax.ShapeDtypeStruct((1024,), jnp.int32)}
    return px.Task(init=init, loss=loss, coupled=True), batch, {}


def gru() -> tuple[px.Task, Any, Any]:
    """A gated recurrent network over 64 vectors."""
    width = 1024

    def init(key: Any) -> Any:
        return matrices(key, {"x": (256, 3 * width), "h": (width, 3 * width), "head": (width, 256)})

    def loss(params: Any, batch: Any, keys: Any) -> jax.Array:
        def turn(h: jax.Array, x: jax.Array) -> Any:
            a, b, c = jnp.split(x @ params["x"], 3, -1)
            d, e, f = jnp.split(h @ params["h"], 3, -1)
            z = jax.nn.sigmoid(a + d)
            h = z * h + (1 - z) * jnp.tanh(c + jax.nn.sigmoid(b + e) * f)
            return h, h

        x = batch["x"].swapaxes(0, 1)
        start = jnp.zeros((x.shape[1], width), x.dtype)
        _, h = jax.lax.scan(turn, start, x)
        return jnp.mean((h.swapaxes(0, 1) @ params["head"] - batch["x"]) ** 2, (1, 2))

    batch = {"x": jax.ShapeDtypeStruct((1024, 64, 256), jnp.float32)}
    rules = {"head": (None, "tensor")}
    return px.Task(init=init, loss=loss), batch, rules


def experts() -> tuple[px.Task, Any, Any]:
    """Two layers of eight experts each, two a token, of which each has room for as many."""
    width, count, words, room = 512, 8, 2048, 160

    def init(key: Any) -> Any:
        top, *keys = jax.random.split(key, 3)
        sizes = {
            "gate": (width, count), "up": (count, width, 4 * width),
            "down": (count, 4 * width, width),
        }  # fmt: skip
        layers = [{**matrices(key, sizes), "norm": jnp.ones(width)} for key in keys]
        return {**matrices(top, {"table": (words, width)}), "layers": layers}

    def layer(x: jax.Array, p: Any) -> jax.Array:
        h = rms(x, p["norm"])
        chances = jax.nn.softmax((h @ p["gate"]).astype(jnp.float32))
        best, index = jax.lax.top_k(chances, 2)
        chosen = jax.nn.one_hot(index, count)
        place = jnp.cumsum(chosen.sum(2), 1) - chosen.sum(2)
        kept = jax.nn.one_hot(place, room) * chosen.sum(2)[..., None]
        weight = (chosen * best[..., None]).sum(2)
        sent = jnp.einsum("btec,btd->becd", kept.astype(x.dtype), h)
        y = jax.nn.gelu(jnp.einsum("becd,edf->becf", sent, p["up"]))
        y = jnp.einsum("becf,efd->becd", y, p["down"])
        return x + jnp.einsum("btec,becd->btd", (kept * weight[..., None]).astype(x.dtype), y)

    def loss(params: Any, batch: Any, keys: Any) -> jax.Array:
        x = params["table"][batch["words"][:, :-1]]
        for p in params["layers"]:
            x = layer(x, p)
        logits = x @ params["table"].T
        return entropy(logits, batch["words"][:, 1:]).mean(1)

    batch = {"words": jax.ShapeDtypeStruct((32, 513), jnp.int32)}
    rules = {"layers/*/up": (None, None, "tensor"), "layers/*/down": (None, "tensor", None)}
    return px.Task(init=init, loss=loss), batch, rules


def many_words() -> tuple[px.Task, Any, Any]:
    """A bag of words before each, and a softmax over 32,768 words with the same table."""
    width, words = 256, 32768

    def init(key: Any) -> Any:
        sizes = {"table": (words, width), "up": (width, 1024), "down": (1024, width)}
        return {**matrices(key, sizes), "norm": jnp.ones(width)}

    def loss(params: Any, batch: Any, keys: Any) -> jax.Array:
        x = params["table"][batch["words"][:, :-1]]
        counts = jnp.arange(1, x.shape[1] + 1, dtype=jnp.float32)[None, :, None]
        x = (jnp.cumsum(x.astype(jnp.float32), 1) / counts).astype(x.dtype)
        x = x + jax.nn.relu(rms(x, params["norm"]) @ params["up"]) @ params["down"]
        return entropy(x @ params["table"].T, batch["words"][:, 1:]).mean(1)

    batch = {"words": jax.ShapeDtypeStruct((64, 129), jnp.int32)}
    rules = {"table": ("tensor", None), "up": (None, "tensor"), "down": ("tensor", None)}
    return px.Task(init=init, loss=loss), batch, rules


def long(depth: int = 2, width: int = 512, tokens: int = 4096) -> tuple[px.Task, Any, Any]:
    """Layers scanned over long sequences, parameters and activations in bfloat16."""
    heads, size = 4, width // 4
    sizes = {
        "q": (width, heads, size), "k": (width, heads, size), "v": (width, heads, size),
        "o": (heads, size, width), "up": (width, 4 * width), "down": (4 * width, width),
    }  # fmt: skip

    def init(key: Any) -> Any:
        layers = [matrices(key, sizes, jnp.bfloat16) for key in jax.random.split(key, depth)]
        return jax.tree.map(lambda *x: jnp.stack(x), *layers)

    def layer(x: jax.Array, p: Any) -> Any:
        q, k, v = (jnp.einsum("btd,dnh->btnh", x, p[name]) for name in "qkv")
        scores = jnp.einsum("btnh,bsnh->bnts", q, k) * size**-0.5
        seen = jnp.tril(jnp.ones(scores.shape[2:], bool))[None, None]
        weights = jax.nn.softmax(jnp.where(seen, scores, -1e30))
        x = x + jnp.einsum("btnh,nhd->btd", jnp.einsum("bnts,bsnh->btnh", weights, v), p["o"])
        return x + jax.nn.gelu(x @ p["up"]) @ p["down"], None

    def loss(params: Any, batch: Any, keys: Any) -> jax.Array:
        x, _ = jax.lax.scan(layer, batch["x"], params)
        return jnp.mean(x.astype(jnp.float32) ** 2, (1, 2))

    batch = {"x": jax.ShapeDtypeStruct((8, tokens, width), jnp.bfloat16)}
    rules = {
        "q": (None, None, "tensor", None), "k": (None, None, "tensor", None),
        "v": (None, None, "tensor", None), "o": (None, "tensor", None, None),
        "up": (None, None, "tensor"), "down": (None, "tensor", None),
    }  # fmt: skip
    return px.Task(init=init, loss=loss), batch, rules


MODELS = {
    "grouped": grouped, "grouped unrolled": lambda: grouped(2, scanned=False),
    "batch norm": batch_normed, "gru": gru, "experts": experts, "many words": many_words,
    "long": long, "long short": lambda: long(tokens=1024),
}  # fmt: skip

OPTIMIZERS = {
    "adamw": optax.adamw(1e-3), "sgd": optax.sgd(1e-2, momentum=0.9), "plain sgd": optax.sgd(1e-2),
    "lion": optax.lion(1e-4), "adafactor": optax.adafactor(1e-3),
}  # fmt: skip

PLANS: dict[str, dict[str, Any]] = {
    "data": {"data": 8},
    "data, bf16": {"data": 8, "precision": "bfloat16"},
    "data, mb4": {"data": 8, "microbatches": 4},
    "zero 1": {"data": 8, "zero": 1},
    "zero 2, bf16": {"data": 8, "zero": 2, "precision": "bfloat16", "microbatches": 2},
    "zero 3": {"data": 8, "zero": 3},
    "zero 3, bf16": {"data": 8, "zero": 3, "precision": "bfloat16"},
    "zero 3, dots": {"data": 8, "zero": 3, "remat": "dots"},
    "full": {"data": 8, "remat": "full"},
    "full, bf16": {"data": 8, "remat": "full", "precision": "bfloat16"},
    "dots": {"data": 8, "remat": "dots"},
    "tensor": {"data": 4, "tensor": 2},
    "tensor, bf16": {"data": 4, "tensor": 2, "precision": "bfloat16"},
    "tensor 8, full": {"tensor": 8, "remat": "full"},
    "tensor, zero 2": {"data": 4, "tensor": 2, "zero": 2, "microbatches": 2},
    "stream": {"data": 8, "stream": 256},
    "stream, full, bf16": {"data": 8, "stream": 256, "remat": "full", "precision": "bfloat16"},
    "context": {"context": 8, "stream": 256, "remat": "full"},
}


def drawn(name: str) -> tuple[px.Task, Any, px.Plan, Any]:
    """Return the task, batch, plan and optimizer of a row, `gru/zero 1/adamw`."""
    model, plan, optimizer = name.split("/")
    task, batch, rules = MODELS[model]()
    sizes = dict(PLANS[plan])
    if sizes.get("tensor", 1) > 1:
        sizes["shardings"] = rules
    return task, batch, px.Plan(**sizes), OPTIMIZERS[optimizer]
