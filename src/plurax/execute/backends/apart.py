"""A loss over all examples of a step, in microbatches that each hold their own activations.

A loss that compares examples, or balances the load of experts, reads all of them. What it reads of
each is little (an embedding, the scores of a router), and what computes that is most of the work
and leaves examples apart. So a step goes over the microbatches twice (`plurax.over_batch`):

    Plan(data=2, microbatches=4), 64 rows, embeddings of 16 numbers; on one device

    1  outputs of each microbatch            8 rows at a time; kept are (32, 16)
    2  losses of all rows of all devices,    (64, 16), each device its rows: what couples them is
       derivatives by the outputs            sent, as of a coupled loss in one microbatch
    3  gradient of the outputs of each       8 rows at a time, of sum(outputs * derivatives): a
       microbatch, times the derivatives     loss of single examples, which any backend has

Source: GradCache (Gao et al. 2021, https://arxiv.org/abs/2101.06983).
"""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Int, PyTree

from plurax.execute.backends.backend import Backend
from plurax.execute.gradient import (
    Totals,
    check_weight,
    device_predict,
    split_output,
    weighted_sums,
    with_precision,
)
from plurax.execute.initial_state import initial
from plurax.execute.rows import Chunk, Rows, abstract_rows, index_device_rows
from plurax.execute.step import Gradients, Metrics, step_key
from plurax.mesh import platform_of
from plurax.partition.partitioner import Partitioner, partition
from plurax.partition.values import ShardedValue, is_sharded_value, shard_of_rows
from plurax.plan import Plan
from plurax.sharding.axes import Axes
from plurax.sharding.spec import TensorSharding
from plurax.state import TrainState
from plurax.task import Layer, Stack, Task
from plurax.whole_batch import OverBatch, WeightedOutputs, differentiable, weighted


