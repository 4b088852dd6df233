"""`gradients` and `apply` are the two halves of a step, under every backend."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from tests import models

import plurax as px

ROWS = models.data(12)
STACK, MLP = functools.cache(models.perceptron_stack), functools.cache(models.mlp_task)
TENSOR = {"blocks/hidden": (..., "tensor")}

# The task, a plan, and members or None. All are padded: the largest batch has 13 examples.
CASES = {
    "one device": (MLP, px.Plan(microbatches=2), None),
    "data": (MLP, px.Plan(data=2), None),
    "tensor": (STACK, px.Plan(tensor=2, data=2, shardings=TENSOR), None),
    "zero 1": (MLP, px.Plan(data=3, zero=1), None),
    "zero 3": (MLP, px.Plan(data=2, zero=3, microbatches=2), None),
    "pipeline": (STACK, px.Plan(pipeline=2, data=2, microbatches=2, zero=1), None),
    "members": (MLP, px.Plan(chunk=2, batch_dim="major"), 3),
    "members and data": (MLP, px.Plan(member=2, data=2, chunk=1, batch_dim="major"), 3),
}


@functools.cache
def program(name):
    task, plan, count = CASES[name]
    members = None if count is None else px.Members(count)
    return px.compile(task(), models.optimizer(), plan, models.data(13), members=members)


def without_key(state):
    return dataclasses.replace(state, key=jax.random.key_data(state.key))


@pytest.mark.parametrize(
    "name",
    # ZeRO 1 is in the pipeline's, and members are with data too.
    [pytest.param(n, marks=[pytest.mark.slow] * (n in ("zero 1", "members"))) for n in CASES],
)
def test_a_step_is_its_halves_bit_for_bit(name):
    made = program(name)
    state, metrics = made.step(made.init(), ROWS)
    start = made.init()
    sums = made.gradients(start, ROWS)
    halves, measured = made.apply(start, sums)
    assert models.same_bits(without_key(halves), without_key(state))
    assert models.same_bits(measured, metrics)
    assert int(jnp.max(sums.examples)) == 12
    # The state is donated to `apply`, as to `step`, and not to `gradients`.
    with pytest.raises(px.errors.BatchError, match="was given to an earlier step"):
        made.apply(start, sums)


def test_the_gradients_are_those_of_jax():
    task = px.Task(
        init=lambda key: jnp.ones((models.FEATURES, 2)),
        loss=lambda params, batch, keys: jnp.sum((batch["x"] @ params) ** 2, axis=1),
    )
    made = px.compile(task, models.optimizer(), px.Plan(data=2), models.data(13))
    state = made.init()
    sums = made.gradients(state, ROWS)
    mean = jax.tree.map(lambda leaf: leaf / sums.weight, sums.grads)
    expected = jax.grad(lambda params: jnp.mean(task.loss(params, ROWS, None)))(state.params)
    assert models.max_rel_error(mean, expected) < 1e-6


def test_sums_that_are_not_finite_update_nothing():
    made = program("data")
    state = made.init()
    before = jax.device_get(state.params)
    sums = made.gradients(state, ROWS)
    state, metrics = made.apply(state, sums._replace(loss=sums.loss * jnp.nan))
    assert int(metrics["skipped"]) == 1
    assert models.same_bits(state.params, before)


@pytest.mark.parametrize("name", ["one device", "members"])
def test_inference_refuses_a_state_of_another_network(name):
    made = program(name)
    members = None if made.members is None else px.Members(3)
    other = px.compile(STACK(), models.optimizer(), made.plan, models.data(13), members=members)
    state = other.init()
    for use in (made.predict, made.evaluate, made.step):
        with pytest.raises(px.errors.BatchError, match="the state does not"):
            use(state, ROWS)
