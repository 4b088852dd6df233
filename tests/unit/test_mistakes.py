"""Each row of the table of mistakes: before a step is taken, one error that says what to write."""

import functools
import traceback
from pathlib import Path

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from tests.mistakes import COMMANDS, PYTHON, page

import plurax as px
import plurax.adapters.equinox
import plurax.adapters.linen
import plurax.adapters.nnx
from plurax import errors
from plurax.cli import dispatch as cli
from plurax.user_frames import user_frames


def init(key):
    return {"w": jax.random.normal(key, (3,))}


def loss(params, batch, keys):
    return (batch["x"] @ params["w"] - batch["y"]) ** 2


class TakenError(Exception):
    """A step was taken, or nearly."""


@pytest.fixture(scope="module")
def names():
    x = np.random.default_rng(0).normal(size=(32, 3)).astype(np.float32)
    data = {"x": x, "y": x.sum(axis=1)}
    task = px.Task(init=init, loss=loss, predict=lambda params, inputs: inputs["x"] @ params["w"])

    return {
        "px": px, "np": np, "optax": optax, "nn": nn, "jax": jax,
        "init": init, "loss": loss, "key": jax.random.key(0), "data": data, "task": task,
        "optimizer": optax.sgd(0.1), "make_task": lambda width: task,
        "other": lambda **fields: px.Task(init=init, loss=loss, **fields),
        "flax_loss": lambda model, batch, keys: batch["y"],
        "linen_module": nn.Dense(1), "nnx_module": nnx.Linear(3, 1, rngs=nnx.Rngs(0)),
        "transformed": hk.transform(lambda x: x),
        "equinox_module": eqx.nn.Linear(3, 1, key=jax.random.key(0)),
        "machine": px.Machine.preset("8xA100-80GB"),
        "program": px.compile(task, optax.sgd(0.1), px.Plan(), data),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("code", "kind", "message"), [row for rows in PYTHON.values() for row in rows]
)
def test_in_python(tmp_path, monkeypatch, names, code, kind, message):
    monkeypatch.chdir(tmp_path)
    Path("file.txt").write_text("not a directory")
    monkeypatch.setattr(
        "plurax.train.fit.train_iter", lambda *_, **__: (_ for _ in ()).throw(TakenError)
    )
    with pytest.raises(errors.PluraxError) as raised:
        eval(code, dict(names))
    assert type(raised.value).__name__ == kind
    assert message in " ".join(str(raised.value).split())


@pytest.mark.parametrize("kind", [np.int64, np.uint8, jnp.int32])
def test_integers_of_other_libraries_are_whole_numbers(tmp_path, names, kind):
    """Up to the checkpoint, which is JSON."""
    result = px.fit(
        names["task"], optax.sgd(0.1), names["data"], batch_size=kind(8), epochs=kind(2),
        seed=kind(3), report_every=kind(1), checkpoint_every=kind(3), shuffle=np.bool_(True),
        plan=px.Plan(data=kind(2)), output=tmp_path, progress=False,
    )  # fmt: skip
    again = px.fit(
        names["task"], optax.sgd(0.1), names["data"], batch_size=8, epochs=2, seed=3,
        plan=px.Plan(data=2), output=tmp_path, resume=True, progress=False,
    )  # fmt: skip
    assert int(result.state.step) == int(again.state.step) == 8


# --- In a script ----------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnums=1)
def by_sizes(x, sizes):
    return x * sizes[0]


def in_numpy(p, b, k):
    return np.asarray(loss(p, b, k))


LOSSES = {
    "a field": (lambda p, b, k: b["z"], "The fields are 'x', 'y'."),
    "a field misspelled": (lambda p, b, k: b["yy"], "The fields are 'x', 'y'. Did you mean 'y'?"),
    "one key": (lambda p, b, k: jax.random.normal(k, (8,)), "and keys [8], one for each example."),
    "NumPy": (in_numpy, "write jnp in place of np."),
    "a branch": (lambda p, b, k: b["y"] if b["y"][0] > 0 else b["x"], "write jnp.where(condition"),
    "a float": (lambda p, b, k: b["y"] * float(p["w"][0]), "leave out float(), int() and .item()"),
    "rows": (lambda p, b, k: b["y"][b["y"] > 0], "give the others the weight 0"),
    "a static list": (lambda p, b, k: by_sizes(b["y"], [2]), "give a tuple in place of a list"),
    "a width": (
        lambda p, b, k: b["x"].T @ p["w"],
        "called with x float32[8, 3], y float",
    ),
}


CHECKED = ("jaxtyping/_decorator.py", "tests/typecheck.py", "tests/promotion.py")


def shown(error):
    """The files of the frames, without the tests' check of annotations, and what Python prints."""
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    files = [file for file in files if not file.endswith(CHECKED)]
    return files, "".join(traceback.format_exception(error))


