"""Two noisy spirals: a hundred networks in the time of one, and what they know together.

A hundred points on two spirals; networks of one hidden layer. Each member of the population trains
on its own bootstrap sample of the points. The report draws the network of seed 0, that of the seed
that agrees with it least, the bootstrapped ensemble, and where its members contradict each other:
where their borders leave the points, left and right, each network is sure of its own, and the
ensemble is not. Above and below there are no points either, but all networks say the same there:
that members agree does not prove that they know.

    plurax train examples/spirals.py --members.seeds 100 --plan.member 2
"""

from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, Key, PyTree

import plurax as px

HIDDEN = 32
EXTENT = (-3.0, 3.0, -3.0, 3.0)
"""Far wider than the points: what nobody has seen is to be in the picture."""
GRID = 121


def spirals(
    points: int = 100, noise: float = 0.08, seed: int = 0
) -> tuple[Float[np.ndarray, "N 2"], Int[np.ndarray, "N"]]:
    """Points on two spirals of one turn, and on which of them each lies; float32, int32."""
    rng = np.random.default_rng(seed)
    radius = np.sqrt(np.linspace(0, 1, points))
    side = 2 * rng.integers(0, 2, points) - 1
    angle = 2 * np.pi * radius
    x = (radius * side)[:, None] * np.stack([np.cos(angle), np.sin(angle)], axis=1)
    x += noise * rng.normal(size=(points, 2))
    return x.astype(np.float32), (side > 0).astype(np.int32)


def init(key: Key[Array, ""]) -> PyTree:
    """2 - 32 - 2, He initialisation."""
    first, second = jax.random.split(key)
    return {
        "in": jax.random.normal(first, (2, HIDDEN)),
        "bias": jnp.zeros(HIDDEN),
        "out": jax.random.normal(second, (HIDDEN, 2)) * (2 / HIDDEN) ** 0.5,
        "out_bias": jnp.zeros(2),
    }


def predict(params: PyTree, inputs: PyTree) -> Float[Array, "B 2"]:
    """Logits of the two spirals."""
    hidden = jax.nn.relu(inputs["x"] @ params["in"] + params["bias"])
    return hidden @ params["out"] + params["out_bias"]


def loss(params: PyTree, batch: PyTree, keys: Key[Array, "B"]) -> tuple[Array, dict[str, Array]]:
    """Cross entropy and accuracy of each point."""
    logits = predict(params, batch)
    right = (jnp.argmax(logits, axis=-1) == batch["y"]).astype(jnp.float32)
    entropy = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    return entropy, {"accuracy": right}


TASK = px.Task(init=init, loss=loss, predict=predict)


def experiment(points: int = 100, noise: float = 0.08, steps: int = 600) -> px.Experiment:
    """A hundred bootstrapped networks, every step over all points."""
    x, y = spirals(points, noise)
    return px.Experiment(
        task=TASK,
        optimizer=optax.adam(1e-2),
        data={"x": x, "y": y},
        batch_size=points,
        shuffle=False,
        epochs=steps,
        report_every=max(1, steps // 15),
        members=px.Members(100, resample=px.ensemble.bootstrap()),
        plan=px.Plan(member=jax.device_count()),
    )


def report(made: px.Experiment, result: px.train.Fit, directory: Path) -> Iterator[Path]:
    """Draw two networks trained on the same points beside the bootstrapped ensemble."""
    program = result.program
    steps = int(result.state.step[0])
    same = px.fit(
        made.task,
        made.optimizer,
        made.data,
        plan=program.plan,
        members=px.Members(program.members.count),
        batch_size=made.batch_size,
        shuffle=made.shuffle,
        epochs=steps,
        report_every=steps,
        progress=False,
    )
    sides = np.linspace(EXTENT[0], EXTENT[1], GRID, dtype=np.float32)
    plane = {"x": np.stack(np.meshgrid(sides, sides), axis=-1).reshape(-1, 2)}
    points, labels = made.data["x"], made.data["y"]

    def confidence(logits: Float[np.ndarray, "K N 2"]) -> Float[np.ndarray, "G G"]:
        return px.ensemble.combine_classification(logits).probabilities[:, 1].reshape(GRID, GRID)

    alone = [confidence(logits) for logits in same.program.predict(same.state, plane)]
    other = int(np.argmax([np.abs(one - alone[0]).mean() for one in alone]))
    together = px.ensemble.combine_classification(program.predict(result.state, plane))
    panels = {
        "one network, seed 0": alone[0],
        f"one network, seed {other}": alone[other],
        f"{len(alone)} bootstrapped networks": together.probabilities[:, 1].reshape(GRID, GRID),
    }
    doubt = {"what they do not know": together.epistemic.reshape(GRID, GRID)}
    px.ensemble.draw_confidence(
        panels, EXTENT, points, labels, directory / "confidence.png", epistemic=doubt
    )
    yield directory / "confidence.png"
