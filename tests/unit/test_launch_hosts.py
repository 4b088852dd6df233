"""Launchers of several hosts, on this one, with processes that only pretend to train."""

import contextlib
import dataclasses
import errno
import hmac
import io
import json
import selectors
import signal
import socket
import subprocess
import sys
import time
import types

import pytest
from tests.unit.test_launch import PRELUDE

from plurax import errors
from plurax.cli import launch_command as cli
from plurax.distributed.environment import HostPlace, slurm_place
from plurax.launch import follower
from plurax.launch.connection import MAX_LINE, Connection
from plurax.launch.events import Events
from plurax.launch.hosts import Joined, Lost, Received
from plurax.launch.launcher import launch
from plurax.launch.network_hosts import MAX_STRANGERS, NetworkHosts, free_port
from plurax.launch.protocol import is_order
from plurax.launch.settings import Limits, Settings
from plurax.launch.supervisor import Supervisor

LAUNCHER = """
import json, signal, sys
from pathlib import Path
from plurax.errors import PluraxError
from plurax.launch.events import Events
from plurax.launch.launcher import launch
from plurax.launch.settings import Limits, Settings
signal.alarm(60)
said = json.loads(sys.argv[1])
folder, command, limits = Path(said.pop("folder")), said.pop("command"), said.pop("limits")
settings = Settings(tuple(command), logs=folder / "logs", status=folder / "status",
                    limits=Limits(**limits), **said)
try:
    sys.exit(launch(settings, Events(folder / "launch.jsonl")))
except PluraxError as error:
    print(error, file=sys.stderr)
    sys.exit(2)
"""
LIMITS = {"aftermath": 0.3, "stop": 20, "poll": 0.02, "backoff": 0.01, "join": 30, "retry": 0.02}
UNTIL_SIGTERM = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\nforever()\n"


class Cluster:
    """Launchers that find each other at a port of this host."""

    def __init__(self, folder, hosts):
        self.hosts, self._folder, self._started = hosts, folder, []
        self.coordinator = f"127.0.0.1:{free_port('127.0.0.1')}"

    def start(self, host, body="", limits=None, **settings):
        """Start the launcher of a host."""
        folder = self._folder / f"host{len(self._started)}"
        folder.mkdir()
        (folder / "fake.py").write_text(PRELUDE + body)
        said = {
            "folder": str(folder),
            "command": [sys.executable, str(folder / "fake.py")],
            "limits": {**LIMITS, **(limits or {})},
            "hosts": self.hosts,
            "host": host,
            "coordinator": self.coordinator,
            **settings,
        }
        launcher = Launcher(json.dumps(said), folder)
        self._started.append(launcher)
        return launcher

    def close(self):
        for launcher in self._started:
            launcher.close()


