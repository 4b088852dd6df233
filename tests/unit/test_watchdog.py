"""The watchdog: what it takes for stuck, what it says, and what it writes for the launcher."""

import dataclasses
import itertools
import json
import os
import re
import subprocess
import sys
from typing import NamedTuple

import optax
import pytest
from tests import models

import plurax as px
from plurax.checkpoint.manager import SAVE_SECONDS
from plurax.distributed.process_group import ROUND_SECONDS
from plurax.exit_codes import ExitCode
from plurax.guards.status import Status, StatusFile
from plurax.guards.watchdog import FACTOR, FIRST_FACTOR, FIRST_TO_OTHERS, Watchdog
from plurax.launch.settings import Limits as LauncherLimits
from plurax.timeouts import TIMEOUTS, Timeouts


class Step(NamedTuple):
    step: int


class Clock:
    """A clock that stands still until it is moved; looks as often as the watchdog would."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now

    def pass_by(self, dog, seconds):
        """Let time pass in which the process runs."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 1.0)
            dog.look()


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def opened(clock, monkeypatch):
    """A function that opens a watchdog whose thread never looks; `dog.ended` are exit codes."""
    monkeypatch.setattr(Watchdog, "_watch", lambda dog: None)
    dogs = []

    def open_dog(**options):
        ended = []
        dog = Watchdog(clock=clock, end=ended.append, **options)
        dog.ended = ended
        dogs.append(dog)
        return dog.__enter__()

    yield open_dog
    for dog in dogs:
        dog.__exit__()


def trained(dog, clock, seconds, count=None):
    """Run steps of so many seconds under the watchdog, and return the generator, at the last."""
    count = len(seconds) if count is None else count

    def loop():
        for number, each in enumerate(seconds, 1):
            clock.pass_by(dog, each)
            yield Step(number)

    watched = dog.watch(loop())
    for _ in range(count):
        next(watched)
    return watched


def test_a_step_may_take_some_times_the_median_of_those_before(opened, clock, capfd):
    dog = opened(process=3)
    watched = trained(dog, clock, [60, 25, 24, 26, 25, 1])
    assert dog.limit("step") == pytest.approx(FACTOR * 24.5)
    clock.pass_by(dog, FACTOR * 24.5 - 1)
    assert not dog.ended
    clock.pass_by(dog, 3)
    assert dog.ended[0] == ExitCode.STUCK == 76
    said = capfd.readouterr().err
    assert "process 3 (pid " in said
    assert "is stuck: a step after step 6 has taken 491 s, and its limit is 490 s" in said
    assert "test_a_step_may_take_some_times_the_median" in said  # its stack
    watched.close()


def test_limits_of_quick_and_of_slow_steps(opened, clock):
    dog = opened()
    assert dog.limit("step") == dog.limit("compile") == TIMEOUTS.long_work
    watched = trained(dog, clock, [2, 0.1, 0.1, 0.1])
    assert dog.limit("step") == TIMEOUTS.step
    watched.close()
    slow = opened()
    watched = trained(slow, clock, [70, 70, 70, 70])
    assert slow.limit("step") == TIMEOUTS.longest_step
    watched.close()
    compiled = opened()  # a batch of another shape compiles in the midst of training
    watched = trained(compiled, clock, [400, 1, 1, 1])
    assert compiled.limit("step") == FIRST_FACTOR * 400
    watched.close()


def test_a_first_step_an_evaluation_and_a_save_may_take_long(opened, clock):
    for phase in ("start", "evaluate", "save"):
        dog = opened()
        with dog.work(phase):
            clock.pass_by(dog, TIMEOUTS.long_work - 1)
            assert not dog.ended
            clock.pass_by(dog, 3)
            assert dog.ended
    dog = opened()
    assert not dog.ended
    clock.pass_by(dog, TIMEOUTS.long_work + 3)  # nothing else was said since the start
    assert dog.ended


def test_work_inside_a_step_has_a_limit_of_its_own_and_is_no_part_of_the_step(opened, clock):
    dog = opened()
    watched = trained(dog, clock, [60, 1, 1, 1])
    for _ in range(2):
        with dog.work("evaluate"):
            clock.pass_by(dog, 100)
        with dog.work("save"):
            clock.pass_by(dog, 1000)
    assert not dog.ended
    assert dog.limit("step") == TIMEOUTS.step
    assert dog.limit("evaluate") == TIMEOUTS.longest_step
    watched.close()


def test_a_process_that_was_suspended_is_not_stuck(opened, clock):
    dog = opened()
    watched = trained(dog, clock, [1, 1, 1])
    clock.pass_by(dog, 100)
    clock.now += 3600  # Ctrl-Z, and later fg
    dog.look()
    clock.pass_by(dog, TIMEOUTS.step - 100 - 2)
    assert not dog.ended
    clock.pass_by(dog, 4)
    assert dog.ended
    watched.close()


