"""*Coming from Lightning*: both scripts run, and what its tables call the same is the same."""

import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import nnx
from torch.nn import functional as F  # noqa: N812  its own name

from tests import test_documents
from tests.integrations.test_wandb import rows
from tests.promotion import allowed

PAGE = Path(__file__).parents[2] / "docs" / "coming-from" / "lightning.md"


def pairs(heading):
    """The code of both columns of the tables in a section."""
    section = re.split(r"^#+ ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    text = next(one for one in section if one.startswith(heading))
    return re.findall(r"^\| `([^`]*)` \| `([^`]*)`", text, flags=re.MULTILINE)


def drawn(*shape):
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def test_the_page_runs_with_the_client_of_wandb(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    test_documents.run(PAGE)
    steps = {
        folder: [row["_step"] for row in rows(tmp_path / folder) if "epoch/eval_loss" in row]
        for folder in ("run", "again")
    }
    assert steps["again"] == steps["run"] == [*range(23, 11 * 23, 23)]
    assert len({path.stem for path in (tmp_path / "again").rglob("*.wandb")}) == 1


def test_the_lightning_script_runs_and_resumes(tmp_path):
    pytest.importorskip("lightning")
    text = PAGE.read_text(encoding="utf-8")
    script = re.search(r"```text\n(import lightning.*?)```", text, re.DOTALL)[1]
    script = script.replace('devices=8, strategy="ddp"', "devices=1").replace(", 8", ", 64")
    few = script.replace("max_epochs=10", "max_epochs=2")
    assert few != script
    environment = {**os.environ, "WANDB_MODE": "offline", "CUDA_VISIBLE_DEVICES": ""}
    for one in (few, script):
        done = subprocess.run(
            [sys.executable, "-c", one], cwd=tmp_path, env=environment, capture_output=True,
            text=True, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    assert re.search(r"Restoring states from .*last\.ckpt", done.stderr)
    assert float(re.search(r"'val_accuracy': (\S+)}", done.stdout)[1]) > 0.9


LOSSES = pairs("Losses")


@pytest.mark.parametrize(("theirs", "ours"), LOSSES, ids=[one for one, _ in LOSSES])
def test_losses_are_the_same(theirs, ours):
    values = {"logits": drawn(7, 10), "out": drawn(7, 10), "target": drawn(7, 10)[::-1].copy()}
    if "logits, target" in theirs:
        values["target"] = (values["target"] > 0).astype(np.float32)
    values["label"] = np.arange(7) % 10
    found = allowed(eval)(ours, {"jax": jax, "jnp": jnp, "optax": optax, **values})
    assert found.shape == (7,)
    tensors = {name: torch.from_numpy(value) for name, value in values.items()}
    wanted = eval(theirs, {"F": F, **tensors})
    np.testing.assert_allclose(found.mean(), wanted, rtol=1e-5)


OPTIMIZERS = [one for one in pairs("Optimizers") if "(p," in one[0]]


@pytest.mark.parametrize(("theirs", "ours"), OPTIMIZERS, ids=[one for one, _ in OPTIMIZERS])
def test_optimizers_are_the_same(theirs, ours):
    gradients, start = drawn(20, 5), 1 + drawn(5)
    parameter = torch.nn.Parameter(torch.from_numpy(start.copy()))
    stepped = eval(theirs, {**vars(torch.optim), "p": [parameter]})
    optimizer, params = eval(ours, {"optax": optax}), jnp.asarray(start)
    state = optimizer.init(params)
    for gradient in gradients:
        parameter.grad = torch.from_numpy(gradient)
        stepped.step()
        updates, state = optimizer.update(jnp.asarray(gradient), state, params)
        params = optax.apply_updates(params, updates)
    np.testing.assert_allclose(params, parameter.detach(), rtol=1e-5)


SCHEDULES = [one for one in pairs("Optimizers") if "(o," in one[0]]


@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize(("theirs", "ours"), SCHEDULES, ids=[one for one, _ in SCHEDULES])
def test_schedules_are_the_same_at_the_beginning_of_each_epoch(theirs, ours):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=3e-3)
    names = {"o": optimizer, "f": lambda epoch: 1 / (1 + 0.1 * epoch)}
    schedule = eval(theirs, {**vars(torch.optim.lr_scheduler), **names})
    ours = allowed(eval(ours, {"optax": optax, "n": 23, **names}))
    for epoch in range(40):
        wanted = optimizer.param_groups[0]["lr"]
        np.testing.assert_allclose(ours(jnp.int32(epoch * 23)), wanted, rtol=1e-4, atol=1e-9)
        schedule.step()


LAYERS = [one for one in pairs("Networks") if one[1].startswith("nnx.") and "a, " not in one[0]]


@pytest.mark.parametrize(("theirs", "ours"), LAYERS, ids=[one for one, _ in LAYERS])
def test_layers_have_outputs_of_the_same_shape_and_scale(theirs, ours):
    layer = eval(theirs, dict(vars(torch.nn)))
    kind = type(layer).__name__
    image = {"Conv2d": (3, 8, 8, 1), "MaxPool2d": (3, 8, 8, 2), "BatchNorm2d": (3, 8, 8, 32)}
    x = 0.01 * drawn(*image.get(kind, (3, 32) if kind == "LayerNorm" else (3, 64)))
    x = np.arange(6).reshape(2, 3) if kind == "Embedding" else x
    names = {"nnx": nnx, "rngs": nnx.Rngs(0), "x": jnp.asarray(x)}
    made = eval(ours, names)
    found = made if kind == "MaxPool2d" else allowed(made)(names["x"])
    turned = torch.from_numpy(x).permute(0, 3, 1, 2) if kind in image else torch.from_numpy(x)
    wanted = layer(turned)
    wanted = wanted.permute(0, 2, 3, 1) if kind in image else wanted
    assert found.shape == wanted.shape
    if kind in ("MaxPool2d", "BatchNorm2d", "LayerNorm"):
        np.testing.assert_allclose(found, wanted.detach(), rtol=1e-4, atol=1e-5)
    if kind == "BatchNorm2d":
        np.testing.assert_allclose(made.mean[...], layer.running_mean, rtol=1e-4, atol=1e-7)
