"""Real gangs under the launcher: a process that hangs, is stopped, or has a faulty device.

The right process is named, all are started again, and the run ends with the bits of one that
nothing happened to. Rows 11 and 16 of the list of faults.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import plurax as px

pytestmark = pytest.mark.gangs

REPOSITORY = Path(__file__).parents[2]

EXPERIMENT = """
import ctypes, os, signal, threading
import optax
import plurax as px
from plurax.execute.program import Program
from tests import models
from tests.unit.test_replicas import with_flip

struck = (os.environ["PLURAX_PROCESS"], os.environ["PLURAX_ATTEMPT"]) == ("1", "0")
FAULTS = {
    "hangs": lambda: threading.Event().wait(300),
    "holds the GIL": lambda: ctypes.PyDLL(None).sleep(300),
    "is stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
}


class Batches:
    def __iter__(self):
        for number in range(40):
            if struck and number == 27:
                FAULTS.get(os.environ["FAULT"], lambda: None)()
            yield models.data(8, seed=number)


step = Program.step_placed


def faulty(program, state, placed):
    state, metrics = step(program, state, placed)
    if state.steps_taken == 25:
        device = program.mesh.devices.flat[3]  # of process 1
        state, _ = with_flip(program, state, "params/hidden", device)
    return state, metrics


if os.environ["FAULT"] == "flips a bit" and os.environ["PLURAX_ATTEMPT"] == "0":
    Program.step_placed = faulty


def experiment():
    return px.Experiment(
        task=models.mlp_task(), optimizer=optax.adam(1e-2), data=Batches(), batch_size=8,
        plan=px.Plan(data=4),
    )
"""


def launched(folder, fault):
    """Return the fingerprints of the last checkpoint, and what the launcher and the processes said.

    Of two processes with two devices each.
    """
    (folder / "experiment.py").write_text(EXPERIMENT)
    run = folder / fault
    done = subprocess.run(
        [sys.executable, "-m", "plurax.cli", "launch", "--processes", "2", "--devices", "2", "--",
         "train", str(folder / "experiment.py"), "--checkpoint-every", "10",
         "--check-replicas-every", "7", "--output", str(run)],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=400,
        env={**os.environ, "FAULT": fault, "PLURAX_WATCHDOG": "5",
             "PYTHONPATH": f"{REPOSITORY / 'src'}:{REPOSITORY}"},
    )  # fmt: skip
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-5000:]
    return px.Checkpoints(run / "checkpoints").fingerprints(40), said


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    found, said = launched(tmp_path_factory.mktemp("undisturbed"), "none")
    assert found
    assert "restarting" not in said
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "words"),
    {
        # Process 1, or process 0, which waits for it and is as stuck.
        "hangs": "ended with exit code 76 at step",
        "holds the GIL": "process 1 was stuck at step",
        "is stopped": "it is stopped, as by SIGSTOP",
        "flips a bit": "device 1 of process 1 on",
    }.items(),
    ids=str,
)
def test_a_fault_is_named_and_the_run_ends_as_if_it_had_not_been(
    tmp_path, undisturbed, fault, words
):
    found, said = launched(tmp_path, fault)
    assert words in said
    assert "restarting the 2 processes from the checkpoint of step" in said
    assert found == undisturbed
    if fault in ("hangs", "holds the GIL"):
        assert f"{tmp_path / 'experiment.py'}" in said  # the stack
