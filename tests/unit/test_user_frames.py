"""Warnings are of the line of the user's code that called."""

import linecache
import subprocess
import sys
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests import typecheck

import plurax as px
from plurax import user_frames
from plurax.execute import coupling
from plurax.report.page.run_data import read_run

X = np.random.default_rng(0).normal(size=(12, 4)).astype(np.float32)
DATA = {"x": X}


def task(loss, **fields):
    return px.Task(init=lambda key: {"w": jnp.eye(4)}, loss=loss, **fields)


def square(params, batch, keys):
    return ((batch["x"] @ params["w"]) ** 2).sum(1)


def hessenberg(params, batch, keys):
    fixed = jax.lax.linalg.hessenberg(jax.lax.stop_gradient(params["w"]))[0]
    return ((batch["x"] @ (params["w"] + fixed)) ** 2).sum(1)


def normed(params, batch, keys, mask):
    return ((batch["x"] - batch["x"].mean(0, keepdims=True)) @ params["w"]).sum(1)


def fit(folder, data=DATA, **arguments):
    options = {"batch_size": 6, "epochs": 2, "progress": False, **arguments}
    return px.fit(task(square), optax.sgd(0.01), data, output=folder, **options)


# Each is called with a folder, and a `MonkeyPatch`.


def operation_without_a_rule(folder, patch):
    plan = px.Plan(tensor=2, shardings={"w": (None, "tensor")})
    px.compile(task(hessenberg), optax.sgd(0.1), plan, DATA)


def rule_that_does_not_divide(folder, patch):
    plan = px.Plan(tensor=3, shardings={"w": (None, "tensor")})
    px.compile(task(square), optax.sgd(0.1), plan, DATA)


def rows_too_many_to_run(folder, patch):
    patch.setattr(coupling, "MOST_BYTES", 0)
    centred = task(
        lambda params, batch, keys: ((batch["x"] - batch["x"].mean(0, keepdims=True)) ** 2).sum(1)
    )
    px.compile(centred, optax.sgd(0.1), px.Plan(), DATA)


def mask_that_is_not_read(folder, patch):
    program = px.compile(task(normed, coupled=True), optax.sgd(0.1), px.Plan(data=2), DATA)
    program.step(program.init(), {"x": X[:7]})


def loss_that_is_not_finite(folder, patch):
    fit(None, {"x": np.full_like(X, np.nan)})


def member_that_is_not_finite(folder, patch):
    fit(None, {"x": np.full_like(X, np.nan)}, members=px.Members(2))


def checkpoint_that_is_damaged(folder, patch):
    fit(folder)
    (folder / "checkpoints" / "9").mkdir()
    fit(folder, resume=True)


def log_that_is_torn(folder, patch):
    fit(folder)
    log = folder / "metrics.jsonl"
    log.write_bytes(b"{\n" + log.read_bytes())
    fit(folder, resume=True, epochs=3)


def log_that_is_read(folder, patch):
    fit(folder)
    log = folder / "metrics.jsonl"
    log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[1:]))
    read_run(folder)


CASES = [
    operation_without_a_rule, rule_that_does_not_divide, rows_too_many_to_run,
    mask_that_is_not_read, loss_that_is_not_finite, member_that_is_not_finite,
    checkpoint_that_is_damaged, log_that_is_torn, log_that_is_read,
]  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_warning_is_of_the_users_line(case, tmp_path, monkeypatch):
    # The tests' own wrappers are between the calls of plurax.
    is_users = user_frames.is_users_file
    monkeypatch.setattr(
        user_frames, "is_users_file", lambda file: is_users(file) and file != typecheck.__file__
    )
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        case(tmp_path, monkeypatch)
    assert told
    for one in told:
        line = linecache.getline(one.filename, one.lineno)
        assert Path(one.filename) == Path(__file__), one
        assert any(call in line for call in ("px.fit(", "px.compile(", ".step(", "read_run(")), line


def test_all_warnings_are():
    folder = Path(px.__file__).parent
    assert [path for path in folder.rglob("*.py") if "warnings.warn(" in path.read_text()] == []


def test_what_is_typed_is_the_users():
    """A script given with `-c` is in no file."""
    script = "from plurax.user_frames import warn\nwarn('said')"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    # From Python 3.13 on the line itself follows.
    assert ran.stderr.splitlines()[0] == "<string>:2: UserWarning: said"