@pytest.mark.parametrize("name", LOSSES)
def test_a_script_shows_the_users_frames_and_a_hint(names, name):
    function, hint = LOSSES[name]
    task = px.Task(init=init, loss=lambda p, b, k: function(p, b, k))
    with pytest.raises(Exception) as raised:  # noqa: PT011  of Python, JAX or NumPy
        px.fit(task, optax.sgd(0.1), names["data"], batch_size=8, progress=False)
    files, text = shown(raised.value)
    assert set(files) <= {__file__}
    assert len(files) >= 3
    assert hint in text
    assert "JAX has removed" not in text


def test_an_array_that_is_kept_between_calls_is_said(names):
    kept = []

    def keeping(params, batch, keys):
        kept.append(params["w"])
        return batch["x"] @ kept[0]

    with pytest.raises(
        px.errors.TaskError, match="kept an array of one call and used it in another"
    ):
        px.fit(px.Task(init=init, loss=keeping), optax.sgd(0.1), names["data"], batch_size=8)


def test_an_array_that_has_escaped_has_a_hint(names):
    def keeping(params, batch, keys):
        raise jax.errors.UnexpectedTracerError("Encountered an unexpected tracer.")

    with pytest.raises(jax.errors.UnexpectedTracerError) as raised:
        px.compile(px.Task(init=init, loss=keeping), optax.sgd(0.1), px.Plan(), names["data"])
    assert "return it from the function in place of storing it outside" in shown(raised.value)[1]


def test_predict_and_our_own_errors_show_the_users_frames(names):
    program, data = names["program"], names["data"]
    wide = {"x": np.ones((4, 7), np.float32)}
    for call, said in (
        (lambda: program.predict(program.init(), wide), "It was called with x float32[32, 7]."),
        (lambda: program.predict(program.init(), {"z": wide["x"]}), "The fields are 'z'."),
        (lambda: px.fit(names["task"], optax.sgd("0.1"), data, batch_size=8), "not optax.sgd('0"),
        (lambda: px.fit(names["task"], optax.sgd(0.1), data, batch_size=8.0), "batch_size=8.0"),
        (lambda: px.compile(names["task"], optax.sgd(0.1), px.Plan(data=9), data), "9 devices"),
    ):
        with pytest.raises(Exception) as raised:  # noqa: PT011
            call()
        files, text = shown(raised.value)
        assert set(files) == {__file__}
        assert said in text


def test_a_mistake_of_ours_and_jaxs_switch_show_all_frames(names, monkeypatch):
    def fit():
        with pytest.raises((KeyError, TypeError)) as raised:
            px.fit(px.Task(init=init, loss=lambda p, b, k: b["z"]), optax.sgd(0.1),
                   names["data"], batch_size=8, progress=False)  # fmt: skip
        return shown(raised.value)[0]

    own = str(Path(px.__file__).parent)
    assert not any(file.startswith(own) for file in fit())
    monkeypatch.setattr("plurax.train.fit.make_program", int)
    assert any(file.startswith(own) for file in fit())
    monkeypatch.undo()
    jax.config.update("jax_traceback_filtering", "off")
    try:
        assert any(file.startswith(own) for file in fit())
    finally:
        jax.config.update("jax_traceback_filtering", "auto")


# --- On the command line --------------------------------------------------------------------------

SMALL = """
import jax, jax.numpy as jnp, numpy as np, optax, plurax as px

def init(key):
    return {"w": jax.random.normal(key, (3,))}

def loss(params, batch, keys):
    return (jnp.dot(batch["x"], params["w"]) - batch["y"]) ** 2

def predict(params, inputs):
    return jnp.dot(inputs["x"], params["w"])

def experiment():
    x = np.ones((8, 3), np.float32)
    return px.Experiment(
        task=px.Task(init=init, loss=loss, predict=predict), optimizer=optax.sgd(0.1),
        data={"x": x, "y": x[:, 0]}, batch_size=4,
    )
"""
FILES = {
    "small.py": SMALL,
    "empty.py": "",
    "wrong.py": "def experiment(): return 3",
    "members_of_five.py": SMALL.replace("batch_size=4", "batch_size=4, members=5"),
    "plan_of_dict.py": SMALL.replace("batch_size=4", "batch_size=4, plan={'data': 2}"),
    "annotated.py": SMALL.replace("experiment()", "experiment(width: 'Width' = 3)"),
    "broken.py": "width = 0\nrate = 1 / width  # here\n",
    "syntax.py": "width = (3\n",
    "imports.py": "import not_installed\n",
    "leaves.py": "import sys\nsys.exit(0)  # here\n",
    "raises.py": "def experiment():\n    return open('no/such/file')  # here\n",
    "loss_raises.py": SMALL.replace(
        'return (jnp.dot(batch["x"], params["w"]) - batch["y"]) ** 2',
        "return jnp.dot(batch['x'], params['w'])  # here",
    ).replace("(3,)", "(4,)"),
    "init_raises.py": SMALL.replace("(key, (3,))}", "(key, ({}['width'],))}  # here"),
    "loss_scalar.py": SMALL.replace("** 2\n", "** 2 + (0 * batch['y']).sum(), {}\n").replace(
        "return (jnp", "return jnp.mean(jnp"
    ).replace("+ (0 * batch['y']).sum(), {}", ""),
    "float.toml": "zero = 3.0",
    "file.txt": "not a directory",
    "hello.npy": "hello",
    "empty.npz": "",
}  # fmt: skip
LINES = {"broken.py": 2, "leaves.py": 2, "raises.py": 2, "imports.py": 1, "loss_raises.py": 8,
         "init_raises.py": 5}  # fmt: skip


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """The files, and the output of a run."""
    place = tmp_path_factory.mktemp("mistakes")
    for name, text in FILES.items():
        (place / name).write_text(text)
    np.savez(place / "good.npz", x=np.ones((2, 3), np.float32))
    np.savez(place / "nothing.npz")
    np.savez(place / "keys.npz", z=np.ones((2, 3), np.float32))
    np.savez(place / "width.npz", x=np.ones((2, 7), np.float32))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.syspath_prepend(place)
        with pytest.raises(SystemExit) as stopped:
            cli.main(["train", "small.py", "--output", "trained", "--no-progress"])
        assert stopped.value.code == 0
    return place


