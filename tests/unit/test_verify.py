"""A check of a user's own task: it passes, and a fault is found and named."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests import models

import plurax as px
from plurax.analysis import verify as verification
from plurax.execute import coupling

MLP = {"hidden": (None, "tensor"), "bias": ("tensor",), "out": ("tensor", None)}


@pytest.mark.ci
def test_a_right_plan_passes():
    plan = px.Plan(data=2, tensor=2, zero=2, microbatches=2, shardings=MLP)
    result = px.verify(models.mlp_task(), models.optimizer(), plan, models.data(12))
    assert result.ok
    assert result.first is None
    assert "computes what one device computes: 15 tensors after 3 steps" in str(result)
    assert {d.where for d in result.differences} == {
        "loss", "gradient", "parameters", "optimizer", "updates left out"
    }  # fmt: skip
    # What another order of sums changes was measured, and is what is allowed.
    assert result.noise > 0
    most = max(difference.tolerance for difference in result.differences)
    assert most == pytest.approx(16 * result.noise + 64 * 2**-23)


def by_hand(body, in_specs):
    """A task whose second product is split by hand."""

    def loss(params, batch, keys):
        hidden = jnp.tanh(batch["x"] @ params["hidden"] + params["bias"][None])
        run = jax.shard_map(body, in_specs=in_specs, out_specs=jax.P(), axis_names={"tensor"},
                            check_vma=False)  # fmt: skip
        return jnp.sum(run(hidden, params["out"]) ** 2, axis=1)

    return px.Task(init=models.init, loss=loss)


SPLIT = (jax.P(None, "tensor"), jax.P("tensor", None))


def test_by_hand_and_right():
    task = by_hand(lambda x, w: jax.lax.psum(x @ w, "tensor"), SPLIT)
    assert px.verify(task, optax.adam(1e-2), px.Plan(tensor=2), models.data(8)).ok


def test_a_missing_reduction_is_found():
    task = by_hand(lambda x, w: x @ w, SPLIT)
    result = px.verify(task, optax.sgd(0.1), px.Plan(tensor=2), models.data(8), steps=1)
    assert not result.ok
    assert result.first.where == "loss"
    assert "does NOT compute what one device computes" in str(result)
    assert "The first tensor that differs is loss of the first step" in str(result)


def test_a_fault_in_one_gradient_names_its_parameter():
    """The loss is right; one parameter's cotangent is not added up over devices."""

    @jax.custom_vjp
    def product(x, w):
        return x @ w

    def backward(kept, cotangent):
        x, w = kept
        run = jax.shard_map(
            lambda x, c: x.T @ c, in_specs=(jax.P("tensor", None), jax.P("tensor", None)),
            out_specs=jax.P(), axis_names={"tensor"}, check_vma=False,
        )  # fmt: skip
        return cotangent @ w.T, run(x, cotangent)

    product.defvjp(lambda x, w: (x @ w, (x, w)), backward)

    def loss(params, batch, keys):
        hidden = jnp.tanh(batch["x"] @ params["hidden"] + params["bias"][None])
        return jnp.sum(product(hidden, params["out"]) ** 2, axis=1)

    task = px.Task(init=models.init, loss=loss)
    result = px.verify(task, optax.sgd(0.1), px.Plan(tensor=2), models.data(8), steps=1)
    assert (result.first.where, result.first.path) == ("gradient", "out")
    wrong = [d.path for d in result.differences if d.where == "gradient" and not d.ok]
    assert wrong == ["out"]


def test_a_plan_for_more_devices_says_so():
    with pytest.raises(px.errors.PlanError, match="the plan needs 16 devices"):
        px.verify(models.mlp_task(), models.optimizer(), px.Plan(data=16), models.data(16))


def test_a_wrong_rule_by_hand_is_found():
    """Hidden units are split, and the rule for their bias forgets it: all take the first ones."""

    def loss(params, batch, keys):
        def local(hidden, bias):
            return hidden + bias[None, : hidden.shape[1]]

        columns = jax.P(None, "tensor")
        run = jax.shard_map(local, in_specs=(columns, jax.P()), out_specs=columns,
                            axis_names={"tensor"}, check_vma=False)  # fmt: skip
        hidden = jnp.tanh(run(batch["x"] @ params["hidden"], params["bias"] + jnp.arange(16.0)))
        return jnp.sum((hidden @ params["out"]) ** 2, axis=1)

    task = px.Task(init=models.init, loss=loss)
    result = px.verify(task, optax.sgd(0.1), px.Plan(tensor=2), models.data(8), steps=1)
    assert (result.first.where, result.first.path) == ("loss", "of the first step")
    wrong = {d.path for d in result.differences if d.where == "gradient" and not d.ok}
    assert wrong == {"hidden", "bias", "out"}


