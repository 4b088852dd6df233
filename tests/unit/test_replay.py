"""The record of a run with parameter servers gives its bits again: any order, any deaths."""

import dataclasses
import functools
import itertools
import json
import shutil

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests import models
from tests.draws import draws
from tests.simulated import Simulated
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
from plurax.checkpoint.description import read_description, sealed
from plurax.server.account import Account
from plurax.server.asynchronous import Asynchronous
from plurax.server.record import FILE, Record, read_events
from plurax.server.replay import Replay
from plurax.server.residuals import zero_leaves
from plurax.server.servers import Servers
from plurax.server.shard_layout import to_host
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


def recorded(folder, mode, compression, transport, residuals=()):
    """Run two epochs; return the fetched states and residuals by step, and the record."""
    run, program = spec(mode, compression), compiled()
    state, fetched = program.init(0), {}
    record = Record(folder, 0)
    record.write({"event": "start", "step": 0, "servers": dataclasses.asdict(run.servers)})
    kind = Synchronous if run.servers.mode == "sync" else Asynchronous
    first = program.to_canonical(state)
    with kind(run, transport, first, Account(), record, residuals=residuals) as coordinator:
        turns = serve_iter(coordinator, program, state, DATA, epochs=2, checkpoint_every=5)
        for output in turns:
            if output.fetched:
                fetched[output.step] = program.to_canonical(output.state), output.residuals
    return fetched, read_events(folder / FILE)


def batches(parts):
    numbered = itertools.chain.from_iterable(numbered_batches(DATA, at) for at in POSITIONS)
    for step, (batch, rows, _) in enumerate(numbered):
        yield parts_of(step, parts, batch, rows)


def follow(mode, compression, events, residuals=()):
    """Return the replayed states and residuals by step."""
    run, program = spec(mode, compression), compiled()
    state = program.to_canonical(program.init(0))
    replayed = Replay(run, state, events, batches(run.servers.parts), residuals)
    return {step: (replayed.state(step), replayed.residuals()) for step in replayed.steps()}


@pytest.mark.ci
@pytest.mark.parametrize("compression", [None, "topk"])
@pytest.mark.parametrize("mode", RUNS)
@draws(3, times=100)
@given(seed=st.integers(0, 2**32 - 1), times=st.lists(st.integers(3, 120), max_size=2))
def test_every_run_is_repeated_bit_for_bit(tmp_path_factory, mode, compression, seed, times):
    fault = deaths(("worker", "server"), times)
    folder = tmp_path_factory.mktemp("run")
    fetched, events = recorded(folder, mode, compression, Simulated(seed, fault))
    found = follow(mode, compression, events)
    assert [*fetched] == [5, 6, 10, STEPS]
    assert {*found} == {*range(STEPS + 1)}
    for step, (state, residuals) in fetched.items():
        again, left = found[step]
        assert same(again, state)
        assert models.same_bits(left, residuals or [])
    if compression:
        # Of a run that resumes there nothing else is left.
        end = events.index({"event": "fetched", "step": 5})
        again, left = follow(mode, compression, events[: end + 1])[5]
        assert models.same_bits(left, fetched[5][1])


def test_what_a_worker_began_with_is_lost_with_it(tmp_path):
    rng = np.random.default_rng(0)
    like = zero_leaves(jax.tree.leaves(compiled().canonical_shapes.params))
    begun = [[rng.normal(size=one.shape).astype(one.dtype) for one in like] for _ in range(3)]
    killed = Simulated(0, lambda transport: transport.turns or transport.kill("worker 1"))
    fetched, events = recorded(tmp_path, "async", "topk", killed, begun)
    assert {"worker": 1, "life": 0}.items() <= next(
        event.items() for event in events if event["event"] == "worker lost"
    )
    found = follow("async", "topk", events, begun)
    assert models.same_bits(found[STEPS][1], fetched[STEPS][1])
    assert same(found[STEPS][0], fetched[STEPS][0])


