"""The graph of a step and its cheapest strategies, beside all there are and beside expert plans."""

import dataclasses
import itertools
import math

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import assume, given
from tests.draws import draws
from tests.planning import BytesSent, bytes_sent, memory_of, pins_of

import plurax as px
from plurax.execute.gradient import gradient
from plurax.execute.rows import abstract_rows
from plurax.machine import Machine
from plurax.machine_fields import Level
from plurax.partition.pins import traced_as
from plurax.plan import Plan
from plurax.planner import exact
from plurax.planner.costs import TimeCosts, state_ratios
from plurax.planner.equal_layers import classes_of
from plurax.planner.exact import Budget
from plurax.planner.graph import graph_of
from plurax.planner.problem import Problem
from plurax.planner.shard_strategies import StrategyFinder, Tensor
from plurax.planner.step_graph import graph_of_step
from plurax.sharding.axes import Axes
from plurax.sharding.spec import TensorSharding
from plurax.strategies import Strategies, Strategy, entries_of

FLOAT = jnp.dtype("float32")
SMALL = Machine("small", {"float32": 1e9}, 10**9, 1e9, (Level("node", 64, 1e8, 1e-6),), half_dim=2)


def perceptron(layers=2, width=64, hidden=256, classes=128):
    """Residual layers of two products each, and a head."""

    def init(key):
        sizes = {f"in{i}": (width, hidden) for i in range(layers)}
        sizes |= {f"out{i}": (hidden, width) for i in range(layers)}
        return {
            path: jnp.zeros(size) for path, size in (sizes | {"head": (width, classes)}).items()
        }

    def loss(p, batch, keys):
        x = batch["x"]
        for i in range(layers):
            x = x + jax.nn.gelu(x @ p[f"in{i}"]) @ p[f"out{i}"]
        return optax.softmax_cross_entropy_with_integer_labels(x @ p["head"], batch["y"])

    return px.Task(init=init, loss=loss)


def perceptron_rows(size, width=64):
    return {
        "x": jax.ShapeDtypeStruct((size, width), jnp.float32),
        "y": jax.ShapeDtypeStruct((size,), jnp.int32),
    }