class Launcher:
    """A launcher in a process of its own."""

    def __init__(self, said, folder):
        self.folder, self.lines = folder, []
        self._process = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER, said],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def until(self, words):
        """Read what it says until it has said some words; return that line."""
        for line in self._process.stdout:
            self.lines.append(line.rstrip("\n"))
            if words in line:
                return self.lines[-1]
        raise AssertionError(f"it never said {words!r}: {self.lines}")

    def send(self, number):
        self._process.send_signal(number)

    def code(self):
        """Return the exit code, once it has ended."""
        self.lines += self._process.stdout.read().splitlines()
        return self._process.wait(30)

    def events(self):
        text = (self.folder / "launch.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]

    def close(self):
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()


@pytest.fixture
def cluster(tmp_path, request):
    found = Cluster(tmp_path, getattr(request, "param", 2))
    yield found
    found.close()


@pytest.mark.parametrize("cluster", [3], indirect=True)
def test_the_processes_of_all_hosts_are_numbered_in_order(cluster):
    body = """
print(os.environ["PLURAX_PROCESSES"], process, os.environ["PLURAX_COORDINATOR"].split(":")[0])
"""
    launchers = [cluster.start(2, body), cluster.start(1, body, processes=2)]
    launchers.append(cluster.start(0, body))
    assert [launcher.code() for launcher in launchers] == [0, 0, 0]
    lines = [line for one in launchers for line in one.lines if "plurax launch" not in line]
    assert sorted(lines) == [
        "4 0 127.0.0.1",
        "[1] 4 1 127.0.0.1",
        "[2] 4 2 127.0.0.1",
        "[3] 4 3 127.0.0.1",
    ]


def test_a_fault_on_another_host_restarts_all(cluster):
    body = """
status(step=4, saved=3)
if attempt == 0 and process == 2:
    os.kill(os.getpid(), signal.SIGKILL)
if attempt == 0:
    forever()
"""
    leader, follower = cluster.start(0, body, processes=2), cluster.start(1, body)
    assert (leader.code(), follower.code()) == (0, 0)
    said = "process 2 (host 1) was killed (SIGKILL) at step 4; restarting the 3 processes from the "
    assert any(said + "checkpoint of step 3" in line for line in leader.lines)
    starts = [row for row in leader.events() if row["event"] == "start"]
    assert [(row["attempt"], row["hosts"]) for row in starts] == [(0, [0, 1]), (1, [0, 1])]


def test_a_lost_host_may_come_back(cluster):
    """The launcher of a host is killed, with its processes; the others wait for a new one."""
    body = "print('up', flush=True)\nif attempt == 0:\n    forever()\n"
    leader, follower = cluster.start(0, body), cluster.start(1, body)
    leader.until("up")
    follower.until("up")
    follower.send(signal.SIGKILL)
    assert leader.until("is lost") == "plurax launch: host 1 is lost: it closed the connection"
    line = leader.until("restarting")
    assert "host 1 is lost, with process 1; restarting the 2 processes from the start" in line
    again = cluster.start(1, body)
    assert (leader.code(), again.code()) == (0, 0)


def test_a_lost_leader_may_come_back(cluster):
    """The attempts go on counting, so that training resumes."""
    body = "print('up', flush=True)\nif attempt == 0:\n    forever()\n"
    leader, follower = cluster.start(0, body), cluster.start(1, body)
    leader.until("up")
    follower.until("up")
    leader.send(signal.SIGKILL)
    follower.until("the leader is lost")
    again = cluster.start(0, body)
    assert (again.code(), follower.code()) == (0, 0)
    assert [row["attempt"] for row in again.events() if row["event"] == "start"] == [1]


def test_a_signal_to_any_launcher_ends_all(cluster):
    body = "print('up', flush=True)\n" + UNTIL_SIGTERM.replace(
        "\nforever", "\nprint('ready')\nforever"
    )
    leader, follower = cluster.start(0, body), cluster.start(1, body)
    leader.until("ready")
    follower.until("ready")
    follower.send(signal.SIGTERM)
    assert (leader.code(), follower.code()) == (75, 75)


@pytest.mark.parametrize("cluster", [3], indirect=True)
def test_elastic_goes_on_with_the_hosts_left_and_grows_back(cluster):
    body = """
print(attempt, os.environ["PLURAX_PROCESSES"], os.environ["PLURAX_ELASTIC"], flush=True)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
print("ready", flush=True)
if attempt < 2:
    forever()
"""
    given = {"elastic": True, "min_hosts": 2, "limits": {"back": 0.1}}
    leader, *followers = (cluster.start(host, body, **given) for host in range(3))
    for launcher in (leader, *followers):
        launcher.until("ready")
    followers[0].send(signal.SIGKILL)
    leader.until("1 2 1")  # attempt 1, of 2 processes
    leader.until("ready")
    followers[1].until("1 2 1")
    followers[1].until("ready")
    again = cluster.start(1, body, **given)
    leader.until("host 1 is back: saving and stopping the 2 processes")
    leader.until("2 3 1")
    assert [one.code() for one in (leader, followers[1], again)] == [0, 0, 0]
    hosts = [row["hosts"] for row in leader.events() if row["event"] == "start"]
    assert hosts == [[0, 1, 2], [0, 2], [0, 1, 2]]
    assert not any("restart 2 of" in line for line in leader.lines)  # growing costs no restart


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"host": 1, "limits": {"silence": 0.2}}, "another launcher has come with --host 1"),
        ({"host": 1, "hosts": 4}, "plurax launch --hosts 4: host 0 was started with --hosts 3"),
        ({"host": 7}, "plurax launch --hosts 3: --host 7. Each host runs one launcher"),
        ({"host": 2, "token": "wrong"}, "do not have the same secret"),
        ({"host": 2, "token": None}, "do not have the same secret"),
    ],
)
@pytest.mark.parametrize("cluster", [3], indirect=True)
def test_a_host_that_does_not_fit_is_refused(cluster, settings, message):
    leader = cluster.start(0, token="right")
    cluster.start(1, token="right").until("follows the leader")
    limits = {"join": 0.2, **settings.pop("limits", {})}
    wrong = cluster.start(settings.pop("host"), **{"token": "right", **settings}, limits=limits)
    assert wrong.code() == 2
    assert message in wrong.lines[-1]
    last = cluster.start(2, token="right")
    assert (leader.code(), last.code()) == (0, 0)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, None),
        ({"processes": "3"}, "words"),
        ({"host": 0}, "host"),
        ({"hosts": 3}, "hosts"),
    ],
)
def test_the_leader_checks_whoever_comes(changes, why):
    with serving(token="right") as (_, address, work), Stranger(address, "right") as peer:
        assert peer.join(work, **changes) == ([] if why else [Joined(1, 1, -1)])
        answer = peer.read()
    assert (answer["is"], answer.get("why")) == ("refused" if why else "welcome", why)


