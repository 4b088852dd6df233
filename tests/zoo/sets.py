"""Networks on pairs, graphs, tables and noise."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tests.zoo.by_hand import Model, matrix

# --- A graph network: messages summed at the nodes they reach -------------------------------------

NODES, EDGES, WIDTH = 4, 6, 6


def graphs(rng, count):
    ends = rng.integers(0, NODES, (count, 2, EDGES)).astype(np.int32)
    return {"x": rng.normal(size=(count, NODES, 3)), "ends": ends, "y": rng.normal(size=count)}


def graph_init(key):
    keys = jax.random.split(key, 5)
    return {
        "in": matrix(keys[0], 3, WIDTH),
        "message": matrix(keys[1], 2 * WIDTH, 8),
        "node": matrix(keys[2], 8, WIDTH),
        "out": matrix(keys[3], WIDTH),
    }


def graph_loss(mark, params, batch, keys):
    def one(x, ends):
        x = mark(jnp.tanh(x @ params["in"]))
        pairs = jnp.concatenate([x[ends[0]], x[ends[1]]], -1)
        messages = jax.nn.softplus(pairs @ params["message"])
        summed = jax.ops.segment_sum(messages, ends[1], NODES)
        x = mark(x + jnp.tanh(summed @ params["node"]))
        return x.sum(0) @ params["out"], jnp.abs(summed).max()

    out, size = jax.vmap(one)(batch["x"], batch["ends"])
    return (out - batch["y"]) ** 2, {"size": size}


GRAPH = Model(
    graph_init, graph_loss, graphs, {"message": (None, "tensor"), "node": ("tensor", None)}
)


# --- Contrastive: each pair against all others of the batch ---------------------------------------


def pairs_init(key):
    keys = jax.random.split(key, 4)
    tower = lambda a, b: {"in": matrix(a, 5, 8), "out": matrix(b, 8, 4)}  # noqa: E731
    return {"a": tower(*keys[:2]), "b": tower(*keys[2:]), "heat": jnp.array(0.7)}


def pairs_loss(mark, params, batch, keys, mask):
    def tower(layers, x):
        z = mark(jnp.tanh(x @ layers["in"])) @ layers["out"]
        return z / jnp.sqrt(jnp.sum(z**2, -1, keepdims=True) + 1e-3)

    a, b = tower(params["a"], batch["a"]), tower(params["b"], batch["b"])
    near = (a @ b.T) * jnp.exp(params["heat"])
    own = jnp.diagonal(near)
    rows = jax.nn.logsumexp(jnp.where(mask[None, :], near, -1e9), 1)
    columns = jax.nn.logsumexp(jnp.where(mask[:, None], near, -1e9), 0)
    return (rows + columns) / 2 - own, {"own": own}


CONTRASTIVE = Model(
    pairs_init,
    pairs_loss,
    lambda rng, count: {name: rng.normal(size=(count, 5)) for name in "ab"},
    {"*/in": (None, "tensor"), "*/out": ("tensor", None)},
    coupled=True,
)


# --- A recommender: most of it is tables ----------------------------------------------------------

USERS, ITEMS, SEEN = 10, 12, 3


def visits(rng, count):
    return {
        "user": rng.integers(0, USERS, count).astype(np.int32),
        "seen": rng.integers(0, ITEMS, (count, SEEN)).astype(np.int32),
        "item": rng.integers(0, ITEMS, count).astype(np.int32),
        "y": rng.integers(0, 2, count).astype(np.float64),
        "w": rng.integers(1, 5, count).astype(np.float64),
    }


def recommender_init(key):
    keys = jax.random.split(key, 4)
    return {
        "users": matrix(keys[0], USERS, 4),
        "items": matrix(keys[1], ITEMS, 4),
        "bias": jnp.zeros(ITEMS),
        "mix": matrix(keys[2], 8, 8),
        "out": matrix(keys[3], 8, 4),
    }


def recommender_loss(mark, params, batch, keys):
    bag = params["items"][batch["seen"]].mean(1)
    x = jnp.concatenate([params["users"][batch["user"]], bag], -1)
    x = mark(jax.nn.relu(x @ params["mix"]) @ params["out"])
    logit = jnp.sum(x * params["items"][batch["item"]], -1) + params["bias"][batch["item"]]
    return optax.sigmoid_binary_cross_entropy(logit, batch["y"]), {"logit": logit}


RECOMMENDER = Model(
    recommender_init,
    recommender_loss,
    visits,
    {
        "users": ("tensor", None),
        "items": ("tensor", None),
        "mix": (None, "tensor"),
        "out": ("tensor", None),
    },
    weight=lambda batch: batch["w"],
)


# --- Diffusion: time and noise are drawn in the loss, for each example its own --------------------


def diffusion_init(key):
    keys = jax.random.split(key, 3)
    return {
        "in": matrix(keys[0], 4, 8),
        "time": matrix(keys[1], 4, 8),
        "bias": jnp.zeros(8),
        "out": matrix(keys[2], 8, 4),
    }


def diffusion_loss(mark, params, batch, keys):
    def one(x, key):
        at, noisy = jax.random.split(key)
        t = jax.random.uniform(at, dtype=jnp.float64)
        noise = jax.random.normal(noisy, x.shape, jnp.float64)
        mixed = jnp.cos(t * jnp.pi / 2) * x + jnp.sin(t * jnp.pi / 2) * noise
        waves = jnp.sin(t * jnp.array([1.0, 2.0, 4.0, 8.0]))
        hidden = mark(jax.nn.silu(mixed @ params["in"] + waves @ params["time"] + params["bias"]))
        return ((hidden @ params["out"] - noise) ** 2).mean(), t

    losses, times = jax.vmap(one)(batch["x"], keys)
    return losses, {"time": times}


DIFFUSION = Model(
    diffusion_init,
    diffusion_loss,
    lambda rng, count: {"x": rng.normal(size=(count, 4))},
    {
        "in": (None, "tensor"),
        "time": (None, "tensor"),
        "bias": ("tensor",),
        "out": ("tensor", None),
    },
)
