"""Mixtures of experts as they are published, under plans that split experts, beside a step by hand.

The models are written as for one device, and know nothing of plans: they are those that nobody here
wrote, in few lines.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests import models

import plurax as px

# Rows, tokens, width, hidden units, experts, choices, layers.
B, T, D, H, E, K, LAYERS = 8, 4, 8, 6, 4, 2, 2
RATE = 0.1

pytestmark = pytest.mark.usefixtures("x64")


def parameters(key):
    """Of each layer a router, the experts, a shared one, and attention."""
    shapes = {
        "router": (D, E), "gate": (E, D, H), "up": (E, D, H), "down": (E, H, D),
        "shared_up": (D, H), "shared_down": (H, D), "queries": (D, D), "keys": (D, D),
    }  # fmt: skip

    def matrix(key, shape):
        return jax.random.normal(key, shape) / np.sqrt(shape[-2])

    keys = jax.random.split(key, (LAYERS, len(shapes)))
    return [
        {name: matrix(k, shape) for k, (name, shape) in zip(own, shapes.items(), strict=True)}
        for own in keys
    ]


def attended(p, x):
    scores = jnp.einsum("btd,bsd->bts", x @ p["queries"], x @ p["keys"])
    hidden = jnp.where(jnp.tril(jnp.ones((T, T), bool))[None], scores, -1e30)
    return x + jnp.einsum("bts,bsd->btd", jax.nn.softmax(hidden), x)


def by_sorting(p, x, which, weights):
    """The experts of rows (N, D), chosen (N, K) with weights (N, K); nothing is dropped."""
    order = jnp.argsort(which.reshape(-1), stable=True)
    sizes = jnp.bincount(which.reshape(-1), length=E).astype(jnp.int32)
    rows = x[order // which.shape[1]]
    gate, up = (jax.lax.ragged_dot(rows, p[name], sizes) for name in ("gate", "up"))
    y = jax.lax.ragged_dot(jax.nn.silu(gate) * up, p["down"], sizes)
    y = y[jnp.argsort(order)].reshape(*which.shape, D)
    return jnp.einsum("nkd,nk->nd", y, weights)


# --- Losses of examples ---------------------------------------------------------------------------


def mixtral(p, x):
    """Mixtral (Jiang et al. 2024): two of the experts, weights by softmax of their scores."""
    for layer in p:
        rows = attended(layer, x).reshape(-1, D)
        best, which = jax.lax.top_k(rows @ layer["router"], K)
        y = by_sorting(layer, rows, which, jax.nn.softmax(best))
        x = (rows + y).reshape(x.shape)
    return x


def mixtral_in_a_loop(p, x):
    """The same, its layers in one array and a loop over them."""
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *p)
    return jax.lax.scan(lambda x, layer: (mixtral([layer], x), None), x, stacked)[0]


def soft(p, x):
    """Soft mixtures (Puigcerver et al. 2023): the two slots of an expert have means of tokens."""
    for layer in p:
        scores = jnp.einsum("btd,de,s->btes", x, layer["router"], jnp.asarray([1.0, 0.5]))
        slots = jnp.einsum("btes,btd->besd", jax.nn.softmax(scores, axis=1), x)
        hidden = jax.nn.gelu(jnp.einsum("besd,edh->besh", slots, layer["up"]))
        y = jnp.einsum("besh,ehd->besd", hidden, layer["down"])
        x = x + jnp.einsum("btes,besd->btd", jax.nn.softmax(scores, axis=(2, 3)), y)
    return x


def expert_choice(p, x):
    """Expert choice (Zhou et al. 2022): each expert picks two tokens of an example."""
    for layer in p:
        scores = jax.nn.softmax(x @ layer["router"])
        weights, picked = jax.lax.top_k(scores.transpose(0, 2, 1), 2)
        chosen = jax.nn.one_hot(picked, T, dtype=x.dtype)
        rows = jnp.einsum("bect,btd->becd", chosen, x)
        hidden = jax.nn.gelu(jnp.einsum("becd,edh->bech", rows, layer["up"]))
        y = jnp.einsum("bech,ehd->becd", hidden, layer["down"])
        x = x + jnp.einsum("becd,bec,bect->btd", y, weights, chosen)
    return x


class Block(nn.Module):
    """A mixture in Flax, its experts parameters of the module."""

    @nn.compact
    def __call__(self, x):
        init = nn.initializers.normal(0.5)
        p = {"router": self.param("router", init, (D, E), x.dtype)}
        for name, shape in (("gate", (E, D, H)), ("up", (E, D, H)), ("down", (E, H, D))):
            p[name] = self.param(name, init, shape, x.dtype)
        rows = nn.Dense(D, dtype=x.dtype, param_dtype=x.dtype)(x).reshape(-1, D)
        best, which = jax.lax.top_k(jax.nn.softmax(rows @ p["router"]), K)
        return x + by_sorting(p, rows, which, best).reshape(x.shape)


FLAX = nn.Sequential([Block() for _ in range(LAYERS)])


def of_examples(function):
    def loss(p, batch, keys):
        return ((function(p, batch["x"]) - batch["y"]) ** 2).mean((1, 2))

    return px.Task(init=parameters, loss=loss)


def in_flax():
    def loss(p, batch, keys):
        return ((FLAX.apply(p, batch["x"]) - batch["y"]) ** 2).mean((1, 2))

    return px.Task(init=lambda key: FLAX.init(key, jnp.zeros((1, T, D), float)), loss=loss)


# --- Losses of a batch ----------------------------------------------------------------------------


def switch():
    """Switch transformers (Fedus et al. 2021): one expert, of a capacity, and a balanced load."""
    capacity = 10

    def loss(p, batch, keys, mask):
        x, balance = batch["x"], 0.0
        for layer in p:
            rows = x.reshape(-1, D)
            scores = jax.nn.softmax(rows @ layer["router"])
            one_hot = jax.nn.one_hot(scores.argmax(-1), E, dtype=rows.dtype)
            place = (jnp.cumsum(one_hot, 0) - 1) * one_hot
            kept = jnp.where(place < capacity, one_hot, 0)
            slots = jax.nn.one_hot(place.sum(-1).astype(jnp.int32), capacity, dtype=rows.dtype)
            sent = kept[:, :, None] * slots[:, None, :]
            buffers = jnp.einsum("nec,nd->ecd", sent, rows)
            hidden = jax.nn.relu(jnp.einsum("ecd,edh->ech", buffers, layer["up"]))
            y = jnp.einsum("ech,ehd->ecd", hidden, layer["down"])
            back = jnp.einsum("nec,ecd->nd", sent, y) * scores.max(-1, keepdims=True)
            x = (rows + back).reshape(x.shape)
            balance = balance + E * (one_hot.mean(0) * scores.mean(0)).sum()
        return ((x - batch["y"]) ** 2).mean((1, 2)) + 0.01 * balance

    return px.Task(init=parameters, loss=loss, coupled=True)


def deepseek():
    """DeepSeek-V3 (2024): a shared expert; a bias, which is model state, balances the load."""

    def init(key):
        return parameters(key), [jnp.zeros(E) for _ in range(LAYERS)]

    def loss(p, biases, batch, keys, mask):
        x, moved = batch["x"], []
        for layer, bias in zip(p, biases, strict=True):
            rows = x.reshape(-1, D)
            scores = jax.nn.sigmoid(rows @ layer["router"])
            which = jax.lax.top_k(scores + bias[None], K)[1]
            weights = jnp.take_along_axis(scores, which, 1)
            y = by_sorting(layer, rows, which, weights / weights.sum(-1, keepdims=True))
            y = y + jax.nn.silu(rows @ layer["shared_up"]) @ layer["shared_down"]
            load = jax.nn.one_hot(which, E, dtype=rows.dtype).sum((0, 1))
            moved.append(bias + 0.01 * jnp.sign(load.mean() - load))
            x = (rows + y).reshape(x.shape)
        return ((x - batch["y"]) ** 2).mean((1, 2)), {}, moved

    return px.Task(init=init, loss=loss, coupled=True, stateful=True)


TASKS = {
    "mixtral": lambda: of_examples(mixtral),
    "mixtral in a loop": lambda: of_examples(mixtral_in_a_loop),
    "soft": lambda: of_examples(soft),
    "expert choice": lambda: of_examples(expert_choice),
    "flax": in_flax,
    "switch": switch,
    "deepseek": deepseek,
}


def split(axis):
    return {f"*/{name}": (axis, None, None) for name in ("gate", "up", "down")}


PLANS = {
    "tensor": {"tensor": 4, "shardings": split("tensor")},
    "data": {"data": 4, "shardings": split("data")},
    "data and tensor": {"data": 2, "tensor": 2, "zero": 1, "shardings": split("tensor")},
    "zero 3": {"data": 2, "zero": 3, "remat": "full", "shardings": split("data")},
}


def by_hand(task, start, batch):
    """The loss, parameters and model state after a step of SGD."""
    mask = jnp.ones(B, bool)

    def mean(p, batch):
        if task.stateful:
            losses, _, state = task.loss(p, start.model_state, batch, None, mask)
            return losses.mean(), state
        return task.loss(p, batch, None, *([mask] if task.coupled else [])).mean(), ()

    (loss, state), grads = jax.jit(jax.value_and_grad(mean, has_aux=True))(start.params, batch)
    return loss, jax.tree.map(lambda p, g: p - RATE * g, start.params, grads), state


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", TASKS)
def test_a_step_is_that_by_hand(name, plan):
    task, rng = TASKS[name](), np.random.default_rng(4)
    batch = {key: rng.normal(size=(B, T, D)) for key in "xy"}
    program = px.compile(task, optax.sgd(RATE), px.Plan(**PLANS[plan]), batch)
    state = program.init(seed=0)
    start = jax.device_get(program.to_canonical(state))
    state, metrics = program.step(state, batch)
    after = program.to_canonical(state)
    found = metrics["loss"], after.params, after.model_state if task.stateful else ()
    expected = by_hand(task, start, batch)
    assert models.max_rel_error(jax.device_get(found), jax.device_get(expected)) < 1e-10
