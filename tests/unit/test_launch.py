"""The launcher of one host, with processes that only pretend to train: they need no JAX.

Each of them ends by itself after half a minute, whatever happens to its launcher.
"""

import io
import json
import re
import sys

import pytest

from plurax import errors
from plurax.cli import launch_command as cli
from plurax.launch.events import Events
from plurax.launch.launcher import launch
from plurax.launch.output import Output
from plurax.launch.settings import Limits, Settings

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
print(*(os.environ.get(f"PLURAX_{name}") for name in names))
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
        (["--", "gone.py"], "plurax launch -- gone.py: there is no such file."),
        (["--processes", "0", "--", "train"], "--processes 0: give a number of at least 1."),
    ],
)
def test_mistakes_in_the_options(options, message):
    with pytest.raises(errors.ExperimentError, match=re.escape(message)):
        cli.launch_command(options)
