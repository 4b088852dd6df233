"""Sum loss, metrics and gradient over rows, and check what the task's functions return.

The loss returns one value per row and the library does the sum, so that padding, microbatches and
devices all add up to the same total. Example, 3 examples padded to 4 rows, weights from the task:

    losses   (4,)   [ 2.0   1.0   5.0   2.0 ]     row 3 repeats example 0
    weight   (4,)   [ 1.0   1.0   0.5   1.0 ]
    mask     (4,)   [ True  True  True  False ]
    Totals.loss     2.0 + 1.0 + 2.5 = 5.5         selected by `where`, not multiplied by 0
    Totals.weight   1.0 + 1.0 + 0.5 = 2.5
    mean loss       5.5 / 2.5 = 2.2               divided once per step, in `step.py`
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from plurax import errors, tree
from plurax.errors import hints
from plurax.execute.penalties import PENALTIES, PenalizedLoss
from plurax.execute.rows import Rows
from plurax.freezing import trained, with_frozen
from plurax.jaxpr.batch_minor import batch_minor
from plurax.jaxpr.remat import order_recomputation, rematerialized
from plurax.metrics.metric import Metric
from plurax.plan import BatchDim, Precision, Remat
from plurax.task import Task
from plurax.tree import sum_dtype
from plurax.validate import place_of, without_axes

RESERVED = frozenset({"loss", "weight", "grad_norm", "examples", "skipped", "kind", "step", "epoch",
                      "seconds", "examples_per_second", "members", "estimate"})  # fmt: skip


class Totals(NamedTuple):
    """Sums over rows; adding two gives the totals of both sets of rows.

    **Fields:** `weight`, scalar, the sum of the rows' weights; `loss` and each of `metrics`,
    scalars, weighted sums, and in evaluation for each `Metric` the tree of its sums; `grads`, the
    gradient of `loss`, a tree like the parameters that are not frozen (or `()`).
    """

    weight: Float[Array, ""]
    loss: Float[Array, ""]
    metrics: dict[str, PyTree]
    grads: PyTree


def cast_floating(values: PyTree, dtype: jnp.dtype) -> PyTree:
    """Cast the floating leaves of a tree; leave the others unchanged."""

    def cast(leaf: Array) -> Array:
        return leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    return jax.tree.map(cast, values)


def with_precision(
    fun: Callable[..., Any], precision: Precision, stateful: bool
) -> Callable[..., Any]:
    """Return `fun(params, [model_state,] *rest)` that casts its arguments to `precision`.

    Gradients keep the parameters' dtype. Model state is not cast: a small increment of a running
    average would round to nothing in bfloat16.
    """
    fun = _with_notes(without_axes(fun), 2 if stateful else 1)
    if precision == "float32":
        return fun

    def computing(*args: PyTree) -> Any:
        kept = 1 if stateful else None
        dtype = jnp.dtype(precision)
        return fun(*(a if i == kept else cast_floating(a, dtype) for i, a in enumerate(args)))

    return computing


def _with_notes(fun: Callable[..., Any], place: int) -> Callable[..., Any]:
    """Return a function of the task whose exceptions say what it was called with.

    `place`: which of its arguments is the batch, or the inputs.
    """

    @functools.wraps(fun)
    def noted(*args: PyTree) -> Any:
        try:
            return fun(*args)
        except errors.PluraxError:
            raise
        except Exception as error:
            if not getattr(error, "__notes__", None):
                batch, keys = args[place], args[place + 1 : place + 2]
                fields = [*map(str, batch)] if isinstance(batch, dict) else []
                leaves = tree.named_leaves(batch).items()
                given = ", ".join(f"{k} {leaf.dtype}{list(leaf.shape)}" for k, leaf in leaves)
                if keys:
                    given += f", and keys {list(jnp.shape(keys[0]))}, one for each example"
                error.add_note(hints.of_a_function(error, given.strip(), fields))
            raise

    return noted


def check_losses(output: Any, size: int, where: str) -> tuple[Array, dict[str, Any]]:
    """Split a loss's output into losses `(size,)` and a dict of metrics, `(size,)` or `Metric`s.

    Raises `TaskError` for another structure, shape or dtype, and for a reserved metric name.
    """
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
        raise errors.TaskError(
            f"{where} returned a value of shape {losses.shape}; it must return one loss per "
            f"example, shape ({size},), and leave every sum and mean to plurax: that is what makes "
            "uneven batches, microbatches and any number of devices give the same update. Two ways "
            "out:\n  1. remove the mean over the batch: return losses of shape (B,);\n  2. write "
            "the loss for one example and lift it: Task(loss=plurax.per_example(f)) with f(params, "
            "example, key) -> scalar.\nIf the loss couples examples (contrastive, batch "
            "statistics), still return one loss per example and say Task(..., coupled=True)."
        )
    if jnp.shape(losses) != (size,):
        raise errors.loss_wrong_shape(where, jnp.shape(losses), size)
    for name, value in metrics.items():
        if isinstance(value, Metric):
            check_metric(where, name, value, size)
        elif isinstance(value, dict | list | tuple) or jnp.shape(value) != (size,):
            what = f"is a {type(value).__name__}"
            if not isinstance(value, dict | list | tuple):
                what = f"has shape {jnp.shape(value)}"
            raise errors.TaskError(
                f"{where}, metric {name!r}, {what}; it must be an array of shape ({size},), one "
                "number per example. Sum or average over tokens or pixels inside the loss, not "
                "over the batch; or give each of several numbers a name of its own: "
                f"{{'{name} 0': ..., '{name} 1': ...}}."
            )
    if not jnp.issubdtype(losses.dtype, jnp.floating):
        raise errors.TaskError(
            f"{where} returned dtype {losses.dtype}; a loss must be floating point."
        )
    for name, value in metrics.items():
        if not isinstance(value, Metric) and jnp.iscomplexobj(value):
            raise errors.TaskError(
                f"{where}, metric {name!r}: it is complex, and metrics are averaged as real "
                "numbers. Return two of them, value.real and value.imag, or jnp.abs(value)."
            )
        if name in RESERVED or not isinstance(name, str):
            raise errors.TaskError(
                f"{where} returned a metric called {name!r}. Its name has to be a text, and none "
                f"of those that plurax reports itself: {', '.join(sorted(RESERVED))}."
            )
        check_name(where, name)
    return losses, metrics


def check_name(where: str, name: str) -> None:
    """Raise `TaskError` where a row would have two numbers of that name."""
    if name.startswith("eval_") or name in ("loss_best", "loss_worst"):
        what = "a metric of the evaluation" if name.startswith("eval_") else "the loss of members"
        raise errors.TaskError(
            f"{where} returned a metric called {name!r}, as {what} is called in the rows of a run, "
            "which has one number of a name; choose another one."
        )


def check_metric(where: str, name: str, metric: Any, size: int) -> None:
    """Raise `TaskError` unless it is a `Metric` with one contribution per row."""
    if not (isinstance(metric, Metric) and callable(metric.finish)):
        raise errors.TaskError(
            f"{where}, metric {name!r}: it is a {type(metric).__name__}, and must be a "
            "plurax.metrics.Metric, whose `finish` is a function: one of those that plurax.metrics "
            "builds, or Metric(contributions, finish). A mean over examples is "
            "plurax.metrics.mean(values)."
        )
    for path, leaf in tree.named_leaves(metric.contributions).items():
        if jnp.shape(leaf)[:1] != (size,):
            inside = f" {path!r}" if path else ""
            raise errors.TaskError(
                f"{where}, metric {name!r}: its contribution{inside} has shape {jnp.shape(leaf)}; "
                f"it must have the leading dim {size}, one contribution per example. Leave the sum "
                "over examples to plurax."
            )


def without_data_set(metrics: dict[str, Any]) -> dict[str, Array]:
    """Return the metrics that a training step averages: those that are no `Metric`."""
    return {name: value for name, value in metrics.items() if not isinstance(value, Metric)}


def weighted_sums(
    losses: Float[Array, "N"], metrics: dict[str, Any], weight: Array | None, rows: Rows
) -> Totals:
    """Return the weighted sums over the real rows, in float32 or wider; `grads` is `()`."""
    dtype = sum_dtype(losses.dtype)
    weights = jnp.ones(rows.mask.shape, dtype) if weight is None else weight.astype(dtype)

    def total(values: Array) -> Array:
        return jnp.sum(jnp.where(rows.mask, weights * values.astype(dtype), 0))

    def total_of_dims(values: Array) -> Array:
        dtype, dims = sum_dtype(values.dtype), (-1,) + (1,) * (values.ndim - 1)
        weighted = weights.astype(dtype).reshape(dims) * values.astype(dtype)
        return jnp.sum(jnp.where(rows.mask.reshape(dims), weighted, 0), axis=0)

    def sums(value: Any) -> PyTree:
        if isinstance(value, Metric):
            return jax.tree.map(total_of_dims, value.contributions)
        return total(value)

    return Totals(
        weight=jnp.sum(jnp.where(rows.mask, weights, 0)),
        loss=total(losses),
        metrics={name: sums(value) for name, value in metrics.items()},
        grads=(),
    )


def check_weight(task: Task, batch: PyTree, size: int) -> Array | None:
    """Return the weight of each row, shape `(size,)`, or None for a task without weights.

    Raises `TaskError` for another shape.
    """
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
    penalties_apart: bool = False,
) -> Callable[[PyTree, PyTree, Rows], tuple[Totals, PyTree]]:
    """Return `(params, model_state, rows) -> (totals, model_state)`, the gradient included.

    **Arguments:** `batch_dim="minor"` rewrites the computation to hold the batch in the minor dim;
    `remat` selects what the backward pass recomputes; with `ordered`, recomputation waits for the
    cotangents (a data dependency inserted here; without it the caller that interprets the jaxpr
    inserts one). With `penalties_apart` the gradient lacks that of penalties, and the metrics have
    the loss's derivatives by them, a list of scalars, under `PENALTIES`, if there are any.
    """
    loss = with_precision(task.loss, precision, task.stateful)

    def run(params: PyTree, state: PyTree, rows: Rows) -> tuple[Totals, PyTree]:
        extra = (rows.mask,) if task.coupled else ()
        args = (*((state,) if task.stateful else ()), rows.batch, rows.keys, *extra)
        penalized = PenalizedLoss.of(loss, params, *args) if penalties_apart else None

        def total_loss(some: PyTree, offsets: list[Array]) -> tuple[Array, tuple[Totals, PyTree]]:
            fun = penalized.with_offsets(offsets) if penalized and offsets else loss
            output = rematerialized(fun, remat)(with_frozen(some, params), *args)
            size = rows.mask.shape[0]
            losses, metrics, model_state = split_output(task, output, state, size)
            totals = weighted_sums(losses, metrics, check_weight(task, rows.batch, size), rows)
            return totals.loss, (totals, model_state)

        offsets = [] if penalized is None else penalized.offsets()
        (grads, by), (totals, model_state) = jax.grad(total_loss, argnums=(0, 1), has_aux=True)(
            trained(task.frozen, params), offsets
        )
        metrics = totals.metrics | ({PENALTIES: by} if by else {})
        return totals._replace(grads=grads, metrics=metrics), model_state

    run_ = batch_minor(run, batch_argument=2) if batch_dim == "minor" else run
    return order_recomputation(run_) if ordered and remat != "none" else run_


def split_output(
    task: Task, output: Any, model_state: PyTree, size: int
) -> tuple[Array, dict[str, Array], PyTree]:
    """Split a loss's output into losses `(size,)`, metrics and the next model state.

    Raises `TaskError` for any other structure, shape or dtype.
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
    losses, metrics = check_losses(output, size, f"Task.loss{where}")
    return losses, without_data_set(metrics), model_state


