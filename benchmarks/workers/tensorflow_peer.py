"""The rock domains in TensorFlow: MirroredStrategy over logical devices, and Keras `predict`.

`settings["work"]` is `train` (sides `step`, `epoch` and `epoch by fit`) or `predict` (sides `few`
and `all`).
"""

import math
import os
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import keras
import numpy as np
import tensorflow as tf

from benchmarks.workers.serve import Settings, Side, SkippedError, serve


class Domains(keras.Model):
    """The network of `examples/domains.py`, layer for layer."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.frequencies = tf.constant(settings["frequencies"], tf.float32)
        self.middle = tf.constant(settings["extent"], tf.float32) / 2
        width = settings["width"]
        self.read = keras.layers.Dense(width)
        self.mix = [keras.layers.Dense(width) for _ in range(3)]
        self.names = keras.layers.Dense(settings["classes"])

    def call(self, xyz_cm: tf.Tensor) -> tf.Tensor:
        metres = tf.cast(xyz_cm, tf.float32) / 100 - self.middle
        phase = 2 * math.pi * metres @ self.frequencies
        x = tf.concat([metres / 500, tf.sin(phase), tf.cos(phase)], axis=1)
        h = tf.nn.gelu(self.read(x), approximate=True)
        for layer in self.mix:
            h = h + tf.nn.gelu(layer(_normalised(h)), approximate=True)
        return self.names(_normalised(h))


def _normalised(h: tf.Tensor) -> tf.Tensor:
    return h * tf.math.rsqrt(tf.reduce_mean(h * h, axis=1, keepdims=True) + 1e-6)


def build(settings: Settings) -> tuple[dict[str, Side], dict[str, Any]]:
    work = _train if settings["work"] == "train" else _predict
    network, sides = work(settings, _devices(settings))
    return sides, {"parameters": network.count_params()}


def _devices(settings: Settings) -> list[str]:
    wanted = settings["devices"]
    if settings["platform"] == "gpu":
        found = [device.name for device in tf.config.list_logical_devices("GPU")]
        if len(found) < wanted:
            raise SkippedError(f"needs {wanted} GPUs, and this TensorFlow sees {len(found)}")
        return found[:wanted]
    cpu = tf.config.list_physical_devices("CPU")[0]
    logical = [tf.config.LogicalDeviceConfiguration()] * wanted
    tf.config.set_logical_device_configuration(cpu, logical)
    return [f"CPU:{i}" for i in range(wanted)]


def _train(settings: Settings, devices: list[str]) -> tuple[keras.Model, dict[str, Side]]:
    """A loop of our own in `tf.function`, which is faster than Keras `fit`; and `fit`."""
    size, steps = settings["batch"], settings["steps"]
    strategy = tf.distribute.MirroredStrategy(devices)
    with strategy.scope():
        network = Domains(settings)
        optimizer = keras.optimizers.AdamW(
            settings["learning_rate"], weight_decay=settings["weight_decay"], epsilon=1e-8
        )
        network(np.zeros((1, 3), np.int32))  # makes the variables
        optimizer.build(network.trainable_variables)
        # jit_compile is not to be had: XLA refuses variables mirrored over devices.
        fitted = Domains(settings)
        fitted.compile(
            keras.optimizers.AdamW(
                settings["learning_rate"], weight_decay=settings["weight_decay"], epsilon=1e-8
            ),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            jit_compile=False,
        )

    def replica(x: tf.Tensor, y: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, network(x))
            loss = tf.reduce_sum(losses) / size
        variables = network.trainable_variables
        # Sums the gradients over the replicas.
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    @tf.function
    def train(batches: tf.distribute.DistributedIterator, count: tf.Tensor) -> None:
        for _ in tf.range(count):
            strategy.run(replica, args=next(batches))

    x, y = _examples(settings, size * steps)
    one = tf.data.Dataset.from_tensors((x[:size], y[:size])).cache().repeat()
    whole = tf.data.Dataset.from_tensor_slices((x, y)).cache().shuffle(size * steps)
    whole = whole.batch(size, drop_remainder=True).prefetch(tf.data.AUTOTUNE)
    step, epoch = (
        iter(strategy.experimental_distribute_dataset(data.prefetch(tf.data.AUTOTUNE)))
        for data in (one, whole.repeat())
    )
    return network, {
        "step": lambda units: train(step, tf.constant(units)),
        "epoch": lambda units: train(epoch, tf.constant(units * steps)),
        "epoch by fit": lambda units: fitted.fit(whole, epochs=units, verbose=0),
    }


def _predict(settings: Settings, devices: list[str]) -> tuple[keras.Model, dict[str, Side]]:
    network = Domains(settings)
    network.compile(jit_compile=settings.get("jit", False))
    network(np.zeros((1, 3), np.int32))  # makes the variables

    def over(rows: int) -> Side:
        inputs, _ = _examples(settings, rows)

        def run(units: int) -> None:
            for _ in range(units):
                network.predict(inputs, batch_size=settings["batch"], verbose=0)

        return run

    return network, {"few": over(settings["rows"]), "all": over(settings["all_rows"])}


def _examples(settings: Settings, count: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    extent_cm = (100 * np.asarray(settings["extent"])).astype(np.int32)
    x = rng.integers(0, extent_cm, (count, 3), np.int32)
    return x, rng.integers(0, settings["classes"], count, np.int32)


if __name__ == "__main__":
    serve(build)
