"""A task with all of its functions transformed: attention in blocks, rows at their experts."""

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import PyTree

from plurax import errors, tree
from plurax.execute.gradient import gradient
from plurax.execute.initial_state import initial
from plurax.execute.rows import abstract_rows
from plurax.jaxpr.context import Context
from plurax.jaxpr.interpret import all_equations
from plurax.jaxpr.key_blocks import STREAMED
from plurax.jaxpr.stream import streamed, tokens_of_arguments
from plurax.plan import Plan
from plurax.task import Layer, Stack, Task
from plurax.whole_batch import OverBatch


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


def has_attention(task: Task, batch: PyTree, block: int) -> bool:
    """Return whether the loss of a task has attention to more than `block` keys, which is streamed.

    `batch`: as `jax.ShapeDtypeStruct`s.
    """
    states = jax.eval_shape(lambda: initial(task, jax.random.key(0)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", errors.StreamWarning)
        fun = gradient(streamed_task(task, block), "float32")
        closed = jax.make_jaxpr(fun)(*states, abstract_rows(batch))
    return any(
        eqn.primitive.name == "name" and eqn.params["name"] == STREAMED
        for eqn in all_equations(closed.jaxpr)
    )


def tokens_of_parameters(task: Task, batch: PyTree, plan: Plan) -> dict[str, set[int]]:
    """Return for each parameter the dims that are those of tokens, which `context` splits.

    Positions (T, D) that are learned have one, and so has a bias of attention (H, T, T): that of
    the queries.

    **Arguments:** `task`, as it is written; `batch`, as `jax.ShapeDtypeStruct`s.
    """
    if plan.context == 1 or plan.stream is None:
        return {}
    params, model_state = jax.eval_shape(lambda: initial(task, jax.random.key(0)))
    rows = abstract_rows(batch)
    states = (model_state,) if task.stateful else ()
    extra = (rows.mask,) if task.coupled else ()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", errors.StreamWarning)
        dims = tokens_of_arguments(
            task.loss, plan.stream, Context(plan.context, plan.context_strategy),
            params, *states, rows.batch, rows.keys, *extra,
        )  # fmt: skip
    return dict(zip(tree.named_leaves(params), dims, strict=False))  # parameters come first


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