def test_what_stands_after_the_last_step_is_a_save(opened, clock, tmp_path):
    dog = opened(status=StatusFile(tmp_path, 0))
    for _ in trained(dog, clock, [1, 1], count=0):
        pass
    dog.look()
    assert json.loads((tmp_path / "0.json").read_text())["phase"] == "save"


def test_a_process_alone_is_watched_by_nobody(clock):
    dog = Watchdog.of_gang(1, 0, {})
    with dog:
        assert dog._thread is None
        steps = [Step(1), Step(2)]
        assert [*dog.watch(iter(steps))] == steps
        with dog.work("evaluate"):
            pass


def test_who_is_watched(tmp_path):
    launched = {
        "PLURAX_STATUS": str(tmp_path), "PLURAX_COORDINATOR": "localhost:1",
        "PLURAX_PROCESSES": "3", "PLURAX_PROCESS": "2",
    }  # fmt: skip
    assert Watchdog.of_gang(1, 0, launched).enabled
    assert Watchdog.of_gang(2, 1, {}).enabled
    assert not Watchdog.of_gang(2, 1, {"PLURAX_WATCHDOG": "0"}).enabled
    assert Watchdog.of_gang(2, 1, {"PLURAX_WATCHDOG": "45"}).limit("step") == TIMEOUTS.long_work
    with pytest.raises(
        px.errors.PluraxError, match="PLURAX_WATCHDOG='soon' must be a whole number"
    ):
        Watchdog.of_gang(2, 1, {"PLURAX_WATCHDOG": "soon"})
    with Watchdog.of_gang(1, 0, {**launched, "PLURAX_WATCHDOG": "0"}) as dog:
        [*dog.watch(iter([Step(5)]), saved=lambda: 4)]
    assert json.loads((tmp_path / "2.json").read_text()) == {
        "phase": "wait", "step": 5, "saved": 4, "deadline": None,
    }  # fmt: skip


# --- The status -----------------------------------------------------------------------------------


def test_the_status_has_the_deadline_of_the_watchdog(opened, clock, tmp_path):
    dog = opened(status=StatusFile(tmp_path, 1))
    file = tmp_path / "1.json"
    assert json.loads(file.read_text())["deadline"] == 1000 + TIMEOUTS.long_work
    watched = trained(dog, clock, [60, 1, 1, 1])
    dog.look()
    began = clock.now
    assert json.loads(file.read_text()) == {
        "phase": "step", "step": 4, "saved": None, "deadline": began + TIMEOUTS.step,
    }  # fmt: skip
    clock.now += 500  # suspended: the deadline moves with it
    dog.look()
    assert json.loads(file.read_text())["deadline"] == began + 500 + TIMEOUTS.step
    watched.close()


def test_a_deadline_that_comes_sooner_is_written_at_once(opened, clock, tmp_path):
    """Or a process that holds the GIL right after it has compiled is found as late as that."""
    dog = opened(status=StatusFile(tmp_path, 0))
    watched = trained(dog, clock, [60, 0, 0, 0])
    assert json.loads((tmp_path / "0.json").read_text()) == {
        "phase": "step", "step": 3, "saved": None, "deadline": clock.now + TIMEOUTS.step,
    }  # fmt: skip
    watched.close()


def test_an_unchanged_status_is_not_written_again_and_a_lost_folder_ends_nothing(tmp_path):
    folder = tmp_path / "status"
    folder.mkdir()
    file = StatusFile(folder, 0)
    file.write(Status("step", 1, None, None))
    (folder / "0.json").unlink()
    file.write(Status("step", 1, None, None))
    assert [*folder.iterdir()] == []
    file.write(Status("step", 2, None, None))
    assert [path.name for path in folder.iterdir()] == ["0.json"]
    (folder / "0.json").unlink()
    folder.rmdir()
    file.write(Status("step", 3, None, None))


def test_a_process_that_is_behind_is_named_by_those_that_wait_for_it(
    opened, clock, tmp_path, capfd
):
    its_end = clock.now + 3 + TIMEOUTS.step + 40  # its limit is longer than that of this process
    StatusFile(tmp_path, 0).write(Status("wait", 1, None, its_end))
    StatusFile(tmp_path, 2).write(Status("step", 2, None, its_end + 1000))  # it waits, too
    StatusFile(tmp_path, 4).write(Status("step", 3, None, None))
    (tmp_path / "3.json").write_text("{")  # being written by something else
    dog = opened(process=1, status=StatusFile(tmp_path, 1))
    watched = trained(dog, clock, [1, 1, 1])
    until = its_end + FIRST_TO_OTHERS
    clock.pass_by(dog, until - clock.now - 1)
    assert not dog.ended  # the one behind ends first, or the launcher ends it
    said = json.loads((tmp_path / "1.json").read_text())
    assert said["deadline"] == until
    clock.pass_by(dog, 3)
    assert dog.ended
    said = capfd.readouterr().err
    assert "Behind it, and more likely the cause: process 0 (step 1). Its threads:" in said
    assert "process 1 (pid" in said
    watched.close()


