"""The task's contract: what its functions return, and what is said when they do not."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests import models

import plurax as px

ROWS = models.data(6)


def compile_with(**fields):
    task = px.Task(**{"init": models.init, "loss": good_loss, **fields})
    return px.compile(task, optax.sgd(0.1), px.Plan(data=2, microbatches=2), ROWS)


def good_loss(params, batch, keys):
    return models.evaluate(params, batch)[0]


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (
            lambda p, b, k: good_loss(p, b, k).mean(),
            r"(?s)Task.loss \(.*test_task.py:\d+\) returned a value of shape \(\); it must return "
            r"one loss per example.*"
            r"1\. remove the mean.*2\. write the loss for one example.*per_example",
        ),
        (
            lambda p, b, k: good_loss(p, b, k)[:, None],
            r"returned shape \(2, 1\); it must be \(2,\)",
        ),
        (lambda p, b, k: b["y"], r"returned dtype int32; a loss must be floating point"),
        (
            lambda p, b, k: (good_loss(p, b, k), 1.0),
            r"is a float, which is not what a task returns; expected \(B",
        ),
        (
            lambda p, b, k: None,
            r"returned a NoneType.*; expected an array of shape \(B,\)",
        ),
        (
            lambda p, b, k: (good_loss(p, b, k), {"top": jnp.zeros(())}),
            r"metric 'top', has shape \(\); it must be an array of shape",
        ),
        (
            lambda p, b, k: (good_loss(p, b, k), {"shares": jnp.zeros((2, 8))}),
            r"'shares', has shape \(2, 8\);.* give each of several numbers a name of its own",
        ),
        (
            lambda p, b, k: (good_loss(p, b, k), {"parts": {"a": good_loss(p, b, k)}}),
            r"'parts', is a dict;.* a name of its own: {'parts 0': ...",
        ),
        (
            lambda p, b, k: (good_loss(p, b, k), {"wave": jnp.fft.fft(good_loss(p, b, k))}),
            r"metric 'wave': it is complex, and metrics are averaged as real numbers",
        ),
        *(
            (
                lambda p, b, k, name=name: (good_loss(p, b, k), {name: jnp.zeros(2)}),
                rf"a metric called {name!r}\. Its name has to be a text, and none of those that",
            )
            for name in ("loss", "kind", "step", "epoch", 1)
        ),
        *(
            (
                lambda p, b, k, name=name: (good_loss(p, b, k), {name: good_loss(p, b, k)}),
                rf"a metric called {name!r}, as {whose} is called in the rows of a run",
            )
            for name, whose in {
                "eval_loss": "a metric of the evaluation",
                "loss_best": "the loss of members",
                "loss_worst": "the loss of members",
            }.items()
        ),
    ],
)
def test_a_loss_that_breaks_its_contract(loss, message):
    with pytest.raises(px.errors.TaskError, match=message):
        compile_with(loss=loss)


def test_parameters_must_be_floating():
    with pytest.raises(
        px.errors.TaskError, match=r"'table/0' has dtype int32, which has no gradient"
    ):
        compile_with(init=lambda key: {"table": [jnp.arange(3)]})


def test_parameters_of_eight_bits_are_frozen_or_refused():
    def init(key):
        return {"base": jnp.ones((3, 3), jnp.float8_e4m3fn), **models.init(key)}

    with pytest.raises(px.errors.TaskError, match=r"'base' has dtype float8_e4m3fn, in which the"):
        compile_with(init=init)
    compile_with(init=init, frozen=("base",))


def test_weight_must_have_one_per_example():
    with pytest.raises(
        px.errors.TaskError, match=r"Task.weight returned shape \(\); it must be \(2,\)"
    ):
        compile_with(weight=lambda batch: jnp.ones(()))


def test_stateful_needs_coupled():
    with pytest.raises(px.errors.TaskError, match=r"stateful=True\) needs coupled=True"):
        px.Task(init=models.init, loss=good_loss, stateful=True)


def test_stateful_init_returns_a_pair():
    with pytest.raises(px.errors.TaskError, match=r"init\(key\) must return a pair"):
        compile_with(
            stateful=True, coupled=True, loss=lambda p, s, b, k, m: (good_loss(p, b, k), {}, s)
        )


def test_stateful_loss_returns_three():
    with pytest.raises(px.errors.TaskError, match=r"expected \(losses, metrics, model_state\)"):
        compile_with(
            init=lambda key: (models.init(key), {}),
            loss=lambda p, s, b, k, m: good_loss(p, b, k),
            stateful=True,
            coupled=True,
        )


@pytest.mark.parametrize("state", [{"n": jnp.zeros(3)}, {"n": jnp.zeros(()), "m": jnp.zeros(())}])
def test_model_state_keeps_its_structure_and_shapes(state):
    with pytest.raises(
        px.errors.TaskError, match=r"(?s)a model state of another structure.*returned:"
    ):
        compile_with(
            init=lambda key: (models.init(key), {"n": jnp.zeros(())}),
            loss=lambda p, s, b, k, m: (good_loss(p, b, k), {}, state),
            stateful=True,
            coupled=True,
        )


def test_model_state_is_never_rounded_to_bfloat16():
    """A running average of ones, 3000 steps of a thousandth: in bfloat16 it stops half way."""
    task = px.Task(
        init=lambda key: (jnp.ones(1), jnp.zeros(())),
        loss=lambda p, s, b, keys, mask: (b * p[0], {}, 0.999 * s + 0.001),
        coupled=True,
        stateful=True,
    )
    plan = px.Plan(precision="bfloat16")
    program = px.compile(task, optax.sgd(0.0), plan, np.ones(2, np.float32))
    state, rows = program.init(), program.place_batch(np.ones(2, np.float32))
    for _ in range(3000):
        state, _ = program.step_placed(state, rows)
    np.testing.assert_allclose(state.model_state, 1 - 0.999**3000, rtol=1e-3)


def test_predict_is_asked_for_by_name():
    program = compile_with()
    with pytest.raises(px.errors.TaskError, match=r"no predict function; give Task\(predict="):
        program.predict(program.init(), ROWS)


def test_predict_keeps_the_leading_dim():
    program = compile_with(predict=lambda params, inputs: inputs["x"].sum(0))
    with pytest.raises(
        px.errors.TaskError, match=r"Task.predict returned an array of shape \(5,\) for 3"
    ):
        program.predict(program.init(), ROWS)


def test_a_coupled_task_evaluates_by_its_own_function():
    program = px.compile(models.contrastive_task(), optax.sgd(0.1), px.Plan(), ROWS)
    with pytest.raises(px.errors.TaskError, match=r"give Task\(evaluate="):
        program.evaluate(program.init(), ROWS)


def test_evaluate_keeps_the_contract_too():
    program = compile_with(evaluate=lambda params, batch: jnp.zeros(()))
    with pytest.raises(
        px.errors.TaskError, match=r"Task.evaluate \(.*test_task.py:\d+\) returned a value"
    ):
        program.evaluate(program.init(), ROWS)


def test_per_example_wants_a_scalar():
    lifted = px.per_example(lambda params, example, key: example["x"])
    with pytest.raises(px.errors.TaskError, match=r"returned shape \(5,\) for one example"):
        lifted(None, ROWS, jax.random.split(jax.random.key(0), 6))


def test_per_example_draws_a_key_of_its_own_for_each():
    lifted = px.per_example(lambda params, example, key: jax.random.uniform(key))
    losses = lifted(None, ROWS, jax.random.split(jax.random.key(0), 6))
    assert len(np.unique(losses)) == 6


def test_evaluate_uses_no_dropout_and_loss_does():
    program = px.compile(models.mlp_task(), models.optimizer(), px.Plan(), ROWS)
    state = program.init()
    losses, _ = models.evaluate(state.params, ROWS)
    np.testing.assert_allclose(program.evaluate(state, ROWS)["loss"], losses.mean(), rtol=1e-6)
    _, metrics = program.step(state, ROWS)
    assert abs(float(metrics["loss"]) - float(losses.mean())) > 1e-4


@pytest.mark.ci
def test_the_optimizer_sees_the_full_gradient_and_the_loss():
    """Clipping acts on the batch's gradient, and extra arguments of optax are supplied."""
    seen = []

    def update(grads, state, params=None, *, value, **_):
        seen.append(value.shape)
        return jax.tree.map(lambda g: -g, grads), state

    spy = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    plans = (px.Plan(), px.Plan(data=3, microbatches=2))
    norms = []
    for plan in plans:
        optimizer = optax.chain(optax.clip_by_global_norm(0.1), spy)
        program = px.compile(px.Task(init=models.init, loss=good_loss), optimizer, plan, ROWS)
        before = program.init()
        start = jax.device_get(before.params)
        after, _ = program.step(before, ROWS)
        norms.append(optax.tree.norm(jax.tree.map(jnp.subtract, start, after.params)))
    np.testing.assert_allclose(norms, 0.1, rtol=1e-4)
    assert seen == [(), ()]