def test_nobody_without_the_secret_gets_a_word():
    """Neither who is silent, nor who guesses, nor who repeats what another one has sent."""
    with serving(token="right") as (server, address, work):
        with Stranger(address, "wrong") as peer:
            peer.say({"is": "hello", "nonce": "a"})
            assert (work(), work()) == ([], [])  # accepts, and reads
            assert peer.read() is None
        with socket.create_connection(address, timeout=20) as silent:
            assert work() == []
            server._host.seconds = 0
            server._clock = lambda: time.monotonic() + 9
            assert work() == []  # no sign of life either
            server._clock = lambda: time.monotonic() + 11
            assert work() == []
            assert silent.recv(100) == b""
        server._clock, server._host.seconds = time.monotonic, 20
        with Stranger(address, "right") as peer, Stranger(address, "right") as again:
            assert peer.join(work) == [Joined(1, 1, -1)]
            assert peer.read() == {"is": "welcome"}
            for line in peer.sent:
                again.socket.sendall(line)
            events = []
            while not again.is_closed():
                events += work()
            assert events == []


def test_a_leader_that_does_not_come(cluster):
    follower = cluster.start(1, limits={"join": 0.1})
    assert follower.code() == 2
    assert "host 0 was not reached within 0.1 s: [Errno 111]" in follower.lines[-1]


def test_a_host_that_does_not_come(cluster):
    leader = cluster.start(0, limits={"join": 0.1})
    assert leader.code() == 134
    assert "host 1 did not come in time; each host runs plurax launch with" in leader.lines[-1]


def test_two_leaders_at_one_address(cluster):
    with socket.create_server(("127.0.0.1", int(cluster.coordinator.split(":")[1]))):
        leader = cluster.start(0)
        assert leader.code() == 2
    assert "cannot listen there: [Errno 98]" in leader.lines[-1]


class Leading:
    """A supervisor of three hosts with a process each; what it orders and says."""

    def __init__(self, **settings):
        self.orders, self.said, self.now = [], io.StringIO(), 0.0
        self.supervisor = Supervisor(
            Settings(("train",), hosts=3, **settings),
            lambda host, order: self.orders.append((host, order["do"])),
            Events(None, self.said),
            lambda host: "here:1",
            0.0,
        )
        for host in range(3):
            self.supervisor.joined(host, 1, 0.0)

    def ended(self, host, code, attempt=0, **said):
        message = {"is": "exit", "attempt": attempt, "process": host, "code": code, "step": 1}
        flags = {"stuck": False, "stopped": False, "memory": False, "ours": False}
        self.supervisor.received(host, {**message, **flags, **said}, self.now)


def test_slurm_signals_the_launchers_of_all_hosts_and_that_is_one_signal():
    leading = Leading()
    leading.supervisor.pass_on(signal.SIGTERM, 1)
    for host in (1, 2):
        leading.supervisor.received(host, {"is": "asked", "signal": 15}, 1)
    assert [order for _, order in leading.orders] == ["start"] * 3 + ["signal"] * 3
    leading.supervisor.received(2, {"is": "asked", "signal": 15}, 1)
    assert [order for _, order in leading.orders[6:]] == ["kill"] * 3


def test_a_host_that_does_not_even_kill_is_dropped():
    leading = Leading()
    for host in (0, 1):
        leading.ended(host, 137)
    leading.supervisor.tick(2)
    assert leading.orders[-1] == (2, "kill")
    leading.supervisor.tick(32)
    assert leading.orders[-1] == (2, "drop")
    assert "restarting" in leading.said.getvalue()


