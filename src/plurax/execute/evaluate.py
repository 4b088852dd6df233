"""Evaluate: means of loss and metrics over any number of examples, each counted once."""

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
from plurax.execute.gradient import (
    Totals,
    evaluation,
    losses_and_metrics,
    split_output,
    with_precision,
)
from plurax.execute.placement import Placed, Placement, chunks, leading_dim
from plurax.execute.rows import Rows, abstract_rows, index_rows
from plurax.execute.totals import over_data
from plurax.members import Members
from plurax.mesh import split_rows
from plurax.metrics.metric import Metric
from plurax.plan import Plan, Precision
from plurax.sources.adapt import adapt
from plurax.state import TrainState
from plurax.task import Task
from plurax.tree import with_rows

Evaluation = Callable[[PyTree, PyTree, Rows], Totals]
Finish = dict[str, Callable[[PyTree], Any]]


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
    return Placement(
        with_rows(batch, size), Plan(data=plan.data).padded_size(size), split_rows(mesh)
    )


def evaluate_data(
    run: Callable[[Placed], Totals],
    placement: Placement,
    data: PyTree | Iterable[PyTree],
    finish: Finish,
    members: Members | None = None,
) -> dict[str, Any]:
    """Return weighted means and metrics by name over all of `data`.

    `data` is a tree of arrays or an iterable of them. `run` returns without waiting for the device;
    sums over its totals are in float64 on the host. Means are floats, or of `members` arrays
    `(members,)`; a metric is what its `finish` returns. A mean is NaN, not an error, where no
    example has weight. Raises `BatchError` for no data, `TaskError` for what is no metric.
    """
    data = adapt("evaluation", data)
    # Dispatch all chunks, then fetch: the host waits once, not once per chunk.
    parts = [run(placement.place(batch)) for batch in chunks(data, placement.size)]
    if not parts:
        raise errors.batch_is_empty()

    count = members.count if members else None

    def total(*values: Any) -> np.ndarray:
        whole = np.sum(np.asarray(values, np.float64), axis=0)
        return np.asarray(whole if count is None else whole[:count])

    sums: Totals = jax.tree.map(total, *fetch(parts))
    weight = np.where(sums.weight == 0, math.nan, sums.weight)
    found: dict[str, Any] = {}
    for name, value in {"loss": sums.loss, **sums.metrics}.items():
        if name in finish:
            found |= _finished(name, finish[name], value, count)
        else:
            found[name] = value / weight
    scalar = members is None
    return {k: float(v) if scalar and np.ndim(v) == 0 else v for k, v in found.items()}


def _finished(
    name: str, finish: Callable[[PyTree], Any], sums: PyTree, members: int | None
) -> dict[str, np.ndarray]:
    """Return a metric's number or array from its sums, or those of a dict as `name_key`."""
    if members is not None:
        each = [
            _finished(name, finish, jax.tree.map(lambda leaf, m=m: leaf[m], sums), None)
            for m in range(members)
        ]
        return {key: np.stack([one[key] for one in each]) for key in each[0]}
    value = finish(sums)
    named = {f"{name}_{k}": v for k, v in value.items()} if isinstance(value, dict) else {"": value}
    arrays = {key or name: np.asarray(value) for key, value in named.items()}
    for key, array in arrays.items():
        if array.dtype.kind not in "biuf":
            raise errors.TaskError(
                f"the metric {key!r}: `finish` returned a {type(value).__name__}; it must return a "
                "number, an array of numbers, or a dict of them."
            )
    return arrays


def finish_of(task: Task, precision: Precision, placement: Placement, state: TrainState) -> Finish:
    """Return for each metric over the data the function of its sums; found by tracing shapes.

    `state` is that of one network, abstract.
    """
    evaluated = losses_and_metrics(task, precision)
    rows = abstract_rows(placement.abstract())
    _, metrics = jax.eval_shape(evaluated, state.params, state.model_state, rows)
    return {name: one.finish for name, one in metrics.items() if isinstance(one, Metric)}


def metric_names(
    task: Task, precision: Precision, placement: Placement, state: TrainState, evaluated: bool
) -> list[str]:
    """Return the names of the metrics of an epoch's row; found by tracing shapes.

    A metric over the data may be a dict once it is finished, so it has a pattern too: `eval_auc_*`.

    **Arguments:** `state`, that of one network, abstract; `evaluated`, whether there are evaluation
    data.
    """
    rows = abstract_rows(placement.abstract())

    def training(params: PyTree, model_state: PyTree, rows: Rows) -> dict[str, Any]:
        states = (model_state,) if task.stateful else ()
        extra = (rows.mask,) if task.coupled else ()
        loss = with_precision(task.loss, precision, task.stateful)
        output = loss(params, *states, rows.batch, rows.keys, *extra)
        return split_output(task, output, model_state, rows.mask.shape[0])[1]

    of_steps = jax.eval_shape(training, state.params, state.model_state, rows)
    names = ["loss", "grad_norm", *of_steps]
    if not evaluated:
        return names
    evaluate = losses_and_metrics(task, precision)
    _, metrics = jax.eval_shape(evaluate, state.params, state.model_state, rows)
    over_data = [f"{name}_*" for name, one in metrics.items() if isinstance(one, Metric)]
    return [*names, *(f"eval_{name}" for name in ("loss", *metrics, *over_data))]


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
