"""Tasks, models and optimizers whose functions do not keep their contract."""

import linecache
import re

from plurax.errors.kinds import TaskError


def loss_wrong_shape(where: str, shape: tuple[int, ...], batch: int) -> TaskError:
    return TaskError(
        f"{where} returned shape {shape}; it must be ({batch},), one number per example. "
        "Sum or average over the other dims (tokens, pixels) inside the loss, not over the batch."
    )


def loss_is_coupled(where: str, line: str, *, backward: bool = False) -> TaskError:
    if backward:
        return TaskError(
            f"{where}: the backward pass of a jax.custom_vjp mixes examples{_meet(line)}: the "
            "gradient of one example depends on the rows of other examples, although the loss does "
            "not. It would change with the number of devices and of microbatches. Let each row of "
            "a cotangent follow from that row alone, and leave means over the batch out."
        )
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


def outputs_are_mixed(where: str, line: str) -> TaskError:
    return TaskError(
        f"{where}: row i of an output must depend on row i of the batch alone, and depends on "
        f"other rows{_meet(line)}. Outputs are computed by microbatches; compute what reads all "
        "examples in the second function, over_batch(..., losses), from outputs of each."
    )


def rows_may_mix(error: TaskError) -> str:
    return (
        "By its trace alone, since plurax cannot run it here to be sure (plurax.verify shows it): "
        f"{error}"
    )


def _meet(line: str) -> str:
    """Return where rows meet, from a line `model.py:12:16 (loss)`, with what is written there."""
    match = re.fullmatch(r"(.*):(\d+):\d+ \((.*)\)", line)
    if match is None:
        return ""
    code = linecache.getline(match[1], int(match[2])).strip()
    return f", which meet at {match[1]}:{match[2]}" + (f": {code}" if code else "")


def loss_wrong_structure(where: str, got: str, expected: str) -> TaskError:
    return TaskError(
        f"{where} returned {got}, which is not what a task returns; expected {expected}."
    )


def needs_a_task(what: str, kind: str) -> TaskError:
    return TaskError(
        f"{what} got a {kind} for its task, and needs a plurax.Task. Of a function of "
        f"hyperparameters, call it inside: lambda hyper: {what}(make_task(hyper), ...)."
    )


def predict_wrong_shape(shape: tuple[int, ...], batch: int) -> TaskError:
    return TaskError(
        f"Task.predict returned an array of shape {shape} for {batch} inputs; every output needs "
        f"the leading dim {batch}, one row per input."
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


def optimizer_is_none(value: object, *, members: bool) -> TaskError:
    if isinstance(value, str):
        way = f"write optimizer=optax.{value}(learning_rate)."
    elif isinstance(value, type) or str(getattr(value, "__module__", "")).startswith("optax"):
        way = f"call it: optax.{getattr(value, '__name__', 'adam')}(learning_rate)."
    elif callable(value) and not members:
        way = "a function of hyperparameters needs members=plurax.Members(...)."
    else:
        way = "write optimizer=optax.adam(learning_rate)."
    shown = repr(value) if isinstance(value, str | int | float) else f"a {type(value).__name__}"
    return TaskError(f"the optimizer is {shown}, and must be a transformation of optax; {way}")


def function_takes_others(what: str, wanted: str, signature: str, place: str) -> TaskError:
    name = re.split(r"[.(]", what.removesuffix("=...)").removesuffix(")"))[-1]
    return TaskError(
        f"{what}{place} takes {signature}, and is called with ({wanted}): write "
        f"def {name}({wanted}), and leave unused what you do not need."
    )


def build_is_a_module(library: str, kind: str, argument: str) -> TaskError:
    return TaskError(
        f"{library}.task(build=...) got a {kind} instance; a task builds its own from each seed: "
        f"build=lambda {argument}: {kind}(..., {argument}={argument})."
    )


def model_got_keys(library: str, call: str, shape: tuple[int, ...]) -> TaskError:
    return TaskError(
        f"the {library} model got keys of shape {shape}, and takes one. Write the loss for one "
        f"example, f(model, example, key), call {call} in it, and lift it: "
        "loss=plurax.per_example(f)."
    )


def not_a_keras_model(kind: str) -> TaskError:
    return TaskError(
        f"keras.task(model=...) got a {kind}; give a Keras model, or a function without arguments "
        "that makes one: model=lambda: keras.Sequential([...])."
    )