def test_processes_of_the_leader_that_cannot_be_killed_end_the_run():
    leading = Leading()
    leading.ended(1, 137)
    leading.supervisor.tick(2)
    leading.supervisor.tick(32)
    assert leading.supervisor.code == 77
    assert "SIGKILL does not end process 0" in leading.said.getvalue()


def test_processes_of_a_follower_that_cannot_be_killed_end_its_launcher(monkeypatch):
    gang = types.SimpleNamespace(alive=[types.SimpleNamespace(number=3)], obey=lambda order: None)
    host = types.SimpleNamespace(gang=gang, wait=lambda: None, reports=[])
    settings, said = Settings(("x",), limits=Limits(silence=0.01)), io.StringIO()

    def lost(following):
        following._joined = True
        return "it closed the connection"

    monkeypatch.setattr(follower._Following, "_follow_once", lost)
    assert follower.follow(settings, host, Events(None, said)) == 77
    assert "SIGKILL does not end process 3: perhaps its file system hangs" in said.getvalue()


def test_what_an_earlier_attempt_reports_is_not_read():
    leading = Leading()
    leading.ended(1, 137, attempt=-1)
    leading.supervisor.tick(100)
    assert [order for _, order in leading.orders] == ["start"] * 3


def test_growing_back_costs_neither_a_restart_nor_a_pause():
    leading = Leading(elastic=True, restarts=0)
    leading.supervisor.tick(1)
    leading.supervisor.joined(2, 1, 1)
    assert [order for _, order in leading.orders] == ["start"] * 3  # it was there already
    leading = Leading(elastic=True, restarts=1)
    leading.supervisor.lost(2, "gone", 0)
    for host in (0, 1):
        leading.ended(host, 134)
    leading.supervisor.tick(1)
    leading.supervisor.tick(61)
    leading.orders.clear()
    leading.supervisor.joined(2, 1, 70)
    leading.now = 71
    for host in (0, 1):
        leading.ended(host, 75, attempt=1)
    assert leading.orders == [(0, "signal"), (1, "signal"), *((host, "start") for host in range(3))]


def test_a_signal_while_growing_is_not_a_second_one():
    leading = Leading(elastic=True)
    leading.supervisor.lost(2, "gone", 0)
    leading.ended(0, 134)
    leading.ended(1, 134)
    leading.supervisor.tick(2)
    leading.supervisor.tick(100)
    assert [order for order in leading.orders if order[1] == "start"][3:] == [
        (0, "start"),
        (1, "start"),
    ]
    leading.supervisor.joined(2, 1, 101)
    leading.supervisor.pass_on(signal.SIGTERM, 102)
    assert [order for order in leading.orders if order[1] == "signal"] == [
        (0, "signal"),
        (1, "signal"),
    ]
    leading.ended(0, 75, attempt=1)
    leading.ended(1, 75, attempt=1)
    assert leading.supervisor.code == 75


def proven(message, count, key=b"", side="follower"):
    """A line as a launcher sends it."""
    words = json.dumps(message).encode()
    said = f"{side} {count} ".encode() + words
    return hmac.new(key, said, "sha256").hexdigest().encode() + b" " + words + b"\n"


@contextlib.contextmanager
def pair(silence=30.0):
    """Yield a leader's connection, the socket at its other end, and what lets it work."""
    ours, theirs = socket.socketpair()
    selector = selectors.DefaultSelector()
    settings = Settings(("x",), limits=Limits(silence=silence))
    connection = Connection(ours, selector, settings, True, 0.0)

    def work():
        for key, _ in selector.select(0):
            key.data()

    yield connection, theirs, work
    connection.close()
    theirs.close()
    selector.close()


def test_a_connection_reads_lines_that_come_in_parts():
    messages = ({"is": "exit"}, {"is": "alive"}, {"is": "progress"})
    lines = b"".join(proven(message, count) for count, message in enumerate(messages))
    with pair() as (connection, other, work):
        other.send(lines[:100])
        work()
        assert connection.receive(1) == [{"is": "exit"}]
        other.send(lines[100:])
        work()
        assert connection.receive(2) == [{"is": "progress"}]
        connection.send({"do": "kill"})
        assert connection.is_sent
        assert other.recv(100) == proven({"do": "kill"}, 0, side="leader")


