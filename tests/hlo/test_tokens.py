"""Tokens split over `context`: what is sent, to the byte; beside one device."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests import models

import plurax as px

ROWS, TOKENS, HEADS, KEY_HEADS, SIZE, BLOCK = 2, 96, 4, 2, 4, 4
WIDTH = HEADS * SIZE


def task(dtype, *, loop=False):
    """Causal attention of groups of heads, and a perceptron, on vectors `(B, T, width)`.

    With `loop` two such layers in a loop.
    """

    def init(key):
        shapes = {
            "q": (WIDTH, HEADS, SIZE),
            "k": (WIDTH, KEY_HEADS, SIZE),
            "v": (WIDTH, KEY_HEADS, SIZE),
            "out": (HEADS, SIZE, WIDTH),
            "up": (WIDTH, 2 * WIDTH),
            "down": (2 * WIDTH, WIDTH),
        }
        depth = (2,) if loop else ()
        arrays = models.normals(key, dtype, *((*depth, *shape) for shape in shapes.values()))
        return {name: array * 0.2 for name, array in zip(shapes, arrays, strict=True)}

    def layer(x, params):
        q, k, v = (jnp.einsum("btd,dnh->btnh", x, params[name]) for name in "qkv")
        q = q.reshape(*q.shape[:2], KEY_HEADS, HEADS // KEY_HEADS, SIZE)
        scores = jnp.einsum("btmgh,bsmh->bmgts", q, k) * SIZE**-0.5
        seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))[None, None, None]
        weights = jax.nn.softmax(jnp.where(seen, scores, -1e30))
        out = jnp.einsum("bmgts,bsmh->btmgh", weights, v).reshape(*x.shape[:2], HEADS, SIZE)
        x = x + jnp.einsum("btnh,nhd->btd", out, params["out"])
        return x + jnp.tanh(x @ params["up"]) @ params["down"], None

    def loss(params, batch, keys):
        x = batch["x"]
        x, _ = jax.lax.scan(layer, x, params) if loop else layer(x, params)
        return ((x - batch["y"]) ** 2).mean((1, 2))

    return px.Task(init=init, loss=loss)


def batch(rows=ROWS, dtype=np.float32):
    draw = np.random.default_rng(0)
    return {name: draw.normal(size=(rows, TOKENS, WIDTH)).astype(dtype) for name in "xy"}


def compiled(dtype="float32", **fields):
    plan = px.Plan(**{"stream": BLOCK} | fields)
    return px.compile(task(dtype), optax.sgd(0.1), plan, batch(dtype=dtype))


def moved(collectives):
    """The bytes that are moved, by kind; sums of weights are all-reduced."""
    counts = Counter()
    for one in collectives:
        if one.kind != "all-reduce":
            counts[one.kind] += one.bytes * one.trips
    return counts


KEYS = 2 * ROWS * TOKENS * KEY_HEADS * SIZE * 4
"""The bytes of keys and values, float32."""


@pytest.mark.ci
@pytest.mark.parametrize("stream", [BLOCK, TOKENS])
@pytest.mark.parametrize(("remat", "times"), [("none", 1), ("full", 2)])
def test_keys_are_gathered_and_their_gradients_scattered(remat, times, stream):
    """Each device gets all keys and values of its rows, and its share of their gradients.

    Rematerialized they are gathered again.
    """
    program = compiled(context=4, remat=remat, stream=stream)
    expected = {"all-gather": times * KEYS, "reduce-scatter": KEYS // 4}
    assert moved(program.collectives()) == expected == moved(program.planned_collectives())


@pytest.mark.ci
@pytest.mark.parametrize("count", [2, 3, 4, 8])
def test_keys_go_around(count):
    """Forward and backward each device sends n - 1 times its keys, backward n times gradients."""
    program = compiled(context=count, context_strategy="ring")
    expected = {"collective-permute": (2 * (count - 1) + count) * KEYS // count}
    assert moved(program.collectives()) == expected == moved(program.planned_collectives())


@pytest.mark.ci
@pytest.mark.parametrize("stream", [BLOCK, TOKENS])
def test_heads_are_exchanged_for_tokens(stream):
    """Queries, keys, values and what is attended, forward and backward."""
    count = 2
    share = ROWS * TOKENS * SIZE * 4 // count  # of one head
    expected = {"all-to-all": 2 * share * (2 * HEADS + 2 * KEY_HEADS)}
    program = compiled(context=count, context_strategy="heads", stream=stream)
    assert moved(program.collectives()) == expected == moved(program.planned_collectives())


@pytest.mark.ci
@pytest.mark.parametrize(
    ("count", "rest"), [(4, "gather"), (4, "ring"), (6, "ring"), (8, "gather")]
)
def test_heads_are_exchanged_within_groups_and_keys_between(count, rest):
    """Two heads of keys: among two devices. Of these heads' keys as much is sent as without."""
    share = ROWS * TOKENS * SIZE * 4 // count  # of one head
    groups, strategy = count // 2, "heads+ring" if rest == "ring" else "heads"
    expected = {"all-to-all": 2 * share * (2 * HEADS + 2 * KEY_HEADS)}
    if rest == "ring":
        expected["collective-permute"] = (2 * (groups - 1) + groups) * KEYS // count
    else:
        expected |= {"all-gather": KEYS // 2, "reduce-scatter": KEYS // count}
    program = compiled(context=count, context_strategy=strategy)
    assert moved(program.collectives()) == expected == moved(program.planned_collectives())
    # Neighbours exchange heads; who exchanges keys is two devices apart.
    apart = {one.kind: one.group for one in program.planned_collectives()}
    assert apart.pop("all-to-all") == (2, 1)
    assert {apart[kind] for kind in expected if kind in apart} == {(groups, 2)}
    assert apart["all-reduce"] is None


WORDS = 40


def loss_of_words(params, batch, keys):
    """The cross entropy of the next token."""
    x = params["table"][batch["tokens"][:, :-1]]
    scores = jax.nn.softmax(jnp.einsum("btd,bsd->bts", x, x))
    logits = jnp.einsum("bts,bsd->btd", scores, x) @ params["table"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:]).mean(1)


