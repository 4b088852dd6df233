"""Handwritten digits: an MLP, or a small residual convolutional net, on all devices.

The data are scikit-learn's 1,797 scanned digits, 8 × 8 pixels with 17 grey levels. A fifth of them
is held out, in equal parts of each digit.

    plurax train examples/digits.py --devices cores
    plurax train examples/digits.py --experiment.model conv --plan.microbatches 2
"""

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Key, PyTree
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import plurax as px

CLASSES = 10


def dense(key: Key[Array, ""], fan_in: int, fan_out: int) -> PyTree:
    """He initialisation of a matrix `(fan_in, fan_out)` and a zero bias."""
    weight = jax.random.normal(key, (fan_in, fan_out)) * (2 / fan_in) ** 0.5
    return {"weight": weight, "bias": jnp.zeros(fan_out)}


def conv(key: Key[Array, ""], channels_in: int, channels_out: int) -> PyTree:
    """He initialisation of a 3 × 3 kernel `(3, 3, channels_in, channels_out)` and a zero bias."""
    kernel = jax.random.normal(key, (3, 3, channels_in, channels_out))
    return {"kernel": kernel * (2 / (9 * channels_in)) ** 0.5, "bias": jnp.zeros(channels_out)}


def convolve(layer: PyTree, x_HWC: Float[Array, "H W C"]) -> Float[Array, "H W D"]:
    """3 × 3 convolution of one image, same size."""
    y = jax.lax.conv_general_dilated(
        x_HWC[None], layer["kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return y[0] + layer["bias"]


# --- The two networks, for one image ----------------------------------------------------------


def init_mlp(key: Key[Array, ""]) -> PyTree:
    """64 - 256 - 256 - 10."""
    sizes = (64, 256, 256, CLASSES)
    keys = jax.random.split(key, len(sizes) - 1)
    return [dense(*args) for args in zip(keys, sizes[:-1], sizes[1:], strict=True)]


def mlp(params: PyTree, image_HW: Float[Array, "8 8"], key: Key[Array, ""] | None) -> Array:
    """Logits `(10,)`; a fifth of the first hidden layer is dropped where a key is given."""
    x = image_HW.reshape(-1)
    for index, layer in enumerate(params):
        x = x @ layer["weight"] + layer["bias"]
        if index < len(params) - 1:
            x = jax.nn.relu(x)
        if index == 0 and key is not None:
            x = jnp.where(jax.random.bernoulli(key, 0.8, x.shape), x / 0.8, 0)
    return x


def init_conv(key: Key[Array, ""], channels: int = 24, blocks: int = 2) -> PyTree:
    """A 3 × 3 stem, residual blocks of two convolutions, and a linear head."""
    keys = jax.random.split(key, 2 + 2 * blocks)
    return {
        "stem": conv(keys[0], 1, channels),
        "blocks": [
            {"first": conv(a, channels, channels), "second": conv(b, channels, channels)}
            for a, b in zip(keys[2::2], keys[3::2], strict=True)
        ],
        "head": dense(keys[1], channels * 16, CLASSES),
    }


def residual_conv(
    params: PyTree, image_HW: Float[Array, "8 8"], key: Key[Array, ""] | None
) -> Array:
    """Logits `(10,)`; a fifth of the features is dropped where a key is given."""
    x_HWC = jax.nn.relu(convolve(params["stem"], image_HW[..., None]))
    for block in params["blocks"]:
        y_HWC = jax.nn.relu(convolve(block["first"], x_HWC))
        x_HWC = jax.nn.relu(x_HWC + convolve(block["second"], y_HWC))
    pooled = x_HWC.reshape(4, 2, 4, 2, -1).max((1, 3)).reshape(-1)
    if key is not None:
        pooled = jnp.where(jax.random.bernoulli(key, 0.8, pooled.shape), pooled / 0.8, 0)
    return pooled @ params["head"]["weight"] + params["head"]["bias"]


# --- The task ---------------------------------------------------------------------------------


def make_task(model: Literal["mlp", "conv"]) -> px.Task:
    """Cross entropy and accuracy of one image, lifted to a batch."""
    init, net = {"mlp": (init_mlp, mlp), "conv": (init_conv, residual_conv)}[model]

    def loss(params: PyTree, example: PyTree, key: Key[Array, ""] | None) -> tuple[Array, PyTree]:
        logits = net(params, example["image"], key)
        right = jnp.argmax(logits) == example["label"]
        entropy = optax.softmax_cross_entropy_with_integer_labels(logits, example["label"])
        return entropy, {"accuracy": right.astype(jnp.float32)}

    return px.Task(
        init=init,
        loss=px.per_example(loss),
        evaluate=jax.vmap(lambda params, example: loss(params, example, None), (None, 0)),
        predict=lambda params, inputs: jax.vmap(lambda x: net(params, x, None))(inputs["image"]),
    )


def load_data() -> tuple[PyTree, PyTree]:
    """Training and held-out data: `image (N, 8, 8)` in [0, 1] and `label (N,)`."""
    digits = load_digits()
    images = (digits.images / 16).astype(np.float32)
    labels = digits.target.astype(np.int32)
    split = train_test_split(images, labels, test_size=0.2, random_state=0, stratify=labels)
    train_x, test_x, train_y, test_y = split
    return {"image": train_x, "label": train_y}, {"image": test_x, "label": test_y}


def experiment(model: Literal["mlp", "conv"] = "mlp", epochs: int = 40) -> px.Experiment:
    """Train on all devices that JAX sees.

    **Arguments:** `model`, which network; `epochs`, over which the learning rate decays to zero.
    """
    train, held_out = load_data()
    batch_size = 128
    steps = epochs * -(-len(train["label"]) // batch_size)
    schedule = optax.warmup_cosine_decay_schedule(0.0, 3e-3, steps // 10, steps)
    return px.Experiment(
        task=make_task(model),
        optimizer=optax.chain(
            optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=1e-3)
        ),
        data=train,
        evaluation=held_out,
        batch_size=batch_size,
        epochs=epochs,
        plan=px.Plan(data=jax.device_count()),
    )