def test_a_message_that_comes_with_an_answer_is_not_lost():
    """A leader that has waited for a host sends its welcome and the first order in one."""
    messages = ({"is": "welcome"}, {"is": "alive"}, {"do": "start"}, {"do": "kill"})
    with pair() as (connection, other, work):
        other.send(b"".join(proven(message, count) for count, message in enumerate(messages)))
        work()
        assert connection.receive(1) == [{"is": "welcome"}, {"do": "start"}, {"do": "kill"}]
        assert connection.receive(1) == []


def test_the_last_order_is_read_though_nothing_can_be_sent_any_more():
    """A leader says "end" and closes, while a follower reports: as when Slurm signals both."""
    with pair() as (connection, other, _):
        other.send(proven({"do": "end", "code": 75}, 0))
        other.close()
        connection.send({"is": "asked", "signal": 15})
        assert connection.closed is not None
        assert connection.receive(1) == [{"do": "end", "code": 75}]


def test_a_leader_with_too_many_open_files_goes_on(monkeypatch):
    def full(_):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(socket.socket, "accept", full)
    with serving() as (_, address, work), socket.create_connection(address):
        assert work() == []


@pytest.mark.parametrize(
    "words",
    [b"GET / HTTP/1.1\r\n\r\n", b"[1]\n", b"x" * (MAX_LINE + 1), b"[" * 50_000 + b"\n"],
    ids=["http", "list", "long", "deep"],
)
def test_a_connection_to_no_launcher_is_closed(words):
    with pair() as (connection, other, work):
        other.setblocking(False)
        while words:
            words = words[other.send(words) :]
            work()
        work()
        assert connection.closed == "what it sent is no message of a launcher"


def test_a_silent_connection_is_lost_and_a_living_one_says_so():
    with pair(silence=6) as (connection, other, work):
        other.send(proven({"is": "alive"}, 0))
        work()
        assert connection.receive(5) == []
        assert other.recv(100) == proven({"is": "alive"}, 0, side="leader")
        connection.receive(10)
        assert connection.closed is None
        connection.receive(12)
        assert connection.closed == "nothing was heard of it for 6 s"


def test_a_full_network_is_not_waited_for():
    with pair() as (connection, other, work):
        for _ in range(2000):
            connection.send({"do": "x" * 1000})
        assert not connection.is_sent
        other.setblocking(False)
        while not connection.is_sent:
            with contextlib.suppress(BlockingIOError):
                other.recv(1 << 20)
            work()


ORDER = {"is": "x"}


@pytest.mark.parametrize(
    "line",
    [
        proven(ORDER, 1, b"other"), proven(ORDER, 0), proven(ORDER, 2),
        proven(ORDER, 1, side="leader"), proven(ORDER, 1).replace(b"x", b"y"), b" {}\n", b"\n",
        "\ud800 {}\n".encode(errors="surrogatepass"),
    ],
    ids=["key", "repeated", "left out", "side", "words", "none", "empty", "no text"],
)  # fmt: skip
def test_a_proof_is_for_one_side_one_place_and_its_words(line):
    with pair() as (connection, other, work):
        other.send(proven(ORDER, 0) + line)
        work()
        assert connection.receive(1) == [ORDER]
        assert connection.closed == "what it sent is no message of a launcher"


def test_a_proof_is_for_one_connection():
    """Once both have said random words, the key depends on them."""
    with pair() as (connection, other, work):
        connection.renew_key("theirs")
        nonces = json.dumps(["theirs", connection.nonce]).encode()
        other.send(proven(ORDER, 0, hmac.digest(b"", nonces, "sha256")) + proven(ORDER, 1))
        work()
        assert connection.receive(1) == [ORDER]
        assert connection.closed is not None


def test_a_token_with_bytes_that_are_no_text():
    """Of the environment, where Python has lone surrogates for them."""
    (lone,) = json.loads(r'["\udc80"]')
    with serving(token=lone) as (_, address, work), Stranger(address, lone) as peer:
        assert peer.join(work) == [Joined(1, 1, -1)]


SLURM = {
    "SLURM_PROCID": "1", "SLURM_NODEID": "1", "SLURM_STEP_NUM_NODES": "2", "SLURM_JOB_ID": "12",
    "SLURM_STEP_ID": "3", "SLURM_STEP_NODELIST": "gpu[1-2]", "SLURM_STEP_NUM_TASKS": "2",
}  # fmt: skip


