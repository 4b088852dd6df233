"""A plan found is never slower, by its estimate, than those that experts would try.

The grid is of networks, machines and links between them. An expert's plan is written by hand here:
nothing of the search says which these are. `expert_plans.json` has what was found at the last
change of a search, and what is found now is no slower; it is written anew by

    python -m tests.unit.test_expert_plans
"""

import dataclasses
import functools
import itertools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from benchmarks import gpt
from tests import models
from tests.promotion import allowed
from tests.zoo.test_zoo import MODELS
from tests.zoo.test_zoo import task as zoo_task

import plurax as px
from plurax.analysis import estimate as estimates
from plurax.machine_fields import Level
from plurax.planner.costs import update_bytes
from plurax.planner.experts import in_proportion, is_expert, machines_of_kinds, used_devices
from plurax.planner.sizes import Sizes

A100, V100 = px.Machine.preset("A100-80GB"), px.Machine.preset("V100-32GB")
NODE, RACK = 150e9, 6.25e9


def two_nodes(between):
    machine = px.Machine.preset("4xA100-80GB", nodes=2)
    node, rack = machine.levels
    return dataclasses.replace(machine, levels=[node, dataclasses.replace(rack, bandwidth=between)])


def uneven(*groups):
    every = sum(count for count, _ in groups)
    levels = [Level("node", 4, NODE, 3.4e-6), Level("rack", every, RACK, 9.6e-6)]
    return px.Machine.uneven("lab", groups, levels)


MACHINES = {
    "one device": A100,
    "a node": px.Machine.preset("4xA100-80GB"),
    "two nodes": two_nodes(25e9),
    "two nodes far apart": two_nodes(1e8),
    "fast and slow": uneven((4, A100), (4, V100)),
    "slow and fast": uneven((4, V100), (4, A100)),
    "few fast": uneven((2, A100), (6, V100)),
    "TPUs": px.Machine.preset("4xTPU-v5e"),
    "cores": px.Machine("cores", {"float32": 1e11}, 8e9, 1e10, [Level("node", 4, 5e9, 2e-5)],
                        overhead=5e-6),
}  # fmt: skip


def perceptron(width, rows):
    """Six square layers, of which every second one is split by rows."""

    def init(key):
        return {f"w{layer}": jnp.zeros((width, width)) for layer in range(6)}

    def loss(params, batch, keys):
        x = batch["x"]
        for layer in range(6):
            x = jnp.tanh(x @ params[f"w{layer}"])
        return jnp.mean(x**2, -1)

    rules = {f"w{n}": ("tensor", None) if n % 2 else (None, "tensor") for n in range(6)}
    return px.Task(init=init, loss=loss), {"x": jnp.zeros((rows, width))}, rules


def recommender(words, width, rows):
    """Two large tables whose rows meet in a perceptron; the rows are split, and its hidden dim."""

    def init(key):
        return {
            "users": jnp.zeros((words, width)), "items": jnp.zeros((words, width)),
            "hidden": jnp.zeros((2 * width, 8 * width)), "out": jnp.zeros((8 * width, 1)),
        }  # fmt: skip

    def loss(params, batch, keys):
        pair = params["users"][batch["user"]], params["items"][batch["item"]]
        x = jax.nn.relu(jnp.concatenate(pair, axis=1) @ params["hidden"]) @ params["out"]
        return (x[:, 0] - batch["rating"]) ** 2

    batch = {name: jnp.zeros(rows, jnp.int32) for name in ("user", "item")}
    rules = dict.fromkeys(("users", "items", "out"), ("tensor", None))
    rules["hidden"] = (None, "tensor")
    return px.Task(init=init, loss=loss), batch | {"rating": jnp.zeros(rows)}, rules


def from_zoo(name, rows):
    model = MODELS[name]
    return zoo_task(model), model.data(np.random.default_rng(0), rows), model.rules


NETWORKS = {
    "small perceptron": lambda: perceptron(512, 1024),
    "large perceptron": lambda: perceptron(4096, 4096),
    "experts": lambda: from_zoo("experts", 64),
    "fourier": lambda: from_zoo("fourier", 64),
    "recommender": lambda: recommender(200_000, 64, 16384),
    "transformer": lambda: (models.transformer_stack(), models.text(64), models.megatron()),
}


