"""Who a process is, what all agree on, and what is said where they do not find each other."""

import os
import socket
import subprocess
import sys
import types
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from tests import models

import plurax as px
from plurax import errors
from plurax.distributed import initialize as initialize_module
from plurax.distributed import process_group
from plurax.distributed.environment import (
    GangEnvironment,
    attempt,
    first_host,
    gang_of,
    writes_files,
)
from plurax.distributed.global_arrays import fetch, gather, least, put
from plurax.distributed.initialize import _check_port as check_port
from plurax.distributed.initialize import exit_code
from plurax.distributed.process_group import ProcessGroup, open_group
from plurax.execute import program as program_module
from plurax.execute import state_store
from plurax.execute.array_data import ArrayData
from plurax.hlo.compiled_collectives import collectives
from plurax.mesh import _grid, make_mesh
from plurax.plan import MESH_AXES

LAUNCHED = {"PLURAX_COORDINATOR": "10.0.0.1:4321", "PLURAX_PROCESSES": "4", "PLURAX_PROCESS": "2"}
SLURM = {
    "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "16", "SLURM_PROCID": "11",
    "SLURM_LOCALID": "3", "SLURM_STEP_NODELIST": "gpu[007-008]",
    "SLURM_STEP_TASKS_PER_NODE": "8(x2)",
}  # fmt: skip


# --- The environment --------------------------------------------------------------------------


def test_a_launcher_describes_the_gang():
    assert gang_of(LAUNCHED) == GangEnvironment("10.0.0.1:4321", 4, 2)
    assert gang_of({**LAUNCHED, "PLURAX_DEVICES": "8"}) == GangEnvironment(
        "10.0.0.1:4321", 4, 2, devices=8
    )
    assert gang_of({}) is None


def test_slurm_describes_the_gang():
    """One process for each GPU owns one device; one for each node owns all of its devices."""
    gang = gang_of(SLURM)
    assert gang == GangEnvironment(gang.coordinator, 16, 11, local_devices=(3,))
    assert gang.coordinator.startswith("gpu007:")
    one = gang_of({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "1(x16)", "SLURM_LOCALID": "0"})
    assert one.local_devices is None
    again = gang_of({**SLURM, "SLURM_RESTART_COUNT": "1"})
    assert again.coordinator != gang.coordinator, "a requeued job listens at another port"
    # In a batch script, outside a step, and in a step of one task, a process is alone.
    assert gang_of({**SLURM, "SLURM_STEP_NUM_TASKS": "1"}) is None
    assert gang_of({"SLURM_JOB_ID": "77", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}) is None


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("a", "a"), ("a,b", "a"), ("n[1-3,7],m4", "n1"), ("n[12]", "n12"), ("x[01-02]-ib", "x01-ib")],
)
def test_the_first_host_of_a_node_list(nodes, first):
    assert first_host(nodes) == first


def test_who_writes_and_how_often_it_was_started():
    assert writes_files({})
    assert not writes_files(LAUNCHED)
    assert writes_files({**LAUNCHED, "PLURAX_PROCESS": "0"})
    assert (attempt({}), attempt({"PLURAX_ATTEMPT": "2"})) == (0, 2)
    assert attempt({"SLURM_RESTART_COUNT": "1"}) == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"PLURAX_COORDINATOR": ""}, "the environment has some of"),
        ({"PLURAX_PROCESS": "x"}, "PLURAX_PROCESS='x' must be a whole number"),
        ({"PLURAX_PROCESS": "4"}, "process=4 is not one of 4 processes"),
        ({"PLURAX_PROCESSES": "0"}, "processes=0 must be a positive whole number"),
        ({"PLURAX_COORDINATOR": "10.0.0.1"}, "coordinator='10.0.0.1' is no address"),
        ({"PLURAX_COORDINATOR": "a:99999"}, "coordinator='a:99999' is no address"),
    ],
)
def test_an_environment_that_makes_no_sense_is_refused(given, message):
    with pytest.raises(px.errors.ProcessError, match=message):
        gang_of({**LAUNCHED, **given})


# --- Joining ----------------------------------------------------------------------------------


def test_initialize_without_a_gang_does_nothing():
    px.initialize()
    assert not jax.distributed.is_initialized()


def test_initialize_is_refused_too_late_and_by_halves():
    with pytest.raises(px.errors.ProcessError, match=r"needs processes and process too") as caught:
        px.initialize("127.0.0.1:1234")
    assert "Under `plurax launch` and `srun` give no arguments." in str(caught.value)
    with pytest.raises(
        px.errors.ProcessError, match=r"needs coordinator and processes and process too"
    ):
        px.initialize(devices=2)
    jax.devices()
    with pytest.raises(px.errors.ProcessError, match=r"comes too late: JAX has been used"):
        px.initialize("127.0.0.1:1234", 2, 0)


