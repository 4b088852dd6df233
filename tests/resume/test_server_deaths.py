"""Workers and servers on Ray, real processes, killed and stopped: training goes on and accounts.

Every interleaving is tried in one process by `tests/unit/test_interleavings.py`; here is what only
real processes have: they end without a word, or stop answering.
"""

import importlib
import os
import signal
import subprocess
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests import models

import plurax as px
from plurax.server.account import Account
from plurax.server.asynchronous import Asynchronous
from plurax.server.ray_transport import RayTransport, _ray
from plurax.server.record import Record, read_events
from plurax.server.run_spec import RunSpec
from plurax.server.servers import Servers
from plurax.server.synchronous import Synchronous
from plurax.server.thread_transport import Threads
from plurax.train.serve import serve_iter

pytestmark = pytest.mark.gangs

DATA = px.train.ArrayData(models.data(64), 8)
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.02))
SYNC = Servers(workers=2, shards=2, snapshot_every=5, lease=6.0)
BOUNDED = Servers(workers=2, shards=2, mode="bounded", staleness=1, snapshot_every=5, lease=6.0)


ROUNDS = 20
"""Of each fault in the release run."""


class Faults:
    """Signals to the processes of workers and servers, each once its process is well again."""

    def __init__(self, targets, rounds):
        self.targets, self.rounds, self.left, self.struck = targets, rounds, rounds, set()

    def strike(self, coordinator):
        """Send all signals of a round, if all of its processes have answered since the last."""
        slots = {slot.actor.name: slot for slot in (*coordinator.workers, *coordinator.shards)}
        chosen = [slots[name] for name, _ in self.targets]
        if not self.left or any(one.deaths or not getattr(one, "ready", True) for one in chosen):
            return
        import ray  # not before the transport, which sets its token

        pings = [one.actor.handle.host.ping.remote() for one in chosen]
        try:
            pids = [pid for _, pid in ray.get(pings, timeout=10.0)]
        except (ray.exceptions.GetTimeoutError, ray.exceptions.RayActorError):
            return  # one that was struck before is still there, or the coordinator has not noticed
        if self.struck & {*pids}:
            return
        for pid, (_, number) in zip(pids, self.targets, strict=True):
            os.kill(pid, number)
        self.struck |= {*pids}
        self.left -= 1


NONE = Faults([], 0)


def train(servers, faults, folder, transport=None, steps=40, optimizer=OPTIMIZER, exactly=None):
    """Train for some steps, and until all faults have been; return state, account and events."""
    task = models.mlp_task()
    program = px.compile(task, optimizer, px.Plan(), DATA.example_batch())
    state = program.to_canonical(program.init(0))
    like = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((leaf.shape[0] // servers.parts, *leaf.shape[1:]),
                                          leaf.dtype),
        DATA.example_batch(),
    )  # fmt: skip
    spec = RunSpec(task, optimizer, servers, px.Plan(), like, DATA.arrays)
    kind = Synchronous if servers.mode == "sync" else Asynchronous
    record, account = Record(folder, 0), Account()
    losses = []
    transport = transport or RayTransport(servers)
    with kind(spec, transport, state, account, record) as coordinator:

        def done():
            ended = faults.left == 0 and all(
                account.restarts.count(name) >= faults.rounds for name, _ in faults.targets
            )
            return exactly is None and len(losses) >= steps and ended

        for output in serve_iter(
            coordinator,
            program,
            state,
            DATA,
            stopping=done,
            epochs=10_000,
            checkpoint_every=exactly,
        ):
            losses.extend(output.metrics["loss"].tolist())
            if len(losses) > 5:
                faults.strike(coordinator)
            state = output.state
            if output.step == exactly:
                break
    assert len(losses) == int(state.step)
    half = len(losses) // 2  # the loss of one batch says little
    assert np.mean(losses[half:]) < np.mean(losses[:half])
    return state, account, read_events(folder / "servers.jsonl")


def lost(events):
    """The updates that each death took, by what the record says of versions."""
    found = {}
    for event in events:
        if event["event"] == "server lost":
            fell = event["version"] - event["restored"]
            found[event["server"]] = found.get(event["server"], 0) + fell
    return found


KILL, STOP = signal.SIGKILL, signal.SIGSTOP


