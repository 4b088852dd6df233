"""Workers and servers under drawn interleavings, deaths included: what is promised holds in each.

One coordinator, and the code of workers and servers that also runs on Ray, over a transport that
draws whose turn it is. A worker's gradient is that of a small network, compiled once.
"""

import dataclasses
import functools
import itertools

import jax
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests import models
from tests.draws import draws
from tests.simulated import Simulated

import plurax as px
from plurax.server.account import Account
from plurax.server.asynchronous import Asynchronous
from plurax.server.run_spec import RunSpec
from plurax.server.servers import Servers
from plurax.server.synchronous import Synchronous
from plurax.train.serve import serve_iter

DATA = px.train.ArrayData(models.data(24), 4)
STEPS = 12  # two epochs
MODES = {
    "sync": Servers(workers=3, shards=2, snapshot_every=3, transport="threads"),
    "quorum": Servers(workers=3, shards=2, quorum=2, snapshot_every=3, transport="threads"),
    "bounded": Servers(
        workers=3, shards=2, mode="bounded", staleness=1, snapshot_every=3, transport="threads"
    ),
    "async": Servers(workers=3, shards=2, mode="async", snapshot_every=3, transport="threads"),
}
FIRST = dataclasses.replace(MODES["quorum"], shards=3, quorum=1, snapshot_every=1)


@functools.cache
def task():
    return models.mlp_task()


OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.05))


@functools.cache
def compiled():
    return px.compile(task(), OPTIMIZER, px.Plan(), DATA.example_batch())


@functools.cache
def spec(mode):
    servers = FIRST if mode == "first" else MODES[mode]
    size = -(-DATA.batch_size // servers.parts)
    like = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((size, *leaf.shape[1:]), leaf.dtype),
        DATA.example_batch(),
    )
    return RunSpec(task(), OPTIMIZER, servers, px.Plan(), like, DATA.arrays)


class Watched(Simulated):
    """Notes what the coordinator has been told, to check the bound and the order of versions."""

    def __init__(self, seed, fault=lambda transport: None):
        super().__init__(seed, fault)
        self.pulls, self.replies = [], []

    def call(self, actor, method, *args, returns=1, lasting=False):
        found = super().call(actor, method, *args, returns=returns)
        if method == "push":
            self.replies.append((actor, args[0], found[0]))
        if method == "gradients":
            self.pulls.append(args[0])
        return found


def run(mode, transport, epochs=2):
    kind = Synchronous if spec(mode).servers.mode == "sync" else Asynchronous
    account = Account()
    program = compiled()
    state = program.init(0)
    outputs = []
    with kind(spec(mode), transport, program.to_canonical(state), account) as coordinator:
        bound(coordinator)
        for output in serve_iter(coordinator, program, state, DATA, epochs=epochs):
            outputs.append(output)
            if output.fetched:
                state = output.state
    return state, account, outputs


def bound(coordinator):
    """Check the rule at every start of a step."""
    assign, most = coordinator._assign, coordinator.spec.servers.staleness

    def checked(worker, ticket):
        if most is not None:
            live = [one.clock for one in coordinator.workers if one.ready]
            assert worker.started - min(live) <= most
        assign(worker, ticket)

    coordinator._assign = checked


@functools.cache
def one_device():
    program = compiled()
    state = program.init(0)
    for output in px.train.train_iter(program, state, DATA, epochs=2, resident=False):
        state = output.state
    return state


def steps_of(outputs):
    return sum(len(output.metrics["loss"]) for output in outputs)


@pytest.mark.parametrize("mode", MODES)
@draws(8, times=120)
@given(seed=st.integers(0, 2**32 - 1))
def test_every_interleaving_keeps_what_is_promised(mode, seed):
    transport = Watched(seed)
    state, account, outputs = run(mode, transport)
    assert steps_of(outputs) == int(state.step) == STEPS
    assert account.updates == STEPS
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.params))
    versions = {}
    for actor, header, reply in transport.replies:
        found = reply.result()
        assert found.reason is None or (mode == "quorum" and found.reason == "late")
        assert found.version >= versions.get(actor.name, 0)
        versions[actor.name] = found.version
        assert found.staleness >= 0
        if mode in ("bounded", "async"):
            # Each other worker has at most so many pushes on their way or ahead.
            assert header.bases[0] == header.bases[1]
    if mode == "sync":
        assert models.max_rel_error(state.params, one_device().params) < 1e-5
        assert not account.rejected
    if mode == "bounded":
        # Each of two others takes at most 2 * 1 + 1 steps while a gradient is computed.
        assert max(account.staleness) <= 2 * (2 * 1 + 1)
    if mode == "quorum":
        late = 4 * STEPS - 1
        assert 0 <= account.dropped_examples <= late


