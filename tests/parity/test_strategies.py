"""Pinned shard strategies change where an equation is computed, and never what."""

import dataclasses
import functools
import random

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from tests import models
from tests.draws import draws

import plurax as px
from plurax.execute.gradient import gradient
from plurax.execute.initial_state import new_state
from plurax.execute.rows import abstract_rows
from plurax.jaxpr.compat import Scan
from plurax.partition.pins import equations, traced_as
from plurax.strategies import Strategies, Strategy

SIZE = 6


def spelled_out(dtype):
    """A network of operations that stand for a few others, in which equations have strategies."""

    def init(key):
        into, out = jax.random.normal(key, (2, 5, 16), dtype) / 3
        return {"hidden": into, "out": out.T}

    def loss(params, batch, keys):
        h = jnp.tanh(batch["x"] @ params["hidden"])
        a, b = jnp.unstack(jnp.stack([h, h**2], axis=1), axis=1)
        spread = jax.vmap(lambda v: v - jax.lax.psum(v, "rest") / 16, 1, 1, axis_name="rest")
        wide = jnp.tile(spread(a) + b, (1, 2))
        y = wide[:, :16] * wide[:, 16:] @ params["out"]
        return jnp.sum((y - batch["x"]) ** 2, axis=1)

    return px.Task(init=init, loss=loss)


TASKS = {
    "spelled out": (spelled_out, models.data, {"hidden": (None, "tensor")}),
    "perceptron": (models.mlp_task, models.data, {"hidden": (None, "tensor")}),
    "transformer": (models.transformer_task, models.text, models.megatron()),
    "stacked": (models.transformer_stack, models.text, {"blocks/hidden": (..., None, "tensor")}),
    "convolutional": (models.convolutional_task, models.images, models.CHANNELS),
}  # fmt: skip
PINNABLE = ("dot_general", "add", "mul", "tanh", "reduce_sum", "transpose", "reshape", "exp", "sub",
            "select_n", "conv_general_dilated", "broadcast_in_dim", "gather", "scatter-add",
            "add_any", "concatenate", "reduce_max", "convert_element_type", "scan")  # fmt: skip


@functools.cache
def network(name):
    make, rows, shardings = TASKS[name]
    task = make(dtype=np.float64)
    batch = rows(SIZE) if name in ("transformer", "stacked") else rows(SIZE, dtype=np.float64)
    return task, batch, shardings


def step(name, plan):
    task, batch, _ = network(name)
    program = px.compile(task, optax.adam(1e-2), plan, batch)
    state, metrics = program.step(program.init(seed=1), batch)
    return jax.device_get((program.to_canonical(state).params, metrics))


@functools.cache
def on_one_device(name):
    return step(name, px.Plan())