def test_initialize_is_refused_twice(monkeypatch):
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    with pytest.raises(px.errors.ProcessError, match="the processes are joined already"):
        px.initialize("127.0.0.1:1234", 2, 0)


def test_initialize_says_where_it_did_not_find_the_others():
    free = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{free.getsockname()[1]}"
    free.close()
    code = (
        "import plurax as px, plurax.distributed.initialize as module\n"
        "module.INITIALIZE_SECONDS = 2\n"
        "module.NOTICE_SECONDS = 0.1\n"
        f"px.initialize({address!r}, 2, 1)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert f"process 1 could not join the others at {address}: [Errno" in done.stderr
    assert f"process 1 waits for all 2 processes at {address}, for at most 2 s" in done.stderr


def test_a_host_whose_name_is_loopback_is_refused(monkeypatch):
    monkeypatch.setattr(socket, "gethostbyname", {"here": "127.0.1.1", "n0": "10.0.0.1"}.get)
    monkeypatch.setattr(socket, "gethostname", lambda: "here")
    with pytest.raises(
        px.errors.ProcessError, match="this host's name, here, resolves to its loopback"
    ):
        initialize_module._check_name("n0")
    initialize_module._check_name("here")  # all processes are on this host


@pytest.mark.ci
def test_devices_are_chosen_by_the_launcher(tmp_path):
    file = tmp_path / "file.py"
    file.write_text("def experiment(): ...\n")
    done = subprocess.run(
        [sys.executable, "-m", "plurax.cli", "train", str(file), "--devices", "2"],
        capture_output=True, text=True, env={**os.environ, **LAUNCHED}, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2
    assert "--devices 2 is for one process." in done.stderr


def test_a_port_that_is_taken_is_named():
    """134: a launcher starts all again, with another one."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = taken.getsockname()
        coordinator = f"127.0.0.1:{address[1]}"
        with pytest.raises(errors.PeerError, match=f"cannot listen at {coordinator} for") as raised:
            check_port(*address)
    check_port(*address)
    assert exit_code(raised.value) == 134


def test_the_exit_code_says_whose_fault_it_was():
    assert exit_code(errors.process_ended("process 1")) == 134
    assert exit_code(jax.errors.JaxRuntimeError("Gloo all-reduce: Connection reset")) == 134
    assert exit_code(errors.BatchError("epochs=0")) == 2
    assert exit_code(errors.OutOfMemoryError("out of memory under Plan(data=2)")) == 79
    assert exit_code(jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 1 byte")) == 79
    assert exit_code(MemoryError()) == 79
    assert exit_code(ZeroDivisionError()) == 1


# --- What all agree on ------------------------------------------------------------------------


@pytest.fixture
def groups():
    """Connects the groups of a gang within this process, and closes them."""
    opened = []
    yield lambda count: opened.extend(connected(count)) or opened
    for group in opened:
        group.close()


def connected(count):
    pairs = [socket.socketpair() for _ in range(count - 1)]
    for one in (socket_ for pair in pairs for socket_ in pair):
        one.settimeout(20)
    with ThreadPoolExecutor(count) as pool:
        own = [[a for a, _ in pairs], *([b] for _, b in pairs)]
        started = [pool.submit(ProcessGroup, index, each) for index, each in enumerate(own)]
        return [one.result() for one in started]


def everywhere(gang, function):
    """What a function returns in each process, or the exception that it raised."""

    def guarded(group):
        try:
            return function(group)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(gang)) as pool:
        return list(pool.map(guarded, gang))


@pytest.mark.parametrize("count", [2, 3])
def test_all_gather(count, groups):
    gang = groups(count)
    assert [group.count for group in gang] == [count] * count
    for round_ in range(3):
        found = everywhere(gang, lambda group: group.all_gather([round_, group.index]))  # noqa: B023
        assert found == [[[round_, index] for index in range(count)]] * count


def test_one_process_agrees_with_itself():
    group = open_group()
    assert group.is_primary
    assert group.all_gather("x") == ["x"]
    assert group.on_primary(lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        group.on_primary(lambda: 1 / 0)


def test_what_the_first_process_finds_all_get(groups):
    called = []
    gang = groups(3)
    found = everywhere(gang, lambda group: group.on_primary(lambda: called.append(1) or 7))
    assert found == [7, 7, 7]
    assert called == [1]


def test_what_the_first_process_raises_all_raise(groups):
    """With its kind and its text; what is not an error of plurax names its kind."""

    def refused():
        raise errors.CheckpointError("pass one of them")

    gang = groups(2)
    found = everywhere(gang, lambda group: group.on_primary(refused))
    assert [type(error) for error in found] == [errors.CheckpointError] * 2
    assert len({str(error) for error in found}) == 1
    first, second = everywhere(gang, lambda group: group.on_primary(lambda: 1 / 0))
    assert isinstance(first, ZeroDivisionError)
    words = "failed, so all of them stop: ZeroDivisionError: division by zero"
    assert str(second) == f"process 0 on {socket.gethostname()} {words}"

    # What only one raises in `together` names that one.
    def fails(group):
        return group.together(lambda: 1 // (1 - group.index))

    first, second = everywhere(gang, fails)
    here = f"process 1 on {socket.gethostname()} failed, so all of them stop: ZeroDivisionError: "
    assert str(first).startswith(here)
    assert isinstance(second, ZeroDivisionError)
    # The round is complete in all of them: the next one is not out of step.
    assert everywhere(gang, lambda group: group.all_gather(1)) == [[1, 1]] * 2


@pytest.mark.parametrize("gone", [0, 1, 2])
def test_a_process_that_ended_is_named(gone, groups):
    """To process 0, which all others talk with; where that is gone, to each of them."""
    gang = groups(3)
    gang[gone].close()
    left = gang[:1] if gone else gang[1:]
    for error in everywhere(left, lambda group: group.all_gather(1)):
        assert isinstance(error, px.errors.ProcessError)
        assert f"process {gone} on {socket.gethostname()} has ended" in str(error)


def test_who_leaves_keeps_nobody_waiting(groups):
    gang = groups(2)
    gang[1].leave()
    found = everywhere(gang, lambda group: group.all_gather(1))
    assert all(isinstance(error, errors.PeerError) for error in found), found


def test_a_process_that_is_late_is_named(groups):
    gang = groups(2)
    gang[0].seconds = 0.05
    (found,) = everywhere(gang[:1], lambda group: group.all_gather(1))
    assert isinstance(found, px.errors.ProcessError)
    assert "process 1" in str(found)
    assert "did not take part for" in str(found)


def test_strangers_are_not_let_in(monkeypatch):
    """Only who knows the secret is connected; who is missing is named."""
    monkeypatch.setattr(process_group, "CONNECT_SECONDS", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        others = [socket.create_connection(address) for _ in range(2)]
        others[0].sendall(b"guessed 1\n")
        others[1].sendall(b"secret 2\n")
        with pytest.raises(px.errors.ProcessError, match=r"process 1 did not connect within"):
            process_group._accepted(server, "secret", 3)
    for one in others:
        one.close()


def test_a_stranger_that_says_nothing_keeps_nobody_out(monkeypatch):
    monkeypatch.setattr(process_group, "TOKEN_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        with socket.create_connection(address), socket.create_connection(address) as other:
            other.sendall(b"secret 1\n")
            (found,) = process_group._accepted(server, "secret", 2)
            assert found.getpeername() == other.getsockname()
            found.close()


def test_the_first_process_cannot_be_reached(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(process_group, "_broadcast", lambda _: ("127.0.0.1", port, "secret"))
    with pytest.raises(
        px.errors.ProcessError, match=r"process 0 could not be reached at 127.0.0.1:"
    ):
        open_group()


# --- Arrays, in one process; tests/processes has several ----------------------------------------


def test_put_and_fetch_in_one_process():
    mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])
    rows = jax.sharding.NamedSharding(mesh, P("data"))
    values = {"x": np.arange(8.0, dtype=np.float32), "y": np.ones((4, 2), np.float32)}
    placed = put(values, rows)
    assert all(leaf.sharding == rows for leaf in jax.tree.leaves(placed))
    for found in (fetch(placed), gather(placed)):
        jax.tree.map(np.testing.assert_array_equal, found, values)
    assert least(3) == 3


@pytest.mark.parametrize("shares", [(2, 2, 2), (4, 1)])
def test_a_plan_must_use_every_process_equally(shares):
    devices = [
        types.SimpleNamespace(process_index=process, platform="gpu")
        for process, share in enumerate(shares)
        for _ in range(share)
    ]
    with pytest.raises(
        px.errors.PlanError, match=f"which {len(shares)} processes cannot share equally"
    ):
        make_mesh(px.Plan(data=4), devices)


@pytest.mark.parametrize(
    ("sizes", "processes", "axes"),
    [
        ({"data": 4, "tensor": 2}, 2, {"data"}),
        ({"data": 2, "pipeline": 2, "tensor": 2}, 4, {"data", "pipeline"}),
        ({"member": 2, "data": 2, "tensor": 2}, 2, {"member"}),
        ({"data": 3, "tensor": 4}, 2, {"tensor"}),
        ({"tensor": 8}, 4, {"tensor"}),
    ],
)
def test_the_last_axes_stay_within_a_process(sizes, processes, axes):
    """Which axes of the mesh lead from one process to another."""
    plan = px.Plan(**sizes)
    devices = [
        types.SimpleNamespace(
            id=i, process_index=i * processes // plan.devices, platform="gpu", device_kind="gpu"
        )
        for i in range(plan.devices)
    ]
    grid = _grid([plan.axes[axis] for axis in MESH_AXES], devices)
    assert {device.id for device in grid.flat} == set(range(plan.devices))
    owner = np.vectorize(lambda device: device.process_index)(grid)
    across = {axis for dim, axis in enumerate(MESH_AXES) if (np.diff(owner, axis=dim) != 0).any()}
    assert across == axes


@pytest.mark.ci
def test_data_that_are_spread_stay_spread():
    """A step moves rows of its batch between devices, never the data set; the numbers are equal."""
    rows = models.data(500)  # 500 do not divide by 8
    data = ArrayData(rows, 16)
    task, optimizer = models.mlp_task(), models.optimizer()
    program = px.compile(task, optimizer, px.Plan(data=8), data.example_batch())
    order = program.place_epoch(*data.epoch_order(0))
    states = []
    for spread in (False, True):
        placed = program.place_data(rows, spread=spread)
        state, _ = program.loop(program.init(0), placed, order, 0, 20)
        states.append(state.params)
    assert placed["x"].addressable_shards[0].data.shape[0] == 63
    assert models.same_bits(*states)
    compiled = program.compile_loop(placed, order)
    moved = [one.bytes for one in collectives(compiled.as_text(), program.mesh)]
    assert len(moved) > 1
    assert max(moved) < 16 * 500  # of 500 rows of 24 bytes and more


def test_own_inputs_are_arrays_for_one_network(x64):
    batch = models.data(8, dtype=np.float64)
    program = px.compile(
        models.mlp_task(dtype=np.float64), models.optimizer(), px.Plan(data=2), batch
    )
    state = program.init(0)
    whole, own = program.predict(state, batch), program.predict(state, batch, local=True, chunk=3)
    assert whole.dtype == np.float64  # of float32 chunks differ by a bit
    np.testing.assert_allclose(own, whole, rtol=1e-10)
    with pytest.raises(
        px.errors.BatchError, match=r"predict\(local=True\) is for arrays of inputs, of"
    ):
        program.predict(state, [batch], local=True)


@pytest.mark.parametrize(
    "call",
    [
        lambda *task: px.fit(*task, models.data(8), batch_size=8, servers=px.Servers()),
        lambda *task: px.ensemble.tune(*task, models.data(8), members=px.Members(2), batch_size=8),
        lambda *task: px.analysis.fastest_batch_size(*task, px.Plan(), models.data(8)),
        lambda *_: px.analysis.measure_machine(),
    ],
    ids=["servers", "tune", "fastest_batch_size", "measure_machine"],
)
def test_what_is_for_one_process_says_so(call, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(px.errors.ProcessError, match="is for one process, and there are 2"):
        call(models.mlp_task(), models.optimizer())


CALLS = {
    "init": lambda program, state, gradients: program.init(0),
    "gradients": lambda program, state, gradients: program.gradients(state, models.data(9)),
    "apply": lambda program, state, gradients: program.apply(state, gradients)[0],
    "to_canonical": lambda program, state, gradients: program.to_canonical(state),
    "place": lambda program, state, gradients: program.place(program.to_canonical(state)),
}
"""What starts a computation on the devices of all processes; of steps, `DispatchLimiter` waits."""


@pytest.mark.parametrize("name", CALLS)
def test_where_processes_share_cpus_a_call_waits_for_its_result(name, monkeypatch):
    """Two in flight, in another order on each process, would receive each other's data."""
    plan = px.Plan(data=3, zero=1)  # the state is padded: its canonical form is another
    program = px.compile(models.mlp_task(), optax.adam(1e-2), plan, models.data(9))
    state = program.init(0)
    gradients = program.gradients(state, models.data(9))
    waited = []

    def wait(result):
        waited.extend(map(id, jax.tree.leaves(result)))
        return result

    for module in (program_module, state_store):
        monkeypatch.setattr(module, "one_at_a_time", wait)
    result = CALLS[name](program, state, gradients)
    assert {id(leaf) for leaf in jax.tree.leaves(result)} <= set(waited)