def test_a_worker_and_a_server_are_killed(tmp_path, monkeypatch):
    """Two rounds of each, at once; what is trained needs a module beside the user's file."""
    (tmp_path / "beside_the_file.py").write_text("def doubled(x):\n    return 2 * x\n")
    monkeypatch.syspath_prepend(tmp_path)
    beside = importlib.import_module("beside_the_file")
    double = optax.stateless(lambda updates, params: jax.tree.map(beside.doubled, updates))
    faults = Faults([("worker 0", KILL), ("server 1", KILL)], 2)
    optimizer = optax.chain(OPTIMIZER, double)
    _, account, events = train(BOUNDED, faults, tmp_path, optimizer=optimizer)
    assert account.restarts.count("worker 0") == account.restarts.count("server 1") == 2
    assert dict(account.lost_updates) == lost(events)
    # Between two snapshots, and while one is taken.
    most = BOUNDED.snapshot_every + 2 * BOUNDED.workers
    assert 0 <= account.lost_updates[1] <= 2 * most


CASES = {
    "a worker is killed": [("worker 1", KILL)],
    "a worker is stopped": [("worker 0", STOP)],
    "all workers are killed": [("worker 0", KILL), ("worker 1", KILL)],
    "a server is killed": [("server 0", KILL)],
    "a server is stopped": [("server 1", STOP)],
    "all servers are killed": [("server 0", KILL), ("server 1", KILL)],
    "one of each": [("server 0", KILL), ("worker 0", KILL)],
}


@pytest.mark.slow
@pytest.mark.parametrize("servers", [SYNC, BOUNDED], ids=["sync", "bounded"])
@pytest.mark.parametrize("name", CASES)
def test_every_death_is_survived(name, servers, tmp_path):
    faults = Faults(CASES[name], ROUNDS)
    state, account, events = train(servers, faults, tmp_path)
    for who, _ in CASES[name]:
        assert account.restarts.count(who) == ROUNDS
    if servers is SYNC:
        steps = int(state.step)
        expected, *_ = train(servers, NONE, tmp_path, Threads(), exactly=steps)
        assert models.same_bits(state.params, expected.params)
        assert account.updates == steps
        assert not account.lost_updates
    else:
        assert dict(account.lost_updates) == lost(events)


@pytest.fixture(scope="module")
def cluster():
    """The address of a Ray cluster of one machine that somebody else started, with our token."""
    _ray(None)  # with a token
    code = (
        "import ray, sys\n"
        "ray.init(address='local', num_cpus=4, include_dashboard=False, log_to_driver=False)\n"
        "print(ray.get_runtime_context().gcs_address, flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    ) as head:  # fmt: skip
        yield head.stdout.readline().strip()
        head.stdin.close()


def test_a_cluster_at_an_address(cluster, tmp_path):
    """Workers and servers of two runs, one after the other: through Ray's store, with deaths."""
    state, *_ = train(replace(SYNC, address=cluster), NONE, tmp_path, exactly=10)
    expected, *_ = train(SYNC, NONE, tmp_path, Threads(), exactly=10)
    assert models.same_bits(state.params, expected.params)
    faults = Faults([("worker 0", KILL), ("server 1", KILL)], 1)
    _, account, events = train(replace(BOUNDED, address=cluster), faults, tmp_path)
    assert {*account.restarts} == {"worker 0", "server 1"}
    assert dict(account.lost_updates) == lost(events)


def test_another_token_is_refused(cluster):
    code = (
        "from plurax.server.ray_transport import RayTransport\n"
        "from plurax.server.servers import Servers\n"
        f"RayTransport(Servers(address={cluster!r}))\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "RAY_AUTH_TOKEN": "b" * 64}, capture_output=True, text=True,
    )  # fmt: skip
    assert "PlanError" in found.stderr
    assert "or it refuses this token" in found.stderr


def test_an_address_where_nobody_answers_is_refused_at_once():
    _ray(None)
    with pytest.raises(px.errors.PlanError, match="there is no Ray cluster that answers"):
        RayTransport(Servers(address="ray://127.0.0.1:1"))


def test_a_cluster_without_a_token_is_refused(monkeypatch):
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    with pytest.raises(px.errors.PlanError, match="plurax uses only one that asks for a token"):
        RayTransport(Servers(address="127.0.0.1:1"))


def test_a_store_that_is_too_small_is_refused():
    with pytest.raises(
        px.errors.PlanError, match="GB of memory that processes share, and /dev/shm has"
    ):
        RayTransport(SYNC, store_bytes=1 << 50)


def test_arrays_that_a_task_reads_keep_64_bits_in_a_worker(x64):
    """They arrive before its first line, in which it would be told of 64 bits."""
    third, data = jnp.asarray(1 / 3), models.data(16, dtype=np.float64)
    task = px.Task(
        init=lambda key: jnp.zeros(models.FEATURES),
        loss=lambda params, batch, keys: (batch["x"] @ params - third) ** 2,
    )
    found, expected = (
        px.fit(task, optax.sgd(0.1), data, batch_size=8, progress=False, servers=servers)
        for servers in (Servers(workers=1), None)
    )
    assert models.max_rel_error(found.state.params, expected.state.params) < 1e-10
