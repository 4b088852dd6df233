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
from plurax.planner.rule_strategies import decided_by_rules
from plurax.planner.step_graph import graph_of_step
from plurax.sharding.rules import Rules
from plurax.sharding.spec import TensorSharding


def machine(bandwidth):
    """Products take as long as what is sent for them: there is reason to split rows, too."""
    level = Level("node", 8, bandwidth, 1e-7)
    return px.Machine("slow", {"float32": 1e9}, 1e9, 1e12, [level])


SLOW = machine(1e9)


def modulated():
    """Layers whose outputs are scaled, as a diffusion transformer's are by the time step.

    A product's partial sum meets a factor that is split, and what a layer returns is split then.
    """

    def init(key):
        shapes = {"scale": (64, 64), "up": (64, 256), "down": (256, 64)}
        keys = jax.random.split(key, 3)
        each = zip(keys, shapes.items(), strict=True)
        return {name: 0.1 * jax.random.normal(one, (2, *shape)) for one, (name, shape) in each}

    def loss(params, batch, keys):
        def layer(x, p):
            by = (batch["x"].mean(1) @ p["scale"])[:, None]
            hidden = jnp.tanh(x * (1 + by) @ p["up"])
            return x + by * (hidden @ p["down"]), None

        x, _ = jax.lax.scan(layer, batch["x"], params)
        return (x**2).mean((1, 2))

    return px.Task(init=init, loss=loss)


MODULATED = {"up": (None, None, "tensor"), "down": (None, "tensor", None)}


def assert_sent(graph, solution, moved):
    """A solution sends what the partitioner does, but for one number, the loss or its gradient."""
    size = graph.axes.sizes["tensor"]
    number = 4 * 2 * (size - 1) / size  # all-reduced, float32
    assert abs(bytes_sent(graph, solution) - moved.bytes_sent) in (0, number)


TASKS = {
    "modulated": lambda: (modulated(), {"x": jnp.zeros((8, 16, 64))}),
    "blocks": lambda: (block_task(2), TEXT),
    "stack": lambda: (models.transformer_stack(), models.text(32)),
    "perceptron": lambda: (perceptron(), perceptron_rows(64)),
    "dense": lambda: (models.mlp_task(), models.data(64)),
}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", TASKS)
def test_the_partitioner_computes_what_is_solved(name, size):
    task, batch = TASKS[name]()
    graph = decided_by_rules(graph_of_step(task, Plan(tensor=size), batch))
    solution = exact.solve(graph, TimeCosts(SLOW, Plan(tensor=size)))
    chosen = zip(graph.nodes, solution.choice, strict=True)
    flops = sum(node.trips * node.strategies[choice].flops for node, choice in chosen)
    moved = Walk(graph).moved(solution.parameters, [])
    assert moved.flops == flops
    if name != "stack":  # whose layers name activations
        assert_sent(graph, solution, moved)
    replicated = {
        path: TensorSharding.replicated(len(tensor.shape))
        for path, tensor in graph.parameters.items()
    }
    assert flops < 0.75 * Walk(graph).moved(replicated, []).flops


@pytest.mark.parametrize("scale", [None, (None, None, "tensor")])
def test_a_partial_sum_is_reduced_where_the_partitioner_does(scale):
    """Bytes of rules by hand: with a split factor each layer scatters the sum and gathers it."""
    task, batch = TASKS["modulated"]()
    graph = decided_by_rules(graph_of_step(task, Plan(tensor=4), batch))
    rules = Rules(Plan(shardings=MODULATED | {"scale": scale or (None,) * 3}).rules, {"tensor": 4})
    pinned = {
        path: (rules.find(path, one.shape) or TensorSharding.replicated(len(one.shape)),)
        for path, one in graph.parameters.items()
    }
    solution = exact.solve(graph, TimeCosts(SLOW, Plan(tensor=4)), pinned)
    moved = Walk(graph).moved(solution.parameters, [])
    assert_sent(graph, solution, moved)


COLUMNS = {
    "embed/*": (None, "tensor"),
    "blocks/qkv": (None, None, None, "tensor", None),
    "blocks/ao": (None, "tensor", None, None),
    "blocks/in": (None, None, "tensor"),
    "blocks/out": (None, "tensor", None),
    "head/w": (None, "tensor"),
    "blocks/g*": (None, "tensor"),
}


