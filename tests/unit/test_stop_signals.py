"""Signals that end training: the first after a step, the second at once."""

import os
import queue
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from plurax.checkpoint import Checkpoints
from plurax.exit_codes import ExitCode
from plurax.guards.stop_signals import SAME_SECONDS, StopSignals

LATE = SAME_SECONDS + 1


@pytest.mark.parametrize(
    ("launched", "times", "ending"),
    [
        (True, [0, LATE], 2),
        (True, [0, SAME_SECONDS - 1, LATE], 3),  # the second is a copy of the first
        (False, [0, 0], 2),
    ],
)
def test_which_signal_ends_the_process(launched, times, ending):
    """Slurm sends one to all processes of a step, and a launcher passes its own on."""
    seen, ended = queue.Queue(), queue.Queue()
    clock, count = iter(times), 0

    def now():
        nonlocal count
        count += 1
        seen.put(count)
        return next(clock)

    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        with StopSignals(launched, now, lambda code: ended.put((code, count))) as stop:
            for number in range(ending):
                os.kill(os.getpid(), signal.SIGTERM)
                assert stop.name == "SIGTERM"
                if launched:
                    seen.get(timeout=20)
                elif number == 0:
                    seen.get(timeout=20)
                    signal.signal(signal.SIGTERM, lambda *_: None)  # else it ends the tests
            assert ended.get(timeout=20) == (143, ending if launched else 1)
    finally:
        signal.signal(signal.SIGTERM, before)


def own(*_):
    """A handler of the caller's own, which returns."""


@pytest.mark.parametrize(
    ("number", "handler", "launched", "processes", "ending"),
    [
        (signal.SIGTERM, own, False, 1, "called"),
        (signal.SIGTERM, own, True, 2, "called"),
        (signal.SIGTERM, signal.SIG_DFL, True, 1, "left"),
        (signal.SIGTERM, signal.SIG_DFL, False, 2, "left"),
        (signal.SIGTERM, signal.SIG_IGN, True, 2, "returns"),
        (signal.SIGINT, own, False, 1, "called"),
        (signal.SIGINT, signal.default_int_handler, False, 1, "returns"),
        (signal.SIGINT, signal.SIG_DFL, True, 2, "returns"),
    ],
)
def test_what_a_signal_does_once_all_is_saved(number, handler, launched, processes, ending):
    called = []
    set_here = (lambda *_: called.append(stop.name)) if handler is own else handler
    before = signal.signal(number, set_here)
    try:
        with StopSignals(launched) as stop:
            # As of another process of the gang: this one may have got none.
            stop.name = signal.Signals(number).name
        if ending == "left":
            with pytest.raises(SystemExit) as left:
                stop.deliver(processes)
            assert left.value.code == ExitCode.PREEMPTED
        else:
            stop.deliver(processes)
        assert called == ([stop.name] if ending == "called" else [])
    finally:
        signal.signal(number, before)


def test_a_fit_within_a_fit_stops_both():
    before = signal.signal(signal.SIGTERM, own)
    try:
        with StopSignals(False) as outer:
            with StopSignals(False) as inner:
                os.kill(os.getpid(), signal.SIGTERM)
            inner.deliver(1)
            assert (inner.name, outer.name) == ("SIGTERM", "SIGTERM")
    finally:
        signal.signal(signal.SIGTERM, before)


SCRIPT = """
import os, signal, sys
import plurax as px
from tests import models

if sys.argv[2] == "handled":
    signal.signal(signal.SIGTERM, lambda *_: print("handled"))

class Strike:
    def on_step(self, run, row):
        if run.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)

options = {"batch_size": 8, "epochs": 50, "callbacks": [Strike()], "progress": False}
def train(output, **more):
    return px.fit(models.mlp_task(), models.optimizer(), models.data(16), output=output,
                  **options, **more)

print(train(sys.argv[1]).interrupted)
print(train(sys.argv[1] + ".next").interrupted)
"""


@pytest.mark.parametrize(
    ("how", "launched", "code", "said", "trained"),
    [
        ("plain", False, -signal.SIGTERM, [], [True, False]),
        ("plain", True, ExitCode.PREEMPTED, [], [True, False]),
        ("handled", False, 0, ["handled", "SIGTERM"] * 2, [True, True]),
    ],
)
def test_a_script_that_gets_sigterm_ends_with_its_checkpoint(
    tmp_path, how, launched, code, said, trained
):
    """What stands after `fit` does not run with half a network, unless the script asks for it."""
    environment = {**os.environ, **({"PLURAX_STATUS": str(tmp_path)} if launched else {})}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, tmp_path / "run", how], cwd=Path(__file__).parents[2],
        capture_output=True, text=True, timeout=300, env=environment,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    assert [line for line in done.stdout.splitlines() if "SIGTERM:" not in line] == said
    folders = [tmp_path / name / "checkpoints" for name in ("run", "run.next")]
    assert [bool(folder.is_dir() and Checkpoints(folder).steps()) for folder in folders] == trained
