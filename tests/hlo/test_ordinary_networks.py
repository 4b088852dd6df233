"""Networks as they are usually written send what an expert would write, and no more."""

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests import models

import plurax as px

pytestmark = pytest.mark.usefixtures("x64")

N, WIDTH, HIDDEN, TOKENS, DEPTH, RANK, WORDS = 8, 16, 32, 12, 2, 2, 256


@dataclasses.dataclass(frozen=True)
class Network:
    """Shapes of its parameters, its loss of one example, a plan, and what that sends.

    `sent`: of the collectives over `axis` of more than `small` bytes, kinds, bytes, how often.
    """

    shapes: dict[str, tuple[int, ...]]
    loss: Callable[..., Any]
    plan: px.Plan
    sent: dict[tuple[str, int], int]
    axis: str = "tensor"
    small: int = 16 * WIDTH


def init(shapes, key):
    keys = jax.random.split(key, len(shapes))
    return {
        name: jax.random.normal(key, shape) / shape[0] ** 0.5
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def batch():
    rng = np.random.default_rng(0)
    ends = rng.integers(0, TOKENS, (N, 2, 3 * TOKENS))
    return {"x": rng.normal(size=(N, TOKENS, WIDTH)), "ends": ends}


def recurrent(p, example, key):
    def turn(h, x):
        h = jnp.tanh(x @ p["in"] + h @ p["hidden"])
        return h, h

    _, hs = jax.lax.scan(turn, jnp.zeros(WIDTH), example["x"])
    return jnp.mean((hs @ p["out"]) ** 2)


def written_out(p, example, key):
    h = jnp.zeros(WIDTH)
    for x in example["x"]:
        h = jnp.tanh(x @ p["in"] + h @ p["hidden"])
    return jnp.mean((h @ p["out"]) ** 2)


def scaled_deviations(p, example, key):
    """Layer norm as Flax has it, the scale multiplied into the deviation first."""
    x = example["x"] + jax.nn.relu(example["x"] @ p["up"]) @ p["down"]
    mean = x.mean(axis=-1, keepdims=True)
    deviation = jax.lax.rsqrt(jnp.var(x, axis=-1, keepdims=True) + 1e-6)
    x = (x - mean) * (deviation * p["scale"][None]) + p["bias"][None]
    return jnp.mean(jax.nn.logsumexp(x @ p["out"], axis=-1))


def repeated(p, example, key):
    x = example["x"]
    for gain in ("first", "second"):
        gain = jnp.broadcast_to(p[gain].reshape(1, WIDTH), x.shape)
        x = jnp.tanh(gain * x)
    return jnp.mean((x @ p["out"]) ** 2)


def normalized(p, example, key):
    x = example["x"]
    for name in ("first", "second"):
        lengths = p[f"{name} length"] / jnp.linalg.norm(p[name], axis=0)
        w = lengths[None] * p[name]
        x = jnp.tanh(x @ w)
    return jnp.mean((x @ p["out"]) ** 2)


def standardized(p, example, key):
    x = example["x"]
    for name in ("first", "second", "third"):
        w = p[name]
        w = (w - jnp.mean(w, 0, keepdims=True)) / jnp.sqrt(jnp.var(w, 0, keepdims=True) + 1e-5)
        x = x + jnp.tanh(x @ w)
    return jnp.mean(x**2)


def scaled(p, example, key):
    x = example["x"]
    for place, name in enumerate(("first", "second")):
        x = jnp.tanh(x @ (p["scales"][place] * p[name]))
    return jnp.mean((x @ p["out"]) ** 2)


def quantized(p, example, key):
    x = example["x"]
    for name in ("first", "second", "out"):
        step = jnp.max(jnp.abs(p[name])) / 7
        rounded = jnp.clip(jnp.round(p[name] / step), -8, 7) * step
        w = p[name] + jax.lax.stop_gradient(rounded - p[name])
        x = x + jnp.tanh(x @ w)
    return jnp.mean(x**2)


def generated(p, example, key):
    """Each layer's weights are computed by one network, of a code of the layer."""
    weights = jax.nn.relu(p["codes"] @ p["hidden"]) @ p["weights"]
    x = example["x"]
    for w in weights.reshape(DEPTH, WIDTH, WIDTH):
        x = jnp.tanh(x @ w)
    return jnp.mean((x @ p["out"]) ** 2)


def there_and_back(p, example, key):
    x = example["x"]
    for _ in range(DEPTH):
        x = jnp.tanh(x @ p["first"]) @ p["first"].T
    return jnp.mean((x @ p["out"]) ** 2)


def convolutions(p, example, key):
    x = example["x"][None]
    for name in ("first", "second"):
        y = jax.lax.conv_general_dilated(
            jnp.tanh(x), p[name], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
        )
        x = x + jnp.tanh(y)
    return jnp.mean((x @ p["out"]) ** 2)


def inner_steps(p, example, key):
    """The loss behind steps of gradient descent on the example, as in meta-learning."""

    def loss(w, x):
        return jnp.mean((jnp.tanh(x @ w["first"]) @ w["out"]) ** 2)

    def turn(w, _):
        gradient = jax.grad(loss)(w, example["x"][:5])
        return jax.tree.map(lambda w, g: w - 0.1 * g, w, gradient), None

    return loss(jax.lax.scan(turn, p, None, length=3)[0], example["x"][5:])


def by_channel(p, example, key):
    x = example["x"]
    for _ in range(DEPTH):
        y = jax.lax.conv_general_dilated(
            (x @ p["up"])[None], p["kernel"], (1,), [(3, 0)],
            dimension_numbers=("NWC", "WIO", "NWC"), feature_group_count=HIDDEN,
        )  # fmt: skip
        x = x + jax.nn.silu(y[0]) @ p["down"]
    return jnp.mean(x**2)


def of_one_product(parts):
    def loss(p, example, key):
        x = example["x"]
        for _ in range(DEPTH):
            q, k, v = (part.reshape(TOKENS, 4, -1) for part in parts(x @ p["qkv"]))
            weights = jax.nn.softmax(jnp.einsum("qhd,khd->hqk", q, k))
            x = x + jnp.einsum("hqk,khd->qhd", weights, v).reshape(TOKENS, -1) @ p["out"]
        return jnp.mean(x**2)

    return loss


def decayed(p, example, key):
    x = example["x"] @ p["in"]
    decays = jnp.broadcast_to(jax.nn.sigmoid(p["decays"]), x.shape)
    _, h = jax.lax.associative_scan(
        lambda one, two: (one[0] * two[0], one[1] * two[0] + two[1]), (decays, x)
    )
    return jnp.mean((h @ p["out"]) ** 2)


def filtered(p, example, key):
    waves = np.cos(np.arange(TOKENS)[:, None] * np.arange(1, 5))
    long = jnp.tanh(waves @ p["first"]) @ p["second"]
    x = jnp.fft.rfft(example["x"], 2 * TOKENS, 0) * jnp.fft.rfft(long, 2 * TOKENS, 0)
    return jnp.mean((jnp.fft.irfft(x, 2 * TOKENS, 0)[:TOKENS] @ p["out"]) ** 2)


def of_taps(p, example, key):
    x = jnp.pad(example["x"], ((2, 0), (0, 0)))
    y = sum(p["taps"][tap][None] * x[tap : tap + TOKENS] for tap in range(3))
    return jnp.mean(jnp.tanh(y @ p["out"]) ** 2)


def positions(p, example, key):
    x = example["x"]
    away = np.abs(np.arange(TOKENS)[:, None] - np.arange(TOKENS))
    for _ in range(DEPTH):
        weights = jax.nn.softmax(x @ x.T + p["away"][np.minimum(away, 7)])
        x = weights @ x
    return jnp.mean((x @ p["out"]) ** 2)


def variance(p, example, key):
    def normed(x):
        groups = x.reshape(TOKENS, 8, -1)
        return (groups / jnp.sqrt(jnp.var(groups, -1, keepdims=True) + 1e-5)).reshape(x.shape)

    x = example["x"]
    for up, down in zip(p["up"], p["down"], strict=True):
        x = x + normed(jnp.tanh(normed(x) @ up)) @ down
    return jnp.mean(x**2)


def normed_after(p, example, key):
    x = example["x"] @ p["in"]
    q, k, v = (jnp.einsum("td,dhk->htk", x, p[name]) for name in ("q", "k", "v"))
    mixed = jax.nn.softmax(jnp.einsum("htk,hsk->hts", q, k)) @ v
    x = x + jnp.einsum("htk,hkd->td", mixed, p["out"])
    x = x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-5)
    return jnp.mean(jnp.tanh(x + jnp.tanh(x @ p["up"]) @ p["down"]) ** 2)


