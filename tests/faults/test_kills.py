"""kill -9 of processes of a real gang, and of their launcher: the end is bit-equal.

Rows 1, 2 and 10 of the list of faults. `make test-faults` runs the long ones.
"""

import os

import pytest

from plurax.checkpoint import Checkpoints
from tests.faults import run
from tests.faults.launched import launching

pytestmark = pytest.mark.gangs

ROUNDS = int(os.environ.get("PLURAX_FAULT_ROUNDS", "20"))
SEED = int(os.environ.get("PLURAX_FAULT_SEED", "0"))


def check_end(folder, step=run.STEPS):
    """Raise `AssertionError` unless the last checkpoint is that of a run nothing happened to."""
    found, undisturbed = (
        Checkpoints(folder / name / "checkpoints").fingerprints(step)
        for name in ("run", "run.undisturbed")
    )
    assert found == undisturbed


def kill(*who, **when):
    return {"who": who, "what": "kill", **when}


def test_processes_and_the_launcher_are_killed(tmp_path):
    """Rank 1 in a step, the launcher; again, rank 0 within a save."""
    launcher = {"who": [0], "what": "launcher", "step": 27}
    with launching(tmp_path, [kill(1, step=13), launcher]) as launch:
        assert launch.wait() == -9, launch.said
        launch.check_nothing_left()
        assert launch.restarts() == [(1, 137)]
        assert "process 1 was killed (SIGKILL) at step" in launch.said
    with launching(tmp_path, [kill(0, event=30)], name="again") as launch:
        assert launch.wait() == 0, launch.said
        launch.check_nothing_left()
        assert launch.restarts() == [(0, 137)]
    check_end(tmp_path)


@pytest.mark.slow
def test_all_are_killed_together(tmp_path):
    """Both ranks in a step; both within a save; the launcher within the save of another process."""
    launcher = {"who": [1], "what": "launcher", "event": 9}
    with launching(tmp_path, [kill(0, 1, step=15), kill(0, 1, event=20), launcher]) as launch:
        assert launch.wait() == -9, launch.said
        launch.check_nothing_left()
        assert [code for _, code in launch.restarts()] == [137, 137]
    with launching(tmp_path, name="again") as launch:
        assert launch.wait() == 0, launch.said
        launch.check_nothing_left()
    check_end(tmp_path)


@pytest.mark.slow
def test_many_kills(tmp_path):
    """One run that is killed again and again, at drawn moments; progress refills its budget."""
    drawn = {"draw": SEED, "rounds": ROUNDS, "every": 6, "steps": 6 * run.MOST * ROUNDS}
    print(f"PLURAX_FAULT_ROUNDS={ROUNDS} PLURAX_FAULT_SEED={SEED}")
    with launching(tmp_path, drawn, options=("--restarts", 20)) as launch:
        assert launch.wait(60 + 30 * ROUNDS) == 0, launch.said
        launch.check_nothing_left()
        causes = launch.restarts()
    assert len(causes) == ROUNDS
    assert {code for _, code in causes} == {137}, launch.ends()
    check_end(tmp_path, drawn["steps"])