def written_by_hand(machine, rules, rows, layers):
    """Plans of data, tensor in a node, and pipelines, as an expert would write them."""
    node = machine.levels[0].devices if machine.levels else 1
    for used in sorted({machine.devices, node, 1}):
        for pipeline, tensor in itertools.product((1, 2), (1, 2, 4)):
            data = used // pipeline // tensor
            if data * pipeline * tensor != used or tensor > node or pipeline > layers:
                continue
            own, schedules = rows // data, ("1f1b", "eager-1f1b")[: min(pipeline, 2)]
            for each, zero, remat, schedule in itertools.product(
                {own, 1, 2, 4, 8}, range(4) if data > 1 else (0,), ("none", "dots", "full"),
                schedules,
            ):  # fmt: skip
                microbatches = own // each
                if own % each or microbatches < pipeline or (pipeline > 1 and zero > 1):
                    continue
                yield px.Plan(
                    data=data, pipeline=pipeline, tensor=tensor, microbatches=microbatches,
                    zero=zero, remat=remat, schedule=schedule,
                    shardings=rules if tensor > 1 else {},
                )  # fmt: skip


def alone(machine):
    """The machine, and the devices of each of its kinds."""
    return [machine, *(dataclasses.replace(kind, levels=[Level("node", count, NODE, 3.4e-6)])
                       for count, kind in machine.groups if count in (2, 4))]  # fmt: skip


def fastest_by_hand(task, batch, rules, machine):
    """The estimate of the fastest plan by hand that fits."""
    rows = jax.tree.leaves(batch)[0].shape[0]
    estimates = []
    for some in alone(machine):
        for plan in written_by_hand(some, rules, rows, task.stack.depth if task.stack else 1):
            try:
                estimated = px.estimate(task, optax.adam(1e-3), plan, batch, some)
            except (px.errors.PlanError, px.errors.MachineError):
                continue
            if estimated.fits:
                estimates.append(estimated)
    return min(estimates, key=lambda estimated: estimated.seconds)


GRID = [*itertools.product(NETWORKS, MACHINES)]
DEFAULT = {("small perceptron", "a node"), ("large perceptron", "a node")}
DOUBLE = ("experts", "fourier")  # in float64, as the zoo has them
STORED = Path(__file__).with_name("expert_plans.json")


@functools.lru_cache(maxsize=1)
def traces_of(network):
    """What was recorded of a network, by plan and platform: the machines of one share them."""
    recorded, record = {}, estimates.record_steady_step

    def remembered(task, optimizer, plan, batch, platform):
        key = plan.to_toml(), str(jax.tree.map(jnp.shape, batch)), platform
        if key not in recorded:
            recorded[key] = record(task, optimizer, plan, batch, platform)
        return recorded[key]

    return remembered


@pytest.mark.ci
@pytest.mark.parametrize(
    ("network", "machine"),
    [pytest.param(*case, marks=[] if case in DEFAULT else pytest.mark.slow) for case in GRID],
)
def test_no_expert_is_faster(request, monkeypatch, network, machine):
    if network in DOUBLE:
        request.getfixturevalue("x64")
    task, batch, rules = NETWORKS[network]()
    found = px.search(task, optax.adam(1e-3), batch, MACHINES[machine])
    stored = json.loads(STORED.read_text())[network][machine]
    assert found.ranked[0].seconds <= stored["seconds"] * (1 + 1e-9), stored
    monkeypatch.setattr(estimates, "record_steady_step", traces_of(network))
    by_hand = fastest_by_hand(task, batch, rules, MACHINES[machine])
    assert found.ranked[0].seconds <= by_hand.seconds * (1 + 1e-9), by_hand


def stored_of(found):
    """What is stored of a search."""
    best = found.ranked[0]
    return {
        "seconds": best.seconds, "plan": best.plan.sizes_text(), "devices": found.machine.name,
        "gap": found.gap, "evaluations": found.evaluations,
    }  # fmt: skip


def write():
    """Search all of the grid, and store what is found."""
    grid = {network: {} for network in NETWORKS}
    for network, machine in GRID:
        jax.config.update("jax_enable_x64", network in DOUBLE)
        task, batch, _ = NETWORKS[network]()
        found = px.search(task, optax.adam(1e-3), batch, MACHINES[machine])
        grid[network][machine] = stored_of(found)
    STORED.write_text(json.dumps(grid, indent=2) + "\n")