def low_rank(p, example, key):
    def changed(x, name):
        return x @ p[name] + x @ p[f"{name} a"] @ p[f"{name} b"]

    x = px.sharding.name(example["x"], "residual")
    y = x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-5)
    y = jnp.tanh(changed(y, "gate")) * jnp.tanh(changed(y, "up"))
    return jnp.mean(px.sharding.name(x + changed(y, "down"), "residual") ** 2)


def graph(p, example, key):
    x, (senders, receivers) = example["x"], example["ends"]
    for _ in range(DEPTH):
        sent = jnp.concatenate([x[senders], x[receivers]], -1)
        sent = jnp.tanh(sent @ p["up"]) @ p["down"]
        x = jnp.tanh(x + jax.ops.segment_sum(sent, receivers, TOKENS))
    return jnp.mean(x**2)


def tied(p, example, key):
    words = example["ends"][0]
    x = px.sharding.name(p["table"][words[:TOKENS]] + p["places"], "residual")
    x = px.sharding.name(x + jnp.tanh(x @ p["up"]) @ p["down"], "residual")
    logits = x @ p["table"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, words[-TOKENS:]).mean()


def looked_up(p, example, key):
    x = p["table"][example["ends"][0]]
    return jnp.mean((jnp.tanh(x @ p["up"]) @ p["down"]) ** 2)


