"""Two runs, one folder: the second is refused before it writes anything; readers never write."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests import models
from tests.resume import runs
from tests.resume.test_kill import REPOSITORY, deadly, finish
from tests.unit.test_checkpoint import listing

import plurax as px
from plurax.checkpoint import Checkpoints

pytestmark = pytest.mark.ci

ROWS, TASK, OPTIMIZER = models.data(32), models.mlp_task(), models.optimizer()


def fit(output, **options):
    return px.fit(TASK, OPTIMIZER, ROWS, batch_size=8, output=output, progress=False, **options)


@pytest.fixture(params=["new", "trained"])
def written(request, tmp_path):
    """A folder to which another run writes: before its first checkpoint, or after."""
    if request.param == "trained":
        fit(tmp_path)
    with Checkpoints(tmp_path / "checkpoints") as first:
        first.lock()
        yield tmp_path


@pytest.mark.parametrize("how", [{}, {"resume": True}, {"restart": True}])
def test_the_second_run_is_refused_and_has_written_nothing(written, how):
    before = listing(written)
    refused = r"is written by process|already holds a run"
    with pytest.raises(px.errors.CheckpointError, match=refused):
        fit(written, plan=px.Plan(data=2), command={"file": "none.py"}, **how)
    assert listing(written) == before


EXPERIMENT = """
import plurax as px
from tests import models

def experiment():
    return px.Experiment(models.mlp_task(), models.optimizer(), models.data(32), batch_size=8)
"""


def test_the_command_is_refused_and_has_written_nothing(written, monkeypatch, capsys):
    file = written.parent / "two_runs.py"
    file.write_text(EXPERIMENT)
    before = listing(written)
    with pytest.raises(SystemExit) as ended:
        px.cli.main(["train", str(file), "--output", str(written), "--resume", "--no-progress"])
    assert ended.value.code == 2
    assert f"is written by process {os.getpid()}" in capsys.readouterr().err
    assert listing(written) == before


def test_predicting_from_a_live_run_writes_nothing(tmp_path, monkeypatch, capsys):
    run, file = tmp_path / "run", tmp_path / "two_runs.py"
    fit(run)
    file.write_text(EXPERIMENT)
    np.savez(tmp_path / "inputs.npz", x=ROWS["x"])
    with Checkpoints(run / "checkpoints") as first:
        first.lock()
        unfinished = run / "checkpoints" / "99.orbax-checkpoint-tmp"
        unfinished.mkdir()
        before = listing(run)
        with pytest.raises(SystemExit) as ended:
            px.cli.main(["predict", str(file), "--output", str(run), "--inputs",
                         str(tmp_path / "inputs.npz"), "--predictions",
                         str(tmp_path / "out.npy")])  # fmt: skip
        assert ended.value.code == 0, capsys.readouterr().err
        assert listing(run) == before


def test_a_live_process_keeps_its_folder_and_a_dead_one_does_not(tmp_path):
    """A real one, which stops in the middle of an epoch until it is killed."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.resume.runs", "streamed", str(tmp_path), "stop:15"],
        cwd=REPOSITORY, stdout=subprocess.PIPE, env=deadly(), text=True,
    ) as process:  # fmt: skip
        try:
            assert process.stdout.readline() == "stopped\n"
            with pytest.raises(
                px.errors.CheckpointError, match=rf"written by process {process.pid} on"
            ):
                runs.fit("streamed", tmp_path, resume=True)
        finally:
            process.kill()
    finish("streamed", tmp_path)
    assert Path(tmp_path, "checkpoints", "writer.lock").read_bytes() == b""
