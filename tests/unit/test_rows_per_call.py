"""How many rows a call of `predict` or `evaluate` takes, and that it changes no result."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import plurax as px
from plurax.execute.rows_per_call import VALUE_BYTES, fewer_rows, more_rows

KIB = 1024.0
X = np.random.default_rng(0).normal(size=(4000, 3))
WEIGHTS = np.array([1.0, -2.0, 0.5])


@pytest.mark.parametrize(
    ("total", "row_bytes", "rows"),
    [
        (3, KIB, 64),
        (511, KIB, 64),  # of 128 it would not be four calls
        (512, KIB, 128),
        (100_000, KIB, 4096),
        (100_000, VALUE_BYTES / 100, 64),
        (100_000, 1.0, 16_384),
    ],
)
def test_more_rows_of_a_call_than_64(total, row_bytes, rows):
    assert more_rows(64, total, lambda: row_bytes) == rows


@pytest.mark.parametrize(
    ("size", "total", "rows"),
    [(256, 257, 256), (256, 33, 256), (256, 32, 32), (256, 5, 32), (256, 4, 4), (256, 1, 1),
     (1, 1, 1), (9, 2, 2), (9, 1, 1)],
)  # fmt: skip
def test_fewer_rows_of_a_call_than_a_batch(size, total, rows):
    assert fewer_rows(size, total) == rows


def _program(traced, plan=px.Plan(), predict=lambda w, x: x @ w):  # noqa: B008  frozen
    """Compile for 64 rows; `traced` gets the number of rows of each function that is traced."""

    def noted(fun):
        def run(params, rows):
            traced.append((rows["x"] if isinstance(rows, dict) else rows).shape[0])
            return fun(params, rows)

        return run

    task = px.Task(
        init=lambda key: jnp.asarray(WEIGHTS),
        loss=lambda w, rows, keys: (rows["x"] @ w) ** 2,
        evaluate=noted(lambda w, rows: (rows["x"] @ w) ** 2),
        predict=noted(predict),
    )
    return px.compile(task, optax.sgd(0.1), plan, {"x": X[:64]})


PLANS = [px.Plan(), px.Plan(data=4), px.Plan(data=2, microbatches=2), px.Plan(zero=1, data=2)]


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize(("total", "rows"), [(5, 8), (9, 64), (64, 64), (4000, 512)])
def test_results_are_those_of_all_rows_at_once(x64, plan, total, rows):
    traced = []
    program = _program(traced, plan)
    state, expected = program.init(seed=0), X[:total] @ WEIGHTS
    traced.clear()
    np.testing.assert_allclose(program.predict(state, X[:total]), expected, rtol=1e-12)
    assert traced[-1] * plan.data == rows
    traced.clear()
    loss = program.evaluate(state, {"x": X[:total]})["loss"]
    np.testing.assert_allclose(loss, np.mean(expected**2), rtol=1e-12)
    # At least a microbatch, which fits where training fits.
    assert traced[-1] * plan.data == (512 if total == 4000 else 64 // plan.microbatches)


def test_a_length_is_compiled_once(x64):
    traced = []
    program = _program(traced)
    state = program.init(seed=0)
    for total in (5, 20, 4000):
        program.predict(state, X[:total])
        program.evaluate(state, {"x": X[:total]})
    traced.clear()
    for total in (8, 2, 64, 9, 3900):
        program.predict(state, X[:total])
        program.evaluate(state, {"x": X[:total]})
    assert traced == []


def test_a_short_first_item_does_not_cut_the_others(x64):
    traced = []
    program = _program(traced)
    state = program.init(seed=0)
    traced.clear()
    outputs = list(program.predict(state, iter([X[:1], X[1:60]])))
    np.testing.assert_allclose(np.concatenate(outputs), X[:60] @ WEIGHTS, rtol=1e-12)
    assert traced[-1] == 64


@pytest.mark.parametrize(
    "predict",
    [
        lambda w, x: jnp.concatenate([x[i : i + 64] @ w for i in range(0, len(x), 64)]),
        lambda w, x: jax.lax.map(lambda row: row @ w, x, batch_size=100),
    ],
)
def test_functions_that_compute_other_values_for_more_rows(x64, predict):
    program = _program([], predict=predict)
    outputs = program.predict(program.init(seed=0), X)
    np.testing.assert_allclose(outputs, X @ WEIGHTS, rtol=1e-12)


def test_a_function_that_computes_nothing(x64):
    program = _program([], predict=lambda w, x: x)
    np.testing.assert_array_equal(program.predict(program.init(seed=0), X), X)
