"""The launcher of one host, with processes that only pretend to train: they need no JAX.

Each of them ends by itself after half a minute, whatever happens to its launcher.
"""

import contextlib
import dataclasses
import io
import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from tests.faults.notes import children

from plurax import errors
from plurax.cli import launch_command as cli
from plurax.exit_codes import FINAL, MEANINGS, ExitCode, meaning, shell_code
from plurax.launch.events import Events
from plurax.launch.gang import ALONE, CHILD, Gang
from plurax.launch.lateness import Lateness
from plurax.launch.launcher import launch
from plurax.launch.memory_kills import memory_kills
from plurax.launch.outcome import Exit, cause
from plurax.launch.output import MAX_LINE, Output
from plurax.launch.settings import Limits, Settings
from plurax.launch.supervisor import Supervisor

PRELUDE = """
import json, os, signal, subprocess, sys, time
signal.alarm(30)
process, attempt = int(os.environ["PLURAX_PROCESS"]), int(os.environ["PLURAX_ATTEMPT"])
def status(**said):
    path = os.path.join(os.environ["PLURAX_STATUS"], f"{process}.json")
    with open(path + ".new", "w") as file:
        json.dump({"phase": "step", "step": 0, "saved": None, "deadline": None, **said}, file)
    os.replace(path + ".new", path)
def forever():
    while True:
        signal.pause()
"""
BOUNDED = "import signal; signal.alarm(30); signal.pause()"
QUICK = Limits(aftermath=0.3, finish=20, stop=20, abort=5, slack=0.3, poll=0.02, backoff=0.01)


def fake(tmp_path, body):
    path = tmp_path / "fake.py"
    path.write_text(PRELUDE + body)
    return (sys.executable, str(path))


def launched(tmp_path, body, *, limits=QUICK, **settings):
    """Run a gang; return its code, its events, and what stood in the terminal."""
    out, err, said = io.BytesIO(), io.BytesIO(), io.StringIO()
    given = {"processes": 2, "logs": tmp_path / "logs", "status": tmp_path / "status", **settings}
    chosen = Settings(fake(tmp_path, body), limits=limits, **given)
    output = Output(chosen.logs, (out, err))
    code = launch(chosen, Events(tmp_path / "events.jsonl", said), output)
    rows = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    return code, rows, said.getvalue(), out.getvalue().decode(), err.getvalue().decode()


def test_a_process_reads_its_place_from_its_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("PLURAX_ELASTIC", "1")  # of another gang
    body = """
names = ("PROCESSES", "PROCESS", "ATTEMPT", "DEVICES", "ELASTIC")
# One write, for between two the launcher may show a line of the other process.
sys.stdout.write(" ".join(str(os.environ.get(f"PLURAX_{name}")) for name in names) + "\\n")
host, port = os.environ["PLURAX_COORDINATOR"].split(":")
print(host, int(port) > 0, os.path.isdir(os.environ["PLURAX_STATUS"]), file=sys.stderr)
"""
    code, rows, said, out, err = launched(tmp_path, body, devices=4)
    assert (code, said) == (0, "")
    assert sorted(out.splitlines()) == ["2 0 0 4 None", "[1] 2 1 0 4 None"]
    assert sorted(err.splitlines()) == ["127.0.0.1 True True", "[1] 127.0.0.1 True True"]
    assert (tmp_path / "logs/1.log").read_text() == "2 1 0 4 None\n127.0.0.1 True True\n"
    assert [row["event"] for row in rows] == ["start", "exit", "exit", "over"]