@pytest.mark.ci
@pytest.mark.slow
def test_no_stages_by_hand_are_faster_on_512_devices():
    """GPT of 175 billion parameters, of which most plans do not fit 32 GB. ZeRO 3 does, and takes
    1.3 times as long as stages that begin a microbatch early."""
    model, machine = gpt.GPT3, px.Machine.preset("8xV100-32GB", nodes=64)
    task, batch, optimizer = allowed(model.task()), model.batch(1536), optax.adamw(1e-4)
    found = px.search(task, optimizer, batch, machine, pinned={"precision": "bfloat16"})
    by_hand = []
    for pipeline, rows, schedule in itertools.product((16, 32), (1, 2), ("1f1b", "eager-1f1b")):
        data = 64 // pipeline
        plan = px.Plan(
            data=data, pipeline=pipeline, tensor=8, microbatches=1536 // data // rows, zero=1,
            remat="full", schedule=schedule, precision="bfloat16", shardings=gpt.MEGATRON,
        )  # fmt: skip
        estimated = px.estimate(task, optimizer, plan, batch, machine)
        by_hand += [estimated.seconds] if estimated.fits else []
    assert found.ranked[0].seconds <= min(by_hand)


@pytest.mark.ci
def test_data_parallelism_alone_is_no_faster_where_bounds_count_what_is_fused():
    """The derivatives of a network by its inputs: its bound under `data=8` is above the best."""
    dims = (3, 512, 512, 512, 512, 512, 512, 3)

    def init(key):
        shapes = itertools.pairwise(dims)
        return [{"w": jnp.zeros(shape), "b": jnp.zeros(shape[1])} for shape in shapes]

    def network(params, point):
        for layer in params[:-1]:
            point = jnp.tanh(point @ layer["w"] + layer["b"])
        return point @ params[-1]["w"] + params[-1]["b"]

    def residual(params, point):
        def velocity(point):
            return network(params, point)

        slopes = jax.jacfwd(velocity)(point)
        curves = jax.jacfwd(jax.jacfwd(velocity))(point)
        return jnp.sum((slopes @ velocity(point) - jnp.trace(curves, axis1=1, axis2=2)) ** 2)

    def loss(params, batch, keys):
        return jax.vmap(residual, (None, 0))(params, batch["points"])

    task, optimizer = allowed(px.Task(init=init, loss=loss)), optax.adam(1e-3)
    batch = {"points": jax.ShapeDtypeStruct((65536, 3), jnp.float32)}
    machine = px.Machine.preset("8xB200-180GB")
    found = px.search(task, optimizer, batch, machine)
    plain = px.estimate(task, optimizer, px.Plan(data=8), batch, machine)
    assert found.ranked[0].seconds <= plain.seconds


def u_net(width, depth):
    """Convolutions down to an eighth of the image and up again, beside what was on the way down."""
    widths = [width * 2**level for level in range(depth)]

    def conv(x, kernel, stride=1):
        dims = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(
            x, kernel, (stride, stride), "SAME", dimension_numbers=dims
        )

    def init(key):
        params = {"in": jnp.zeros((3, 3, 3, width)), "out": jnp.zeros((1, 1, width, 2))}
        params |= {f"at{n}": jnp.zeros((3, 3, here, here)) for n, here in enumerate(widths)}
        for n, (here, below) in enumerate(itertools.pairwise(widths)):
            params[f"down{n}"] = jnp.zeros((3, 3, here, below))
            params[f"up{n}"] = jnp.zeros((3, 3, here + below, here))
        return params

    def loss(params, batch, keys):
        x, beside = conv(batch["x"], params["in"]), []
        for n in range(depth):
            x = jax.nn.silu(conv(x, params[f"at{n}"]))
            if n < depth - 1:
                beside.append(x)
                x = conv(x, params[f"down{n}"], 2)
        for n in reversed(range(depth - 1)):
            x = jnp.concatenate([jnp.repeat(jnp.repeat(x, 2, 1), 2, 2), beside[n]], -1)
            x = jax.nn.silu(conv(x, params[f"up{n}"]))
        return jnp.mean((conv(x, params["out"]) - batch["y"]) ** 2, (1, 2, 3))

    return px.Task(init=init, loss=loss)