def _next_state(new: PyTree, old: PyTree) -> PyTree:
    """Return the new model state in the dtypes of the old, since a loop carries it.

    Raises `TaskError` where structure or shapes differ.
    """
    structures: list[Any] = [jax.tree.structure(new), jax.tree.structure(old)]
    same = structures[0] == structures[1] and all(
        jnp.shape(a) == b.shape
        for a, b in zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True)
    )
    if not same:
        raise errors.TaskError(
            "Task.loss returned a model state of another structure or shape than it was given; it "
            f"is carried from step to step and must stay alike.\n  given:\n{tree.describe(old)}\n  "
            f"returned:\n{tree.describe(new)}"
        )
    return jax.tree.map(lambda a, b: jnp.asarray(a, b.dtype), new, old)


def evaluation(task: Task, precision: Precision) -> Callable[[PyTree, PyTree, Rows], Totals]:
    """Return `(params, model_state, rows) -> totals` without gradient.

    It calls `Task.evaluate` if there is one (dropout off), else `Task.loss`, and `Task.metrics`.
    Raises `TaskError` for a coupled task without `evaluate`.
    """
    evaluated = losses_and_metrics(task, precision)

    def run(params: PyTree, model_state: PyTree, rows: Rows) -> Totals:
        losses, metrics = evaluated(params, model_state, rows)
        weight = check_weight(task, rows.batch, rows.mask.shape[0])
        return weighted_sums(losses, metrics, weight, rows)

    return run