def test_nothing_keeps_it_from_ending(opened, clock, monkeypatch):
    dog = opened()
    monkeypatch.setattr(sys, "stderr", None)
    watched = trained(dog, clock, [1, 1, 1])
    clock.pass_by(dog, TIMEOUTS.step + 2)
    assert dog.ended
    watched.close()


# --- The limits -----------------------------------------------------------------------------------


def test_the_limits_are_nested():
    launcher = LauncherLimits()
    assert launcher.slack == TIMEOUTS.slack
    assert launcher.abort == TIMEOUTS.abort
    assert (TIMEOUTS.save, TIMEOUTS.gang_round) == (SAVE_SECONDS, ROUND_SECONDS)
    names = [field.name for field in dataclasses.fields(Timeouts)]
    for name, value in [(name, 1e6) for name in names[:-1]] + [(name, 0.0) for name in names[1:]]:
        with pytest.raises(AssertionError, match=r"not nested|wait for the watchdog"):
            dataclasses.replace(TIMEOUTS, **{name: value})


# --- A real process -------------------------------------------------------------------------------

STUCK = """
import threading
from plurax.guards.watchdog import Watchdog, WatchdogLimits
from tests.unit.test_watchdog import Step

def waits_for_a_lock():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire(timeout=60)

def steps():
    for number in range(1, 4):
        yield Step(number)
    waits_for_a_lock()

with Watchdog(process=1, limits=WatchdogLimits(look=0.02, step=0.2)) as dog:
    for _ in dog.watch(steps()):
        pass
print("not stuck")
"""


def test_a_process_that_waits_for_a_lock_is_ended_and_its_stacks_are_written():
    done = subprocess.run(
        [sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == ExitCode.STUCK
    assert done.stdout == ""
    assert "process 1" in done.stderr
    assert "a step after step 3 has taken 0 s" in done.stderr
    assert "in waits_for_a_lock" in done.stderr


TRAINS = """
import optax, threading
import plurax as px
from tests import models

class Batches:
    def __iter__(self):
        for number in range(8):
            yield models.data(8, seed=number)
        threading.Event().wait(60)

print(px.fit(models.mlp_task(), optax.sgd(0.1), Batches(), batch_size=8, evaluation=models.data(8)))
"""


@pytest.mark.ci
def test_fit_under_a_launcher_is_watched(tmp_path):
    environment = {**os.environ, "PLURAX_STATUS": str(tmp_path), "PLURAX_WATCHDOG": "8"}
    done = subprocess.run(
        [sys.executable, "-c", TRAINS], capture_output=True, text=True, timeout=120, env=environment
    )
    assert done.returncode == ExitCode.STUCK, done.stderr
    # The eighth batch is held back, to know which is the last, and others where several steps share
    # a call: how many do is measured.
    step = int(re.search(r"a step after step (\d) has taken", done.stderr)[1])
    assert 1 <= step <= 7
    status = json.loads((tmp_path / "0.json").read_text())
    assert (status["phase"], status["step"], status["saved"]) == ("step", step, None)
    assert status["deadline"] is not None


def test_fit_says_what_it_does(tmp_path, monkeypatch):
    phases = []
    write = StatusFile.write

    def noted(file, status):
        phases.append(status.phase)
        write(file, status)

    begin = Watchdog._begin

    def begun(dog, phase):
        begin(dog, phase)
        dog.look()

    monkeypatch.setattr(StatusFile, "write", noted)
    monkeypatch.setattr(Watchdog, "_begin", begun)
    monkeypatch.setenv("PLURAX_STATUS", str(tmp_path / "status"))
    (tmp_path / "status").mkdir()
    px.fit(
        models.mlp_task(), optax.sgd(0.1), models.data(32), batch_size=8, evaluation=models.data(8),
        output=tmp_path / "run", epochs=2, resident=False, progress=False,
    )  # fmt: skip
    seen = [phase for phase, _ in itertools.groupby(phases)]
    epoch = ["step", "evaluate", "step", "save"]
    assert seen == ["start", "compile", *epoch, *epoch, "step", "save", "wait"]
    assert json.loads((tmp_path / "status" / "0.json").read_text()) == {
        "phase": "wait", "step": 8, "saved": 8, "deadline": None,
    }  # fmt: skip