MATRIX, ACTIVATIONS = 8 * WIDTH**2, 8 * N * TOKENS * WIDTH
ZERO = px.Plan(data=4, zero=3)
SQUARE = (WIDTH, WIDTH)


def split(column, row, sequence=()):
    return px.Plan(tensor=4, shardings=px.sharding.megatron(column, row, sequence=sequence))


BY_FEATURES = px.Plan(
    tensor=4,
    shardings={"table": (None, "tensor"), "up": (None, "tensor"), "down": ("tensor", None)},
)

NETWORKS = {
    "weights of a recurrence": Network(
        {"in": SQUARE, "hidden": SQUARE, "out": SQUARE},
        recurrent,
        ZERO,
        {
            ("all-gather", 3 * MATRIX): 1,
            ("all-gather", 2 * MATRIX): 1,
            ("reduce-scatter", 3 * MATRIX // 4): 1,
        },
        "data",
    ),
    "a gain that is repeated": Network(
        {"first": (WIDTH,), "second": (WIDTH,), "out": SQUARE},
        repeated,
        ZERO,
        {
            ("all-gather", MATRIX + 2 * 8 * WIDTH): 1,
            ("all-gather", MATRIX + 8 * WIDTH): 1,  # the input has no gradient
            ("reduce-scatter", (MATRIX + 256) // 4): 1,
        },
        "data",
    ),
    "rows of a table that is split by features": Network(
        {"table": (TOKENS, WIDTH), "up": (WIDTH, HIDDEN), "down": (HIDDEN, 4)},
        looked_up,
        BY_FEATURES,
        # Of the backward pass the table's gradient: it is smaller than that of its rows.
        {
            ("all-gather", 3 * ACTIVATIONS): 1,
            ("all-reduce", 3 * ACTIVATIONS // 4): 1,
            ("reduce-scatter", 8 * TOKENS * WIDTH // 4): 1,
        },
    ),
    "rows of a large table that is split by features": Network(
        {"table": (4 * WORDS, WIDTH), "up": (WIDTH, HIDDEN), "down": (HIDDEN, 4)},
        looked_up,
        BY_FEATURES,
        {
            ("all-gather", 3 * ACTIVATIONS): 1,
            ("all-reduce", 3 * ACTIVATIONS // 4): 1,
            ("reduce-scatter", 3 * ACTIVATIONS // 4): 1,
        },
    ),
    "weights of a direction and a length": Network(
        {
            "first": SQUARE,
            "first length": (WIDTH,),
            "second": SQUARE,
            "second length": (WIDTH,),
            "out": SQUARE,
        },
        normalized,
        ZERO,
        {
            ("all-gather", 3 * MATRIX): 1,
            ("all-gather", 2 * MATRIX): 1,  # the input has no gradient
            ("reduce-scatter", MATRIX // 4): 3,
        },
        "data",
    ),
    "weights with a scale, one of a vector": Network(
        {"first": SQUARE, "second": SQUARE, "scales": (4,), "out": SQUARE},
        scaled,
        ZERO,
        {
            ("all-gather", 3 * MATRIX): 1,
            ("all-gather", 2 * MATRIX): 1,  # the input has no gradient
            ("reduce-scatter", MATRIX // 4): 2,
            ("reduce-scatter", (MATRIX + 8 * 4) // 4): 1,
        },
        "data",
    ),
    "weights that are quantized, computed again": Network(
        {"first": SQUARE, "second": SQUARE, "out": SQUARE},
        quantized,
        dataclasses.replace(ZERO, remat="full"),
        {
            ("all-gather", 3 * MATRIX): 1,
            ("all-gather", MATRIX): 3,  # each part by itself
            ("reduce-scatter", 3 * MATRIX // 4): 1,
        },
        "data",
    ),
    "weights that a network computes": Network(
        {
            "codes": (DEPTH, 4),
            "hidden": (4, HIDDEN),
            "weights": (HIDDEN, WIDTH**2),
            "out": SQUARE,
        },
        generated,
        ZERO,
        {  # of the network's own weights nothing, which have 32 times the bytes of a layer's
            ("all-gather", 8 * DEPTH * HIDDEN): 1,
            ("all-gather", 3 * MATRIX): 1,
            ("all-gather", 2 * MATRIX): 1,
            ("reduce-scatter", 2 * MATRIX // 4): 1,
            ("reduce-scatter", (MATRIX + 8 * DEPTH * 4) // 4): 1,
        },
        "data",
    ),
    "weights that are standardized, computed again": Network(
        {"first": SQUARE, "second": SQUARE, "third": SQUARE},
        standardized,
        dataclasses.replace(ZERO, remat="full"),
        {
            ("all-gather", 3 * MATRIX): 1,
            ("all-gather", MATRIX): 3,  # each part by itself
            ("reduce-scatter", MATRIX // 4): 3,
        },
        "data",
    ),
    "a matrix and its transpose": Network(
        {"first": SQUARE, "out": SQUARE},
        there_and_back,
        ZERO,
        {("all-gather", 2 * MATRIX): 2, ("reduce-scatter", 2 * MATRIX // 4): 1},
        "data",
    ),
    "convolutions, computed again": Network(
        {"first": (3, *SQUARE), "second": (3, *SQUARE), "out": SQUARE},
        convolutions,
        dataclasses.replace(ZERO, remat="full"),
        {
            ("all-gather", 7 * MATRIX): 1,
            ("all-gather", MATRIX): 1,
            ("all-gather", 3 * MATRIX): 2,  # as it is, for its reverse, too
            ("reduce-scatter", 7 * MATRIX // 4): 1,
        },
        "data",
    ),
    "weights that change in a loop for each example": Network(
        {"first": SQUARE, "out": SQUARE},
        inner_steps,
        ZERO,
        {("all-gather", MATRIX): 2, ("reduce-scatter", 2 * MATRIX // 4): 1},
        "data",
    ),
    "a convolution by channel": Network(
        {"up": (WIDTH, HIDDEN), "kernel": (4, 1, HIDDEN), "down": (HIDDEN, WIDTH)},
        by_channel,
        split(["up", "kernel"], ["down"]),
        {("all-reduce", ACTIVATIONS): 2 * DEPTH - 1},
    ),
    **{
        f"queries, keys and values of one product, {name}": Network(
            {"qkv": (WIDTH, 3 * WIDTH), "out": SQUARE},
            of_one_product(parts),
            split(["qkv"], ["out"]),
            {
                # Of three shares each device keeps one, forward and backward.
                ("collective-permute", ACTIVATIONS // 4): 2 * 2 * DEPTH,
                ("all-reduce", ACTIVATIONS): 2 * DEPTH - 1,
            },
        )
        for name, parts in (
            ("split", lambda y: jnp.split(y, 3, -1)),
            ("reshaped", lambda y: jnp.moveaxis(y.reshape(TOKENS, 3, WIDTH), 1, 0)),
        )
    },
    # All devices would take part in a permute, and four of the eight run one turn of three.
    "queries, keys and values of one product, devices that run fewer microbatches": Network(
        {"qkv": (WIDTH, 3 * WIDTH), "out": SQUARE},
        of_one_product(lambda y: jnp.split(y, 3, -1)),
        dataclasses.replace(split(["qkv"], ["out"]), data=2, microbatches=(3, 1)),
        {
            ("all-gather", ACTIVATIONS // 4): 6,
            ("all-gather", ACTIVATIONS // 2): 4,
            ("reduce-scatter", ACTIVATIONS // 16): 4,
            ("all-reduce", ACTIVATIONS // 4): 2 * DEPTH - 1,
        },
    ),
    "decays along a sequence": Network(
        {"in": SQUARE, "decays": (WIDTH,), "out": SQUARE},
        decayed,
        ZERO,
        {
            ("all-gather", 2 * MATRIX): 1,
            ("all-gather", MATRIX): 1,  # the input has no gradient
            ("reduce-scatter", 2 * MATRIX // 4): 1,
        },
        "data",
    ),
    "a filter that a network computes": Network(
        {"first": (4, 8), "second": (8, WIDTH), "out": SQUARE},
        filtered,
        ZERO,
        {
            ("all-gather", 8 * 8 * WIDTH): 1,
            ("all-gather", MATRIX): 1,
            ("all-gather", MATRIX + 8 * 8 * WIDTH): 1,  # backward
            ("reduce-scatter", (MATRIX + 8 * (8 * WIDTH + 4 * 8)) // 4): 1,
        },
        "data",
    ),
    "a convolution, a sum of slices": Network(
        {"taps": (3, WIDTH), "out": SQUARE},
        of_taps,
        ZERO,
        {
            ("all-gather", MATRIX + 3 * 8 * WIDTH): 1,
            ("all-gather", MATRIX): 1,
            ("reduce-scatter", (MATRIX + 3 * 8 * WIDTH) // 4): 1,
        },
        "data",
        small=8,
    ),
    "a table of relative positions": Network(
        {"away": (8,), "out": SQUARE},
        positions,
        ZERO,
        {("all-gather", MATRIX): 2, ("reduce-scatter", (MATRIX + 64) // 4): 1},
        "data",
    ),
    "constants of several layers": Network(
        {"up": (DEPTH, *SQUARE), "down": (DEPTH, *SQUARE)},
        variance,
        split(["up"], ["down"]),
        {("all-reduce", ACTIVATIONS): 2 * DEPTH - 1},
    ),
    "three terms of a gradient": Network(
        {
            "in": SQUARE,
            **dict.fromkeys("qkv", (WIDTH, 4, 4)),
            "out": (4, 4, WIDTH),
            "up": (WIDTH, HIDDEN),
            "down": (HIDDEN, WIDTH),
        },
        normed_after,
        split(
            {"[qkv]": (None, "tensor", None), "up": (None, "tensor")},
            {"out": ("tensor", None, None), "down": ("tensor", None)},
        ),
        {("all-reduce", ACTIVATIONS): 4},
    ),
    "changes of low rank": Network(
        {
            "gate": (WIDTH, HIDDEN),
            "gate a": (WIDTH, RANK),
            "gate b": (RANK, HIDDEN),
            "up": (WIDTH, HIDDEN),
            "up a": (WIDTH, RANK),
            "up b": (RANK, HIDDEN),
            "down": (HIDDEN, WIDTH),
            "down a": (HIDDEN, RANK),
            "down b": (RANK, WIDTH),
        },
        low_rank,
        split(["gate", "up", "gate b", "up b"], ["down", "down a"], ["residual"]),
        {("all-gather", ACTIVATIONS): 2, ("reduce-scatter", ACTIVATIONS // 4): 1},
        small=8 * N * TOKENS * RANK,
    ),
    "the ends of edges": Network(
        {"up": (2 * WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)},
        graph,
        split(["up"], ["down"]),
        {("all-reduce", ACTIVATIONS): 2 * DEPTH - 1},
    ),
    "a table of words that is the head, too": Network(
        {
            "table": (WORDS, WIDTH),
            "places": (TOKENS, WIDTH),
            "up": (WIDTH, HIDDEN),
            "down": (HIDDEN, WIDTH),
        },
        tied,
        px.Plan(
            data=2,
            tensor=4,
            shardings=px.sharding.megatron(["up"], ["down"], sequence=["residual"])
            | {"table": ("tensor", None)},
        ),
        {
            ("all-gather", ACTIVATIONS // 2): 4,
            ("reduce-scatter", ACTIVATIONS // 8): 4,
            ("all-gather", 8 * TOKENS * WIDTH): 1,  # the gradient of places, of each token's device
        },
        small=8 * N * TOKENS,
    ),
    "a recurrence that is written out": Network(
        {"in": (WIDTH, WIDTH), "hidden": (WIDTH, WIDTH), "out": (WIDTH, HIDDEN)},
        written_out,
        px.Plan(data=4, zero=3),
        {  # each weight once in each pass, a product with zeros, and what it adds up
            ("all-gather", 8 * WIDTH * (2 * WIDTH + HIDDEN + 1)): 1,
            ("all-gather", 8 * WIDTH * (WIDTH + HIDDEN)): 1,
            ("reduce-scatter", 2 * WIDTH * (2 * WIDTH + HIDDEN)): 1,
        },
        axis="data",
    ),
    "a layer norm that is computed again": Network(
        {
            "up": (WIDTH, HIDDEN),
            "down": (HIDDEN, WIDTH),
            "scale": (WIDTH,),
            "bias": (WIDTH,),
            "out": (WIDTH, HIDDEN),
        },
        scaled_deviations,
        dataclasses.replace(split(["up", "out"], ["down"]), remat="full"),
        {("all-reduce", ACTIVATIONS): 2},
        small=8 * N * TOKENS,
    ),
}


def program(network):
    task = px.Task(init=lambda key: init(network.shapes, key), loss=px.per_example(network.loss))
    return px.compile(task, optax.sgd(0.1), network.plan, batch())


@pytest.mark.parametrize("name", NETWORKS)
def test_what_is_sent(name):
    network = NETWORKS[name]
    sent = Counter()
    for one in program(network).planned_collectives():
        if network.axis in one.axes and one.bytes > network.small:
            sent[one.kind, one.bytes] += one.trips or 1  # in a loop of unknown length, of one turn
    assert sent == network.sent


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.ci] * (place % 3 > 0))
        for place, name in enumerate(NETWORKS)
    ],
)
def test_the_update_is_that_by_hand(name):
    network, rows = NETWORKS[name], batch()
    trained = program(network)
    state = trained.init(0)
    params = jax.tree.map(np.asarray, state.params)

    def mean(params):
        return jax.vmap(network.loss, (None, 0, None))(params, rows, None).mean()

    by_hand = jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.jit(jax.grad(mean))(params))
    state, _ = trained.step(state, rows)
    assert models.max_rel_error(state.params, by_hand) < 1e-10