@functools.cache
def gradient_of(name, data=1):
    task, batch, _ = network(name)
    state = jax.eval_shape(lambda: new_state(task, optax.adam(1e-2), jax.random.key(0)))
    rows = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((SIZE // data, *x.shape[1:]), x.dtype), batch
    )
    fun = gradient(task, "float32")
    closed = jax.make_jaxpr(fun)(state.params, state.model_state, abstract_rows(rows))
    return closed.jaxpr


def drawn_entries(rng, aval, tensor):
    """An operand open, replicated, split along one of its dims, or a sum left partial."""
    dims = [d for d, size in enumerate(aval.shape) if size % tensor == 0]
    if not aval.shape or rng.random() < 0.2:
        return ()
    if rng.random() < 0.15:
        return (*(None,) * len(aval.shape), "partial:tensor")
    split = rng.choice([None, *dims])
    return tuple("tensor" if d == split else None for d in range(len(aval.shape)))


def drawn_strategies(name, tensor, seed, data=1):
    """Strategies for about a third of the equations, and for the operands of loops."""
    rng, jaxpr, found = random.Random(seed), gradient_of(name, data), []
    for path, eqn in equations(jaxpr):
        if eqn.primitive.name not in PINNABLE or rng.random() < 0.6:
            continue
        if eqn.primitive.name == "scan":
            scan = Scan.of(eqn)
            parts = dict(zip(("const", "carry", "row"), scan.split(scan.body.invars), strict=True))
            parts["stack"] = scan.body.outvars[scan.num_carry :]
            for kind, atoms in parts.items():
                for index, atom in enumerate(atoms):
                    entries = drawn_entries(rng, atom.aval, tensor)
                    found.append(Strategy(f"{path}/{kind}{index} scan", (entries,)))
            continue
        inputs = tuple(drawn_entries(rng, atom.aval, tensor) for atom in eqn.invars)
        found.append(Strategy(f"{path} {eqn.primitive.name}", inputs))
    return Strategies(traced_as(jaxpr), tuple(found))


CASES = [("perceptron", 2, 1, 0), ("spelled out", 2, 1, 0), ("stacked", 2, 3, 3),
         pytest.param("transformer", 2, 1, 0, marks=pytest.mark.slow),
         pytest.param("convolutional", 2, 1, 0, marks=pytest.mark.slow),
         pytest.param("stacked", 2, 1, 0, marks=pytest.mark.slow),
         pytest.param("transformer", 2, 2, 1, marks=pytest.mark.slow)]  # fmt: skip


@pytest.mark.parametrize(("name", "tensor", "data", "zero"), CASES)
def test_drawn_strategies_give_the_same_update(name, tensor, data, zero):
    @draws(2)
    @given(seed=st.integers(0, 2**16))
    @jax.enable_x64(True)
    def check(seed):
        strategies = drawn_strategies(name, tensor, seed, data)
        plan = px.Plan(tensor=tensor, data=data, zero=zero, shardings=network(name)[2])
        plan = dataclasses.replace(plan, strategies=strategies)
        assert px.Plan.from_toml(plan.to_toml()) == plan
        assert models.max_rel_error(step(name, plan), on_one_device(name)) < 1e-10

    check()


def test_a_strategy_is_obeyed(x64):
    """Both operands replicated: the product sends nothing, though its parameter is split."""
    task, batch, _ = network("perceptron")
    jaxpr = gradient_of("perceptron")
    products = [(p, e) for p, e in equations(jaxpr) if e.primitive.name == "dot_general"]
    rules = {"hidden": ("tensor", None)}

    def collectives(*pinned):
        strategies = Strategies(traced_as(jaxpr), pinned)
        plan = px.Plan(tensor=5, shardings=rules, strategies=strategies)
        return [(c.kind, c.bytes) for c in px.analysis.planned(
            task, optax.sgd(1.0), plan, batch).collectives]  # fmt: skip

    path, first = products[0]
    shapes = [atom.aval.shape for atom in first.invars]
    assert (5, 16) in shapes, "the first product has the split parameter"
    default = collectives()
    pinned = collectives(Strategy(f"{path} dot_general", ((None, None), (None, None))))
    assert default[0] == ("all-reduce", SIZE * 16 * 8), "a partial product is reduced"
    assert pinned[0] == ("all-gather", 5 * 16 * 8), "the parameter is gathered instead"


WRONG = {
    "another operator": lambda jaxpr: Strategies(traced_as(jaxpr), (
        Strategy("0 conv_general_dilated", (), "model.py:3 (f)"),)),
    "no such equation": lambda jaxpr: Strategies(traced_as(jaxpr), (
        Strategy("9999 add", ()),)),
    "another model": lambda jaxpr: Strategies("0" * 16, ()),
    "too few operands": lambda jaxpr: Strategies(traced_as(jaxpr), (
        Strategy(next(f"{p} dot_general" for p, e in equations(jaxpr)
                      if e.primitive.name == "dot_general"), ((None, None),)),)),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_strategies_of_another_model_are_refused(x64, wrong):
    task, batch, shardings = network("perceptron")
    plan = px.Plan(
        tensor=2, shardings=shardings, strategies=WRONG[wrong](gradient_of("perceptron"))
    )
    with pytest.raises(px.errors.PlanError, match="strateg"):
        px.analysis.planned(task, optax.sgd(1.0), plan, batch)