def test_a_killed_process_restarts_all(tmp_path):
    body = """
status(step=120, saved=100)
if attempt == 0 and process == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if attempt == 0:
    forever()
"""
    code, rows, said, *_ = launched(tmp_path, body)
    assert code == 0
    assert said == (
        "plurax launch: process 1 was killed (SIGKILL) at step 120; restarting the 2 processes "
        "from the checkpoint of step 100 in 0.01 s (restart 1 of 3)\n"
    )
    events = [row["event"] for row in rows]
    assert events == ["start", "exit", "exit", "restart", "start", "exit", "exit", "over"]
    restart = rows[3]
    assert (restart["process"], restart["code"], restart["saved"]) == (1, 137, 100)
    assert rows[0]["coordinator"] != rows[4]["coordinator"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--processes", "2"], "say after -- what each process runs: a command of plurax"),
        (["--", "fly"], "what each process runs is a path that ends in .py, or a command"),
        (["--", "plurax", "train", "small.py"], "verify, machine. Leave plurax out."),
        (["--", "gone.py"], "plurax launch -- gone.py: there is no such file."),
        (["--processes", "0", "--", "train"], "--processes 0: give a number of at least 1."),
        (["--stop-seconds", "-1", "--", "train"], "--stop-seconds -1.0: give a number of at least"),
        (["--join-seconds", "nan", "--", "train"], "--join-seconds nan: give a number of at least"),
        (["--logs", "/dev/null/a", "--", "train"], "/dev/null/a could not be written: Not a dir"),
        (["--events", "/dev", "--", "train"], "/dev could not be written: Is a directory"),
    ],
)
def test_mistakes_in_the_options(options, message):
    with pytest.raises(errors.ExperimentError, match=re.escape(message)):
        cli.launch_command(options)


def test_the_budget_is_for_restarts_in_a_row(tmp_path):
    body = """
status(step=attempt * 10, saved=min(attempt, 3))
os.kill(os.getpid(), signal.SIGKILL)
"""
    code, rows, said, *_ = launched(tmp_path, body, processes=1, restarts=2)
    assert code == 137
    restarts = [(row["restart"], row["seconds"]) for row in rows if row["event"] == "restart"]
    # A new checkpoint, of step 1, 2 and 3, fills the budget and ends the longer pauses.
    assert restarts == [(1, 0.01), (1, 0.01), (1, 0.01), (1, 0.01), (2, 0.02)]
    assert said.endswith("not restarted: 2 restarts in a row without a new checkpoint\n")


def test_a_signal_reaches_all_processes(tmp_path):
    os.mkfifo(tmp_path / "ready")
    body = f"""
path = {str(tmp_path / "ready")!r}
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
if process == 0:
    open(path).read()
    os.kill(os.getppid(), signal.SIGTERM)
else:
    open(path, "w").close()
forever()
"""
    code, rows, said, *_ = launched(tmp_path, body)
    assert code == 75  # preempted, and not started again
    first, second = said.splitlines()
    assert first == "plurax launch: SIGTERM: passed on to the 2 processes"
    assert second.endswith("ended with exit code 75: it was asked to stop, and has saved its state")
    assert [row["code"] for row in rows if row["event"] == "exit"] == [75, 75]


def test_a_terminal_that_hangs_up_is_a_sigterm(tmp_path):
    body = """
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
os.kill(os.getppid(), signal.SIGHUP)
forever()
"""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored
    try:
        code, _, said, *_ = launched(tmp_path, body, processes=1)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert code == 75
    assert "SIGTERM: passed on to the process\n" in said


def test_a_signal_that_was_ignored_at_the_start_stays_ignored(tmp_path):
    """As in a job in the background of a script, which Ctrl-C does not mean."""
    body = "os.kill(os.getppid(), signal.SIGINT)\n"
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        code, _, said, *_ = launched(tmp_path, body, processes=1)
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    assert (code, said) == (0, "")