def test_the_place_in_a_slurm_step():
    assert slurm_place(SLURM) == HostPlace(2, 1, "gpu1:20393")
    assert slurm_place({"SLURM_JOB_ID": "12"}) is None  # in a job, and not in a step
    with pytest.raises(errors.ExperimentError, match="srun --ntasks-per-node=1 plurax launch"):
        slurm_place({**SLURM, "SLURM_STEP_NUM_TASKS": "8"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--hosts", "2"], "plurax launch --hosts 2: --host is missing. Each host runs one"),
        (["--hosts", "2", "--host", "2", "--coordinator", "a:1"], "--host 2. Each host runs one"),
        (["--hosts", "2", "--host", "0"], "--coordinator is missing. On every host say where"),
        (["--hosts", "2", "--host", "0", "--coordinator", "a:b"], "a:b: give a name or address"),
        (["--hosts", "2", "--host", "0", "--coordinator", "a:0"], "a:0: give a name or address"),
        (["--hosts", "2", "--host", "0", "--coordinator", "a:70000"], "and a port below 65536."),
        (["--hosts", "1", "--host", "3"], "--host 3. Each host runs one launcher"),
        (["--host", "2"], "--host and --coordinator are for several hosts. Say how many"),
        (["--elastic", "--min-hosts", "2"], "--min-hosts 2: give a number from 1 to 1."),
    ],
)
def test_mistakes_in_the_place(options, message):
    with pytest.raises(errors.ExperimentError) as raised:
        cli.launch_command([*options, "--", "train"])
    assert message in str(raised.value)


def test_the_place_by_options(monkeypatch):
    options = cli.LaunchOptions(hosts=2, host=1, coordinator="host0")
    assert cli.placed(options) == HostPlace(2, 1, "host0:7117")
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    assert cli.placed(cli.LaunchOptions()) == HostPlace(2, 1, "gpu1:20393")
    assert cli.placed(cli.LaunchOptions(hosts=1)) == HostPlace(1, 0, "127.0.0.1:0")


def test_a_name_that_only_this_host_reaches(monkeypatch, tmp_path):
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")
    settings = Settings(("x",), hosts=2, coordinator="host0:7117", logs=tmp_path, status=tmp_path)
    with pytest.raises(
        errors.ExperimentError, match=r"on host 0 .* 127\.0\.1\.1, which leads to no"
    ):
        NetworkHosts(settings, host_without_processes())
    with pytest.raises(
        errors.ExperimentError, match=r"on host 1 .* 127\.0\.1\.1, which leads to no"
    ):
        launch(dataclasses.replace(settings, host=1), Events(None, io.StringIO()))


def host_without_processes():
    """A host that only waits, for `seconds` at most."""
    selector = selectors.DefaultSelector()

    def wait():
        for key, _ in selector.select(host.seconds):
            key.data()

    host = types.SimpleNamespace(selector=selector, seconds=20, wait=wait, taken_reports=list)
    return host


@contextlib.contextmanager
def serving(**settings):
    """Yield what accepts launchers, its address, and a function that waits and lets it work."""
    address = ("127.0.0.1", free_port("127.0.0.1"))
    host = host_without_processes()
    settings = Settings(("x",), hosts=2, coordinator="{}:{}".format(*address), **settings)
    hosts = NetworkHosts(settings, host)
    assert hosts.wait() == [Joined(0, 1)]
    yield hosts, address, hosts.wait
    hosts.close(0)
    host.selector.close()


class Stranger:
    """Who connects to a leader, with a token or without."""

    def __init__(self, address, token=""):
        self.socket = socket.create_connection(address, timeout=20)
        self._key, self.sent = token.encode(errors="surrogatepass"), []
        self._lines, self._count = self.socket.makefile("rb"), 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._lines.close()
        self.socket.close()

    def say(self, message):
        self.sent.append(proven(message, len(self.sent), self._key))
        self.socket.sendall(self.sent[-1])

    def read(self):
        """Return a message of the leader, whose proof is right; None at the end."""
        line = self._lines.readline()
        if not line:
            return None
        message = json.loads(line.partition(b" ")[2])
        assert line == proven(message, self._count, self._key, "leader")
        self._count += 1
        return message

    def is_closed(self):
        """Whether the leader has closed the connection; what it says is not read."""
        self.socket.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while data := self.socket.recv(1000):
                assert json.loads(data.partition(b" ")[2])["is"] == "leader"
            return True
        return False

    def join(self, work, **changes):
        """Say who one is, as a follower does; return what the leader makes of it."""
        self.say({"is": "hello", "nonce": "a"})
        assert (work(), work()) == ([], [])  # accepts, and reads
        nonces = json.dumps(["a", self.read()["nonce"]]).encode()
        self._key = hmac.digest(self._key, nonces, "sha256")
        place = {"host": 1, "hosts": 2, "processes": 1, "attempt": -1, "launcher": "a"}
        self.say({"is": "join", **place, **changes})
        return work()


