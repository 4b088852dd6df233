"""An MLP under TensorFlow's `ParameterServerStrategy`: workers and servers are processes here.

Set up as TensorFlow's tutorial on parameter servers recommends: asynchronous steps by
`ClusterCoordinator.schedule`, several in one `tf.function` without a return value, shuffled and
prefetched data on each worker, one dispatcher thread more than there are workers, a constant
learning rate, and SGD applied on the servers, which read no value back.

`settings["way"]` is how the matrices lie on the servers: `whole`, one after another on each;
`concatenated`, all cut by `MinSizePartitioner` and put together where a worker reads them;
`by shards`, cut likewise and multiplied shard by shard.

Sides: `update`, a step of training; `step`, the same with a clock on the workers; `exchange`, all
parameters pulled and as many bytes pushed, and nothing computed between.
"""

import itertools
import multiprocessing
import os
import socket
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# Failures of servers reach the coordinator; the tutorial asks for it.
os.environ.setdefault("GRPC_FAIL_FAST", "use_caller")

import numpy as np
import tensorflow as tf

from benchmarks.workers.serve import Settings, Side, SkippedError, serve

MIN_SHARD_BYTES = 256 << 10
"""As the documentation of `ParameterServerStrategy` has it."""
EXAMPLES = 64
"""Batches of data on each worker, read again and again."""

Cluster = dict[str, list[str]]
Weights = list[tuple[list[tf.Variable], tf.Variable]]
"""Of each layer the shards of its matrix, of which there may be one, and its bias."""


def build(settings: Settings) -> tuple[dict[str, Side], dict[str, Any]]:
    if settings["platform"] != "cpu":
        raise SkippedError("parameter servers are measured on processors")
    cluster = _start(settings)
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(cluster), rpc_layer="grpc"
    )
    partitioner = tf.distribute.experimental.partitioners.MinSizePartitioner(
        MIN_SHARD_BYTES, max_shards=settings["servers"]
    )
    strategy = tf.distribute.ParameterServerStrategy(
        resolver, variable_partitioner=None if settings["way"] == "whole" else partitioner
    )
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        weights = _weights(settings["widths"])
    variables = [shard for matrix, bias in weights for shard in (*matrix, bias)]
    sides = _sides(settings, strategy, coordinator, weights, variables)
    loads = {variable.device: 0 for variable in variables}
    for variable in variables:
        loads[variable.device] += variable.shape.num_elements()
    facts = {"parameters": sum(loads.values()), "loads": list(loads.values())}
    return sides, facts | {"way": settings["way"], "sides": list(sides)}


# ---- the cluster -------------------------------------------------------------------------------


def _start(settings: Settings) -> Cluster:
    """Start the servers and the workers; they end with this process."""
    counts = {"worker": settings["workers"], "ps": settings["servers"]}
    ports = iter(_ports(sum(counts.values())))
    cluster = {
        job: [f"127.0.0.1:{next(ports)}" for _ in range(count)] for job, count in counts.items()
    }
    spawn = multiprocessing.get_context("spawn")
    for job, addresses in cluster.items():
        for index in range(len(addresses)):
            arguments = (cluster, job, index, settings)
            spawn.Process(target=_server, args=arguments, daemon=True).start()
    return cluster