def test_no_folder_is_left_unless_something_failed(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    good, bad = tmp_path / "good.py", tmp_path / "bad.py"
    good.write_text("print('done')")
    bad.write_text("raise SystemExit(2)")
    assert cli.launch_command(["--", str(good)]) == 0
    assert {*tmp_path.iterdir()} == {good, bad}
    monkeypatch.setenv("PLURAX_TOKEN", "secret")
    place = ["--hosts", "2", "--host", "0", "--coordinator", "192.0.2.77:1"]
    with pytest.raises(errors.ExperimentError, match="cannot listen there"):
        cli.launch_command([*place, "--", str(good)])
    assert {*tmp_path.iterdir()} == {good, bad}
    assert cli.launch_command(["--", str(bad)]) == 2
    (kept,) = {*tmp_path.iterdir()} - {good, bad}
    assert (kept / "launch.jsonl").is_file()
    (tmp_path / "plurax-launch-left").mkdir()  # of one that was killed, with its output
    (tmp_path / "plurax-status-left").mkdir()
    assert cli.launch_command(["--", str(good)]) == 0
    assert {*tmp_path.iterdir()} == {good, bad, kept}


def test_a_second_signal_kills(tmp_path):
    body = """
signal.signal(signal.SIGINT, lambda *_: os.kill(os.getppid(), signal.SIGINT))
os.kill(os.getppid(), signal.SIGINT)
forever()
"""
    code, _, said, *_ = launched(tmp_path, body, processes=1)
    assert code == 130
    assert "a second signal (SIGINT): killing the process\n" in said


def test_a_stopped_process_is_named(tmp_path):
    """All wait for it, and the watchdog of one that waits ends that one."""
    body = """
__import__("faulthandler").enable()
status(step=7, deadline=time.monotonic())
if process == 1 and attempt == 0:
    os.kill(os.getpid(), signal.SIGSTOP)
sys.exit(76 if attempt == 0 else 0)
"""
    code, rows, said, _, err = launched(tmp_path, body)
    assert code == 0
    assert "[1] Fatal Python error: Aborted" in err  # continued, so that it can say where it is
    assert "process 1 was stuck at step 7: it is stopped, as by SIGSTOP; restarting" in said
    assert [row["process"] for row in rows if row["event"] == "stuck"] == [1]


def test_a_process_that_holds_the_interpreter_is_named_and_writes_its_stacks(tmp_path):
    body = """
import faulthandler, re
faulthandler.enable()
def holds_the_lock():
    re.match(r"(a+)+$", "a" * 64 + "b")
if attempt == 0:
    status(step=7, deadline=time.monotonic())
    holds_the_lock() if process == 1 else sys.exit(76)
"""
    code, _, said, _, err = launched(tmp_path, body)
    assert code == 0
    assert "process 1 was stuck at step 7: past its deadline" in said
    assert "[1] Fatal Python error: Aborted" in err
    assert "in holds_the_lock" in err


def test_late_is_who_shows_the_same_status_past_its_deadline():
    lateness, status = Lateness(), {"step": 1, "deadline": 10}

    def look(now, awake=True, **changes):
        lateness.look({**status, **changes}, now, awake)
        return lateness.seconds(now)

    assert [look(9), look(10), look(11), look(13)] == [None, None, 0, 2]
    assert look(20, awake=False) == 0  # both were suspended
    assert look(21) == 1
    assert look(22, step=2) == 0
    assert look(23, step=2) == 1
    assert look(24, step=2, deadline=30) is None
    assert look(40, deadline=None) is None


def test_a_process_dies_with_its_launcher_even_without_the_reaper(tmp_path):
    program = f"""
import os, signal, subprocess
signal.alarm(30)
child = subprocess.Popen([*{ALONE!r}, {CHILD!r}, str(os.getpid()), {sys.executable!r}, "-c",
    "import signal; signal.alarm(30); print('there', flush=True); signal.pause()"])
print(child.pid, flush=True)
signal.pause()
"""
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    with parent:
        pid = int(parent.stdout.readline())
        assert parent.stdout.readline() == "there\n"
        end = os.pidfd_open(pid)
        parent.kill()
        assert select.select([end], [], [], 20)[0], "a process lives on"
        os.close(end)


def test_a_process_whose_launcher_is_gone_does_not_start():
    done = subprocess.run([*ALONE, CHILD, "1", sys.executable, "-c", "print()"], check=False)
    assert done.returncode == 137


@pytest.mark.parametrize("kind", ["", "# resource_tracker import main"])
def test_the_others_are_killed_with_what_they_started(tmp_path, kind):
    """So is what looks like a resource tracker and does not end by itself."""
    os.mkfifo(tmp_path / "ready")
    body = f"""
path = {str(tmp_path / "ready")!r}
print(subprocess.Popen([sys.executable, "-c", {BOUNDED + kind!r}]).pid)
if process == 1:
    open(path, "w").close()
    forever()
open(path).read()
sys.exit(2)
"""
    quick = dataclasses.replace(QUICK, cleanup=0.3 if kind else 20)
    code, rows, said, *_ = launched(tmp_path, body, limits=quick)
    assert code == 2
    assert said.endswith("a mistake in what it was given; a restart does not cure it\n")
    assert [(row["process"], row["ours"]) for row in rows if row["event"] == "exit"] == [
        (0, False),
        (1, True),
    ]
    for process in range(2):
        child = int((tmp_path / f"logs/{process}.log").read_text())
        with contextlib.suppress(ProcessLookupError):  # it is gone, or going
            end = os.pidfd_open(child)
            assert select.select([end], [], [], 20)[0], "a process lives on"
            os.close(end)


def test_nothing_outlives_a_launcher_that_is_killed(tmp_path):
    """Neither the processes nor what they started, nor the folder of their status."""
    body = f"""
child = subprocess.Popen([sys.executable, "-c", {BOUNDED!r}])
print(os.getpid(), child.pid)
forever()
"""
    command = [sys.executable, "-m", "plurax.cli", "launch", "--processes", "2",
               "--logs", str(tmp_path / "logs"), "--", fake(tmp_path, body)[1]]  # fmt: skip
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as launcher:
        lines = [launcher.stdout.readline().removeprefix("[1] ") for _ in range(2)]
        pids = [int(pid) for line in lines for pid in line.split()]
        ends = [os.pidfd_open(pid) for pid in {*pids, *children(launcher.pid)}]
        launcher.kill()
        assert len(ends) == 5  # with the reaper
        for end in ends:
            assert select.select([end], [], [], 20)[0], "a process lives on"
            os.close(end)
    assert {path.name for path in tmp_path.iterdir()} == {"fake.py", "logs"}


def test_output_of_others_waits_for_the_end_of_a_line(tmp_path):
    out, err = io.BytesIO(), io.BytesIO()
    output = Output(tmp_path, (out, err))
    output.write(0, 0, b"step 1")
    output.write(1, 0, b"one\ntw")
    output.write(0, 0, b" loss 2\n")
    output.write(1, 1, b"error\n")
    output.write(1, 0, b"o\nthree")
    output.write(0, 0, b"step 2")
    output.write(2, 0, b"late\n")
    output.flush()
    output.close()
    assert (
        out.getvalue().decode() == "step 1 loss 2\n[1] one\n[1] two\nstep 2\n[2] late\n[1] three\n"
    )
    assert err.getvalue() == b"[1] error\n"
    assert (tmp_path / "1.log").read_bytes() == b"one\ntwerror\no\nthree"


def test_a_line_that_never_ends_is_shown_in_parts(tmp_path):
    out = io.BytesIO()
    output = Output(tmp_path, (out, out))
    for _ in range(3):
        output.write(1, 0, b"\rstep".ljust(MAX_LINE // 2 + 1))
    assert len(out.getvalue()) == 2 * (MAX_LINE // 2 + 1) + len(b"[1] \n")
    output.close()


def test_the_launcher_loads_neither_jax_nor_numpy():
    code = "import sys, plurax.cli.launch_command; print(*{'jax', 'numpy'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "\n"


def test_what_all_processes_say_is_shown_once(tmp_path):
    """An error of all, and what collectives between CPUs print; the files have all of it."""
    out, err = io.BytesIO(), io.BytesIO()
    output = Output(tmp_path, (out, err))
    noise = b"[Gloo] Rank 1 is connected to 3 peer ranks. Expected number of connected peers: 3\n"
    for process in (1, 0, 2):
        output.write(process, 0, noise)
        output.write(process, 0, b"[Gloo] of the user\n")
    output.write(0, 1, b"error: data=3\n")
    for process in (1, 2):
        output.write(process, 1, b"error: data=3\nerror: only here\n"[: 31 if process == 1 else 14])
    output.close()
    assert b"connected" not in out.getvalue()
    assert out.getvalue().count(b"[Gloo] of the user\n") == 3
    assert err.getvalue() == b"error: data=3\n[1] error: only here\n"
    assert (tmp_path / "2.log").read_bytes().startswith(noise)


def test_output_goes_on_without_a_reader_or_a_disk(tmp_path):
    reading, writing = os.pipe()
    os.close(reading)
    (tmp_path / "0.log").mkdir()  # cannot be written, as on a full disk
    closed = open(writing, "wb", buffering=0)  # noqa: SIM115
    output = Output(tmp_path, (closed, closed))
    output.write(0, 0, b"into nowhere\n")
    output.write(1, 0, b"kept\n")
    output.close()
    closed.close()
    assert (tmp_path / "1.log").read_bytes() == b"kept\n"


# What ends first, whether a step was taken, and what follows: "again", or the exit code.
OUTCOMES = [
    (0, 0), (2, 2), (75, "again"), (76, "again"), (77, 77), (78, "again"), (79, 79), (130, 130),
    (134, "again"), (137, "again"), (139, "again"), (143, "again"), (1, "again"), (3, "again"),
]  # fmt: skip


@pytest.mark.parametrize(("code", "follows"), OUTCOMES)
def test_what_follows_from_an_exit_code(code, follows):
    supervisor = Watched()
    supervisor.ended(0, code, step=3)
    supervisor.ended(1, 0 if code == 0 else 134, step=3)
    assert supervisor.follows() == follows
    assert (follows != "again") == (code in FINAL)


def test_an_exception_before_the_first_step_is_not_tried_again():
    supervisor = Watched()
    supervisor.ended(0, 1)
    supervisor.ended(1, 134)
    assert supervisor.follows() == 1
    assert "before its first step: not restarted" in supervisor.said


@pytest.mark.parametrize(
    ("exits", "first"),
    [
        ([Exit(0, 134), Exit(1, 137)], 1),  # the report of another host comes later
        ([Exit(0, 1), Exit(1, 137)], 1),
        ([Exit(0, 2), Exit(1, 137)], 1),  # an exception of the connection, in the user's code
        ([Exit(0, 134), Exit(1, 2)], 1),
        ([Exit(0, 76), Exit(1, 76, stuck=True, stopped=True)], 1),
        ([Exit(0, 76, stuck=True), Exit(1, 76, stuck=True, stopped=True)], 1),
        ([Exit(0, 76, step=8), Exit(1, 76, step=7)], 1),  # the one behind is waited for
        ([Exit(0, 137), Exit(1, 79, memory=True)], 1),
        ([Exit(0, 75), Exit(1, 0)], 0),
        ([Exit(0, 75), Exit(1, 139)], 1),
        ([Exit(0, 137, ours=True), Exit(1, 134)], 1),
        ([Exit(0, 0), Exit(1, 137, ours=True)], 1),
        ([Exit(0, 137), Exit(1, 137)], 0),
        ([Exit(0, 134), Exit(1, 134, host=1, lost=True)], 1),
    ],
)
def test_who_was_first(exits, first):
    assert cause(exits).process == first


def test_all_done_has_no_cause():
    assert cause([Exit(0, 0), Exit(1, 0)]) is None


def test_the_pauses_grow_to_a_limit():
    supervisor = Watched(restarts=9)
    for _ in range(9):
        supervisor.ended(0, 137)
        supervisor.ended(1, 137)
        supervisor.tick(supervisor.time + 1000)
    pauses = [row["seconds"] for row in supervisor.rows if row["event"] == "restart"]
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_who_does_not_end_is_killed():
    supervisor = Watched()
    supervisor.ended(0, 134)
    supervisor.tick(1.9)
    assert supervisor.orders[1:] == []
    supervisor.tick(2.0)
    assert supervisor.orders[1:] == [{"do": "kill", "stuck": False}]
    supervisor.tick(3.0)
    assert len(supervisor.orders) == 2


def test_a_kill_leaves_the_others_little_time():
    """They wait for one that is gone, and could only end too."""
    supervisor = Watched()
    supervisor.ended(0, 137)
    supervisor.tick(0.5)
    assert supervisor.orders[1:] == [{"do": "kill", "stuck": False}]


def test_who_has_done_its_work_waits_longer_for_the_others():
    supervisor = Watched()
    supervisor.ended(0, 0)
    supervisor.tick(599)
    assert supervisor.orders[1:] == []
    supervisor.tick(600)
    assert supervisor.orders[1:] == [{"do": "kill", "stuck": False}]
    supervisor.ended(1, 137, ours=True)
    assert "process 1 did not end in time, and was killed; restarting" in supervisor.said


def test_a_kill_for_memory_is_not_tried_again():
    supervisor = Watched()
    supervisor.ended(0, 79, memory=True, step=5)
    supervisor.ended(1, 134)
    assert supervisor.follows() == 79
    assert "process 0 was killed at step 5 because its memory was full" in supervisor.said
    assert "A plan with more zero, remat or microbatches" in supervisor.said


def test_a_signal_during_a_pause_ends_all():
    supervisor = Watched()
    supervisor.ended(0, 137)
    supervisor.ended(1, 137)
    supervisor.pass_on(signal.SIGTERM)
    assert supervisor.follows() == 143


def test_who_ignores_the_signal_is_killed():
    supervisor = Watched()
    supervisor.pass_on(signal.SIGTERM)
    supervisor.tick(120)
    assert [order["do"] for order in supervisor.orders] == ["start", "signal", "kill"]
    supervisor.ended(0, 137, ours=True)
    supervisor.ended(1, 137, ours=True)
    assert supervisor.follows() == 143


class Watched:
    """A supervisor of one host with two processes; its clock, orders and events."""

    def __init__(self, **settings):
        self.orders, self.time, self._rows, self._said = [], 0.0, [], io.StringIO()
        events = Events(None, self._said)
        events.write = lambda event, said=None, **fields: self._write(event, said, fields)
        chosen = Settings(("train",), processes=2, **settings)
        send = lambda host, order: self.orders.append(order)  # noqa: E731
        self._supervisor = Supervisor(chosen, send, events, lambda host: "here:1", 0.0)
        self._supervisor.joined(0, 2, 0.0)

    def _write(self, event, said, fields):
        self._rows.append({"event": event, **fields})
        print(said, file=self._said)

    @property
    def rows(self):
        return self._rows

    @property
    def said(self):
        return self._said.getvalue()

    def tick(self, time):
        self.time = time
        self._supervisor.tick(time)

    def pass_on(self, number):
        self._supervisor.pass_on(number, self.time)

    def ended(self, process, code, step=None, **said):
        attempt = [order for order in self.orders if order["do"] == "start"][-1]["attempt"]
        message = {"is": "exit", "attempt": attempt, "process": process, "code": code, "step": step}
        flags = {"stuck": False, "stopped": False, "memory": False, "ours": False}
        self._supervisor.received(0, {**message, **flags, **said}, self.time)

    def follows(self):
        code = self._supervisor.code
        return "again" if code is None and self.rows[-1]["event"] == "restart" else code


@pytest.mark.parametrize(
    ("cgroup", "files", "kills"),
    [
        ("0::/job\n", {"job/memory.events": "low 0\noom 5\noom_kill 3\n"}, 3),
        ("0::/job\n", {"memory.events": "oom_kill 4\n"}, 4),  # seen from inside a container
        (
            "4:memory:/job\n0::/\n",
            {"memory/job/memory.oom_control": "under_oom 0\noom_kill 2\n"},
            2,
        ),
        ("4:memory:/job\n0::/\n", {"memory/memory.oom_control": "oom_kill 1\n"}, 1),
        ("4:cpu:/job\n", {}, 0),
    ],
)
def test_kills_for_memory_are_counted(tmp_path, cgroup, files, kills):
    own = tmp_path / "cgroup"
    own.write_text(cgroup)
    for name, text in files.items():
        path = tmp_path / "fs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert memory_kills(tmp_path / "fs", own) == kills
    assert memory_kills(tmp_path / "fs", tmp_path / "none") == 0


def test_a_kill_while_the_kernel_counts_one_is_for_memory(tmp_path, monkeypatch):
    counter = iter(range(100))
    monkeypatch.setattr(Gang.__init__, "__defaults__", (time.monotonic, lambda: next(counter)))
    code, _, said, *_ = launched(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)", processes=1)
    assert code == 79
    assert "because its memory was full (SIGKILL by the kernel); not restarted" in said


def test_the_kernel_kills_for_memory(tmp_path):
    """A launcher in a cgroup of its own, and a process that takes more than there is."""
    group = Path("/sys/fs/cgroup/memory") / f"plurax-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text("200000000")
    except OSError:
        pytest.skip("needs a memory cgroup (v1) that this user may create")
    body = """
if process == 1:
    taken = [bytearray(1_000_000) for _ in range(1000)]
forever()
"""
    launcher = [sys.executable, "-m", "plurax.cli", "launch", "--processes", "2", "--logs"]
    enter = ["sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh"]
    try:
        done = subprocess.run(
            [*enter, *launcher, str(tmp_path), "--", fake(tmp_path, body)[1]],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    finally:
        group.rmdir()
    assert done.returncode == 79, done.stderr
    assert "process 1 was killed because its memory was full (SIGKILL by the kernel)" in done.stderr


def test_every_code_has_a_meaning():
    assert MEANINGS.keys() == {*ExitCode} > FINAL
    assert meaning(139) == "ended by SIGSEGV"
    assert meaning(5) == "exit code 5"
    assert (shell_code(-9), shell_code(75)) == (137, 75)


GLOO = "raise jax.errors.JaxRuntimeError('Gloo all-reduce: Connection reset by peer')"
OURS = "raise errors.process_ended('process 1 on here')"
MISTAKE = "raise ValueError('a mistake of its own')"


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (GLOO, "error: another process has ended, so this one cannot go on. Its own output says"),
        (OURS, "error: process 1 on here has ended, so this one cannot go on. Its own output says"),
        (MISTAKE, None),
    ],
)
@pytest.mark.parametrize("how", ["script", "command"])
def test_the_trace_of_a_process_whose_peer_died_is_only_in_its_file(tmp_path, how, error, shown):
    """The line that helps, of the launcher, does not stand below a trace that does not."""
    start = {
        "script": "sys.excepthook = end_at_once\nfail()",
        "command": "dispatch.command_named = lambda name: SimpleNamespace(load=lambda: fail)\n"
        "dispatch.main(['fail'])",
    }[how]
    body = f"""
from types import SimpleNamespace
import jax
from plurax import errors
from plurax.cli import dispatch
from plurax.distributed.initialize import end_at_once

def fail(*_):
    {error}

{start}
"""
    code, _, _, _, err = launched(tmp_path, body, processes=1, restarts=0)
    log = (tmp_path / "logs/0.log").read_text()
    # A command shows an error of plurax or of the user by their own lines.
    assert "Traceback" in log or (how == "command" and error != GLOO)
    if shown is None:
        assert code != 134
        assert "a mistake of its own" in err
    else:
        assert code == 134
        assert err.startswith(shown)
        assert len(err.splitlines()) <= 2
        assert "Traceback" not in err