@pytest.mark.parametrize(
    ("command", "code", "message"), [row for rows in COMMANDS.values() for row in rows]
)
def test_on_the_command_line(workplace, monkeypatch, capsys, command, code, message):
    monkeypatch.chdir(workplace)
    monkeypatch.syspath_prepend(workplace)
    arguments = command.split()
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    said = capsys.readouterr()
    assert stopped.value.code == code
    assert message in " ".join(said.err.split())
    assert "site-packages" not in said.err
    assert "src/plurax" not in said.err
    assert "Traceback" not in said.err
    file = arguments[1] if len(arguments) > 1 else ""
    if file in LINES:
        assert f'{file}", line {LINES[file]}' in said.err
        assert FILES[file].splitlines()[LINES[file] - 1].strip() in said.err


def test_a_module_beside_the_file_is_found(tmp_path, monkeypatch, capsys):
    (tmp_path / "beside_front.py").write_text("RATE = 0.5\n")
    source = SMALL.replace("import jax,", "import beside_front\nimport jax,", 1)
    (tmp_path / "uses.py").write_text(source.replace("sgd(0.1)", "sgd(beside_front.RATE)"))
    monkeypatch.chdir(tmp_path.parent)
    monkeypatch.setattr("sys.path", list(__import__("sys").path))
    with pytest.raises(SystemExit) as stopped:
        cli.main(["train", f"{tmp_path.name}/uses.py", "--output", str(tmp_path / "run")])
    assert stopped.value.code == 0, capsys.readouterr().err


def test_arguments_and_reports_of_every_kind(tmp_path, monkeypatch, capsys):
    """Annotations that are strings, arguments without names, a report that returns nothing."""
    source = SMALL.replace("experiment()", "experiment(size: Size = 'small', *rest, **options)")
    report = "def report(made, result, directory):\n    pass\n"
    kinds = f"from typing import Literal\nSize = Literal['small']\n\n{report}\n"
    source = source.replace("def init", f"{kinds}def init", 1)
    (tmp_path / "kinds.py").write_text(f"from __future__ import annotations\n{source}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        cli.main(["train", "kinds.py", "--experiment.size", "small", "--no-progress"])
    assert stopped.value.code == 0, capsys.readouterr().err


def test_a_mistake_of_our_own_shows_all_of_it(workplace, monkeypatch):
    monkeypatch.chdir(workplace)
    monkeypatch.syspath_prepend(workplace)
    monkeypatch.setattr("plurax.cli.train_command.read_rows", int)
    with pytest.raises(TypeError, match="int"):
        cli.main(["train", "small.py", "--output", "ours", "--no-progress"])


@pytest.mark.parametrize(
    ("file", "users"),
    [
        ("/home/me/model.py", True),
        (str(Path(px.__file__).parent / "train.py"), False),
        (f"{Path(px.__file__).parent}_models/model.py", True),
        ("/home/me/.local/lib/python3.11/site-packages/optax/model.py", False),
        ("<string>", False),
    ],
)
def test_whose_file_it_is(file, users):
    with pytest.raises(ZeroDivisionError) as raised:
        exec(compile("1 / 0", file, "exec"))
    assert (file in [frame.filename for frame in user_frames(raised.value)]) == users


def test_the_page_is_the_table():
    assert (Path(__file__).parents[2] / "docs" / "mistakes.md").read_text() == page()
