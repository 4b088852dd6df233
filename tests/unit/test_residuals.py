"""What a compression has left to send outlives a run: it is saved with every checkpoint."""

import dataclasses
import functools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests import models
from tests.draws import draws
from tests.simulated import Simulated

import plurax as px
from plurax.checkpoint import Checkpoints
from plurax.errors import DamagedCheckpointWarning
from plurax.jaxpr.homes import RowSplit
from plurax.server.account import Account
from plurax.server.asynchronous import Asynchronous
from plurax.server.record import FILE, Record, read_events
from plurax.server.residuals import from_leaves, redistribute, to_leaves, zero_leaves
from plurax.server.servers import Servers
from plurax.server.shard_layout import ShardLayout
from plurax.server.synchronous import Synchronous
from plurax.server.thread_transport import Threads
from plurax.train.serve import run_spec, serve_iter

SYNC = Servers(workers=2, shards=2, compression="topk", transport="threads")
DATA = px.train.ArrayData(models.data(24), 8)
OPTIMIZER = optax.adam(0.05)
STEPS = 6  # two epochs


@functools.cache
def task():
    return models.mlp_task()


@functools.cache
def compiled():
    return px.compile(task(), OPTIMIZER, px.Plan(), DATA.example_batch())


def fitted(output, servers, **options):
    return px.fit(
        task(), OPTIMIZER, models.data(24), batch_size=8, epochs=2, progress=False, output=output,
        servers=servers, **options,
    )  # fmt: skip


def cut_off(run, folder, step):
    """Copy a run as if it had ended at this step."""
    shutil.copytree(run, folder, ignore=shutil.ignore_patterns("writer.lock"))
    for later in range(step + 1, STEPS + 1):
        shutil.rmtree(folder / "checkpoints" / str(later))
    return folder


def saved(output, step):
    like = zero_leaves(jax.tree.leaves(compiled().canonical_shapes.params))
    return Checkpoints(output / "checkpoints").residuals(step, like)


# --- Like the parameters, and as vectors ----------------------------------------------------------

# The first is cut where there are several servers.
LEAVES = [np.ones((1100, 1000), np.float32), np.ones((150, 150), np.float32),
          np.ones((2, 3), np.float32), np.ones(5, jnp.bfloat16), np.ones((40, 9), np.float32),
          np.ones(7, jnp.bfloat16)]  # fmt: skip


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_vectors_of_any_number_of_servers_have_the_same_residuals(shards):
    layout = ShardLayout(LEAVES, shards)
    assert isinstance(layout.homes[0], RowSplit) == (shards > 1)
    rng = np.random.default_rng(0)
    leaves = [rng.normal(size=leaf.shape).astype(np.float32) for leaf in LEAVES]
    vectors = from_leaves(layout, leaves)
    sizes = [[(vector.shape, str(vector.dtype)) for vector in one] for one in vectors]
    lengths = [layout.lengths(shard) for shard in range(shards)]
    assert sizes == [[((length,), "float32") for _, length in one] for one in lengths]
    assert models.same_bits(to_leaves(layout, vectors), leaves)


@draws(30)
@given(st.lists(st.lists(st.integers(-99, 99), min_size=2, max_size=2), max_size=7),
       st.integers(1, 9))  # fmt: skip
def test_none_of_the_sum_is_lost(numbers, workers):
    # Sums of whole numbers are exact.
    before = [[np.asarray(one, np.float32), np.float32(one[:1])] for one in numbers]
    after = redistribute(before, workers)
    assert len(after) == min(workers, len(before))
    assert all(
        np.array_equal(sum(one[leaf] for one in after), sum(one[leaf] for one in before))
        for leaf in range(2)
    )
    if workers >= len(before):
        assert after == before or models.same_bits(after, before)


# --- Of runs --------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["topk", "int8"])
def undisturbed(request, tmp_path_factory):
    """A run of which the checkpoints of its last three steps are kept."""
    output = tmp_path_factory.mktemp("run") / "run"
    servers = dataclasses.replace(SYNC, compression=request.param)
    return servers, output, fitted(output, servers, checkpoint_every=1).state


