"""Every plan computes the update of `Plan()` on one device."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tests import models
from tests.draws import draws

import plurax as px

SIZE = 23
DATA = (1, 2, 3, 5, 7, 8)
TOLERANCE = {"float64": 1e-10, "float32": 1e-5}
plans = st.builds(px.Plan, data=st.sampled_from(DATA), microbatches=st.integers(1, 8))
plans |= st.lists(st.integers(1, 5), min_size=2, max_size=5).map(
    lambda counts: px.Plan(data=len(counts), microbatches=counts)
)
sizes = st.lists(st.integers(1, SIZE), min_size=3, max_size=3)


@functools.cache
def program(plan, kind, dtype):
    task = {
        "plain": lambda: models.mlp_task(dtype=dtype),
        "weighted": lambda: models.mlp_task(weights=True, dtype=dtype),
        "normed": lambda: models.normed_task(dtype),
        "contrastive": lambda: models.contrastive_task(dtype),
    }[kind]()
    return px.compile(task, models.optimizer(), plan, batch(kind, dtype))


def batch(kind, dtype):
    return models.data(SIZE, weights=kind == "weighted", dtype=np.dtype(dtype))


def three_steps(plan, kind, dtype, counts):
    """State and metrics after three steps with `counts` examples each."""
    runner = program(plan, kind, dtype)
    state = runner.init(seed=1)
    history = []
    for count in counts:
        state, metrics = runner.step(state, models.cut(batch(kind, dtype), count))
        history.append(jax.device_get(metrics))
    return jax.device_get((state.params, state.opt_state, state.model_state)), history


def check(plan, reference, kind, dtype, counts):
    got, metrics = three_steps(plan, kind, dtype, counts)
    want, expected = three_steps(reference, kind, dtype, counts)
    assert models.max_rel_error(got, want) <= TOLERANCE[dtype]
    assert models.max_rel_error(metrics, expected) <= TOLERANCE[dtype]
    assert [m["examples"] for m in metrics] == counts


@pytest.mark.ci
@pytest.mark.usefixtures("x64")
@given(plan=plans, counts=sizes, weighted=st.booleans())
@draws(4, times=21)
def test_float64(plan, counts, weighted):
    check(plan, px.Plan(), "weighted" if weighted else "plain", "float64", counts)


@pytest.mark.ci
@given(plan=plans, counts=sizes, weighted=st.booleans())
@draws(2, times=20)
def test_float32(plan, counts, weighted):
    check(plan, px.Plan(), "weighted" if weighted else "plain", "float32", counts)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    "data", [pytest.param(n, marks=[pytest.mark.slow] * (n in (2, 7))) for n in DATA]
)
def test_every_device_count_with_one_example(data):
    check(px.Plan(data=data, microbatches=2), px.Plan(), "weighted", "float64", [1, 1, SIZE])


@pytest.mark.ci
@pytest.mark.usefixtures("x64")
@given(
    plan=st.builds(px.Plan, data=st.sampled_from((2, 3, 8)), microbatches=st.sampled_from((1, 3))),
    counts=sizes,
    kind=st.sampled_from(("normed", "contrastive")),
)
@draws(3, times=17)
def test_coupled_losses_see_the_whole_microbatch(plan, counts, kind):
    # Normed over one example, a gradient is roundings alone, of which Adam makes a step.
    assume(kind != "normed" or min(counts) >= 2 * plan.microbatches)
    check(plan, px.Plan(microbatches=plan.microbatches), kind, "float64", counts)


@pytest.mark.usefixtures("x64")
def test_coupled_loss_of_one_microbatch_equals_the_loss_by_hand():
    runner = program(px.Plan(data=8), "contrastive", "float64")
    state = runner.init(seed=1)
    rows = models.cut(batch("contrastive", "float64"), 9)
    by_hand = runner.task.loss(state.params, rows, None, jnp.ones(9, bool)).mean()
    _, metrics = runner.step(state, rows)
    np.testing.assert_allclose(metrics["loss"], by_hand, rtol=1e-12)


@pytest.mark.usefixtures("x64")
def test_model_state_counts_every_example_once():
    runner = program(px.Plan(data=3, microbatches=3), "normed", "float64")
    state = runner.init()
    for count in (SIZE, 1, 10):
        state, _ = runner.step(state, models.cut(batch("normed", "float64"), count))
    assert float(state.model_state["seen"]) == SIZE + 1 + 10


@pytest.mark.ci
@pytest.mark.usefixtures("x64")
def test_the_weighted_loss_is_the_one_by_hand():
    runner = program(px.Plan(data=5, microbatches=3), "weighted", "float64")
    state = runner.init(seed=1)
    rows = models.cut(batch("weighted", "float64"), 17)
    step_key = jax.random.fold_in(state.key, 0)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(step_key, jnp.arange(17))
    losses, _ = runner.task.loss(state.params, rows, keys)
    _, metrics = runner.step(state, rows)
    np.testing.assert_allclose(metrics["loss"], np.average(losses, weights=rows["w"]), rtol=1e-12)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    "plan",
    [
        px.Plan(),
        px.Plan(data=5),
        px.Plan(data=2, microbatches=3),
        px.Plan(data=2, zero=3, microbatches=2),
        pytest.param(px.Plan(pipeline=2, microbatches=2), marks=pytest.mark.ci),
    ],
    ids=px.Plan.sizes_text,
)
def test_an_evaluation_draws_by_example_under_any_plan(plan):
    """Not by the place in a call, which has a microbatch of them, or as many as a batch."""
    make = models.marked_task if plan.pipeline > 1 else models.mlp_task
    task = dataclasses.replace(make(dtype=jnp.float64), evaluate=None)
    rows = batch("plain", "float64")
    runner = px.compile(task, models.optimizer(), plan, models.cut(rows, 8))
    state = runner.init(seed=1)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(0), jnp.arange(SIZE))
    losses = task.loss(runner.to_canonical(state).params, rows, keys)
    losses = losses[0] if isinstance(losses, tuple) else losses
    parts = [models.cut(rows, 6), jax.tree.map(lambda leaf: leaf[6:], rows)]
    for data in (rows, parts):
        found = runner.evaluate(state, data)["loss"]
        np.testing.assert_allclose(found, losses.mean(), rtol=1e-12)


def test_bfloat16_computes_in_bfloat16_and_keeps_float32():
    seen = {}

    def loss(params, rows, keys):
        seen["params"], seen["x"] = params["hidden"].dtype, rows["x"].dtype
        return models.evaluate(params, rows)[0]

    task = px.Task(init=models.init, loss=loss, predict=lambda p, i: models.logits(p, i["x"]))
    rows = models.data(SIZE)
    plan = px.Plan(data=2, microbatches=2, precision="bfloat16")
    runner = px.compile(task, models.optimizer(), plan, rows)
    state, metrics = runner.step(runner.init(), rows)
    assert seen == {"params": jnp.bfloat16, "x": jnp.bfloat16}
    assert metrics["loss"].dtype == jnp.float32
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state.params)} == {"float32"}
    assert runner.predict(state, rows).dtype == np.float32
    # The same numbers as float32 up to bfloat16's eight bits.
    exact = px.compile(task, models.optimizer(), px.Plan(), rows)
    _, other = exact.step(exact.init(), rows)
    np.testing.assert_allclose(metrics["loss"], other["loss"], rtol=2e-2)
    # Accumulation and reduction are in float32: no bfloat16 crosses devices.
    assert all("bf16" not in line for line in runner.hlo().splitlines() if "all-reduce" in line)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    "plan",
    [px.Plan(data=8), pytest.param(px.Plan(data=3), marks=pytest.mark.slow), px.Plan(data=5)],
)
def test_a_loop_over_resident_data_equals_single_steps(plan):
    runner = program(plan, "weighted", "float64")
    rows = batch("weighted", "float64")
    order = np.stack([np.arange(SIZE)[::-1], np.arange(SIZE), np.roll(np.arange(SIZE), 5)])
    counts = np.array([SIZE, 7, 1])
    state, metrics = runner.loop(
        runner.init(seed=1), runner.place_data(rows), runner.place_epoch(order, counts), 0, 3
    )
    other = runner.init(seed=1)
    for row, count, loss in zip(order, counts, metrics["loss"], strict=True):
        other, single = runner.step(
            other, jax.tree.map(lambda leaf, take=row[:count]: leaf[take], rows)
        )
        np.testing.assert_allclose(loss, single["loss"], rtol=1e-10)
    assert models.max_rel_error(state.params, other.params) <= 1e-10


def test_params_given_to_init_are_trained_from():
    runner = program(px.Plan(data=2), "plain", "float32")
    given = models.init(jax.random.key(9))
    state = runner.init(params=given)
    assert models.same_bits(state.params, given)
    state, _ = runner.step(state, batch("plain", "float32"))
    assert int(state.step) == 1
