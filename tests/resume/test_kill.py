"""kill -9 in the middle of training; the run that resumes ends bit-equal to one never stopped."""

import subprocess
import sys
from pathlib import Path

import jax
import pytest
from tests import models

import plurax as px
from plurax.checkpoint import Checkpoints
from plurax.data import ArrayData, Position

ROWS = models.data(50)
REPOSITORY = Path(__file__).parents[2]
SCRIPT = """
import os, signal, sys
import plurax as px
px.virtual_devices(8)
from tests import models
from tests.resume.test_kill import ROWS, Batches, fit

class Deadly:
    looked = 0
    def __iter__(self):  # evaluated after each epoch, before its checkpoint
        Deadly.looked += 1
        if Deadly.looked == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        yield ROWS

how, output = sys.argv[1:]
if how == "in a step":
    fit(Batches(fatal=(3, 2)), output)
else:
    fit(ROWS, output, evaluation=Deadly())
"""


class Batches:
    """The batches of an epoch; at the fatal one the process dies."""

    def __init__(self, fatal=None):
        self.epoch, self.fatal = -1, fatal

    def __iter__(self):
        import os
        import signal

        self.epoch += 1
        for index, (batch, _) in enumerate(ArrayData(ROWS, 16).batches(Position(0))):
            if (self.epoch, index) == self.fatal:
                os.kill(os.getpid(), signal.SIGKILL)
            yield batch


def fit(data, output, **options):
    return px.fit(
        models.mlp_task(), models.optimizer(), data, plan=px.Plan(data=2, microbatches=2),
        epochs=4, output=output, checkpoint_every=3, progress=False,
        **{"batch_size": 16, **options},
    )  # fmt: skip


@pytest.mark.parametrize("how", ["in a step", "in an evaluation"])
def test_killed_and_resumed(tmp_path, how):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, how, str(tmp_path / "killed")],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    assert done.returncode == -9, done.stderr
    data = {"in a step": Batches, "in an evaluation": lambda: ROWS}[how]
    # An evaluation makes every epoch end in the same compiled programs.
    evaluation = None if how == "in a step" else ROWS
    with Checkpoints(tmp_path / "killed" / "checkpoints") as checkpoints:
        assert 0 < checkpoints.steps()[-1] < 16
    resumed = fit(data(), tmp_path / "killed", resume=True, evaluation=evaluation)
    whole = fit(data(), tmp_path / "whole", evaluation=evaluation)
    assert models.same_bits(resumed.state.params, whole.state.params)
    assert models.same_bits(resumed.state.opt_state, whole.state.opt_state)
    assert int(resumed.state.step) == 16
    assert [row["loss"] for row in resumed.history] == [row["loss"] for row in whole.history]
    assert jax.random.key_data(resumed.state.key).tolist() == (
        jax.random.key_data(whole.state.key).tolist()
    )
