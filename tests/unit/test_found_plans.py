"""A plan from a solution of the graph does what the solution says, and computes the same update."""

import dataclasses
import importlib

import jax
import jax.numpy as jnp
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests import models
from tests.draws import draws
from tests.planning import BytesSent, bytes_sent
from tests.promotion import allowed

import plurax as px
from plurax.machine_fields import Level
from plurax.partition.pins import equations, traced_as
from plurax.planner.costs import TimeCosts
from plurax.planner.fewest import minimal
from plurax.planner.step_graph import graph_of_step
from plurax.planner.tensor_search import TensorSearch
from plurax.sharding.spec import TensorSharding
from plurax.strategies import Strategies, Strategy

flash = importlib.import_module("jax.experimental.pallas.ops.tpu.flash_attention")

STACK = {
    "blocks/qkv": (..., "tensor", None), "blocks/attention_out": (..., "tensor", None, None),
    "blocks/hidden": (..., "tensor"), "blocks/bias": (..., "tensor"),
    "blocks/out": (..., "tensor", None),
}  # fmt: skip


def recurrent_task():
    """A loop that shares its weights: the carry of its backward pass sums their gradient."""

    def loss(params, batch, keys):
        def turn(h, _):
            return jax.numpy.tanh(h @ params["again"]), None

        h, _ = jax.lax.scan(turn, batch["x"], None, length=4)
        return h.sum(1)

    return px.Task(init=lambda key: {"again": jax.numpy.ones((12, 12)) / 9}, loss=loss)


def adapted_task(dtype=jax.numpy.float32):
    """Products of low rank beside weights that are not trained."""

    def init(key):
        shapes = {"a": (32, 8), "b": (8, 128), "base": (32, 128), "out": (128, 32)}
        keys = jax.random.split(key, len(shapes))
        pairs = zip(keys, shapes.items(), strict=True)
        return {name: 0.1 * jax.random.normal(one, shape, dtype) for one, (name, shape) in pairs}

    def loss(params, batch, keys):
        x = batch["x"]
        hidden = jax.numpy.tanh(x @ params["base"] + (x @ params["a"]) @ params["b"])
        return ((hidden @ params["out"]) ** 2).mean(-1)

    return px.freeze(px.Task(init=init, loss=loss), "base", "out")


def vectors(size):
    return {"x": jax.numpy.linspace(-1, 1, size * 32, dtype="float32").reshape(size, 32)}


def signals(size):
    return {"x": jax.numpy.ones((size, 12))}


# name: the task, its batch, and rules that an expert would write.
MODELS = {
    "perceptron": (models.mlp_task, models.data,
                   {"hidden": (None, "tensor"), "bias": ("tensor",), "out": ("tensor", None)}),
    "transformer": (models.transformer_task, models.text, models.megatron()),
    "stack": (models.transformer_stack, models.text, STACK),
    "recurrent": (recurrent_task, signals, {"again": (None, "tensor")}),
    "adapted": (adapted_task, vectors,
                {"base": (None, "tensor"), "b": (None, "tensor"), "out": ("tensor", None)}),
    "convolutional": (models.convolutional_task, models.images, models.CHANNELS),
}  # fmt: skip
CASES = [("perceptron", 2, 64), ("perceptron", 8, 64), ("stack", 2, 8), ("convolutional", 4, 8),
         ("recurrent", 4, 48), ("adapted", 4, 64),
         pytest.param("transformer", 2, 8, marks=pytest.mark.slow),
         pytest.param("transformer", 3, 8, marks=pytest.mark.slow)]  # fmt: skip


def searched(name, tensor, size, plan=None):
    make, rows, expert = MODELS[name]
    task, batch = make(), rows(size)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
    search = TensorSearch(task, like, lambda plan: BytesSent())
    plan = plan or px.Plan(tensor=tensor)
    plans = [search.plan(plan, fewest=fewest) for fewest in (False, True)]
    solved = search.sharded(plan)
    return task, batch, bytes_sent(solved.graph, solved.solution), plans, expert


def sent(task, plan, batch):
    found = px.analysis.planned(task, optax.sgd(0.1), plan, batch)
    return sum(one.bytes_sent * (one.trips or 1) for one in found.collectives)


@pytest.mark.parametrize(("name", "tensor", "size"), CASES)
def test_the_bytes_of_a_solution_are_those_of_its_plan(name, tensor, size):
    task, batch, least, plans, expert = searched(name, tensor, size)
    # The norm of the gradients is one number, reduced over the devices.
    norm = 2 * 4 * (tensor - 1) / tensor
    for plan in plans:
        assert least <= sent(task, plan, batch) <= least + norm
    by_expert = sent(task, px.Plan(tensor=tensor, shardings=expert), batch)
    assert least <= by_expert
    assert px.Plan.from_toml(plan.to_toml()) == plan


