"""A partial sum is reduce-scattered to where the equations after it meet a split value."""

import operator
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests import models

import plurax as px

pytestmark = pytest.mark.usefixtures("x64")

WIDTH, HIDDEN, TOKENS, DEPTH, TENSOR = 16, 64, 12, 3, 4
RESIDUAL = 4 * TOKENS * WIDTH * 8  # bytes of 4 examples, float64

BEHIND = {
    "nothing": lambda y, b, key: y,
    "a bias": lambda y, b, key: y + b[None],
    "a gain": lambda y, b, key: y * b[None],
    "dropout": lambda y, b, key: jnp.where(jax.random.bernoulli(key, 0.9, y.shape), y / 0.9, 0.0),
    "a bias, dropout": lambda y, b, key: BEHIND["dropout"](y + b[None], b, key),
    "what is not linear": lambda y, b, key: jnp.tanh(y + b[None]),
}
"""What follows on a row-parallel product before the residual is added to it."""


def losses(behind, sequence=True):
    def layer(x, p, key):
        x = px.sharding.name(x, "residual") if sequence else x
        normal = x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-5)
        y = BEHIND[behind](jnp.tanh(normal @ p["up"]) @ p["down"], p["bias"], key)
        return px.sharding.name(x + y, "residual") if sequence else x + y

    def loss(params, example, key):
        def step(x, scanned):
            return layer(x, *scanned), None

        x, _ = jax.lax.scan(step, example["x"], (params, jax.random.split(key, DEPTH)))
        return (x**2).mean()

    return loss


def init(key):
    up, down, bias = jax.random.split(key, 3)
    return {
        "up": jax.random.normal(up, (DEPTH, WIDTH, HIDDEN), "float64") * 0.3,
        "down": jax.random.normal(down, (DEPTH, HIDDEN, WIDTH), "float64") * 0.3,
        "bias": 1 + 0.1 * jax.random.normal(bias, (DEPTH, WIDTH), "float64"),
    }


RULES = px.sharding.megatron(column=["up"], row=["down"], sequence=["residual"])


def batch(count=8):
    rng = np.random.default_rng(0)
    return {"x": rng.normal(size=(count, TOKENS, WIDTH))}


def compiled(behind, remat):
    task = px.Task(init=init, loss=px.per_example(losses(behind)))
    plan = px.Plan(data=2, tensor=TENSOR, remat=remat, shardings=RULES)
    return px.compile(task, optax.sgd(0.1), plan, batch())


def of_tokens(collectives):
    """Collectives of whole residuals or a device's tokens, in loops, by kind."""
    return Counter(
        (c.kind, c.bytes)
        for c in collectives
        if c.in_loop and c.axes == ("tensor",) and c.bytes in (RESIDUAL, RESIDUAL / TENSOR)
    )


@pytest.mark.parametrize("remat", ["none", "dots", "full"])
@pytest.mark.parametrize("behind", BEHIND)
def test_split_tokens_further_on_are_reduce_scattered_to(behind, remat):
    """Forward and backward; the program gathers what both products read, and once more backward.

    The gradient of a gain or an activation behind the second product needs that again.
    """
    program = compiled(behind, remat)
    planned = of_tokens(program.planned_collectives())
    scattered = 2 + (remat == "full" and behind in ("a gain", "what is not linear"))
    assert planned == {
        ("reduce-scatter", RESIDUAL / TENSOR): scattered,
        ("all-gather", RESIDUAL): 3,
    }


@pytest.mark.parametrize("remat", ["dots", "full"])
def test_a_cotangent_is_reduce_scattered_where_it_enters_a_recomputed_part(remat):
    """The gradient of a norm's bias, a sum over tokens, is what reads it first."""

    def normed(x, p):
        centered = x - x.mean(-1, keepdims=True)
        scale = jax.lax.rsqrt((centered**2).mean(-1, keepdims=True) + 1e-5)
        return centered * scale * p["bias"][None] + p["bias"][None]

    def layer(x, p):
        y = jax.nn.gelu(normed(x, p) @ p["up"]) @ p["down"]
        return px.sharding.name(x + y + p["bias"][None], "residual")

    def loss(params, example, key):
        x = px.sharding.name(example["x"], "residual")
        for index in range(DEPTH):
            x = layer(x, jax.tree.map(operator.itemgetter(index), params))
        return (x**2).mean()

    task = px.Task(init=init, loss=px.per_example(loss))
    plan = px.Plan(data=2, tensor=TENSOR, remat=remat, shardings=RULES)
    planned = px.compile(task, optax.sgd(0.1), plan, batch()).planned_collectives()
    sizes = RESIDUAL, RESIDUAL / TENSOR
    kinds = {one.kind for one in planned if one.axes == ("tensor",) and one.bytes in sizes}
    assert kinds == {"reduce-scatter", "all-gather"}


@pytest.mark.parametrize(
    "behind",
    [
        pytest.param(name, marks=[pytest.mark.ci] * (name != "a bias"))
        for name in BEHIND
        if "dropout" not in name  # whose keys are the library's
    ],
)
def test_the_program_sends_it_and_the_update_is_that_by_hand(behind):
    program = compiled(behind, "dots")
    assert of_tokens(program.collectives()) == of_tokens(program.planned_collectives())
    state = program.init(0)
    params = jax.tree.map(np.asarray, state.params)
    rows, key = batch(), jax.random.key(0)

    def total(params):
        return sum(losses(behind, False)(params, {"x": x}, key) for x in rows["x"]) / 8

    by_hand = jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.jit(jax.grad(total))(params))
    state, _ = program.step(state, rows)
    assert models.max_rel_error(state.params, by_hand) < 1e-10
