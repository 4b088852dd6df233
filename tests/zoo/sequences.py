"""Networks on sequences."""

import jax
import jax.numpy as jnp
import numpy as np

from tests.promotion import row
from tests.zoo.by_hand import Model, complex_matrix, entropy, matrix

TIME, WIDTH, WORDS = 5, 6, 6


def texts(rng, count):
    words = rng.integers(0, WORDS, (count, TIME)).astype(np.int32)
    lengths = rng.integers(1, TIME + 1, count).astype(np.int32)
    return {"words": words, "length": lengths, "y": rng.integers(0, 3, count).astype(np.int32)}


def signals(rng, count):
    x = rng.normal(size=(count, TIME, 2))
    return {"x": x, "y": rng.normal(size=count)}


# --- GRU, whose state stands still behind the end of a sequence -----------------------------------


def gru_init(key):
    keys = jax.random.split(key, 4)
    return {
        "embed": matrix(keys[0], WORDS, WIDTH),
        "x": matrix(keys[1], WIDTH, 3, WIDTH),
        "h": matrix(keys[2], WIDTH, 3, WIDTH),
        "bias": jnp.zeros((3, WIDTH)),
        "head": matrix(keys[3], WIDTH, 3),
    }


def gru_loss(mark, params, batch, keys):
    x = mark(params["embed"][batch["words"]])

    def turn(h, inputs):
        x, t = inputs
        a = jnp.einsum("bi,igo->gbo", x, params["x"]) + params["bias"][:, None]
        b = jnp.einsum("bi,igo->gbo", h, params["h"])
        reset, keep = jax.nn.sigmoid(a[0] + b[0]), jax.nn.sigmoid(a[1] + b[1])
        new = (1 - keep) * jnp.tanh(a[2] + reset * b[2]) + keep * h
        return jnp.where((t < batch["length"])[:, None], new, h), None

    start = jnp.zeros((x.shape[0], WIDTH))
    h, _ = jax.lax.scan(turn, start, (x.swapaxes(0, 1), jnp.arange(TIME, dtype=jnp.int32)))
    logits = mark(h) @ params["head"]
    return entropy(logits, batch["y"]), {}


GRU = Model(
    gru_init,
    gru_loss,
    texts,
    {"x": (None, None, "tensor"), "h": (None, None, "tensor"), "bias": (None, "tensor")},
)


# --- A bidirectional LSTM that tags words; an example weighs as much as it has words --------------


def lstm_init(key):
    keys = jax.random.split(key, 6)
    way = lambda a, b: {  # noqa: E731
        "x": matrix(a, WIDTH, 4 * WIDTH),
        "h": matrix(b, WIDTH, 4 * WIDTH),
        "bias": jnp.zeros(4 * WIDTH),
    }
    return {
        "embed": matrix(keys[0], WORDS, WIDTH),
        "forward": way(*keys[1:3]),
        "backward": way(*keys[3:5]),
        "head": matrix(keys[5], 2 * WIDTH, WORDS),
    }


def lstm(params, x, real):
    """One example: `(TIME, WIDTH)`, states kept where a word is not real."""

    def turn(carry, inputs):
        x, real = inputs
        h, c = carry
        i, f, g, o = jnp.split(x @ params["x"] + h @ params["h"] + params["bias"], 4)
        c_new = jax.nn.sigmoid(f + 1) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h_new = jax.nn.sigmoid(o) * jnp.tanh(c_new)
        carry = jnp.where(real, h_new, h), jnp.where(real, c_new, c)
        return carry, carry[0]

    zeros = jnp.zeros(WIDTH)
    return jax.lax.scan(turn, (zeros, zeros), (x, real))[1]


def bilstm_loss(mark, params, batch, keys):
    def one(words, length):
        x = mark(params["embed"][words])
        real = jnp.arange(TIME, dtype=jnp.int32) < length
        ahead = lstm(params["forward"], x, real)
        back = lstm(params["backward"], x[::-1], real[::-1])[::-1]
        logits = mark(jnp.concatenate([ahead, back], -1)) @ params["head"]
        losses = entropy(logits, jnp.roll(words, 1))
        right = logits.argmax(-1) == jnp.roll(words, 1).astype(int)
        count = length.astype(losses.dtype)
        hits = jnp.sum(right & real, dtype=x.dtype)
        return jnp.where(real, losses, 0).sum() / count, hits / count

    losses, right = jax.vmap(one)(batch["words"], batch["length"])
    return losses, {"right": right}


BILSTM = Model(
    lstm_init,
    bilstm_loss,
    texts,
    {
        "*/x": (None, "tensor"),
        "*/h": (None, "tensor"),
        "*/bias": ("tensor",),
        "head": ("tensor", None),
    },
    weight=lambda batch: batch["length"].astype(jnp.float64),
)


# --- A diagonal state space with complex states, as an associative scan ---------------------------


def ssm_init(key):
    keys = jax.random.split(key, 5)
    return {
        "in": matrix(keys[0], 2, WIDTH),
        "decay": jnp.linspace(-1.0, 0.5, WIDTH),
        "turn": jnp.linspace(0.1, 3.0, WIDTH),
        "b": complex_matrix(keys[1], WIDTH),
        "c": complex_matrix(keys[2], WIDTH, WIDTH),
        "skip": matrix(keys[3], WIDTH),
        "head": matrix(keys[4], WIDTH),
    }