@pytest.mark.ci
def test_data_parallelism_alone_is_no_faster_where_more_is_expected_of_it():
    """Of a U-Net `zero=1` comes first. What is expected of `data=4` is more, its bound is less."""
    task, optimizer = allowed(u_net(64, 4)), optax.adam(1e-3)
    shapes = {"x": (64, 128, 128, 3), "y": (64, 128, 128, 2)}
    batch = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    found = px.search(task, optimizer, batch, MACHINES["a node"])
    plain = px.estimate(task, optimizer, px.Plan(data=4), batch, MACHINES["a node"])
    assert found.ranked[0].seconds <= plain.seconds


@pytest.mark.ci
def test_plans_that_are_nearly_as_fast_get_the_faster_of_two_solutions():
    """`tensor=4` is the faster one as both are solved first, `tensor=2` with columns split."""
    widths = (1024, 4096, 4096, 4096, 4096, 10)

    def init(key):
        return [(jnp.zeros(shape), jnp.zeros(shape[1])) for shape in itertools.pairwise(widths)]

    def loss(params, batch, keys):
        x = batch["x"]
        for weights, bias in params[:-1]:
            x = jax.nn.relu(x @ weights + bias[None])
        return ((x @ params[-1][0] + params[-1][1][None] - batch["y"]) ** 2).sum(-1)

    task, optimizer = px.Task(init=init, loss=loss), optax.adam(1e-3)
    shapes = {"x": (4096, 1024), "y": (4096, 10)}
    batch = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    columns = {f"{layer}/0": (None, "tensor") for layer in range(4)}
    columns |= {f"{layer}/1": ("tensor",) for layer in range(4)}
    machine = px.Machine.preset("8xH100-80GB")
    plan = px.Plan(data=4, tensor=2, zero=3, shardings=columns)
    by_hand = px.estimate(task, optimizer, plan, batch, machine)
    found = px.search(task, optimizer, batch, machine)
    assert found.ranked[0].seconds <= by_hand.seconds * (1 + 1e-9)


@pytest.mark.ci
def test_devices_are_used_that_do_not_divide_the_examples():
    """Of six three at the most divide 4,096. Each may have 683, and 4 have 1,024."""
    (task, batch, rules), optimizer = perceptron(4096, 4096), optax.adam(1e-3)
    machine = px.Machine.preset("6xH100-80GB")
    found = px.search(task, optimizer, batch, machine)
    for sizes in ({"data": 6, "zero": 1}, {"data": 3, "tensor": 2}, {"data": 1, "tensor": 4}):
        plan = px.Plan(**sizes, shardings=rules if "tensor" in sizes else {})
        by_hand = px.estimate(task, optimizer, plan, batch, machine)
        assert found.ranked[0].seconds <= by_hand.seconds * (1 + 1e-9), plan


@pytest.mark.ci
def test_on_uneven_machines_the_devices_of_the_best_plan_are_named():
    task, batch, _ = perceptron(512, 1024)
    machine, pinned = MACHINES["slow and fast"], {"tensor": 1, "remat": "none"}
    found = px.search(task, optax.adam(1e-3), batch, machine, pinned=pinned)
    assert found.machine.name == "devices 4 to 7 of lab, A100-80GB"
    assert "plans for devices 4 to 7 of lab, A100-80GB" in str(found)
    assert found.machine.memory == A100.memory


THIRD = dataclasses.replace(A100, name="third", flops={"float32": A100.flops["float32"] / 3})
MIXED = px.Machine.uneven("mixed", [(4, A100), (4, THIRD)], [Level("node", 8, NODE, 3.4e-6)])


@pytest.mark.ci
def test_replicas_on_slower_devices_get_fewer_rows():
    """They are faster than with equal rows, and than the fast devices alone."""
    task, batch, _ = perceptron(4096, 32768)
    pins = {"tensor": 1, "pipeline": 1, "remat": "none"}
    found = px.search(task, optax.adam(1e-3), batch, MIXED, pinned=pins, evaluations=12)
    best = found.ranked[0]
    assert found.machine == MIXED
    assert (best.plan.data, best.plan.microbatches) == (8, (3, 3, 3, 3, 1, 1, 1, 1))

    def seconds(machine, **plan):
        return px.estimate(task, optax.adam(1e-3), px.Plan(**plan), batch, machine).seconds

    equal = [
        seconds(some, data=some.devices, microbatches=m, zero=zero)
        for some, m, zero in itertools.product(alone(MIXED)[:2], (1, 2), (0, 1))
    ]
    assert best.seconds < 0.9 * min(equal)
    assert best.seconds == seconds(
        MIXED, data=8, microbatches=best.plan.microbatches, zero=best.plan.zero
    )