def test_a_residual_stream_that_parameters_split_is_carried_so():
    """Split by an embedding and by norms, it is gathered only for products."""
    task, batch = TASKS["blocks"]()
    graph = decided_by_rules(graph_of_step(task, Plan(tensor=4), batch))
    rules = Rules(Plan(shardings=COLUMNS).rules, {"tensor": 4})
    pinned = {
        path: (rules.find(path, one.shape) or TensorSharding.replicated(len(one.shape)),)
        for path, one in graph.parameters.items()
    }
    solution = exact.solve(graph, TimeCosts(SLOW, Plan(tensor=4)), pinned)
    moved = Walk(graph).moved(solution.parameters, [])
    assert_sent(graph, solution, moved)
    chosen = zip(graph.nodes, solution.choice, strict=True)
    assert moved.flops == sum(node.trips * node.strategies[one].flops for node, one in chosen)


BEHIND = {
    "a bias": lambda y, bias, key: y + bias[None],
    "dropout": lambda y, bias, key: jnp.where(jax.random.bernoulli(key, 0.9, y.shape), y, 0.0),
    "what is not linear": lambda y, bias, key: jnp.tanh(y * bias[None]),
}
"""What follows on a row-parallel product before the residual is added to it."""


def residual(behind, name=lambda x: x):
    """Layers whose residual stream is split: by `name`, or by the product that it starts with."""

    def init(key):
        shapes = {"up": (3, 16, 64), "down": (3, 64, 16), "bias": (3, 16), "embed": (16, 16)}
        return {name: jnp.ones(shape) for name, shape in shapes.items()}

    def loss(params, example, key):
        def layer(x, scanned):
            p, key = scanned
            x = name(x)
            normal = x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-5)
            y = BEHIND[behind](jnp.tanh(normal @ p["up"]) @ p["down"], p["bias"], key)
            return name(x + y), None

        layers = {name: params[name] for name in ("up", "down", "bias")}
        x = example["x"] @ params["embed"]
        return (jax.lax.scan(layer, x, (layers, jax.random.split(key, 3)))[0] ** 2).mean()

    return px.Task(init=init, loss=px.per_example(loss))


@pytest.mark.parametrize(
    "remat", ["dots", *(pytest.param(one, marks=pytest.mark.ci) for one in ("none", "full"))]
)
@pytest.mark.parametrize("tokens", [True, False], ids=["tokens", "columns"])
@pytest.mark.parametrize(
    "behind", ["a bias", *(pytest.param(one, marks=pytest.mark.ci) for one in list(BEHIND)[1:])]
)
def test_a_partial_sum_is_scattered_to_where_it_is_met(request, behind, tokens, remat):
    """Bytes of Megatron's shardings with tokens split between layers, or a stream by columns."""
    if (behind, tokens, remat) == ("what is not linear", True, "full"):
        why = "the graph does not know that a cotangent is split in a recomputed part"
        request.applymarker(pytest.mark.xfail(reason=why, strict=True))
    sequence = ["residual"] if tokens else []
    rules = px.sharding.megatron(column=["up"], row=["down"], sequence=sequence)
    rules |= {} if tokens else {"embed": (None, "tensor")}
    plan = Plan(tensor=4, remat=remat, shardings=rules)
    task = residual(behind, (lambda x: px.sharding.name(x, "residual")) if tokens else lambda x: x)
    graph = decided_by_rules(graph_of_step(task, plan, {"x": jnp.zeros((8, 12, 16))}))
    find = Rules(plan.rules, graph.axes.mesh).find
    pinned = {
        path: (find(path, one.shape) or TensorSharding.replicated(len(one.shape)),)
        for path, one in graph.parameters.items()
    }
    solution = exact.solve(graph, TimeCosts(SLOW, plan), pinned)
    moved = Walk(graph, find).moved(solution.parameters, [])
    assert_sent(graph, solution, moved)
    chosen = zip(graph.nodes, solution.choice, strict=True)
    assert moved.flops == sum(node.trips * node.strategies[one].flops for node, one in chosen)


def test_parameters_are_read_as_they_are_stored():
    """To move them is not what the partitioner does, cheap as it may be."""
    task, batch = TASKS["stack"]()
    graph = decided_by_rules(graph_of_step(task, Plan(tensor=2), batch))
    rules = Rules(Plan(shardings=MEGATRON).rules, graph.axes.mesh)
    pinned = {
        path: (rules.find(path, one.shape) or TensorSharding.replicated(len(one.shape)),)
        for path, one in graph.parameters.items()
    }
    costs = TimeCosts(machine(1e8), Plan(tensor=2))
    solution = exact.solve(graph, costs, pinned)
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


@pytest.mark.ci
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