def losses_and_metrics(
    task: Task, precision: Precision
) -> Callable[[PyTree, PyTree, Rows], tuple[Array, dict[str, Any]]]:
    """Return `(params, model_state, rows) -> (losses, metrics)` of evaluation, not yet added up."""
    if task.evaluate is None and task.coupled:
        raise errors.TaskError(
            "evaluate() averages over all examples, and the loss of a coupled task has no meaning "
            "for one example; give Task(evaluate=...) a function evaluate(params, batch) -> (B,) "
            "losses, or ((B,) losses, {name: (B,) metrics})."
        )
    where = "Task.loss" if task.evaluate is None else "Task.evaluate"
    fun = with_precision(task.evaluate or task.loss, precision, task.stateful)
    more = task.metrics and with_precision(task.metrics, precision, task.stateful)

    def run(params: PyTree, model_state: PyTree, rows: Rows) -> tuple[Array, dict[str, Any]]:
        size = rows.mask.shape[0]
        states = (model_state,) if task.stateful else ()
        keys = () if task.evaluate is not None else (rows.keys,)
        output = fun(params, *states, rows.batch, *keys)
        place = place_of(task.evaluate or task.loss)
        losses, metrics = check_losses(output, size, where + place)
        if more is not None:
            found = more(params, *states, rows.batch)
            where_ = f"Task.metrics{place_of(task.metrics)}"  # type: ignore[arg-type]
            metrics = with_metrics(metrics, found, size, where_)
        return losses, metrics

    return run


