"""The plans among which a search chooses, and their bounds."""

import jax
import optax
import pytest
from tests import models

import plurax as px
from plurax.machine import Level
from plurax.planner.candidates import Model, candidates, model_of

MACHINE = px.Machine("fast links", {"float32": 1e9}, 1e9, 1e12, [Level("node", 168, 1e12)])


def model(task, batch):
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
    return model_of(task, optax.adam(1e-3), like, "float32")


@pytest.fixture(scope="module")
def perceptron():
    return model(models.mlp_task(), models.data(48))


@pytest.fixture(scope="module")
def stacked():
    return model(models.transformer_stack(), models.text(12))


def plans(found: Model, devices, **pinned):
    every = candidates(found, MACHINE, devices, px.Plan(**pinned), pinned)
    return [one.plan for one in every]


@pytest.mark.parametrize("devices", [1, 3, 6, 7, 8, 12])
def test_every_divisor_of_the_devices_is_considered(perceptron, devices):
    found = plans(perceptron, devices)
    sizes = {plan.devices for plan in found}
    assert sizes == {n for n in range(1, devices + 1) if devices % n == 0}
    assert len(found) == len(set(found)), "a plan is considered once"
    assert all(48 % plan.data == 0 for plan in found)


def test_only_layers_can_be_stages(perceptron, stacked):
    assert {plan.pipeline for plan in plans(perceptron, 8)} == {1}
    layers = models.LAYERS
    assert {plan.pipeline for plan in plans(stacked, 12)} == {
        n for n in (1, 2, 3, 4, 6, 12) if n <= layers
    }
    marked = model(models.marked_task(), models.data(48))
    assert marked.layers > 1


PINS = [
    {"tensor": 1},
    {"zero": 0, "data": 2},
    {"data": 2},
    {"tensor": 4},
    {"zero": 3, "data": 4},
    {"remat": "full"},
    {"microbatches": 6},
]


@pytest.mark.parametrize("pins", PINS, ids=str)
def test_what_is_pinned_holds(perceptron, pins):
    found = plans(perceptron, 8, **pins)
    assert found
    assert all(getattr(plan, name) == given for plan in found for name, given in pins.items())


def test_operations_and_bytes_are_counted(perceptron):
    sizes = (5 * 16, 16, 16 * 3)
    assert perceptron.parameters == 4 * sum(sizes)
    # Adam has two moments of each parameter, and a counter.
    assert perceptron.optimizer == 2 * perceptron.parameters + 4
    # Forward, the gradient of both weights, and that of the hidden layer.
    forward = 2 * 48 * (5 * 16 + 16 * 3)
    by_hand = 2 * forward + 2 * 48 * 16 * 3
    assert perceptron.totals["none"].product_flops == {"float32": by_hand}
    # Full rematerialization computes the products of the forward pass once more, but the last.
    assert perceptron.totals["full"].product_flops["float32"] > by_hand
    assert perceptron.totals["full"].kept < perceptron.totals["none"].kept


def test_bounds_fall_with_what_is_split(stacked):
    bounds = {one.plan: one for one in candidates(stacked, MACHINE, 4, px.Plan(), ())}
    one, four = bounds[px.Plan()], bounds[px.Plan(data=4)]
    assert four.seconds < one.seconds
    assert four.memory < one.memory
    by_zero = [bounds[px.Plan(data=4, zero=zero)].memory for zero in range(4)]
    assert by_zero == sorted(by_zero, reverse=True)
    assert len(set(by_zero)) == 4
    deep = px.Plan(pipeline=2, microbatches=2)
    assert bounds[deep].seconds > bounds[px.Plan(pipeline=2, microbatches=12)].seconds
