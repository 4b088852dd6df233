"""Gangs on two hosts, network namespaces of this machine: their network is cut, slow, misnamed.

Rows 12 and 13 of the list of faults.
"""

import contextlib
import os
import secrets
import subprocess
import sys
import tempfile

import pytest

from plurax.checkpoint import Checkpoints
from tests.faults.launched import PLURAX, launching
from tests.faults.namespaces import two_hosts
from tests.faults.run import STEPS
from tests.faults.test_kills import check_end

pytestmark = pytest.mark.gangs

PORT = 7117

SHORT = """
import functools
from plurax.cli import launch_command, main

launch_command.Limits = functools.partial(launch_command.Limits, silence=3, retry=0.1)
main()
"""
"""A launcher that waits only a short time for another host."""


@pytest.fixture
def hosts(tmp_path):
    with two_hosts(tmp_path) as found:
        yield found


@contextlib.contextmanager
def both(hosts, folder, faults=(), leader=None, names=({}, {}), plurax=PLURAX):
    """Launch the run on both hosts, with a process each; `leader`, how they call host 0."""
    with contextlib.ExitStack() as stack:
        place = ("--hosts", 2, "--coordinator", f"{leader or hosts[0].address}:{PORT}", "--host")
        launched = [
            launching(
                folder, faults, 1, options=(*place, index), plurax=plurax,
                prefix=hosts[index].prefix(**names[index]), name=f"host{index}",
                shared=hosts[index].shared, PLURAX_TOKEN="secret",
            )
            for index in range(2)
        ]  # fmt: skip
        yield [stack.enter_context(one) for one in launched]


def check_ended(launches, code=0):
    """Raise `AssertionError` unless both launchers end with a code, and nothing is left of them."""
    for one in launches:
        assert one.wait() == code, one.said
    for one in launches:
        one.check_nothing_left()


def fault(what, step=15):
    return {"who": [1], "what": what, "step": step}


@pytest.mark.slow
def test_two_hosts_end_as_one(hosts, tmp_path):
    """The same processes on one host end with the same bits."""
    with both(hosts, tmp_path) as launches:
        check_ended(launches)
        assert launches[0].restarts() == []
    with launching(tmp_path / "one") as launch:
        check_ended([launch])
    found, expected = (
        Checkpoints(folder / "run" / "checkpoints").fingerprints(STEPS)
        for folder in (tmp_path, tmp_path / "one")
    )
    assert found == expected


@pytest.mark.slow
def test_the_link_is_down_for_a_moment(hosts, tmp_path):
    """What was sent meanwhile is sent again, and nobody takes that for a fault."""
    with both(hosts, tmp_path, [fault("cut")]) as launches:
        launches[1].until("the link is down")
        hosts[1].mend()
        check_ended(launches)
        assert launches[0].restarts() == []
    check_end(tmp_path)


def check_lost(hosts, folder, what, plurax=PLURAX):
    """Both sides notice, each ends its process; once the link is back the run ends bit-equal."""
    with both(hosts, folder, [fault(what)], plurax=plurax) as launches:
        launches[0].until("host 1 is lost")
        # From the checkpoint of step 10, or on a busy machine from the start.
        launches[0].until("restarting the 2 processes from the ")
        launches[1].until("the leader is lost")
        hosts[1].mend()
        check_ended(launches)
        assert launches[0].restarts() == [(1, 134)]
    check_end(folder)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["cut", "drop"])
def test_the_link_is_lost_until_the_launchers_notice(hosts, tmp_path, what):
    """Cut in both directions, or silent in one."""
    check_lost(hosts, tmp_path, what, ("-c", SHORT))


@pytest.mark.slow
def test_the_link_is_lost_with_the_limits_of_a_real_run(hosts, tmp_path):
    check_lost(hosts, tmp_path, "cut")


