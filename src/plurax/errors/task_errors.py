"""Tasks whose functions do not keep their contract."""

import linecache
import re
from collections.abc import Iterable

from plurax.errors.kinds import TaskError


def loss_is_scalar(where: str, shape: tuple[int, ...], batch: int) -> TaskError:
    return TaskError(
        f"{where} returned a value of shape {shape}; it must return one loss per example, "
        f"shape ({batch},), and leave every sum and mean to plurax: that is what makes uneven "
        "batches, microbatches and any number of devices give the same update. Two ways out:\n"
        "  1. remove the mean over the batch: return losses of shape (B,);\n"
        "  2. write the loss for one example and lift it: "
        "Task(loss=plurax.per_example(f)) with f(params, example, key) -> scalar.\n"
        "If the loss couples examples (contrastive, batch statistics), still return one loss per "
        "example and say Task(..., coupled=True)."
    )


def axis_is_unbound(where: str, axis: str) -> TaskError:
    return TaskError(
        f"a function of the task{where} communicates over an axis {axis!r}, as functions for "
        "jax.pmap do. plurax does every sum over devices, and a coupled loss sees the examples of "
        "all of them: leave out jax.lax.pmean, psum and the like, and axis_name in batch norm."
    )


def loss_wrong_shape(where: str, shape: tuple[int, ...], batch: int) -> TaskError:
    return TaskError(
        f"{where} returned shape {shape}; it must be ({batch},), one number per example. "
        "Sum or average over the other dims (tokens, pixels) inside the loss, not over the batch."
    )


def loss_is_coupled(where: str, line: str) -> TaskError:
    return TaskError(
        f"{where}: the loss of an example depends on the rows of other examples{_meet(line)}. It "
        "would change with the number of devices and of microbatches. Two ways out:\n"
        "  1. examples are to be compared (contrastive, batch statistics): say Task(..., "
        "coupled=True) and write loss(params, batch, keys, mask). It sees all examples of a "
        "microbatch across all devices, and must leave out the rows where mask is false;\n"
        "  2. they are not: compute with the dims of an example alone (axis=1 and on) and with "
        "constants of the data set, or write the loss for one example: "
        "Task(loss=plurax.per_example(f))."
    )


def rows_are_mixed(where: str, line: str) -> TaskError:
    return TaskError(
        f"{where}: row i of its result must depend on row i of the batch alone, and depends on "
        f"other rows{_meet(line)}. Rows are computed in chunks and on several devices, and the "
        "result would change with their number. Use constants of the data set or statistics that "
        "training stored (Task(..., stateful=True, coupled=True)), not those of the batch."
    )


def rows_may_mix(where: str, line: str) -> str:
    return (
        f"{where}: by its trace the result of an example depends on other examples{_meet(line)}, "
        "and plurax cannot run it here to be sure. If it does, the result changes with the number "
        "of devices and of microbatches: say Task(..., coupled=True); plurax.verify shows it."
    )


def _meet(line: str) -> str:
    """Return where rows meet, from a line `model.py:12:16 (loss)`, with what is written there."""
    found = re.fullmatch(r"(.*):(\d+):\d+ \((.*)\)", line)
    if found is None:
        return ""
    code = linecache.getline(found[1], int(found[2])).strip()
    return f", which meet at {found[1]}:{found[2]}" + (f": {code}" if code else "")


def loss_not_floating(where: str, dtype: str) -> TaskError:
    return TaskError(f"{where} returned dtype {dtype}; a loss must be floating point.")


def loss_wrong_structure(where: str, got: str, expected: str) -> TaskError:
    return TaskError(
        f"{where} returned {got}, which is not what a task returns; expected {expected}."
    )


def metric_name_taken(name: str, taken: Iterable[str]) -> TaskError:
    return TaskError(
        f"Task.loss returned a metric called {name!r}, which plurax reports itself; "
        f"choose another name than {', '.join(sorted(taken))}."
    )


def metrics_not_a_dict(where: str, kind: str) -> TaskError:
    return TaskError(
        f"{where} returned a {kind}; it must return a dict of metrics by name: "
        '{"auc": plurax.metrics.auc(scores, batch["y"])}.'
    )


def metric_is_none(where: str, name: str, kind: str) -> TaskError:
    return TaskError(
        f"{where}, metric {name!r}: it is a {kind}, and must be a plurax.metrics.Metric, whose "
        "`finish` is a function: one of those that plurax.metrics builds, or "
        "Metric(contributions, finish). A mean over examples is plurax.metrics.mean(values)."
    )


