"""The transformer of `examples/language_model.py` in Keras on JAX, with `ModelParallel`.

`settings["mesh"]` are the sizes of the axes `batch` and `model`. One side, `step`.
"""

import os
from typing import Any

os.environ["KERAS_BACKEND"] = "jax"

import jax
import keras
import numpy as np
from keras import layers

from benchmarks.workers.serve import Settings, Side, SkippedError, serve

BYTES = 256
DROPOUT = 0.1
CLIP = 1.0


def build(settings: Settings) -> tuple[dict[str, Side], dict[str, Any]]:
    _distribute(settings)
    model = _network(settings)
    model.compile(
        keras.optimizers.AdamW(
            settings["learning_rate"],
            weight_decay=settings["weight_decay"],
            beta_2=0.95,
            epsilon=1e-8,
            global_clipnorm=CLIP,
        ),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    rng = np.random.default_rng(0)
    windows = rng.integers(0, BYTES, (settings["batch"], settings["window"] + 1), np.int32)
    text, after = windows[:, :-1], windows[:, 1:]

    def run(units: int) -> None:
        for _ in range(units):
            model.train_on_batch(text, after)

    loss = float(model.train_on_batch(text, after))
    return {"step": run}, {"parameters": model.count_params(), "first_loss": loss}


def _distribute(settings: Settings) -> None:
    """Devices, and where weights lie: as in plurax's plan."""
    sizes = settings["mesh"]
    wanted = sizes[0] * sizes[1]
    if settings["platform"] == "cpu":
        jax.config.update("jax_num_cpu_devices", wanted)
        jax.config.update("jax_platforms", "cpu")
    if len(jax.devices()) < wanted:
        raise SkippedError(f"needs {wanted} devices, and this JAX sees {len(jax.devices())}")
    devices = keras.distribution.list_devices()[:wanted]
    mesh = keras.distribution.DeviceMesh(sizes, ["batch", "model"], devices)
    lies = keras.distribution.LayoutMap(mesh)
    for name in ("query", "key", "value"):
        lies[f".*attention/{name}/kernel"] = (None, "model", None)
    lies[".*attention/attention_output/kernel"] = ("model", None, None)
    lies[".*perceptron_in/kernel"] = (None, "model")
    lies[".*perceptron_out/kernel"] = ("model", None)
    lies["^output/kernel"] = (None, "model")
    keras.distribution.set_distribution(
        keras.distribution.ModelParallel(layout_map=lies, batch_dim_name="batch")
    )


class Positions(layers.Layer):
    """Adds a learned vector to each token."""

    def build(self, shape: tuple[int, ...]) -> None:
        self.position = self.add_weight(shape=shape[1:], initializer="normal", name="position")

    def call(self, x: Any) -> Any:
        return x + self.position


def _network(settings: Settings) -> keras.Model:
    """The network of the example, layer for layer."""
    width, heads = settings["width"], settings["heads"]
    text = keras.Input((settings["window"],), dtype="int32")
    x = Positions()(layers.Embedding(BYTES, width)(text))
    for place in range(settings["depth"]):
        normal = layers.RMSNormalization(epsilon=1e-6)(x)
        attention = layers.MultiHeadAttention(
            heads, width // heads, use_bias=False, name=f"block_{place}_attention"
        )
        added = attention(normal, normal, use_causal_mask=True)
        x = x + layers.Dropout(DROPOUT)(added)
        normal = layers.RMSNormalization(epsilon=1e-6)(x)
        hidden = layers.Dense(4 * width, use_bias=False, name=f"block_{place}_perceptron_in")
        back = layers.Dense(width, use_bias=False, name=f"block_{place}_perceptron_out")
        added = back(keras.ops.square(keras.ops.relu(hidden(normal))))
        x = x + layers.Dropout(DROPOUT)(added)
    x = layers.RMSNormalization(epsilon=1e-6)(x)
    head = layers.Dense(BYTES, use_bias=False, kernel_initializer="zeros", name="output")
    return keras.Model(text, head(x))


if __name__ == "__main__":
    serve(build)
