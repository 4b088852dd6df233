"""Launchers on the nodes of a Ray cluster, whose nodes are all on this machine."""

import os
import re
import secrets
import signal
import subprocess
import sys
import types

import pytest
from tests.unit.test_launch import PRELUDE

from plurax import errors
from plurax.cli import launch_command as cli
from plurax.launch import ray_hosts
from plurax.launch.ray_hosts import _RayHost

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


def test_a_host_runs_a_launcher_and_passes_on_its_output(tmp_path):
    """What the actor does, without Ray."""
    host = _RayHost()
    (tmp_path / "fake.py").write_text(PRELUDE + "print('up', flush=True)\nforever()\n")
    host.start(
        ["--logs", "logs", "--", "fake.py"],
        str(tmp_path),
        {"PLURAX_ATTEMPT": "5", "TMPDIR": str(tmp_path)},
    )
    written, code, asked = b"", None, False
    while code is None:
        parts, code = host.poll(0.1)
        written += b"".join(data for _, data in parts)  # a line may come in two parts
        if b"up\n" in written and not asked:
            asked = True
            host.send(signal.SIGTERM)
    assert code == 143
    assert b"SIGTERM: passed on to the process" in written
    assert '"attempt": 5' in (tmp_path / "logs/launch.jsonl").read_text()


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
    assert "host 1 is lost, with process 1; restarting the 2 processes" in text
    assert "the launcher of host 1 is lost; starting it again" in text
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


def test_a_last_line_without_an_end_is_shown(capsys):
    asked = ray_hosts.RayLaunch("auto", 2, (), (), 0)
    driver = ray_hosts._Driver(pretended(), asked, [])
    driver._show(1, 0, b"whole\npart")
    assert capsys.readouterr().out == "whole\n"
    driver._finish()
    assert capsys.readouterr().out == "part\n"


def test_the_launchers_of_a_cluster_get_the_options(monkeypatch):
    asked = []
    monkeypatch.setattr(cli, "launch_on_ray", lambda found: asked.append(found) or 0)
    options = ["--ray", "auto", "--hosts", "4", "--processes", "2", "--elastic", "--logs", "a"]
    assert cli.launch_command([*options, "--", "train", "FILE", "--plan.data", "8"]) == 0
    passed = ("--processes", "2", "--elastic", "--logs", "a")
    program = ("train", "FILE", "--plan.data", "8")
    assert asked == [ray_hosts.RayLaunch("auto", 4, passed, program, 3)]