@contextlib.contextmanager
def ray_cluster(hosts, folder):
    """Start Ray on both hosts; yield its address, and the environment in which it is reached."""
    (folder / "token").write_text(secrets.token_hex(32))
    variables = {
        "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(folder / "token"),
        "RAY_USAGE_STATS_ENABLED": "0", "PYTHONUNBUFFERED": "1",
    }  # fmt: skip
    address = f"{hosts[0].address}:6379"
    sockets = tempfile.TemporaryDirectory()  # a socket's path is short
    head = ("--head", "--port=6379", "--include-dashboard=false", f"--temp-dir={sockets.name}")
    command = (sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=1")
    with sockets, contextlib.ExitStack() as stack:
        for host, options in zip(hosts, (head, (f"--address={address}",)), strict=True):
            stack.callback(host.kill_all)
            own = (f"--node-ip-address={host.address}", "--object-store-memory=80000000")
            node = subprocess.Popen(
                [*host.prefix(), *command, *own, *options],
                env={**os.environ, **variables},
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            stack.enter_context(node)
            stack.callback(node.kill)
            assert any("Ray runtime started" in line for line in node.stdout)
        yield address, variables


@pytest.mark.slow
def test_the_link_to_a_host_of_a_cluster_is_lost(hosts, tmp_path):
    """Before Ray itself takes the host for dead, which is after a minute."""
    pytest.importorskip("ray")
    with ray_cluster(hosts, tmp_path) as (address, variables):
        options = ("--ray", address, "--hosts", 2)
        with launching(
            tmp_path, [fault("cut")], 1, options=options, prefix=hosts[0].prefix(),
            shared=hosts[0].shared, **variables,
        ) as launch:  # fmt: skip
            launch.until("nothing was heard of it for 30 s; Ray starts it again")
            for host in hosts:
                host.mend()
            assert launch.wait() == 0, launch.said
            assert [code for _, code in launch.restarts()] == [134]
    check_end(tmp_path)


SLOW = {
    "tbf": ("rate", "1mbit", "burst", "1600", "limit", "6000"),
    "netem": ("delay", "5ms", "loss", "1%"),
}
"""Queues that let packets wait, and that lose some; not every kernel has each."""


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "counted"), [("tbf", "overlimits"), ("netem", "drops")])
def test_a_slow_link(hosts, tmp_path, kind, counted):
    """Training takes longer: no false alarm, although the launchers wait only a short time."""
    try:
        for host in hosts:
            host.send_through(kind, *SLOW[kind])
    except subprocess.CalledProcessError as error:
        pytest.skip(f"needs a kernel with {kind}: {error.stderr.strip()}")
    with both(hosts, tmp_path, plurax=("-c", SHORT)) as launches:
        check_ended(launches)
        assert launches[0].restarts() == []
        assert not any(row["event"] == "lost" for one in launches for row in one.events)
    assert all(host.queue()[counted] > 0 for host in hosts)
    check_end(tmp_path)


def test_the_name_of_the_leader_is_loopback(hosts, tmp_path):
    """As where `/etc/hosts` has a row for the host's own name, and is the same on all hosts."""
    names = [{"host0": "127.0.1.1"}] * 2
    with both(hosts, tmp_path, leader="host0", names=names) as launches:
        check_ended(launches, 2)
        for index, one in enumerate(launches):
            assert f"--coordinator host0: on host {index} this name is 127.0.1.1" in one.said


@pytest.mark.slow
@pytest.mark.parametrize("index", [0, 1])
def test_the_name_of_a_host_is_loopback(hosts, tmp_path, index):
    """All know the leader's address; one host's own name, which JAX reads, is of no use."""
    names = [{}, {}]
    names[index] = {f"host{index}": "127.0.1.1"}
    with both(hosts, tmp_path, names=names) as launches:
        check_ended(launches, 2)
        said = launches[index].said
        assert f"this host's name, host{index}, resolves to its loopback address" in said
        assert launches[0].restarts() == []
