"""Check from its trace that a function keeps rows apart: row i of what it returns reads row i only.

A loss that mixes examples computes something else on every device and in every microbatch, and
nothing would say so. The function is traced for a few rows, and the dependence of its results on
rows is read from the trace (`row_dependence`). What the trace proves to be per example is done.
Where the trace says that rows mix they need not: experts sort the tokens of a batch and put them
back, packed sequences mask each other out. So nothing is refused that was not seen: the traced
function is run on a few random rows, and once more for each row with all the others replaced.

    loss                                 trace says     is run                          result
    (x @ w - y) ** 2                     rows apart     no                              accepted
    (x - x.mean(0)) @ w - y              rows mix       row 0 changes with row 1        refused
    h[argsort(e)] ... [argsort(argsort)] rows mix       row i changes with row i only   accepted
    x - x.mean(0), 20 GB of parameters   rows mix       cannot be run here              warned

A `jax.custom_vjp` may mix rows in its backward pass alone. Where the trace holds one, the gradient
is run on a few random rows, too, and has to be a sum over them.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import PyTree

from plurax import errors
from plurax.distributed.global_arrays import own_devices
from plurax.errors import TaskError
from plurax.execute.gradient import check_weight, device_predict, losses_and_metrics, split_output
from plurax.execute.initial_state import initial
from plurax.execute.mask import reads_mask
from plurax.execute.program_cache import cached_program, shapes_key
from plurax.execute.rows import Rows, abstract_rows
from plurax.jaxpr.compat import HOST_CALLS, inner_jaxprs, is_call_or_remat, open_jaxpr
from plurax.jaxpr.few_examples import FAST
from plurax.jaxpr.interpret import all_equations, bind, interpret, source_line
from plurax.jaxpr.product_dims import product_operations
from plurax.jaxpr.row_dependence import RowsRead, row_dependence
from plurax.jaxpr.row_rules import DOES
from plurax.mesh import within
from plurax.partition.manual import by_row, switched
from plurax.state import TrainState
from plurax.task import Task
from plurax.tree import byte_count, with_rows
from plurax.user_frames import warn
from plurax.validate import place_of, without_axes
from plurax.whole_batch import OverBatch

ROWS = 4
"""Rows of the trace; halves and pairs of rows can be told apart."""
MOST_ROWS = 64
"""The largest number of rows that a device has for a function that needs all of them."""
MOST_BYTES = 2**30
"""The largest parameters with which a function is run; it computes at most eight times as much."""
MOST_FLOPS = 10**11
"""The most operations in products of a function that is run: some seconds each time."""
MOST_ITERATIONS = 1000
"""The largest number of iterations of a `while` loop on random rows."""
DRAWS = 2
"""How often rows are drawn."""
CHANGED = 1e-3
"""The smallest change, relative to the largest result, by which another row is noticed."""

OfRows = Callable[[PyTree, PyTree, Rows], PyTree]
"""A function `(params, model_state, rows) -> results (B, ...)`."""


def check_evaluate(task: Task, like: TrainState, batch: PyTree, mesh: Mesh) -> None:
    """Raise `TaskError` where what evaluation returns for an example reads another example.

    **Arguments:** `like`, the state of one network, and `batch`, as `jax.ShapeDtypeStruct`s;
    `mesh`, whose axes a model may name.
    """
    evaluate = losses_and_metrics(task, "float32")
    name, used = ("loss", task.loss) if task.evaluate is None else ("evaluate", task.evaluate)
    where = f"Task.{name}{place_of(used)}"
    _check(evaluate, task, like, batch, mesh, errors.rows_are_mixed, where)


def check_predict(task: Task, like: TrainState, inputs: PyTree, mesh: Mesh) -> None:
    """Raise `TaskError` where the outputs of one input read another input; as `check_evaluate`."""
    predict = device_predict(task, "float32")

    def outputs(params: PyTree, model_state: PyTree, rows: Rows) -> PyTree:
        return predict(params, model_state, rows.batch)

    assert task.predict is not None
    where = f"Task.predict{place_of(task.predict)}"
    _check(outputs, task, like, inputs, mesh, errors.rows_are_mixed, where)


def may_pad(task: Task, like: TrainState, batch: PyTree, mesh: Mesh) -> bool:
    """Return whether padding rows change no loss: it is per example, or coupled and reads its mask.

    Arguments as of `check_evaluate`. Raises `TaskError` for a loss that is coupled and does not say
    so.
    """
    if isinstance(task.loss, OverBatch):
        loss, shapes = task.loss, shapes_key(with_rows(batch, ROWS))
        outputs_key = ("outputs apart", shapes, mesh.axis_names)
        cached_program(task, outputs_key, lambda: _check_outputs(task, loss, like, batch, mesh))
    if task.coupled:
        return reads_mask(task, like, batch, within(mesh, without_axes(task.loss)))
    # Programs of one task, for several plans or sizes of a batch, share the check.
    size = jax.tree.leaves(batch)[0].shape[0]
    few = with_rows(batch, ROWS)
    key = ("rows apart", shapes_key(few), min(size, MOST_ROWS + 1), mesh.axis_names)
    cached_program(task, key, lambda: check_loss(task, like, batch, mesh))
    return True


def _check_outputs(
    task: Task, loss: OverBatch, like: TrainState, batch: PyTree, mesh: Mesh
) -> None:
    """Raise `TaskError` where the outputs of an example, of which losses are computed, read others.

    Arguments as of `check_evaluate`.
    """

    def outputs(params: PyTree, model_state: PyTree, rows: Rows) -> PyTree:
        states = (model_state,) if task.stateful else ()
        return loss.outputs(params, *states, rows.batch, rows.keys)

    where = f"over_batch(outputs, ...){place_of(loss.outputs)}"
    _check(outputs, task, like, batch, mesh, errors.outputs_are_mixed, where)


def check_loss(task: Task, like: TrainState, batch: PyTree, mesh: Mesh) -> None:
    """Raise `TaskError` where the loss, a metric or the weight of an example reads another example.

    Arguments as of `check_evaluate`; `task` is not coupled.
    """

    def loss(params: PyTree, model_state: PyTree, rows: Rows) -> PyTree:
        output = task.loss(params, rows.batch, rows.keys)
        return split_output(task, output, (), rows.mask.shape[0])[:2]

    def weight(params: PyTree, model_state: PyTree, rows: Rows) -> PyTree:
        return check_weight(task, rows.batch, rows.mask.shape[0])

    where = f"Task.loss{place_of(task.loss)}"
    closed = _check(loss, task, like, batch, mesh, errors.loss_is_coupled, where)
    rules = [] if closed is None else _backward_rules(closed.jaxpr)
    if rules and _backward_mixes(loss, task, like, batch, mesh):
        raise errors.loss_is_coupled(where, source_line(rules[:1]), backward=True)
    if task.weight is not None:
        where = f"Task.weight{place_of(task.weight)}"
        _check(weight, task, like, batch, mesh, errors.rows_are_mixed, where)


def _check(
    fun: OfRows,
    task: Task,
    like: TrainState,
    batch: PyTree,
    mesh: Mesh,
    refused: Callable[[str, str], TaskError],
    where: str,
) -> Any:
    """Raise what `refused` builds where a row of the results reads other rows of the batch.

    Returns the traced function, or None where it cannot be traced.
    """
    states = (like.params, like.model_state)
    size = jax.tree.leaves(batch)[0].shape[0]
    for count in (ROWS, size) if size <= MOST_ROWS else (ROWS,):
        rows = abstract_rows(with_rows(batch, count))
        try:
            closed = jax.make_jaxpr(within(mesh, fun))(*states, rows)
        except Exception:
            # Compiling tells its mistake, in its own shapes; here they are not those of a plan.
            continue
        mixed = _mixed(closed, len(jax.tree.leaves(states)), count)
        if not mixed:
            return closed
        line = next((one.line for one in mixed.values() if one.line), "")
        seen = _is_seen(closed, task, rows, list(mixed))
        if seen:
            raise refused(where, line)
        if seen is None and any((one.others() == DOES).any() for one in mixed.values()):
            warn(errors.rows_may_mix(refused(where, line)))
        return closed
    return None


def _mixed(closed: Any, states: int, count: int) -> dict[int, RowsRead]:
    """Return the results with rows that may read other rows, by place."""
    is_rows = [index >= states for index in range(len(closed.jaxpr.invars))]
    results = row_dependence(closed, is_rows, count)
    return {place: one for place, one in enumerate(results) if one.others().any()}


# --- Running what the trace does not decide -------------------------------------------------------


def _is_seen(closed: Any, task: Task, rows: Rows, places: Sequence[int]) -> bool | None:
    """Whether a row of the results changes where all other rows of the batch do.

    None where this cannot be seen: parameters or activations are large, the function does not run
    on one device of the host, or returns no numbers.
    """
    if _is_large(closed, task):
        return None
    verdict: bool | None = None
    try:
        with jax.default_device(own_devices(jax.devices("cpu"))[0]):
            start, run = _runnable(closed, task)
            for seed in range(DRAWS):
                changes = _change(run, start, rows, places, np.random.default_rng(seed))
                if any(change > CHANGED for change in changes):
                    return True
                if all(change <= CHANGED for change in changes):
                    verdict = False
    except Exception:  # it needs the devices of its plan
        return None
    return verdict


def _is_large(closed: Any, task: Task) -> bool:
    """Whether a function should not be run on the host: it may have been written for large devices.

    Attention over 65,536 tokens computes values of 34 GB.
    """
    start = jax.eval_shape(lambda: initial(task, jax.random.key(0)))
    most = max(_total(closed.jaxpr, _computed_bytes) // 8, byte_count(start))
    return most > MOST_BYTES or _total(closed.jaxpr, product_operations) > MOST_FLOPS


def _total(jaxpr: Any, count: Callable[[Any], int]) -> int:
    """Return the sum of what `count` says of each equation, in each iteration of its loops."""
    total = 0
    for eqn in jaxpr.eqns:
        trips = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        inner = inner_jaxprs(eqn)
        total += trips * sum(_total(one, count) for one in inner) if inner else count(eqn)
    return total


def _computed_bytes(eqn: Any) -> int:
    avals = [var.aval for var in eqn.outvars if hasattr(var.aval, "shape")]
    return sum(math.prod(aval.shape) * aval.dtype.itemsize for aval in avals)


def _runnable(closed: Any, task: Task) -> tuple[PyTree, Callable[..., list[Any]]]:
    """Return initial parameters and model state, and the compiled function."""
    start = jax.jit(lambda: initial(task, jax.random.key(0)), compiler_options=FAST)()
    run = jax.jit(lambda *args: _bounded(closed.jaxpr, closed.consts, args), compiler_options=FAST)
    return start, run


def _change(
    run: Callable[..., list[Any]], start: PyTree, rows: Rows, places: Sequence[int], rng: Any
) -> list[float]:
    """Return how far a row of each result changes with all other rows; NaN where it is lost."""
    states = _moved(start, rng)
    some, others = ([_drawn(leaf, rng) for leaf in jax.tree.leaves(rows)] for _ in range(2))

    def results(leaves: list[Any]) -> list[np.ndarray]:
        found = run(*states, *leaves)
        return [np.asarray(found[place]).astype(np.float64) for place in places]

    whole = results(some)
    changes = [0.0] * len(places)
    for row in range(whole[0].shape[0]):
        replaced = [other.at[row].set(one[row]) for one, other in zip(some, others, strict=True)]
        for place, again in enumerate(results(replaced)):
            apart = np.abs(again[row] - whole[place][row]).max(initial=0.0)
            scale = np.abs(whole[place]).max(initial=0.0) or 1.0
            changes[place] = float(np.maximum(changes[place], apart / scale))  # NaN stays NaN
    return changes


def _moved(start: PyTree, rng: Any) -> list[Any]:
    """Return the leaves of a start, moved a little.

    Training often starts at zero, where nothing that is multiplied by a parameter is seen.
    """
    return [
        leaf + 0.1 * rng.normal(size=leaf.shape).astype(leaf.dtype)
        if jnp.issubdtype(leaf.dtype, jnp.floating)
        else leaf
        for leaf in jax.tree.leaves(start)
    ]


def _drawn(leaf: Any, rng: Any) -> jax.Array:
    """Return random rows: normal numbers, and integers that are 0 or 1, as any table has."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.split(jax.random.key(int(rng.integers(2**31))), leaf.shape)
    floating = jnp.issubdtype(leaf.dtype, jnp.inexact)
    values = rng.normal(size=leaf.shape) if floating else rng.integers(2, size=leaf.shape)
    return jnp.asarray(values.astype(leaf.dtype))


