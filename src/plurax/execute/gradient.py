"""Weighted sums of loss, metrics and gradient over some rows; the task's contract is checked."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from plurax import errors, tree
from plurax.execute.rows import Rows
from plurax.jaxpr.batch_minor import batch_minor
from plurax.jaxpr.remat import order_recomputation, rematerialized
from plurax.plan import BatchDim, Precision, Remat
from plurax.task import Task
from plurax.validate import place_of

RESERVED = frozenset({"loss", "weight", "grad_norm", "examples", "skipped"})


class Totals(NamedTuple):
    """Sums over rows; the sum of two is the total of both sets of rows.

    **Fields:** `weight`, scalar, the sum of the rows' weights; `loss` and each of `metrics`,
    scalars, weighted sums; `grads`, the gradient of `loss`, a tree like the parameters (or `()`).
    """

    weight: Float[Array, ""]
    loss: Float[Array, ""]
    metrics: dict[str, Float[Array, ""]]
    grads: PyTree


def cast_floating(values: PyTree, dtype: jnp.dtype) -> PyTree:
    """Cast the floating leaves of a tree; leave the others as they are."""

    def cast(leaf: Array) -> Array:
        return leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    return jax.tree.map(cast, values)


def with_precision(
    fun: Callable[..., Any], precision: Precision, stateful: bool
) -> Callable[..., Any]:
    """`fun(params, [model_state,] *rest)` computing in `precision`.

    Gradients keep the parameters' dtype. Model state is not cast: a running average in bfloat16
    would stand still.
    """
    if precision == "float32":
        return fun

    def computing(*args: PyTree) -> Any:
        kept = 1 if stateful else None
        dtype = jnp.dtype(precision)
        return fun(*(a if i == kept else cast_floating(a, dtype) for i, a in enumerate(args)))

    return computing


def check_losses(output: Any, size: int, where: str) -> tuple[Array, dict[str, Array]]:
    """Split what a loss returned into losses `(size,)` and metrics; raise `TaskError`."""
    losses, metrics = output if isinstance(output, tuple) and len(output) == 2 else (output, {})
    if not isinstance(metrics, dict):
        raise errors.loss_wrong_structure(
            where,
            f"a pair whose second item is a {type(metrics).__name__}",
            "(B,) losses, or ((B,) losses, {name: (B,) metrics})",
        )
    if not hasattr(losses, "shape"):
        raise errors.loss_wrong_structure(
            where,
            f"a {type(losses).__name__}",
            "an array of shape (B,), or ((B,) losses, {name: (B,) metrics})",
        )
    if losses.shape == () or (losses.shape == (1,) and size != 1):
        raise errors.loss_is_scalar(where, losses.shape, size)
    for part, value in {"": losses, **{f", metric {k!r},": v for k, v in metrics.items()}}.items():
        if jnp.shape(value) != (size,):
            raise errors.loss_wrong_shape(where + part, jnp.shape(value), size)
    if not jnp.issubdtype(losses.dtype, jnp.floating):
        raise errors.loss_not_floating(where, str(losses.dtype))
    for name in metrics:
        if name in RESERVED:
            raise errors.metric_name_taken(name, RESERVED)
    return losses, metrics


def weighted_sums(
    losses: Float[Array, "N"], metrics: dict[str, Array], weight: Array | None, rows: Rows
) -> Totals:
    """Sum over the real rows, in float32 or wider. `grads` is left empty."""
    dtype = jnp.promote_types(losses.dtype, jnp.float32)
    weights = jnp.ones(rows.mask.shape, dtype) if weight is None else weight.astype(dtype)

    def total(values: Array) -> Array:
        return jnp.sum(jnp.where(rows.mask, weights * values.astype(dtype), 0))

    return Totals(
        weight=jnp.sum(jnp.where(rows.mask, weights, 0)),
        loss=total(losses),
        metrics={name: total(value) for name, value in metrics.items()},
        grads=(),
    )


def check_weight(task: Task, batch: PyTree, size: int) -> Array | None:
    """The weight of each row, shape `(size,)`, or None where the task gives none."""
    if task.weight is None:
        return None
    weight = task.weight(batch)
    if jnp.shape(weight) != (size,):
        raise errors.loss_wrong_shape("Task.weight", jnp.shape(weight), size)
    return weight


def gradient(
    task: Task,
    precision: Precision,
    batch_dim: BatchDim | None = None,
    remat: Remat = "none",
    *,
    ordered: bool = False,
) -> Callable[[PyTree, PyTree, Rows], tuple[Totals, PyTree]]:
    """`(params, model_state, rows) -> (totals, model_state)`, the gradient included.

    Computed with the batch where the task has it, or in the minor dim (`batch_dim="minor"`); what
    the backward pass computes again says `remat`; `ordered`, that it waits for its cotangents here,
    and not where the function is walked.
    """
    loss = rematerialized(with_precision(task.loss, precision, task.stateful), remat)

    def total_loss(
        params: PyTree, model_state: PyTree, rows: Rows
    ) -> tuple[Array, tuple[Totals, PyTree]]:
        size = rows.mask.shape[0]
        extra = (rows.mask,) if task.coupled else ()
        states = (model_state,) if task.stateful else ()
        output = loss(params, *states, rows.batch, rows.keys, *extra)
        losses, metrics, model_state = split_output(task, output, model_state, size)
        totals = weighted_sums(losses, metrics, check_weight(task, rows.batch, size), rows)
        return totals.loss, (totals, model_state)

    def run(params: PyTree, model_state: PyTree, rows: Rows) -> tuple[Totals, PyTree]:
        grads, (totals, model_state) = jax.grad(total_loss, has_aux=True)(params, model_state, rows)
        return totals._replace(grads=grads), model_state

    run_ = batch_minor(run, batch_argument=2) if batch_dim == "minor" else run
    return order_recomputation(run_) if ordered and remat != "none" else run_


def split_output(
    task: Task, output: Any, model_state: PyTree, size: int
) -> tuple[Array, dict[str, Array], PyTree]:
    """What a loss returned as losses `(size,)`, metrics and the next model state.

    Raises `TaskError` where it is not what a loss returns.
    """
    where = place_of(task.loss)
    if task.stateful:
        if not (isinstance(output, tuple) and len(output) == 3):
            raise errors.loss_wrong_structure(
                f"Task.loss{where} of a stateful task",
                f"a {type(output).__name__}",
                "(losses, metrics, model_state)",
            )
        model_state = _next_state(output[2], model_state)
        output = output[:2]
    return (*check_losses(output, size, f"Task.loss{where}"), model_state)


def _next_state(new: PyTree, old: PyTree) -> PyTree:
    """The new model state, in the dtypes of the old: it is carried on. Raises `TaskError`."""
    structures: list[Any] = [jax.tree.structure(new), jax.tree.structure(old)]
    same = structures[0] == structures[1] and all(
        jnp.shape(a) == b.shape
        for a, b in zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True)
    )
    if not same:
        raise errors.model_state_changed(tree.describe(old), tree.describe(new))
    return jax.tree.map(lambda a, b: jnp.asarray(a, b.dtype), new, old)


def evaluation(task: Task, precision: Precision) -> Callable[[PyTree, PyTree, Rows], Totals]:
    """`(params, model_state, rows) -> totals` without gradient, dropout off where the task can."""
    if task.evaluate is None and task.coupled:
        raise errors.coupled_needs_evaluate()
    where = "Task.loss" if task.evaluate is None else "Task.evaluate"
    fun = with_precision(task.evaluate or task.loss, precision, task.stateful)

    def run(params: PyTree, model_state: PyTree, rows: Rows) -> Totals:
        size = rows.mask.shape[0]
        states = (model_state,) if task.stateful else ()
        keys = () if task.evaluate is not None else (rows.keys,)
        output = fun(params, *states, rows.batch, *keys)
        place = place_of(task.evaluate or task.loss)
        losses, metrics = check_losses(output, size, where + place)
        return weighted_sums(losses, metrics, check_weight(task, rows.batch, size), rows)

    return run


def check_parameters(params: PyTree) -> None:
    """Raise `TaskError` where a parameter has no gradient."""
    for path, leaf in tree.named_leaves(params).items():
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            raise errors.parameter_not_floating(path, str(leaf.dtype))
