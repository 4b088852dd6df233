"""Losses of all examples of a step: what is refused, and models of other libraries."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import plurax as px

ROWS = {"x": np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)}
APART = px.Plan(microbatches=2)


def init(key):
    return {"w": jax.random.normal(key, (3, 2)), "scale": jnp.ones(())}


def outputs(params, batch, keys):
    return batch["x"] @ params["w"]


def spread(z, batch, mask):
    """Each example's distance from the mean of all."""
    real = mask.astype(z.dtype)[:, None]
    return jnp.sum((z - (z * real).sum(0, keepdims=True) / real.sum()) ** 2, 1)


def compiled(outputs=outputs, losses=spread, plan=APART, **fields):
    task = px.Task(fields.pop("init", init), px.over_batch(outputs, losses), **fields)
    return px.compile(task, optax.sgd(0.1), plan, ROWS)


def test_such_a_loss_is_coupled_and_microbatches_do_not_change_it():
    task = px.Task(init, px.over_batch(outputs, spread))
    assert task.coupled
    assert not task.couples_microbatches
    assert px.Task(init, task.loss.__call__, coupled=True).couples_microbatches


def test_an_output_may_have_no_numbers():
    none = compiled(
        lambda params, batch, keys: (outputs(params, batch, keys), batch["x"][:, :0]),
        lambda found, batch, mask: spread(found[0], batch, mask) + found[1].sum(1),
    )
    _, metrics = none.step(none.init(0), ROWS)
    plain = compiled()
    assert metrics["loss"] == plain.step(plain.init(0), ROWS)[1]["loss"]


@pytest.mark.parametrize(
    ("functions", "says"),
    [
        (
            {"outputs": lambda params, batch: batch["x"]},
            r"over_batch\(outputs, \.\.\.\) .* is called with \(params, batch, keys\)",
        ),
        (
            {"losses": lambda z, batch: z},
            r"over_batch\(\.\.\., losses\) .* is called with \(outputs, batch, mask\)",
        ),
        (
            {"outputs": lambda params, batch, keys: (outputs(params, batch, keys), params["w"])},
            r"an output has shape \(3, 2\); it must have the leading dim 8, one row per example\. "
            r".*jnp\.broadcast_to\(temperature, \(B,\)\)",
        ),
        (
            {"outputs": lambda params, batch, keys: batch["x"].argmax(1)},
            r"no output is floating, so the losses have no gradient",
        ),
        (
            {"outputs": lambda p, batch, keys: outputs(p, batch, keys) - batch["x"].mean()},
            r"row i of an output must depend on row i of the batch alone, and depends on other "
            r"rows, which meet at .*test_over_batch.*\. Outputs are computed by microbatches",
        ),
        (
            {"losses": lambda z, batch, mask: spread(z, batch, mask).mean()},
            r"returned a value of shape \(\); it must return one loss per example",
        ),
    ],
)
def test_what_is_refused(functions, says):
    with pytest.raises(px.errors.TaskError, match=f"(?s){says}"):
        compiled(**functions)


def test_model_state_comes_first():
    with pytest.raises(px.errors.TaskError, match=r"\(model_state, outputs, batch, mask\)"):
        compiled(lambda p, state, batch, keys: batch["x"], stateful=True)


def test_a_stack_of_such_a_loss_has_no_evaluation():
    def linear(key):
        return jax.random.normal(key, (3, 3))

    task = px.stack(
        embed=(lambda key: {}, lambda params, batch, keys: batch["x"]),
        block=(linear, lambda w, x, batch, keys: jnp.tanh(x @ w)),
        head=(linear, px.over_batch(lambda w, x, batch, keys: x @ w, spread)),
        depth=2,
    )
    program = px.compile(task, optax.sgd(0.1), px.Plan(pipeline=2, microbatches=2), ROWS)
    with pytest.raises(px.errors.TaskError, match="give Task\\(evaluate="):
        program.evaluate(program.init(seed=0), ROWS)


def equinox_task(loss):
    return px.adapters.equinox.task(lambda key: eqx.nn.Linear(3, 2, key=key), loss)


def nnx_task(loss):
    return px.adapters.nnx.task(lambda rngs: nnx.Linear(3, 2, rngs=rngs), loss)


def first_loss(task, plan):
    program = px.compile(task, optax.sgd(0.1), plan, ROWS)
    return float(program.step(program.init(seed=0), ROWS)[1]["loss"])


@pytest.mark.parametrize("adapt", [equinox_task, nnx_task])
def test_models_of_other_libraries(adapt):
    def of_model(model, batch, keys):
        return (jax.vmap(model) if adapt is equinox_task else model)(batch["x"])

    task = adapt(px.over_batch(of_model, spread))
    plans = px.Plan(), APART, px.Plan(data=2, microbatches=2)
    losses = [first_loss(task, plan) for plan in plans]
    np.testing.assert_allclose(losses, losses[0], rtol=1e-5)


def test_a_model_with_state_is_refused():
    with pytest.raises(px.errors.TaskError, match=r"carries state .*plurax\.over_batch are of"):
        px.adapters.nnx.task(
            lambda rngs: nnx.BatchNorm(3, rngs=rngs),
            px.over_batch(lambda model, batch, keys: model(batch["x"]), spread),
        )
