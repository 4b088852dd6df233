"""The record of a run with parameter servers gives its bits again: any order, any deaths."""

import dataclasses
import functools
import itertools
import json

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests import models
from tests.draws import draws
from tests.unit.test_interleavings import (
    DATA,
    FIRST,
    MODES,
    OPTIMIZER,
    STEPS,
    compiled,
    deaths,
    task,
)

import plurax as px
from plurax.server.account import Account
from plurax.server.asynchronous import Asynchronous
from plurax.server.record import FILE, Record, read_events
from plurax.server.replay import Replay
from plurax.server.servers import Servers
from plurax.server.shard_layout import to_host
from plurax.server.simulated import Simulated
from plurax.server.synchronous import Synchronous
from plurax.train.serve import numbered_batches, parts_of, run_spec, serve_iter

RUNS = {
    **MODES,
    "delay": dataclasses.replace(MODES["async"], correction="delay"),
    "too stale": dataclasses.replace(MODES["async"], workers=4, max_staleness=1),
    "first": FIRST,
}
POSITIONS = [px.train.Position(epoch) for epoch in range(2)]


def same(state, other):
    """Whether all leaves are the same bit for bit, random keys included."""
    return models.same_bits(*(jax.tree.map(to_host, one) for one in (state, other)))


@functools.cache
def spec(mode, compression):
    servers = dataclasses.replace(RUNS[mode], compression=compression)
    return run_spec(servers, compiled(), OPTIMIZER, DATA, DATA.example_batch())


def recorded(folder, mode, compression, transport):
    """Run two epochs; return the settled states by step, and the record."""
    run, program = spec(mode, compression), compiled()
    state, settled = program.init(0), {}
    record = Record(folder, 0)
    record.write({"event": "start", "step": 0, "servers": dataclasses.asdict(run.servers)})
    kind = Synchronous if run.servers.mode == "sync" else Asynchronous
    with kind(run, transport, program.to_canonical(state), Account(), record) as coordinator:
        turns = serve_iter(coordinator, program, state, DATA, epochs=2, checkpoint_every=5)
        for output in turns:
            if output.settled:
                state = settled[output.step] = output.state
    return settled, read_events(folder / FILE)


def batches(parts):
    numbered = itertools.chain.from_iterable(numbered_batches(DATA, at) for at in POSITIONS)
    for step, (batch, rows, _) in enumerate(numbered):
        yield parts_of(step, parts, batch, rows)


def follow(mode, compression, events):
    """Return the replayed states by step."""
    run, program = spec(mode, compression), compiled()
    state = program.to_canonical(program.init(0))
    replayed = Replay(run, state, events, batches(run.servers.parts))
    return {step: replayed.state(step) for step in replayed.steps()}


@pytest.mark.parametrize("compression", [None, "topk"])
@pytest.mark.parametrize("mode", RUNS)
@draws(3, times=100)
@given(seed=st.integers(0, 2**32 - 1), times=st.lists(st.integers(3, 120), max_size=2))
def test_every_run_is_repeated_bit_for_bit(tmp_path_factory, mode, compression, seed, times):
    fault = deaths(("worker", "server"), times)
    folder = tmp_path_factory.mktemp("run")
    settled, events = recorded(folder, mode, compression, Simulated(seed, fault))
    found = follow(mode, compression, events)
    assert [*settled] == [5, 6, 10, STEPS]
    assert {*found} == {*range(STEPS + 1)}
    for step, state in settled.items():
        assert same(found[step], compiled().to_canonical(state))


def test_another_order_gives_other_bits(tmp_path):
    settled, events = recorded(tmp_path, "async", None, Simulated(3))
    pushes = [index for index, event in enumerate(events) if event["event"] == "push"]
    first, second = next(
        (i, j)
        for i, j in itertools.pairwise(pushes)
        if events[i]["worker"] != events[j]["worker"]
        and all(event["event"] != "pull" for event in events[i:j])
    )
    events[first], events[second] = events[second], events[first]
    last = follow("async", None, events)[STEPS]
    assert not same(last.params, compiled().to_canonical(settled[STEPS]).params)


# --- Of `fit` -------------------------------------------------------------------------------------

ASYNC = Servers(workers=3, shards=2, mode="async", compression="int8", transport="threads")
ROWS = models.data(24)
BATCHES = [jax.tree.map(lambda leaf, at=at: leaf[at : at + 4], ROWS) for at in range(0, 24, 4)]


def fitted(data, output, servers, **options):
    size = {"batch_size": 4} if data is ROWS else {}
    return px.fit(
        task(), OPTIMIZER, data, servers=servers, output=output, progress=False, **size, **options
    )


@pytest.mark.parametrize("data", [ROWS, BATCHES], ids=["arrays", "iterable"])
def test_a_resumed_run_is_repeated_from_its_beginning(tmp_path, data):
    def again(**options):
        return px.replay(task(), OPTIMIZER, data, tmp_path, **options)

    first = fitted(data, tmp_path, ASYNC, seed=3)
    other = dataclasses.replace(ASYNC, workers=2, shards=1, mode="bounded", staleness=1)
    last = fitted(data, tmp_path, other, seed=3, epochs=2, resume=True)
    assert same(again(), last.state)
    assert same(again(step=6), first.state)
    assert int(again(step=4).step) == 4


def test_what_cannot_be_replayed_is_refused_by_name(tmp_path):
    def again(folder, data=ROWS, **options):
        return px.replay(task(), OPTIMIZER, data, folder, **options)

    run = tmp_path / "run"
    with pytest.raises(px.CheckpointError, match=r"run holds no servers\.jsonl, the record"):
        again(run)
    fitted(ROWS, run, ASYNC)
    with pytest.raises(px.CheckpointError, match=r"has 24 examples .* the data now have 20"):
        again(run, {name: rows[:20] for name, rows in ROWS.items()})
    for step in (7, -1):
        with pytest.raises(px.CheckpointError, match=f"step {step} of .* record ends at step 6"):
            again(run, step=step)
    record = run / FILE
    events = [{**event, "step": 6} if event["event"] == "start" else event
              for event in read_events(record)]  # fmt: skip
    record.write_text("".join(json.dumps(event) + "\n" for event in events))
    with pytest.raises(px.CheckpointError, match="begins at step 6, where training without"):
        again(run)