def metric_wrong_shape(
    where: str, name: str, path: str, shape: tuple[int, ...], batch: int
) -> TaskError:
    inside = f" {path!r}" if path else ""
    return TaskError(
        f"{where}, metric {name!r}: its contribution{inside} has shape {shape}; it must have the "
        f"leading dim {batch}, one contribution per example. Leave the sum over examples to plurax."
    )


def metric_named_twice(where: str, name: str) -> TaskError:
    return TaskError(
        f"{where}: the name {name!r} is taken by a metric of the loss or by what plurax reports "
        "itself; choose another one."
    )


def metric_not_finished(name: str, kind: str) -> TaskError:
    return TaskError(
        f"the metric {name!r}: `finish` returned a {kind}; it must return a number, an array of "
        "numbers, or a dict of them."
    )


def needs_a_task(what: str, kind: str) -> TaskError:
    return TaskError(
        f"{what} got a {kind} for its task, and needs a plurax.Task. Of a function of "
        f"hyperparameters, call it inside: lambda hyper: {what}(make_task(hyper), ...)."
    )


def frozen_not_patterns(given: object) -> TaskError:
    return TaskError(
        f"frozen={given!r}: give patterns of paths, plurax.freeze(task, 'embed/*', 'head/bias')."
    )


def frozen_unused(pattern: str, paths: Iterable[str]) -> TaskError:
    return TaskError(
        f"frozen={pattern!r} matches no parameter; their paths are {', '.join(paths)}. "
        "A pattern matches a whole path: 'embed/*' is all of `embed`, at any depth."
    )


def label_unused(pattern: str, paths: Iterable[str]) -> TaskError:
    return TaskError(
        f"labels: the pattern {pattern!r} matches no parameter; their paths are {', '.join(paths)}."
    )


def label_missing(path: str) -> TaskError:
    return TaskError(
        f"labels: no pattern matches the parameter {path!r}; add one, or give labels(default=...)."
    )


def all_frozen(patterns: Iterable[str]) -> TaskError:
    return TaskError(
        f"the patterns {', '.join(map(repr, patterns))} freeze every parameter, and none is left "
        "to train."
    )


def parameter_not_an_array(path: str, kind: str) -> TaskError:
    return TaskError(
        f"Task.init: the parameter {path!r} is a Python {kind}, and parameters are arrays. Write "
        "jnp.asarray(value, jnp.float32) for a number that is trained, and keep the rest out of "
        "params: close over it."
    )


def parameter_not_floating(path: str, dtype: str) -> TaskError:
    return TaskError(
        f"Task.init: the parameter {path!r} has dtype {dtype}, which has no gradient. Keep what is "
        "not trained out of params: close over it, or return it as model state "
        "(Task(..., stateful=True, coupled=True))."
    )


def stateful_needs_coupled() -> TaskError:
    return TaskError(
        "Task(stateful=True) needs coupled=True: a loss that writes model state (batch-norm "
        "statistics) makes examples depend on each other. With coupled=True it sees every example "
        "of a microbatch across all devices."
    )


def init_needs_model_state() -> TaskError:
    return TaskError(
        "Task(stateful=True): init(key) must return a pair (params, model_state); "
        "it returned something else."
    )


def model_state_changed(expected: str, given: str) -> TaskError:
    return TaskError(
        "Task.loss returned a model state of another structure or shape than it was given; it is "
        f"carried from step to step and must stay alike.\n  given:\n{expected}\n"
        f"  returned:\n{given}"
    )


def no_predict() -> TaskError:
    return TaskError(
        "this task has no predict function; give Task(predict=...) a function "
        "predict(params, inputs) -> outputs with leading dim B."
    )


def coupled_needs_evaluate() -> TaskError:
    return TaskError(
        "evaluate() averages over all examples, and the loss of a coupled task has no meaning for "
        "one example; give Task(evaluate=...) a function evaluate(params, batch) -> (B,) losses, "
        "or ((B,) losses, {name: (B,) metrics})."
    )


def export_needs_a_size(reason: str) -> TaskError:
    return TaskError(
        "Task.predict computes with its number of rows, so it cannot be exported for any number: "
        f"give export_predict(batch_size=...) one. JAX: {reason}"
    )


def predict_wrong_shape(shape: tuple[int, ...], batch: int) -> TaskError:
    return TaskError(
        f"Task.predict returned an array of shape {shape} for {batch} inputs; every output needs "
        f"the leading dim {batch}, one row per input."
    )


