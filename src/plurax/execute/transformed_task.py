"""A task with all of its functions transformed: attention in blocks, rows at their experts."""

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jaxtyping import PyTree

from plurax import errors, tree
from plurax.execute.initial_state import initial
from plurax.execute.rows import abstract_rows
from plurax.jaxpr.context import Context
from plurax.jaxpr.stream import attention_keys, streamed, tokens_of_arguments
from plurax.plan import Plan
from plurax.task import Layer, Stack, Task
from plurax.whole_batch import OverBatch

Result = TypeVar("Result")


def streamed_task(
    task: Task, block: int | None, context: Context | None = None, *, skip: bool = False
) -> Task:
    """Return the task with the functions that compute on activations streamed.

    **Arguments:** `block`, the keys of a block (`Plan.stream`). None: `task` is returned;
    `context`, over which devices tokens are split; `skip`: whether masked blocks are left out,
    where tokens are not split over devices.
    """
    if block is None:
        return task
    return transformed_task(
        task, lambda fun, _: streamed(fun, block=block, context=context, skip=skip)
    )


def transformed_task(task: Task, transform: Callable[[Callable[..., Any], str], Any]) -> Task:
    """Return the task with `transform` applied to its functions of parameters and a batch.

    `transform(fun, part)`: the first argument of `fun` is the parameters of a `part` of a stack,
    "embed", "blocks" for one layer, or "head"; "" for all parameters.
    """

    def transformed(fun: Callable[..., Any] | None, part: str = "") -> Any:
        if isinstance(fun, OverBatch):
            return dataclasses.replace(fun, outputs=transform(fun.outputs, part))
        return None if fun is None else transform(fun, part)

    return dataclasses.replace(
        task,
        loss=transformed(task.loss),
        predict=transformed(task.predict),
        evaluate=transformed(task.evaluate),
        metrics=transformed(task.metrics),
        stack=None if task.stack is None else _stack(task.stack, transformed),
    )


def most_keys(task: Task, batch: PyTree) -> tuple[int, int]:
    """Return the most keys of attention by the equations of a task's loss, and by kernels.

    `batch`: as `jax.ShapeDtypeStruct`s.
    """
    return _of_loss(attention_keys, task, batch)


def tokens_of_parameters(task: Task, batch: PyTree, plan: Plan) -> dict[str, set[int]]:
    """Return for each parameter the dims that are those of tokens, which `context` splits.

    Positions (T, D) that are learned have one, and so has a bias of attention (H, T, T): that of
    the queries.

    **Arguments:** `task`, as it is written; `batch`, as `jax.ShapeDtypeStruct`s.
    """
    if plan.context == 1 or plan.stream is None:
        return {}
    context, block = Context(plan.context, plan.context_strategy), plan.stream

    def tokens(loss: Callable[..., Any], *args: PyTree) -> list[set[int]]:
        return tokens_of_arguments(loss, block, context, *args)

    params, _ = jax.eval_shape(lambda: initial(task, jax.random.key(0)))
    dims = _of_loss(tokens, task, batch)
    return dict(zip(tree.named_leaves(params), dims, strict=False))  # parameters come first


def _of_loss(read: Callable[..., Result], task: Task, batch: PyTree) -> Result:
    """Return `read(loss, *args)` for the loss of a task, and the shapes of its arguments."""
    params, model_state = jax.eval_shape(lambda: initial(task, jax.random.key(0)))
    rows = abstract_rows(batch)
    states = (model_state,) if task.stateful else ()
    extra = (rows.mask,) if task.coupled else ()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", errors.StreamWarning)
        return read(task.loss, params, *states, rows.batch, rows.keys, *extra)


def _stack(stack: Stack, transformed: Callable[..., Any]) -> Stack:
    """Return the parts of a task that a pipeline splits, transformed."""

    def layer(part: Layer, name: str) -> Layer:
        return part._replace(apply=transformed(part.apply, name))

    return dataclasses.replace(
        stack,
        embed=layer(stack.embed, "embed"),
        block=layer(stack.block, "blocks"),
        head=layer(stack.head, "head"),
        predict=transformed(stack.predict, "head"),
        metrics=transformed(stack.metrics, "head"),
    )
