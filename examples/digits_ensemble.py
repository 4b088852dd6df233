"""Handwritten digits: a bootstrapped ensemble, how well it knows what it knows, and a sweep.

A hundred MLPs, each on its own bootstrap sample of 100 of scikit-learn's 1,797 scanned digits. With
so few examples one network is surer than it should be. The report compares it with the ensemble on
the other digits: accuracy, log loss, Brier score, calibration error and the reliability diagram;
and sweeps 200 settings of learning rate, weight decay and dropout in one program (twice as many as
there are members).

    plurax train examples/digits_ensemble.py --devices cores --plan.member 2
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, Key, PyTree
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import plurax as px

PIXELS, HIDDEN, CLASSES = 64, 128, 10
SWEEP = {
    "learning_rate": px.ensemble.log_uniform(1e-4, 1e-1),
    "weight_decay": px.ensemble.log_uniform(1e-4, 1.0),
    "dropout": px.ensemble.uniform(0.0, 0.7),
}


def init(key: Key[Array, ""]) -> PyTree:
    """64 - 128 - 10, He initialisation."""
    first, second = jax.random.split(key)
    return {
        "in": jax.random.normal(first, (PIXELS, HIDDEN)) * (2 / PIXELS) ** 0.5,
        "in_bias": jnp.zeros(HIDDEN),
        "out": jax.random.normal(second, (HIDDEN, CLASSES)) * (1 / HIDDEN) ** 0.5,
        "out_bias": jnp.zeros(CLASSES),
    }


def predict(params: PyTree, inputs: PyTree) -> Float[Array, "B 10"]:
    """Logits of the ten digits."""
    hidden = jax.nn.relu(inputs["image"] @ params["in"] + params["in_bias"])
    return hidden @ params["out"] + params["out_bias"]


def score(logits: Float[Array, "B 10"], label: Int[Array, "B"]) -> tuple[Array, dict[str, Array]]:
    """Cross entropy and accuracy of each image."""
    right = (jnp.argmax(logits, axis=-1) == label).astype(jnp.float32)
    entropy = optax.softmax_cross_entropy_with_integer_labels(logits, label)
    return entropy, {"accuracy": right}


def make_task(hyper: dict[str, Any]) -> px.Task:
    """A task whose rate of dropped pixels is a hyperparameter."""

    def loss(
        params: PyTree, batch: PyTree, keys: Key[Array, "B"]
    ) -> tuple[Array, dict[str, Array]]:
        keep = 1 - hyper["dropout"]
        drawn = jax.vmap(lambda key: jax.random.bernoulli(key, keep, (PIXELS,)))(keys)
        image = jnp.where(drawn, batch["image"] / keep, 0)
        return score(predict(params, {"image": image}), batch["label"])

    return px.Task(
        init=init,
        loss=loss,
        evaluate=lambda params, batch: score(predict(params, batch), batch["label"]),
        predict=predict,
    )


def make_optimizer(hyper: dict[str, Any]) -> optax.GradientTransformation:
    """AdamW with a learning rate and weight decay of a member's own."""
    return optax.adamw(hyper["learning_rate"], weight_decay=hyper["weight_decay"])


def load_data(examples: int) -> tuple[PyTree, PyTree]:
    """`examples` to train on and the rest: `image (N, 64)` in [0, 1] and `label (N,)`."""
    digits = load_digits()
    images, labels = (digits.data / 16).astype(np.float32), digits.target.astype(np.int32)
    split = train_test_split(images, labels, train_size=examples, random_state=0, stratify=labels)
    return {"image": split[0], "label": split[2]}, {"image": split[1], "label": split[3]}


def experiment(examples: int = 100, epochs: int = 60) -> px.Experiment:
    """A hundred networks, each on its own bootstrap sample of `examples` digits."""
    train, held_out = load_data(examples)
    settings = {"learning_rate": 1e-2, "weight_decay": 1e-4, "dropout": 0.0}
    return px.Experiment(
        task=make_task,
        optimizer=make_optimizer,
        data=train,
        evaluation=held_out,
        batch_size=128,
        epochs=epochs,
        report_every=max(1, epochs // 12),
        members=px.Members(100, settings, px.ensemble.bootstrap()),
        plan=px.Plan(member=jax.device_count()),
    )


def report(made: px.Experiment, result: px.train.Fit, directory: Path) -> Iterator[Path]:
    """Compare one network with the ensemble on held-out digits; sweep."""
    labels = made.evaluation["label"]
    inputs = {"image": made.evaluation["image"]}
    plan = result.program.plan
    common = {"batch_size": made.batch_size, "epochs": made.epochs, "progress": False}
    ordinary = px.Members(1, made.members.hyper)
    alone = px.fit(made.task, made.optimizer, made.data, members=ordinary,
                   plan=px.Plan(chunk=1, batch_dim=plan.batch_dim), **common)  # fmt: skip
    logits = {
        "one network": alone.program.predict(alone.state, inputs),
        f"{result.program.members.count} bootstrapped networks": result.program.predict(
            result.state, inputs
        ),
    }
    table = Table("held-out digits", "accuracy", "log loss", "Brier score", "calibration error")
    calibrations, scores, combined = {}, {}, {}
    for name, values in logits.items():
        combined[name] = px.ensemble.combine_classification(values)
        probabilities = combined[name].probabilities
        calibrations[name] = px.ensemble.calibration(probabilities, labels, bins=10)
        accuracy, log_loss, brier = scores[name] = [
            score(probabilities, labels)
            for score in (px.ensemble.accuracy, px.ensemble.nll, px.ensemble.brier)
        ]
        error = calibrations[name].error
        table.add_row(name, f"{accuracy:.2%}", f"{log_loss:.4f}", f"{brier:.4f}", f"{error:.4f}")
    Console().print(table)
    px.ensemble.draw_reliability(calibrations, directory / "reliability.png")
    yield directory / "reliability.png"
    # For the page of `plurax report`.
    columns = ("accuracy", "log loss", "Brier score")
    named = {name: dict(zip(columns, row, strict=True)) for name, row in scores.items()}
    yield px.ensemble.save_calibration(directory, calibrations, scores=named, uncertainty=combined)

    settings = px.Members(2 * result.program.members.count, SWEEP)
    found = px.sweep(made.task, made.optimizer, made.data, members=settings, plan=plan,
                     evaluation=made.evaluation, report_every=made.epochs,
                     **{**common, "progress": True})  # fmt: skip
    best = found.best("eval_accuracy", mode="max")
    print("best setting:", {name: f"{best[name]:.3g}" for name in (*SWEEP, "eval_accuracy")})
    found.save_csv(directory / "sweep.csv")
    px.ensemble.draw_parallel(
        found.rows, list(SWEEP), "eval_accuracy", directory / "sweep.png", mode="max"
    )
    yield directory / "sweep.csv"
    yield directory / "sweep.png"
