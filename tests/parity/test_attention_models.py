"""Models of several kinds of attention, layer after layer, beside a step written by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests import models

import plurax as px

# Rows, tokens, width, heads.
B, T, D, N = 2, 32, 8, 2

pytestmark = pytest.mark.usefixtures("x64")


def attention(h, keys, weights, mask=None, bias=None):
    pairs = zip((h, keys, keys), weights, strict=True)
    q, k, v = (jnp.einsum("btd,dnh->btnh", x, w) for x, w in pairs)
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(D // N)
    if bias is not None:
        scores = scores + bias
    if mask is not None:
        scores = jnp.where(mask[None, None], scores, -1e30)
    mixed = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), v)
    return mixed.reshape(h.shape)


def places(tokens=T):
    index = jnp.arange(tokens)
    return index[:, None], index[None]


def causal(tokens=T):
    t, s = places(tokens)
    return t >= s


def encoder_and_decoder(p, x, y):
    for layer in p["encoder"]:
        x = x + attention(x, x, layer)
    for own, other in zip(p["decoder"], p["cross"], strict=True):
        y = y + attention(y, y, own, jnp.tril(jnp.ones((T, T), bool)))
        y = y + attention(y, x, other)
    return y


def windows_and_all(p, x, y):
    t, s = places()
    short = causal() & (t - s < 5)
    for layer, mask in zip((*p["encoder"], p["cross"][0]), (short, causal(), short), strict=True):
        x = x + jax.nn.gelu(attention(x, x, layer, mask))
    return x


def slopes(p, x, y):
    t, s = places()
    bias = -(t - s).astype(x.dtype)[None, None] * jnp.asarray([0.5, 0.25])[None, :, None, None]
    for layer in p["encoder"]:
        x = x + attention(x, x, layer, causal(), bias)
    return x


def keys_of_one_layer(p, x, y):
    first = x
    for layer in p["encoder"]:
        x = x + attention(x, first, layer, causal())
    return x


def prefix(p, x, y):
    t, s = places()
    x = jnp.concatenate([jnp.broadcast_to(p["prefix"][None], (len(x), 8, D)), x[:, 8:]], 1)
    for layer in p["encoder"]:
        x = x + attention(x, x, layer, (t >= s) | (s < 8))
    return x[:, 8:]


def pooled(p, x, y):
    first, second = p["encoder"]
    x = x + attention(x, x, first, causal())
    x = x.reshape(len(x), T // 2, 2, D).mean(2)
    return (x + attention(x, x, second, causal(T // 2)))[:, -1]


def fewer_keys_than_a_block(p, x, y):
    first, second = p["encoder"]
    x = x + attention(x, x, first, causal())
    return x + attention(x, y[:, :2], second)


def behind_sums_of_products(p, x, y):
    """Linear attention: its products have features, and no keys."""
    first, second = p["encoder"]
    q, k, v = (jax.nn.softplus(jnp.einsum("btd,dnh->btnh", x, w)) for w in first)
    state = jnp.cumsum(jnp.einsum("btnh,btne->btnhe", k, v), 1)
    x = x + jnp.einsum("btnh,btnhe->btne", q, state).reshape(x.shape) / T
    return x + attention(x, x, second, causal())


MODELS = [
    encoder_and_decoder, windows_and_all, slopes, keys_of_one_layer, prefix, pooled,
    fewer_keys_than_a_block, behind_sums_of_products,
]  # fmt: skip
PLANS = {
    "blocks": {},
    "ring": {"context": 4, "context_strategy": "ring"},
    "gather": {"context": 2},
    "heads": {"context": 2, "context_strategy": "heads"},
    "heads of all, no ring": {"context": 2, "context_strategy": "heads+ring"},
}


def init(key):
    keys = iter(jax.random.split(key, 40))

    def normal(*shape):
        return jax.random.normal(next(keys), shape, jnp.float64) * 0.3

    layers = {
        name: [[normal(D, N, D // N) for _ in range(3)] for _ in range(2)]
        for name in ("encoder", "decoder", "cross")
    }
    return layers | {"prefix": normal(8, D)}


@pytest.mark.ci
@pytest.mark.parametrize("model", MODELS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("plan", PLANS)
def test_a_step_is_that_by_hand(model, plan):
    draw = np.random.default_rng(0)
    batch = {name: draw.normal(size=(B, T, D)) for name in "xy"}

    def loss(params, batch, keys=None):
        out = jnp.sin(model(params, batch["x"], batch["y"])) ** 2
        return out.reshape(len(batch["x"]), -1).sum(1)

    task = px.Task(init=init, loss=loss)
    program = px.compile(task, optax.sgd(0.1), px.Plan(stream=4, **PLANS[plan]), batch)
    state = program.init(seed=0)
    params = jax.device_get(program.to_canonical(state).params)
    grads = jax.jit(jax.grad(lambda params: loss(params, batch).mean()))(params)
    expected = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    state, _ = program.step(state, batch)
    got = jax.device_get(program.to_canonical(state).params)
    assert models.max_rel_error(got, jax.device_get(expected)) < 1e-10