@pytest.mark.ci
@pytest.mark.parametrize("step", [4, 5])
def test_a_resumed_run_is_the_undisturbed_one_bit_for_bit(undisturbed, tmp_path, step):
    servers, output, expected = undisturbed
    folder = cut_off(output, tmp_path / "run", step)
    found = fitted(folder, servers, checkpoint_every=1, resume=True).state
    assert models.same_bits(found.params, expected.params)
    assert models.same_bits(found.opt_state, expected.opt_state)
    assert models.same_bits(saved(folder, STEPS), saved(output, STEPS))
    # What is saved is not nothing, nor the same of both workers.
    first, second = saved(folder, step)
    assert all(np.any(leaf) for leaf in first)
    assert not models.same_bits(first, second)


@pytest.mark.ci
@pytest.mark.parametrize("compression", ["topk", "int8"])
def test_a_number_that_all_servers_have_is_compressed_alike_on_each(tmp_path, compression):
    def loss(params, example, key):
        scale, shift = 0.03 * params["scale"], 0.1 * params["shift"]  # the weight's are larger
        error = (1 + scale) * (example["x"] @ params["weight"]) - shift
        return jnp.sum((error - example["y"].astype(error.dtype)) ** 2)

    first = {"weight": jnp.ones((models.FEATURES, 3)), "scale": jnp.ones(()), "shift": jnp.ones(())}
    scaled = px.Task(init=lambda key: jax.tree.map(jnp.copy, first), loss=px.per_example(loss))
    servers = dataclasses.replace(SYNC, shards=3, compression=compression)

    def fitted(epochs, **options):
        found = px.fit(scaled, optax.sgd(0.01), models.data(24), batch_size=8, servers=servers,
                       epochs=epochs, progress=False, **options)  # fmt: skip
        return found.state.params

    fitted(1, output=tmp_path)
    assert models.same_bits(fitted(2, output=tmp_path, resume=True), fitted(2))


def test_it_is_saved_where_something_is_left_alone(tmp_path):
    for name, servers in {"rounded": dataclasses.replace(SYNC, compression="bfloat16"),
                          "whole": dataclasses.replace(SYNC, compression=None),
                          "alone": None}.items():  # fmt: skip
        output = tmp_path / name
        fitted(output, servers)
        assert not (output / "checkpoints" / str(STEPS) / "residuals").exists()
        assert saved(output, STEPS) is None
        assert saved(output, 99) is None
        # Whoever resumes has nothing left to send.
        fitted(output, SYNC, resume=True)
        if servers is not None:
            start = json.loads((output / "servers.jsonl").read_text().splitlines()[-1])
            assert (start["event"], start["residuals"]) == ("start", False)


def test_a_run_goes_on_from_it_without_servers(undisturbed, tmp_path):
    _, output, _ = undisturbed
    found = fitted(cut_off(output, tmp_path / "run", 4), None, resume=True).state
    assert int(found.step) == STEPS


def test_damage_of_it_is_found(undisturbed, tmp_path):
    servers, output, expected = undisturbed
    folder = cut_off(output, tmp_path / "run", 5)
    digests = folder / "checkpoints" / "5" / "residuals" / "sha256.json"
    for name in json.loads(digests.read_text()):
        path = digests.parent / name
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]) if content else b"1")
    with pytest.warns(DamagedCheckpointWarning, match="bytes of residuals/"):
        found = fitted(folder, servers, resume=True).state
    assert models.same_bits(found.params, expected.params)


# --- Of workers -----------------------------------------------------------------------------------


def opened(folder, servers, residuals, transport=None):
    """The coordinator of a run that begins at step 0, whose workers have something left to send."""
    spec = run_spec(servers, compiled(), OPTIMIZER, DATA, DATA.example_batch())
    state = compiled().to_canonical(compiled().init(0))
    given = redistribute(residuals, servers.workers)
    kind = Synchronous if servers.mode == "sync" else Asynchronous
    return kind(spec, transport or Threads(), state, Account(), Record(folder, 0), residuals=given)