def _ports(count: int) -> list[int]:
    """Ports that are free now, all at once so that none comes twice."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def _server(cluster: Cluster, job: str, index: int, settings: Settings) -> None:
    cores, workers = settings["cores"], settings["workers"]
    config = tf.compat.v1.ConfigProto(
        inter_op_parallelism_threads=max(cores, workers + 1),
        intra_op_parallelism_threads=max(1, cores // workers),
    )
    spec = tf.train.ClusterSpec(cluster)
    server = tf.distribute.Server(spec, job_name=job, task_index=index, config=config)
    parent = multiprocessing.parent_process()
    assert parent is not None, server
    parent.join()  # as long as there is somebody to serve
    os._exit(0)


# ---- the network -------------------------------------------------------------------------------


def _weights(widths: list[int]) -> Weights:
    """He initialisation. All matrices before all biases: TensorFlow deals variables in turn."""
    rng = np.random.default_rng(0)
    layers = list(itertools.pairwise(widths))
    matrices = [
        tf.Variable((rng.standard_normal(shape) * (2 / shape[0]) ** 0.5).astype(np.float32))
        for shape in layers
    ]
    biases = [tf.Variable(np.zeros(width, np.float32)) for _, width in layers]
    cut = [list(getattr(matrix, "variables", [matrix])) for matrix in matrices]
    return list(zip(cut, biases, strict=True))


def _loss(weights: Weights, by_shards: bool, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    for number, (matrix, bias) in enumerate(weights):
        if by_shards:
            parts = tf.split(x, [shard.shape[0] for shard in matrix], axis=1)
            x = tf.add_n([part @ shard for part, shard in zip(parts, matrix, strict=True)]) + bias
        else:
            x = x @ tf.concat(matrix, axis=0) + bias
        if number < len(weights) - 1:
            x = tf.nn.relu(x)
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, x))


def _push(variables: list[tf.Variable], deltas: list[tf.Tensor], rate: float) -> list[Any]:
    """Subtract `rate` times each delta, where the variable is."""
    updates = []
    for variable, delta in zip(variables, deltas, strict=True):
        with tf.device(variable.device):
            # The rate as a constant there, and no value back, as Keras' optimizers do.
            alpha = tf.constant(rate, tf.float32)
            updates.append(
                tf.raw_ops.ResourceApplyGradientDescent(
                    var=variable.handle, alpha=alpha, delta=delta
                )
            )
    return updates


# ---- the sides ---------------------------------------------------------------------------------


def _sides(
    settings: Settings,
    strategy: tf.distribute.Strategy,
    coordinator: Any,
    weights: Weights,
    variables: list[tf.Variable],
) -> dict[str, Side]:
    packed, by_shards = settings["packed"], settings["way"] == "by shards"
    batches = iter(
        coordinator.create_per_worker_dataset(
            tf.function(
                lambda: strategy.distribute_datasets_from_function(lambda _: _dataset(settings))
            )
        )
    )

    def replica(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = _loss(weights, by_shards, x, y)
        gradients = tape.gradient(loss, variables)
        updates = _push(variables, gradients, settings["learning_rate"])
        with tf.control_dependencies(updates):
            return tf.timestamp()

    def steps(iterator: Any) -> list[tf.Tensor]:
        ends = [tf.timestamp()]
        for _ in range(packed):
            x, y = next(iterator)
            ends.append(strategy.run(replica, args=(x, y)))
        return ends

    @tf.function
    def update(iterator: Any) -> None:
        steps(iterator)

    @tf.function
    def timed(iterator: Any) -> list[tf.Tensor]:
        return steps(iterator)

    @tf.function
    def exchange() -> tf.Tensor:
        found: list[tf.Tensor] = []
        for _ in range(packed):
            with tf.control_dependencies(found):  # one after another
                found.append(strategy.run(_exchange, args=(variables,)))
        return tf.stack(found)

    def schedule(function: Any, units: int, *args: Any) -> list[Any]:
        assert units % packed == 0, (units, packed)
        values = [coordinator.schedule(function, args=args) for _ in range(units // packed)]
        coordinator.join()
        return values

    def run_step(units: int) -> dict[str, list[float]]:
        ends = [one.fetch() for one in schedule(timed, units, batches)]
        return {"step": [float(gap) for one in ends for gap in np.diff(one)]}

    def run_exchange(units: int) -> dict[str, list[float]]:
        found = np.concatenate([one.fetch() for one in schedule(exchange, units)])
        return {"pull": found[:, 0].tolist(), "push": found[:, 1].tolist()}

    return {
        "update": lambda units: schedule(update, units, batches),
        "step": run_step,
        "exchange": run_exchange,
    }


def _exchange(variables: list[tf.Variable]) -> tf.Tensor:
    """Pull all and push as many bytes, with the seconds of both; the parameters stay."""
    start = tf.timestamp()
    with tf.control_dependencies([start]):
        values = [variable.read_value() for variable in variables]
    # An element of each: to wait for a read alone would leave the value on the server.
    arrived = tf.add_n([tf.reshape(value, [-1])[0] for value in values])
    with tf.control_dependencies([arrived]):
        pulled = tf.timestamp()
    with tf.control_dependencies([pulled]):
        updates = _push(variables, [tf.identity(value) for value in values], 0.0)
    with tf.control_dependencies(updates):
        pushed = tf.timestamp()
    return tf.stack([pulled - start, pushed - pulled])


def _dataset(settings: Settings) -> tf.data.Dataset:
    batch, widths = settings["batch"], settings["widths"]
    rng = np.random.default_rng(0)
    x = rng.standard_normal((EXAMPLES * batch, widths[0]), np.float32)
    y = rng.integers(0, widths[-1], len(x), np.int32)
    data = tf.data.Dataset.from_tensor_slices((x, y)).cache().shuffle(len(x)).repeat()
    return data.batch(batch, drop_remainder=True).prefetch(tf.data.AUTOTUNE)


if __name__ == "__main__":
    serve(build)
