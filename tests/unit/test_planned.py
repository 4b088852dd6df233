"""A plan read before it is compiled is the plan that is compiled, and needs no devices."""

import jax
import jax.numpy as jnp
import optax
import pytest
from tests import models

import plurax as px

TENSOR = {"blocks/hidden": (..., "tensor")}
PLANS = {
    "one device": (models.mlp_task, px.Plan(microbatches=2)),
    "data": (models.mlp_task, px.Plan(data=4)),
    "zero 1": (models.mlp_task, px.Plan(data=3, zero=1)),
    "zero 3": (models.mlp_task, px.Plan(data=2, zero=3, microbatches=2)),
    "tensor": (models.perceptron_stack, px.Plan(tensor=2, data=2, shardings=TENSOR)),
    "pipeline": (models.perceptron_stack, px.Plan(pipeline=2, data=2, microbatches=2, zero=1)),
    "unequal stages": (
        models.perceptron_stack, px.Plan(pipeline=3, microbatches=4, data=2, layers=(2, 6, 3))
    ),
}  # fmt: skip
STEP_KEY_AND_COUNTS = 4 + 8 + 4 + 4
"""Bytes of the state's step, key and skipped, and of the count of a batch."""


@pytest.mark.parametrize("name", PLANS)
def test_what_is_planned_is_what_is_compiled(name):
    task, plan = PLANS[name][0](), PLANS[name][1]
    batch = models.data(13)
    found = px.analysis.planned(task, models.optimizer(), plan, batch)
    program = px.compile(task, models.optimizer(), plan, batch)
    assert found.collectives == program.planned_collectives()
    assert found.shardings == program.shardings
    memory = found.memory
    given = memory.parameters + memory.optimizer + memory.model_state + memory.batch
    assert given + STEP_KEY_AND_COUNTS == program.memory().arguments


def test_a_plan_for_more_devices_than_there_are(monkeypatch):
    """Nothing is compiled, and nothing asks for devices."""
    monkeypatch.setattr(jax.stages.Lowered, "compile", None)
    monkeypatch.setattr(jax, "devices", None)
    task = px.Task(
        init=lambda key: {"w": jnp.zeros((512, 512)), "b": jnp.zeros(512)},
        loss=lambda p, batch, keys: jnp.sum((batch["x"] @ p["w"] + p["b"][None]) ** 2, axis=1),
    )
    plan = px.Plan(data=128, tensor=8, zero=3, shardings={"w": (None, "tensor")})
    batch = {"x": jax.ShapeDtypeStruct((1024, 512), jnp.float32)}
    found = px.analysis.planned(task, optax.sgd(0.1, momentum=0.9), plan, batch)
    assert {one.path: one.shard for one in found.shardings} == {"w": (4, 64), "b": (4,)}
    assert found.memory.parameters == found.memory.gradients == 4 * (4 * 64 + 4)
    assert found.memory.optimizer == found.memory.parameters
    assert found.memory.batch == 8 * 512 * 4
    assert {one.axes for one in found.collectives} >= {("data",), ("tensor",)}


def test_a_stage_runs_its_own_layers():
    """What is planned is what the device with the most of 9 layers sends: 3 + 2 in two stages."""
    plan = px.Plan(pipeline=2, stages=4, schedule="interleaved", microbatches=2, tensor=2,
                   shardings=TENSOR)  # fmt: skip
    task = models.perceptron_stack(depth=9)
    found = px.analysis.planned(task, optax.sgd(0.1), plan, models.data(8))
    trips = [one.trips for one in found.collectives if one.axes == ("tensor",)]
    assert max(trips) == 2 * (3 + 2)


def test_a_task_of_another_kind_is_refused():
    with pytest.raises(px.errors.TaskError, match=r"what is trained is a plurax\.Task"):
        px.analysis.planned(object(), optax.sgd(0.1), px.Plan(), models.data(4))
