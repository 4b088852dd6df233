"""Other functions than the step, compiled for machines that are not here.

Run as `test_programs.py` is. An epoch's loop, a worker's gradients, evaluation and prediction: what
they send is what was planned, and what they hold is what they are given.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import plurax as px
from plurax.hlo.compiled_collectives import collectives
from plurax.mesh import split_rows
from tests.absent.test_programs import (
    MACHINES,
    PLANS,
    ROWS,
    WIDTH,
    layer,
    scanned_task,
    stacked_task,
)

jax.config.update("jax_platforms", "cpu")

pytestmark = pytest.mark.ci

# TPUs' compiler takes half a minute for these: `make test-all`.
MOSTLY_GPU = [pytest.param("v5e:2x2", marks=pytest.mark.slow), "4xH100"]
FUNCTIONS = ["epoch", "gradients", "evaluate", "predict"]
EXAMPLES = 3 * ROWS + 4  # the last batch has four
PARAMS = 4 * 2 * WIDTH * 2 * WIDTH * 4  # bytes: four layers of two kernels


def rows(count=ROWS):
    return {name: jax.ShapeDtypeStruct((count, WIDTH), jnp.float32) for name in "xy"}


def task():
    return dataclasses.replace(
        scanned_task(), predict=lambda p, inputs: jax.lax.scan(layer, inputs["x"], p)[0]
    )


def compiled(machine, function, plan, task=task, **kwargs):
    if function == "epoch":
        kwargs.setdefault("data", rows(EXAMPLES))
    return px.analysis.compiled_for(
        task(), optax.adam(1e-3), plan, rows(), machine, function=function, **kwargs
    )


def by_kind(result, names):
    return {
        (one.kind, one.axes): [getattr(one, name) for name in names]
        for one in result.collectives
        if max(one.bytes, one.planned_bytes or 0) > 64
    }


# By default each plan and each function once on a machine; all under `make test-all`.
USUAL = {("data", "epoch"), ("zero 3", "gradients"), ("zero 3", "evaluate"), ("tensor", "predict")}
CASES = [
    pytest.param(function, name, marks=() if (name, function) in USUAL else pytest.mark.slow)
    for name in ("data", "zero 3", "tensor")
    for function in FUNCTIONS
]


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(("function", "name"), CASES)
def test_a_function_sends_what_was_planned(function, name, machine):
    result = compiled(machine, function, px.Plan(**PLANS[name]))
    for (sent,), (planned,) in zip(
        by_kind(result, ["bytes"]).values(), by_kind(result, ["planned_bytes"]).values(),
        strict=True,
    ):  # fmt: skip
        assert abs(sent - planned) <= 64
    sends = {
        "data": {"epoch", "gradients"}, "zero 3": set(FUNCTIONS), "tensor": set(FUNCTIONS),
    }  # fmt: skip
    assert bool(by_kind(result, [])) == (function in sends[name])


@pytest.mark.parametrize("machine", MACHINES)
def test_a_function_holds_what_it_is_given(machine):
    plan = px.Plan(data=4)
    arguments = {one: compiled(machine, one, plan).memory.arguments for one in FUNCTIONS}
    batch, few = 2 * ROWS // 4 * WIDTH * 4, 1024  # bytes; a TPU pads scalars
    data = 2 * EXAMPLES * WIDTH * 4
    expected = {
        "epoch": 3 * PARAMS + data, "gradients": PARAMS + batch, "evaluate": PARAMS + batch,
        "predict": PARAMS + batch / 2,  # `y` is not read
    }  # fmt: skip
    for function, size in expected.items():
        tiles = data / 16 if function == "epoch" else 0  # a data set's rows fill whole tiles
        assert size <= arguments[function] <= size + few + tiles, function


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("function", [pytest.param("evaluate", marks=pytest.mark.slow), "predict"])
def test_a_pipeline_sends_what_was_planned(function, machine):
    def pipelined():
        return stacked_task(predict=lambda p, x, inputs: x * p[None])

    plan = px.Plan(**PLANS["pipeline"])
    result = compiled(machine, function, plan, pipelined)
    ticks = [plan.microbatches + 1, ROWS // 8 * WIDTH * 4 * (plan.microbatches + 1)]
    assert by_kind(result, ["count", "bytes"])["collective-permute", "pipeline"] == ticks
    planned = by_kind(result, ["planned_count", "planned_bytes"])
    assert planned["collective-permute", "pipeline"] == ticks


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(
    "function", ["epoch", *(pytest.param(one, marks=pytest.mark.slow) for one in FUNCTIONS[1:])]
)
def test_members_do_not_communicate(function, machine):
    """Their epoch reads the arrays in orders of their own, in the loop over them."""
    result = compiled(
        machine, function, px.Plan(member=4), lambda: dataclasses.replace(
            scanned_task(1),
            predict=lambda p, inputs: jax.lax.scan(layer, inputs["x"], p)[0],
        ), members=px.Members(8, resample=px.ensemble.bootstrap()),
    )  # fmt: skip
    assert list(result.collectives) == []
    assert result.planned_peak is None
    assert result.memory.arguments >= 2 * PARAMS / 4  # of two members, of one layer each


@pytest.mark.parametrize("machine", MOSTLY_GPU)
def test_an_epoch_s_smaller_last_batch(machine):
    """Where padding changes no loss a loop has both sizes; a coupled loss has a loop for each."""
    program = px.compile(
        task(), optax.adam(1e-3), px.Plan(data=4), rows(), devices=px.topology(machine)
    )
    data = px.train.ArrayData(rows(EXAMPLES), ROWS)
    order = program.place_epoch(*data.epoch_order(0))
    assert program.compile_loop(program.place_data(data.arrays), order) is program.compile_loop(
        program.place_data(data.arrays), order
    )

    def mixes(params, batch, keys, mask):
        means = jnp.mean((batch["x"] @ params["up"][0]) ** 2)
        return jnp.broadcast_to(means, mask.shape), {}

    coupled = px.Task(init=scanned_task().init, loss=mixes, coupled=True)
    with pytest.warns(px.errors.MaskWarning, match="a batch of 4 examples is not padded to 32"):
        result = compiled(machine, "epoch", px.Plan(data=4), lambda: coupled)
    assert result.schedule.collectives
    dropped = px.train.ArrayData(rows(EXAMPLES), ROWS, ragged="drop")
    compiled(machine, "epoch", px.Plan(data=4), lambda: coupled, data=dropped)  # warns nothing


@pytest.mark.parametrize("machine", MOSTLY_GPU)
@pytest.mark.parametrize("kind", [np.zeros, lambda s: jax.ShapeDtypeStruct(s, jnp.float32)])
def test_data_spread_over_devices(machine, kind):
    """Rows that the devices do not divide are filled up; their loop gathers the rows of a batch."""
    program = px.compile(
        task(), optax.adam(1e-3), px.Plan(data=4), rows(), devices=px.topology(machine)
    )
    arrays = {name: kind((102, WIDTH)) for name in "xy"}
    spread = program.place_data(arrays, spread=True)
    assert {leaf.shape for leaf in spread.values()} == {(104, WIDTH)}
    assert {leaf.sharding for leaf in spread.values()} == {split_rows(program.mesh)}
    whole = program.place_data(arrays)
    assert {leaf.shape for leaf in whole.values()} == {(102, WIDTH)}
    order = program.place_epoch(np.zeros((2, ROWS), int), np.full(2, ROWS))
    loops = [program.compile_loop(data, order) for data in (spread, whole)]
    held = [loop.memory_analysis().argument_size_in_bytes for loop in loops]
    saved = 2 * (102 - 104 // 4) * WIDTH * 4
    assert math.isclose(held[1] - held[0], saved, rel_tol=0.1)
    sent = [
        sum(one.bytes for one in collectives(loop.as_text(), program.mesh, 1)) for loop in loops
    ]
    assert sent[0] > sent[1]


@pytest.mark.parametrize("machine", MACHINES)
def test_a_table_of_another_function(machine):
    result = compiled(machine, "predict", px.Plan(data=4), data=rows(4 * ROWS))
    text = str(result)
    assert "Plan(data=4), predict, compiled for" in text
    assert "parameters and inputs" in text
    assert "a step" not in text
    assert repr(result).startswith(f"CompiledFor(Plan(data=4), predict, compiled for {machine}: ")


def test_a_task_without_predict():
    with pytest.raises(px.errors.TaskError, match="this task has no predict function"):
        compiled("4xH100", "predict", px.Plan(data=4), scanned_task)
