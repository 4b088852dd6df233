"""A contract over the table of all schedules; hand-broken ones are refused with the reason."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

import plurax as px
from plurax.pipeline.schedule import (
    KINDS,
    SCHEDULES,
    Action,
    Schedule,
    check_forwards_in_order,
    check_schedule,
    live_activations,
    make_schedule,
    one_f_one_b,
)
from plurax.pipeline.simulation import lockstep_seconds, simulate
from plurax.pipeline.slots import FIELDS, make_slot_table
from plurax.pipeline.stages import LayerAssignment, even_layers
from plurax.plan import CHUNKS

# The idle part of all devices' time: p devices, m microbatches, v stages on each.
BUBBLES = {
    "gpipe": lambda p, m, v: (p - 1) / (m + p - 1),
    "1f1b": lambda p, m, v: (p - 1) / (m + p - 1),
    "eager-1f1b": lambda p, m, v: (p - 1) / (m + p - 1),
    "interleaved": lambda p, m, v: (p - 1) / (v * m + p - 1),
    "zb-h1": lambda p, m, v: (p - 1) / (3 * m + p - 1),
}
# The most activations that device d stores, as published.
STORED = {
    "gpipe": lambda p, m, v, d: m,
    "1f1b": lambda p, m, v, d: min(p - d, m),
    "eager-1f1b": lambda p, m, v, d: min(2 * (p - d) - 1, m),
    "interleaved": lambda p, m, v, d: min(2 * (p - d - 1) + (v - 1) * p + 1, m * v),
    "zb-h1": lambda p, m, v, d: min(p, m),
}
CASES = [
    (name, p, m, v)
    for name, p, rounds in itertools.product(SCHEDULES, (2, 3, 4, 8), (1, 2, 4))
    for m in [p * rounds]
    for v in ((2, 3) if name in CHUNKS else (1,))
]


def test_the_table_of_this_test_is_whole():
    assert set(SCHEDULES) == set(BUBBLES) == set(STORED)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_row_of_a_schedule_says_what_it_does(name):
    few, many = (make_schedule(name, 4, m, CHUNKS.get(name, 1)) for m in (16, 32))
    assert SCHEDULES[name].stores_all == (live_activations(few) != live_activations(many))
    pairs = any(len(actions) > 1 for column in many.ticks for actions in column)
    assert SCHEDULES[name].pairs == pairs
    if name not in CHUNKS:
        with pytest.raises(px.errors.PlanError, match="has one stage on each device"):
            make_schedule(name, 4, 16, 2)


@pytest.mark.parametrize(("name", "p", "m", "v"), CASES)
def test_every_schedule_keeps_the_contract(name, p, m, v):
    schedule = make_schedule(name, p, m, v)
    assert (schedule.devices, schedule.microbatches, schedule.chunks) == (p, m, v)
    kinds = "FBW" if schedule.split else "FB"
    everything = {Action(k, i, c) for k in kinds for i in range(m) for c in range(v)}
    done = {}
    for tick, column in enumerate(schedule.ticks):
        for device, actions in enumerate(column):
            assert "".join(action.kind for action in actions) in (*"FBW", "", "FB" * schedule.pairs)
            for work in actions:
                assert (device, work) not in done
                for other, need in schedule.dependencies(device, work):
                    together = other == device and schedule.pairs and need in actions
                    assert done[other, need] < tick + together
                done[device, work] = tick
    assert done.keys() == {(d, w) for d in range(p) for w in everything}
    check_schedule(schedule)
    check_forwards_in_order(schedule)
    assert simulate(schedule).bubble == pytest.approx(BUBBLES[name](p, m, v), abs=1e-12)
    stored = [STORED[name](p, m, v, d) for d in range(p)]
    assert live_activations(schedule) == stored
    if name in ("1f1b", "zb-h1"):
        assert max(stored) <= p


@pytest.mark.parametrize(("name", "p", "m", "v"), CASES)
def test_no_slot_holds_two_things(name, p, m, v):
    """Replay the table: what is read is what was put there for it, and no slot is one too many."""
    schedule = make_schedule(name, p, m, v)
    fn_stages = [0, schedule.stages - 1]
    table = make_slot_table(schedule, fn_stages)
    held, most = {}, dict.fromkeys(table.slots, 0)

    def put(store, device, slot, what):
        assert 0 <= slot < table.slots[store]
        assert (store, device, slot) not in held
        held[store, device, slot] = what
        most[store] = max(most[store], sum(key[:2] == (store, device) for key in held))

    assert len(table.columns) == len(schedule.ticks)
    for tick, column in enumerate(schedule.ticks):
        row = [
            {kind: dict(zip(FIELDS, table.columns[tick, d, index], strict=True))
             for index, kind in enumerate(KINDS)}
            for d in range(p)
        ]  # fmt: skip
        run = {(device, work.kind) for device, actions in enumerate(column) for work in actions}
        assert run == {(d, kind) for d in range(p) for kind in KINDS if row[d][kind]["runs"]}
        work_of = [(device, work) for device, actions in enumerate(column) for work in actions]
        for device, work in work_of:
            at = row[device][work.kind]
            assert (at["microbatch"], at["chunk"]) == work[1:]
            one = (device, work.microbatch, work.chunk)
            has_fn = schedule.stage(device, work) in fn_stages
            stores = ["layer_residuals"] + ["fn_residuals"] * has_fn
            weights = ["layer_weight_residuals"] + ["fn_weight_residuals"] * has_fn
            last = schedule.stages - 1
            if work.kind == "F":
                if schedule.stage(device, work) > 0:
                    assert held.pop(("x", device, at["x"])) == work
                for store in stores:
                    put(store, device, at[store], one)
            if work.kind == "B" and schedule.stage(device, work) < last:
                assert held.pop(("cotangent", device, at["cotangent"])) == work
            if work.kind in ("B", "W"):
                for store in stores:
                    assert held[store, device, at[store]] == one
                    if work.kind == "W" or not schedule.split:
                        del held[store, device, at[store]]
            for store in weights:
                if schedule.split and work.kind == "B":
                    put(store, device, at[store], one)
                if work.kind == "W":
                    assert held.pop((store, device, at[store])) == one
        for device, work in work_of:
            if work.kind == "W":
                continue
            step = 1 if work.kind == "F" else -1
            stage = schedule.stage(device, work) + step
            if 0 <= stage < schedule.stages:
                chunk, other = divmod(stage, p)
                store = "x" if work.kind == "F" else "cotangent"
                put(
                    store,
                    other,
                    row[other][work.kind][f"arriving_{store}"],
                    work._replace(chunk=chunk),
                )
    assert (held, most) == ({}, table.slots)


def test_the_table_of_two_devices():
    """By hand, one microbatch: F on both, then B on both; where nothing arrives, the last slot."""
    table = make_slot_table(one_f_one_b(2, 1), [0])
    none = {"runs": 0, "arriving_x": 1, "arriving_cotangent": 1}
    runs = {**none, "runs": 1}
    expected = [
        [{"F": runs}, {"F": {**none, "arriving_x": 0}}],
        [{}, {"F": runs}],
        [{"B": {**none, "arriving_cotangent": 0}}, {"B": runs}],
        [{"B": runs}, {}],
    ]
    rows = [
        [[dict.fromkeys(FIELDS, 0) | device.get(kind, none) for kind in KINDS] for device in tick]
        for tick in expected
    ]
    columns = [[[[*row.values()] for row in device] for device in tick] for tick in rows]
    assert table.columns.tolist() == columns
    weights = {"layer_weight_residuals": 0, "fn_weight_residuals": 0}
    residuals = {"layer_residuals": 1, "fn_residuals": 1, **weights}
    assert table.slots == {**residuals, "x": 1, "cotangent": 1}


def test_slots_do_not_grow_with_microbatches():
    few, many = (make_slot_table(one_f_one_b(4, m), [0, 3]).slots for m in (8, 64))
    assert few == many
    assert few["layer_residuals"] == 4


def test_lockstep_costs_nothing_where_all_work_takes_as_long():
    """F, B and W take one unit each: then to begin together is no loss."""
    ideal, together = (simulate(make_schedule("zb-h1", 4, 8), lockstep=b) for b in (False, True))
    assert together.bubble == pytest.approx(ideal.bubble)
    ideal, together = (simulate(make_schedule("1f1b", 4, 8), lockstep=b) for b in (False, True))
    assert together.bubble > ideal.bubble


@pytest.mark.parametrize("backward", [1.0, 2.0, 3.0])
@pytest.mark.parametrize(("p", "m"), [(2, 1), (2, 8), (4, 3), (4, 16), (8, 16), (8, 64)])
def test_lockstep_costs_nothing_where_a_tick_has_a_forward_and_a_backward(p, m, backward):
    """Also with `remat="full"`, whose backward takes three times as long as the forward."""
    takes = {"F": 1.0, "B": backward}
    schedule = make_schedule("eager-1f1b", p, m)
    together = lockstep_seconds(schedule, lambda device, action: takes[action.kind])
    assert together == (m + p - 1) * (1 + backward)
    kinds = {"forward": 1.0, "backward": backward, "weight": 0.0}
    free = simulate(make_schedule("1f1b", p, m), **kinds)
    assert together == pytest.approx(free.length)
    assert simulate(schedule, **kinds, lockstep=True).length == together
    assert len(schedule.ticks) == m + 2 * (p - 1)


def test_what_exchanges_cost_is_in_the_timeline():
    fast, slow = (simulate(one_f_one_b(2, 2), exchange=cost).length for cost in (0.0, 0.5))
    assert slow == fast + 4 * 0.5 - 0.5 * 2  # there and back, before the first B and the last


BROKEN = {
    "F0 F1 B0 B1 | F0 B0 F1": "cannot run: device 1 never runs B1",
    "F0 F0 B0 B0 | F0 B0": "runs F0 twice; every action runs",
    "B0 F0 | F0 B0": "runs B0 before F0, on which it depends",
    "F0 B0 F1 B1 | F1 F0 B0 B1": (
        "devices wait for each other forever: .*device 1 is at F1, waiting for F1 of 0"
    ),
    "F0 X0 | F0 B0": "'X0' in a schedule is not an action",
    "F0 B0 W0 | F0 B0": "device 1 never runs W0",
}


@pytest.mark.parametrize("lines", BROKEN)
def test_a_broken_schedule_is_refused_with_the_reason(lines):
    with pytest.raises(px.errors.PlanError, match=BROKEN[lines]):
        check_schedule(Schedule.parse([line.strip() for line in lines.split("|")]))


def test_a_schedule_that_stores_too_much():
    check_schedule(one_f_one_b(4, 8), stored=4)
    with pytest.raises(px.errors.PlanError, match="device 0 has the activations of 8 microbatches"):
        check_schedule(make_schedule("gpipe", 4, 8), stored=4)


def test_schedules_for_other_sizes():
    with pytest.raises(
        px.errors.PlanError, match="microbatches=8 works, and so does schedule='1f1b'"
    ):
        make_schedule("interleaved", 4, 7, 2)
    with pytest.raises(px.errors.PlanError, match="has one stage on each device"):
        make_schedule("gpipe", 2, 4, 2)
    with pytest.raises(px.errors.PlanError, match="the schedule written by hand is for 2 devices"):
        make_schedule(["F0 B0", "F0 B0"], 2, 4)


def test_plans_of_schedules():
    with pytest.raises(px.errors.PlanError, match="the schedules that have a name are gpipe, 1f1b"):
        px.Plan(pipeline=2, schedule="1f2b")
    with pytest.raises(px.errors.PlanError, match="every device needs the same number of stages"):
        px.Plan(pipeline=2, stages=3)
    assert px.Plan(pipeline=2, schedule="interleaved").virtual_stages == 2
    assert "6 stages on 3 devices" in px.Plan(pipeline=3, stages=6).explain()
    uneven = px.Plan(pipeline=3, layers=[1, 4, 2])
    assert "on 3 devices,\n    of 1, 4, 2 layers; the schedule is 1f1b." in uneven.explain()
    assert "\nlayers = [1, 4, 2]\n" in uneven.to_toml()
    assert px.Plan.from_toml(uneven.to_toml()) == uneven


@pytest.mark.parametrize("depth", [4, 5, 11, 12])
@pytest.mark.parametrize(("devices", "chunks"), [(2, 1), (4, 1), (2, 2)])
def test_layers_are_dealt_out_evenly(depth, devices, chunks):
    counts = even_layers(depth, devices * chunks)
    assert sum(counts) == depth
    assert max(counts) - min(counts) <= 1
    assert list(counts) == sorted(counts, reverse=True)
    holds_its_layers(LayerAssignment(counts, devices))


@given(st.lists(st.integers(1, 5), min_size=12, max_size=12), st.integers(1, 3), st.integers(1, 4))
def test_any_number_of_layers_in_each_stage(counts, devices, chunks):
    holds_its_layers(LayerAssignment(tuple(counts[: devices * chunks]), devices))


def holds_its_layers(assignment):
    """Each device has its stages' layers one after another, and padding behind them alone."""
    devices, rows = assignment.devices, assignment.rows
    assert len(assignment.layers) == devices * rows
    stages = list(zip(assignment.starts, assignment.counts, assignment.first_rows, strict=True))
    ends = [*itertools.accumulate(assignment.counts, initial=0)]
    assert [(start, start + count) for start, count, _ in stages] == [*itertools.pairwise(ends)]
    filled = []
    for device in range(devices):
        here = assignment.layers[device * rows : (device + 1) * rows]
        own = []
        for start, count, row in stages[device::devices]:
            assert row == len(own)
            own += range(start, start + count)
        assert here == own + [-1] * (rows - len(own))
        assert assignment.max_layers[device] == max(assignment.counts[device::devices])
        filled.append(len(own))
    assert max(filled) == rows
