"""Tokens split over devices: keys gathered, or heads exchanged, to the byte; beside one device."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests import models

import plurax as px

ROWS, TOKENS, HEADS, KEY_HEADS, SIZE = 2, 64, 4, 2, 4
WIDTH = HEADS * SIZE
GATHERED = {"tokens": (None, "tensor", None)}
EXCHANGED = GATHERED | {
    "heads": (None, None, "tensor", None),
    "attended": (None, "tensor", None, None),
}


def task(dtype):
    """Causal attention of groups of heads, and a perceptron, on vectors `(B, T, width)`."""

    def init(key):
        shapes = {
            "q": (WIDTH, HEADS, SIZE),
            "k": (WIDTH, KEY_HEADS, SIZE),
            "v": (WIDTH, KEY_HEADS, SIZE),
            "out": (HEADS, SIZE, WIDTH),
            "up": (WIDTH, 2 * WIDTH),
            "down": (2 * WIDTH, WIDTH),
        }
        keys = jax.random.split(key, len(shapes))
        pairs = zip(shapes.items(), keys, strict=True)
        return {name: jax.random.normal(key, shape, dtype) * 0.2 for (name, shape), key in pairs}

    def loss(params, batch, keys):
        x = px.sharding.name(batch["x"], "tokens")
        q, k, v = (
            px.sharding.name(jnp.einsum("btd,dnh->btnh", x, params[name]), "heads")
            for name in "qkv"
        )
        q = q.reshape(*q.shape[:2], KEY_HEADS, HEADS // KEY_HEADS, SIZE)
        scores = jnp.einsum("btmgh,bsmh->bmgts", q, k) * SIZE**-0.5
        seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))[None, None, None]
        weights = jax.nn.softmax(jnp.where(seen, scores, -1e30))
        out = jnp.einsum("bmgts,bsmh->btmgh", weights, v).reshape(*x.shape[:2], HEADS, SIZE)
        out = px.sharding.name(out, "attended")
        x = px.sharding.name(x + jnp.einsum("btnh,nhd->btd", out, params["out"]), "tokens")
        x = x + jnp.tanh(x @ params["up"]) @ params["down"]
        return ((x - batch["y"]) ** 2).mean((1, 2))

    return px.Task(init=init, loss=loss)


def batch(rows=ROWS, dtype=np.float32):
    draw = np.random.default_rng(0)
    return {name: draw.normal(size=(rows, TOKENS, WIDTH)).astype(dtype) for name in "xy"}


def moved(program):
    """The bytes that are moved over tokens and heads, by kind; sums of weights are all-reduced."""
    counts = Counter()
    for one in program.collectives():
        if one.kind != "all-reduce":
            counts[one.kind] += one.bytes * one.trips
    return counts


@pytest.mark.parametrize("stream", [None, 16])
@pytest.mark.parametrize(("remat", "times"), [("none", 1), ("full", 2)])
def test_keys_are_gathered_and_their_gradients_scattered(stream, remat, times):
    """Each device gets all keys and values of its rows, and its share of their gradients.

    Rematerialized they are gathered again.
    """
    count = 4
    plan = px.Plan(tensor=count, stream=stream, remat=remat, shardings=GATHERED)
    keys = 2 * ROWS * TOKENS * KEY_HEADS * SIZE * 4  # keys and values, float32
    expected = {"all-gather": times * keys, "reduce-scatter": keys // count}
    assert moved(px.compile(task("float32"), optax.sgd(0.1), plan, batch())) == expected


@pytest.mark.parametrize("stream", [None, 16])
def test_heads_are_exchanged_for_tokens(stream):
    """Queries, keys, values and what is attended, forward and backward."""
    count = 2
    plan = px.Plan(tensor=count, stream=stream, shardings=EXCHANGED)
    share = ROWS * TOKENS * SIZE * 4 // count  # of one head
    expected = {"all-to-all": 2 * share * (2 * HEADS + 2 * KEY_HEADS)}
    assert moved(px.compile(task("float32"), optax.sgd(0.1), plan, batch())) == expected


def test_each_device_holds_its_queries_by_the_keys_of_a_block():
    one, four = (
        px.compile(task("float32"), optax.sgd(0.1), plan, batch()).memory().temporaries
        for plan in (px.Plan(), px.Plan(tensor=4, stream=16, shardings=GATHERED))
    )
    assert four < one / 4


PLANS = {
    "gathered": {"tensor": 4, "shardings": GATHERED},
    "exchanged": {"tensor": 2, "shardings": EXCHANGED},
    "with data and zero 3": {"data": 2, "tensor": 2, "zero": 3, "shardings": GATHERED},
    "with microbatches and remat": {
        "data": 2, "tensor": 2, "microbatches": 2, "remat": "full", "shardings": GATHERED
    },
    "exchanged, with zero 1": {"data": 2, "tensor": 2, "zero": 1, "shardings": EXCHANGED},
}  # fmt: skip


def trained(plan):
    rows = batch(7, np.float64)
    program = px.compile(task("float64"), optax.adam(1e-2), plan, rows)
    state = program.init(seed=1)
    for size in (7, 5):
        state, metrics = program.step(state, models.cut(rows, size))
    return jax.device_get((program.to_canonical(state).params, metrics))


@pytest.fixture(scope="module")
def alone():
    with jax.enable_x64(True):
        return trained(px.Plan())


@pytest.mark.parametrize("name", PLANS)
def test_the_update_is_that_of_one_device(x64, alone, name):
    plan = px.Plan(stream=24, **PLANS[name])
    assert models.max_rel_error(trained(plan), alone) < 1e-10
