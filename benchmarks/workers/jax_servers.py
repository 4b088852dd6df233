"""plurax with parameter servers: an MLP trained asynchronously by workers that are Ray actors.

Sides: `update`, a step of training; `exchange`, pushes and pulls of as many bytes, of a loss whose
gradient costs nothing. Each turn is a training of its own, timed where its batches are read: from
the batch after `WARM` for each worker to the last.
"""

import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PyTree

import plurax as px
from benchmarks.networks import Batch, count_parameters, make_batch, make_task
from benchmarks.sizes import Mlp
from benchmarks.workers.serve import Settings, Side, SkippedError, serve

WARM = 8
"""Updates for each worker before the clock."""
BATCHES = 64
"""Read again and again."""


class Batches:
    """The same batches again and again, `count` in all.

    **Attributes:** `taken`, when each was read in the latest pass.
    """

    def __init__(self, network: Mlp, size: int, count: int) -> None:
        examples = make_batch(network, BATCHES * size)
        self.count, self.taken = count, list[float]()
        self.batches: list[Batch] = [
            {name: values[first : first + size] for name, values in examples.items()}
            for first in range(0, BATCHES * size, size)
        ]

    def __iter__(self) -> Iterator[Batch]:
        self.taken = []
        for index in range(self.count):
            self.taken.append(time.perf_counter())
            yield self.batches[index % BATCHES]


def plurax_servers(
    parameters: int, settings: Settings, task: px.Task, units: int
) -> dict[str, Any]:
    """Train for `units` updates after some to warm up; the seconds of these, pushes and pulls."""
    warm = WARM * settings["workers"]
    data = Batches(Mlp(settings["widths"]), settings["batch"], warm + units + 1)
    servers = px.Servers(shards=settings["servers"], workers=settings["workers"], mode="async")
    optimizer = optax.sgd(settings["learning_rate"])
    result = px.fit(task, optimizer, data, servers=servers, progress=False)
    account = result.staleness
    assert account is not None
    assert account.updates == warm + units + 1, account
    sent = (account.pushed_bytes + account.pulled_bytes) / account.updates
    assert sent == 2 * 4 * parameters, account  # as of every peer
    return {
        "seconds": data.taken[-1] - data.taken[warm],
        "push": list(account.push_seconds)[warm:],
        "pull": list(account.pull_seconds)[warm:],
    }


def build(settings: Settings) -> tuple[dict[str, Side], dict[str, Any]]:
    if settings["platform"] != "cpu":
        raise SkippedError("parameter servers are measured on processors")
    training = make_task(Mlp(settings["widths"]))
    sending = dataclasses.replace(training, loss=_first_elements)
    parameters = count_parameters(jax.eval_shape(training.init, jax.random.key(0)))
    sides: dict[str, Side] = {
        "update": lambda units: plurax_servers(parameters, settings, training, units),
        "exchange": lambda units: plurax_servers(parameters, settings, sending, units),
    }
    return sides, {"parameters": parameters, "sides": list(sides)}


def _first_elements(params: PyTree, batch: Batch, keys: Array | None = None) -> Array:
    """A loss for each example whose gradient is zero but for one element of each leaf."""
    total = sum(leaf.reshape(-1)[0] for leaf in jax.tree.leaves(params))
    return total * jnp.ones(len(batch["y"]))


if __name__ == "__main__":
    serve(build)
