"""Plans that say shardings of parameters and no strategies: stages, and shares of the tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests import models
from tests.planning import bytes_sent
from tests.unit.test_search_exact import TEXT, block_task, perceptron, perceptron_rows

import plurax as px
from plurax.execute.transformed_task import tokens_of_parameters
from plurax.machine_fields import Level
from plurax.plan import Plan
from plurax.planner import exact
from plurax.planner.costs import TimeCosts
from plurax.planner.fewest import Walk
from plurax.planner.graph import graph_of_step
from plurax.sharding.rules import Rules
from plurax.sharding.spec import TensorSharding


def machine(bandwidth):
    """Products take as long as what is sent for them: there is reason to split rows, too."""
    level = Level("node", 8, bandwidth, 1e-7)
    return px.Machine("slow", {"float32": 1e9}, 1e9, 1e12, [level])


SLOW = machine(1e9)

TASKS = {
    "blocks": lambda: (block_task(2), TEXT),
    "stack": lambda: (models.transformer_stack(), models.text(32)),
    "perceptron": lambda: (perceptron(), perceptron_rows(64)),
    "dense": lambda: (models.mlp_task(), models.data(64)),
}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", TASKS)
def test_the_partitioner_computes_what_is_solved(name, size):
    task, batch = TASKS[name]()
    graph = graph_of_step(task, Plan(tensor=size), batch)
    solution = exact.solve(graph, TimeCosts(SLOW, Plan(tensor=size)), by_rules=True)
    chosen = zip(graph.nodes, solution.choice, strict=True)
    flops = sum(node.trips * node.strategies[choice].flops for node, choice in chosen)
    moved = Walk(graph).moved(solution.parameters, [])
    assert moved.flops == flops
    if size == 2 and name != "stack":  # whose layers name activations
        assert moved.bytes_sent == pytest.approx(bytes_sent(graph, solution))
    replicated = {
        path: TensorSharding.replicated(len(tensor.shape))
        for path, tensor in graph.parameters.items()
    }
    assert flops < 0.75 * Walk(graph).moved(replicated, []).flops


def test_parameters_are_read_as_they_are_stored():
    """To move them is not what the partitioner does, cheap as it may be."""
    task, batch = TASKS["stack"]()
    graph = graph_of_step(task, Plan(tensor=2), batch)
    rules = Rules(Plan(shardings=MEGATRON).rules, graph.axes.mesh)
    pinned = {
        path: (rules.find(path, one.shape) or TensorSharding.replicated(len(one.shape)),)
        for path, one in graph.parameters.items()
    }
    costs = TimeCosts(machine(1e8), Plan(tensor=2))
    solution = exact.solve(graph, costs, pinned, by_rules=True)
    chosen = zip(graph.nodes, solution.choice, strict=True)
    moved = Walk(graph).moved(solution.parameters, [])
    assert moved.flops == sum(node.trips * node.strategies[one].flops for node, one in chosen)
    assert moved.bytes_sent == pytest.approx(bytes_sent(graph, solution))


# Narayanan et al. 2021, https://arxiv.org/abs/2104.04473, section 2.3.
MEGATRON = {
    "blocks/qkv": (None, None, None, "tensor", None),
    "blocks/attention_out": (None, "tensor", None, None),
    "blocks/hidden": (None, None, "tensor"),
    "blocks/bias": (None, "tensor"),
    "blocks/out": (None, "tensor", None),
}

BESIDE = {
    "stages": {"pipeline": 2, "schedule": "1f1b", "microbatches": 2},
    "tokens": {"context": 2, "stream": 4, "pipeline": 1, "microbatches": 1},
}


@pytest.mark.ci
@pytest.mark.parametrize("bandwidth", [1e8, 1e9])
@pytest.mark.parametrize("name", BESIDE)
def test_no_slower_than_by_megatron(name, bandwidth):
    """Within what the solver does not see: a split of rows alone would be no split at all."""
    links = machine(bandwidth)
    task, batch = models.transformer_stack(), models.text(32)
    fields = {"data": 1, "tensor": 2, "zero": 0, "remat": "none"} | BESIDE[name]
    found = px.search(task, optax.sgd(0.1), batch, links, pinned=fields, count=1)
    by_hand = px.estimate(task, optax.sgd(0.1), px.Plan(**fields, shardings=MEGATRON), batch, links)
    assert found.best.strategies is None
    assert found.ranked[0].seconds <= 1.03 * by_hand.seconds


def with_positions():
    """The stack with a vector for each position, and a bias for each pair of them."""
    stack = models.transformer_stack().stack

    def init(key):
        first, second, third = jax.random.split(key, 3)
        position = 0.1 * jax.random.normal(second, (models.TOKENS, models.WIDTH))
        pairs = 0.1 * jax.random.normal(third, (models.TOKENS, models.TOKENS))
        return {**stack.embed.init(first), "position": position, "pairs": pairs}

    def embed(params, batch, keys):
        x = stack.embed.apply(params, batch, keys) + params["position"][None]
        scores = jnp.einsum("btd,bsd->bts", x, x) + params["pairs"][None]
        return x + jax.nn.softmax(scores) @ x

    return px.stack(
        embed=(init, embed), block=stack.block, head=stack.head, depth=stack.depth, tied=["table"]
    )


def test_dims_of_parameters_that_are_tokens():
    task, batch = with_positions(), models.text(8)
    plan = Plan(context=2, stream=4)
    tokens = tokens_of_parameters(task, batch, plan)
    # Of pairs the queries' dim is split; each device needs them for all keys.
    assert {path: dims for path, dims in tokens.items() if dims} == {
        "embed/position": {0}, "embed/pairs": {0}
    }  # fmt: skip
    assert not tokens_of_parameters(task, batch, Plan())


def test_tokens_that_context_splits_are_not_split_again():
    """To the graph of all tokens a split of positions is one of all that is computed of them."""
    task, batch = with_positions(), models.text(32)
    fields = {"data": 1, "tensor": 2, "zero": 0, "remat": "none"} | BESIDE["tokens"]
    found = px.search(task, optax.sgd(0.1), batch, SLOW, pinned=fields, count=1)
    rules = dict(found.best.rules)
    assert all(rules.get(f"embed/{name}", (None,))[0] is None for name in ("position", "pairs"))
    assert "dim 0 over tensor: not its tokens, which `context` splits" in found.explain(
        "embed/pairs"
    )
    by_hand = px.estimate(task, optax.sgd(0.1), px.Plan(**fields, shardings=MEGATRON), batch, SLOW)
    assert found.ranked[0].seconds <= 1.03 * by_hand.seconds


@pytest.mark.ci
@pytest.mark.parametrize("task", [models.transformer_stack, with_positions])
def test_what_is_found_beside_split_tokens_runs(task):
    task, batch = task(), models.text(32)
    fields = {"data": 1, "tensor": 2, "zero": 0, "remat": "none"} | BESIDE["tokens"]
    plan = px.search(task, optax.sgd(0.1), batch, SLOW, pinned=fields, count=1).best
    states = []
    for each in (px.Plan(), plan):
        program = px.compile(task, optax.sgd(0.1), each, batch)
        states.append(jax.device_get(program.step(program.init(seed=0), batch)[0].params))
    assert plan.shardings
    jax.tree.map(lambda one, two: np.testing.assert_allclose(one, two, atol=1e-5), *states)


@pytest.mark.parametrize("remat", ["none", "dots", pytest.param("full", marks=pytest.mark.ci)])
def test_a_coupled_loss_over_data(remat):
    """Equations of the step are of all rows, those of the graph of one device's."""

    def init(key):
        shapes = {"in": (16, 64), "out": (64, 16), "other_in": (16, 64), "other_out": (64, 16)}
        keys = jax.random.split(key, len(shapes))
        pairs = zip(keys, shapes.items(), strict=True)
        return {name: 0.1 * jax.random.normal(k, shape) for k, (name, shape) in pairs}

    def loss(params, batch, keys, mask):
        first = jnp.tanh(batch["x"] @ params["in"]) @ params["out"]
        other = jnp.tanh(batch["y"] @ params["other_in"]) @ params["other_out"]
        scores = jnp.where(mask[None], first @ other.T, -1e9)
        return -jnp.diagonal(jax.nn.log_softmax(scores))

    task, rng = px.Task(init=init, loss=loss, coupled=True), np.random.default_rng(0)
    batch = {name: rng.normal(size=(64, 16)).astype(np.float32) for name in "xy"}
    fields = {"data": 4, "tensor": 2, "pipeline": 1, "microbatches": 1, "remat": remat}
    found = px.search(task, optax.sgd(0.1), batch, SLOW, pinned=fields, count=1)
    columns, rows = (None, "tensor"), ("tensor", None)
    rules = {"in": columns, "out": rows, "other_in": columns, "other_out": rows}
    by_hand = px.Plan(data=4, tensor=2, zero=found.best.zero, remat=remat, shardings=rules)
    seconds = px.estimate(task, optax.sgd(0.1), by_hand, batch, SLOW).seconds
    assert found.best.strategies is None
    assert found.ranked[0].seconds <= 1.01 * seconds
    states = []
    for each in (px.Plan(), found.best):
        program = px.compile(task, optax.sgd(0.1), each, batch)
        states.append(jax.device_get(program.step(program.init(seed=0), batch)[0].params))
    jax.tree.map(lambda one, two: np.testing.assert_allclose(one, two, atol=1e-5), *states)
