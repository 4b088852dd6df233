"""Plans that are known to be good are what a search finds: Megatron's, data parallelism, ZeRO."""

import jax
import optax
import pytest
from tests.unit.test_search_exact import (
    MEGATRON,
    TEXT,
    block_task,
    parameters_within,
    perceptron,
    perceptron_rows,
    split_dim,
)

import plurax as px
from plurax.machine_fields import Level
from plurax.plan import Plan
from plurax.planner import exact
from plurax.planner.costs import TimeCosts
from plurax.planner.exact import Budget
from plurax.planner.fewest import Walk, fewest_strategies, rules_of, strategies_of
from plurax.planner.step_graph import graph_of_step
from plurax.sharding.spec import TensorSharding

A100 = px.Machine.preset("4xA100-80GB")
# Only messages cost: each as much as two megabytes.
MESSAGES = px.Machine("messages", {"float32": 1e24}, 1e12, 1e20, [Level("node", 8, 1e9, 1e-3)])


def messages(task, plan):
    """How many collectives a step runs."""
    found = px.analysis.planned(task, optax.sgd(1e-3), plan, TEXT)
    return sum(one.trips or 1 for one in found.collectives)


def found_for_messages(task):
    """The plan of the fewest messages among those that share all products."""
    mesh = Plan(tensor=4)
    graph = graph_of_step(task, mesh, TEXT)
    flops = [[node.trips * one.flops for one in node.strategies] for node in graph.nodes]
    budget = Budget(sum(map(min, flops)), flops)
    solution = exact.solve(graph, TimeCosts(MESSAGES, mesh), budget=budget)
    walk = Walk(graph)
    every = strategies_of(graph, solution)
    paths = {one.path for one in every}
    strategies = fewest_strategies(walk, solution.parameters, every, paths)
    return Plan(
        tensor=4, shardings=rules_of(solution.parameters), strategies=walk.pinned(strategies)
    )


@pytest.mark.slow
def test_a_layer_of_a_transformer_sends_no_more_messages_than_megatron_s():
    """Of bytes `test_search_exact` says so: the fewest messages are not the fewest bytes."""
    by_expert, found = {}, {}
    for depth in (2, 4):
        task = block_task(depth)
        by_expert[depth] = messages(task, Plan(tensor=4, shardings=MEGATRON))
        found[depth] = messages(task, found_for_messages(task))
        assert found[depth] <= by_expert[depth]
    # An all-reduce after attention and after the perceptron, forward and backward.
    assert by_expert[4] - by_expert[2] == 2 * 4
    assert found[4] - found[2] <= 2 * 4


@pytest.mark.parametrize("data", [1, 2, 4])
def test_a_perceptron_is_split_by_columns_then_by_rows_beside_data(data):
    """On (1, 2), (2, 2) and (4, 2), with few rows on a device."""
    task, batch = perceptron(), perceptron_rows(16 * data)
    mesh = Plan(data=data, tensor=2)
    graph = graph_of_step(task, mesh, batch)
    rules = px.sharding.megatron(column=["in*"], row=["out*"], head=["head"])
    expert = px.analysis.planned(
        task, optax.sgd(1e-3), Plan(data=data, tensor=2, shardings=rules), batch
    )
    budget = parameters_within(graph, expert.memory.parameters)
    solution = exact.solve(graph, TimeCosts(MESSAGES, mesh), budget=budget)
    dims = [split_dim(solution, name) for name in ("in0", "out0", "in1", "out1")]
    assert dims == [1, 0, 1, 0]
    # Megatron's head, by columns, is as good as the best: of equal ones a solver takes either.
    columns = TensorSharding.of(None, "tensor")
    by_columns = exact.solve(graph, TimeCosts(MESSAGES, mesh), {"head": [columns]}, budget=budget)
    assert split_dim(by_columns, "head") == 1
    assert solution.cost == pytest.approx(by_columns.cost, rel=1e-9)


# --- What a search chooses ------------------------------------------------------------------------


def found(task, batch, machine=A100, **options):
    return px.search(task, optax.adam(1e-3), batch, machine, count=1, **options)


def test_a_large_batch_is_split_and_the_update_too():
    """Data parallelism, with the optimizer's state split although no one asked for ZeRO."""
    task, batch = perceptron(1, 1024, 4096, 512), perceptron_rows(65536, 1024)
    best = found(task, batch, pinned={"tensor": 1, "remat": "none"}).best
    assert (best.data, best.pipeline) == (4, 1)
    assert best.zero >= 1


@pytest.mark.ci
def test_no_plan_of_data_alone_is_faster_than_the_best():
    task, batch = perceptron(2, 512, 2048, 512), perceptron_rows(8192, 512)
    alone = px.estimate(task, optax.adam(1e-3), Plan(data=4), batch, A100)
    assert found(task, batch).estimate.seconds <= alone.seconds * 1.01


@pytest.mark.parametrize("width", [16, 512])
def test_zero_is_found_where_it_saves_more_than_its_messages_cost(width):
    """ZeRO 1 sends two messages for one, and updates a share of the parameters."""
    task, batch = perceptron(1, width, 4 * width), perceptron_rows(4096, width)
    pinned = {"data": 4, "microbatches": 1, "remat": "none"}
    seconds = [
        px.estimate(task, optax.adam(1e-3), Plan(data=4, zero=zero), batch, A100).seconds
        for zero in range(4)
    ]
    best = found(task, batch, pinned=pinned)
    assert best.estimate.seconds == seconds[best.best.zero] == min(seconds)


@pytest.mark.ci
def test_the_zero_stage_is_found_that_the_memory_needs():
    """ZeRO 2 has shards of the gradients' sums over microbatches, ZeRO 3 of the parameters too."""
    task, batch = block_task(4), TEXT
    pinned = {"data": 4, "tensor": 1, "pipeline": 1, "microbatches": 2, "remat": "full"}
    estimates = [
        px.estimate(task, optax.adam(1e-3), Plan(**pinned, zero=n), batch, A100) for n in range(4)
    ]
    needs = [one.peak + one.margin for one in estimates]
    for zero in (2, 3):
        assert min(needs[:zero]) > needs[zero]
        limit = (min(needs[:zero]) + needs[zero]) / 2
        assert found(task, batch, pinned=pinned, memory=limit).best.zero == zero


@pytest.mark.ci
def test_rematerialization_is_found_where_only_it_fits():
    task, batch = block_task(4), TEXT
    one = px.Machine.preset("A100-80GB")
    peaks = {
        remat: px.estimate(task, optax.adam(1e-3), Plan(remat=remat), batch, one).peak
        for remat in ("none", "full")
    }
    limit = (peaks["none"] + peaks["full"]) / 2
    pinned = {"microbatches": 1}
    assert found(task, batch, one, pinned=pinned, memory=limit).best.remat != "none"


@pytest.mark.ci
def test_a_pipeline_is_found_where_only_it_fits():
    """One row: no rows to split over `data`; tensors and tokens are to stay whole."""
    task = block_task(4)
    batch = {
        name: jax.ShapeDtypeStruct((1, *one.shape[1:]), one.dtype) for name, one in TEXT.items()
    }
    alone = px.estimate(task, optax.adam(1e-3), Plan(remat="full"), batch, A100).peak
    pinned = {"tensor": 1, "context": 1, "remat": "full"}
    best = found(task, batch, pinned=pinned, memory=0.7 * alone).best
    assert best.pipeline > 1
    assert best.data == best.tensor == 1