def device_predict(task: Task, precision: Precision) -> Callable[[PyTree, PyTree, PyTree], PyTree]:
    """Return `(params, model_state, inputs) -> outputs` on one device, with its own rows.

    The function raises `TaskError` where the outputs do not have one row per input.
    """
    if task.predict is None:
        raise errors.TaskError(
            "this task has no predict function; give Task(predict=...) a function predict(params, "
            "inputs) -> outputs with leading dim B."
        )
    predict = with_precision(task.predict, precision, task.stateful)

    def local(params: PyTree, model_state: PyTree, inputs: PyTree) -> PyTree:
        states = (model_state,) if task.stateful else ()
        outputs = predict(params, *states, inputs)
        size = jax.tree.leaves(inputs)[0].shape[0]
        for leaf in jax.tree.leaves(outputs):
            if leaf.shape[:1] != (size,):
                raise errors.predict_wrong_shape(leaf.shape, size)
        return outputs if precision == "float32" else cast_floating(outputs, jnp.dtype("float32"))

    return local


def with_metrics(metrics: dict[str, Any], more: Any, size: int, where: str) -> dict[str, Any]:
    """Return the metrics of a loss and those of `Task.metrics` together.

    Raises `TaskError` where `more` is no dict of `Metric`s, or a name is taken.
    """
    if not isinstance(more, dict):
        raise errors.TaskError(
            f"{where} returned a {type(more).__name__}; it must return a dict of metrics by name: "
            '{"auc": plurax.metrics.auc(scores, batch["y"])}.'
        )
    for name, metric in more.items():
        check_metric(where, name, metric, size)
        if name in RESERVED or name in metrics:
            raise errors.TaskError(
                f"{where}: the name {name!r} is taken by a metric of the loss or by what plurax "
                "reports itself; choose another one."
            )
        check_name(where, name)
    return {**metrics, **more}


def check_parameters(params: PyTree) -> None:
    """Raise `TaskError` where a parameter is no array, or has no gradient."""
    if params is None:
        raise errors.TaskError(
            "Task.init returned None, and must return the parameters, a tree of arrays. Does it "
            "end without a `return`? A task without parameters returns {}."
        )
    for path, leaf in tree.named_leaves(params).items():
        if not hasattr(leaf, "dtype"):
            raise errors.TaskError(
                f"Task.init: the parameter {path!r} is a Python {type(leaf).__name__}, and "
                "parameters are arrays. Write jnp.asarray(value, jnp.float32) for a number that is "
                "trained, and keep the rest out of params: close over it."
            )
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            raise errors.TaskError(
                f"Task.init: the parameter {path!r} has dtype {leaf.dtype}, which has no gradient. "
                "Keep what is not trained out of params: close over it, or return it as model "
                "state (Task(..., stateful=True, coupled=True))."
            )


def check_trained(params: PyTree) -> None:
    """Raise `TaskError` where a parameter that is trained has a dtype too short for steps."""
    for path, leaf in tree.named_leaves(params).items():
        if jnp.finfo(leaf.dtype).bits < 16:  # type: ignore[no-untyped-call]
            raise errors.TaskError(
                f"Task.init: the parameter {path!r} has dtype {leaf.dtype}, in which the steps of "
                "an optimizer would be rounded away. Keep it in float32 or bfloat16, and cast it "
                f"in the loss: params[...].astype(jnp.{leaf.dtype}); or freeze it, "
                f"plurax.freeze(task, {path!r})."
            )