def test_another_order_gives_other_bits(tmp_path):
    fetched, events = recorded(tmp_path, "async", None, Simulated(3))
    pushes = [index for index, event in enumerate(events) if event["event"] == "push"]
    first, second = next(
        (i, j)
        for i, j in itertools.pairwise(pushes)
        if events[i]["worker"] != events[j]["worker"]
        and all(event["event"] != "pull" for event in events[i:j])
    )
    events[first], events[second] = events[second], events[first]
    last, _ = follow("async", None, events)[STEPS]
    assert not same(last.params, fetched[STEPS][0].params)


# --- Of `fit` -------------------------------------------------------------------------------------

ASYNC = Servers(workers=3, shards=2, mode="async", compression="int8", transport="threads")
ROWS = models.data(24)
BATCHES = [jax.tree.map(lambda leaf, at=at: leaf[at : at + 4], ROWS) for at in range(0, 24, 4)]


def fitted(data, output, servers, **options):
    size = {"batch_size": 4} if data is ROWS else {}
    return px.fit(
        task(), OPTIMIZER, data, servers=servers, output=output, progress=False, **size, **options
    )


OTHER = dataclasses.replace(ASYNC, workers=2, shards=1, mode="bounded", staleness=1)
TOPK = Servers(workers=2, shards=2, compression="topk", transport="threads")
PLAIN = dataclasses.replace(TOPK, compression=None)
RESUMED = {
    "other numbers and another mode": (ASYNC, OTHER),
    "more workers": (OTHER, ASYNC),
    "three times": (TOPK, TOPK, dataclasses.replace(TOPK, workers=3, shards=1)),
    "first uncompressed": (PLAIN, TOPK),
    "uncompressed in between": (TOPK, PLAIN, TOPK),
    "another compression": (TOPK, dataclasses.replace(TOPK, compression="int8")),
}


def assert_repeated(folder, data, runs):
    """Train an epoch with each of these servers; replay gives the state after each."""

    def again(**options):
        return px.train.replay(task(), OPTIMIZER, data, folder, **options)

    for epoch, servers in enumerate(runs):
        last = fitted(data, folder, servers, seed=3, epochs=epoch + 1, resume=epoch > 0)
        assert same(again(), last.state)
    assert int(again(step=4).step) == 4
    assert int(again(step=6).step) == 6


@pytest.mark.ci
@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_run_is_repeated_from_its_beginning(tmp_path, name):
    assert_repeated(tmp_path, ROWS, RESUMED[name])


@pytest.mark.ci
def test_a_resumed_run_over_an_iterable_is_repeated(tmp_path):
    assert_repeated(tmp_path, BATCHES, (ASYNC, OTHER))


@pytest.mark.ci
def test_a_run_resumed_without_what_was_left_is_repeated(tmp_path):
    fitted(ROWS, tmp_path, TOPK)
    checkpoint = tmp_path / "checkpoints" / "6"
    values = read_description(checkpoint)
    assert values.pop("workers") == 2
    # As plurax wrote them before it saved what is left.
    (checkpoint / "meta" / "metadata").write_text(json.dumps(sealed(values)))
    shutil.rmtree(checkpoint / "residuals")
    last = fitted(ROWS, tmp_path, TOPK, epochs=2, resume=True)
    assert same(px.train.replay(task(), OPTIMIZER, ROWS, tmp_path), last.state)


def test_what_cannot_be_replayed_is_refused_by_name(tmp_path):
    def again(folder, data=ROWS, **options):
        return px.train.replay(task(), OPTIMIZER, data, folder, **options)

    run = tmp_path / "run"
    with pytest.raises(px.errors.CheckpointError, match=r"run holds no servers\.jsonl, the record"):
        again(run)
    fitted(ROWS, run, ASYNC)
    with pytest.raises(px.errors.CheckpointError, match=r"has 24 examples .* the data now have 20"):
        again(run, {name: rows[:20] for name, rows in ROWS.items()})
    for step in (7, -1):
        with pytest.raises(
            px.errors.CheckpointError, match=f"step {step} of .* record ends at step 6"
        ):
            again(run, step=step)
    record = run / FILE
    events = [{**event, "step": 6} if event["event"] == "start" else event
              for event in read_events(record)]  # fmt: skip
    record.write_text("".join(json.dumps(event) + "\n" for event in events))
    with pytest.raises(px.errors.CheckpointError, match="begins at step 6, where training without"):
        again(run)
