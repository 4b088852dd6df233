"""Plans that say shardings of parameters and no strategies: stages, and shares of the tokens."""

import jax
import numpy as np
import optax
import pytest
from tests import models
from tests.planning import bytes_sent
from tests.unit.test_search_exact import TEXT, block_task, perceptron, perceptron_rows

import plurax as px
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


@pytest.mark.ci
def test_what_is_found_beside_split_tokens_runs():
    task, batch = models.transformer_stack(), models.text(32)
    fields = {"data": 1, "tensor": 2, "zero": 0, "remat": "none"} | BESIDE["tokens"]
    plan = px.search(task, optax.sgd(0.1), batch, SLOW, pinned=fields, count=1).best
    states = []
    for each in (px.Plan(), plan):
        program = px.compile(task, optax.sgd(0.1), each, batch)
        states.append(jax.device_get(program.step(program.init(seed=0), batch)[0].params))
    assert plan.shardings
    jax.tree.map(lambda one, two: np.testing.assert_allclose(one, two, atol=1e-5), *states)
