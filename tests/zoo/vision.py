"""Networks on images."""

import jax
import jax.numpy as jnp

from tests.promotion import row
from tests.zoo.by_hand import Model, entropy, matrix


def pictures(rng, count, size=4, channels=3):
    x = rng.normal(size=(count, size, size, channels))
    return {"x": x, "y": rng.integers(0, 3, count).astype("int32")}


def conv(x, kernel, stride=1):
    return jax.lax.conv_general_dilated(
        x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


# --- A vision transformer whose layers have no biases: None stands in the parameters --------------


def linear(key, rows, columns):
    return {"kernel": matrix(key, rows, columns), "bias": None}


def apply(layer, x):
    x = x @ layer["kernel"]
    return x if layer["bias"] is None else x + row(layer["bias"], x)


def vit_init(key):
    keys = iter(jax.random.split(key, 12))
    return {
        "embed": linear(next(keys), 12, 8),
        "position": matrix(next(keys), 4, 8),
        "blocks": [
            {
                "gain": jnp.ones(8),
                "q": linear(next(keys), 8, 8),
                "k": linear(next(keys), 8, 8),
                "v": linear(next(keys), 8, 8),
                "up": linear(next(keys), 8, 12),
                "down": linear(next(keys), 12, 8),
            }
        ],
        "head": linear(next(keys), 8, 3),
    }


def vit_loss(mark, params, batch, keys):
    x = batch["x"].reshape(-1, 2, 2, 2, 2, 3).transpose(0, 1, 3, 2, 4, 5).reshape(-1, 4, 12)
    x = mark(apply(params["embed"], x) + params["position"][None])
    for block in params["blocks"]:
        mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
        normed = (x - mean) * jax.lax.rsqrt(var + 1e-5) * row(block["gain"], x)
        q, k, v = (apply(block[name], normed).reshape(-1, 4, 2, 4) for name in "qkv")
        weights = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k) / 2)
        x = x + jnp.einsum("bhts,bshd->bthd", weights, v).reshape(-1, 4, 8)
        x = mark(x + apply(block["down"], jax.nn.gelu(apply(block["up"], x))))
    logits = apply(params["head"], x.mean(1))
    right = logits.argmax(-1) == batch["y"].astype(int)
    return entropy(logits, batch["y"]), {"right": right.astype(logits.dtype)}


VIT = Model(
    vit_init,
    vit_loss,
    pictures,
    {
        **{f"*/{name}/kernel": (None, "tensor") for name in ("q", "k", "v", "up")},
        "*/down/kernel": ("tensor", None),
    },
)


# --- A residual network with batch norm: coupled, stateful, reads the mask ------------------------


def resnet_init(key):
    keys = iter(jax.random.split(key, 4))
    layer = lambda rows: {  # noqa: E731
        "kernel": matrix(next(keys), 3, 3, rows, 6, scale=0.3),
        "scale": jnp.ones(6),
        "shift": jnp.full(6, 0.1),
    }
    params = {"stem": layer(3), "block": layer(6), "head": matrix(next(keys), 6, 3)}
    running = {name: {"mean": jnp.zeros(6), "var": jnp.ones(6)} for name in ("stem", "block")}
    return params, running


def batch_norm(layer, running, x, mask):
    real = mask[:, None, None, None]
    count = (mask.sum() * x.shape[1] * x.shape[2]).astype(x.dtype)
    mean = jnp.where(real, x, 0).sum((0, 1, 2)) / count
    var = jnp.where(real, (x - row(mean, x)) ** 2, 0).sum((0, 1, 2)) / count
    new = {"mean": 0.9 * running["mean"] + 0.1 * mean, "var": 0.9 * running["var"] + 0.1 * var}
    scale, shift, mean = (row(one, x) for one in (layer["scale"], layer["shift"], mean))
    return scale * (x - mean) * row(jax.lax.rsqrt(var + 1e-3), x) + shift, new


def resnet_loss(mark, params, running, batch, keys, mask):
    new = {}
    x, new["stem"] = batch_norm(
        params["stem"], running["stem"], conv(batch["x"], params["stem"]["kernel"]), mask
    )
    x = mark(jax.nn.silu(x))
    y, new["block"] = batch_norm(
        params["block"], running["block"], conv(x, params["block"]["kernel"]), mask
    )
    x = mark(x + jax.nn.silu(y))
    logits = x.mean((1, 2)) @ params["head"]
    return entropy(logits, batch["y"]), {"top": logits.max(-1)}, new


RESNET = Model(
    resnet_init,
    resnet_loss,
    pictures,
    {
        "block/kernel": (..., "tensor"),
        "block/s*": ("tensor",),
    },
    coupled=True,
    stateful=True,
)


# --- UNet: what the way down made is needed on the way up -----------------------------------------


def unet_init(key):
    keys = jax.random.split(key, 5)
    return {
        "in": matrix(keys[0], 3, 3, 1, 4, scale=0.3),
        "down": matrix(keys[1], 3, 3, 4, 6, scale=0.3),
        "middle": matrix(keys[2], 3, 3, 6, 6, scale=0.3),
        "up": matrix(keys[3], 2, 2, 6, 4, scale=0.3),
        "out": matrix(keys[4], 3, 3, 8, 1, scale=0.3),
    }


def unet_loss(mark, params, batch, keys):
    high = mark(jnp.tanh(conv(batch["x"], params["in"])))
    low = jnp.tanh(conv(high, params["down"], stride=2))
    low = mark(low + jnp.tanh(conv(low, params["middle"])))
    up = jax.lax.conv_transpose(
        low, params["up"], (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    out = conv(jnp.concatenate([jnp.tanh(up), high], -1), params["out"])
    error = (out - batch["x"] ** 2) ** 2
    return error.mean((1, 2, 3)), {"worst": error.max((1, 2, 3))}


UNET = Model(
    unet_init,
    unet_loss,
    lambda rng, count: {"x": rng.normal(size=(count, 4, 4, 1))},
    {"down": (..., "tensor"), "middle": (None, None, "tensor", None)},
)
