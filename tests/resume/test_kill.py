"""kill -9 in the middle of training; the run that resumes ends bit-equal to one never stopped."""

import functools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import numpy as np
import pytest
from tests import models
from tests.resume import runs
from tests.resume.test_resume import log_of

import plurax as px
from plurax.execute.array_data import ArrayData, Position
from plurax.train.checkpoint import Checkpoints

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


def deadly():
    """The environment of a process that dies: it may leave half a compiled program behind."""
    cache = Path(os.environ["PLURAX_TEST_CACHE"], "killed")
    return {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(cache)}


@pytest.mark.parametrize("how", ["in a step", "in an evaluation"])
def test_killed_and_resumed(tmp_path, how):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, how, str(tmp_path / "killed")],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        env=deadly(),
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


# --- Rounds: killed at random moments, again and again, and resumed to the end ------------------

KILLS = 4


@functools.cache
def undisturbed(kind):
    """The state and the log of a run that nothing stopped; its rows but for the clock's."""
    with tempfile.TemporaryDirectory() as directory:
        result = runs.fit(kind, directory)
        return jax.device_get(_plain(result.state)), log_of(Path(directory))


def _plain(state):
    return {"params": state.params, "opt_state": state.opt_state, "step": state.step,
            "key": jax.random.key_data(state.key)}  # fmt: skip


def killed(kind, output, moment):
    """A process that resumes the run, until a moment; whether it was killed before its end."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.resume.runs", kind, str(output), moment],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        env=deadly(),
    )
    assert done.returncode in (0, -9), (moment, done.stderr)
    return done.returncode == -9


def moments(seed):
    """Some inside a save, some anywhere."""
    rng = np.random.default_rng(seed)
    for _ in range(KILLS):
        inside = rng.random() < 0.7
        yield f"event:{rng.integers(1, 250)}" if inside else f"time:{rng.uniform(0, 4):.3f}"


def chain(kind, output, when, *, certain=False):
    """Kill the run at each moment, finish it here, and compare it with one never stopped."""
    for moment in when:
        if not killed(kind, output, moment):
            assert not certain, "the run has fewer moments than that"
            break
        # Whoever looks at it in between finds a whole checkpoint, or none, and no damage.
        assert not Checkpoints(output / "checkpoints").damaged()
    result = runs.fit(kind, output, resume=True)
    state, log = undisturbed(kind)
    assert models.same_bits(_plain(result.state), state)
    assert int(np.max(result.state.step)) == runs.STEPS
    assert log_of(output) == log
    assert [row["step"] for row in log if row["kind"] == "step"] == list(range(1, runs.STEPS + 1))


@pytest.mark.parametrize(
    ("kind", "when"),
    [
        ("data", ["event:101"]),
        ("members", ["event:131"]),
        pytest.param("data", ["event:1", "event:101"], marks=pytest.mark.slow),
    ],
)
def test_killed_in_a_save(tmp_path, kind, when):
    chain(kind, tmp_path / "run", when, certain=True)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("kind", runs.KINDS)
def test_two_hundred_kills(tmp_path, kind, seed):
    chain(kind, tmp_path / "run", moments([seed, *kind.encode()]))
