"""Launchers on the nodes of a Ray cluster, whose nodes are all on this machine."""

import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import types

import pytest
from tests.unit.test_launch import PRELUDE

from plurax import errors
from plurax.cli import launch_command as cli
from plurax.launch import ray_hosts
from plurax.launch.hosts import Joined, Lost, Received
from plurax.launch.ray_hosts import RayHost, RayHosts
from plurax.launch.settings import Limits, Settings

pytestmark = pytest.mark.gangs

CLUSTER = """
import signal, sys
from ray.cluster_utils import Cluster
signal.alarm(240)
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
cluster.add_node(num_cpus=1, include_dashboard=False)
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ray", "auto"], "say on how many hosts, as in --ray auto --hosts 4"),
        (["--ray", "auto", "--hosts", "2", "--host", "1"], "say on how many hosts, as in"),
        (["--ray", "auto", "--hosts", "2"], "only one that asks for a token. Start every node"),
    ],
)
def test_mistakes_in_the_options(options, message, monkeypatch):
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    with pytest.raises(errors.ExperimentError, match=re.escape(message)):
        cli.launch_command([*options, "--", "train"])


def test_a_host_runs_processes_and_passes_on_their_output(tmp_path, monkeypatch):
    """What the actor does, without Ray."""
    util = types.SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")
    monkeypatch.setitem(sys.modules, "ray", types.SimpleNamespace(util=util))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    (tmp_path / "there/fake.py").write_text(PRELUDE + "print('up', attempt)\nforever()\n")
    settings = Settings(("python of the driver", "fake.py"), hosts=2, limits=Limits(poll=0.02))
    host = RayHost(settings, None, str(tmp_path / "there"))
    start = {"do": "start", "attempt": 5, "processes": 2, "first": 1, "coordinator": "a:1"}
    written, _, address = host.exchange([start])
    while not written[0]:
        written, _, address = host.exchange([])
    assert written == (b"[1] up 5\n", b"")
    assert re.fullmatch(r"127\.0\.0\.1:\d+", address)
    _, reports, _ = host.exchange([{"do": "signal", "signal": signal.SIGTERM}])
    while not reports:
        _, reports, _ = host.exchange([])
    assert [(one["process"], one["code"]) for one in reports] == [(1, 143)]
    ((out, error),) = host.finish(143)
    (logs,) = tmp_path.glob("plurax-*")  # nothing else is left
    assert (out, error.decode()) == (b"", f"plurax launch: the output of this host is in {logs}\n")
    assert (logs / "1.log").read_text() == "up 5\n"


@pytest.fixture
def ray_cluster(tmp_path):
    """Yield the address of a cluster of two nodes, and the environment in which it is reached."""
    pytest.importorskip("ray")
    token = tmp_path / "token"
    token.write_text(secrets.token_hex(32))
    variables = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    variables |= {"RAY_USAGE_STATS_ENABLED": "0"}
    command = [sys.executable, "-c", CLUSTER]
    with subprocess.Popen(
        command,
        env=os.environ | variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as cluster:
        address = next(line for line in cluster.stdout if re.fullmatch(r"[\d.]+:\d+\n", line))
        yield address.strip(), os.environ | variables
        cluster.stdin.close()


@pytest.mark.slow
def test_launchers_on_a_ray_cluster(ray_cluster, tmp_path):
    address, environment = ray_cluster
    path = tmp_path / "fake.py"
    body = """
print("attempt", attempt, "of", os.environ["PLURAX_PROCESSES"], flush=True)
if attempt == 0 and process == 1:
    os.kill(os.getppid(), signal.SIGKILL)
elif attempt == 0:
    forever()
signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
print("ready", flush=True)
forever()
"""
    path.write_text(PRELUDE + body)
    command = [sys.executable, "-m", "plurax.cli", "launch", "--ray", address, "--hosts"]
    done = subprocess.run(
        [*command, "3", "--", str(path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 2
    assert "--hosts 3: the cluster has 2 nodes" in done.stderr
    with subprocess.Popen(
        [*command, "2", "--logs", "logs", "--", str(path)],
        env=environment,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as launcher:
        lines, ready = [], 0
        for line in launcher.stdout:
            lines.append(line.strip())
            ready += lines[-1].endswith("ready")
            if ready == 2:
                launcher.send_signal(signal.SIGINT)
                ready += 1
        code = launcher.wait(60)
    text = "\n".join(lines)
    assert "[1] attempt 1 of 2" in lines, text
    assert "host 1 is lost: The actor died unexpectedly before finishing this task; Ray" in text
    assert "host 1 is lost, with process 1; restarting the 2 processes" in text
    assert "SIGINT: passed on to the 2 processes" in text, text
    assert code == 130, text


def pretended(nodes=2, ready=True, reached=True):
    """Return what the launcher uses of Ray, before it starts anything."""

    def init(**_):
        if not reached:
            raise ConnectionError("nobody answers")

    group = types.SimpleNamespace(wait=lambda seconds: ready)
    return types.SimpleNamespace(
        init=init,
        shutdown=lambda: None,
        nodes=lambda: [{"Alive": True, "Resources": {"CPU": 4.0, "GPU": 8.0}}] * nodes,
        util=types.SimpleNamespace(
            placement_group=lambda bundles, strategy: group,
            remove_placement_group=lambda group: None,
        ),
    )


@pytest.mark.parametrize(
    ("ray", "message"),
    [
        ({"reached": False}, "there is no Ray cluster that answers, or it refuses this token"),
        ({"nodes": 1}, "--hosts 2: the cluster has 1 nodes. Give a smaller number, or add nodes."),
        ({"ready": False}, "had no 2 nodes with 1 CPU and 8 GPU free on each. Wait for its other"),
    ],
)
def test_a_cluster_that_does_not_do(ray, message, monkeypatch):
    monkeypatch.setattr(ray_hosts, "_ray", lambda: pretended(**ray))
    with pytest.raises(errors.ExperimentError, match=re.escape(message)):
        cli.launch_command(["--ray", "auto", "--hosts", "2", "--", "train", "FILE"])


class PretendedActors:
    """Ray, whose calls are what was called, and whose answers a test gives."""

    exceptions = types.SimpleNamespace(RayError=type("RayError", (Exception,), {}))

    def __init__(self):
        self.calls, self.answers, self.killed = [], {}, []
        self.util = types.SimpleNamespace(
            placement_group=lambda bundles, strategy: types.SimpleNamespace(wait=lambda _: True),
            remove_placement_group=lambda group: None,
        )

    def nodes(self):
        return [{"Alive": True, "Resources": {}}] * 2

    def actor(self, hosts, host):
        """An actor, named by its host and how many there were before."""
        name = f"{host}.{sum(one.startswith(f'{host}.') for one in self.killed)}"

        def method(kind):
            def remote(argument):
                self.calls.append((name, kind, len(self.calls), str(argument)))
                return self.calls[-1]

            return types.SimpleNamespace(remote=remote)

        return types.SimpleNamespace(
            name=name, exchange=method("exchange"), finish=method("finish")
        )

    def answer(self, host, written=(b"", b""), reports=(), address="a:1"):
        """Answer the last call of a host."""
        (call,) = [call for call in self.calls if call[0].startswith(f"{host}.")][-1:]
        self.answers[call] = (written, list(reports), address)

    def wait(self, calls, timeout, num_returns=1):
        return [call for call in calls if call in self.answers], None

    def get(self, call):
        if isinstance(self.answers[call], Exception):
            raise self.answers[call]
        return self.answers[call]

    def kill(self, actor):
        self.killed.append(actor.name)


@pytest.fixture
def pretended_actors(monkeypatch):
    ray = PretendedActors()
    monkeypatch.setattr(RayHosts, "_actor", lambda hosts, host: ray.actor(hosts, host))
    return ray


def test_orders_and_reports_of_actors(pretended_actors, capsys):
    ray = pretended_actors
    hosts = RayHosts(ray, Settings(("x",), hosts=2), None)
    assert hosts.wait() == []
    ray.answer(1)
    assert hosts.wait() == [Joined(1, 1)]
    ray.answer(0)
    assert hosts.wait() == [Joined(0, 1)]
    hosts.send(1, {"do": "start"})
    ray.answer(1, (b"whole\npart", b""), [{"is": "progress"}], "a:2")
    assert hosts.wait() == [Received(1, {"is": "progress"})]
    assert ray.calls[-1][3] == str([{"do": "start"}])
    assert hosts.coordinator(1) == "a:2"
    assert capsys.readouterr().out == "whole\n"
    hosts.close(0)  # a last line without an end is shown
    assert capsys.readouterr().out == "part\n"
    assert ray.killed == ["0.0", "1.0"]


def test_an_actor_that_is_lost_or_silent_is_started_again(pretended_actors, monkeypatch):
    """Ray lets a call to a host that is cut off wait for minutes."""
    now = 0.0
    clock = types.SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr(ray_hosts, "time", clock)
    ray = pretended_actors
    hosts = RayHosts(ray, Settings(("x",), hosts=2, limits=Limits(silence=0.1)), None)
    ray.answer(1)
    hosts.wait()
    ray.answer(1)
    ray.answers[ray.calls[-1]] = ray.exceptions.RayError("The actor died.\nmore")
    assert hosts.wait() == [Lost(1, "The actor died; Ray starts it again")]
    assert ray.killed == ["1.0"]
    hosts.send(1, {"do": "kill"})  # of the lost one: nobody gets it
    ray.answer(1)
    assert hosts.wait() == [Joined(1, 1)]
    assert not any("kill" in call[3] for call in ray.calls)
    now = 0.2
    assert hosts.wait() == [Lost(1, "nothing was heard of it for 0.1 s; Ray starts it again")]
    assert ray.killed == ["1.0", "1.1"]
    assert hosts.wait() == []  # the new one waits for a host, and host 0 for its first


def test_the_options_reach_the_hosts_of_a_cluster(monkeypatch):
    asked = []
    monkeypatch.setattr(cli, "launch_on_ray", lambda *given: asked.append(given) or 0)
    options = ["--ray", "auto", "--hosts", "4", "--processes", "2", "--elastic"]
    assert cli.launch_command([*options, "--", "train", "FILE", "--plan.data", "8"]) == 0
    ((address, settings, logs, _),) = asked
    assert (address, settings.hosts, settings.processes, logs) == ("auto", 4, 2, None)
    assert settings.elastic
    assert settings.command[1:] == ("-m", "plurax.cli", "train", "FILE", "--plan.data", "8")
