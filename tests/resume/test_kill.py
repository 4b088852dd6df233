"""kill -9 in the middle of training; the run that resumes ends bit-equal to one never stopped."""

import csv
import functools
import json
import os
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event
from tests import models
from tests.resume import runs
from tests.resume.test_resume import CLOCK, log_of

from plurax.checkpoint import Checkpoints
from plurax.checkpoint.description import read_description
from plurax.checkpoint.files import verify_files
from plurax.loop.log_rows import read_rows

REPOSITORY = Path(__file__).parents[2]


def deadly():
    """The environment of a process that dies: it may leave half a compiled program behind."""
    cache = Path(os.environ["PLURAX_TEST_CACHE"], "killed")
    return {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(cache)}


KILLS = 4

pytestmark = [
    pytest.mark.ci,
    pytest.mark.filterwarnings("ignore::plurax.errors.RollbackWarning"),  # of "rolled back"
    pytest.mark.filterwarnings("ignore::plurax.errors.NonFiniteWarning"),
]


@functools.cache
def undisturbed(kind):
    """The state, the log and the losses of a run that nothing stopped; but for the clock's."""
    with tempfile.TemporaryDirectory() as directory:
        result = runs.fit(kind, directory)
        return jax.device_get(_plain(result.state)), log_of(Path(directory)), losses(result)


def losses(result):
    return [np.asarray(row["loss"]).tolist() for row in result.history]


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
        # Whoever looks at it in between finds whole checkpoints, or none, and no damage.
        checkpoints = Checkpoints(output / "checkpoints")
        assert not checkpoints.damaged()
        for step in checkpoints.steps():
            read_description(checkpoints.directory / str(step))
            verify_files(checkpoints.directory / str(step) / "state")
    finish(kind, output)


def finish(kind, output):
    result = runs.fit(kind, output, resume=True)
    state, log, expected = undisturbed(kind)
    assert losses(result) == expected
    assert models.same_bits(_plain(result.state), state)
    last = int(np.max(result.state.step))
    assert last == runs.STEPS or kind == "rolled back"
    assert json.dumps(log_of(output)) == json.dumps(log)  # NaN is NaN
    assert [row["step"] for row in log if row["kind"] == "step"] == list(range(1, last + 1))


@pytest.mark.parametrize(("kind", "moment"), [("streamed", "batch:15"), ("data", "evaluation:3")])
def test_killed_between_saves(tmp_path, kind, moment):
    """In a step, and in an evaluation."""
    assert killed(kind, tmp_path, moment)
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        assert 0 < checkpoints.steps()[-1] < runs.STEPS
    finish(kind, tmp_path)


def files_of_loggers(output):
    """What the user's loggers have written, but for what the clock says."""
    with (output / "logs" / "table.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    lines = list(read_rows(output / "logs" / "rows.jsonl"))
    rows = [{name: value for name, value in row.items() if name not in CLOCK}
            for row in (*table, *lines)]  # fmt: skip
    return rows, shown(output / "board")


def shown(board):
    """The scalars that TensorBoard shows of a folder: a file hides those before from its step."""
    found = {}
    for path in sorted(board.iterdir()):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            event, data = Event.FromString(data[12 : 12 + length]), data[16 + length :]
            if event.HasField("session_log"):
                found = {key: value for key, value in found.items() if key[1] < event.step}
            for one in event.summary.value:
                if not one.tag.endswith(tuple(CLOCK)):
                    found[one.tag, event.step] = one.simple_value
    return found


@pytest.mark.parametrize(
    "moment", ["batch:15", pytest.param("batch:8", marks=pytest.mark.slow), "file:16:1"]
)
def test_files_of_loggers_are_those_of_a_run_that_was_not_killed(tmp_path, moment):
    """In a step between two checkpoints, and before the last one gets its name."""
    assert killed("logged", tmp_path / "killed", moment)
    rows = list(read_rows(tmp_path / "killed" / "logs" / "rows.jsonl"))
    newest = Checkpoints(tmp_path / "killed" / "checkpoints").steps()[-1]
    assert {row["step"] for row in rows} >= set(range(1, newest + 1))
    finish("logged", tmp_path / "killed")
    runs.fit("logged", tmp_path / "whole")
    assert files_of_loggers(tmp_path / "killed") == files_of_loggers(tmp_path / "whole")


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


@pytest.mark.parametrize(
    "moment", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, *range(4, 60, 2)))]
)
def test_killed_in_a_rollback(tmp_path, moment):
    """Before it is recorded, before and after checkpoints are removed, in the saves after it."""
    chain("rolled back", tmp_path / "run", [f"rollback:{moment}"], certain=True)


@pytest.mark.parametrize(
    "moment",
    [
        # The data are written, their digests are not; the digests are, the marker is not.
        pytest.param("file:sha256.json:2", marks=pytest.mark.slow),
        "file:commit_success.txt:5",
        # All is, but it has not its name yet; in the middle of an old checkpoint that is removed.
        pytest.param("file:4.orbax-checkpoint-tmp:1", marks=pytest.mark.slow),
        "remove:27",
    ],
)
def test_nothing_is_ever_half_visible(tmp_path, moment):
    chain("data", tmp_path / "run", [moment], certain=True)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("kind", runs.KINDS)
def test_two_hundred_kills(tmp_path, kind, seed):
    chain(kind, tmp_path / "run", moments([seed, *kind.encode()]))
