"""A start for an experiment of your own: a small network that learns a function of two numbers.

    plurax train template.py
    plurax train template.py --epochs 10 --plan.data 2 --experiment.width 128
    plurax predict runs/template --inputs inputs.npz    # an array named x in it

Put your data, your network and your loss in place of these.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import plurax as px


def load_data(rows: int, seed: int) -> dict[str, np.ndarray]:
    """Arrays by name; the leading dim of each counts the examples."""
    x = np.random.default_rng(seed).uniform(-2, 2, size=(rows, 2)).astype(np.float32)
    return {"x": x, "y": np.sin(3 * x[:, 0]) * x[:, 1]}


def make_task(width: int) -> px.Task:
    """What is trained: initial parameters, a loss for each example, predictions."""

    def init(key):
        first, second = jax.random.split(key)
        return {
            "hidden": {"w": jax.random.normal(first, (2, width)), "b": jnp.zeros(width)},
            "out": jax.random.normal(second, (width,)) / width**0.5,
        }

    def predict(params, inputs):
        hidden = jnp.tanh(inputs["x"] @ params["hidden"]["w"] + params["hidden"]["b"][None])
        return hidden @ params["out"]

    def loss(params, batch, keys):
        """Losses, and metrics to log, one for each example. `keys` are for dropout and the like."""
        error = predict(params, batch) - batch["y"]
        return error**2, {"absolute_error": jnp.abs(error)}

    return px.Task(init=init, loss=loss, predict=predict)


def experiment(width: int = 64, learning_rate: float = 1e-2) -> px.Experiment:
    """What `plurax train` trains. Its arguments are options: `--experiment.width 128`."""
    return px.Experiment(
        task=make_task(width),
        optimizer=optax.adam(learning_rate),
        data=load_data(4000, seed=0),
        evaluation=load_data(500, seed=1),
        batch_size=100,
        epochs=5,
        plan=px.Plan(data=1),
    )
