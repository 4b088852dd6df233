"""Predictions in a file that a process without plurax runs."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests import models

import plurax as px

ROWS = {"x": models.data(20)["x"]}
BATCH = models.data(12)

ELSEWHERE = """
import sys
sys.modules["plurax"] = None  # an import of it fails
import jax, numpy as np
from jax import export
with open(sys.argv[1], "rb") as file:
    predict = export.deserialize(bytearray(file.read()))
rows = {"x": np.load(sys.argv[2])}
np.save(sys.argv[3], predict.call(rows))
np.save(sys.argv[4], predict.call({"x": rows["x"][:3]}))
"""


def called(path, rows):
    return jax.export.deserialize(bytearray(path.read_bytes())).call(rows)


@pytest.mark.ci
def test_in_a_process_that_has_no_plurax(tmp_path):
    plan = px.Plan(data=2, zero=3)
    program = px.compile(models.mlp_task(), optax.adam(0.1), plan, BATCH)
    state = program.init(seed=1)
    path = tmp_path / "new" / "predict.jax"
    px.weights.export_predict(program, state, ROWS, path)
    np.save(tmp_path / "rows.npy", ROWS["x"])
    files = [tmp_path / name for name in ("rows.npy", "whole.npy", "three.npy")]
    subprocess.run([sys.executable, "-c", ELSEWHERE, path, *files], check=True)
    want = program.predict(state, ROWS)
    np.testing.assert_allclose(np.load(files[1]), want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(np.load(files[2]), want[:3], rtol=1e-5, atol=1e-6)


PLANS = {
    "tensor": px.Plan(tensor=2, shardings={"blocks/hidden": (..., "tensor")}),
    "pipeline": px.Plan(data=2, pipeline=2, microbatches=2),
    "bfloat16": px.Plan(precision="bfloat16"),
}


@pytest.mark.parametrize("name", PLANS)
def test_under_every_plan(name, tmp_path):
    program = px.compile(models.perceptron_stack(), optax.sgd(0.1), PLANS[name], BATCH)
    state = program.init(seed=1)
    px.weights.export_predict(program, state, ROWS, tmp_path / "a")
    got, want = called(tmp_path / "a", ROWS), program.predict(state, ROWS)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    assert got.dtype == want.dtype


def test_members_and_their_hyperparameters(tmp_path):
    def make(hyper):
        return px.Task(
            init=models.init,
            loss=lambda p, b, k: models.evaluate(p, b)[0],
            predict=lambda p, inputs: models.logits(p, inputs["x"]) * hyper["scale"],
        )

    members = px.Members(3, {"scale": [1.0, 2.0, 3.0]})
    plan = px.Plan(member=2)
    program = px.compile(make, optax.sgd(0.1), plan, BATCH, members=members)
    state = program.init()
    px.weights.export_predict(program, state, ROWS, tmp_path / "a")
    np.testing.assert_allclose(
        called(tmp_path / "a", ROWS), program.predict(state, ROWS), rtol=1e-5, atol=1e-6
    )


def test_a_stateful_task(tmp_path):
    program = px.compile(models.normed_task(), optax.sgd(0.1), px.Plan(), BATCH)
    state, _ = program.step(program.init(), BATCH)
    px.weights.export_predict(program, state, ROWS, tmp_path / "a")
    np.testing.assert_allclose(
        called(tmp_path / "a", ROWS), program.predict(state, ROWS), rtol=1e-5, atol=1e-6
    )


def test_for_several_platforms(tmp_path):
    program = px.compile(models.mlp_task(), optax.sgd(0.1), px.Plan(), BATCH)
    px.weights.export_predict(
        program, program.init(), ROWS, tmp_path / "a", platforms=("cpu", "cuda", "tpu")
    )
    read = jax.export.deserialize(bytearray((tmp_path / "a").read_bytes()))
    assert read.platforms == ("cpu", "cuda", "tpu")


def test_a_model_that_computes_with_its_number_of_rows(tmp_path):
    def predict(params, inputs):
        pairs = inputs["x"].reshape(len(inputs["x"]) // 2, 2, -1)  # an even number of rows
        return jnp.reshape(pairs, inputs["x"].shape)

    task = px.Task(init=models.init, loss=models.mlp_task().loss, predict=predict)
    program = px.compile(task, optax.sgd(0.1), px.Plan(), BATCH)
    state = program.init()
    with pytest.raises(
        px.errors.TaskError, match="computes with its number of rows, so it cannot be"
    ):
        px.weights.export_predict(program, state, ROWS, tmp_path / "a")
    px.weights.export_predict(program, state, ROWS, tmp_path / "a", batch_size=20)
    np.testing.assert_array_equal(called(tmp_path / "a", ROWS), ROWS["x"])


def test_a_task_without_predict(tmp_path):
    task = px.Task(init=models.init, loss=models.mlp_task().loss)
    program = px.compile(task, optax.sgd(0.1), px.Plan(), BATCH)
    with pytest.raises(px.errors.TaskError, match="this task has no predict function"):
        px.weights.export_predict(program, program.init(), ROWS, tmp_path / "a")


def test_an_error_of_the_function_itself_is_not_taken_for_one_of_the_rows(tmp_path):
    def predict(params, inputs):
        raise ValueError("there is no such head")

    task = px.Task(init=models.init, loss=models.mlp_task().loss, predict=predict)
    program = px.compile(task, optax.sgd(0.1), px.Plan(), BATCH)
    with pytest.raises(ValueError, match=r"^there is no such head\nIt was called with x"):
        px.weights.export_predict(program, program.init(), ROWS, tmp_path / "a")