@pytest.mark.slow
def test_a_coupled_task_is_compared_with_the_same_microbatches():
    plan = px.Plan(data=2, microbatches=2, zero=1)
    assert px.verify(models.normed_task(), models.optimizer(), plan, models.data(8), steps=1).ok


@pytest.mark.ci
def test_a_missing_reduction_is_found_in_bfloat16():
    """And a right one passes, its tolerance being far from what is missing."""
    plan = px.Plan(tensor=2, data=2, precision="bfloat16")
    wrong = by_hand(lambda x, w: x @ w, SPLIT)
    assert not px.verify(wrong, optax.sgd(0.1), plan, models.data(8), steps=1).ok
    right = by_hand(lambda x, w: jax.lax.psum(x @ w, "tensor"), SPLIT)
    result = px.verify(right, optax.sgd(0.1), plan, models.data(8), steps=1)
    assert result.ok, result
    assert max(d.tolerance for d in result.differences) < 0.25, result.differences
    assert "times what bfloat16 itself changes on one device" in str(result)


@pytest.mark.ci
def test_parameters_of_sixteen_bits():
    def of(task):
        init = lambda key: jax.tree.map(lambda x: x.astype(jnp.bfloat16), task.init(key))  # noqa: E731
        loss = lambda *args: task.loss(*args).astype(jnp.float32)  # noqa: E731
        return px.Task(init=init, loss=loss)

    rows = jax.tree.map(lambda x: np.asarray(x, jnp.bfloat16), models.data(8))
    wrong = of(by_hand(lambda x, w: x @ w, SPLIT))
    assert not px.verify(wrong, optax.sgd(0.1), px.Plan(tensor=2), rows, steps=1).ok
    right = of(by_hand(lambda x, w: jax.lax.psum(x @ w, "tensor"), SPLIT))
    assert px.verify(right, optax.sgd(0.1), px.Plan(tensor=2), rows, steps=1).ok


def test_what_is_not_a_number_is_equal_to_nothing():
    task = px.Task(
        init=lambda key: {"w": jnp.full(3, -1.0)},
        loss=lambda params, batch, keys: jnp.sqrt(jnp.sum(params["w"])) + batch["x"][:, 0],
    )
    result = px.verify(task, optax.sgd(0.1), px.Plan(data=2), {"x": np.ones((4, 2), "f4")}, steps=1)
    assert not result.ok
    assert "loss of the first step: is not the same (NaN, or another integer" in str(result)


@pytest.mark.ci
def test_one_example_has_one_order_of_sums():
    task = models.mlp_task()
    result = px.verify(task, optax.sgd(0.1), px.Plan(data=2), models.data(1), steps=1)
    assert result.ok
    assert result.noise == 0


def test_what_is_allowed():
    """By hand: 16 times another order of sums; of a lower precision 4 times the larger of both."""
    bit = 2.0**-14

    def far(a, b):
        return {"w": np.float32([4, 4 + a * bit]), "b": np.float32([1 + b * bit])}

    expected = {"loss": {"": np.float32(2)}, "gradient": far(0, 0), "optimizer": {"n": np.int32(3)}}
    again = {
        "loss": {"": np.float32(2)},
        "gradient": far(0.5, 0.25),
        "optimizer": {"n": np.int32(4)},
    }
    # A loss may agree by chance, and is allowed what its gradient is.
    assert verification._allowed(expected, again, None) == (
        {"loss": 4 * bit, "gradient": 4 * bit, "optimizer": 0.0}, 0.25 * bit
    )  # fmt: skip
    full = {**expected, "gradient": far(2, 0)}
    assert verification._allowed(expected, again, full) == (
        {"loss": 2 * bit, "gradient": 2 * bit, "optimizer": 0.0}, 0.5 * bit
    )  # fmt: skip
    again["gradient"] = far(4, 0)
    assert verification._allowed(expected, again, full) == (
        {"loss": 2 * bit, "gradient": 4 * bit, "optimizer": 0.0}, 0.5 * bit
    )  # fmt: skip
    # More than half of the digits in one step is no rounding.
    again["gradient"] = far(0, 1000)
    allowed, _ = verification._allowed(expected, again, None)
    assert allowed["gradient"] == 16 * 2**-11.5


UNSAID = {
    "standardise": lambda x: (x - x.mean(axis=0)[None]) / x.std(axis=0)[None],
    "centre": lambda x: x - x.mean(axis=0)[None],
    "log_softmax": lambda x: jax.nn.log_softmax(x, axis=0),
    "roll": lambda x: jnp.roll(x, 1, axis=0),
}


