"""A run remembers itself: `run.toml`, and the commands that take a run's folder for FILE."""

import enum
import json
import shutil
import subprocess
import tomllib
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from tests import models
from tests.command import run

import plurax as px
from plurax.analysis.compiled_figures import CompiledFigures, figures_text
from plurax.cli import dispatch
from plurax.cli.file_or_run import tokens
from plurax.execute.recorder import record_step
from plurax.hlo.memory import memory
from plurax.loop.log_rows import read_rows
from plurax.run_folder.run_file import git_state, read_run_file, run_toml
from plurax.trace.collectives import every_collective
from plurax.trace.liveness import peak_bytes

EXPERIMENT = """
import optax, plurax as px
from tests import models

def experiment(rate: float = 1e-2, sizes: tuple[int, ...] = (3,), quick: bool = True):
    return px.Experiment(
        task=models.mlp_task(), optimizer=optax.adamw(rate), data=models.data(50), batch_size=16,
        epochs=2, plan=px.Plan(data=2),
    )
"""


class Watcher:
    """A callback."""

    def on_step(self, run, row):
        pass


TASK, OPTIMIZER = models.mlp_task(), optax.adamw(1e-2)  # programs are compiled once for both


def trained(output, **options):
    given = {"plan": px.Plan(data=2), "batch_size": 16, "progress": False, **options}
    px.fit(TASK, OPTIMIZER, models.data(32), output=output, **given)
    return tomllib.loads((output / "run.toml").read_text())


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.py").write_text(EXPERIMENT)
    return tmp_path


@pytest.fixture(scope="module")
def trained_once(tmp_path_factory):
    """The folder of an experiment and of a run of two epochs, with arguments of every kind."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "small.py").write_text(EXPERIMENT)
    arguments = (
        "--output", "ran", "--experiment.rate", "0.1", "--seed", "3", "--experiment.no-quick",
        "--experiment.sizes", "4", "5", "--plan.data", "4", "--plan.microbatches", "2",
        "--no-progress", "--rollback.after", "5",
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        with pytest.raises(SystemExit) as stopped:
            dispatch.main(["train", "small.py", *arguments])
    assert stopped.value.code == 0
    return folder


@pytest.fixture
def ran(workplace, trained_once):
    """A copy of that run, beside its experiment in this test's folder."""
    copy = shutil.copytree(trained_once / "ran", workplace / "ran")
    text = (copy / "run.toml").read_text()
    assert str(trained_once) in text
    (copy / "run.toml").write_text(text.replace(str(trained_once), str(workplace)))
    return copy


def test_fit_writes_how_it_was_called(tmp_path):
    found = trained(tmp_path / "run", seed=7, checkpoint_every=2, callbacks=[Watcher()])
    assert found["callbacks"] == ["Watcher"]
    options = found["options"]
    assert (options["seed"], options["checkpoint_every"], options["batch_size"]) == (7, 2, 16)
    assert options["resident"] == "None"  # as the command line writes it
    assert not {"output", "resume", "restart"} & options.keys()
    assert found["plan"]["data"] == 2
    assert found["versions"]["plurax"] == px.__version__
    assert found["versions"]["jax"] == jax.__version__
    assert found["devices"] == {"platform": "cpu", "kind": "cpu", "count": 2, "processes": 1}
    assert found["rollback"]["after"] == px.train.Rollback().after
    assert found["started"].endswith("+00:00")
    assert not {"command", "experiment", "members", "servers"} & found.keys()
    (start,) = map(json.loads, (tmp_path / "run" / "starts.jsonl").read_text().splitlines())
    assert start == {"step": 0, "time": start["time"]}


def test_it_is_there_before_the_first_step(tmp_path):
    class Data:
        def __iter__(self):
            first = models.data(16)
            yield first
            raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        px.fit(TASK, OPTIMIZER, Data(), output=tmp_path / "run")
    assert read_run_file(tmp_path / "run") is not None


