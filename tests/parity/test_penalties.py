"""Penalties on parameters: the steps are those by hand, and no weight is gathered for a penalty."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests import models

import plurax as px

LAYERS, WIDTH, BATCH = 3, 8, 16
RNG = np.random.default_rng(0)
ROWS = {
    "x": RNG.normal(size=(BATCH, WIDTH)),
    "y": RNG.normal(size=(BATCH, WIDTH)),
}
SIZES = (16, 13)


def init(key):
    keys = jax.random.split(key, 3)
    return {
        "table": jax.random.normal(keys[0], (WIDTH, WIDTH)) / 3,
        "w": jax.random.normal(keys[1], (LAYERS, WIDTH, WIDTH)) / 3,
        "c": jax.random.normal(keys[2], (LAYERS, WIDTH)) / 3,
    }


def network(params, x):
    def layer(h, p):
        h = h @ p["w"]
        return jnp.tanh(h + jnp.broadcast_to(p["c"], h.shape)), None

    layers = {"w": params["w"], "c": params["c"]}
    h, _ = jax.lax.scan(layer, x @ params["table"], layers)
    return h


def squares(params):
    return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params))


def columns(params):
    return jnp.sum(jnp.sqrt(jnp.sum(params["w"] ** 2, axis=1) + 1e-3))


def orthogonal(params):
    w = params["w"]
    return jnp.sum((jnp.einsum("lij,lik->ljk", w, w) - jnp.eye(WIDTH)[None]) ** 2)


PENALIZED = {
    "none": lambda p, errors: errors,
    "squares": lambda p, errors: errors + 1e-2 * squares(p),
    "values": lambda p, errors: errors + 1e-2 * jnp.sum(jnp.abs(p["w"])),
    "columns": lambda p, errors: errors + 1e-2 * columns(p),
    "orthogonal": lambda p, errors: errors + 1e-2 * orthogonal(p),
    "largest": lambda p, errors: errors + 1e-2 * jnp.max(p["table"]),
    "two": lambda p, errors: errors + 1e-2 * squares(p) + 1e-2 * columns(p),
    "factor": lambda p, errors: errors * (1 + 1e-2 * squares(p)) + jnp.sqrt(squares(p["w"])),
    "compiled": lambda p, errors: jax.jit(lambda p, e: e + 1e-2 * jax.jit(squares)(p))(p, errors),
    "to a constant": lambda p, errors: errors + 1e-2 * jnp.sum((p["w"] - 0.1) ** 2),
    "stopped": lambda p, errors: errors / jax.lax.stop_gradient(squares(p)),
    "of an entry": lambda p, errors: errors + 1e-2 * p["table"][0, 0] * jnp.sum(p["c"]),
}


def task(name):
    def loss(params, batch, keys):
        errors = jnp.mean((network(params, batch["x"]) - batch["y"]) ** 2, axis=1)
        return PENALIZED[name](params, errors), {"squares": jnp.full(errors.shape, squares(params))}

    return px.Task(init, loss)


def example_by_example(name):
    @px.per_example
    def loss(params, example, key):
        error = jnp.mean((network(params, example["x"]) - example["y"]) ** 2)
        return PENALIZED[name](params, error)

    return px.Task(init, loss)


@functools.cache
def by_hand(name, seed):
    """Losses and parameters of steps on one device."""
    key, _ = jax.random.split(jax.random.key(seed))
    params, optimizer = init(key), optax.adam(1e-2)
    state, losses = optimizer.init(params), []

    def mean(params, rows):
        errors = jnp.mean((network(params, rows["x"]) - rows["y"]) ** 2, axis=1)
        return jnp.mean(PENALIZED[name](params, errors))

    @jax.jit
    def step(params, state, rows):
        value, grads = jax.value_and_grad(mean)(params, rows)
        updates, state = optimizer.update(grads, state, params)
        return value, optax.apply_updates(params, updates), state

    for size in SIZES:
        rows = jax.tree.map(lambda leaf, size=size: leaf[:size], ROWS)
        value, params, state = step(params, state, rows)
        losses.append(value)
    return losses, params


PLANS = {
    "zero 1": {"data": 4, "zero": 1},
    "zero 2": {"data": 2, "zero": 2, "microbatches": 2},
    "zero 3": {"data": 4, "zero": 3},
    "microbatches": {"data": 2, "zero": 3, "microbatches": 3},
    "dots": {"data": 4, "zero": 3, "remat": "dots"},
    "full": {"data": 4, "zero": 3, "remat": "full", "microbatches": 2},
    "tensor": {"data": 2, "tensor": 2, "zero": 3, "shardings": {"*w": (..., "tensor")}},
    "tensor alone": {"tensor": 2, "shardings": {"*w": (..., "tensor")}},
    "members": {"member": 2, "data": 2, "zero": 3, "chunk": 1, "batch_dim": "major"},
}
PAIRS = [
    *((name, "zero 3") for name in PENALIZED if name != "none"),
    *(("factor", plan) for plan in PLANS if plan != "zero 3"),
    ("two", "microbatches"),
    ("orthogonal", "tensor"),
]


def assert_as_by_hand(task, name, plan):
    members = px.Members(2) if "member" in plan else None
    program = px.compile(task, optax.adam(1e-2), px.Plan(**plan), ROWS, members=members)
    state, losses = program.init() if members else program.init(seed=0), []
    for size in SIZES:
        state, metrics = program.step(state, models.cut(ROWS, size))
        losses.append(metrics["loss"])
    params = jax.device_get(program.to_canonical(state)).params
    for seed in range(2) if members else [0]:
        got = (losses, params)
        if members:
            got = jax.tree.map(lambda leaf, seed=seed: leaf[seed], got)
        assert models.max_rel_error(got, by_hand(name, seed)) < 1e-10


@pytest.mark.parametrize(("name", "plan"), PAIRS)
def test_steps_are_those_by_hand(x64, name, plan):
    assert_as_by_hand(task(name), name, PLANS[plan])


@pytest.mark.parametrize("name", ["two", "factor"])
def test_of_one_example_too(x64, name):
    assert_as_by_hand(example_by_example(name), name, PLANS["zero 3"])


def test_a_penalty_of_each_member(x64):
    """How much of it there is, is a hyperparameter."""

    def penalized(hyper):
        def loss(params, batch, keys):
            errors = jnp.mean((network(params, batch["x"]) - batch["y"]) ** 2, axis=1)
            return errors + hyper["penalty"] * squares(params)

        return px.Task(init, loss)

    members = px.Members(hyper={"penalty": [1e-2, 0.0]}, seeds=[0, 0])
    plan = px.Plan(**PLANS["members"])
    program = px.compile(penalized, optax.adam(1e-2), plan, ROWS, members=members)
    state = program.init()
    for size in SIZES:
        state, _ = program.step(state, models.cut(ROWS, size))
    params = jax.device_get(program.to_canonical(state)).params
    for member, name in enumerate(["squares", "none"]):
        got = jax.tree.map(lambda leaf, member=member: leaf[member], params)
        assert models.max_rel_error(got, by_hand(name, 0)[1]) < 1e-10


@pytest.mark.parametrize("plan", ["zero 2", "zero 3"])
def test_of_a_coupled_loss(x64, plan):
    """Of a batch that no device can divide, each computes all rows."""

    def penalized(params, batch, *_):
        x = batch["x"] - jnp.mean(batch["x"], axis=0, keepdims=True)
        errors = jnp.mean((network(params, x) - batch["y"]) ** 2, axis=1)
        return errors + 1e-2 * squares(params)

    task = px.Task(init, penalized, coupled=True)
    plan = px.Plan(**PLANS[plan] | {"microbatches": 1})
    program = px.compile(task, optax.adam(1e-2), plan, ROWS)
    state, _ = program.step(program.init(seed=0), models.cut(ROWS, SIZES[0]))
    with pytest.warns(px.errors.MaskWarning, match="does not read its mask"):
        state, _ = program.step(state, models.cut(ROWS, SIZES[1]))
    params, optimizer = init(jax.random.split(jax.random.key(0))[0]), optax.adam(1e-2)
    opt_state = optimizer.init(params)
    for size in SIZES:
        rows = models.cut(ROWS, size)
        grads = jax.jit(jax.grad(lambda p, rows=rows: jnp.mean(penalized(p, rows))))(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
    got = jax.device_get(program.to_canonical(state)).params
    assert models.max_rel_error(got, params) < 1e-10
    reduced = [one.bytes for one in program.collectives() if one.kind == "all-reduce"]
    assert max(reduced) < 8 * WIDTH**2  # no gradient of a layer


def sent(program, kind):
    """The collectives of a step that send more than numbers."""
    collectives = getattr(program, kind)()
    return collections.Counter(
        (one.kind, one.bytes, one.trips) for one in collectives if one.bytes > 64
    )


@pytest.mark.parametrize("plan", ["zero 1", "zero 2", "zero 3", "microbatches", "tensor"])
def test_no_weight_is_gathered_for_a_penalty(plan):
    """And gradients are reduced layer by layer where those without a penalty are."""
    rows = jax.tree.map(np.float32, ROWS)
    with_penalty, without = (
        px.compile(task(name), optax.adam(1e-2), px.Plan(**PLANS[plan]), rows)
        for name in ("two", "none")
    )
    for kind in ("planned_collectives", "collectives"):
        assert sent(with_penalty, kind) == sent(without, kind)


FUNCTIONS = {
    "inverse": lambda a: 1 / a,
    "logarithm": jnp.log,
    "root": jnp.sqrt,
    "sum": lambda a: a * jnp.log(a).sum(),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_has_no_value_at_zero_is_not_read_in_the_padding(x64, name):
    """ZeRO 3 fills up five numbers with zeros on four devices, and computes `1 / a` on shards."""

    def start(key):
        return {"a": 1 + jax.random.uniform(key, (5,), float), "w": jnp.ones((WIDTH, 5))}

    def loss(params, batch, keys):
        return (batch["x"] @ params["w"] @ FUNCTIONS[name](params["a"]) - batch["y"][:, 0]) ** 2

    task, rule = px.Task(init=start, loss=loss), optax.sgd(1e-3)
    program = px.compile(task, rule, px.Plan(data=4, zero=3), ROWS)
    state = program.init(seed=0)
    params = jax.device_get(program.to_canonical(state).params)
    grads = jax.jit(jax.grad(lambda params: loss(params, ROWS, None).mean()))(params)
    state, metrics = program.step(state, ROWS)
    assert metrics["skipped"] == 0
    np.testing.assert_allclose(metrics["grad_norm"], optax.tree.norm(grads), rtol=1e-10)
    wanted = jax.tree.map(lambda p, g: p - 1e-3 * g, params, grads)
    assert models.max_rel_error(program.to_canonical(state).params, wanted) < 1e-10
