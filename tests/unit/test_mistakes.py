"""Each row of the table of mistakes: before a step is taken, one error that says what to write."""

from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from tests.mistakes import PYTHON

import plurax as px
import plurax.adapters.equinox
import plurax.adapters.linen
import plurax.adapters.nnx
from plurax import errors


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

    def keyed_loss(params, state, batch, keys, mask):
        return loss(params, batch, keys), {}, state

    return {
        "px": px, "np": np, "optax": optax, "nn": nn, "jax": jax,
        "init": init, "loss": loss, "key": jax.random.key(0), "data": data, "task": task,
        "optimizer": optax.sgd(0.1),
        "other": lambda **fields: px.Task(init=init, loss=loss, **fields),
        "keyed": px.Task(
            init=lambda key: (init(key), {"key": key}), loss=keyed_loss, coupled=True,
            stateful=True, evaluate=lambda params, state, batch: batch["y"],
        ),
        "flax_loss": lambda model, batch, keys: batch["y"],
        "linen_module": nn.Dense(1), "nnx_module": nnx.Linear(3, 1, rngs=nnx.Rngs(0)),
        "equinox_module": eqx.nn.Linear(3, 1, key=jax.random.key(0)),
        "program": px.compile(task, optax.sgd(0.1), px.Plan(), data),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("code", "kind", "message"), [row for rows in PYTHON.values() for row in rows]
)
def test_in_python(tmp_path, monkeypatch, names, code, kind, message):
    monkeypatch.chdir(tmp_path)
    Path("file.txt").write_text("not a directory")
    monkeypatch.setattr("plurax.train.training", lambda *_, **__: (_ for _ in ()).throw(TakenError))
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
