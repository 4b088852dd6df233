"""What a pipeline communicates and stores, read from the compiled program."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests import models

import plurax as px
from plurax.hlo.text import parse
from plurax.pipeline.schedule import SCHEDULES, make_schedule
from plurax.plan import chunks_of

ROWS = 4


def compiled(microbatches=8, *, data=1, tensor=1, zero=0, schedule="1f1b", **more):
    task = models.transformer_stack(depth=8, tied=False)
    plan = px.Plan(
        pipeline=4 // tensor, data=data, tensor=tensor, zero=zero, microbatches=microbatches,
        schedule=schedule, **more,
    )  # fmt: skip
    return px.compile(task, optax.adam(1e-3), plan, models.text(ROWS * microbatches * data))


@functools.cache
def scheduled(schedule, microbatches=8):
    return compiled(microbatches, schedule=schedule)


BOUNDARY = ROWS * models.TOKENS * models.WIDTH * 4


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_stages_exchange_only_permutes_of_boundaries(schedule):
    """One way and the other in each tick; all else over `pipeline` are numbers."""
    program = scheduled(schedule)
    chunks = chunks_of(schedule)
    length = len(make_schedule(schedule, 4, 8, chunks).ticks)
    found = program.collectives()
    permutes = [c for c in found if c.kind == "collective-permute"]
    assert [(c.axes, c.bytes, c.trips) for c in permutes] == [(("pipeline",), BOUNDARY, length)] * 2
    others = [c for c in found if c.kind != "collective-permute"]
    assert all(c.kind == "all-reduce" and c.bytes <= 100 and not c.in_loop for c in others)
    planned = [r for r in program.planned_collectives() if r.kind == "collective-permute"]
    assert [(r.bytes, r.trips) for r in planned] == [(BOUNDARY, length)] * 2


@pytest.mark.ci
@pytest.mark.parametrize(
    "numbers_of_layers", [pytest.param(None, marks=pytest.mark.slow), (1, 3, 2, 2)]
)
def test_gradients_of_stages_reduce_once(numbers_of_layers):
    """Over `data`, behind the loop, each as many bytes as there are on the device."""
    program = compiled(data=2, layers=numbers_of_layers)
    reductions = [c for c in program.collectives() if c.kind == "all-reduce" and "data" in c.axes]
    assert not any(c.in_loop for c in reductions)
    layers = sum(one.bytes for one in program.shardings if one.path.startswith("blocks"))
    edges = {one.path: one.bytes for one in program.shardings if not one.path.startswith("blocks")}
    # A stage reduces its own: the program holds the embedding's and the head's reductions both.
    total = sum(c.bytes for c in reductions)
    numbers = 100
    assert layers + sum(edges.values()) <= total <= layers + sum(edges.values()) + numbers
    planned = [c for c in program.planned_collectives() if "data" in c.axes]
    assert sum(c.bytes for c in planned if c.kind == "all-reduce") == total


def test_model_state_is_told_to_all_once_a_step():
    """Behind the loop over ticks, each leaf by the device of the stage that wrote it."""
    width = 64

    def loss(params, state, batch, keys, mask):
        x, means = batch["x"], []
        for weight in params:
            x = jnp.tanh(px.pipeline.stage_boundary(x @ weight))
            means.append(jnp.where(mask[:, None], x, 0).sum(0) / mask.sum().astype(x.dtype))
        state = {"means": [old + new for old, new in zip(state["means"], means, strict=True)],
                 "table": state["table"]}  # fmt: skip
        return (x * state["table"][None]).sum(1), {}, state

    def init(key):
        weights = [jnp.ones((models.FEATURES, width)), jnp.ones((width, width))]
        return weights, {"means": [jnp.zeros(width)] * 2, "table": jnp.ones(width)}

    task = px.Task(init=init, loss=loss, coupled=True, stateful=True)
    plan = px.Plan(data=2, pipeline=2, microbatches=2)
    program = px.compile(task, optax.adam(1e-3), plan, models.data(8))
    planned = [r.bytes for r in program.planned_collectives() if r.axes == ("pipeline",)]
    assert planned.count(4 * width) == 2
    found = [c for c in program.collectives() if c.axes == ("pipeline",) and c.bytes > 64]
    told = [c for c in found if c.kind == "all-reduce"]
    # Numbers may ride along.
    assert 0 <= sum(c.bytes for c in told) - 2 * 4 * width <= 100
    assert not any(c.in_loop for c in told)


@pytest.mark.ci
def test_1f1b_stores_as_much_for_64_microbatches_as_for_8():
    few, many = (p.memory().temporaries for p in (scheduled("1f1b"), scheduled("1f1b", 64)))
    assert many == pytest.approx(few, rel=0.02)


@pytest.mark.ci
def test_gpipe_stores_more_with_more_microbatches():
    few, many = (p.memory().temporaries for p in (scheduled("gpipe"), scheduled("gpipe", 64)))
    assert many > 4 * few


@pytest.mark.ci
def test_each_device_holds_the_layers_that_the_plan_says():
    """The middle device six of eight; the others one, and rows of zeros up to the same number."""
    task = models.transformer_stack(depth=8, tied=False)
    plan = px.Plan(pipeline=3, layers=(1, 6, 1), microbatches=4)
    program = px.compile(task, optax.adam(1e-3), plan, models.text(16))
    layers = [one for one in program.shardings if one.path.startswith("blocks")]
    assert {one.shape[0] for one in layers} == {18}
    assert {one.shard[0] for one in layers} == {6}
    state, _ = program.step(program.init(0), models.text(16))
    kernels = max(jax.tree.leaves(state.params.rest), key=lambda leaf: leaf.size)
    held = [
        int(np.asarray(shard.data).reshape(6, -1).any(axis=1).sum())
        for shard in sorted(kernels.addressable_shards, key=lambda shard: shard.device.id)
    ]
    assert held == [1, 6, 1]
    # The rows are in the compiled program, and nothing is as large as all eight layers.
    shapes = re.findall(r"f32\[([\d,]+)\]", program.compiled.as_text())
    rest = ",".join(map(str, kernels.shape[1:]))
    assert f"6,{rest}" in shapes
    assert f"8,{rest}" not in shapes


@pytest.mark.ci
def test_fewer_layers_in_early_stages_store_less():
    """Under 1F1B stage s of 4 stores 4 - s microbatches: 8 rows of residuals at most, or 6."""

    def temporaries(layers):
        task = models.transformer_stack(depth=8, tied=False)
        plan = px.Plan(pipeline=4, layers=layers, microbatches=8)
        return px.compile(task, optax.adam(1e-3), plan, models.text(256)).memory().temporaries

    assert temporaries((1, 2, 2, 3)) < 0.85 * temporaries(None)


def test_under_1f1b_the_head_stores_one_microbatch():
    """The first of 4 devices stores four; the head is on the last, and its slots are its own."""

    def weight(*shape):
        return lambda key: jax.random.normal(key, shape) * 0.1

    task = px.stack(
        embed=(weight(models.FEATURES, 8), lambda w, batch, keys: batch["x"] @ w),
        block=(weight(8, 8), lambda w, x, batch, keys: jnp.tanh(x @ w)),
        head=(weight(8, 2048), lambda w, x, batch, keys: jnp.tanh(x @ w).sum(1)),
        depth=4,
    )
    plan = px.Plan(pipeline=4, microbatches=8)
    program = px.compile(task, optax.sgd(0.1), plan, models.data(8 * 64))
    logits = 64 * 2048 * 4
    # One slot, and what computing them and their gradient needs at a time.
    assert program.memory().temporaries < 3.5 * logits


@pytest.mark.ci
def test_split_boundaries_are_exchanged_as_shards():
    """By token over `tensor`: each device hands on its own part."""
    rules = px.sharding.megatron(
        column={"*/qkv": (..., "tensor", None), "*/hidden": (..., "tensor"),
                "*/bias": (..., "tensor")},
        row={"*/attention_out": (..., "tensor", None, None), "*/out": (..., "tensor", None)},
        sequence=["residual"],
    )  # fmt: skip
    program = compiled(tensor=2, shardings=rules)
    permutes = [c for c in program.collectives() if c.kind == "collective-permute"]
    assert {c.bytes for c in permutes} == {BOUNDARY // 2}


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_device_computes_the_actions_of_the_schedule_alone(schedule):
    """What stands in the loop over the ticks itself, every device computes in every tick."""

    def loss(params, batch, keys):
        x = batch["x"]
        for number, w in enumerate(params):
            x = px.pipeline.stage_boundary(x) if number == 2 else x
            x = jnp.tanh(x @ w)
        return ((x - batch["y"]) ** 2).sum(1)

    task = px.Task(init=lambda key: list(jax.random.normal(key, (4, 16, 16))), loss=loss)
    batch = {name: np.ones((8, 16), np.float32) for name in "xy"}
    plan = px.Plan(pipeline=2, microbatches=4, schedule=schedule)
    program = px.compile(task, optax.sgd(0.1), plan, batch)
    module = parse(program.hlo())

    def depths(name, depth):
        """Of the matrix products in a computation the number of loops around each."""
        for instruction in module.computations[name]:
            if instruction.opcode in ("dot", "custom-call"):
                yield depth
            bodies = re.findall(r"(?:body|condition)=%?([\w.-]+)", instruction.attributes)
            for called in (*instruction.called(), *bodies):
                yield from depths(called, depth + (instruction.opcode == "while"))

    found = list(depths(module.entry, 0))
    assert len(found) >= 2 * 2 + 4 * 2 - 1
    assert min(found) == 2