@pytest.mark.slow
def test_few_strategies_are_written():
    make, rows, _ = MODELS["transformer"]
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), rows(8))
    search = TensorSearch(make(), like, lambda plan: BytesSent())
    found = search.sharded(px.Plan(tensor=2))
    few = search.plan(px.Plan(tensor=2), fewest=True).strategies.equations
    assert 0 < len(few) <= 10 < len(found.strategies)
    least = found.walk.moved(found.shardings, found.strategies)
    assert not found.walk.moved(found.shardings, few).exceeds(least)
    assert "models.py:" in few[0].where
    for one in few:
        others = [other for other in few if other != one]
        assert found.walk.moved(found.shardings, others).exceeds(least), one


@pytest.mark.ci
@pytest.mark.parametrize(
    ("name", "data", "tensor"),
    [
        ("perceptron", 2, 2),
        ("adapted", 2, 2),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("stack", 2, 2), ("transformer", 1, 2))
        ),
    ],
)
def test_a_found_plan_computes_the_same_update(x64, name, data, tensor):
    make, rows, _ = MODELS[name]
    task = make(dtype=jax.numpy.float64)
    batch = jax.tree.map(lambda x: x.astype("f8") if x.dtype.kind == "f" else x, rows(8))
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
    search = TensorSearch(task, like, lambda plan: BytesSent())
    plan = search.plan(px.Plan(data=data, tensor=tensor), fewest=True)

    def step(plan):
        program = px.compile(task, optax.adam(1e-2), plan, batch)
        state, metrics = program.step(program.init(seed=1), batch)
        return program, jax.device_get((program.to_canonical(state).params, metrics))

    program, found = step(plan)
    assert models.max_rel_error(found, step(px.Plan())[1]) < 1e-10
    planned = sum(c.bytes_sent * (c.trips or 1) for c in program.planned_collectives())
    compiled = sum(c.bytes_sent * (c.trips or 1) for c in program.collectives())
    assert abs(planned - compiled) <= 64, "scalars of the metrics are reduced together"


def weak_positions(params, batch, keys):
    """An array computed of numbers of Python and positions has a weak type."""
    x = batch["x"] @ params["w"] * jnp.exp(-0.1 * jnp.arange(8))[None]
    return jnp.sum(x**2, axis=1)


def penalized(params, batch, keys):
    return jnp.sum((batch["x"] @ params["w"]) ** 2, axis=1) + 1e-3 * jnp.sum(params["w"] ** 2)


def attention_of_a_kernel(params, batch, keys):
    """The kernel is never run: only traces are compared."""
    q = (batch["x"] @ params["w"]).reshape(-1, 2, 1, 4)
    q = jnp.broadcast_to(q, (q.shape[0], 2, 128, 4))
    return jnp.sum(flash.flash_attention(q, q, q), axis=(1, 2, 3))


@pytest.mark.parametrize("loss", [weak_positions, penalized, attention_of_a_kernel])
def test_strategies_name_the_equations_of_the_step(loss):
    """Else a search would refuse all that it finds: they hold for one trace."""
    task = allowed(px.Task(init=lambda key: {"w": jnp.ones((8, 8))}, loss=loss))
    batch = {"x": jax.ShapeDtypeStruct((4, 8), "float32")}
    plan = px.Plan(tensor=2, shardings={"w": (None, "tensor")})
    traced = graph_of_step(task, plan, batch).traced.jaxpr
    path = next(p for p, eqn in equations(traced) if eqn.primitive.name == "dot_general")
    product = Strategy(f"{path} dot_general", ((), (None, "tensor")), "")
    strategies = Strategies(traced_as(traced), (product,))
    plan = dataclasses.replace(plan, strategies=strategies)
    px.analysis.planned(task, optax.sgd(0.1), plan, batch)


def test_pins_leave_the_shards_of_zero():
    """With every equation pinned, ZeRO-3 still gathers a stack's parameters layer by layer."""
    make, rows, _ = MODELS["stack"]
    task, batch = make(), rows(8)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
    plan = px.Plan(data=2, tensor=2, zero=3)
    pinned = TensorSearch(task, like, lambda plan: BytesSent()).plan(plan)
    found = px.analysis.planned(task, optax.sgd(0.1), pinned, batch)
    gathers = [one for one in found.collectives if one.kind == "all-gather" and one.in_loop]
    assert sum("data" in one.axes for one in gathers) >= 2, "forward and backward"
    whole = max(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(task.init, jax.random.key(0))))
    assert all(one.bytes < whole for one in found.collectives if one.kind == "all-gather")


