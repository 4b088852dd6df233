"""Compute weighted means of loss and metrics over any number of examples, each counted once."""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import PyTree

from plurax import errors
from plurax.distributed.global_arrays import fetch
from plurax.execute.gradient import Totals, evaluation
from plurax.execute.placement import Placed, Placement, chunks, leading_dim
from plurax.execute.rows import Rows, index_rows
from plurax.execute.totals import over_data
from plurax.mesh import split_rows
from plurax.plan import Plan, Precision
from plurax.sources.adapt import adapt
from plurax.state import TrainState
from plurax.task import Task

Evaluation = Callable[[PyTree, PyTree, Rows], Totals]


def device_evaluation(
    evaluate: Evaluation, axis_size: int, reduce: Callable[[Totals], Totals] | None = None
) -> Callable[[PyTree, PyTree, PyTree, Any], Totals]:
    """Return `(params, model_state, batch, count) -> totals` on one device of `data`.

    Call it inside `shard_map`, with the device's own rows; `reduce` sums over the `axis_size`
    devices (default `over_data`).
    """
    reduce = reduce or over_data(axis_size)

    def local(params: PyTree, model_state: PyTree, batch: PyTree, count: Any) -> Totals:
        size = jax.tree.leaves(batch)[0].shape[0]
        first = jax.lax.axis_index("data") * size if axis_size > 1 else 0
        rows = index_rows(batch, jax.random.key(0), count, first)
        return reduce(evaluate(params, model_state, rows))

    return local


def evaluation_placement(batch: PyTree, plan: Plan, mesh: Mesh) -> Placement:
    """Return the placement of one evaluation call: a microbatch, to fit where training fits.

    A pipeline takes all microbatches of a batch in one call.
    """
    if plan.pipeline > 1:
        return Placement(batch, plan.padded_size(leading_dim(batch)), split_rows(mesh))
    size = -(-leading_dim(batch) // plan.microbatches)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype), batch)
    return Placement(like, Plan(data=plan.data).padded_size(size), split_rows(mesh))


def weighted_means(
    run: Callable[[Placed], Totals], placement: Placement, data: PyTree | Iterable[PyTree]
) -> dict[str, np.ndarray]:
    """Return means by name over all of `data`, a tree of arrays or an iterable of them.

    Scalars, or `(members,)` where the totals have a dim of members. `run` returns without waiting
    for the device; sums over its totals are in float64 on the host. A mean is NaN, not an error,
    where no example has weight. Raises `BatchError` for no data.
    """
    data = adapt("evaluation", data)
    # Dispatch all chunks, then fetch: the host waits once, not once per chunk.
    parts = [run(placement.place(batch)) for batch in chunks(data, placement.size)]
    if not parts:
        raise errors.batch_is_empty()
    host = fetch(parts)

    def total(values: list[Any]) -> np.ndarray:
        return np.sum(np.asarray(values, np.float64), axis=0)

    weight = total([part.weight for part in host])
    weight = np.where(weight == 0, math.nan, weight)
    sums = {"loss": total([part.loss for part in host])}
    for name in host[0].metrics:
        sums[name] = total([part.metrics[name] for part in host])
    return {name: value / weight for name, value in sums.items()}


def check_evaluation(
    task: Task,
    precision: Precision,
    placement: Placement,
    state: TrainState,
    data: PyTree | Iterable[PyTree],
) -> None:
    """Raise the errors of evaluating `data`, from the shapes of its first rows alone.

    `state` is that of one network, abstract.
    """
    data = adapt("evaluation", data)
    if isinstance(data, Iterator):
        raise errors.data_one_shot()
    first = next(chunks(data, placement.size), None)
    if first is None:
        raise errors.batch_is_empty()
    placement.check(first)
    rows = jax.eval_shape(
        lambda batch: index_rows(batch, jax.random.key(0), jnp.int32(placement.size)),
        placement.abstract(),
    )
    jax.eval_shape(evaluation(task, precision), state.params, state.model_state, rows)