def test_a_population_is_noted_with_its_hyperparameters(tmp_path):
    rates = [0.1, 0.2, 0.30000001192092896]
    px.fit(
        models.mlp_task(), lambda hyper: optax.sgd(hyper["rate"]), models.data(32), batch_size=16,
        members=px.Members([4, 5, 6], {"rate": rates}, px.ensemble.bootstrap()), progress=False,
        output=tmp_path,
    )  # fmt: skip
    found = tomllib.loads((tmp_path / "run.toml").read_text())["members"]
    assert (found["count"], found["seeds"], found["resample"]) == (3, [4, 5, 6], "Bootstrap()")
    assert found["hyper"]["rate"] == pytest.approx(rates)


def test_each_start_is_a_line_and_a_restart_begins_anew(tmp_path):
    trained(tmp_path)
    trained(tmp_path, epochs=2, resume=True)
    lines = [json.loads(line) for line in (tmp_path / "starts.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 2]
    trained(tmp_path, restart=True)
    assert len((tmp_path / "starts.jsonl").read_text().splitlines()) == 1
    assert (tmp_path / "before.1" / "run.toml").is_file()


def compiled_table(folder):
    return tomllib.loads((folder / "run.toml").read_text())["compiled"]


@pytest.mark.parametrize("resident", [True, False])
def test_the_compiled_program_is_noted_beside_its_plan(tmp_path, resident):
    """Nothing is compiled for it: the program has the one function that the run called."""
    task, plan = models.mlp_task(), px.Plan(data=4, zero=3, microbatches=2)
    given = {"plan": plan, "batch_size": 16, "progress": False, "resident": resident}
    result = px.fit(task, OPTIMIZER, models.data(32), output=tmp_path, **given)
    (compiled,) = result.program._compiled.so_far.values()
    held, found = memory(compiled), compiled_table(tmp_path)
    assert (found["function"], found["peak_bytes"]) == ("loop", held.peak)
    assert found["temporary_bytes"] == held.temporaries
    assert found["state_bytes"] + found["batch_bytes"] == held.arguments
    held = jax.tree.leaves((result.state.params, result.state.opt_state))
    shards = [leaf.addressable_shards[0].data.nbytes for leaf in held]
    assert 0 < found["state_bytes"] - sum(shards) < 100  # the counters and the key
    assert 0 < found["seconds"] < 1000
    trace = record_step(task, OPTIMIZER, plan, models.data(16))
    planned = peak_bytes(trace) + found["batch_bytes"]  # the data are given, not planned
    assert found["planned_peak_bytes"] == planned
    sent = every_collective(trace)
    assert found["planned_collectives"] == len([n for one in sent for n in range(one.trips)])
    counts = [one["count"] for one in found["sent"].values()]
    assert found["collectives"] == sum(counts) < found["planned_collectives"]
    assert found["differs"] == []  # fewer collectives, of the same bytes
    gathered = found["sent"]["all-gather over data"]
    assert gathered["bytes"] == gathered["planned_bytes"] > 0
    assert read_run_file(tmp_path).compiled == found


@pytest.mark.ci
def test_options_of_the_compiler_are_noted_with_what_it_made(tmp_path):
    options = {"xla_disable_hlo_passes": "fusion", "xla_embed_ir_in_executable": True}
    found = trained(tmp_path, compiler_options=options)
    assert found["compiled"]["options"] == options
    assert "compiler_options" not in found["options"]
    assert figures_text(found["compiled"]).startswith("compiled in ")
    trained(tmp_path, epochs=2, resume=True)  # without them
    assert "options" not in compiled_table(tmp_path)


@pytest.mark.ci
def test_figures_stay_until_a_run_that_goes_on_has_its_own(tmp_path):
    """They are no condition of a resume: another plan has others."""
    trained(tmp_path)
    first = compiled_table(tmp_path)
    trained(tmp_path, resume=True)  # which has no step left
    assert compiled_table(tmp_path) == first
    assert (tmp_path / "run.toml").read_text().count("[compiled]") == 1
    trained(tmp_path, epochs=2, resume=True, plan=px.Plan(data=4))
    assert compiled_table(tmp_path)["peak_bytes"] != first["peak_bytes"]
    assert (tmp_path / "run.toml").read_text().count("[compiled]") == 1
    trained(tmp_path, restart=True, max_steps=1)  # ended within its first epoch
    assert compiled_table(tmp_path) == first


def test_what_differs_from_the_plan_is_named():
    figures = CompiledFigures("step", 1.0, 8, 8, 8, 24, 24, {
        "all-reduce over data": {"count": 1, "bytes": 8, "planned_count": 2, "planned_bytes": 8},
        "all-gather over data": {"count": 3, "bytes": 9, "planned_count": 3, "planned_bytes": 8},
    })  # fmt: skip
    found = figures.table()
    assert (found["differs"], found["collectives"]) == (["all-gather over data"], 4)
    assert found["planned_collectives"] == 5
    text = figures_text(found)
    assert text.startswith("compiled in 1 s: 24 B on a device, planned 24 B; 4 collectives in a ")
    assert text.endswith(" step, planned 5")
    assert "; 1 collective in a step" in figures_text({**found, "collectives": 1})
    assert figures_text({**found, "seconds": "long"}) == figures_text({}) == ""


def test_members_have_no_planned_figures(tmp_path):
    trained(tmp_path, members=px.Members(3), plan=px.Plan())
    found = compiled_table(tmp_path)
    assert not [name for name in found if name.startswith("planned")]
    assert found["collectives"] == 0 < found["peak_bytes"]


def test_a_run_goes_on_where_its_figures_cannot_be_written(tmp_path, monkeypatch):
    def full(folder, figures):
        raise OSError("no space left")

    monkeypatch.setattr("plurax.train.measurements.note_compiled", full)
    with pytest.warns(px.errors.SaveFailedWarning, match="figures of the compiled program are not"):
        found = trained(tmp_path, epochs=2)
    assert "compiled" not in found
    assert [row["kind"] for row in read_rows(tmp_path / "metrics.jsonl")].count("epoch") == 2


def test_the_state_of_git(tmp_path, monkeypatch):
    def git(*arguments):
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(
            ["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True
        )

    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert git_state(tmp_path) == {}
    git("init")
    assert git_state(tmp_path) == {}  # no commit yet
    (tmp_path / "a.py").write_text("1")
    git("add", "a.py")
    git("commit", "-m", "a")
    clean = git_state(tmp_path)
    assert len(clean["commit"]) == 40
    assert clean["dirty"] is False
    (tmp_path / "new.txt").write_text("a file that git does not know")
    assert git_state(tmp_path) == clean
    (tmp_path / "a.py").write_text("2")
    assert git_state(tmp_path) == {**clean, "dirty": True}
    monkeypatch.setenv("PATH", "")
    assert git_state(tmp_path) == {}


class Colour(enum.Enum):
    RED = 1


def test_every_value_is_read_back(tmp_path):
    """Texts that TOML escapes, numbers, lists; what it has not as text; a plan with tables."""
    plan = px.Plan(tensor=2, shardings={"*/w x": (None, "tensor")})
    batch = models.data(8)
    program = px.compile(models.mlp_task(), optax.sgd(0.1), px.Plan(data=2), batch)
    program = type("Planned", (), {"plan": plan, "mesh": program.mesh, "members": None})()
    own = {"text": 'a "b"\n\x7f', "path": Path("a/b"), "colour": Colour.RED, "none": None,
           "tiny": 1e-30, "list": (1, 2), "table": {"in side": True}, "n": np.int64(3)}  # fmt: skip
    command = {"file": "a b.py", "experiment": own, "members": {"seeds": None, "folds": 5}}
    given = {"epochs": np.int32(2), "data": batch, "command": command}
    text = run_toml(given, program)
    (tmp_path / "run.toml").write_text(text, encoding="utf-8")
    found = read_run_file(tmp_path)
    assert found.plan == plan
    assert found.file == Path("a b.py")
    assert found.options == {"epochs": 2, "members": {"folds": 5}}
    plain = {"path": "a/b", "colour": "RED", "none": "None", "list": [1, 2]}
    assert found.experiment == {**own, **plain}


def test_arguments_that_give_a_value_again():
    assert tokens("--a", {"b_c": {"d": 1}, "e": [1.5, "x"], "f": "None"}) == [
        "--a.b-c.d=1", "--a.e", "1.5", "x", "--a.f=None"
    ]  # fmt: skip


@pytest.mark.ci
def test_training_goes_on_in_a_folder_alone(ran, capsys):
    """With all options and arguments of before, and what the command line says besides."""
    before = read_run_file(ran)
    assert before.experiment == {"rate": 0.1, "sizes": [4, 5], "quick": False}
    assert (before.plan, before.options["rollback"]["after"]) == (
        px.Plan(data=4, microbatches=2), 5
    )  # fmt: skip
    Path("small.py").write_text(EXPERIMENT.replace("epochs=2", "epochs=9").replace("1e-2", "9.0"))
    code, out, err = run(capsys, "train", "ran", "--epochs", "3")
    assert code == 0, err
    assert "Plan(data=4, microbatches=2): 4 devices" in out
    after = read_run_file(ran)
    assert after.experiment == before.experiment
    assert after.options == {**before.options, "epochs": 3}
    rows = [row["step"] for row in read_rows(ran / "metrics.jsonl") if row["kind"] == "step"]
    assert rows == list(range(1, 13))
    # Another output is another run, which starts from scratch.
    code, _, err = run(capsys, "train", "ran", "--output", "other", "--plan.data", "2")
    assert code == 0, err
    assert read_run_file("other").plan == px.Plan(data=2, microbatches=2)
    assert json.loads(Path("other/starts.jsonl").read_text())["step"] == 0


@pytest.mark.ci
def test_other_commands_read_a_folder(ran, capsys):
    np.savez("inputs.npz", x=models.data(5)["x"])
    code, out, err = run(capsys, "predict", "ran", "--inputs", "inputs.npz")
    assert code == 0, err
    assert "float32[5,3]" in out
    code, out, _ = run(capsys, "verify", "ran", "--steps", "1")
    assert code == 0
    assert "Plan(data=4, microbatches=2)" in out
    code, out, _ = run(capsys, "plan", "ran", "--plan.microbatches", "4")
    assert code == 0
    assert "Plan(data=4, microbatches=4)" in out
    code, out, _ = run(capsys, "train", "ran", "--help")
    assert "(default: 3)" in out  # its seed
    assert "(default: ran)" in out


@pytest.mark.ci
def test_a_plan_is_shown_with_what_its_run_compiled(ran, capsys):
    text = figures_text(compiled_table(ran))
    code, out, err = run(capsys, "plan", "ran")
    assert code == 0, err
    assert f"when ran was trained: {text}" in out.splitlines()
    path = ran / "run.toml"
    path.write_text(path.read_text().partition("\n[compiled]")[0])  # of an earlier version
    code, out, err = run(capsys, "plan", "ran")
    assert code == 0, err
    assert "when ran was trained" not in out


def test_a_run_of_python_is_read_with_a_file(workplace, capsys):
    """The file gives what `run.toml` has not: the task, members, servers."""
    trained(workplace / "by_hand", seed=5)
    Path("small.py").write_text(EXPERIMENT.replace("data(50)", "data(32)"))
    np.savez("inputs.npz", x=models.data(5)["x"])
    code, _, err = run(capsys, "predict", "by_hand", "small.py", "--inputs", "inputs.npz")
    assert code == 0, err
    code, _, err = run(capsys, "train", "by_hand", "small.py", "--epochs", "2")
    assert code == 0, err
    found = read_run_file("by_hand")
    assert (found.options["seed"], found.file) == (5, workplace / "small.py")


@pytest.mark.ci
@pytest.mark.parametrize("members", ["None", "px.Members(2)"])
def test_the_best_state_predicts(members, workplace, capsys):
    """The largest loss is that of the first epoch, so that the best state is not the newest."""
    given = f'members={members}, callbacks=[px.callbacks.KeepBest("loss", mode="max")]'
    Path("small.py").write_text(EXPERIMENT.replace("epochs=2", f"epochs=3, {given}"))
    np.savez("inputs.npz", x=models.data(5)["x"])
    predict = ("predict", "--inputs", "inputs.npz")
    code, _, err = run(capsys, "train", "small.py", "--output", "one", "--epochs", "1")
    assert code == 0, err
    code, _, err = run(capsys, "train", "small.py", "--output", "three")
    assert code == 0, err
    for folder, *options in (("one",), ("three", "--best"), ("three",)):
        where = ("--predictions", f"{folder}{len(options)}.npy")
        code, _, err = run(capsys, predict[0], folder, *predict[1:], *where, *options)
        assert code == 0, err
    first, best, newest = (np.load(f"{name}.npy") for name in ("one0", "three1", "three0"))
    np.testing.assert_array_equal(best, first)
    assert not np.array_equal(newest, first)


def test_a_run_that_kept_no_best_state_says_so(ran, capsys):
    np.savez("inputs.npz", x=models.data(5)["x"])
    code, _, err = run(capsys, "predict", "ran", "--inputs", "inputs.npz", "--best")
    assert code == 2
    assert "ran holds no best state, which --best predicts with" in err


def test_a_run_is_predicted_with_on_fewer_devices(ran, capsys):
    """`data` gives way; training goes on under the same plan only."""
    path = ran / "run.toml"
    path.write_text(path.read_text().replace("data = 4", "data = 16"))
    np.savez("inputs.npz", x=models.data(5)["x"])
    code, _, err = run(capsys, "predict", "ran", "--inputs", "inputs.npz")
    assert code == 0, err
    code, _, err = run(capsys, "train", "ran", "--epochs", "3")
    assert (code, "needs 16 devices" in err) == (2, True)


def test_mistakes_about_folders(ran, capsys, tmp_path):
    def said(*arguments):
        code, _, err = run(capsys, *arguments)
        assert code == 2
        return err

    Path("empty").mkdir()
    assert "empty is a folder without a run.toml" in said("train", "empty")
    Path("small.py").rename("moved.py")
    assert "which is not there any more. Say where it is" in said("verify", "ran")
    assert run(capsys, "verify", "ran", "moved.py", "--steps", "1")[0] == 0
    text = (ran / "run.toml").read_text()
    (ran / "run.toml").write_text(text.replace("[plan]\n", "[plan]\ndat = 4\n"))
    assert "'dat' is not a field of a plan" in said("verify", "ran")
    (ran / "run.toml").write_text(text.replace("data = 4", "data = 0"))
    assert "run.toml is not a plan that can run" in said("verify", "ran")
    (ran / "run.toml").write_text("1 / 0")
    assert "run.toml cannot be read: " in said("verify", "ran")
    trained(tmp_path / "by_hand")
    assert "does not say which FILE it was trained from" in said("train", "by_hand")


# --- What a checkpoint was made with ----------------------------------------------------------


def changed(folder, old, new):
    path = folder / "run.toml"
    text = path.read_text()
    assert text.count(old) == 1, text
    path.write_text(text.replace(old, new))


@pytest.mark.ci
def test_arguments_that_changed_in_the_file_are_not_trained_on(ran, capsys):
    changed(ran, "rate = 0.1\n", "rate = 0.91\n")
    before = sorted(path.name for path in (ran / "checkpoints").iterdir())
    code, _, err = run(capsys, "train", "ran", "--epochs", "3")
    assert code == 2
    assert "experiment.rate: 0.1 in the run, 0.91 now" in err
    assert "--experiment.rate=0.1" in err
    assert "--restart" in err
    assert sorted(path.name for path in (ran / "checkpoints").iterdir()) == before
    # Whoever names it means it, the old value or the new.
    code, _, err = run(capsys, "train", "ran", "--epochs", "3", "--experiment.rate=0.1")
    assert code == 0, err
    code, _, err = run(capsys, "train", "ran", "--epochs", "4", "--experiment.rate", "0.91")
    assert code == 0, err
    code, _, err = run(capsys, "train", "ran", "--epochs", "5")
    assert code == 0, err
    assert read_run_file(ran).experiment["rate"] == 0.91


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("quick = false", "quick = true", "--experiment.no-quick"),
        ("sizes = [4, 5]", "sizes = [4, 6]", "--experiment.sizes 4 5"),
    ],
)
def test_arguments_of_every_kind_are_compared(ran, capsys, old, new, named):
    changed(ran, old, new)
    code, _, err = run(capsys, "train", "ran", "--epochs", "3")
    assert code == 2
    assert f"experiment.{old.split()[0]}: " in err
    assert f"To go on as before, write {named};" in err
    code, _, err = run(capsys, "train", "ran", "--epochs", "3", *named.split())
    assert code == 0, err


def test_a_default_that_changed_in_the_experiment_file_is_not_trained_on(workplace, capsys):
    train = ("train", "small.py", "--output", "ran", "--no-progress")
    assert run(capsys, *train)[0] == 0
    path = workplace / "small.py"
    path.write_text(EXPERIMENT.replace("rate: float = 1e-2", "rate: float = 1e-3, more: int = 1"))
    code, _, err = run(capsys, *train, "--resume", "--epochs", "3")
    assert code == 2
    assert "experiment.rate: 0.01 in the run, 0.001 now" in err
    assert "experiment.more" not in err  # there was none
    code, _, err = run(capsys, "train", "ran", "--epochs", "3")  # run.toml has that of the run
    assert code == 0, err


def test_what_may_change_may_change_in_the_file(ran, capsys):
    changed(ran, "epochs = 2", "epochs = 3")
    changed(ran, "microbatches = 2", "microbatches = 4")
    changed(ran, "data = 4", "data = 2")
    code, _, err = run(capsys, "train", "ran", "--checkpoint-every", "2")
    assert code == 0, err


def without(table, text):
    return "\n[".join(one for one in text.split("\n[") if not one.startswith(table))


BROKEN = {
    "an unknown table": (
        lambda text: text + "[gut]\nx = 1\n",
        "has [gut], which plurax does not know. Did you mean '[git]'?",
    ),
    "a command": (
        lambda text: without("command", text).replace("\nstarted", "\ncommand = 3\nstarted"),
        "has command = 3, and it is a table there",
    ),
    "a plan": (
        lambda text: without("plan", text).replace("\nstarted", "\nplan = 1\nstarted"),
        "has plan = 1, and it is a table there",
    ),
    "an unknown option": (
        lambda text: text.replace("epochs = 2", "epochz = 2"),
        "has epochz, which plurax does not know. Did you mean 'epochs'?",
    ),
    "an unknown part of an option": (
        lambda text: text.replace("[command.members]", "[command.members]\nsead = 2"),
        "has members.sead, which plurax does not know. Did you mean 'members.seeds'?",
    ),
    "an option that is a table": (
        lambda text: without("command.members", text).replace(
            "[command]", "[command]\nmembers = 3"
        ),
        "has members = 3, and it is a table there",
    ),
    "a file that is none": (
        lambda text: text.replace("file = ", "file = 3 #"),
        "has file = 3, and it is a text there",
    ),
    "an unknown argument": (
        lambda text: text.replace("rate = 0.1", "rote = 0.1"),
        "--experiment.rote",
    ),
    "an unknown axis": (
        lambda text: text.replace("microbatches = 2", "mikrobatches = 2"),
        "Did you mean 'microbatches'?",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_not_as_it_was_written_is_refused(ran, capsys, name):
    change, said = BROKEN[name]
    path = ran / "run.toml"
    text = path.read_text()
    assert change(text) != text
    path.write_text(change(text))
    code, _, err = run(capsys, "train", "ran", "--epochs", "3")
    assert code == 2
    assert said in " ".join(err.replace("│", " ").split())
    assert "Traceback" not in err