def test_pinned_microbatches_of_replicas_hold():
    task, batch, _ = perceptron(512, 1024)
    pins = {"data": 2, "microbatches": (1, 3), "tensor": 1, "remat": "none"}
    found = px.search(task, optax.adam(1e-3), batch, MIXED, pinned=pins, evaluations=8)
    assert {one.plan.microbatches for one in found.ranked} == {(1, 3)}
    assert {one.plan.zero for one in found.ranked} == {0, 1}


def test_microbatches_in_proportion():
    fewest, *_ = in_proportion(MIXED, 8, 1, 96, "float32")
    assert fewest == (2, 2, 2, 2, 1, 1, 1, 1)
    assert in_proportion(MIXED, 4, 2, 8, "float32") == [(3, 3, 1, 1)]
    assert in_proportion(MIXED, 2, 4, 16, "float32") == [(3, 1)]  # (12, 4) is no faster
    assert in_proportion(MIXED, 1, 8, 6, "float32") == []  # one replica of both kinds
    assert in_proportion(MIXED, 4, 1, 6, "float32") == []  # on the first devices, which are alike
    assert in_proportion(A100, 1, 1, 6, "float32") == []


def test_kinds_alone():
    assert machines_of_kinds(A100) == []
    first, second = machines_of_kinds(uneven((2, A100), (6, V100)))
    assert (first.devices, second.devices) == (2, 6)
    # The second kind begins inside a node: its devices are in blocks of two.
    assert [level.devices for level in second.levels] == [2, 6]
    assert [level.bandwidth for level in second.levels] == [NODE, RACK]
    assert used_devices(uneven((2, A100), (6, V100))) == {8, 4, 2, 6, 1}


@pytest.mark.parametrize(
    ("sizes", "wanted"),
    [
        ((8, 1, 1, 1, 0, "none", "1f1b", 1), True),
        ((8, 1, 1, 8, 3, "full", "1f1b", 1), True),
        ((1, 2, 4, 64, 0, "full", "gpipe", 1), True),
        ((1, 2, 4, 32, 1, "full", "eager-1f1b", 1), True),
        ((4, 1, 1, 1, 0, "none", "1f1b", 1), True),  # a node
        ((2, 1, 1, 1, 0, "none", "1f1b", 1), False),
        ((8, 1, 1, 2, 0, "none", "1f1b", 1), True),  # of 4 rows
        ((4, 1, 1, 1, 0, "none", "interleaved", 1), False),
        ((1, 1, 8, 1, 0, "none", "1f1b", 1), False),  # `tensor` of two nodes
        ((4, 1, 1, 1, 1, "dots", "1f1b", 1), True),
        ((1, 1, 4, 1, 0, "none", "1f1b", 1), True),
        ((1, 1, 4, 2, 0, "none", "1f1b", 1), False),  # of 32 rows
        ((2, 1, 4, (3, 1), 0, "none", "1f1b", 1), True),  # of 16 rows, in proportion
    ],
)
def test_what_experts_try(sizes, wanted):
    assert is_expert(Sizes(*sizes), two_nodes(25e9), 64) == wanted


H100 = px.Machine.preset("8xH100-80GB")
ALONE = {"data": 1, "pipeline": 1, "microbatches": 1, "zero": 0, "remat": "none"}
ALONE |= {"schedule": "1f1b"}


def biased():
    """Feed-forward layers with biases, whose tokens are split between them, as in Megatron."""

    def init(key):
        up, down = jnp.zeros((2048, 8192)), jnp.zeros((8192, 2048))
        return {"up": up, "down": down, "gain": jnp.ones(2048), "bias": jnp.zeros(2048)}

    def block(params, x, batch, keys):
        x = px.sharding.name(x, "residual")
        norm = x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-5) * params["gain"][None, None]
        x = x + jax.nn.gelu(norm @ params["up"]) @ params["down"] + params["bias"][None, None]
        return px.sharding.name(x, "residual")

    task = px.stack(
        embed=(lambda key: jnp.zeros((64, 2048)), lambda params, batch, keys: batch["x"] @ params),
        block=(init, block),
        head=(lambda key: {}, lambda params, x, batch, keys: jnp.mean(x**2, (1, 2))),
        depth=8,
    )
    rules = {"*/up": (None, None, "tensor"), "*/down": (None, "tensor", None)}
    batch = {"x": jax.ShapeDtypeStruct((32, 1024, 64), jnp.float32)}
    return task, batch, rules, {"residual": (..., "tensor", None)}


