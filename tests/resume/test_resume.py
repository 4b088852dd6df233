"""Runs that are resumed, refused or started anew: what `fit` does with a folder that holds one."""

import json
import os
import shutil

import grain
import jax
import numpy as np
import optax
import pytest
from tests import models
from tests.unit.test_checkpoint import listing

import plurax as px
from plurax.cli import main
from plurax.execute.array_data import Position
from plurax.loop.data import StreamData
from plurax.loop.log_rows import read_rows

ROWS = models.data(50)
TASK, OPTIMIZER = models.mlp_task(), models.optimizer()  # programs are compiled once for both
CLOCK = {"seconds", "examples_per_second"}


def fit(data=ROWS, **options):
    options = {"epochs": 3, "batch_size": 16, "progress": False, **options}
    return px.fit(TASK, options.pop("optimizer", OPTIMIZER), data, **options)


def log_of(directory):
    """The rows of a run, but for what the clock says."""
    return [
        {name: value for name, value in row.items() if name not in CLOCK}
        for row in read_rows(directory / "metrics.jsonl")
    ]


def steps_in(directory):
    return px.Checkpoints(directory / "checkpoints").steps()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of three epochs of four steps that was never stopped, with a checkpoint at each."""
    directory = tmp_path_factory.mktemp("whole")
    return fit(output=directory, checkpoint_every=1), directory


@pytest.mark.parametrize("resident", [True, False])
def test_checkpoint_every_saves(tmp_path, resident):
    fit(output=tmp_path, epochs=1, checkpoint_every=3, resident=resident)
    assert steps_in(tmp_path) == [3, 4]


@pytest.mark.parametrize("resident", [True, False])
def test_resume_in_the_middle_of_an_epoch(tmp_path, whole, resident):
    """And go on through a whole one after it."""
    if not resident:
        whole = fit(output=tmp_path / "whole", resident=False), tmp_path / "whole"
    fit(output=tmp_path / "cut", epochs=2, checkpoint_every=3, resident=resident)
    assert steps_in(tmp_path / "cut") == [4, 6, 8]
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "8")
    result = fit(output=tmp_path / "cut", resume=True, resident=resident)
    assert models.same_bits(result.state.params, whole[0].state.params)
    assert log_of(tmp_path / "cut") == log_of(whole[1])


def damage_all(directory):
    for step in steps_in(directory):
        (directory / "checkpoints" / str(step) / "meta" / "metadata").write_text("{}")


@pytest.mark.filterwarnings("ignore::plurax.errors.DamagedCheckpointWarning")
def test_after_all_were_damaged_only_restart_starts_from_scratch(tmp_path, whole):
    shutil.copytree(whole[1], tmp_path / "run")
    damage_all(tmp_path / "run")
    for options in ({"resume": True}, {"resume": True}, {}):
        with pytest.raises(
            px.errors.CheckpointError, match=r"(?s)can be restored, and.*restart=True"
        ):
            fit(output=tmp_path / "run", **options)
        assert log_of(tmp_path / "run") == log_of(whole[1])
    with pytest.raises(px.errors.CheckpointError, match=r"starts from scratch: pass one of them"):
        fit(output=tmp_path / "run", resume=True, restart=True)
    result = fit(output=tmp_path / "run", restart=True)
    assert models.same_bits(result.state.params, whole[0].state.params)
    assert steps_in(tmp_path / "run") == [4, 8, 12]
    assert log_of(tmp_path / "run") == log_of(tmp_path / "run" / "before.1") == log_of(whole[1])
    before = px.Checkpoints(tmp_path / "run" / "before.1" / "checkpoints")
    assert before.damaged() == ["10.damaged", "11.damaged", "12.damaged"]
    fit(output=tmp_path / "run", restart=True, epochs=1)
    assert steps_in(tmp_path / "run") == [4]
    assert steps_in(tmp_path / "run" / "before.2") == [4, 8, 12]


def test_a_plan_that_cannot_be_moves_nothing_aside(tmp_path, whole):
    shutil.copytree(whole[1], tmp_path / "run")
    with pytest.raises(px.errors.PlanError):
        fit(output=tmp_path / "run", restart=True, plan=px.Plan(data=99))
    assert steps_in(tmp_path / "run") == [10, 11, 12]


def test_a_folder_that_is_written_is_refused(tmp_path, whole):
    shutil.copytree(whole[1], tmp_path / "run")
    with px.Checkpoints(tmp_path / "run" / "checkpoints") as other:
        other.lock()
        before = listing(tmp_path / "run")
        for options in ({"resume": True}, {"restart": True}):
            with pytest.raises(
                px.errors.CheckpointError, match=rf"is written by process {os.getpid()}"
            ):
                fit(output=tmp_path / "run", epochs=4, **options)
        assert listing(tmp_path / "run") == before


def test_a_checkpoint_made_by_hand_is_not_gone_on_from(tmp_path, whole):
    with px.Checkpoints(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(whole[0].state, {"note": "mine"})
    with pytest.raises(
        px.errors.CheckpointError, match=r"was not written by plurax.fit: it does not record"
    ):
        fit(output=tmp_path, resume=True)


# --- Data that have changed -------------------------------------------------------------------


class Batches:
    """An iterable of a number of batches that does not tell how many."""

    def __init__(self, count):
        self.count = count

    def __iter__(self):
        return iter([models.cut(ROWS, 16)] * self.count)


def test_arrays_of_another_length_are_refused(tmp_path, whole):
    shutil.copytree(whole[1], tmp_path / "run")
    with pytest.raises(
        px.errors.CheckpointError, match=r"saved in .* has 50 examples .* now have 40"
    ):
        fit(models.cut(ROWS, 40), output=tmp_path / "run", resume=True, epochs=4)


@pytest.mark.parametrize("kind", [Batches, lambda count: list(Batches(count))])
def test_an_iterable_that_has_become_shorter_is_refused(tmp_path, kind):
    fit(kind(5), output=tmp_path, epochs=1, checkpoint_every=2)
    shutil.rmtree(tmp_path / "checkpoints" / "5")
    message = r"5 examples \(of an iterable: batches\).*now have 4|had taken 4 batches of epoch 1"
    with pytest.raises(px.errors.PluraxError, match=message):
        fit(kind(4), output=tmp_path, epochs=1, resume=True)
    assert int(fit(kind(5), output=tmp_path, epochs=2, resume=True).state.step) == 10


def test_a_grain_loader_whose_state_is_bytes(tmp_path):
    name = "rows"

    class Source:
        def __len__(self):
            return 50

        def __getitem__(self, index):
            return jax.tree.map(lambda leaf: leaf[index], ROWS)

        def __repr__(self):  # Grain compares it
            return name

    def loader():
        return grain.DataLoader(
            data_source=Source(),
            sampler=grain.samplers.IndexSampler(50, shuffle=True, seed=1, num_epochs=1),
            operations=[grain.transforms.Batch(16)],
        )

    positions = [after for _, after in StreamData(loader(), 16).batches(Position())]
    assert isinstance(positions[1].iterator, bytes)
    odd = Position(1, 2, bytes(range(256)))
    for position in (odd, *positions):
        assert Position.from_json(json.loads(json.dumps(position.to_json()))) == position
    fit(loader(), output=tmp_path / "cut", epochs=2, checkpoint_every=3)
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "8")
    assert steps_in(tmp_path / "cut") == [4, 6]
    resumed = fit(loader(), output=tmp_path / "cut", epochs=2, resume=True)
    straight = fit(loader(), output=tmp_path / "whole", epochs=2)
    assert models.same_bits(resumed.state.params, straight.state.params)
    assert log_of(tmp_path / "cut") == log_of(tmp_path / "whole")
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "8")
    name = "others"
    with pytest.raises(
        px.errors.BatchError, match=r"the data cannot be restored to their saved position: Data"
    ):
        fit(loader(), output=tmp_path / "cut", epochs=2, resume=True)


# --- Populations ------------------------------------------------------------------------------

POPULATION = {
    "plan": px.Plan(chunk=2, batch_dim="major"),
    "optimizer": lambda hyper: optax.sgd(hyper["rate"]),
}


def test_resuming_under_another_resampling_is_refused(tmp_path):
    def members(resample):
        return px.Members(2, {"rate": [0.1, 0.2]}, resample)

    fit(members=members(px.ensemble.bootstrap()), output=tmp_path, epochs=1, **POPULATION)
    with pytest.raises(
        px.errors.CheckpointError, match=r"of the checkpoint read their data by Bootstrap"
    ):
        fit(
            members=members(px.ensemble.subsample([50])), output=tmp_path, resume=True, **POPULATION
        )


# --- The command line -------------------------------------------------------------------------

EXPERIMENT = """
import optax, plurax as px
from tests import models

def experiment():
    return px.Experiment(models.mlp_task(), models.optimizer(), models.data(50), batch_size=16)
"""


def run(*arguments):
    with pytest.raises(SystemExit) as done:
        main(arguments)
    return done.value.code


def test_predict_leaves_a_live_run_alone_and_train_refuses_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.py").write_text(EXPERIMENT)
    np.savez("inputs.npz", **models.cut(ROWS, 4))
    assert run("train", "small.py") == 0
    with px.Checkpoints("runs/small/checkpoints") as live:
        live.lock()
        (tmp_path / "runs/small/checkpoints/9.orbax-checkpoint-tmp").mkdir()
        before = listing(tmp_path / "runs")
        assert run("predict", "small.py", "--inputs", "inputs.npz") == 0
        assert run("train", "small.py", "--resume") == 2
        assert "is written by process" in capsys.readouterr().err
        assert listing(tmp_path / "runs") == before
    assert run("train", "small.py", "--restart") == 0
    assert (tmp_path / "runs/small/before.1/metrics.jsonl").is_file()