class ApartBackend(Backend):
    """A task whose loss is an `OverBatch`, under a plan with microbatches.

    **Arguments:** `task`, `optimizer`, `plan`, `mesh`; `inner`, the backend of
    `weighted_task(task)`; `whole`, whether it takes the rows of all microbatches at once in
    prediction; `direct`, which returns the backend for rows of which every device has all.
    """

    def __init__(
        self,
        task: Task,
        optimizer: optax.GradientTransformation,
        plan: Plan,
        mesh: Mesh,
        inner: Backend,
        direct: Callable[[], Backend],
        *,
        whole: bool,
    ) -> None:
        self.task, self.optimizer, self.plan = task, optimizer, plan
        self.inner, self._direct, self._whole = inner, direct, whole
        self._mesh: Mesh | None = mesh
        self._platform = platform_of(mesh)
        self.layout, self.manual_axes = inner.layout, inner.manual_axes

    def of(self, task: Task, optimizer: optax.GradientTransformation) -> "ApartBackend":
        """Return a copy for another member of a population."""
        other = copy.copy(self)
        other.task, other.optimizer = task, optimizer
        other.inner = self.inner.of(weighted_task(task), optimizer)
        other._mesh = None
        return other

    def own(self, state: TrainState) -> TrainState:
        """Return this device's part of a replicated state."""
        return self.inner.own(state)

    def gradients(self, *, split: bool = True) -> Callable[..., Gradients]:
        """Return `(state, rows, count, first=None) -> gradients`, reduced over all devices."""
        if not split:
            return self._direct().gradients(split=False)
        inner = self.inner.gradients()

        def gradients(
            state: TrainState,
            batch: PyTree,
            count: Int[Array, ""],
            first: Int[Array, ""] | None = None,
        ) -> Gradients:
            parts = (self.plan.most_microbatches,) * self.plan.data
            rows = index_device_rows(batch, step_key(state, first), count, parts)
            outputs = self._outputs(state, rows)
            totals, numbers, model_state = self._losses(state.model_state, rows, outputs)
            sums = inner(state, (batch, numbers), count, first)
            return Gradients(
                totals.weight, totals.loss, totals.metrics, sums.grads,
                model_state=model_state, examples=count,
            )  # fmt: skip

        return gradients

    def _outputs(self, state: TrainState, rows: Rows) -> PyTree:
        """Return what the losses read of this device's rows."""
        predict = self.inner.of(_outputs_task(self.task), self.optimizer).predict()
        if self._whole:
            return predict(state.params, state.model_state, rows)
        count = self.plan.most_microbatches

        def cut(leaf: Array) -> Array:
            return leaf.reshape(count, leaf.shape[0] // count, *leaf.shape[1:])

        outputs = jax.lax.map(
            lambda part: predict(state.params, state.model_state, part), jax.tree.map(cut, rows)
        )
        return jax.tree.map(lambda x: jax.lax.collapse(x, 0, 2), outputs)

    def _losses(
        self, model_state: PyTree, rows: Rows, outputs: PyTree
    ) -> tuple[Totals, list[Array], PyTree]:
        """Return the totals of all rows of all devices, their derivatives by this device's outputs,
        and the next model state."""
        fun = losses_of_outputs(self.task, self.plan)
        data = self.plan.data
        if data == 1:
            return fun(model_state, rows, outputs)
        axes = Axes({"data": data}, platform=self._platform)
        partitioner = Partitioner(axes, mesh=self._mesh, joint=True)

        def wanted(shapes: tuple[Totals, list[Any], PyTree]) -> tuple[Any, Any, Any]:
            totals, numbers, states = shapes
            by_row = [sharding.with_dim(0, ("data",)) for sharding in _replicated(numbers)]
            return _replicated(totals), by_row, _replicated(states)

        whole = jax.tree.map(
            lambda a: ShardedValue(a, a.shape, TensorSharding.replicated(a.ndim)), model_state
        )
        split = jax.tree.map(lambda a: shard_of_rows(a, data), (rows, outputs))
        values = partition(fun, partitioner, (whole, *split), wanted)
        arrays: tuple[Totals, list[Array], PyTree] = jax.tree.map(
            lambda value: value.array, values, is_leaf=is_sharded_value
        )
        return arrays

    def apply(
        self, *, freeze: bool = False, select: bool = False
    ) -> Callable[[TrainState, Gradients], tuple[TrainState, Metrics]]:
        """Return `(state, gradients) -> (state, metrics)` on one device."""
        return self.inner.apply(freeze=freeze, select=select)

    def evaluate(self) -> Callable[[PyTree, PyTree, PyTree, Chunk], Totals]:
        """Return `(params, model_state, rows, chunk) -> totals` on one device, without gradient."""
        return self.inner.of(self.task, self.optimizer).evaluate()

    def predict(self) -> Callable[[PyTree, PyTree, PyTree], PyTree]:
        """Return `(params, model_state, inputs) -> outputs` on one device, for its own rows."""
        return self.inner.of(self.task, self.optimizer).predict()


def is_apart(task: Task, plan: Plan) -> bool:
    """Whether a step computes outputs, losses and gradients apart: a loss over microbatches."""
    in_parts = plan.most_microbatches > 1 or (plan.pipeline > 1 and task.stack is not None)
    return isinstance(task.loss, OverBatch) and in_parts


def weighted_task(task: Task) -> Task:
    """Return the task of step 3, a row of whose batch is `(row, derivatives)`."""
    loss = WeightedOutputs(_over_batch(task).outputs, task.stateful)
    stack = None if task.stack is None else _weighted_stack(task.stack)
    return dataclasses.replace(
        task, loss=loss, coupled=False, weight=None, predict=None, evaluate=None, metrics=None,
        stack=stack,
    )  # fmt: skip


def _weighted_stack(stack: Stack) -> Stack:
    """Return the parts of the same task, for a pipeline."""

    def of_rows(part: Layer) -> Layer:
        def apply(params: PyTree, *args: Any) -> PyTree:
            *x, (batch, _), keys = args
            return part.apply(params, *x, batch, keys)

        return part._replace(apply=apply)

    of_head = stack.head.apply
    assert isinstance(of_head, OverBatch)
    outputs = of_head.outputs

    def head(params: PyTree, x: PyTree, batch: PyTree, keys: Any) -> Array:
        rows, numbers = batch
        return weighted(outputs(params, x, rows, keys), numbers)

    return dataclasses.replace(
        stack, embed=of_rows(stack.embed), block=of_rows(stack.block),
        head=stack.head._replace(apply=head), predict=None, metrics=None,
    )  # fmt: skip


def weighted_batch(task: Task, plan: Plan, batch: PyTree) -> PyTree:
    """Return the shapes of the batch of that task, for those of a batch."""
    params, model_state = jax.eval_shape(lambda: initial(task, jax.random.key(0)))
    rows = abstract_rows(batch)
    predict = device_predict(_outputs_task(task), plan.precision)
    outputs = jax.eval_shape(predict, params, model_state, rows)
    return batch, jax.eval_shape(differentiable, outputs)


def losses_of_outputs(
    task: Task, plan: Plan
) -> Callable[[PyTree, Rows, PyTree], tuple[Totals, list[Array], PyTree]]:
    """Return `(model_state, rows, outputs) -> (totals, derivatives, model_state)`.

    `derivatives`: of the weighted sum of the losses by each output that has one.
    """

    def in_order(outputs: PyTree, *rest: PyTree) -> Any:
        *states, batch, mask = rest
        return _over_batch(task).losses(*states, outputs, batch, mask)

    losses_fn = with_precision(in_order, plan.precision, task.stateful)

    def run(model_state: PyTree, rows: Rows, outputs: PyTree) -> tuple[Totals, list[Array], PyTree]:
        size = rows.mask.shape[0]
        states = (model_state,) if task.stateful else ()

        def total_loss(floating: list[Array]) -> tuple[Array, tuple[Totals, PyTree]]:
            all_outputs = _with_differentiable(outputs, floating)
            output = losses_fn(all_outputs, *states, rows.batch, rows.mask)
            losses, metrics, after = split_output(task, output, model_state, size)
            totals = weighted_sums(losses, metrics, check_weight(task, rows.batch, size), rows)
            return totals.loss, (totals, after)

        numbers, (totals, after) = jax.grad(total_loss, has_aux=True)(differentiable(outputs))
        return totals, numbers, after

    return run


def _over_batch(task: Task) -> OverBatch:
    assert isinstance(task.loss, OverBatch)
    return task.loss


def _outputs_task(task: Task) -> Task:
    """Return the task with what the losses read as its prediction, for inputs that are `Rows`."""
    outputs = _over_batch(task).outputs

    def predict(params: PyTree, *rest: Any) -> PyTree:
        *states, rows = rest
        return outputs(params, *states, rows.batch, rows.keys)

    return dataclasses.replace(task, predict=predict)


def _with_differentiable(outputs: PyTree, arrays: list[Array]) -> PyTree:
    """Return outputs with other leaves in the place of those that `differentiable` returns."""
    others = iter(arrays)
    return jax.tree.map(
        lambda leaf: next(others) if jnp.issubdtype(leaf.dtype, jnp.inexact) else leaf, outputs
    )


def _replicated(shapes: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: TensorSharding.replicated(len(leaf.shape)), shapes)
