"""The plans among which a search chooses, and their bounds."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests import models

import plurax as px
from plurax.machine_fields import Level
from plurax.pipeline.schedule import SCHEDULES, live_activations, make_schedule
from plurax.plan import CHUNKS, chunks_of
from plurax.planner.candidates import REMATS, Model, candidates, model_of
from plurax.planner.costs import REDUCTION, TimeCosts, held_bytes, pipeline_seconds
from plurax.planner.lockstep import (
    StagedModel,
    fastest_stages,
    stage_times,
    stored_microbatches,
    tick_counts,
    ticks_of_step,
)
from plurax.planner.profile import Share
from plurax.planner.tensor_search import TensorSearch

MACHINE = px.Machine(
    "fast links", {"float32": 1e9}, 1e9, 1e30, [Level("node", 168, 1e12)], half_dim=0.0
)


def model(task, batch, machine=MACHINE):
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
    return model_of(task, optax.adam(1e-3), like, "float32", machine)


@pytest.fixture(scope="module")
def perceptron():
    return model(models.mlp_task(), models.data(48))


@pytest.fixture(scope="module")
def stacked():
    return model(models.transformer_stack(), models.text(12))


def plans(found: Model, devices, **pinned):
    every = candidates(found, MACHINE, devices, px.Plan(**pinned), pinned)
    return [one.plan for one in every]


@pytest.mark.parametrize("devices", [1, 3, 6, 7, 8, 12])
def test_every_divisor_of_the_devices_is_considered(perceptron, devices):
    found = plans(perceptron, devices)
    sizes = {plan.devices for plan in found}
    assert sizes == {n for n in range(1, devices + 1) if devices % n == 0}
    assert len(found) == len(set(found)), "a plan is considered once"
    assert all(48 % plan.data == 0 for plan in found)


def test_of_rows_that_are_padded_any_number_of_devices_may_have_some(perceptron):
    """Of 48 examples each of 5 devices has 10, and 2 rows are padding."""
    assert {plan.data for plan in plans(perceptron, 5)} == {1}
    pinned = px.Plan(data=5, microbatches=1)
    assert not [*candidates(perceptron, MACHINE, 5, pinned, ("data", "microbatches"))]
    padded = dataclasses.replace(perceptron, pads=True)
    found = [*candidates(padded, MACHINE, 5, px.Plan(), {"remat": "none"})]
    counts = {one.sizes.microbatches for one in found if one.plan.data == 5}
    assert counts == {1, 2, 4, 5, 8, 10, 16}
    plain = {one.plan.data: one.memory for one in found if one.plan == px.Plan(data=one.plan.data)}
    one, five = plain[1], plain[5]
    state = padded.parameters * 2 + padded.optimizer
    assert five - state == (one - state) * 10 / 48
    assert {plan.data for plan in plans(dataclasses.replace(padded, batch_size=4), 5)} == {1}


def test_only_layers_can_be_stages(perceptron, stacked):
    assert {plan.pipeline for plan in plans(perceptron, 8)} == {1}
    layers = models.LAYERS
    assert {plan.pipeline for plan in plans(stacked, 12)} == {
        n for n in (1, 2, 3, 4, 6, 12) if n <= layers
    }
    marked = model(models.marked_task(), models.data(48))
    assert marked.layers > 1


def test_devices_may_have_more_than_two_stages():
    """Of the 11 layers on 2 devices up to 5 stages on each, with enough layers equal ones; where
    little is idle, and for microbatches that do not come in groups, no more than usual."""
    stacked, deep = (
        model(models.transformer_stack(depth=depth), models.text(96)) for depth in (11, 12)
    )

    def stages(found, microbatches, **more):
        given = {"pipeline": 2, "data": 1, "tensor": 1, "microbatches": microbatches, **more}
        every = [one for one in plans(found, 2, **given) if one.remat == "none"]
        return [one.stages for one in every if one.schedule == "interleaved"]

    assert stages(stacked, 2) == [None, 8]
    assert stages(deep, 2) == [None, 12]
    assert stages(deep, 48) == [None]
    assert stages(deep, 3) == []
    assert stages(deep, 2, stages=4) == [4]


def test_every_divisor_of_the_rows_is_considered_where_they_are_few(stacked):
    """Of 36 rows on 2 devices 6 microbatches are fastest: fewer leave devices idle for longer, and
    each starts its kernels. Of 2,520 rows, with 48 divisors, some are."""
    rows = dataclasses.replace(stacked, batch_size=36)
    pinned = px.Plan(pipeline=2, remat="none", schedule="gpipe")
    fields = ["data", "tensor", "pipeline", "remat", "schedule"]
    none = stacked.totals["none"]
    # What is idle is a share 1 / m of a step's work, what starts is m times one microbatch's.
    slow = dataclasses.replace(MACHINE, overhead=none.seconds / 6**2 / none.products)
    every = [*candidates(rows, slow, 2, pinned, fields)]
    assert [one.sizes.microbatches for one in every] == [2, 3, 4, 6, 9, 12, 18, 36]
    assert min(every, key=lambda one: one.seconds).sizes.microbatches == 6
    many = dataclasses.replace(stacked, batch_size=2520)
    assert len([*candidates(many, slow, 2, pinned, fields)]) < 16


PINS = [
    {"tensor": 1},
    {"zero": 0, "data": 2},
    {"data": 2},
    {"tensor": 4},
    {"zero": 3, "data": 4},
    {"remat": "full"},
    {"microbatches": 6},
]


@pytest.mark.parametrize("pins", PINS, ids=str)
def test_what_is_pinned_holds(perceptron, pins):
    found = plans(perceptron, 8, **pins)
    assert found
    assert all(getattr(plan, name) == given for plan in found for name, given in pins.items())


def test_operations_and_bytes_are_counted(perceptron):
    sizes = (5 * 16, 16, 16 * 3)
    assert perceptron.parameters == 4 * sum(sizes)
    # Adam has two moments of each parameter, and a counter.
    assert perceptron.optimizer == 2 * perceptron.parameters + 4
    # Forward, the gradient of both weights, and that of the hidden layer.
    forward = 2 * 48 * (5 * 16 + 16 * 3)
    by_hand = 2 * forward + 2 * 48 * 16 * 3
    none, full = perceptron.totals["none"], perceptron.totals["full"]
    assert none.seconds == pytest.approx(by_hand / 1e9)
    assert none.forward == pytest.approx(forward / by_hand)
    # Full rematerialization computes the products of the forward pass once more, but the last.
    assert full.seconds > by_hand / 1e9
    assert full.kept < none.kept


def test_the_layers_of_a_stack_are_told_from_its_head(stacked):
    assert 0.5 < stacked.totals["none"].layers < 1
    assert 0.3 < stacked.totals["none"].forward < 0.4


def test_bounds_fall_with_what_is_split(stacked):
    bounds = {one.plan: one for one in candidates(stacked, MACHINE, 4, px.Plan(), ())}
    one, four = bounds[px.Plan()], bounds[px.Plan(data=4)]
    assert four.seconds < one.seconds
    assert four.memory < one.memory
    by_zero = [bounds[px.Plan(data=4, zero=zero)].memory for zero in range(4)]
    assert by_zero == sorted(by_zero, reverse=True)
    assert len(set(by_zero)) == 4
    deep = px.Plan(pipeline=2, microbatches=2)
    assert bounds[deep].seconds > bounds[px.Plan(pipeline=2, microbatches=12)].seconds
    gpipe = px.Plan(pipeline=2, microbatches=12, schedule="gpipe")
    assert bounds[gpipe].seconds < bounds[dataclasses.replace(gpipe, schedule="1f1b")].seconds
    assert bounds[gpipe].memory > bounds[dataclasses.replace(gpipe, schedule="1f1b")].memory


STAGES = [(name, v) for name in SCHEDULES for v in ((2, 3) if name in CHUNKS else (1,))]


@pytest.mark.parametrize(("schedule", "stages"), STAGES)
@pytest.mark.parametrize("devices", [2, 3, 4, 7])
def test_ticks_and_stored_microbatches_without_simulation(schedule, stages, devices):
    every = devices if schedule in CHUNKS else 1
    for microbatches in range(every, 4 * devices + 2, every):
        drawn = make_schedule(schedule, devices, microbatches, stages)
        columns = drawn.ticks
        only = sum(all(a.kind == "F" for actions in column for a in actions) for column in columns)
        found = tick_counts(schedule, devices, microbatches, stages)
        assert found == (only, len(columns) - only), microbatches
        stored = stored_microbatches(schedule, devices, microbatches, stages)
        assert stored == live_activations(drawn), microbatches


def test_a_schedule_by_hand_is_simulated():
    lines = ("F0 F1 B0 B1", "F0 B0 F1 B1")
    assert tick_counts(lines, 2, 2) == tick_counts("1f1b", 2, 2)


def test_a_backward_that_is_split_by_hand_is_two_actions():
    """A forward takes 1/3 s, B and W as much each: 2 ticks of forwards, and 5 of either."""
    lines = ("F0 F1 B0 W0 B1 W1", "F0 B0 F1 B1 W0 W1")
    assert stage_times(lines, 2, 2, 1, forward=1 / 3) == pytest.approx((2 + 5) / 3)
    layers, none = Share(2.0, 4.0, 1.0), Share(0.0, 0.0, 0.0)  # of a stage 1 s and 2 s
    assert StagedModel(lines, 2, 2, 1, 2, layers, none, none).stages((1, 1)).seconds == 7
    drawn = tuple(str(make_schedule("zb-h1", 4, 8)).splitlines())
    by_name = stage_times("zb-h1", 4, 8, 1, forward=0.3)
    assert stage_times(drawn, 4, 8, 1, forward=0.3) == pytest.approx(by_name)


def test_a_search_tries_all_policies_that_store_nothing_on_the_host():
    assert REMATS == ("none", "dots", "full")


def test_bytes_of_parameters_gradients_and_state():
    assert [held_bytes(8.0, 16.0, 4, zero) for zero in REDUCTION] == [32, 20, 14, 8]


def test_stages_of_layers_and_a_head():
    """8 layers of 1 + 2 s, a head of 1 + 2 s, on 2 devices: 4 and 4 layers, or 5 and 3."""
    layers, none, head = Share(8.0, 16.0, 80.0), Share(0.0, 0.0, 0.0), Share(1.0, 2.0, 5.0)
    model = StagedModel("gpipe", 2, 4, 1, 8, layers, none, head)
    even = model.stages((4, 4))
    # The last of 5 forwards and the first of 5 backwards are of one stage each: 4 layers, no head.
    assert even.seconds == pytest.approx(4 * (4 + 1) * 3 + 4 * 3)
    # 4 microbatches of 4 layers, and of the head.
    assert even.kept == pytest.approx(4 * 4 * 10 + 4 * 5)
    assert fastest_stages(model).layers in ((4, 4), (5, 3))
    heavy = StagedModel("1f1b", 2, 4, 1, 8, layers, none, Share(8.0, 16.0, 5.0))
    # F0 of 6, F1 and F0 of 10, B0 of 20; thrice a backward of 12 beside a forward of 10, and twice
    # a forward of 6 beside a backward of 20; the last backwards, alone, of 20 and 12.
    by_hand = 6 + 10 + 20 + 3 * 12 + 2 * 20 + 20 + 12
    assert heavy.stages((6, 2)).seconds == pytest.approx(by_hand)
    assert heavy.stages((6, 2)).most == 6
    assert fastest_stages(heavy).seconds <= by_hand < 0.98 * heavy.stages((4, 4)).seconds


def test_bounds_are_corrected_as_estimates_are():
    """Or they would prove nothing of a machine that learned from runs."""
    plain = dataclasses.replace(MACHINE, overhead=1e-5)
    slow = dataclasses.replace(plain, correction=2.0)
    found, corrected = (
        [*candidates(model(models.mlp_task(), models.data(48), m), m, 4, px.Plan(), ())]
        for m in (plain, slow)
    )
    assert [one.seconds for one in corrected] == [2 * one.seconds for one in found]


# --- What the stages of a pipeline send -----------------------------------------------------------

# A byte takes a second; nothing else takes any time.
LINKS = px.Machine("links", {"float32": 1e30}, 1e12, 1e30, [Level("node", 8, 1.0)], half_dim=0.0)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("pipeline", "microbatches"), [(2, 2), (2, 6), (4, 8)])
def test_a_step_has_the_ticks_of_its_schedule(schedule, pipeline, microbatches):
    chunks = chunks_of(schedule)
    every = make_schedule(schedule, pipeline, microbatches, chunks).ticks
    assert ticks_of_step(schedule, pipeline, microbatches, chunks) == len(every)


def test_stages_send_in_each_tick_both_ways_and_reduce_what_two_hold():
    """By hand: 3 ticks, 10 bytes ahead and 10 back, and a ring over 2 devices of 100 bytes."""
    mesh = {"stride": 1, "mesh_devices": 2}
    assert pipeline_seconds(LINKS, 10, 100, 3, 2, **mesh) == 3 * 2 * 10 + 2 * 100 / 2


STAGED = {
    # Of the tied network the gradient of the table is reduced, too.
    "tied": (models.transformer_stack, models.text(12), 1.0),
    "stack": (lambda: models.transformer_stack(tied=False), models.text(12), 1.0),
    # What skips a boundary, beside the 16 numbers of a row that cross it, is not known.
    "boundaries": (models.marked_task, models.data(12), 16 / 23),
}


@pytest.mark.parametrize("name", STAGED)
@pytest.mark.parametrize("schedule", ["1f1b", "eager-1f1b", "gpipe"])
def test_what_stages_send_is_what_the_step_sends(name, schedule):
    """The bytes over `pipeline` of the recorded step, and those by which candidates are ranked."""
    make, batch, share = STAGED[name]
    task, optimizer, like = make(), optax.adam(1e-3), jax.eval_shape(lambda: batch)
    plan = px.Plan(pipeline=2, microbatches=3, schedule=schedule)
    known = model_of(task, optimizer, like, "float32", LINKS, ("none",))
    search = TensorSearch(
        task, like, lambda one: TimeCosts(LINKS, one), machine=LINKS, activations=known.activations
    )
    planned = px.analysis.planned(task, optimizer, plan, like).collectives
    large = [one for one in planned if one.axes == ("pipeline",) and one.bytes > 64]
    sent = share * sum(one.bytes_sent * one.trips for one in large)
    assert search.seconds(plan) == pytest.approx(sent, rel=1e-6)
    bounds = candidates(known, LINKS, 2, plan, ["data", "pipeline", "microbatches", "schedule"])
    assert [one.seconds for one in bounds if one.plan.zero == 0] == [pytest.approx(sent, rel=1e-6)]


def dense():
    """Two layers of which no dim is odd, so that nothing is padded."""

    def loss(params, batch, keys):
        return jnp.sum((jnp.tanh(batch["x"] @ params["w"]) @ params["v"]) ** 2, axis=1)

    return px.Task(init=lambda key: {"w": jnp.ones((64, 64)), "v": jnp.ones((64, 8))}, loss=loss)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("zero", REDUCTION)
def test_gradients_count_in_the_dtype_in_which_they_are_sent(zero, platform):
    """By the bound, by the solved graph and by the estimate; CPUs send what they round whole."""
    task, optimizer, like = dense(), optax.adam(1e-3), {"x": jax.ShapeDtypeStruct((8, 64), "f4")}
    machine = dataclasses.replace(LINKS, platform=platform)
    known = model_of(task, optimizer, like, "float32", machine, ("none",))
    search = TensorSearch(task, like, lambda one: TimeCosts(machine, one), machine=machine)
    fields = ["data", "pipeline", "tensor", "microbatches", "zero", "reduce_dtype"]

    def sent(dtype):
        plan = px.Plan(data=4, zero=zero, microbatches=2, reduce_dtype=dtype)
        (bound,) = candidates(known, machine, 4, plan, fields)
        found = px.estimate(task, optimizer, plan, like, machine)
        assert found.plan == plan
        return np.array([bound.seconds, search.seconds(plan), found.bytes_sent["data"]])

    # All-reduces send 2 * 3/4 of 4,608 numbers; ZeRO 2 and 3 reduce those of both microbatches.
    saved = (3 / 4) * 4608 * 2 * (2 if zero in (0, 2, 3) else 1) if platform == "gpu" else 0
    np.testing.assert_allclose(sent(None) - sent("bfloat16"), saved, rtol=1e-9)


@pytest.mark.ci
def test_a_slow_link_is_not_crossed():
    """Of a stack on two nodes, no search crosses a link that takes longer than a node's work."""
    task, batch = models.transformer_stack(), models.text(16)
    levels = [Level("node", 2, 1e12), Level("cluster", 4, 1e2)]
    machine = px.Machine("far apart", {"float32": 1e9}, 1e9, 1e12, levels, half_dim=0.0)
    found = px.search(task, optax.adam(1e-3), batch, machine, count=1, evaluations=1)
    assert found.ranked[0].plan.devices <= 2