def ssm_loss(mark, params, batch, keys):
    x = mark(batch["x"] @ params["in"])
    a = jnp.exp(jax.lax.complex(-jnp.exp(params["decay"]), params["turn"]))
    steps = (jnp.broadcast_to(a, x.shape).astype(a.dtype), row(params["b"], x) * x.astype(a.dtype))

    def after(first, second):
        return first[0] * second[0], second[0] * first[1] + second[1]

    _, states = jax.lax.associative_scan(after, steps, axis=1)
    y = mark(jax.nn.gelu((states @ params["c"]).real + row(params["skip"], x) * x))
    return (y.mean(1) @ params["head"] - batch["y"]) ** 2, {"size": jnp.abs(states).max((1, 2))}


SSM = Model(
    ssm_init, ssm_loss, signals, {"c": (None, "tensor"), "skip": ("tensor",), "head": ("tensor",)}
)


# --- Top-2 of four experts, their load balanced over the whole batch ------------------------------


def moe_init(key):
    keys = jax.random.split(key, 5)
    return {
        "embed": matrix(keys[0], WORDS, WIDTH),
        "router": matrix(keys[1], WIDTH, 4),
        "up": matrix(keys[2], 4, WIDTH, 8),
        "down": matrix(keys[3], 4, 8, WIDTH),
        "head": matrix(keys[4], WIDTH, WORDS),
    }


def moe_loss(mark, params, batch, keys, mask):
    x = mark(params["embed"][batch["words"]])
    probabilities = jax.nn.softmax(x @ params["router"])
    best, which = jax.lax.top_k(probabilities, 2)
    chosen = jax.nn.one_hot(which, 4, dtype=x.dtype)
    gates = (chosen * (best / best.sum(-1, keepdims=True))[..., None]).sum(-2)
    hidden = jax.nn.gelu(jnp.einsum("btd,edh->bteh", x, params["up"]))
    y = mark(x + jnp.einsum("bteh,ehd,bte->btd", hidden, params["down"], gates))
    losses = entropy(y @ params["head"], jnp.roll(batch["words"], -1, 1)).mean(1)
    real = mask[:, None, None]
    count = (mask.sum() * TIME).astype(x.dtype)
    share = jnp.where(real, chosen.sum(-2), 0).sum((0, 1)) / count
    wanted = jnp.where(real, probabilities, 0).sum((0, 1)) / count
    return losses + 0.1 * 4 * jnp.vdot(share, wanted), {"load": gates.max((1, 2))}


MOE = Model(
    moe_init,
    moe_loss,
    texts,
    {"up": ("tensor", None, None), "down": ("tensor", None, None)},
    coupled=True,
)


# --- Masked autoregressive: parameters meet constants elementwise ---------------------------------

DEGREES = np.arange(8) % 3 + 1
INNER = (DEGREES[None, :] >= np.arange(1, 5)[:, None]).astype(np.float64)
OUTER = np.arange(1, 5)[None, :] > DEGREES[:, None]


def made_init(key):
    keys = jax.random.split(key, 3)
    return {
        "in": matrix(keys[0], 4, 8),
        "bias": jnp.zeros(8),
        "mean": matrix(keys[1], 8, 4),
        "log_scale": matrix(keys[2], 8, 4, scale=0.1),
        "shift": jnp.zeros(4),
    }


def made_loss(mark, params, batch, keys):
    hidden = mark(jnp.tanh(batch["x"] @ (params["in"] * INNER) + params["bias"][None]))
    mean = hidden @ jnp.where(OUTER, params["mean"], 0) + params["shift"][None]
    log_scale = hidden @ jnp.where(OUTER, params["log_scale"], 0)
    z = (batch["x"] - mean) * jnp.exp(-log_scale)
    return (z**2 / 2 + log_scale).sum(1), {"z": jnp.abs(z).max(1)}


MADE = Model(
    made_init,
    made_loss,
    lambda rng, count: {"x": rng.normal(size=(count, 4)).cumsum(1)},
    {
        "in": (None, "tensor"),
        "bias": ("tensor",),
        "mean": ("tensor", None),
        "log_scale": ("tensor", None),
    },
)


# --- Spiking neurons: a step function with a derivative of its own, in a scan ---------------------


@jax.custom_jvp
def spike(v):
    return (v > 0).astype(v.dtype)


@spike.defjvp
def spike_jvp(primals, tangents):
    (v,), (dv,) = primals, tangents
    return spike(v), dv / (1 + 5 * jnp.abs(v)) ** 2


def spiking_init(key):
    keys = jax.random.split(key, 3)
    return {
        "in": matrix(keys[0], 2, 8, scale=1.0),
        "again": matrix(keys[1], 8, 8),
        "leak": jnp.full(8, 1.0),
        "out": matrix(keys[2], 8),
    }


def spiking_loss(mark, params, batch, keys):
    def turn(carry, x):
        v, s, out = carry
        v = jax.nn.sigmoid(params["leak"])[None] * v * (1 - s)
        v = v + x @ params["in"] + s @ params["again"]
        s = spike(v - 0.5)
        return (v, s, 0.8 * out + s @ params["out"]), s.mean(-1)

    zeros = jnp.zeros((batch["x"].shape[0], 8))
    start = (zeros, zeros, zeros[:, 0])
    (_, _, out), spikes = jax.lax.scan(turn, start, mark(batch["x"]).swapaxes(0, 1))
    return (mark(out) - batch["y"]) ** 2, {"rate": spikes.mean(0)}


SPIKING = Model(
    spiking_init,
    spiking_loss,
    signals,
    {
        "in": (None, "tensor"),
        "again": (None, "tensor"),
        "leak": ("tensor",),
        "out": ("tensor",),
    },
)
