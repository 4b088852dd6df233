"""The command line as a user meets it: help, training, plans, predictions, mistakes."""

import dataclasses
import inspect
import re
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from tests import models
from tests.command import run
from tests.pictures import panels

import plurax as px
from plurax.cli.commands import COMMANDS
from plurax.cli.options import NO_OPTIONS, argument_texts
from plurax.loop.log_rows import read_rows
from plurax.train.fit import fit

EXPERIMENT = """
import optax, plurax as px
from tests import models

def experiment(rate: float = 1e-2, weights: bool = False):
    return px.Experiment(
        task=models.mlp_task(weights=weights),
        optimizer=optax.adamw(rate),
        data=models.data(50, weights=weights),
        evaluation=models.data(20, seed=1, weights=weights),
        batch_size=16,
        epochs=2,
    )
"""


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.py").write_text(EXPERIMENT)
    return tmp_path


def test_help_names_every_command(capsys):
    for arguments in ([], ["--help"], ["-h"]):
        code, out, _ = run(capsys, *arguments)
        assert code == 0
        for command in ("train", "predict", "plan", "estimate"):
            assert f"plurax {command} FILE" in out
        assert "plurax machine" in out
        assert "plurax replay RUN" in out
    assert run(capsys, "--version")[1] == f"plurax {px.__version__}\n"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (MemoryError("no room for 8 GB"), "no room for 8 GB"),
        (MemoryError(), "MemoryError()"),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 8 GB"), "RESOURCE_EXHAUSTED: 8 GB"),
    ],
)
def test_out_of_memory_has_a_code_of_its_own(workplace, capsys, monkeypatch, error, reason):
    def full(**_):
        raise error

    monkeypatch.setattr("plurax.cli.train_command.fit", full)
    code, _, said = run(capsys, "train", "small.py")
    assert code == 79
    assert said.startswith(f"error: out of memory: {reason}\nA plan with more zero, or over")