# --- Backward rules -------------------------------------------------------------------------------


def _backward_rules(jaxpr: Any) -> list[Any]:
    """Return the calls of functions whose backward pass is written by hand."""
    return [eqn for eqn in all_equations(jaxpr) if eqn.primitive.name == "custom_vjp_call"]


def _backward_mixes(loss: OfRows, task: Task, like: TrainState, batch: PyTree, mesh: Mesh) -> bool:
    """Whether the gradient of the summed losses is seen to be no sum over the rows.

    Rows mix in every gradient, so that no trace tells them apart. It is run: with `a` one row and
    `b` all others, of a sum over the rows

        gradient(a, b) - gradient(a', b) - gradient(a, b') + gradient(a', b') = 0

    False also where it cannot be run (see `_is_seen`).
    """
    rows = abstract_rows(with_rows(batch, ROWS))

    def gradient(params: PyTree, model_state: PyTree, rows: Rows) -> PyTree:
        return jax.grad(lambda params: jnp.sum(loss(params, model_state, rows)[0]))(params)

    try:
        closed = jax.make_jaxpr(within(mesh, gradient))(like.params, like.model_state, rows)
        if _is_large(closed, task):
            return False
        with jax.default_device(own_devices(jax.devices("cpu"))[0]):
            start, run = _runnable(closed, task)
            for seed in range(DRAWS):
                if _is_no_sum(run, start, rows, np.random.default_rng(seed)):
                    return True
    except Exception:  # it needs the devices of its plan, or compiling tells its mistake
        return False
    return False