def uneven_widths():
    """Residual layers of different widths, each a stage or a part of one."""
    widths = (1024, 1024, 4096, 4096, 1024, 1024, 8192, 1024)
    task, batch = models.uneven_parts(widths)
    rules = {"*/up": (None, "tensor"), "*/down": ("tensor", None)}
    return task, batch, rules, {}


@pytest.mark.parametrize(
    ("network", "sizes"),
    [
        (biased, {"microbatches": 4, "remat": "dots", "precision": "bfloat16"}),
        pytest.param(
            uneven_widths,
            {"microbatches": 2, "remat": "none", "schedule": "eager-1f1b"},
            marks=pytest.mark.ci,
        ),
    ],
    ids=["biased", "uneven"],
)
def test_no_shardings_by_hand_are_faster_in_stages(network, sizes):
    """A plan has no strategies of equations there: what operator rules decide is searched."""
    (task, batch, rules, annotated), optimizer = network(), optax.adam(1e-3)
    sizes = {"data": 1, "pipeline": 2, "tensor": 4, "zero": 0, "schedule": "1f1b"} | sizes
    plan = px.Plan(**sizes, shardings=annotated | rules)
    by_hand = px.estimate(task, optimizer, plan, batch, H100)
    pinned = sizes | {"shardings": annotated}
    found = px.search(task, optimizer, batch, H100, pinned=pinned, count=1, memory=1e15)
    assert found.ranked[0].seconds <= by_hand.seconds * (1 + 1e-9)


def language_model(width, tokens, rows, depth, *, fused):
    """A GPT with learned positions and a head of its own; queries, keys, values apart or fused."""
    heads, words = width // 64, 8 * width
    shapes = {"up": (width, 4 * width), "down": (4 * width, width), "o": (heads, 64, width)}
    shapes |= {"qkv": (width, 3, heads, 64)} if fused else {}
    shapes |= {} if fused else dict.fromkeys("qkv", (width, heads, 64))

    shapes |= {"first": (width,), "second": (width,)}

    def norm(x, gain):
        return x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-5) * gain[None, None]

    def embed(params, batch, keys):
        return params["table"][batch["x"]] + params["position"][None]

    def block(params, x, batch, keys):
        normed = norm(x, params["first"])
        if fused:
            every = jnp.einsum("btw,wchd->btchd", normed, params["qkv"])
            q, k, v = (every[:, :, index] for index in range(3))
        else:
            q, k, v = (jnp.einsum("btw,whd->bthd", normed, params[name]) for name in "qkv")
        hidden = jnp.arange(tokens)[:, None] < jnp.arange(tokens)[None]
        scores = jnp.where(hidden[None, None], -1e9, jnp.einsum("bthd,bshd->bhts", q, k) / 8)
        mixed = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v)
        x = x + jnp.einsum("bthd,hdw->btw", mixed, params["o"])
        return x + jax.nn.gelu(norm(x, params["second"]) @ params["up"]) @ params["down"]

    def head(params, x, batch, keys):
        logits = norm(x, params["gain"]) @ params["out"]
        right = jnp.take_along_axis(logits, batch["y"][..., None], -1)[..., 0]
        return (jax.nn.logsumexp(logits, -1) - right).mean(-1)

    embedding = {"table": jnp.zeros((words, width)), "position": jnp.zeros((tokens, width))}
    task = px.stack(
        embed=(lambda key: embedding, embed),
        block=(lambda key: {name: jnp.zeros(shape) for name, shape in shapes.items()}, block),
        head=(lambda key: {"gain": jnp.ones(width), "out": jnp.zeros((width, words))}, head),
        depth=depth,
    )
    batch = {name: jax.ShapeDtypeStruct((rows, tokens), jnp.int32) for name in "xy"}
    rules = {"*/up": (..., "tensor"), "*/down": (None, "tensor", None)}
    rules |= {"*/o": (None, "tensor", None, None)}
    if not fused:
        return task, batch, rules | {"*/[qkv]": (None, None, "tensor", None)}
    rules |= {"*/qkv": (..., "tensor", None), "embed/table": (None, "tensor")}
    return task, batch, rules | {"head/out": (None, "tensor")}


