"""Mixtures whose loss couples examples, their rows sorted on each device, beside a step by hand."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from tests import models
from tests.parity import test_experts as mixtures
from tests.parity.test_experts import K, name_of
from tests.tiers import in_turns

import plurax as px
from plurax.execute.backends.choose import planned_task
from plurax.jaxpr.interpret import holds
from plurax.jaxpr.rows_apart import ROWS_APART

pytestmark = pytest.mark.usefixtures("x64")

OWN = dict.fromkeys(("gate", "up", "down"), ("data", None, None))


# --- Dispatches that read all tokens, in what is sorted or beside it ------------------------------


def capped_behind(p, x):
    """Tokens behind a capacity of all tokens of their expert get nothing; all are computed."""
    weights, which, _ = mixtures.chosen(p, x)
    most = 2 * which.size // p["router"].shape[1]
    kept = mixtures.places(which, p["router"].shape[1]) < most
    y = mixtures.sorted_rows(p, x)
    return jnp.where(kept.reshape(weights.shape).any(1, keepdims=True), y, jnp.zeros((), y.dtype))


def capped(p, x, capacity=lambda rows: rows // 3):
    """Rows behind a capacity of their expert get nothing, by their place among the sorted ones."""
    rows, sizes, order, weights = mixtures.ordered(p, x)
    starts = jnp.cumsum(sizes) - sizes
    group = (jnp.arange(len(rows))[:, None] >= jnp.cumsum(sizes)[None]).sum(1)
    place = jnp.arange(len(rows)) - starts[group]
    y = jax.lax.ragged_dot(rows, p["gate"], sizes) @ p["down"][0]
    y = jnp.where((place < capacity(len(rows)))[:, None], y, jnp.zeros((), y.dtype))
    return mixtures.back(y, order, weights)


def capped_at_least(p, x):
    """The capacity of few tokens is all of them."""
    return capped(p, x, lambda rows: max(40, rows // 2))


def capped_from_some_on(p, x):
    """The capacity of few tokens is none."""
    return capped(p, x, lambda rows: rows // 64)


def capped_at(p, x):
    """The capacity depends on no number of tokens."""
    return capped(p, x, lambda _: 50)


def capped_far_off(p, x):
    """The same, larger than what is run: nobody knows."""
    return capped(p, x, lambda _: 5000)


def by_count_between(p, x):
    """What is between two products is divided by the number of all tokens."""
    rows, sizes, order, weights = mixtures.ordered(p, x)
    hidden = jnp.tanh(jax.lax.ragged_dot(rows, p["gate"], sizes) / len(x) * 40)
    return mixtures.back(jax.lax.ragged_dot(hidden, p["down"], sizes), order, weights)


def hardly_by_load(p, x):
    """Rows are multiplied by a number close to one, which depends on how many their expert has."""
    rows, sizes, order, weights = mixtures.ordered(p, x)
    group = (jnp.arange(len(rows))[:, None] >= jnp.cumsum(sizes)[None]).sum(1)
    near = 1 + 1e-8 * sizes[group].astype(x.dtype) / len(x)
    y = jax.lax.ragged_dot(rows * near[:, None], p["gate"], sizes) @ p["down"][0]
    return mixtures.back(y, order, weights)


def by_turns(p, x):
    """Rows of every second example are computed twice as strongly."""
    rows, sizes, order, weights = mixtures.ordered(p, x)
    strength = (1 + jnp.arange(len(x)) // mixtures.T % 2).astype(x.dtype)
    y = jax.lax.ragged_dot(rows * strength[order // K][:, None], p["gate"], sizes) @ p["down"][0]
    return mixtures.back(y, order, weights)


def above_the_mean(p, x):
    """Tokens whose weights are above the mean of all tokens are computed twice as strongly."""
    weights, _, _ = mixtures.chosen(p, x)
    rows, sizes, order, _ = mixtures.ordered(p, x)
    best = weights[:, 0]
    strong = jnp.where(best > best.mean(), 2.0, 1.0)
    y = jax.lax.ragged_dot(rows * strong[order // K][:, None], p["gate"], sizes) @ p["down"][0]
    return mixtures.back(y, order, weights)


def by_count(p, x):
    """Results are divided by the number of all tokens."""
    rows, sizes, order, weights = mixtures.ordered(p, x)
    y = jax.lax.ragged_dot(rows / len(x) * 40, p["gate"], sizes) @ p["down"][0]
    return mixtures.back(y, order, weights)


def by_load(p, x):
    """Results are divided by the number of rows of their expert."""
    rows, sizes, order, weights = mixtures.ordered(p, x)
    group = (jnp.arange(len(rows))[:, None] >= jnp.cumsum(sizes)[None]).sum(1)
    load = sizes[group].astype(x.dtype)
    y = jax.lax.ragged_dot(rows, p["gate"], sizes) @ p["down"][0] / load[:, None]
    return mixtures.back(y, order, weights)


def biased(p, x):
    """Which expert a row has is read from the numbers of their rows."""
    rows, sizes, order, weights = mixtures.ordered(p, x)
    group = jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(len(rows)), side="right")
    hidden = jax.lax.ragged_dot(rows, p["gate"], sizes) + 2 * p["bias"][group]
    return mixtures.back(jax.lax.ragged_dot(hidden, p["down"], sizes), order, weights)


def left_sorted(p, x):
    """Rows stay where the sort put them."""
    rows, sizes, _, _ = mixtures.ordered(p, x)
    y = jax.lax.ragged_dot(rows, p["gate"], sizes) @ p["down"][0]
    return y.reshape(len(x), K, -1).sum(1)


def shifted(p, x):
    """Each token gets what its neighbour computed."""
    y = mixtures.sorted_rows(p, x)
    return y[(jnp.arange(len(x)) + 1) % len(x)]


def over_own_order(p, x):
    """Of two sorts one puts rows back where the other took them from."""
    rows, sizes, _order, weights = mixtures.ordered(p, x)
    y = jax.lax.ragged_dot(rows, p["gate"], sizes) @ p["down"][0]
    return mixtures.back(y, jnp.argsort(weights.reshape(-1)), weights)


def behind_a_mean(p, x):
    """Rows are normalized by the mean of all tokens, before they are sorted."""
    return mixtures.sorted_rows(p, x - x.mean(0, keepdims=True))


CAPACITIES = [capped, capped_at_least, capped_from_some_on, capped_at, capped_far_off]
LOADS = [by_count, by_count_between, by_load, hardly_by_load]
MIXING = [*CAPACITIES, *LOADS, left_sorted, over_own_order]
APART = [*mixtures.DROPLESS, biased, capped_behind, above_the_mean, shifted, behind_a_mean]


@functools.cache
def loss_of(dispatch):
    return functools.partial(mixtures.balanced, dispatch=dispatch)


def assert_as_by_hand(dispatch, plan):
    task = px.Task(init=mixtures.start, loss=loss_of(dispatch), coupled=True)
    program = px.compile(task, optax.sgd(mixtures.RATE), plan, mixtures.batch_of())
    state, metrics = program.step(program.init(seed=0), mixtures.batch_of())
    found = jax.device_get((metrics["loss"], program.to_canonical(state).params))
    expected = mixtures.coupled_by_hand(loss_of(dispatch), plan.most_microbatches)
    assert models.max_rel_error(found, jax.device_get(expected)) < 1e-10
    return program


PLANS = {
    "data": px.Plan(data=4),
    "experts": px.Plan(data=4, shardings=OWN),
    "zero": px.Plan(data=2, zero=3, remat="full", shardings=OWN),
    "tensor": px.Plan(data=2, tensor=2, shardings=mixtures.SPLIT),
    "microbatches": px.Plan(data=2, microbatches=2, zero=1, shardings=OWN),
}


@pytest.mark.parametrize(("plan", "dispatch"), in_turns(PLANS, APART, odd=True), ids=name_of)
def test_rows_sorted_on_each_device_equal_one_device(dispatch, plan):
    assert_as_by_hand(dispatch, PLANS[plan])


@pytest.mark.ci
@pytest.mark.parametrize(
    "fields", [{"data": 4}, {"data": 2, "microbatches": 2, "zero": 1}], ids=str
)
@pytest.mark.parametrize("dispatch", mixtures.BUFFERS, ids=name_of)
def test_buffers_with_room_for_each_example_are_sent(dispatch, fields):
    """There and back, in each pass; no weights are gathered."""
    program = assert_as_by_hand(dispatch, px.Plan(shardings=OWN, **fields))
    kinds = [one.kind for one in program.collectives() if one.bytes > 1000]
    assert kinds.count("all-to-all") == 4
    assert fields.get("zero") or "all-gather" not in kinds


@pytest.mark.ci
@pytest.mark.parametrize("dispatch", MIXING, ids=name_of)
def test_what_mixes_rows_equals_one_device(dispatch):
    assert_as_by_hand(dispatch, px.Plan(data=4))


def grouped_by_count(p, x):
    """What is between two products of buffers is divided by the number of all tokens."""
    return grouped_with(p, x, lambda hidden: hidden / len(x) * 40)


def grouped_by_turns(p, x):
    """Buffers of every second example are computed twice as strongly."""
    strength = (1 + jnp.arange(len(x) // mixtures.T) % 2).astype(x.dtype)
    return grouped_with(p, x, lambda hidden: hidden * strength[None, :, None, None])


def grouped_with(p, x, change):
    groups = x.reshape(-1, mixtures.T, mixtures.D)
    weights, which, _ = mixtures.chosen(p, groups)
    choice = jax.nn.one_hot(which, p["router"].shape[1], dtype=x.dtype)
    hidden = jnp.einsum("egsd,edh->egsh", jnp.einsum("gske,gsd->egsd", choice, groups), p["gate"])
    y = jnp.einsum("egsh,ehd->egsd", jax.nn.silu(change(hidden)), p["down"])
    return jnp.einsum("gske,gsk,egsd->gsd", choice, weights, y).reshape(x.shape)


@pytest.mark.ci
@pytest.mark.parametrize("dispatch", [grouped_by_count, grouped_by_turns], ids=name_of)
def test_buffers_that_mix_examples_equal_one_device(dispatch):
    assert_as_by_hand(dispatch, px.Plan(data=4, microbatches=2, shardings=OWN))


@pytest.mark.ci
def test_what_alternates_equals_one_device():
    assert_as_by_hand(by_turns, px.Plan(data=8))


def sorts_own_rows(dispatch, devices=4):
    """Whether a loss under a plan sorts the rows of each device alone."""
    plan, batch = px.Plan(data=devices), mixtures.batch_of()
    task = planned_task(px.Task(init=mixtures.start, loss=loss_of(dispatch), coupled=True), plan)
    keys, mask = jax.random.split(jax.random.key(0), mixtures.B), jnp.ones(mixtures.B, bool)
    closed = jax.make_jaxpr(task.loss)(mixtures.start(jax.random.key(0)), batch, keys, mask)
    return holds(closed.jaxpr, ROWS_APART)


@pytest.mark.parametrize("dispatch", APART + MIXING, ids=name_of)
def test_rows_are_sorted_apart_where_none_reads_another(dispatch):
    assert sorts_own_rows(dispatch) == (dispatch in APART)


def test_every_second_example_is_known_to_devices_with_two():
    """And to none with one."""
    assert sorts_own_rows(by_turns, 4)
    assert not sorts_own_rows(by_turns, 8)
