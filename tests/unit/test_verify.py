"""A check of a user's own task: it passes, and a fault is found and named."""

import jax
import jax.numpy as jnp
import pytest
from tests import models

import plurax as px

MLP = {"hidden": (None, "tensor"), "bias": ("tensor",), "out": ("tensor", None)}


def test_a_right_plan_passes():
    plan = px.Plan(data=2, tensor=2, zero=2, microbatches=2, shardings=MLP)
    result = px.verify(models.mlp_task(), models.optimizer(), plan, models.data(12))
    assert result.ok
    assert result.first is None
    assert "computes what one device computes: 14 tensors after 3 steps" in str(result)
    assert {d.where for d in result.differences} == {
        "loss", "gradient", "parameters", "optimizer"
    }  # fmt: skip


def by_hand(body, in_specs):
    """A task whose second product is split by hand."""

    def loss(params, batch, keys):
        hidden = jnp.tanh(batch["x"] @ params["hidden"] + params["bias"])
        run = jax.shard_map(body, in_specs=in_specs, out_specs=jax.P(), axis_names={"tensor"},
                            check_vma=False)  # fmt: skip
        return jnp.sum(run(hidden, params["out"]) ** 2, axis=1)

    return px.Task(init=models.init, loss=loss)


SPLIT = (jax.P(None, "tensor"), jax.P("tensor", None))


def test_by_hand_and_right():
    task = by_hand(lambda x, w: jax.lax.psum(x @ w, "tensor"), SPLIT)
    assert px.verify(task, models.optimizer(), px.Plan(tensor=2), models.data(8)).ok


def test_a_missing_reduction_is_found():
    task = by_hand(lambda x, w: x @ w, SPLIT)
    result = px.verify(task, models.optimizer(), px.Plan(tensor=2), models.data(8), steps=1)
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
        hidden = jnp.tanh(batch["x"] @ params["hidden"] + params["bias"])
        return jnp.sum(product(hidden, params["out"]) ** 2, axis=1)

    task = px.Task(init=models.init, loss=loss)
    result = px.verify(task, models.optimizer(), px.Plan(tensor=2), models.data(8), steps=1)
    assert (result.first.where, result.first.path) == ("gradient", "out")
    wrong = [d.path for d in result.differences if d.where == "gradient" and not d.ok]
    assert wrong == ["out"]


def test_a_plan_for_more_devices_says_so():
    with pytest.raises(px.PlanError, match="the plan needs 16 devices"):
        px.verify(models.mlp_task(), models.optimizer(), px.Plan(data=16), models.data(16))


def test_a_wrong_rule_by_hand_is_found():
    """Hidden units are split, and the rule for their bias forgets it: all take the first ones."""

    def loss(params, batch, keys):
        def local(hidden, bias):
            return hidden + bias[: hidden.shape[1]]

        columns = jax.P(None, "tensor")
        run = jax.shard_map(local, in_specs=(columns, jax.P()), out_specs=columns,
                            axis_names={"tensor"}, check_vma=False)  # fmt: skip
        hidden = jnp.tanh(run(batch["x"] @ params["hidden"], params["bias"] + jnp.arange(16.0)))
        return jnp.sum((hidden @ params["out"]) ** 2, axis=1)

    task = px.Task(init=models.init, loss=loss)
    result = px.verify(task, models.optimizer(), px.Plan(tensor=2), models.data(8), steps=1)
    assert (result.first.where, result.first.path) == ("loss", "of the first step")
    wrong = {d.path for d in result.differences if d.where == "gradient" and not d.ok}
    assert wrong == {"hidden", "bias", "out"}


@pytest.mark.slow
def test_a_coupled_task_is_compared_with_the_same_microbatches():
    plan = px.Plan(data=2, microbatches=2, zero=1)
    assert px.verify(models.normed_task(), models.optimizer(), plan, models.data(8), steps=1).ok