def drawn(workers):
    """Residuals of workers: whole numbers, whose sums are exact."""
    rng = np.random.default_rng(workers)
    like = zero_leaves(jax.tree.leaves(compiled().canonical_shapes.params))
    return [[rng.integers(-99, 99, one.shape).astype(one.dtype) for one in like]
            for _ in range(workers)]  # fmt: skip


@pytest.mark.parametrize("started", [True, False])
@pytest.mark.parametrize(("workers", "shards"), [(2, 2), (1, 3), (3, 1), (5, 2)])
def test_other_numbers_of_workers_and_servers_have_the_same_sum(tmp_path, workers, shards, started):
    before = drawn(3)
    servers = dataclasses.replace(SYNC, workers=workers, shards=shards)
    with opened(tmp_path, servers, before) as coordinator:
        while started and coordinator.live < workers:
            coordinator._wait()
        _, after = coordinator.state(0)
    assert len(after) == workers
    sums = [[sum(leaves) for leaves in zip(*each, strict=True)] for each in (before, after)]
    assert models.same_bits(*sums)
    if workers >= 3:
        assert models.same_bits(after[:3], before)


@pytest.mark.parametrize("started", [True, False])
def test_a_worker_that_is_lost_takes_it_along(tmp_path, started):
    before, transport = drawn(2), Simulated(0)
    with opened(tmp_path, SYNC, before, transport) as coordinator:
        while started and coordinator.live < 2:
            coordinator._wait()
        transport.kill("worker 1")
        while not coordinator.account.restarts:
            coordinator.state(0)
        while coordinator.live < 2:
            coordinator._wait()
        _, (first, second) = coordinator.state(0)
    assert models.same_bits(first, before[0])
    assert models.same_bits(second, zero_leaves(second))


def test_a_worker_that_is_lost_before_the_state_is_fetched_has_nothing(tmp_path):
    """What it had is fetched already, but in the record its loss comes first."""

    def fault(transport):
        server = transport.actors["server 0"]
        if not stalled and any(method == "snapshot" for method, *_ in server.handle.calls):
            stalled.append(transport.turns)
            transport.stall("worker 1")
            transport.stall("server 0")  # for a lease, so that the coordinator looks who lives

    servers = dataclasses.replace(SYNC, mode="async")
    before, stalled = drawn(2), []
    with opened(tmp_path, servers, before, Simulated(0, fault)) as coordinator:
        while coordinator.live < 2:
            coordinator._wait()
        _, (first, second) = coordinator.state(0)
        assert sorted(coordinator.account.restarts) == ["server 0", "worker 1"]
    assert [event["event"] for event in read_events(tmp_path / FILE)][-1] == "fetched"
    assert models.same_bits(first, before[0])
    assert models.same_bits(second, zero_leaves(second))


class Patient(Simulated):
    """Misses nobody, as Ray misses no process that has not started yet."""

    def silent(self, actors, seconds):
        return []


@pytest.mark.parametrize("seconds", [SYNC.lease / 2, 2 * SYNC.lease])
def test_each_part_is_of_the_same_worker_from_the_first_step_on(tmp_path, seconds):
    """In `sync` a worker is waited for that starts late, for as long as a lease."""

    def fault(transport):
        if transport.turns == 0:
            transport.stall("worker 0")
        elif transport.now() >= seconds:
            transport.resume("worker 0")

    with opened(tmp_path, SYNC, [], Patient(0, fault)) as coordinator:
        program = compiled()
        turns = serve_iter(coordinator, program, program.init(0), DATA, epochs=2)
        assert sum(len(output.metrics["loss"]) for output in turns) == STEPS
    pulls = [e for e in read_events(tmp_path / FILE) if e["event"] == "pull"]
    found = [(event["part"], event["worker"]) for event in pulls]
    if seconds < SYNC.lease:
        assert found == [(0, 0), (1, 1)] * STEPS
    else:
        assert found[:2] == [(0, 1), (1, 1)]
