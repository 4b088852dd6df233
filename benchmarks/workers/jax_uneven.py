"""An example trained by workers of which one is slow: side `train`, whose units are epochs.

A worker's gradient of `settings["batch"]` examples takes `settings["seconds"]` more than it needs,
those of the slow one `settings["slow"]` times as much: it sleeps, as if it computed on a processor
of its own. `settings["way"]` is a way of `sizes.UNEVEN`, the fields of its `Servers`; without it
the workers are devices of a data-parallel step, which ends when the slowest has.
"""

import dataclasses
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from examples import digits, domains
from jaxtyping import Array, PyTree

import plurax as px
from benchmarks.workers.serve import Settings, Side, serve

EXPERIMENTS = {
    "digits": digits.experiment,
    "domains": lambda: domains.experiment(width=64, holes=64),
}


def build(settings: Settings) -> tuple[dict[str, Side], dict[str, Any]]:
    if settings["way"] is None:
        px.virtual_devices(settings["workers"])
    return {"train": lambda units: train(settings, units)}, {}


def train(settings: Settings, epochs: int) -> dict[str, Any]:
    """Train; return for each epoch the held-out loss and the seconds, and what the servers did."""
    experiment = EXPERIMENTS[settings["data"]]()
    way, workers, batch = settings["way"], settings["workers"], settings["batch"]
    optimizer = optax.adam(settings["learning_rate"])
    common = {"epochs": epochs, "evaluation": experiment.evaluation, "progress": False}
    if way is None:
        data = SlowBatches(experiment.data, workers * batch, settings)
        plan = px.Plan(data=workers)
        result = px.fit(experiment.task, optimizer, data, plan=plan, **common)
    else:
        servers = px.Servers(shards=settings["servers"], workers=workers, **way)
        # In `sync` each worker has its part of a batch, else a batch.
        size = workers * batch if servers.mode == "sync" else batch
        with tempfile.TemporaryDirectory() as folder:
            task = _slowed(experiment.task, settings, Path(folder) / "slow")
            result = px.fit(
                task, optimizer, experiment.data, batch_size=size, servers=servers, **common
            )
    account = result.staleness
    return {
        "losses": [row["eval_loss"] for row in result.history],
        "epochs": [row["seconds"] for row in result.history],
        "account": None if account is None else account.to_json(),
    }


def _slowed(task: px.Task, settings: Settings, mark: Path) -> px.Task:
    """The task with a loss that sleeps; the first process that computes it is the slow one."""

    def sleep(x: np.ndarray) -> np.ndarray:
        try:
            with mark.open("x") as file:
                file.write(str(os.getpid()))
        except FileExistsError:
            pass
        slow = mark.read_text() == str(os.getpid())
        time.sleep(settings["seconds"] * (settings["slow"] if slow else 1))
        return x

    def loss(params: PyTree, batch: PyTree, keys: Array | None = None) -> tuple[Array, PyTree]:
        values, metrics = task.loss(params, batch, keys)
        zero = jnp.zeros((), values.dtype)
        # Added, so that it is not dropped.
        zero = jax.pure_callback(sleep, jax.ShapeDtypeStruct((), values.dtype), zero)
        return values + jax.lax.stop_gradient(zero), metrics

    return dataclasses.replace(task, loss=loss)


class SlowBatches:
    """Batches in an order of their own in each pass, each after what the slow worker takes.

    A callback cannot sleep on one of several devices, and what they all wait for is the same.
    """

    def __init__(self, data: PyTree, size: int, settings: Settings) -> None:
        self.data, self.size = data, size
        self.seconds = settings["seconds"] * settings["slow"]
        self.rng = np.random.default_rng(0)

    def __iter__(self) -> Iterator[PyTree]:
        rows = self.rng.permutation(len(jax.tree.leaves(self.data)[0]))
        for first in range(0, len(rows), self.size):
            some = rows[first : first + self.size]
            time.sleep(self.seconds)
            yield jax.tree.map(lambda values, some=some: values[some], self.data)


if __name__ == "__main__":
    serve(build)