def long_short_term(width, tokens, rows):
    """Two LSTMs, one on the other, whose cells are split by their numbers, and a head by words."""
    words, square = 8 * width, (2, width, 4, width)

    def init(key):
        shapes = {"table": (words, width), "out": (width, words), "inside": square, "again": square}
        return {name: jnp.zeros(shape) for name, shape in shapes.items()}

    def loss(params, batch, keys):
        x = params["table"][batch["x"]]
        for layer in range(2):
            again = params["again"][layer]

            def cell(carry, sums, again=again):
                short, long = carry
                sums = sums + jnp.einsum("bw,wcd->bcd", short, again)
                first, second, third, new = (sums[:, gate] for gate in range(4))
                long = jax.nn.sigmoid(first) * long + jax.nn.sigmoid(second) * jnp.tanh(new)
                short = jax.nn.sigmoid(third) * jnp.tanh(long)
                return (short, long), short

            sums = jnp.einsum("btw,wcd->tbcd", x, params["inside"][layer])
            start = jnp.zeros((x.shape[0], width), x.dtype)
            x = jax.lax.scan(cell, (start, start), sums)[1].transpose(1, 0, 2)
        logits = x @ params["out"]
        right = jnp.take_along_axis(logits, batch["y"][..., None], -1)[..., 0]
        return (jax.nn.logsumexp(logits, -1) - right).mean(-1)

    batch = {name: jax.ShapeDtypeStruct((rows, tokens), jnp.int32) for name in "xy"}
    rules = {"inside": (..., "tensor"), "again": (..., "tensor"), "out": (None, "tensor")}
    return px.Task(init=init, loss=loss), batch, rules


BY_HAND = {
    # Each device starts kernels for its share of the tokens, and more where rows are looked up.
    "tokens": (functools.partial(language_model, 256, 128, 16, 4, fused=False),
               px.Machine.preset("8xTPU-v5p"), {"context": 2, "tensor": 2, "stream": 128}),
    # A few positions that are split by tokens would split all that follows.
    "stages": (functools.partial(language_model, 1024, 512, 32, 8, fused=True),
               H100, {"pipeline": 2, "tensor": 4, "microbatches": 4}),
    # What is reduced over `tensor` is sent while a device computes.
    "hidden": (functools.partial(long_short_term, 1024, 64, 64), H100, {"tensor": 4}),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", ["hidden", *(pytest.param(one, marks=pytest.mark.ci) for one in ("tokens", "stages"))]
)
def test_no_shardings_by_hand_are_faster(name):
    network, machine, sizes = BY_HAND[name]
    task, batch, rules = network()
    optimizer, sizes = optax.adam(1e-3), ALONE | sizes
    by_hand = px.estimate(task, optimizer, px.Plan(**sizes, shardings=rules), batch, machine)
    found = px.search(task, optimizer, batch, machine, pinned=sizes, count=1, memory=1e15)
    assert found.ranked[0].seconds <= by_hand.seconds * (1 + 1e-9)


@pytest.mark.ci
def test_what_stages_alone_have_takes_longer_to_update():
    """Of a stage they are packed: taken out of a buffer, put back, and chosen; of all, added up."""
    task, batch, _, _ = uneven_widths()
    size = 4 * sum(2 * 1024 * width for width in (1024, 1024, 8192, 1024))  # the largest stage
    for optimizer, kept in ((optax.sgd(0.1), 0), (optax.sgd(0.1, momentum=0.9), size)):
        plan = px.Plan(pipeline=2, microbatches=2)
        estimated = px.estimate(task, optimizer, plan, batch, H100).update.traffic
        least = H100.traffic_seconds(update_bytes(size, kept, 1, 0, packed=True))
        assert least <= estimated * (1 + 1e-9) <= 1.25 * least
        assert H100.traffic_seconds(update_bytes(size, kept, 1, 0)) < 0.5 * estimated