def test_ctrl_c_while_jax_is_imported_shows_no_traceback():
    code = """
import importlib, os, signal
import plurax.cli
importlib.import_module = lambda name: os.kill(os.getpid(), signal.SIGINT)
signal.signal(signal.SIGINT, signal.default_int_handler)
plurax.cli.main(["train", "small.py"])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


def test_help_of_a_file_shows_its_defaults(workplace, capsys):
    code, out, _ = run(capsys, "train", "small.py", "--help")
    assert code == 0
    for option in ("--epochs INT", "--plan.data INT", "--plan.microbatches INT", "--devices",
                   "--experiment.rate FLOAT", "--resume", "--output PATH"):  # fmt: skip
        assert option in out
    assert "(default: 2)" in out
    assert "(default: 0.01)" in out


@pytest.mark.parametrize("command", ["train", "predict", "plan", "estimate", "verify"])
def test_help_fits_on_a_screen(workplace, capsys, monkeypatch, command):
    """With and without FILE, whose arguments it shows; `--help-all` has the rest."""
    monkeypatch.setenv("COLUMNS", "80")
    _, every, _ = run(capsys, command, "small.py", "--help-all")
    code, out, _ = run(capsys, command, "small.py", "--help")
    assert (code, len(out.splitlines()) < 42 < len(every.splitlines())) == (0, True)
    assert "--experiment.rate FLOAT" in out
    code, out, _ = run(capsys, command, "--help")
    assert (code, len(out.splitlines()) < 42) == (0, True)
    assert "--help-all" in out
    assert "--plan.tensor" not in out
    assert "--plan.tensor" in every


def test_help_of_differences_has_no_plan(workplace, capsys):
    Path("a.toml").write_text(px.Plan().to_toml())
    code, out, _ = run(capsys, "plan", "a.toml", "a.toml", "--diff", "small.py", "--help")
    assert (code, "--machine" in out, "--plan.data" in out) == (0, True, False)


def test_every_argument_of_fit_is_an_option_in_its_own_words(workplace, capsys):
    """But for values of Python. With the first sentence that the docstring has of it."""
    _, out, _ = run(capsys, "train", "small.py", "--help-all")
    said = " ".join(out.replace("│", " ").split())
    names = set(inspect.signature(fit).parameters) - NO_OPTIONS
    assert len(names) > 10
    for name in names:
        text = argument_texts(fit)[name]
        assert f"--{name.replace('_', '-')}" in said
        assert text in said
    assert set(inspect.signature(fit).parameters) == set(vars(px.Experiment(1, 2, 3)))


def test_an_experiment_takes_the_arguments_of_fit():
    made = px.Experiment("task", "optimizer", "data", epochs=3)
    assert (made.task, made.data, made.epochs, made.ragged) == ("task", "data", 3, "pad")
    with pytest.raises(
        px.errors.ExperimentError, match=r"argument 'epoch'\. Did you mean 'epochs'\?"
    ):
        px.Experiment("task", "optimizer", "data", epoch=3)


def test_a_fast_run_writes_nothing(workplace, capsys):
    code, out, _ = run(capsys, "train", "small.py", "--fast-dev-run", "2")
    assert code == 0
    assert out.endswith("max_steps=2\na fast development run: nothing was written\n")
    assert not (workplace / "runs").exists()


@pytest.mark.ci
def test_train_writes_what_it_says(workplace, capsys, drawn):
    code, out, _ = run(
        capsys, "train", "small.py", "--plan.data", "4", "--epochs", "3", "--experiment.rate", "0.1"
    )
    assert code == 0
    assert "Plan(data=4): 4 devices" in out
    assert "epoch 3/3  loss" in out
    assert "eval accuracy" in out
    directory = workplace / "runs" / "small"
    assert px.Plan.load(directory / "plan.toml") == px.Plan(data=4)
    loss, accuracy = panels(drawn["curves.png"])
    assert (loss.x, loss.y, accuracy.x, accuracy.y) == ("step", "loss", "step", "accuracy")
    ends = [("training, mean of the epoch", 3), ("evaluation", 3)]
    assert loss.lines == accuracy.lines == [("", 12), *ends]
    code, _, err = run(capsys, "train", "small.py")
    assert code == 2
    assert "already holds a run, saved at step 12" in err
    code, _, err = run(capsys, "train", "small.py", "--epochs", "4", "--resume")
    assert (code, "rate" in err) == (2, True)  # that of the run is 0.1, and the file's is another
    again = ("--epochs", "4", "--resume", "--experiment.rate", "0.1")
    code, out, _ = run(capsys, "train", "small.py", *again)
    assert code == 0
    assert "epoch 4/4" in out
    assert "epoch 3/4" not in out
    assert "nothing is left" not in out
    code, out, _ = run(capsys, "train", "small.py", *again)
    assert (code, "nothing is left to train: the run is at step 16 of 16\n" in out) == (0, True)


@pytest.mark.ci
def test_a_run_with_servers_is_drawn(workplace, capsys, drawn):
    code, out, _ = run(
        capsys, "train", "small.py", "--epochs", "1", "--servers.workers", "2",
        "--servers.mode", "async", "--servers.transport", "threads",
    )  # fmt: skip
    assert code == 0
    assert (
        "curves.png, metrics.jsonl, tensorboard/, checkpoints/, plan.toml, run.toml, servers" in out
    )
    staleness, updates, _ = panels(drawn["servers.png"])
    assert staleness.shapes >= 1
    assert updates.lines == [("", 4)]
    (workers,) = panels(drawn["workers.png"])
    assert [text.get_text() for text in drawn["workers.png"].axes[0].get_yticklabels()] == [
        "worker 0", "worker 1", "server 0"
    ]  # fmt: skip
    # From the record: the times of pulls and pushes.
    assert workers.areas >= 2
    assert drawn["workers.png"].axes[0].get_xlim()[1] > 0


@pytest.mark.ci
def test_a_run_with_servers_is_repeated_from_its_folder(workplace, capsys):
    """The file and its arguments are those with which the run was started."""
    servers = ["--servers.workers", "2", "--servers.mode", "async", "--servers.transport"]
    train = ["train", "small.py", "--experiment.rate", "0.1", "--no-progress", *servers, "threads"]
    assert run(capsys, *train)[0] == 0
    code, out, _ = run(capsys, "replay", "runs/small")
    assert code == 0
    steps = [line for line in out.splitlines() if line.startswith("step ")]
    assert [line.partition(":")[0] for line in steps] == ["step 4", "step 8"]
    assert all(line.endswith(", equal to its checkpoint, bit for bit") for line in steps)
    command = workplace / "runs" / "small" / "run.toml"
    command.write_text(command.read_text().replace("rate = 0.1\n", "rate = 0.2\n"))
    code, out, _ = run(capsys, "replay", "runs/small")
    assert code == 1
    assert re.search("step 4: .*, NOT its checkpoint: .*params/hidden", out)
    command.unlink()
    code, _, err = run(capsys, "replay", "runs/small")
    assert code == 2
    assert "does not say which FILE it was trained from" in err
    code, out, _ = run(capsys, "replay", "runs/small", "small.py")  # with the file's own rate
    assert code == 1


UNREADABLE = """
import optax, plurax as px
from pathlib import Path
from tests import models

class Batches:
    def __iter__(self):
        for index in range(6):
            if index == 3 and not Path("readable").exists():
                raise OSError("the disk is gone")
            yield models.data(8, seed=index)

def experiment():
    return px.Experiment(task=models.mlp_task(), optimizer=optax.adamw(1e-2), data=Batches())
"""


@pytest.mark.ci
def test_a_run_that_failed_is_repeated_from_its_folder(workplace, capsys):
    """How it was started is written before the first step."""
    Path("small.py").write_text(UNREADABLE)
    servers = ["--servers.workers", "2", "--servers.mode", "async", "--servers.transport"]
    code, _, err = run(capsys, "train", "small.py", "--checkpoint-every", "2", *servers, "threads")
    assert (code, "the disk is gone" in err) == (2, True)
    Path("readable").touch()
    code, out, _ = run(capsys, "replay", "runs/small")
    assert code == 0
    assert re.fullmatch("step 2: .*, equal to its checkpoint, bit for bit\n", out)


def test_without_matplotlib(workplace, capsys, monkeypatch):
    """Training goes on and says what is missing; a picture that is asked for is refused at once."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    missing = "Drawing needs matplotlib, which is not installed. Install it with `pip install"
    code, out, _ = run(capsys, "train", "small.py", "--epochs", "1")
    assert code == 0
    assert f"no curves.png: {missing} 'plurax[pictures]'`." in out
    assert "wrote runs/small: metrics.jsonl, tensorboard/, checkpoints/, plan.toml, run.toml" in out
    code, _, err = run(capsys, "plan", "small.py", "--save", "plan.png")
    assert code == 2
    assert err.startswith(f"error: {missing}")


