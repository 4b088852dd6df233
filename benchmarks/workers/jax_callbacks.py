"""`fit` with three callbacks and without, over the same resident data, in one process."""

import tempfile
from pathlib import Path
from typing import Any

import jax
import optax

import plurax as px
from benchmarks import sizes
from benchmarks.networks import count_parameters, make_batch, make_task
from benchmarks.workers.serve import Settings, Side, serve


def build(settings: Settings) -> tuple[dict[str, Side], dict[str, Any]]:
    network = sizes.from_json(settings["network"])
    task = make_task(network)
    data = make_batch(network, settings["batch"] * settings["steps"])
    schedule = optax.cosine_decay_schedule(sizes.LEARNING_RATE, 10**6)
    optimizer = optax.adamw(schedule, weight_decay=sizes.WEIGHT_DECAY)
    table = Path(tempfile.mkdtemp(), "epochs.csv")

    def run(units: int, *callbacks: Any) -> None:
        for _ in range(units):
            train(*callbacks)

    def train(*callbacks: Any) -> None:
        result = px.fit(
            task,
            optimizer,
            data,
            batch_size=settings["batch"],
            epochs=settings["epochs"],
            callbacks=callbacks,
            progress=False,
        )
        jax.block_until_ready(result.state)
        assert result.state.steps_taken == settings["steps"] * settings["epochs"]

    def with_callbacks(units: int) -> None:
        run(
            units,
            px.callbacks.EarlyStopping("loss", patience=10**6),
            px.callbacks.LearningRate(schedule),
            px.callbacks.Csv(table),
        )

    parameters = count_parameters(task.init(jax.random.key(0)))
    return {"with callbacks": with_callbacks, "without": run}, {"parameters": parameters}


if __name__ == "__main__":
    serve(build)