@pytest.mark.parametrize(("strategy", "rows"), [("gather", ROWS), ("heads", ROWS // 2)])
def test_gradients_of_logits_are_those_of_a_devices_tokens(strategy, rows):
    """They are added to zeros of the labels' places, which no device needs of all tokens.

    Of rows that are exchanged as heads are, the keys of half are gathered.
    """
    words = px.Task(init=lambda key: {"table": jnp.ones((WORDS, 8))}, loss=loss_of_words)
    tokens = {"tokens": np.zeros((ROWS, TOKENS + 1), np.int32)}
    plan = px.Plan(context=4, context_strategy=strategy, stream=TOKENS)
    program = px.compile(words, optax.sgd(0.1), plan, tokens)
    text = program.compiled_step.as_text()
    assert f"f32[{ROWS},{TOKENS // 4},{WORDS}]" in text
    assert f"f32[{ROWS},{TOKENS},{WORDS}]" not in text
    gathered = [one.bytes for one in program.collectives() if one.kind == "all-gather"]
    assert gathered == [rows * TOKENS * 8 * 4]  # keys, and no labels


@pytest.mark.ci
@pytest.mark.parametrize("strategy", ["gather", "ring"])
def test_each_device_holds_its_queries_by_the_keys_of_a_block(strategy):
    one = px.compile(task("float32"), optax.sgd(0.1), px.Plan(), batch()).memory().temporaries
    four = compiled(context=4, context_strategy=strategy).memory().temporaries
    assert four < one / 4


@pytest.mark.ci
def test_weights_are_reduced_once_a_step():
    """Over devices of rows and of tokens together, and after all microbatches."""
    plan = px.Plan(data=2, context=2, context_strategy="ring", microbatches=2, stream=BLOCK)
    program = px.compile(task("float32", loop=True), optax.sgd(0.1), plan, batch(4))
    sums = [one for one in program.collectives() if one.kind == "all-reduce" and one.bytes > 64]
    assert [(one.axes, one.in_loop) for one in sums] == [(("data", "context"), False)]


PLANS = {
    "gather": {"context": 4},
    "ring": {"context": 4, "context_strategy": "ring"},
    "heads": {"context": 2, "context_strategy": "heads"},
    "ring, data and zero 3": {"data": 2, "context": 4, "context_strategy": "ring", "zero": 3},
    "gather, microbatches and remat": {
        "data": 2, "context": 2, "microbatches": 2, "remat": "full"
    },
    "heads, zero 1": {"data": 2, "context": 2, "context_strategy": "heads", "zero": 1},
}  # fmt: skip


def trained(plan, loop):
    rows = batch(7, np.float64)
    program = px.compile(task("float64", loop=loop), optax.adam(1e-2), plan, rows)
    state = program.init(seed=1)
    for size in (7, 5):
        state, metrics = program.step(state, models.cut(rows, size))
    return jax.device_get((program.to_canonical(state).params, metrics))


@pytest.fixture(scope="module", params=[False, True], ids=["a layer", "layers in a loop"])
def alone(request):
    with jax.enable_x64(True):
        return request.param, trained(px.Plan(), request.param)


@pytest.mark.ci
@pytest.mark.parametrize("name", PLANS)
def test_the_update_is_that_of_one_device(x64, alone, name):
    loop, expected = alone
    plan = px.Plan(stream=16, **PLANS[name])
    assert models.max_rel_error(trained(plan, loop), expected) < 1e-10


@pytest.mark.ci
@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("data", [1, 2])
def test_zero_splits_the_state_over_rows_and_tokens(data, zero):
    plan = px.Plan(data=data, context=4, context_strategy="ring", stream=BLOCK, zero=zero)
    program = px.compile(task("float32", loop=True), optax.adam(0.1), plan, batch(4))
    shards = program.init(seed=0).opt_state[0].mu["up"].sharding.spec
    axes = tuple(axis for axis in ("data", "context") if plan.axes[axis] > 1)
    assert axes in [entry if isinstance(entry, tuple) else (entry,) for entry in shards]
    large = [one for one in program.collectives() if one.bytes > 64]
    kinds = {one.kind for one in large if one.kind != "collective-permute"}
    assert kinds == {"reduce-scatter", "all-gather"}
    assert {one.axes for one in large if one.kind == "reduce-scatter"} == {axes}