def test_nothing_is_split_where_links_are_slow():
    task, batch = models.mlp_task(), models.data(8)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
    slow = px.Machine("slow", {"float32": 1e12}, 1e9, 1e12, [Level("node", 2, 1.0)])
    search = TensorSearch(task, like, lambda plan: TimeCosts(slow, plan))
    with pytest.raises(px.errors.PlanError, match="over `tensor` costs more than it saves"):
        search.plan(px.Plan(tensor=2))


@draws(30)
@given(needed=st.sets(st.integers(0, 40)))
def test_minimal_keeps_what_is_needed(needed):
    assert minimal(list(range(41)), lambda kept: needed <= set(kept)) == sorted(needed)


def test_a_walk_counts_what_one_device_computes():
    """Two products forward; backward both parameters' gradients and the hidden values'."""
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), models.data(64))
    search = TensorSearch(models.mlp_task(), like, lambda plan: BytesSent())
    found = search.sharded(px.Plan(tensor=2))
    width = {path: one.shape for path, one in found.graph.parameters.items()}
    (inputs, hidden), (_, outputs) = width["hidden"], width["out"]
    whole = 2 * 64 * (2 * inputs * hidden + 3 * hidden * outputs)
    replicated = {path: TensorSharding.replicated(len(shape)) for path, shape in width.items()}
    assert found.walk.moved(replicated, []).flops == whole
    megatron = {"hidden": (None, "tensor"), "bias": ("tensor",), "out": ("tensor", None)}
    split = replicated | {path: TensorSharding.of(*one) for path, one in megatron.items()}
    assert found.walk.moved(split, []).flops == whole / 2
    less = dataclasses.replace(found.walk.moved(split, []), flops=whole / 2 - 1)
    assert found.walk.moved(split, []).exceeds(less)


def test_a_walk_counts_every_turn_of_a_loop():
    """In each of four turns a product forward, and backward those of the weights and the carry."""
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), signals(8))
    search = TensorSearch(recurrent_task(), like, lambda plan: BytesSent())
    walk = search.sharded(px.Plan(tensor=2)).walk
    assert walk.moved({"again": TensorSharding.replicated(2)}, []).flops == 4 * 3 * 2 * 8 * 12**2


def test_what_is_not_trained_has_no_gradient_and_no_update():
    """Of much that is frozen ZeRO splits nothing, and no plan by hand is faster."""
    task, batch, optimizer = adapted_task(), vectors(4096), optax.adam(1e-3)
    machine = px.Machine.preset("8xH100-80GB")
    found = px.search(task, optimizer, batch, machine)
    for plan in (
        *(px.Plan(data=8, zero=zero) for zero in range(4)),
        *(px.Plan(data=8 // n, tensor=n, shardings=MODELS["adapted"][2]) for n in (2, 4, 8)),
    ):
        by_hand = px.estimate(task, optimizer, plan, batch, machine)
        assert found.ranked[0].seconds <= by_hand.seconds * (1 + 1e-9), plan


def tensor_train(params, batch, keys):
    """Products of many small tensors, of which some are of parameters alone."""
    x = batch["x"].reshape(-1, 2, 3, 2)
    y = jnp.einsum("nijk,aixb,bjyc,ckzd->nxyz", x, *params["train"]).reshape(x.shape[0], -1)
    first, second, third = params["factors"]
    z = jnp.einsum("ni,ir,jr,kr,nj->nk", batch["x"], first, second, third, y)
    chain = jnp.linalg.multi_dot([first, third, second.T])
    return (z**2).mean(1) + jnp.abs(batch["x"] @ chain).mean(1)


def test_the_best_plan_has_the_strategies_that_its_estimate_needs(x64):
    """Few strategies are found along `tensor`; ZeRO splits parameters over `data`, too."""
    shapes = {"train": [(1, 2, 4, 4), (4, 3, 4, 4), (4, 2, 2, 1)]}
    shapes |= {"factors": [(12, 8), (32, 8), (8, 8)]}

    def init(key):
        return jax.tree.map(jnp.ones, shapes, is_leaf=lambda one: isinstance(one, tuple))

    task, optimizer = px.Task(init=init, loss=tensor_train), optax.sgd(0.1)
    batch = {"x": jax.ShapeDtypeStruct((16, 12), jnp.float64)}
    slow = px.Machine("slow", {"float64": 1e8}, 1e9, 1e12, [Level("node", 8, 1e10)])
    pinned = {"data": 4, "tensor": 2, "zero": 3, "remat": "none"}
    found = px.search(task, optimizer, batch, slow, pinned=pinned, count=1, evaluations=2)
    again = px.estimate(task, optimizer, found.best, batch, slow)
    assert again.seconds <= found.estimate.seconds * (1 + 1e-9)
