"""GPT as published: shapes from 1.7 to 175 billion parameters, never allocated.

The architecture of GPT-3 (Brown et al. 2020, https://arxiv.org/abs/2005.14165): learned positions,
pre-norm blocks of causal attention and a perceptron four times as wide, and a head that shares the
embedding's table. `task` is a `plurax.stack`; searches and estimates read only its shapes.

Shape suffixes: B batch, T tokens, D width, H heads, K width of a head, F width of the perceptron,
V vocabulary.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

import plurax as px

Params = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Gpt:
    """The sizes of one model."""

    depth: int
    width: int
    heads: int
    vocabulary: int = 51200
    tokens: int = 2048
    kernel: bool = False  # attention is cuDNN's: pip install 'plurax[cuda]'

    def task(self) -> px.Task:
        """The model as a task whose examples are `{"tokens": (T + 1,) int32}`."""
        width, size = self.width, self.width // self.heads

        def normal(key: Array, *shape: int) -> Array:
            return 0.02 * jax.random.normal(key, shape)

        def init_embed(key: Array) -> Params:
            first, second = jax.random.split(key)
            return {
                "table": normal(first, self.vocabulary, width),
                "position": normal(second, self.tokens, width),
            }

        def init_block(key: Array) -> Params:
            keys = jax.random.split(key, 4)
            return {
                "qkv": normal(keys[0], width, 3, self.heads, size),
                "out": normal(keys[1], self.heads, size, width),
                "mlp_in": normal(keys[2], width, 4 * width),
                "mlp_bias": jnp.zeros(4 * width),
                "mlp_out": normal(keys[3], 4 * width, width),
                "norm1": jnp.ones(width),
                "norm2": jnp.ones(width),
            }

        return px.stack(
            embed=(init_embed, embed),
            block=(init_block, kernel_block if self.kernel else block),
            head=(lambda key: {"norm": jnp.ones(width)}, losses),
            depth=self.depth,
            tied=["table"],
        )

    def batch(self, size: int) -> Params:
        """The shapes of a batch."""
        return {"tokens": jax.ShapeDtypeStruct((size, self.tokens + 1), jnp.int32)}

    @property
    def parameters(self) -> int:
        """The number of parameters."""
        like = jax.eval_shape(self.task().init, jax.random.key(0))
        return sum(leaf.size for leaf in jax.tree.leaves(like))


def embed(params: Params, batch: Params, keys: Any) -> Array:
    """The vectors of the tokens, (B, T, D)."""
    tokens = batch["tokens"][:, :-1]
    return params["table"][tokens] + params["position"]


def norm(x_BTD: Array, gain_D: Array) -> Array:
    """Layer norm without a bias, in float32."""
    x32 = x_BTD.astype(jnp.float32)
    x32 -= x32.mean(-1, keepdims=True)
    scale = jax.lax.rsqrt(jnp.mean(x32**2, -1, keepdims=True) + 1e-5)
    return (x32 * scale).astype(x_BTD.dtype) * gain_D


def block(params: Params, x_BTD: Array, batch: Params, keys: Any) -> Array:
    """Attention, then the perceptron, each added to its input."""
    normal = norm(x_BTD, params["norm1"])
    q, k, v = jnp.einsum("btd,dchk->cbhtk", normal, params["qkv"])
    scores = jnp.einsum("bhtk,bhsk->bhts", q, k) * q.shape[-1] ** -0.5
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -1e9).astype(jnp.float32))
    mixed = jnp.einsum("bhts,bhsk->bhtk", weights.astype(v.dtype), v)
    return perceptron(params, x_BTD + jnp.einsum("bhtk,hkd->btd", mixed, params["out"]))


def kernel_block(params: Params, x_BTD: Array, batch: Params, keys: Any) -> Array:
    """The same, with attention by a kernel."""
    normal = norm(x_BTD, params["norm1"])
    q, k, v = jnp.einsum("btd,dchk->cbthk", normal, params["qkv"])
    mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
    return perceptron(params, x_BTD + jnp.einsum("bthk,hkd->btd", mixed, params["out"]))


def perceptron(params: Params, x_BTD: Array) -> Array:
    """The perceptron, added to its input."""
    hidden = jax.nn.gelu(norm(x_BTD, params["norm2"]) @ params["mlp_in"] + params["mlp_bias"])
    return x_BTD + hidden @ params["mlp_out"]


def losses(params: Params, x_BTD: Array, batch: Params, keys: Any) -> Array:
    """Mean cross entropy of the next tokens, (B,)."""
    logits = (norm(x_BTD, params["norm"]) @ params["table"].T).astype(jnp.float32)
    entropy = optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:])
    return entropy.mean(1)


GPT3 = Gpt(depth=96, width=12288, heads=96)
"""175 billion parameters."""

MEGATRON: dict[str, tuple[str | None, ...]] = {
    "embed/table": ("tensor", None),
    "blocks/qkv": (None, None, None, "tensor", None),
    "blocks/out": (None, "tensor", None, None),
    "blocks/mlp_in": (None, None, "tensor"),
    "blocks/mlp_bias": (None, "tensor"),
    "blocks/mlp_out": (None, "tensor", None),
}
"""Megatron's rules: heads, the perceptron's hidden dim and the vocabulary over `tensor`."""