def test_a_flood_of_connections_leaves_room_for_a_launcher():
    """None of them says who it is; a launcher does so at once."""
    with serving(token="secret") as (server, address, work), contextlib.ExitStack() as stack:
        flood = []
        for _ in range(3 * MAX_STRANGERS):
            flood.append(stack.enter_context(socket.create_connection(address, timeout=20)))
            assert work() == []
        assert len(server._peers) == 2 + MAX_STRANGERS
        for stranger in flood[: -2 - MAX_STRANGERS]:
            assert stranger.recv(100) == b""
        peer = stack.enter_context(Stranger(address, "secret"))
        assert peer.join(work) == [Joined(1, 1, -1)]
        assert peer.read() == {"is": "welcome"}


@pytest.mark.parametrize(
    "changes",
    [
        {"processes": 1_000_000_000}, {"processes": 0}, {"processes": -1}, {"processes": True},
        {"attempt": 10**30}, {"host": "1"}, {"hosts": [2]}, {"launcher": {}}, {"attempt": None},
    ],
    ids=str,
)  # fmt: skip
def test_a_hello_with_absurd_numbers_is_refused(changes):
    with serving() as (_, address, work), Stranger(address) as peer:
        assert peer.join(work, **changes) == []
        assert peer.read() == {"is": "refused", "why": "words"}


STARTED = {"do": "start", "attempt": 1, "processes": 2, "first": 0, "coordinator": "a:1"}
ENDED = {"is": "exit", "attempt": 1, "process": 1, "code": 0, "step": None, "stuck": False,
         "stopped": False, "memory": False, "ours": False}  # fmt: skip


@pytest.mark.parametrize(
    "report",
    [
        {"is": ["x"]}, {"is": {}}, {"is": None}, {}, {"is": "exit"}, {**ENDED, "code": "0"},
        {**ENDED, "process": [1]}, {**ENDED, "step": "a"}, {**ENDED, "memory": 1},
        {"is": "progress", "attempt": 1, "saved": None}, {"is": "asked", "signal": "15"},
        {"is": "progress", "attempt": 1, "saved": 10**400},
    ],
    ids=lambda report: str(report)[:40],
)  # fmt: skip
def test_a_report_that_is_none_ends_the_connection(report):
    with serving() as (_, address, work), Stranger(address) as peer:
        assert peer.join(work) == [Joined(1, 1, -1)]
        peer.say(ENDED)
        assert work() == [Received(1, ENDED)]
        peer.say(report)
        assert work() == [Lost(1, "what it sent is no message of a launcher")]


@pytest.mark.parametrize(
    ("order", "understood"),
    [
        (STARTED, True), ({**STARTED, "elastic": True}, True), ({"do": "end", "code": 0}, True),
        ({"do": "signal", "signal": 15}, True), ({"do": "kill", "stuck": False}, True),
        ({"do": "end"}, False), ({"do": "end", "code": "0"}, False), ({"do": ["end"]}, False),
        ({**STARTED, "first": None}, False), ({"is": "end", "code": 0}, False), ({}, False),
    ],
    ids=lambda one: str(one)[:40],
)  # fmt: skip
def test_which_orders_are_understood(order, understood):
    assert is_order(order) == understood


def test_the_end_of_a_process_of_another_host_does_not_count():
    leading = Leading()
    leading.ended(0, 0, process=2)
    leading.ended(0, 0)
    leading.ended(0, 0)
    assert leading.supervisor.code is None
    leading.ended(1, 0)
    leading.ended(2, 0)
    assert leading.supervisor.code == 0


def test_several_hosts_need_a_secret(monkeypatch):
    monkeypatch.delenv("PLURAX_TOKEN", raising=False)
    options = ["--hosts", "2", "--host", "0", "--coordinator", "127.0.0.1:1", "--", "train"]
    with pytest.raises(errors.ExperimentError, match="on 2 hosts: without a secret anyone who"):
        cli.launch_command(options)