def test_predict_reads_and_writes_arrays(workplace, capsys):
    run(capsys, "train", "small.py", "--epochs", "1")
    inputs = models.data(33)["x"]
    np.savez("inputs.npz", x=inputs)
    code, out, _ = run(capsys, "predict", "small.py", "--inputs", "inputs.npz", "--plan.data", "2")
    assert code == 0
    assert "float32[33,3]" in out
    outputs = np.load("predictions.npy")
    from plurax.checkpoint import Checkpoints

    program = px.compile(
        models.mlp_task(), __import__("optax").adamw(1e-2), px.Plan(), models.data(16)
    )
    with Checkpoints(workplace / "runs" / "small" / "checkpoints") as checkpoints:
        state, _ = checkpoints.restore(program.state_shapes)
    np.testing.assert_allclose(outputs, models.logits(state.params, inputs), atol=1e-5)


def test_predictions_of_any_name_and_dtype(workplace, capsys):
    """A tree that has a `file`, bfloat16, which NumPy does not read back, and a name with a dot."""
    made = "dataclasses.replace(models.mlp_task(weights=weights), predict=lambda params, inputs: "
    made += "{'file': models.logits(params, inputs['x']).astype('bfloat16')})"
    text = EXPERIMENT.replace("models.mlp_task(weights=weights)", made)
    Path("tree.py").write_text(f"import dataclasses\n{text}")
    run(capsys, "train", "tree.py", "--epochs", "1")
    np.savez("few.npz", x=models.data(3)["x"])
    code, out, err = run(
        capsys, "predict", "tree.py", "--inputs", "few.npz", "--predictions", "v1.2"
    )
    assert code == 0, err
    assert "wrote v1.2.npz:" in out
    (file,) = np.load("v1.2.npz").values()
    assert (file.shape, file.dtype) == ((3, 3), np.float32)


def test_plan_shows_mesh_memory_and_communication(workplace, capsys):
    code, out, _ = run(capsys, "plan", "small.py", "--plan.data", "8", "--plan.microbatches", "2")
    assert code == 0
    assert "mesh: data=8" in out
    assert "parameters: 144 (576 B)" in out
    assert "all-reduce" in out
    assert "once a step" in out
    assert "peak, predicted before compiling" in out
    code, out, _ = run(capsys, "plan", "small.py")
    assert "communication: none" in out


def test_a_plan_file(workplace, capsys):
    px.Plan(data=3, microbatches=2).save("three.toml")
    code, out, _ = run(capsys, "plan", "small.py", "--plan-file", "three.toml")
    assert code == 0
    assert "Plan(data=3, microbatches=2)" in out


@pytest.mark.ci
def test_microbatches_of_replicas_are_options_and_in_files(workplace, capsys):
    px.Plan(data=2, microbatches=(3, 1)).save("uneven.toml")
    options = (
        ["--plan.data", "2", "--plan.microbatches", "3", "1"],
        ["--plan-file", "uneven.toml"],
    )
    for given in options:
        code, out, _ = run(capsys, "plan", "small.py", *given)
        assert code == 0
        assert "Plan(data=2, microbatches=(3, 1))" in out
    code, _, said = run(capsys, "plan", "small.py", "--plan.microbatches", "3", "1")
    assert code != 0
    assert "has 2 numbers of microbatches" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tran", "small.py"], "'tran' is not a command. Did you mean 'train'? The commands are"),
        (["nwe"], "'nwe' is not a command. Did you mean 'new'?"),
        (["examples", "spirls"], "'spirls' is not an example. Did you mean 'spirals'?"),
        (["train", "small.py", "--epohcs", "3"], "Unrecognized options: --epohcs, 3 Perhaps you"),
        (["train", "small.py", "--epochs", "x"], "error: --epochs: invalid literal for int()"),
        (["train", "small.py", "--ragged", "x"], "invalid choice 'x' for argument '--ragged'"),
        (["train", "small.py", "--experiment.x", "3"], "Unrecognized options: --experiment.x"),
        (["new"], "Missing from plurax new:"),
        (["watch", "--x"], "Missing value for argument 'run'"),
        (["doctor", "--x"], "Unrecognized options: --x"),
        (["report"], "name the folders of the runs: plurax report RUN ..."),
        (["train"], "name the experiment file: plurax train FILE"),
        (["train", "missing.py"], "missing.py: no such file"),
        (["train", "empty.py"], "empty.py does not define experiment()"),
        (["train", "broken.py"], "broken.py could not be loaded: File"),
        (["train", "wrong.py"], "experiment() returned int; it must return plurax.Experiment"),
        (["train", "small.py", "--plan.data", "9"], "needs 9 devices (data=9) and 8 are available"),
        (["plan", "small.py", "--save", "a.toml"], "a.toml is no picture: write --save plan.png"),
        (["train", "small.py", "--epochs", "0"], "epochs=0: give the number of passes"),
        (["train", "small.py", "--devices", "many"], "--devices many: give a number"),
        (["train", "small.py", "--devices", "3"], "virtual_devices(3) came too late"),
        (["plan", "small.py", "--plan-file", "none.toml"], "none.toml is not a plan in TOML"),
        (
            ["predict", "small.py", "--inputs", "x.npy"],
            "holds no checkpoint; train with this",
        ),
    ],
)
def test_mistakes_are_named(workplace, capsys, arguments, message):
    Path("empty.py").write_text("")
    Path("broken.py").write_text("1 / 0")
    Path("wrong.py").write_text("def experiment(): return 3")
    code, _, err = run(capsys, *arguments)
    assert code == 2
    assert err.startswith("error: ")
    assert message in " ".join(err.split())
    assert "Traceback" not in err
    assert "╭" not in err
    assert "Error parsing" not in err