def _is_no_sum(run: Callable[..., list[Any]], start: PyTree, rows: Rows, rng: Any) -> bool:
    """Whether a gradient, run on random rows, is no sum over them."""
    states = _moved(start, rng)
    some, others = ([_drawn(leaf, rng) for leaf in jax.tree.leaves(rows)] for _ in range(2))

    def of(first: list[Any], rest: list[Any]) -> list[np.ndarray]:
        joined = [leaf.at[0].set(one[0]) for one, leaf in zip(first, rest, strict=True)]
        return [np.asarray(leaf).astype(np.complex128) for leaf in run(*states, *joined)]

    corners = of(some, some), of(others, some), of(some, others), of(others, others)
    for both, second, first, neither in zip(*corners, strict=True):
        apart = np.abs(both - second - first + neither).max(initial=0.0)
        if apart > CHANGED * np.abs(np.stack([both, second, first, neither])).max(initial=0.0):
            return True
    return False


def _bounded(
    jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], *, in_branch: bool = False
) -> list[Any]:
    """Evaluate a function whose loops end, as they need not on random rows, and no check raises.

    `equinox.error_if` calls the host in a branch.
    """
    evaluate = functools.partial(_bounded, in_branch=in_branch)

    def ended(eqn: Any, inputs: list[Any]) -> list[Any]:
        params = eqn.params
        first, second = params["cond_nconsts"], params["body_nconsts"]
        tested, consts, start = inputs[:first], inputs[first:][:second], inputs[first + second :]
        condition, body = open_jaxpr(params["cond_jaxpr"]), open_jaxpr(params["body_jaxpr"])

        def goes_on(state: list[Any]) -> Any:
            return (state[0] < MOST_ITERATIONS) & evaluate(*condition, [*tested, *state[1:]])[0]

        def turn(state: list[Any]) -> list[Any]:
            return [state[0] + 1, *evaluate(*body, [*consts, *state[1:]])]

        count = jnp.zeros(params["cond_jaxpr"].out_avals[0].shape, jnp.int32)
        return by_row(goes_on, turn, [count, *start])[1:]

    def branched(eqn: Any, inputs: list[Any]) -> list[Any]:
        return switched(eqn, inputs, functools.partial(_bounded, in_branch=True))

    def called(eqn: Any, inputs: list[Any]) -> Sequence[Any]:
        if eqn.primitive.name == "pure_callback" and not in_branch:
            return bind(eqn, inputs)
        # A check, or it has effects, as prints have: its numbers, if any, are lost.
        return [
            jnp.full(
                aval.shape, jnp.nan if jnp.issubdtype(aval.dtype, jnp.inexact) else 0, aval.dtype
            )
            for aval in eqn.params.get("result_avals", ())
        ]

    handlers = dict.fromkeys(HOST_CALLS, called) | {"while": ended, "cond": branched}
    return interpret(jaxpr, consts, args, handlers, inline=is_call_or_remat)
