"""Shifts, scans and convolutions over tokens that are split over devices, beside one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests import models
from tests.tiers import in_turns

import plurax as px
from plurax.errors import ShardingWarning

pytestmark = pytest.mark.usefixtures("x64")

ROWS, TOKENS, WIDTH, HEADS = 4, 48, 8, 2
COLUMN = ROWS * WIDTH * 8
"""The bytes of one token of all rows."""


def recurrence(p, x):
    """A linear recurrence with a decay for each token, as of S5 and Mamba."""

    def joined(left, right):
        return left[0] * right[0], right[0] * left[1] + right[1]

    decay = jax.nn.sigmoid(x @ p["mix"])
    return jax.lax.associative_scan(joined, (decay, (1 - decay) * x), axis=1)[1]


def convolved(p, x, groups=1):
    kernel = p["kernel"][:, :1] if groups > 1 else p["kernel"]
    return jax.lax.conv_general_dilated(
        x, kernel, (1,), [(2, 0)], dimension_numbers=("NWC", "WIO", "NWC"),
        feature_group_count=groups,
    )  # fmt: skip


def sum_of_slices(p, x):
    """A short convolution by channel, as it is written in Mamba."""
    padded = jnp.pad(x, ((0, 0), (2, 0), (0, 0)))
    return sum(padded[:, k : k + TOKENS] * p["kernel"][None, k, :1] for k in range(3))


def token_shift(p, x):
    """As in RWKV."""
    before = jnp.pad(x[:, :-1], ((0, 0), (1, 0), (0, 0)))
    return x * p["mix"][None, :1] + before * (1 - p["mix"][None, :1])


def one_after_another(p, x):
    def step(state, row):
        state = jnp.tanh(0.5 * state + row)
        return state, state

    rows = x.swapaxes(0, 1)
    return jax.lax.scan(step, jnp.zeros_like(rows[0]), rows)[1].swapaxes(0, 1)


MIXERS = {
    "cumsum": lambda p, x: jnp.cumsum(x, 1) / TOKENS,
    "cumsum from the end": lambda p, x: jax.lax.cumsum(x, 1, reverse=True) / TOKENS,
    "cummax": lambda p, x: jax.lax.cummax(x, 1),
    "cumlogsumexp": lambda p, x: jax.lax.cumlogsumexp(x, 1),
    "recurrence": recurrence,
    "convolution": convolved,
    "convolution by channel": functools.partial(convolved, groups=WIDTH),
    "sum of slices": sum_of_slices,
    "token shift": token_shift,
    "roll": lambda p, x: jnp.roll(x, 1, axis=1),
    "joined": lambda p, x: jnp.concatenate([jnp.zeros_like(x[:, :1]), x[:, :-1]], 1),
    "first token": lambda p, x: x + x[:, 0][:, None],
    "last token": lambda p, x: x + x[:, -1][:, None],
}


def init(key):
    shapes = {
        "up": (WIDTH, WIDTH),
        "q": (WIDTH, HEADS, WIDTH // HEADS),
        "mix": (WIDTH, WIDTH),
        "kernel": (3, WIDTH, WIDTH),
        "out": (WIDTH, WIDTH),
    }
    keys = jax.random.split(key, len(shapes))
    pairs = zip(shapes.items(), keys, strict=True)
    return {name: jax.random.normal(key, shape) * 0.3 for (name, shape), key in pairs}


def loss_of(mixer, *, causal=False, shifted=False):
    """The loss of a layer that mixes tokens, between a projection and attention."""

    def loss(params, batch, keys):
        x = batch["x"] @ params["up"]
        x = x + MIXERS[mixer](params, jnp.sin(x))
        q = jnp.einsum("btd,dnh->btnh", x, params["q"])
        scores = jnp.einsum("btnh,bsnh->bnts", q, q)
        if causal:
            seen = jnp.tril(jnp.ones((TOKENS, TOKENS), bool))[None, None]
            scores = jnp.where(seen, scores, -jnp.inf)
        mixed = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), q).reshape(x.shape)
        x = (x + mixed) @ params["out"]
        if shifted:  # the next token is to be predicted
            return ((x[:, :-1] - batch["x"][:, 1:]) ** 2).mean((1, 2))
        return ((x - batch["y"]) ** 2).mean((1, 2))

    return loss


def batch():
    draw = np.random.default_rng(0)
    return {name: draw.normal(size=(ROWS, TOKENS, WIDTH)) for name in "xy"}


@functools.cache
def by_hand(mixer, **fields):
    """Two steps of gradient descent, on one device."""
    loss, rows = loss_of(mixer, **fields), batch()
    with jax.enable_x64(True):
        mean = lambda params: loss(params, rows, None).mean()  # noqa: E731
        step = jax.jit(jax.value_and_grad(mean))
        params, values = init(jax.random.key(0)), []
        for _ in range(2):
            value, grads = step(params)
            params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
            values.append(value)
    return jax.device_get((params, values))


def program_of(mixer, plan, **fields):
    params = init(jax.random.key(0))
    task = px.Task(init=lambda key: params, loss=loss_of(mixer, **fields))
    return px.compile(task, optax.sgd(0.1), plan, batch())


def trained(program):
    state, values = program.init(seed=0), []
    for _ in range(2):
        state, metrics = program.step(state, batch())
        values.append(metrics["loss"])
    return jax.device_get((program.to_canonical(state).params, values))


def assert_by_hand(mixer, plan, **fields):
    program = program_of(mixer, plan, **fields)
    assert models.max_rel_error(trained(program), by_hand(mixer, **fields)) < 1e-10
    return program


def over_tokens(program, kinds=("all-gather", "collective-permute", "all-to-all")):
    """What is sent over `context`, by kind: how often, and how many bytes; keys are not counted."""
    sent = {}
    for one in program.collectives():
        if one.axes == ("context",) and one.kind in kinds and one.bytes < TOKENS * COLUMN // 4:
            sent[one.kind] = sent.get(one.kind, 0) + one.bytes * one.trips
    return sent


@pytest.mark.parametrize("count", [2, 3, 4, 8])
@pytest.mark.parametrize("mixer", MIXERS)
def test_tokens_over_devices_equal_one(mixer, count):
    assert_by_hand(mixer, px.Plan(context=count, stream=4))


PLANS = {
    "ring": px.Plan(context=4, context_strategy="ring", stream=4),
    "heads": px.Plan(context=2, context_strategy="heads", stream=4),
    "data, zero 3": px.Plan(data=2, context=4, stream=4, zero=3),
    "zero 1, microbatches": px.Plan(data=2, context=2, stream=4, zero=1, microbatches=2),
    "remat": px.Plan(context=4, stream=4, remat="full"),
}


@pytest.mark.ci
@pytest.mark.parametrize(
    ("mixer", "plan"),
    in_turns(["cumsum", "recurrence", "convolution", "sum of slices"], PLANS),
)
def test_any_plan_equals_one_device(mixer, plan):
    assert_by_hand(mixer, PLANS[plan])


@pytest.mark.ci
@pytest.mark.parametrize("strategy", ["gather", "ring", "heads"])
@pytest.mark.parametrize("mixer", ["cumsum", "recurrence", "convolution", "token shift"])
def test_masked_attention_equals_one_device(mixer, strategy):
    """Where devices have shares of ranges of the tokens, operations that ask for places get all."""
    assert_by_hand(mixer, px.Plan(context=2, context_strategy=strategy, stream=4), causal=True)


@pytest.mark.parametrize("count", [2, 4])
def test_a_loss_of_all_but_the_last_token_gathers_nothing(count):
    program = assert_by_hand("cumsum", px.Plan(context=count, stream=4), shifted=True)
    assert over_tokens(program) == {"all-gather": 2 * count * COLUMN}


def test_a_scan_from_token_to_token_says_so():
    """Its tokens are gathered, forward and backward; one warning names the line."""
    MIXERS["one after another"] = one_after_another
    with pytest.warns(ShardingWarning, match=r"`lax.scan` at .*test_sequences.py:\d+") as seen:
        assert_by_hand("one after another", px.Plan(context=4, stream=4))
    assert len(seen) == 1


SENT = {
    # The last column of each device, forward and backward.
    "cumsum": {"all-gather": 2 * 4 * COLUMN},
    # Two columns of tokens, and two of their cotangents.
    "convolution": {"collective-permute": 2 * 2 * COLUMN},
    "convolution by channel": {"collective-permute": 2 * 2 * COLUMN},
    "token shift": {"collective-permute": 2 * COLUMN},
    "joined": {"collective-permute": 2 * COLUMN},
}


@pytest.mark.parametrize("mixer", SENT)
def test_what_a_mixer_of_tokens_sends(mixer):
    program = program_of(mixer, px.Plan(context=4, stream=4))
    assert over_tokens(program) == SENT[mixer]


@pytest.mark.parametrize("mixer", ["first token", "last token"])
def test_one_token_is_added_up(mixer):
    """Its device has it, the others zeros; backward what all devices have of its cotangent."""
    program = program_of(mixer, px.Plan(context=4, stream=4))
    assert over_tokens(program) == {}
    assert over_tokens(program, ["all-reduce"])["all-reduce"] >= 2 * COLUMN


@pytest.mark.ci
@pytest.mark.parametrize("strategy", ["gather", "ring"])
@pytest.mark.parametrize("mixer", SENT)
def test_shares_of_tokens_are_exchanged_for_pieces(monkeypatch, mixer, strategy):
    """Under a causal mask a device has four shares. It keeps one, and sends three there and three
    back, forward and backward; what the mixer sends is what it sends without a mask."""
    monkeypatch.setitem(globals(), "TOKENS", 64)
    plan = px.Plan(context=4, stream=4, context_strategy=strategy)
    mixed = program_of(mixer, plan, causal=True)
    monkeypatch.setitem(MIXERS, "nothing", lambda p, x: x)
    without = over_tokens(program_of("nothing", plan, causal=True))
    sent = {kind: n - without.get(kind, 0) for kind, n in over_tokens(mixed).items()}
    expected = SENT[mixer].copy()
    exchanged = 4 * 3 * TOKENS // 16 * COLUMN
    expected["collective-permute"] = expected.get("collective-permute", 0) + exchanged
    assert {kind: n for kind, n in sent.items() if n} == expected


@pytest.mark.parametrize("mixer", [*SENT, "recurrence", "sum of slices", "cummax"])
def test_no_tokens_are_gathered_but_keys(monkeypatch, mixer):
    """Planned and compiled: only keys have all tokens."""
    monkeypatch.setitem(globals(), "TOKENS", 64)  # a power of two
    program = program_of(mixer, px.Plan(context=4, stream=4))

    def counted(collectives):
        sent = {}
        for one in collectives:
            if one.axes == ("context",):
                sent[one.kind] = sent.get(one.kind, 0) + one.bytes * one.trips
        return sent

    sent, planned = counted(program.collectives()), counted(program.planned_collectives())
    assert sent == planned
    large = [one for one in program.collectives() if one.bytes >= TOKENS * COLUMN // 2]
    assert [one.kind for one in large] == ["all-gather"]
