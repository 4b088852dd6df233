"""Gradients reduced in the last microbatch's backward pass, as GPUs do: here by CPUs."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests import models

import plurax as px
from plurax import tree
from plurax.execute import early_reduction

LAYERS, WIDTH, ROWS = 3, 8, 16
OPTIMIZER = optax.adam(1e-2)


def init(key):
    table, layers, head = jax.random.split(key, 3)
    return {
        "table": jax.random.normal(table, (WIDTH, WIDTH)) / 3,
        "layers": {
            "w": jax.random.normal(layers, (LAYERS, WIDTH, WIDTH)) / 3,
            "norm": {"gain": jnp.ones((LAYERS, WIDTH))},
        },
        "head": jax.random.normal(head, (WIDTH, 4)),
    }


def init_with_unused(key):
    return {**init(key), "unused": jnp.ones((LAYERS, WIDTH))}


def loss(params, batch, keys):
    def layer(x, p):
        return x + jnp.tanh(x @ p["w"]) * p["norm"]["gain"][None], None

    x, _ = jax.lax.scan(layer, batch["x"] @ params["table"], params["layers"])
    return jnp.sum((x @ params["head"] - batch["y"]) ** 2, axis=1)


def tied_loss(params, batch, keys):
    """The stack is read by two loops, so its gradient is no result of one."""

    def layer(x, w):
        return jnp.tanh(x @ w), None

    x, _ = jax.lax.scan(layer, batch["x"] @ params["table"], params["layers"]["w"])
    x, _ = jax.lax.scan(layer, x, params["layers"]["w"])
    return jnp.sum((x @ params["head"] - batch["y"]) ** 2, axis=1)


def weight(batch):
    return batch["weight"]


def examples(rows=ROWS):
    return models.weighted(rows, WIDTH, 4)


def by_hand(loss, params, batch, steps):
    state = OPTIMIZER.init(params)

    def mean_loss(params):
        losses, weights = loss(params, batch, None), weight(batch)
        return jnp.sum(losses * weights) / jnp.sum(weights)

    @jax.jit
    def step(params, state):
        updates, state = OPTIMIZER.update(jax.grad(mean_loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(steps):
        params, state = step(params, state)
    return params


def program(plan, init=init, loss=loss):
    task = px.Task(init=init, loss=loss, weight=weight)
    return px.compile(task, OPTIMIZER, plan, examples())


@pytest.fixture
def early(monkeypatch):
    monkeypatch.setattr(early_reduction, "PLATFORMS", frozenset({"cpu"}))


TENSOR = {"tensor": 2, "shardings": {"layers/w": (..., "tensor")}}
PLANS = {
    "one microbatch": px.Plan(data=4),
    "two microbatches": px.Plan(data=2, microbatches=2, remat="full"),
    "four microbatches": px.Plan(data=4, microbatches=4, remat="full"),
    "zero 1": px.Plan(data=4, zero=1, microbatches=4),
    "zero 1, one microbatch": px.Plan(data=2, zero=1, remat="full"),
    "tensor": px.Plan(data=2, microbatches=4, **TENSOR),
    "tensor, zero 1": px.Plan(data=2, zero=1, microbatches=2, remat="full", **TENSOR),
}


@pytest.mark.ci
@pytest.mark.parametrize("fun", [loss, tied_loss])
@pytest.mark.parametrize("name", PLANS)
@pytest.mark.usefixtures("x64", "early")
def test_a_step_is_that_by_hand(name, fun):
    compiled = program(PLANS[name], init_with_unused, fun)
    for rows in (ROWS, ROWS - 3):
        batch, state = examples(rows), compiled.init(seed=0)
        start = jax.tree.map(jnp.array, compiled.to_canonical(state).params)
        wanted = tree.named_leaves(by_hand(fun, start, batch, 3))
        for _ in range(3):
            state, _ = compiled.step(state, batch)
        for path, one in tree.named_leaves(compiled.to_canonical(state).params).items():
            np.testing.assert_allclose(one, wanted[path], rtol=1e-10, atol=1e-12, err_msg=path)


@pytest.mark.parametrize("name", PLANS)
def test_layers_are_reduced_in_their_loop_and_nothing_is_sent_twice(name, monkeypatch):
    """The same bytes as after the backward pass; of each layer once, outside of accumulation."""
    after = sent(program(PLANS[name]))
    monkeypatch.setattr(early_reduction, "PLATFORMS", frozenset({"cpu"}))
    compiled = program(PLANS[name])
    assert sent(compiled) == after
    inside = [one for one in compiled.collectives() if one.in_loop and "data" in one.axes]
    assert inside
    assert all(one.trips == LAYERS for one in inside)
    if PLANS[name].partitioned:
        planned = [one for one in compiled.planned_collectives() if "data" in one.axes]
        assert total(planned) == sent(compiled)
        assert total([one for one in planned if one.in_loop]) == total(inside)


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.usefixtures("early")
def test_the_activations_of_two_microbatches_are_not_held_at_once(zero):
    """Two are not cut into a loop and a last one, which a compiler writes out after each other."""
    compiled = program(px.Plan(data=2, microbatches=2, zero=zero))
    assert not [one for one in compiled.collectives() if one.in_loop]


def sent(program):
    """The bytes that a device sends along `data`."""
    return total(one for one in program.collectives() if "data" in one.axes)


def total(collectives):
    return sum(one.bytes_sent * one.trips for one in collectives)
