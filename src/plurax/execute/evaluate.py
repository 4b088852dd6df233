"""Evaluate: means of loss and metrics over any number of examples, each counted once."""

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from plurax import errors
from plurax.distributed.global_arrays import fetch
from plurax.execute.compiled_functions import COUNT, abstract_inference
from plurax.execute.compiler_options import jitted
from plurax.execute.coupling import check_evaluate
from plurax.execute.dispatch_limiter import DispatchLimiter
from plurax.execute.gradient import (
    Totals,
    evaluation,
    losses_and_metrics,
    split_output,
    with_precision,
)
from plurax.execute.placement import Placement, chunks, is_arrays, leading_dim
from plurax.execute.rows import Chunk, Rows, abstract_rows
from plurax.execute.rows_per_call import bytes_per_row, more_rows
from plurax.execute.step_functions import StepFunctions
from plurax.mesh import split_rows, within
from plurax.metrics.metric import Metric
from plurax.plan import Plan
from plurax.sources.adapt import adapt
from plurax.state import TrainState, check_not_donated
from plurax.task import Task
from plurax.tree import with_rows


class Evaluator:
    """Evaluates states of a program, in a function compiled when it is first needed.

    **Arguments:** `functions`; `task`, of one network, and `like`, its state as
    `jax.ShapeDtypeStruct`s; `batch`, of the largest size; `in_flight`, of all that the program
    dispatches.
    """

    def __init__(
        self,
        functions: StepFunctions,
        task: Task,
        like: TrainState,
        batch: PyTree,
        in_flight: DispatchLimiter,
    ) -> None:
        self._functions, self._task, self._like = functions, task, like
        # One call takes a microbatch, to fit where training fits; a pipeline takes all of them.
        plan, size = functions.plan, leading_dim(batch)
        if plan.pipeline == 1:
            size = -(-size * plan.data // plan.parts)
            plan = Plan(data=plan.data)
        self._batch, self._padded_size = batch, plan.padded_size
        self._in_flight = in_flight
        self._placements: dict[int, Placement] = {}
        self._known: dict[int, jax.stages.Compiled] = {}
        self._placement = self._placement_of(size)

    def _placement_of(self, size: int) -> Placement:
        """Return the placement of `size` rows, which has compiled a copy of its own."""
        if size not in self._placements:
            sharding, rows = split_rows(self._functions.mesh), self._padded_size(size)
            self._placements[size] = Placement(with_rows(self._batch, size), rows, sharding)
        return self._placements[size]

    def __call__(
        self, states: tuple[PyTree, ...], data: PyTree | Iterable[PyTree]
    ) -> dict[str, Any]:
        """Return weighted means and metrics by name over all of `data`. See `Program.evaluate`.

        `states` are the parameters, the model state and the arguments of all calls. Sums over
        chunks are in float64 on the host. A metric is what its `finish` returns. A mean is NaN, not
        an error, where no example has weight. Raises `BatchError` for no data, `TaskError` for what
        is no metric.
        """
        data, finish = adapt("evaluation", data), self._finish
        size = self._choose(data) if is_arrays(data) else self._placement.size
        placement, parts, first = self._placement_of(size), list[Totals](), 0
        # Dispatch all chunks, then fetch: the host waits once, not once per chunk.
        for batch in chunks(data, size):
            rows, count = placement.place(batch, "a batch of the evaluation")
            check_not_donated(states)
            chunk = Chunk(placement.number(first % 2**31), count)
            parts.append(self._compiled(size)(*states, rows, chunk))
            first += int(count)
            self._in_flight.started(parts[-1].loss)
        if not parts:
            raise errors.batch_is_empty()

        count = self._functions.count

        def total(*values: Any) -> np.ndarray:
            whole = np.sum(np.asarray(values, np.float64), axis=0)
            return np.asarray(self._functions.trim(whole))

        sums: Totals = jax.tree.map(total, *fetch(parts))
        weight = np.where(sums.weight == 0, math.nan, sums.weight)
        means: dict[str, Any] = {}
        for name, value in {"loss": sums.loss, **sums.metrics}.items():
            if name in finish:
                means |= _finished(name, finish[name], value, count)
            else:
                means[name] = value / weight
        return {k: float(v) if count is None and np.ndim(v) == 0 else v for k, v in means.items()}

    def trace(self) -> jax.stages.Traced:
        """Trace the sums over a chunk: `(params, model_state, *arguments, rows, chunk)`."""
        return self._checked_trace(self._placement)

    def _checked_trace(self, placement: Placement) -> jax.stages.Traced:
        check_evaluate(self._task, self._like, placement.abstract(), self._functions.mesh)
        return self._trace(placement)

    def _trace(self, placement: Placement) -> jax.stages.Traced:
        arguments = abstract_inference(self._functions)
        arguments = (*arguments, placement.abstract(), Chunk(COUNT, COUNT))
        evaluate = jitted(self._functions.evaluate, self._functions.options)
        traced: jax.stages.Traced = evaluate.trace(*arguments)
        return traced

    def _compiled(self, size: int) -> jax.stages.Compiled:
        """Return the compiled sums over `size` rows."""
        if size not in self._known:
            traced = self._checked_trace(self._placement_of(size))
            self._known[size] = traced.lower().compile()
        return self._known[size]

    def _choose(self, data: PyTree) -> int:
        """Return the number of rows of a call for arrays."""
        return more_rows(self._placement.size, leading_dim(data), lambda: self._row_bytes)

    @functools.cached_property
    def _row_bytes(self) -> float:
        return bytes_per_row(lambda n: self._trace(self._placement_of(n)), self._placement.size)

    # --- From shapes alone --------------------------------------------------------------------

    @functools.cached_property
    def _finish(self) -> dict[str, Callable[[PyTree], Any]]:
        """Return for each metric over the data the function of its sums."""
        evaluated = self._abstract(losses_and_metrics(self._task, self._functions.plan.precision))
        return {name: one.finish for name, one in evaluated[1].items() if isinstance(one, Metric)}

    def check(self, data: PyTree | Iterable[PyTree]) -> None:
        """Raise the errors of evaluating `data`, from the shapes of its first rows alone."""
        data = adapt("evaluation", data)
        if isinstance(data, Iterator):
            raise errors.data_one_shot()
        first = next(chunks(data, self._placement.size), None)
        if first is None:
            raise errors.batch_is_empty()
        self._placement.check(first, "a batch of the evaluation")
        self._abstract(evaluation(self._task, self._functions.plan.precision))

    def metric_names(self, *, evaluated: bool) -> list[str]:
        """Return the names of the metrics of an epoch's row; `evaluated`, `eval_...` too.

        A metric over the data may be a dict once it is finished, so it has a pattern too:
        `eval_auc_*`.
        """
        task, precision = self._task, self._functions.plan.precision

        def training(params: PyTree, model_state: PyTree, rows: Rows) -> dict[str, Any]:
            states = (model_state,) if task.stateful else ()
            extra = (rows.mask,) if task.coupled else ()
            loss = with_precision(task.loss, precision, task.stateful)
            output = loss(params, *states, rows.batch, rows.keys, *extra)
            return split_output(task, output, model_state, rows.mask.shape[0])[1]

        names = ["loss", "grad_norm", *self._abstract(training)]
        if not evaluated:
            return names
        _, metrics = self._abstract(losses_and_metrics(task, precision))
        over_data = [f"{name}_*" for name, one in metrics.items() if isinstance(one, Metric)]
        return [*names, *(f"eval_{name}" for name in ("loss", *metrics, *over_data))]

    def _abstract(self, fun: Callable[[PyTree, PyTree, Rows], Any]) -> Any:
        """Return the results of a function of one network, for a chunk, from shapes alone."""
        rows = abstract_rows(self._placement.abstract())
        traced = within(self._functions.mesh, fun)
        return jax.eval_shape(traced, self._like.params, self._like.model_state, rows)


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
