"""The networks that are measured, as plurax tasks; `by_hand.py` uses the same functions."""

import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from examples import domains
from jaxtyping import Array, Float, Int, PyTree

import plurax as px
from benchmarks import values
from benchmarks.sizes import Domains, Mlp, Network, Transformer

Batch = dict[str, np.ndarray]


def make_task(network: Network) -> px.Task:
    """The task of a network: cross-entropy per example; `predict` gives logits."""
    match network:
        case Mlp():
            return _mlp(network)
        case Transformer():
            return _transformer(network)
        case Domains():
            return _domains(network)


def make_batch(network: Network, size: int) -> Batch:
    """Random examples on the host."""
    rng = np.random.default_rng(0)
    match network:
        case Mlp():
            inputs = rng.standard_normal((size, network.widths[0]), np.float32)
            return {"x": inputs, "y": rng.integers(0, network.widths[-1], size, np.int32)}
        case Transformer():
            return {"tokens": values.tokens(network, size)}
        case Domains():
            extent_cm = (100 * np.asarray(domains.EXTENT)).astype(np.int32)
            return {
                "xyz_cm": rng.integers(0, extent_cm, (size, 3), np.int32),
                "domain": rng.integers(0, len(domains.DOMAINS), size, np.int32),
            }


def count_parameters(params: PyTree) -> int:
    """How many numbers there are to train."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))


# ---- perceptron --------------------------------------------------------------------------------


def _mlp(network: Mlp) -> px.Task:
    def init(key: Array) -> PyTree:
        shapes = list(itertools.pairwise(network.widths))
        return [
            {"w": jax.random.normal(k, (a, b)) * (2 / a) ** 0.5, "b": jnp.zeros(b)}
            for k, (a, b) in zip(jax.random.split(key, len(shapes)), shapes, strict=True)
        ]

    def loss(params: PyTree, batch: dict[str, Array], keys: Array | None = None) -> Array:
        x = batch["x"]
        for layer in params[:-1]:
            x = jax.nn.relu(x @ layer["w"] + layer["b"])
        logits = x @ params[-1]["w"] + params[-1]["b"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])

    return px.Task(init=init, loss=loss)


# ---- rock domains ------------------------------------------------------------------------------


def _domains(network: Domains) -> px.Task:
    def loss(params: PyTree, batch: dict[str, Array], keys: Array | None = None) -> Array:
        logits = domains.logits(params, batch["xyz_cm"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["domain"])

    return px.Task(
        init=lambda key: domains.init(key, network.width),
        loss=loss,
        predict=lambda params, inputs: domains.logits(params, inputs["xyz_cm"]),
    )


# ---- transformer -------------------------------------------------------------------------------


def _transformer(network: Transformer) -> px.Task:
    width = network.width

    def init(key: Array) -> PyTree:
        shapes = values.block_shapes(network)
        keys = jax.random.split(key, len(shapes) + 1)
        return {
            "embedding": 0.02 * jax.random.normal(keys[0], (network.vocabulary, width)),
            "blocks": {
                name: 0.02 * jax.random.normal(k, (network.layers, *shape))
                for k, (name, shape) in zip(keys[1:], shapes.items(), strict=True)
            },
        }

    def loss(
        params: PyTree, batch: dict[str, Int[Array, "B S"]], keys: Array | None = None
    ) -> Float[Array, "B"]:
        tokens, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
        x = params["embedding"][tokens]
        x, _ = jax.lax.scan(lambda x, w: (_block(x, w, network), None), x, params["blocks"])
        logits = _normalize(x) @ params["embedding"].T
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean(axis=-1)

    return px.Task(init=init, loss=loss)


def make_stack(network: Transformer) -> px.Task:
    """The transformer as a stack, to be cut into stages; its head is not tied to the embedding.

    Where it starts is for `values.params` to say.
    """

    def embed(params: PyTree, batch: dict[str, Array], keys: Array | None) -> Array:
        return params["embedding"][batch["tokens"][:, :-1]]

    def block(w: PyTree, x: Array, batch: dict[str, Array], keys: Array | None) -> Array:
        return _block(x, w, network)

    def head(
        params: PyTree, x: Array, batch: dict[str, Array], keys: Array | None
    ) -> Float[Array, "B"]:
        logits, targets = _normalize(x) @ params["output"], batch["tokens"][:, 1:]
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean(axis=-1)

    def zeros(shapes: dict[str, tuple[int, int]]) -> Callable[[Array], PyTree]:
        return lambda key: {name: jnp.zeros(shape) for name, shape in shapes.items()}

    vocabulary, width = network.vocabulary, network.width
    return px.stack(
        (zeros({"embedding": (vocabulary, width)}), embed),
        (zeros(values.block_shapes(network)), block),
        (zeros({"output": (width, vocabulary)}), head),
        network.layers,
    )


def _block(
    x: Float[Array, "B S width"], w: dict[str, Array], network: Transformer
) -> Float[Array, "B S width"]:
    def split(x: Float[Array, "B S width"]) -> Float[Array, "B S heads part"]:
        return x.reshape(*x.shape[:-1], network.heads, network.width // network.heads)

    y = _normalize(x)
    mixed = jax.nn.dot_product_attention(
        split(y @ w["query"]), split(y @ w["key"]), split(y @ w["value"]), is_causal=True
    )
    x = x + mixed.reshape(x.shape) @ w["out"]
    return x + jax.nn.gelu(_normalize(x) @ w["up"]) @ w["down"]


def _normalize(x: Float[Array, "... width"]) -> Float[Array, "... width"]:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)
