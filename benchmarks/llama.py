"""Llama as published: shapes of 8 to 405 billion parameters, never allocated.

The architecture of Llama 3 (https://arxiv.org/abs/2407.21783, section 3.2): no biases, RMS norms,
rotary positions, heads of keys and values shared by groups of queries, a gated perceptron, and a
head of its own. Attention is cuDNN's, which JAX traces where its package is installed:
pip install 'plurax[cuda]'.

Shape suffixes: B batch, T tokens, D width, N heads, M heads of keys, H width of a head, F width of
the perceptron, V vocabulary.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

import plurax as px

Params = dict[str, Any]
BASE = 500_000.0
"""Of the angles of positions."""


@dataclasses.dataclass(frozen=True)
class Llama:
    """The sizes of one model."""

    depth: int
    width: int
    heads: int
    hidden: int
    key_heads: int = 8
    vocabulary: int = 128_256
    tokens: int = 8192
    head_width: int | None = None  # by default `width` is shared among the heads

    def task(self) -> px.Task:
        """The model as a task whose examples are `{"tokens": (T + 1,) int32}`."""
        width, size = self.width, self.head_width or self.width // self.heads

        def normal(key: Array, *shape: int) -> Array:
            return 0.02 * jax.random.normal(key, shape)

        def init_block(key: Array) -> Params:
            keys = jax.random.split(key, 7)
            return {
                "q": normal(keys[0], width, self.heads, size),
                "k": normal(keys[1], width, self.key_heads, size),
                "v": normal(keys[2], width, self.key_heads, size),
                "out": normal(keys[3], self.heads, size, width),
                "gate": normal(keys[4], width, self.hidden),
                "up": normal(keys[5], width, self.hidden),
                "down": normal(keys[6], self.hidden, width),
                "norm1": jnp.ones(width),
                "norm2": jnp.ones(width),
            }

        def init_head(key: Array) -> Params:
            return {"norm": jnp.ones(width), "table": normal(key, width, self.vocabulary)}

        return px.stack(
            embed=(lambda key: {"table": normal(key, self.vocabulary, width)}, embed),
            block=(init_block, block),
            head=(init_head, losses),
            depth=self.depth,
        )

    def batch(self, size: int) -> Params:
        """The shapes of a batch."""
        return {"tokens": jax.ShapeDtypeStruct((size, self.tokens + 1), jnp.int32)}


def embed(params: Params, batch: Params, keys: Any) -> Array:
    """The vectors of the tokens, (B, T, D)."""
    return params["table"][batch["tokens"][:, :-1]]


def norm(x_BTD: Array, gain_D: Array) -> Array:
    """RMS norm, in float32."""
    x32 = x_BTD.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(x32**2, -1, keepdims=True) + 1e-5)
    return (x32 * scale).astype(x_BTD.dtype) * gain_D


def rotated(x_BTNH: Array) -> Array:
    """Queries or keys, each pair of numbers turned by the angle of its position."""
    tokens, half = x_BTNH.shape[1], x_BTNH.shape[-1] // 2
    angles_TH = jnp.arange(tokens)[:, None] * BASE ** (-jnp.arange(half) / half)
    sin, cos = jnp.sin(angles_TH)[:, None], jnp.cos(angles_TH)[:, None]
    x32 = x_BTNH.astype(jnp.float32)
    left, right = x32[..., :half], x32[..., half:]
    turned = jnp.concatenate([left * cos - right * sin, right * cos + left * sin], -1)
    return turned.astype(x_BTNH.dtype)


def block(params: Params, x_BTD: Array, batch: Params, keys: Any) -> Array:
    """Attention, then the gated perceptron, each added to its input."""
    x_BTD = px.sharding.name(x_BTD, "residual")
    normal = norm(x_BTD, params["norm1"])
    q, k, v = (jnp.einsum("btd,dnh->btnh", normal, params[name]) for name in "qkv")
    mixed = jax.nn.dot_product_attention(
        rotated(q), rotated(k), v, is_causal=True, implementation="cudnn"
    )
    x_BTD = x_BTD + jnp.einsum("btnh,nhd->btd", mixed, params["out"])
    x_BTD = px.sharding.name(x_BTD, "residual")
    normal = norm(x_BTD, params["norm2"])
    hidden_BTF = jax.nn.silu(normal @ params["gate"]) * (normal @ params["up"])
    return px.sharding.name(x_BTD + hidden_BTF @ params["down"], "residual")


def losses(params: Params, x_BTD: Array, batch: Params, keys: Any) -> Array:
    """Mean cross entropy of the next tokens, (B,)."""
    logits = (norm(x_BTD, params["norm"]) @ params["table"]).astype(jnp.float32)
    entropy = optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:])
    return entropy.mean(1)


LLAMA_8B = Llama(depth=32, width=4096, heads=32, hidden=14336)
LLAMA_70B = Llama(depth=80, width=8192, heads=64, hidden=28672)
LLAMA_405B = Llama(depth=126, width=16384, heads=128, hidden=53248)

MEGATRON: dict[str, tuple[Any, ...]] = {
    "embed/table": ("tensor", None),
    **{f"blocks/{name}": (None, None, "tensor", None) for name in "qkv"},
    "blocks/out": (None, "tensor", None, None),
    "blocks/gate": (None, None, "tensor"),
    "blocks/up": (None, None, "tensor"),
    "blocks/down": (None, "tensor", None),
    "head/table": (None, "tensor"),
    "residual": (..., "tensor", None),
}
"""Megatron's rules: heads, hidden dim and vocabulary over `tensor`, and the tokens in between."""