@pytest.mark.parametrize("plan", [{"data": 2}, {"microbatches": 2}])
@pytest.mark.parametrize("name", UNSAID)
def test_a_loss_that_couples_rows_unsaid_is_found(name, plan, monkeypatch):
    """Where the check of its trace lets it pass: the tolerance does not contain the fault."""
    monkeypatch.setattr(coupling, "_is_seen", lambda *args: False)

    def loss(params, batch, keys):
        kept = jax.vmap(lambda key, x: jax.random.bernoulli(key, 0.8, x.shape))(keys, batch["x"])
        x = jnp.where(kept, UNSAID[name](batch["x"]), 0)
        return (x @ params["w"] - batch["x"][:, 0]) ** 2

    task = px.Task(init=lambda key: {"w": jax.random.normal(key, (5,))}, loss=loss)
    batch = {"x": np.random.default_rng(0).normal(size=(16, 5)).astype(np.float32)}
    result = px.verify(task, optax.sgd(0.1), px.Plan(**plan), batch, steps=1)
    assert not result.ok
    assert result.first.where == "loss"
    assert result.first.error > 5 * result.first.tolerance


@pytest.mark.parametrize(
    ("dtype", "roundings"),
    [
        ("float32", 64 * 2**-23),
        ("float64", 64 * 2**-52),
        ("complex64", 64 * 2**-23),
        ("bfloat16", 4 * 2**-7),
        ("float16", 4 * 2**-10),
        ("int32", 0),
        ("bool", 0),
    ],
)
def test_how_many_roundings_are_the_same(dtype, roundings):
    assert verification._rounding(np.zeros(3, jnp.dtype(dtype))) == roundings


def test_a_verification_in_words():
    right = verification.Difference("loss", "of the first step", 1e-7, 1e-6)
    wrong = verification.Difference("gradient", "w", 0.5, 1e-3)
    none = verification.Difference("updates left out", "", math.inf, 0.0)
    found = verification.Verification(px.Plan(data=2), 3, (right, wrong, none), 2e-8)
    assert (right.ok, wrong.ok, none.ok, found.ok) == (True, False, False, False)
    assert verification.Difference("loss", "", 1e-6, 1e-6).ok
    allowed = "another order of sums changes on one device, 2.0e-08, and some roundings.)"
    assert str(found) == (
        "Plan(data=2) does NOT compute what one device computes. The first tensor that differs is "
        "gradient w: differs by 5.0e-01, allowed 1.0e-03; 2 of 3 do. (Allowed is 16 times what "
        + allowed
    )
    assert (
        str(none) == "updates left out: is not the same (NaN, or another integer, shape or dtype)"
    )
    plan = px.Plan(data=2, precision="bfloat16")
    found = verification.Verification(plan, 3, (right, dataclasses.replace(right, error=1e-8)), 0.5)
    assert (found.ok, found.first) == (True, None)
    assert str(found) == (
        "Plan(data=2, precision='bfloat16') computes what one device computes: 2 tensors after "
        "3 steps; the largest difference is that of loss of the first step: differs by 1.0e-07, "
        "allowed 1.0e-06. (Allowed is 4 times what bfloat16 itself changes on one device, 5.0e-01, "
        "and some roundings.)"
    )


ERRORS = {
    "equal": ([1.0, 2.0], [1.0, 2.0], 0.0),
    "relative to the largest": ([1.0, 4.0], [2.0, 4.0], 0.25),
    "NaN on both sides": ([np.nan], [np.nan], math.inf),
    "NaN on one": ([np.nan], [1.0], math.inf),
    "NaN expected": ([1.0], [np.nan], math.inf),
    "equal infinities": ([np.inf, 1.0], [np.inf, 2.0], 0.5),
    "infinity": ([np.inf], [1.0], math.inf),
    "equal integers": (np.int32([7]), np.int32([7]), 0.0),
    "another integer": (np.int32([7]), np.int32([8]), math.inf),
    "another truth": (np.array([True]), np.array([False]), math.inf),
    "another dtype": (np.float32([1]), np.float64([1]), math.inf),
    "another shape": (np.ones((1, 2)), np.ones((2,)), math.inf),
    "of nothing": (np.zeros(3), np.zeros(3), 0.0),
    "from nothing": (np.array([0.0, 0.25]), np.zeros(2), 0.25),
    "no elements": (np.zeros((0, 2)), np.zeros((0, 2)), 0.0),
    "bfloat16": (np.asarray([1.5], jnp.bfloat16), np.asarray([1.0], jnp.bfloat16), 0.5),
    "float16 beyond its range": (np.float16([65000]), np.float16([-65000]), 2.0),
    "complex": (np.complex64([1j]), np.complex64([1]), math.sqrt(2)),
}


@pytest.mark.parametrize("name", ERRORS)
def test_how_far_two_tensors_are_apart(name):
    found, expected, error = ERRORS[name]
    assert verification._error(found, expected) == pytest.approx(error)


def test_rounded_sums_are_not_compared():
    with pytest.raises(
        px.errors.PlanError, match="what differs by rounding would hide what is wrong"
    ):
        px.verify(
            models.mlp_task(), optax.sgd(0.1), px.Plan(data=2, reduce_dtype="bfloat16"),
            models.data(8),
        )  # fmt: skip