def block_task(depth, width=64, heads=4, words=128):
    """A transformer of `depth` scanned layers."""

    def normed(x, gain):
        return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * gain[None, None]

    def layer(key):
        return {
            "g1": jnp.ones(width),
            "g2": jnp.ones(width),
            "qkv": jnp.zeros((width, 3, heads, width // heads)),
            "ao": jnp.zeros((heads, width // heads, width)),
            "in": jnp.zeros((width, 4 * width)),
            "out": jnp.zeros((4 * width, width)),
        }

    def block(p, x, batch, keys):
        q, k, v = jnp.einsum("btd,dchk->cbthk", normed(x, p["g1"]), p["qkv"])
        scores = jnp.einsum("bthk,bshk->bhts", q, k) / math.sqrt(q.shape[-1])
        seen = jnp.tril(jnp.ones(scores.shape[2:], bool))
        weights = jax.nn.softmax(jnp.where(seen, scores, -1e9))
        mixed = jnp.einsum("bhts,bshk->bthk", weights, v)
        x = px.sharding.name(x + jnp.einsum("bthk,hkd->btd", mixed, p["ao"]), "residual")
        return px.sharding.name(
            x + jax.nn.gelu(normed(x, p["g2"]) @ p["in"]) @ p["out"], "residual"
        )

    def embed(p, batch, keys):
        return px.sharding.name(p["e"][batch["t"]] + p["pos"][None], "residual")

    def head(p, x, batch, keys):
        logits = normed(x, p["g"]) @ p["w"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["n"]).mean(-1)

    return px.stack(
        (lambda key: {"e": jnp.zeros((words, width)), "pos": jnp.zeros((16, width))}, embed),
        (layer, block),
        (lambda key: {"g": jnp.ones(width), "w": jnp.zeros((width, words))}, head),
        depth,
    )


TEXT = {name: jax.ShapeDtypeStruct((8, 16), jnp.int32) for name in ("t", "n")}
MEGATRON = px.sharding.megatron(
    column={"blocks/qkv": (..., "tensor", None), "blocks/in": (..., "tensor")},
    row={"blocks/ao": (None, "tensor", None, None), "blocks/out": (None, "tensor", None)},
    head=["head/w"],
)


def bytes_by_rules(task, plan, batch):
    planned = px.analysis.planned(task, optax.sgd(1e-3), plan, batch)
    sent = sum(one.bytes_sent * (one.trips or 1) for one in planned.collectives)
    return sent, planned.memory.parameters


def split_dim(solution, name):
    """The dim of a parameter that is split, or None."""
    dims = solution.parameters[name].dims
    return next((dim for dim, entry in enumerate(dims) if entry), None)


def parameters_within(graph, size):
    """A budget for the parameters alone."""
    memory = memory_of(graph, Plan())
    for index, node in enumerate(graph.nodes):
        for choice in range(len(node.strategies)):
            held = memory[index][choice] / 2 if node.kind == "parameter" else 0.0
            memory[index][choice] = held
    return Budget(size, memory)


# --- Strategies -----------------------------------------------------------------------------------


def equation(fun, *shapes):
    like = [jax.ShapeDtypeStruct(shape, FLOAT) for shape in shapes]
    return jax.make_jaxpr(fun)(*like).jaxpr.eqns[-1], [Tensor(shape, FLOAT) for shape in shapes]


def found(fun, *shapes, axes=None, zero=()):
    eqn, operands = equation(fun, *shapes)
    operands = [Tensor(one.shape, one.dtype, i in zero) for i, one in enumerate(operands)]
    axes = axes or Axes({"tensor": 4})
    finder = StrategyFinder(axes, list(axes.sizes))
    strategies = finder.of(eqn, operands)
    assert finder.of(eqn, operands) is strategies
    return {(*one.inputs, "->", *one.outputs): one for one in strategies}


def test_a_product_is_split_over_one_index():
    """Free indices, the contracted one, or none; never where the shards do not divide."""
    of, none = TensorSharding.of, (None, None)
    strategies = found(jnp.matmul, (8, 12), (12, 6))
    assert list(strategies) == [
        (of(*none), of(*none), "->", of(*none)),
        (of(None, "tensor"), of("tensor", None), "->", of(*none, partial=["tensor"])),
        (of("tensor", None), of(*none), "->", of("tensor", None)),
    ]
    whole, summed, rows = strategies.values()
    assert (whole.product, summed.product, rows.product) == (
        (8, 6, 12, 1),
        (8, 6, 3, 1),
        (2, 6, 12, 1),
    )
    assert summed.traffic == 4 * (8 * 3 + 3 * 6 + 8 * 6)


def test_sums_stay_partial_through_linear_operations_alone():
    of, partial = TensorSharding.of, TensorSharding.of(None, partial=["tensor"])
    added = found(jnp.add, (8,), (8,))
    assert (partial, partial, "->", partial) in added
    assert not any(one[0] != one[1] for one in added)
    assert (partial, of(None), "->", partial) in found(jnp.multiply, (8,), (8,))
    assert (of("tensor"), "->", of("tensor")) in found(jnp.tanh, (8,))
    assert len(found(jnp.tanh, (8,))) == 2


def test_a_maximum_over_a_split_dim_is_reduced_at_once():
    strategies = found(lambda x: jnp.max(x, axis=1), (6, 8))
    (split,) = [one for one in strategies.values() if one.inputs[0].dims[1]]
    assert split.sent == (("all-reduce", ("tensor",), 2 * 6 * 4 * 3 / 4),)
    assert split.bytes_sent == 36


def test_rows_scattered_into_zeros_follow_what_is_wanted():
    """The table has no sharding yet, so that each possible one is a strategy."""
    indices = jnp.arange(4)[:, None]
    numbers = jax.lax.ScatterDimensionNumbers((1,), (0,), (0,))

    def scatter(table, rows):
        return jax.lax.scatter_add(table, indices, rows, numbers)

    like = [jax.ShapeDtypeStruct(shape, FLOAT) for shape in ((8, 12), (4, 12))]
    eqn = jax.make_jaxpr(scatter)(*like).jaxpr.eqns[-1]
    index = Tensor((4, 1), jnp.dtype("int32"))
    operands = [Tensor((8, 12), FLOAT, zero=True), index, Tensor((4, 12), FLOAT)]
    strategies = StrategyFinder(Axes({"tensor": 4}), ["tensor"]).of(eqn, operands)
    of = TensorSharding.of
    outputs = {(one.inputs[2], one.outputs[0]) for one in strategies}
    assert outputs == {
        (of(None, None), of(None, None)),
        (of(None, None), of("tensor", None)),
        (of(None, "tensor"), of(None, "tensor")),
        (of("tensor", None), of(None, None, partial=["tensor"])),
    }


def test_parts_of_an_axis_may_split_two_dims():
    axes = Axes({"tensor": 6}, {"tensor": (2, 3)})
    (both,) = [
        one
        for one in found(jnp.matmul, (4, 6), (6, 9), axes=axes).values()
        if one.inputs == (
            TensorSharding.of("tensor:0", None), TensorSharding.of(None, "tensor:1")
        )
    ]  # fmt: skip
    assert both.outputs == (TensorSharding.of("tensor:0", "tensor:1"),)


def test_an_operation_without_a_rule_is_replicated():
    strategies = found(lambda x: jax.lax.while_loop(lambda c: c[0, 0] > 0, jnp.sin, x), (4, 4))
    ((inputs, _, outputs),) = strategies
    assert inputs == outputs == TensorSharding.of(None, None)


# --- The graph ------------------------------------------------------------------------------------


def test_paths_lead_through_calls_and_loops():
    """Every path is that of a live equation, of a loop's boundary, or a parameter's name."""
    task, batch = block_task(3), TEXT
    graph = graph_of_step(task, Plan(tensor=4), batch)
    names = {node.path: node for node in graph.nodes if node.path}
    assert {"blocks/qkv", "embed/e"} <= set(names) == set(names)
    (forward, _) = sorted(
        {path.split("/")[0] for path, node in names.items() if node.kind == "row"}
    )
    rows = [path for path in names if path.startswith(f"{forward}/row")]
    assert [names[path].trips for path in rows] == [1] * len(rows)
    assert names[f"{forward}/carry0"].kind == "carry"
    (product, *_) = [
        node for path, node in names.items()
        if path.startswith(f"{forward}/") and node.kind == "dot_general"
    ]  # fmt: skip
    assert product.trips == 3
    choice = next(i for i, one in enumerate(names[rows[0]].strategies) if one.outputs[0].axes)
    row = names[rows[0]]
    assert row.pin(choice) == row.strategies[choice].outputs
    assert row.strategies[choice].inputs[0].dims[0] == ()


def test_microbatches_repeat_all_but_the_parameters():
    task, batch = perceptron(1), perceptron_rows(24)
    once, thrice = (
        graph_of_step(task, Plan(tensor=2, microbatches=count), batch) for count in (1, 3)
    )
    trips = {node.path: node.trips for node in thrice.nodes}
    assert trips["in0"] == 1
    assert {node.trips for node in thrice.nodes if node.kind == "dot_general"} == {3}
    assert [node.kind for node in once.nodes] == [node.kind for node in thrice.nodes]


def test_an_annotation_fixes_its_value():
    def loss(p, batch, keys):
        hidden = px.sharding.name(batch["x"] @ p["in"], "hidden")
        return jnp.sum(jnp.tanh(hidden) @ p["out"], axis=1)

    task = px.Task(init=lambda key: {"in": jnp.zeros((8, 8)), "out": jnp.zeros((8, 8))}, loss=loss)
    batch = {"x": jax.ShapeDtypeStruct((4, 8), jnp.float32)}
    kinds = [node.kind for node in graph_of_step(task, Plan(tensor=2), batch).nodes]
    assert "annotate" not in kinds
    graph = graph_of_step(task, Plan(tensor=2, shardings={"hidden": ("tensor", None)}), batch)
    forward, backward = (node for node in graph.nodes if node.kind == "annotate")
    assert [one.outputs[0] for one in forward.strategies] == [TensorSharding.of("tensor", None)]
    assert len(backward.strategies) == 3


# --- Costs ----------------------------------------------------------------------------------------


def test_a_parameter_costs_its_reduction_and_its_update():
    """ZeRO 1 sends what an all-reduce does, and updates a share of the state."""
    task, batch = perceptron(1), perceptron_rows(8)
    ratios = state_ratios(optax.adam(1e-3), jax.eval_shape(task.init, jax.random.key(0)))
    assert ratios["in0"] == 2
    graph = graph_of_step(task, Plan(data=4, tensor=2), batch)
    node = graph.nodes[graph.index("in0")]
    half = next(one for one in node.strategies if one.outputs[0].axes)
    size = 64 * 256 * 4 / 2
    machine = Machine("even", {"float32": 1e9}, 10**9, 1e9, (Level("node", 8, 1e8),), overhead=1e-6)
    costs, slow = (
        TimeCosts(dataclasses.replace(machine, correction=c), Plan()) for c in (1.0, 2.0)
    )
    every = [(each, one) for each in graph.nodes for one in each.strategies]
    assert all(slow.strategy(graph, *one) == 2 * costs.strategy(graph, *one) for one in every)

    def cost(zero, microbatches=1):
        plan = Plan(data=4, tensor=2, zero=zero, microbatches=microbatches)
        return TimeCosts(machine, plan, ratios).strategy(graph, node, half)

    assert cost(0) == pytest.approx(1.5 * size / 1e8 + 7 * size / 1e9)
    assert cost(1) == pytest.approx(1.5 * size / 1e8 + 7 / 4 * size / 1e9)
    assert cost(2, 3) == pytest.approx(4 * 0.75 * size / 1e8 + 7 / 4 * size / 1e9)
    assert cost(3, 3) == pytest.approx(9 * 0.75 * size / 1e8 + 7 / 4 * size / 1e9)


def test_memory_is_that_of_parameters_and_of_what_the_backward_pass_reads():
    def loss(p, batch, keys):
        return jnp.sum(jnp.sin(jnp.sin(batch["x"] @ p)), axis=1)

    task = px.Task(init=lambda key: jnp.zeros((8, 8)), loss=loss)
    batch = {"x": jax.ShapeDtypeStruct((4, 8), jnp.float32)}
    held = {}
    for remat in ("none", "full"):
        graph = graph_of_step(task, Plan(tensor=2, remat=remat), batch)
        memory = memory_of(graph, Plan(data=4, zero=1), {"": 2.0})
        at = graph.index("")
        assert memory[at][0] == 8 * 8 * 4 * (1 + 1 + 2 / 4)
        held[remat] = sum(max(each) for i, each in enumerate(memory) if i != at)
    # Both cosines and the rows' weights; recomputed, the inputs of the segments.
    assert held["none"] == 2 * 4 * 8 * 4 + 4 * 4
    assert held["full"] <= held["none"]


# --- The cheapest choice --------------------------------------------------------------------------

OPERATIONS = ("product", "product", "add", "multiply", "tanh", "transpose", "rows", "scale")


@st.composite
def small_steps(draw):
    """A function of two parameters and a batch with up to six equations."""
    size = st.sampled_from([4, 6, 12])
    rows, width, other = draw(size), draw(size), draw(size)
    shapes = [(rows, width), (width, other), (other, width)]
    steps = draw(
        st.lists(
            st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 20), st.integers(0, 20)),
            min_size=2,
            max_size=6,
        )
    )

    def fun(params, _, x):
        values = [x, *params]
        for name, first, second in steps:
            a, b = values[first % len(values)], values[second % len(values)]
            if name == "product" and a.ndim == b.ndim == 2 and a.shape[1] == b.shape[0]:
                values.append(a @ b)
            elif name in ("add", "multiply") and a.shape == b.shape:
                values.append(a + b if name == "add" else a * b)
            elif name == "transpose" and a.ndim == 2:
                values.append(a.T)
            elif name == "rows" and a.ndim == 2:
                values.append(jnp.sum(a, axis=0))
            elif name == "scale":
                values.append(2.0 * a)
            else:
                values.append(jnp.tanh(a))
        last = values[-1]
        grads = [next((v for v in values[::-1] if v.shape == p.shape), p) for p in params]
        return (last, grads), ()

    axes = Axes({"tensor": draw(st.sampled_from([2, 3, 4, 6]))})
    like = [jax.ShapeDtypeStruct(shape, FLOAT) for shape in shapes]
    args = like[1:], (), like[0]
    return graph_of(jax.make_jaxpr(fun)(*args), args, axes, trips=draw(st.integers(1, 3)))


def exhaustive(problem):
    """The cheapest cost, by the cost of every choice there is, and that choice."""
    nodes = problem.graph.nodes
    open_nodes = [i for i, allowed in enumerate(problem.allowed) if len(allowed) > 1]
    shape = [len(problem.allowed[i]) for i in open_nodes]
    assume(math.prod(shape) <= 400_000)
    total = np.zeros(shape)

    def over(members):
        """Each choice of some nodes, with its place in `total` without the other axes."""
        options = [problem.allowed[i] for i in members]
        return itertools.product(*(enumerate(each) for each in options))

    def added(members, cost):
        part = np.zeros([len(problem.allowed[i]) for i in members])
        for combination in over(members):
            choice = {i: one for i, (_, one) in zip(members, combination, strict=True)}
            part[tuple(at for at, _ in combination)] = cost(choice)
        # Axes in the order of `open_nodes`; those of size 1 broadcast.
        order = [i for i in open_nodes if i in members]
        part = np.squeeze(part, tuple(k for k, i in enumerate(members) if i not in open_nodes))
        present = [i for i in members if i in open_nodes]
        part = np.transpose(part, [present.index(i) for i in order])
        sizes = [len(problem.allowed[i]) if i in members else 1 for i in open_nodes]
        return part.reshape(sizes)

    for index in range(len(nodes)):
        total = total + added([index], lambda c, i=index: problem.node_costs[i][c[i]])
    for value in problem.graph.values:
        members = list(dict.fromkeys([value.node, *(use.node for use in value.uses)]))

        def copies(choice, value=value):
            every = problem.copies(value, choice)
            return sum(t * problem.reshard(value.tensor, *move) for *move, t in every)

        total = total + added(members, copies)
    best = np.unravel_index(np.argmin(total), total.shape)
    chosen = [allowed[0] for allowed in problem.allowed]
    for at, index in zip(best, open_nodes, strict=True):
        chosen[index] = problem.allowed[index][at]
    return float(total.min()), chosen


@given(
    small_steps(), st.sampled_from([BytesSent(), BytesSent(split_products=False), TimeCosts(SMALL)])
)
@draws(40, deadline=None)
def test_the_exact_choice_is_the_best_of_all(graph, costs):
    problem = Problem(graph, costs)
    best, chosen = exhaustive(problem)
    assert problem.cost(chosen) == pytest.approx(best, rel=1e-9)
    solution = exact.solve(graph, costs)
    # HiGHS tells costs apart down to 1e-7 of its own unit.
    apart = 1e-6 / costs.scale
    assert solution.cost == pytest.approx(best, rel=1e-5, abs=apart)
    assert solution.bound <= best * (1 + 1e-6) + apart
    assert (solution.cost - solution.bound) <= 1e-5 * best + apart


@given(small_steps(), st.data())
@draws(40, deadline=None)
def test_every_pin_is_kept(graph, data):
    """Pins that contradict each other are refused, and only those."""
    costs = TimeCosts(SMALL)
    pins = {}
    for _ in range(data.draw(st.integers(1, 3))):
        node = data.draw(st.sampled_from([n for n in graph.nodes if n.kind != "argument"]))
        choice = data.draw(st.integers(0, len(node.strategies) - 1))
        pins[f"{node.path} {node.kind}"] = node.pin(choice)
    possible, _ = exhaustive(Problem(graph, costs, pins))
    if possible == math.inf:
        with pytest.raises(
            px.errors.PlanError, match="of the pinned strategies contradict each other"
        ):
            exact.solve(graph, costs, pins)
        return
    solution = exact.solve(graph, costs, pins)
    assert solution.cost == pytest.approx(possible, rel=1e-5, abs=1e-6 / costs.scale)
    for name, inputs in pins.items():
        index = graph.index(name)
        assert graph.nodes[index].pin(solution.choice[index]) == inputs


def test_a_perceptron_is_split_by_columns_then_by_rows():
    """Fewer bytes than by hand: 49,638 of 49,734."""
    task, batch = perceptron(), perceptron_rows(32)
    rules = px.sharding.megatron(column=["in*"], row=["out*"], head=["head"])
    expert, size = bytes_by_rules(task, Plan(tensor=4, shardings=rules), batch)
    graph = graph_of_step(task, Plan(tensor=4), batch)
    solution = exact.solve(graph, BytesSent(), budget=parameters_within(graph, size))
    assert bytes_sent(graph, solution) <= 49638 < expert == 49734
    assert [split_dim(solution, name) for name in ("in0", "out0", "in1", "out1", "head")] == [
        1, 0, 1, 0, 1
    ]  # fmt: skip


def test_a_step_that_splits_nothing_sends_nothing():
    graph = graph_of_step(perceptron(1), Plan(tensor=4), perceptron_rows(8))
    assert bytes_sent(graph, exact.solve(graph, BytesSent(split_products=False))) == 0
    assert bytes_sent(graph, exact.solve(graph, BytesSent())) > 0


def test_a_large_batch_is_not_split_by_columns():
    """1,024 rows: the parameters are gathered, which sends a quarter of what activations would."""
    task, batch = perceptron(), perceptron_rows(1024)
    rules = px.sharding.megatron(column=["in*"], row=["out*"], head=["head"])
    expert, size = bytes_by_rules(task, Plan(tensor=4, shardings=rules), batch)
    graph = graph_of_step(task, Plan(tensor=4), batch)
    solution = exact.solve(graph, BytesSent(), budget=parameters_within(graph, size))
    assert bytes_sent(graph, solution) <= 442374 < expert == 1591302
    held = sum(
        solution.parameters[path].shard_bytes(one.shape, 4, graph.axes.sizes)
        for path, one in graph.parameters.items()
    )
    assert held <= size


@pytest.mark.ci
def test_a_transformer_sends_no_more_than_by_expert_rules_at_any_depth():
    """The bytes grow with the depth, the program does not."""
    sizes = set()
    for depth, known in ((4, 791430), (48, 8935302)):
        task = block_task(depth)
        expert, size = bytes_by_rules(task, Plan(tensor=4, shardings=MEGATRON), TEXT)
        graph = graph_of_step(task, Plan(tensor=4), TEXT)
        solution = exact.solve(graph, BytesSent(), budget=parameters_within(graph, size))
        assert bytes_sent(graph, solution) <= known < expert
        assert solution.bound > (1 - 1e-5) * solution.cost
        sizes.add((len(graph.nodes), solution.variables))
    assert len(sizes) == 1


def test_layers_that_are_equal_are_decided_once():
    """Unrolled layers, forward and backward: as many variables for seven as for four."""
    programs = {}
    for layers in (4, 7):
        task, batch = perceptron(layers), perceptron_rows(32)
        rules = px.sharding.megatron(column=["in*"], row=["out*"], head=["head"])
        expert, size = bytes_by_rules(task, Plan(tensor=4, shardings=rules), batch)
        graph = graph_of_step(task, Plan(tensor=4), batch)
        classes = classes_of(graph)[0]
        # The first layer has no gradient of its input.
        assert len({classes[graph.index(f"in{i}")] for i in range(1, layers)}) == 1
        assert len({classes[graph.index(name)] for name in ("in0", "in1", "out0", "out1")}) == 3
        # The costs of all layers are in the program: it has the cost of its own choice.
        solution = exact.solve(graph, BytesSent(), budget=parameters_within(graph, size))
        assert solution.bound == pytest.approx(solution.cost, rel=1e-6)
        assert bytes_sent(graph, solution) <= expert
        programs[layers] = solution.variables
        # One layer pinned otherwise is decided apart from the others.
        pin = {"in1": (TensorSharding.of("tensor", None),)}
        apart = exact.solve(graph, BytesSent(), pin)
        assert split_dim(apart, "in1") == 0
        assert {split_dim(apart, f"in{i}") for i in range(2, layers)} == {1}
        assert apart.bound == pytest.approx(apart.cost, rel=1e-6)
    assert programs[4] == programs[7]


@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize(
    ("task", "batch"),
    [(perceptron(), perceptron_rows(32)), (block_task(4), TEXT)],
    ids=["perceptron", "transformer"],
)
def test_what_is_predicted_is_what_the_plan_sends(task, batch, remat):
    """To the byte: every strategy as a plan says it, partitioned; and the norm of the gradient."""
    plan = Plan(tensor=4, remat=remat)
    graph = graph_of_step(task, plan, batch)
    solution = exact.solve(graph, BytesSent())
    params = jax.eval_shape(task.init, jax.random.key(0))
    fun = gradient(task, "float32", remat=remat)
    closed = jax.make_jaxpr(fun)(params, (), abstract_rows(batch))

    def entries(shardings):
        return tuple(entries_of(one.dims, one.partial) for one in shardings)

    equations = []
    for name, shardings in pins_of(graph, solution).items():
        path, _, kind = name.partition(" ")
        operator = kind if path.rpartition("/")[2].isdigit() else "scan"
        equations.append(Strategy(f"{path} {operator}", entries(shardings)))
    plan = dataclasses.replace(
        plan,
        shardings={path: entries([one])[0] for path, one in solution.parameters.items()},
        strategies=Strategies(traced_as(closed.jaxpr), tuple(equations)),
    )
    sent, _ = bytes_by_rules(task, plan, batch)
    norm = 2 * 4 * 3 / 4
    assert sent == bytes_sent(graph, solution) + norm


def test_a_pinned_strategy_holds_and_costs_no_less():
    task, batch = perceptron(), perceptron_rows(32)
    graph = graph_of_step(task, Plan(tensor=4), batch)
    free = exact.solve(graph, TimeCosts(SMALL))
    pins = {"in0": (TensorSharding.of("tensor", None),)}
    solution = exact.solve(graph, TimeCosts(SMALL), pins)
    assert solution.parameters["in0"] == pins["in0"][0]
    assert solution.cost >= free.cost * (1 - 1e-9)
    # The equations that were found can be pinned, too; a parameter may be stored as none reads it.
    again = exact.solve(graph, TimeCosts(SMALL), pins | pins_of(graph, solution))
    assert again.cost == pytest.approx(solution.cost)
    assert pins_of(graph, again) == pins_of(graph, solution)


def test_pins_that_cannot_hold_are_refused_by_name():
    task, batch = perceptron(1), perceptron_rows(8)
    graph = graph_of_step(task, Plan(tensor=4), batch)
    with pytest.raises(
        px.errors.PlanError, match=r"'in1' belongs to no equation.* Did you mean 'in0'"
    ):
        exact.solve(graph, BytesSent(), {"in1": (TensorSharding.of(None, None),)})
    with pytest.raises(
        px.errors.PlanError, match=r"pins 'in0', in0, to the inputs .* it cannot be computed"
    ):
        exact.solve(graph, BytesSent(), {"in0": (TensorSharding.of("data", None),)})
    with pytest.raises(
        px.errors.PlanError, match=r"keeps parameters, gradients, .* within 1,000 bytes"
    ):
        exact.solve(graph, BytesSent(), budget=Budget(1000, memory_of(graph)))
    with pytest.raises(
        px.errors.PlanError, match="found no shardings over `tensor` in 1e-09 seconds"
    ):
        exact.solve(graph, BytesSent(), seconds=1e-9)
    products = [node for node in graph.nodes if node.kind == "dot_general"]
    whole = {node.path: node.pin(0) for node in products}
    adds = [node for node in graph.nodes if node.kind == "add" and len(node.strategies) > 3]
    partial = TensorSharding.of(None, None, partial=["tensor"])
    for node in adds:
        if (partial, partial) in [node.pin(i) for i in range(len(node.strategies))]:
            with pytest.raises(
                px.errors.PlanError, match="of the pinned strategies contradict each other"
            ):
                exact.solve(graph, TimeCosts(SMALL), {**whole, node.path: (partial, partial)})
            return
    raise AssertionError("no sum of two sums")
