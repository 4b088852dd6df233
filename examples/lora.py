"""LoRA: fine-tune a network by adapters of low rank, its own weights frozen.

A perceptron that reads upright digits is to read digits lying on their side. Each of its matrices
`W` (in, out) gets an adapter `A B` of rank r, of shapes (in, r) and (r, out), and the network
computes with `W + A B`. `B` starts at zero, so training starts from the base network exactly. Only
the adapters are trained: the frozen matrices have no gradient and no optimizer state.

The functions `init_adapters` and `adapted` work for any tree of parameters. Of a base network of
0.56 million parameters the adapters of rank 4 have 2.2 %.

    plurax train examples/lora.py --devices cores
    plurax train examples/lora.py --experiment.base runs/base --experiment.rank 8
    python examples/lora.py

`base` is a file or folder of weights, such as the output of a run of the base network; without one
it is trained first, in seconds.

Source: Hu et al. 2021, https://arxiv.org/abs/2106.09685.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from jaxtyping import Array, Float, Key, PyTree
from sklearn.datasets import load_digits

import plurax as px

WIDTH, CLASSES = 512, 10


# --- Adapters of any network ------------------------------------------------------------------


def init_adapters(key: Key[Array, ""], base: PyTree, rank: int) -> PyTree:
    """An adapter for each matrix of `base`: a tree like it, with an empty dict for the others."""
    leaves, structure = jax.tree.flatten(base)

    def adapter(key: Key[Array, ""], leaf: Array) -> dict[str, Array]:
        if leaf.ndim != 2:
            return {}
        fan_in, fan_out = leaf.shape
        down = jax.random.normal(key, (fan_in, rank)) / fan_in**0.5
        return {"down": down, "up": jnp.zeros((rank, fan_out))}

    keys = jax.random.split(key, len(leaves))
    return jax.tree.unflatten(structure, map(adapter, keys, leaves))


def adapted(params: PyTree) -> PyTree:
    """The parameters of the base network with what the adapters add to them."""

    def add(leaf: Array, adapter: dict[str, Array]) -> Array:
        return leaf + adapter["down"] @ adapter["up"] if adapter else leaf

    return jax.tree.map(add, params["base"], params["lora"])


def with_adapters(task: px.Task, rank: int) -> px.Task:
    """A task that trains adapters of another task's network, whose parameters are frozen."""

    def init(key: Key[Array, ""]) -> dict[str, PyTree]:
        base_key, lora_key = jax.random.split(key)
        base = task.init(base_key)
        return {"base": base, "lora": init_adapters(lora_key, base, rank)}

    def predict(params: PyTree, inputs: PyTree) -> PyTree:
        assert task.predict is not None
        return task.predict(adapted(params), inputs)

    lora = px.Task(
        init=init,
        loss=lambda params, batch, keys: task.loss(adapted(params), batch, keys),
        predict=predict,
    )
    return px.freeze(lora, "base/*")


# --- The network and its data -----------------------------------------------------------------


def init(key: Key[Array, ""]) -> list[dict[str, Array]]:
    """64 - 512 - 512 - 512 - 10."""
    sizes = (64, WIDTH, WIDTH, WIDTH, CLASSES)
    keys = jax.random.split(key, len(sizes) - 1)
    return [
        {"weight": jax.random.normal(k, (a, b)) * (2 / a) ** 0.5, "bias": jnp.zeros(b)}
        for k, a, b in zip(keys, sizes[:-1], sizes[1:], strict=True)
    ]


def logits(params: list[dict[str, Array]], images_BHW: Float[Array, "B 8 8"]) -> Array:
    """Unnormalised log probabilities (B, 10)."""
    x_BD = images_BHW.reshape(len(images_BHW), -1)
    for layer in params[:-1]:
        x_BD = jax.nn.relu(x_BD @ layer["weight"] + layer["bias"])
    return x_BD @ params[-1]["weight"] + params[-1]["bias"]


def loss(params: Any, batch: dict[str, Array], keys: Any) -> tuple[Array, dict[str, Array]]:
    """Cross entropy and accuracy of each example."""
    out_BC = logits(params, batch["image"])
    right_B = (jnp.argmax(out_BC, axis=1) == batch["label"]).astype(jnp.float32)
    entropy_B = optax.softmax_cross_entropy_with_integer_labels(out_BC, batch["label"])
    return entropy_B, {"accuracy": right_B}


def base_task() -> px.Task:
    """The network without adapters."""
    return px.Task(
        init=init, loss=loss, predict=lambda params, inputs: logits(params, inputs["image"])
    )


def load_data(*, sideways: bool) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Digits to train on and held-out ones, upright or on their side."""
    digits = load_digits()
    images = (digits.images / 16).astype(np.float32)
    if sideways:
        images = np.rot90(images, axes=(1, 2)).copy()
    labels = digits.target.astype(np.int32)
    cut = 1437
    return (
        {"image": images[:cut], "label": labels[:cut]},
        {"image": images[cut:], "label": labels[cut:]},
    )


def train_base(epochs: int = 15) -> PyTree:
    """Parameters of the network, trained on upright digits."""
    data, held_out = load_data(sideways=False)
    result = px.fit(
        base_task(), optax.adamw(1e-3), data, batch_size=128, epochs=epochs, evaluation=held_out,
        progress=False,
    )  # fmt: skip
    return jax.device_get(result.state.params)


def experiment(base: str = "", rank: int = 4, epochs: int = 30) -> px.Experiment:
    """Fine-tune on digits that lie on their side.

    **Arguments:** `base`, weights of the network, by default trained first; `rank`, of the
    adapters.
    """
    weights = px.weights.load(base) if base else train_base()
    task = px.start_from(
        with_adapters(base_task(), rank), weights, rename=lambda name: f"base/{name}", strict=False
    )
    data, held_out = load_data(sideways=True)
    return px.Experiment(
        task=task,
        optimizer=optax.adam(3e-3),
        data=data,
        evaluation=held_out,
        plan=px.Plan(data=jax.device_count()),
        epochs=epochs,
        batch_size=128,
        seed=0,
    )


def main(rank: int = 4, output: str = "runs/lora") -> None:
    """Train, and write the network with its adapters added to it, in the form of the base."""
    made = experiment(rank=rank)
    before = px.compile(made.task, made.optimizer, made.plan, made.evaluation)
    accuracy = before.evaluate(before.init(), made.evaluation)["accuracy"]
    result = px.fit(**vars(made))
    params = result.program.to_canonical(result.state).params
    sizes = [sum(leaf.size for leaf in jax.tree.leaves(params[name])) for name in ("lora", "base")]
    print(f"trained {sizes[0]:,} parameters beside {sizes[1]:,} frozen ones; held-out accuracy "
          f"{accuracy:.1%} -> {result.history[-1]['eval_accuracy']:.1%}")  # fmt: skip
    px.weights.save(adapted(params), f"{output}/merged.safetensors")


if __name__ == "__main__":
    tyro.cli(main)