def test_inputs_that_are_none(workplace, capsys):
    run(capsys, "train", "small.py", "--epochs", "1")
    code, _, err = run(capsys, "predict", "small.py", "--inputs", "x.npy")
    assert (code, "no such file; --inputs wants" in err) == (2, True)
    Path("x.npy").write_bytes(b"hello")
    code, _, err = run(capsys, "predict", "small.py", "--inputs", "x.npy")
    assert (code, "is not a .npy or .npz file" in err) == (2, True)


def test_a_plan_that_can_never_run(workplace, capsys):
    code, _, err = run(capsys, "train", "small.py", "--plan.data", "0")
    assert code == 2
    assert "Plan(data=0): data must be a whole number" in err


def test_an_option_that_does_not_exist(workplace, capsys):
    code, _, err = run(capsys, "train", "small.py", "--epoch", "3")
    assert code == 2
    assert "--epochs INT" in err


@pytest.mark.ci
def test_devices_from_the_shell(workplace):
    """The whole way, in a process of its own: the command, virtual devices, a plan."""
    done = subprocess.run(
        [sys.executable, "-m", "plurax.cli", "plan", "small.py", "--devices", "6",
         "--plan.data", "6"],
        capture_output=True, text=True, env={**__import__("os").environ,
        "PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "cpu:5" in done.stdout


POPULATION = """
import optax, plurax as px
from tests import models

def experiment():
    return px.Experiment(
        task=models.mlp_task(),
        optimizer=lambda hyper: optax.adamw(hyper["rate"]),
        data=models.data(50),
        evaluation=models.data(20, seed=1),
        batch_size=16,
        epochs=2,
        members=px.Members(3, {"rate": px.ensemble.log_uniform(1e-3, 1e-1)}),
        plan=px.Plan(chunk=2, batch_dim="major"),
    )

def report(made, result, directory):
    (directory / "report.txt").write_text(str(result.program.members.count))
    yield directory / "report.txt"
"""


@pytest.fixture
def population(workplace):
    (workplace / "many.py").write_text(POPULATION)
    return workplace


@pytest.mark.ci
def test_train_members(population, capsys, drawn):
    code, out, _ = run(
        capsys, "train", "many.py", "--members.seeds", "5", "--plan.member", "2",
        "--members.resample", "bootstrap", "--report-every", "2",
    )  # fmt: skip
    assert code == 0
    assert "5 members: bootstrap, rate of their own" in out
    assert "member=2: members are split over 2 groups of devices" in out
    assert "chunk=2: a device computes 2 members at a time" in out
    assert "epoch 2/2  loss" in out
    assert "epoch 1/2" not in out
    assert " to " in out
    assert "report.txt" in out
    directory = population / "runs" / "many"
    assert (directory / "report.txt").read_text() == "5"
    curves, accuracy = panels(drawn["curves.png"])
    assert (curves.y, accuracy.y) == ("loss", "accuracy")
    lines = [
        f"{name}: median, 50 %, 90 %" for name in ("training, mean of the epoch", "evaluation")
    ]
    best = ("best member", 1)
    assert curves.lines == accuracy.lines == [(lines[0], 1), best, (lines[1], 1), best]
    assert curves.areas == accuracy.areas == 4  # for each the bands of half and of nine tenths
    np.savez("inputs.npz", x=models.data(7)["x"])
    code, out, _ = run(capsys, "predict", "many.py", "--members.seeds", "5", "--inputs",
                       "inputs.npz", "--members.resample", "bootstrap")  # fmt: skip
    assert code == 0
    assert "float32[5,7,3]" in out


@pytest.mark.ci
def test_members_of_one_network_and_its_mistakes(population, capsys):
    code, out, _ = run(capsys, "train", "small.py", "--members.seeds", "2", "--plan.chunk", "1",
                       "--plan.batch-dim", "major", "--epochs", "1", "--members.resample", "kfold",
                       "--members.folds", "2")  # fmt: skip
    assert code == 0
    assert "2 members: kfold" in out
    code, out, _ = run(capsys, "plan", "many.py", "--plan.member", "2")
    assert code == 0
    assert "communication: none" in out
    code, _, err = run(capsys, "train", "small.py", "--plan.member", "2")
    assert code == 2
    assert "splits the members of a population, and this is one network" in err
    code, _, err = run(capsys, "train", "many.py", "--plan.member", "200")
    assert code == 2
    assert "needs 200 devices (member=200)" in err
    code, out, _ = run(capsys, "train", "many.py", "--help-all")
    assert "--members.seeds" in out
    assert "--plan.chunk" in out


@pytest.mark.ci
def test_tune_writes_a_plan(population, capsys):
    Path("seven.toml").write_text(px.Plan(chunk=7).to_toml())
    code, out, _ = run(capsys, "plan", "many.py", "--plan-file", "seven.toml", "--tune", "t.toml")
    assert code == 0
    tuned = px.Plan.load("t.toml")
    assert tuned.chunk == 7
    assert f"fastest: chunk=7, batch_dim={tuned.batch_dim}" in out
    assert "wrote t.toml" in out


def test_tune_of_one_network(workplace, capsys):
    code, _, err = run(capsys, "plan", "small.py", "--tune", "tuned.toml")
    assert code == 2
    assert "--tune measures the chunk and the batch_dim of a population" in err


@pytest.mark.ci
def test_a_plan_on_the_command_line_gets_its_cpu_devices():
    """In a process of its own: devices are counted before JAX starts."""
    code = (
        "import jax, os; from plurax.cli.arguments import start_devices;"
        "start_devices(['--plan.member', '2']); print(len(jax.devices()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    cores = len(__import__("os").sched_getaffinity(0))
    assert int(done.stdout) == (2 if cores >= 2 else 1)


SPLIT = """
import jax, jax.numpy as jnp, numpy as np, optax, plurax as px


def experiment():
    def init(key):
        first, second = jax.random.split(key)
        return {"in": jax.random.normal(first, (4, 8)), "out": jax.random.normal(second, (8, 3))}

    def loss(params, batch, keys):
        return jnp.sum((jnp.tanh(batch["x"] @ params["in"]) @ params["out"]) ** 2, axis=1)

    rules = px.sharding.megatron(column=["in"], row=["out"])
    return px.Experiment(
        task=px.Task(init=init, loss=loss), optimizer=optax.adam(1e-2), batch_size=8,
        data={"x": np.ones((20, 4), np.float32)},
        plan=px.Plan(data=jax.device_count(), shardings=rules),
    )
"""


def test_plan_shows_shards_and_what_was_planned(workplace, capsys, drawn):
    Path("split.py").write_text(SPLIT)
    code, out, _ = run(
        capsys, "plan", "split.py", "--plan.tensor", "2", "--plan.zero", "1", "--save", "plan.png"
    )
    assert code == 0
    assert "Plan(data=4, tensor=2, zero=1): 8 devices" in out  # the file's data=8 gave way
    assert "planned" in out
    assert "compiled" in out
    assert "in │ 4×8 │ 1: tensor │ 4×4" in " ".join(out.split())
    memory, sent = panels(drawn["plan.png"])
    print(memory, sent)


@pytest.mark.ci
def test_verify(workplace, capsys):
    Path("split.py").write_text(SPLIT)
    code, out, _ = run(capsys, "verify", "split.py", "--plan.tensor", "4", "--steps", "1")
    assert code == 0
    assert "computes what one device computes" in out
    wrong = SPLIT.replace(
        'jnp.tanh(batch["x"] @ params["in"]) @ params["out"]',
        "jax.shard_map(lambda x, a, b: jnp.tanh(x @ a) @ b, in_specs=(jax.P(), jax.P(None, "
        '"tensor"), jax.P("tensor", None)), out_specs=jax.P(), axis_names={"tensor"}, '
        'check_vma=False)(batch["x"], params["in"], params["out"])',
    )
    Path("wrong.py").write_text(wrong)
    code, out, _ = run(capsys, "verify", "wrong.py", "--plan.tensor", "4", "--steps", "1")
    assert code == 1
    assert "The first tensor that differs is loss" in out
    Path("many.py").write_text(POPULATION)
    code, _, err = run(capsys, "verify", "many.py")
    assert code == 2
    assert "compares one network under a plan" in err


def test_every_option_of_train_reaches_fit(workplace, capsys, monkeypatch):
    seen = {}

    def caught(*_, **options):
        seen.update(options)
        raise px.errors.PlanError("caught")

    monkeypatch.setattr("plurax.cli.train_command.fit", caught)
    _, _, err = run(
        capsys, "train", "small.py", "--seed", "7", "--checkpoint-every", "5", "--epochs", "3",
        "--batch-size", "8", "--report-every", "2", "--ragged", "drop", "--output", "there",
        "--resume", "--no-progress", "--plan.data", "2", "--members.seeds", "4",
        "--machine", "A100-80GB", "--nodes", "2",
    )  # fmt: skip
    assert "caught" in err
    expected = {
        "seed": 7, "checkpoint_every": 5, "epochs": 3, "batch_size": 8, "report_every": 2,
        "ragged": "drop", "output": Path("there"), "resume": True, "progress": False,
        "plan": px.Plan(data=2), "shuffle": True,
        "machine": px.Machine.preset("A100-80GB", nodes=2),
    }  # fmt: skip
    assert {name: seen[name] for name in expected} == expected
    assert seen["members"].count == 4
    assert set(seen["evaluation"]) == {"x", "y"}


def test_an_estimate_of_an_experiment(workplace, capsys):
    arguments = ("estimate", "small.py", "--plan.data", 4, "--examples", 1e6)
    code, out, err = run(capsys, *arguments, "--machine", "8xA100-80GB", "--nodes", 2)
    assert (code, err) == (0, "")
    assert "Plan(data=4) on 2 nodes of 8xA100-80GB" in out
    for part in ("matrix products", "collectives over data", "memory of a device", "are left",
                 "1,000,000 examples take", "device-hours"):  # fmt: skip
        assert part in out
    px.Machine("little", {"float32": 1e9}, 100, 1e9).save("little.toml")
    code, out, _ = run(capsys, "estimate", "small.py", "--plan.data", 1, "--machine", "little.toml")
    assert code == 0
    assert "on little" in out
    assert "does not fit" in out


def test_mistakes_about_estimates(workplace, capsys):
    code, _, err = run(capsys, "estimate", "small.py", "--machine", "a.toml", "--nodes", 4)
    assert (code, "--machine 8xA100-80GB --nodes 4" in err) == (2, True)
    for command in ("plan", "train"):
        code, _, err = run(capsys, command, "small.py", "--nodes", 4)
        assert (code, "--machine 8xA100-80GB --nodes 4" in err) == (2, True)
    code, _, err = run(capsys, "estimate", "small.py", "--machine", "A100-80GB", "--plan.data", 4)
    assert (code, "needs 4 devices, and A100-80GB has 1" in err) == (2, True)


def test_two_plans_are_compared(workplace, capsys):
    Path("split.py").write_text(SPLIT)
    px.Plan(data=4).save("a.toml")
    split = {"in": (None, "tensor"), "out": ("tensor", None)}
    px.Plan(data=2, tensor=2, shardings=split).save("b.toml")
    machine = ("--machine", "8xA100-80GB", "--nodes", 2)
    code, out, err = run(capsys, "plan", "a.toml", "b.toml", "--diff", "split.py", *machine)
    assert (code, err) == (0, "")
    assert "a.toml and b.toml, estimated on 2 nodes of 8xA100-80GB" in out
    rows = [line.split() for line in out.splitlines()]
    for row in ["data 4 2", "shardings['in'] - (None, 'tensor')", "over tensor - 52 B +52 B",
                "parameters 224 B 112 B -112 B -50%"]:  # fmt: skip
        assert row.split() in rows
    assert run(capsys, "plan", "--diff=split.py", "a.toml", "b.toml", *machine)[1] == out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("a.toml --diff small.py", "--machine 8xA100-80GB: --diff compares two plan files"),
        ("--diff small.py", "which come first. Write plurax plan a.toml b.toml --diff FILE"),
        ("a.toml a.toml --diff", "plan a.toml a.toml --diff: --diff compares two plan files"),
        ("a.toml a.toml a.toml --diff=small.py", "--diff compares two plan files"),
        ("a.toml none.toml --diff small.py", "none.toml is not a plan in TOML"),
        ("a.toml wrong.toml --diff small.py", "wrong.toml: 'dat' is not a field of a plan"),
        (
            "a.toml other.toml --diff small.py",
            "other.toml is not a plan that can run: the plan has a strategy for equation 4",
        ),
        ("a.toml a.toml --diff none.py", "none.py: no such file"),
        ("a.toml a.toml --diff small.py --plan.data 3", "Unrecognized options: --plan.data, 3"),
        ("a.toml a.toml --diff small.py --search", "Unrecognized options: --search"),
    ],
)
def test_mistakes_about_comparing_plans(workplace, capsys, arguments, message):
    px.Plan(data=2).save("a.toml")
    Path("wrong.toml").write_text("dat = 3")
    pins = {"traced": "0123", "equations": [{"equation": "4 dot_general", "inputs": [[]]}]}
    px.Plan(tensor=2, strategies=pins).save("other.toml")
    machine = [] if arguments.endswith("--diff") else ["--machine", "8xA100-80GB"]
    code, out, err = run(capsys, "plan", *arguments.split(), *machine)
    assert (code, out) == (2, "")
    assert message in " ".join(err.split())


@pytest.mark.ci
def test_a_plan_is_searched_drawn_and_saved(workplace, capsys, drawn):
    level = px.analysis.Level("node", 4, 1e12)
    px.Machine("slow products", {"float32": 1e8}, 1e9, 1e12, [level]).save("slow.toml")
    options = ("--search", "--machine", "slow.toml", "--plan.tensor", 1, "--save", "found.toml")
    options += ("--output", "pictures")
    code, out, _ = run(capsys, "plan", "small.py", *options)
    assert code == 0
    assert "plans for slow products" in out
    assert max(map(len, out.splitlines())) <= 100
    assert "wrote found.toml\nwrote pictures/search.png\n" in out
    assert [*drawn] == ["search.png"], "nothing is split over `tensor`"
    found = px.Plan.load("found.toml")
    assert (found.data, found.tensor) == (4, 1)
    code, out, _ = run(capsys, "verify", "small.py", "--plan-file", "found.toml")
    assert code == 0


@pytest.mark.ci
def test_a_found_plan_runs_beside_its_estimate_and_its_machine_learns(
    workplace, capsys, monkeypatch
):
    level = px.analysis.Level("node", 4, 1e12)
    machine = px.Machine("slow", {"float32": 1e8}, 1e9, 1e12, [level], overhead=1e-6)
    machine.save("slow.toml")
    on = ("--machine", "slow.toml")
    search = ("--search", "--evaluations", "1", "--save", "found.toml")
    code, out, _ = run(capsys, "plan", "small.py", *search, *on, "--plan.tensor", 1)
    assert code == 0
    assert out.splitlines()[2].startswith("1  "), "one is estimated of each policy, however few"
    assert re.search(r"^no plan is (more than \d+% )?faster, by bounds", out, re.MULTILINE)
    code, out, _ = run(capsys, "plan", "small.py", "--plan-file", "found.toml", *on)
    assert code == 0
    lines = [line for line in out.splitlines() if re.match("predicted |compiled ", line)]
    predicted, compiled = lines
    expected = re.fullmatch(r"predicted  .* a step, .* on a device, (.*) sent, on slow", predicted)
    assert re.fullmatch(rf"compiled   [\d.]+ KiB( \([+-]\d+ %\))?, {expected[1]}", compiled)
    code, out, _ = run(capsys, "train", "small.py", "--plan-file", "found.toml", *on)
    assert code == 0
    said = [line for line in out.splitlines() if re.match("predicted |measured ", line)]
    assert [line.split()[0] for line in said] == ["predicted", "measured", "measured"]
    assert " a step" in said[2]
    assert "checkpoints/, plan.toml, run.toml, machine.toml" in out
    pairs = [row["estimate"] for row in read_rows(Path("runs/small/metrics.jsonl"))
             if row["kind"] == "epoch"]  # fmt: skip
    ratios = [pair["measured"]["seconds"] / pair["predicted"]["seconds"] for pair in pairs]
    correction = float(f"{np.median(ratios):.3g}")
    code, out, err = run(capsys, "machine", "--runs", "runs/small")
    assert code == 0
    assert px.Machine.from_toml(out) == dataclasses.replace(machine, correction=correction)
    assert f"seconds, by runs: × {correction:g}" in err
    # Measured anew, a machine of the same name learns, and no other.
    fresh = dataclasses.replace(machine, flops={"float32": 2e8})
    monkeypatch.setattr("plurax.cli.machine_command.measure_machine", lambda: fresh)
    code, out, _ = run(capsys, "machine", "--measure", "--runs", "runs/small", "runs/small")
    assert px.Machine.from_toml(out) == dataclasses.replace(fresh, correction=correction)
    code, out, err = run(capsys, "machine", "--preset", "A100-80GB", "--runs", "runs/small")
    assert (code, out) == (2, "")
    assert "predicted on 'slow', and the machine to correct is 'A100-80GB'" in err


@pytest.mark.ci
def test_a_population_is_estimated_compared_and_searched(workplace, capsys):
    many = ("--machine", "8xA100-80GB", "--members.seeds", 12)
    code, out, _ = run(capsys, "estimate", "small.py", *many, "--plan.member", 4)
    assert (code, " examples, 12 members\n" in out) == (0, True)
    px.Plan(member=2).save("two.toml")
    px.Plan(member=4).save("four.toml")
    code, out, _ = run(capsys, "plan", "two.toml", "four.toml", "--diff", "small.py", *many)
    assert code == 0
    assert re.search(r"member +2 +4", out)
    search = ("--search", "--evaluations", 3, "--save", "found.toml")
    code, out, _ = run(capsys, "plan", "small.py", *search, *many)
    assert code == 0
    assert re.search(r"^1  .* of 74.5 GiB  member=\d, chunk=", out, re.MULTILINE)
    assert px.Plan.load("found.toml").chunk is not None
    code, out, _ = run(capsys, "plan", "small.py", "--machine", "8xA100-80GB",
                       "--members.seeds", 3, "--plan.member", 1)  # fmt: skip
    assert code == 0
    assert re.search(r"^predicted  .* on 8xA100-80GB\ncompiled ", out, re.MULTILINE)


def test_mistakes_about_searches(workplace, capsys):
    search = ("plan", "small.py", "--search", "--machine", "A100-80GB")
    code, _, err = run(capsys, *search, "--memory", "lots")
    assert (code, "is no number of bytes above 0: write 40GB" in err) == (2, True)
    code, _, err = run(capsys, *search, "--memory", "40B")
    assert (code, "no plan fits in 40 bytes per device" in err) == (2, True)
    code, _, err = run(capsys, *search, "--plan.data", 3)
    assert (code, "no plan agrees with Plan(data=3): " in err) == (2, True)
    code, _, err = run(capsys, "plan", "small.py", "--output", "pictures")
    assert (code, "--output is an option of a search" in err) == (2, True)


SEQUENCES = """
import jax, jax.numpy as jnp, numpy as np, optax, plurax as px

def experiment(table: bool = False):
    def loss(params, batch, keys):
        x = jnp.tanh(batch["x"] @ params)
        x = x + jnp.ones((1, 64, 1)) if table else x
        return jnp.mean(jnp.cumsum(x, 1) ** 2, (1, 2))

    return px.Experiment(
        task=px.Task(init=lambda key: jax.random.normal(key, (16, 16)), loss=loss),
        optimizer=optax.sgd(0.1),
        data={"x": np.zeros((32, 64, 16), np.float32)},
        batch_size=8,
        plan=px.Plan(data=4),
    )
"""


@pytest.mark.ci
def test_the_longest_sequences_of_a_machine(workplace, capsys):
    level = px.analysis.Level("node", 4, 1e12)
    px.Machine("slow", {"float32": 1e9}, 1e9, 1e12, [level]).save("slow.toml")
    Path("sequences.py").write_text(SEQUENCES)
    on = ("--longest", "--machine", "slow.toml", "--memory", "1MB", "--save", "plan.toml")
    code, out, _ = run(capsys, "plan", "sequences.py", *on)
    seconds = re.compile(r"\d[\d.]* (?:µs|ms|s)\b")
    assert (code, seconds.sub("T", re.sub(" +", " ", out))) == (0, LONGEST)
    assert px.Plan.load("plan.toml") == px.Plan(data=4)
    code, out, _ = run(capsys, "plan", "sequences.py", "--search", *on, "--plan.tensor", 1)
    assert code == 0
    assert "no plan fits" not in out, "only the plan that comes nearest is named"
    assert int(out.splitlines()[0].split()[-1].replace(",", "")) >= 1024
    assert re.search(r"does not fit +data=\d[^:]*: at least 1,\d{3},\d{3} bytes\n", out)
    assert px.Plan.load("plan.toml").tensor == 1


LONGEST = """\
the longest sequences for slow, 8 in a step: 1,920
length a step memory plan
 64 T 33.0 KiB of 976.6 KiB data=4
 128 T 65.0 KiB of 976.6 KiB data=4
 256 T 129.0 KiB of 976.6 KiB data=4
 512 T 257.0 KiB of 976.6 KiB data=4
 1,024 T 513.0 KiB of 976.6 KiB data=4
 1,536 T 769.0 KiB of 976.6 KiB data=4
 1,792 T 897.0 KiB of 976.6 KiB data=4
 1,920 T 961.0 KiB of 976.6 KiB data=4
 2,048 does not fit a device needs 1.0 MiB
found in T, by estimates of 9 lengths
wrote plan.toml
"""


def test_mistakes_about_the_longest_sequences(workplace, capsys):
    Path("sequences.py").write_text(SEQUENCES)
    longest = ("--longest", "--machine", "A100-80GB", "--plan.data", 1)
    code, _, err = run(capsys, "plan", "sequences.py", *longest, "--experiment.table")
    said = "sequences of 64, and fails for 128 at sequences.py:7: TypeError: add got"
    assert (code, said in err) == (2, True)
    for option, arguments in {"compile-for": ("1xH100",), "output": ("a",), "compare": ()}.items():
        code, _, err = run(capsys, "plan", "sequences.py", *longest, f"--{option}", *arguments)
        assert (code, f"--longest estimates, and --{option} is of a batch" in err) == (2, True)
    code, _, err = run(capsys, "plan", "sequences.py", *longest, "--members.seeds", 3)
    assert (code, "--longest is for one network" in err) == (2, True)
    code, _, err = run(capsys, "plan", "small.py", *longest)
    assert (code, "the loss is written for sequences of " in err) == (2, True)


def test_a_machine_is_printed_as_a_file(capsys, monkeypatch, tmp_path):
    code, out, err = run(capsys, "machine", "--preset", "4xA100-80GB", "--nodes", 2)
    assert (code, err) == (0, "")
    assert px.Machine.from_toml(out) == px.Machine.preset("4xA100-80GB", nodes=2)
    here = px.Machine("here", {"float32": 1e11}, 1e9, 1e10)
    monkeypatch.setattr("plurax.cli.machine_command.measure_machine", lambda: here)
    for arguments in ([], ["--measure"]):
        code, out, err = run(capsys, "machine", *arguments)
        assert code == 0
        assert px.Machine.from_toml(out) == here
        assert "products in float32: 100 Gflop/s" in err
    _, out, _ = run(capsys, "machine", "--help")
    assert all(name in "".join(out.split()).replace("│", "") for name in px.Machine.presets())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["8xH100"], "options begin with --. Published hardware is printed by plurax machine --p"),
        (["--preset", "8xA100"], "there is no published machine '8xA100'. Did you mean '8xA100-"),
        (
            ["--preset", "A100-80GB", "--measure"],
            "A100-80GB prints published rates; --m",
        ),
        (["--nodes", "4"], "--nodes 4 is for published hardware: --preset 8xA100-80GB --nodes 4."),
        (
            ["--preset", "8xA100-80GB", "--nodes", "0"],
            "nodes: 0 is not a number of devices",
        ),
        (["--runs", "none"], "--runs none: there is no metrics.jsonl in it. Give the"),
        (["--preset", "A100-80GB", "--runs", "none"], "none: there is no metrics.jsonl in it."),
        (["--runs", "."], "--runs .: nothing in its metrics.jsonl was both predicted and timed."),
    ],
)
def test_mistakes_about_machines(workplace, arguments, said, capsys):
    Path("metrics.jsonl").write_text('{"kind": "epoch", "step": 1, "epoch": 1, "loss": 2.0}\n')
    code, out, err = run(capsys, "machine", *arguments)
    assert (code, out) == (2, "")
    assert said in err


def test_a_rollback_is_an_option(workplace, capsys, monkeypatch):
    def refused(**options):
        raise px.errors.BatchError(repr(options["rollback"]))

    monkeypatch.setattr("plurax.cli.train_command.fit", refused)
    _, _, err = run(capsys, "train", "small.py", "--rollback.after", "0", "--rollback.spike", "6.5")
    assert "Rollback(after=0, spike=6.5, limit=3)" in err


def test_every_command_of_the_table_is_there(capsys):
    """Its function can be imported, its help names it, and the help of all shows it once."""
    _, out, _ = run(capsys, "--help")
    for command in COMMANDS:
        assert callable(command.load())
        assert len(re.findall(rf"^  plurax {re.escape(command.usage)} ", out, re.M)) == 1
        assert command.help in out