@pytest.mark.parametrize("mode", ["sync", "bounded", "async"])
def test_the_same_seed_is_the_same_run(mode):
    first, second = (run(mode, Simulated(7))[0] for _ in range(2))
    assert models.same_bits(first.params, second.params)


def deaths(kinds, times):
    """Return a fault: at these turns an actor of these kinds, drawn, ends or stalls."""
    at = set(times)

    def fault(transport):
        if transport.turns in at:
            at.remove(transport.turns)
            names = sorted(n for n in transport.actors if n.split()[0] in kinds)
            if names:
                name = names[transport.random.integers(len(names))]
                if transport.random.integers(3) == 0 and name.startswith("worker"):
                    transport.stall(name)
                else:
                    transport.kill(name, machine=bool(transport.random.integers(2)))

    return fault


@pytest.mark.parametrize("kinds", [("worker",), ("server",), ("worker", "server")])
@pytest.mark.parametrize("mode", MODES)
@draws(4, times=120)
@given(seed=st.integers(0, 2**32 - 1), times=st.lists(st.integers(3, 120), min_size=1, max_size=2))
def test_every_death_is_survived_and_accounted_for(mode, kinds, seed, times):
    state, account, outputs = run(mode, Watched(seed, deaths(kinds, times)))
    assert steps_of(outputs) == int(state.step) == STEPS
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.params))
    if mode == "sync":
        # As if nothing had happened.
        assert models.max_rel_error(state.params, one_device().params) < 1e-5
        assert account.updates == STEPS
        assert not account.lost_updates
    if kinds == ("worker",):
        assert not account.lost_updates
    if mode in ("bounded", "async"):
        refused = sum(account.rejected.values())
        assert STEPS - refused <= account.updates <= STEPS


def ended_midway(name, times):
    """Return a fault: a server ends that has answered a push which another has still to answer."""
    left = [times]

    def fault(transport):
        actor = transport.actors.get(name)
        answered = {}
        for one, header, reply in transport.replies:
            there = answered.setdefault((header.worker, header.sequence), {})
            there[one.name] = reply.done()
        midway = any(done[name] and not all(done.values()) for done in answered.values())
        if actor is not None and actor.handle.calls and midway:
            left[0] -= 1
            if left[0] == 0:
                transport.kill(name)

    return fault


@pytest.mark.ci
@draws(6, times=60)
@given(seed=st.integers(0, 2**32 - 1), times=st.integers(1, 9))
def test_an_answer_from_before_a_server_went_back_counts_for_nothing(seed, times):
    state, account, _ = run("first", Watched(seed, ended_midway("server 0", times)))
    assert int(state.step) == account.updates == STEPS


@pytest.mark.parametrize("mode", ["bounded", "async"])
@draws(4, times=120)
@given(seed=st.integers(0, 2**32 - 1), at=st.integers(5, 100))
def test_lost_updates_are_the_versions_that_are_gone(mode, seed, at):
    """Versions are counted here, at the server itself, up to the moment of its death."""

    def fault(transport):
        actor = transport.actors.get("server 0")
        if transport.turns == at and actor is not None and actor.handle._made is not None:
            transport.kill("server 0")

    transport = Watched(seed, fault)
    _, account, _ = run(mode, transport)
    accepted = [
        reply.result()
        for actor, _, reply in transport.replies
        if actor.name == "server 0" and reply.exception() is None
    ]
    taken = [reply.version for reply in accepted if reply.reason is None]
    falls = [before - after + 1 for before, after in itertools.pairwise(taken)
             if after <= before]  # fmt: skip
    if falls:
        assert account.lost_updates[0] == sum(falls)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_workers_that_stop_while_they_compile_are_started_again(mode):
    def fault(transport):
        if transport.turns == 0 and transport.now() < 1:
            for index in range(3):
                transport.stall(f"worker {index}")

    state, account, _ = run(mode, Simulated(0, fault))
    assert int(state.step) == STEPS
    assert sorted(account.restarts) == ["worker 0", "worker 1", "worker 2"]


def test_workers_that_cannot_live_end_the_run():
    def fault(transport):
        for name in list(transport.actors):
            if name.startswith("worker"):
                transport.kill(name)

    with pytest.raises(px.errors.PlanError, match="all 3 workers ended, 3 times each without"):
        run("async", Simulated(0, fault))


def test_a_server_that_cannot_live_ends_the_run():
    with pytest.raises(px.errors.PlanError, match="server 1 ended 3 times without having answered"):
        run("async", Simulated(0, lambda transport: transport.kill("server 1")))