def per_example_not_scalar(shape: tuple[int, ...]) -> TaskError:
    return TaskError(
        f"per_example(f): f(params, example, key) returned shape {shape} for one example; "
        "it must return a scalar. Sum or average over the example's own dims inside f."
    )


def stack_depth(depth: object) -> TaskError:
    return TaskError(f"stack(depth={depth!r}): depth must be a whole number of at least 1.")


def stack_block_changes(given: object, returned: object) -> TaskError:
    return TaskError(
        f"a layer of plurax.stack got\n{given}\nand returned\n{returned}\nbut every layer must "
        "return the shapes and dtypes that it gets. Change them in `embed` or `head`."
    )


def stack_tied_unknown(name: str, params: Iterable[str]) -> TaskError:
    return TaskError(
        f"stack(tied=...) names {name!r}, and the parameters of `embed` are "
        f"{', '.join(map(repr, params)) or 'none'}."
    )


def stack_tied_needs_names(tied: object) -> TaskError:
    return TaskError(
        f"stack(tied={tied!r}): parameters are tied by name, so the parameters of `embed` and of "
        "`head` must be dicts; `head` may have none of its own: lambda key: {}."
    )


def optimizer_wants_arguments(wanted: str) -> TaskError:
    return TaskError(
        f"the optimizer's update needs arguments that plurax does not pass ({wanted}). It passes "
        "the gradients, the optimizer's state, the parameters and, as `value`, the loss of the "
        "batch, but not the loss as a function: line searches (optax.lbfgs) and Hessian estimates "
        "(optax.contrib.sophia) do not run here; optax.contrib.sam runs with opaque_mode=False."
    )


def optimizer_failed(said: str) -> TaskError:
    return TaskError(
        f"the optimizer's update failed: {said}\nIts arguments are numbers or schedules: "
        "optax.sgd(0.1), not optax.sgd('0.1'); a schedule takes the step, schedule(step)."
    )


def task_is_none(kind: str, library: str | None) -> TaskError:
    ways = {
        "linen": "plurax.adapters.linen.task(module, init=..., loss=...) makes a task of it.",
        "nnx": "plurax.adapters.nnx.task(build=lambda rngs: ..., loss=...) makes a task of one.",
        "equinox": "plurax.adapters.equinox.task(build=lambda key: ..., loss=...) makes a task of "
        "one.",
        "haiku": "plurax.adapters.haiku.task(transformed, init=..., loss=...) makes a task of it.",
        "keras": "plurax.adapters.keras.task(model, loss) makes a task of it.",
        "function": "A function of hyperparameters, hyper -> Task, needs "
        "members=plurax.Members(...).",
    }
    way = ways.get(library or "", "A Task has at least init(key) and loss(params, batch, keys).")
    return TaskError(f"the task is a {kind}, and what is trained is a plurax.Task. {way}")


def optimizer_is_none(given: object, *, members: bool) -> TaskError:
    if isinstance(given, str):
        way = f"write optimizer=optax.{given}(learning_rate)."
    elif isinstance(given, type) or str(getattr(given, "__module__", "")).startswith("optax"):
        way = f"call it: optax.{getattr(given, '__name__', 'adam')}(learning_rate)."
    elif callable(given) and not members:
        way = "a function of hyperparameters needs members=plurax.Members(...)."
    else:
        way = "write optimizer=optax.adam(learning_rate)."
    shown = repr(given) if isinstance(given, str | int | float) else f"a {type(given).__name__}"
    return TaskError(f"the optimizer is {shown}, and must be a transformation of optax; {way}")


def function_takes_others(what: str, wanted: str, signature: str, place: str) -> TaskError:
    name = re.split(r"[.(]", what.removesuffix("=...)").removesuffix(")"))[-1]
    return TaskError(
        f"{what}{place} takes {signature}, and is called with ({wanted}): write "
        f"def {name}({wanted}), and leave unused what you do not need."
    )


def function_is_none(what: str, kind: str, arguments: str) -> TaskError:
    return TaskError(f"{what} is a {kind}, and must be a function of ({arguments}).")


def build_is_a_module(library: str, kind: str, argument: str) -> TaskError:
    return TaskError(
        f"{library}.task(build=...) got a {kind} instance; a task builds its own from each seed: "
        f"build=lambda {argument}: {kind}(..., {argument}={argument})."
    )


def module_is_none(kind: str) -> TaskError:
    return TaskError(
        f"linen.task(module=...) got a {kind}; give an instance of the module: MyModule(...)."
    )


def seed_not_a_number(seed: object) -> TaskError:
    return TaskError(f"seed={seed!r}: give a whole number from 0 to 2**32 - 1.")