@pytest.mark.ci
@pytest.mark.parametrize("free", [["remat"], ["remat", "zero", "microbatches", "schedule"]])
def test_of_small_stages_the_plan_by_hand_is_found(free):
    """Its kernels take longer to start than to run, so more microbatches take longer; and of each
    remat policy it is the second solution that is fastest."""
    task, batch, rules, _ = uneven_widths()
    mesh = {"data": 1, "pipeline": 2, "tensor": 4}
    sizes = mesh | {"zero": 0, "microbatches": 2, "schedule": "eager-1f1b", "remat": "none"}
    by_hand = px.estimate(task, optax.adam(1e-3), px.Plan(**sizes, shardings=rules), batch, H100)
    pinned = {name: size for name, size in sizes.items() if name not in free}
    found = px.search(task, optax.adam(1e-3), batch, H100, pinned=pinned, count=1, memory=1e15)
    assert found.ranked[0].plan.remat == "none"
    assert found.ranked[0].seconds <= by_hand.seconds * (1 + 1e-9)


def points(rows):
    """A network of points, each through the same layers, and what is largest of them.

    XLA fuses most of what a bound counts as traffic.
    """
    widths = (3, 64, 64, 128, 1024)

    def init(key):
        shapes = zip([*widths, 256], [*widths[1:], 256, 40], strict=True)
        return [{"w": jnp.zeros(shape), "b": jnp.zeros(shape[1])} for shape in shapes]

    def loss(params, batch, keys):
        x = batch["x"]
        for layer in params[:4]:
            x = jax.nn.relu(x @ layer["w"] + layer["b"][None, None])
        x = jax.nn.relu(x.max(1) @ params[4]["w"] + params[4]["b"][None])
        return ((x @ params[5]["w"] + params[5]["b"][None] - batch["y"]) ** 2).sum(-1)

    shapes = {"x": (rows, 2048, 3), "y": (rows, 40)}
    batch = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    return px.Task(init=init, loss=loss), batch


B200 = px.Machine.preset("8xB200-180GB")


@pytest.mark.ci
def test_the_best_plan_is_no_slower_than_its_estimate():
    """With few strategies it would send and touch no more, but start more kernels."""
    task, batch = points(4096)
    pinned = ALONE | {"tensor": 8}
    found = px.search(task, optax.adam(1e-3), batch, B200, pinned=pinned, count=1)
    best = px.estimate(task, optax.adam(1e-3), found.best, batch, B200)
    assert best.seconds <= found.ranked[0].seconds * (1 + 1e-9)


if __name__ == "__main__":
    write()


def wide_head(width, words):
    """Two layers between a table of words and a head, which are most of the work."""

    def init(key):
        shapes = {"table": (words, width), "up": (2, width, 4 * width),
                  "down": (2, 4 * width, width), "out": (width, words)}  # fmt: skip
        return {name: jnp.zeros(shape) for name, shape in shapes.items()}

    def loss(params, batch, keys):
        def layer(x, weights):
            return x + jax.nn.relu(x @ weights[0]) @ weights[1], None

        x, _ = jax.lax.scan(layer, params["table"][batch["x"]], (params["up"], params["down"]))
        scores = x @ params["out"]
        right = jnp.take_along_axis(scores, batch["y"][..., None], -1)[..., 0]
        return (jax.nn.logsumexp(scores, -1) - right).mean(-1)

    tokens = jax.ShapeDtypeStruct((32, 256), jnp.int32)
    return px.Task(init=init, loss=loss), {"x": tokens, "y": tokens}


COLUMNS = {"table": (None, "tensor"), "up": (None, None, "tensor"), "down": (None, "tensor", None),
           "out": (None, "tensor")}  # fmt: skip


@pytest.mark.ci
@pytest.mark.parametrize(("width", "words"), [(512, 65536), (256, 131072)])
def test_each_size_of_tensor_that_could_be_much_faster_is_estimated(width, words):
    """All products over all devices: what is computed of it before is a third too much."""
    (task, batch), optimizer = wide_head(width, words), optax.adam(1e-3)
    machine = px.Machine.preset("8xH100-80GB")
    found = px.search(task, optimizer, batch, machine)
    for tensor in (2, 4, 8):
        plan = px.Plan(data=8 // tensor, tensor=tensor, shardings=COLUMNS)
        by_hand = px.estimate(task, optimizer, plan, batch, machine)
        assert found.ranked[0].seconds <= by_hand.seconds * (1 + 1e-9), plan
