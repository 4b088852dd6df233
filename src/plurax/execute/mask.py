"""Find from its trace whether a coupled loss excludes the rows that pad a batch.

A coupled loss (batch norm, contrastive) mixes examples, so padding rows change every result unless
the loss excludes them by the mask it receives. Whether it does is a question of data flow: follow
the mask through the jaxpr and see which outputs depend on it. Example:

    loss(params, batch, keys, mask)
        mean   = sum(x * mask) / sum(mask)        depends on the mask
        losses = (x - mean) ** 2      (B,)        depends on it through `mean`   -> pads may be used

    loss(params, batch, keys, mask)
        mean   = x.mean(0)                        includes padding rows
        losses = (x - mean) ** 2      (B,)        does not depend on the mask    -> exact sizes only

The same must hold for every leaf of the new model state that depends on the batch. Losses whose
rows are apart need no mask: a moving average of parameters is model state and couples no examples.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr
from jaxtyping import PyTree

from plurax.execute.gradient import split_output
from plurax.jaxpr.compat import is_call_or_remat
from plurax.jaxpr.interpret import interpret
from plurax.jaxpr.row_dependence import row_dependence
from plurax.state import TrainState
from plurax.task import Task
from plurax.tree import with_rows

ROWS = 4
"""Rows of the trace that tells whether they are apart."""


def mask_not_read(size: int, max_size: int, unit: int) -> str:
    """Return the text of the warning for a batch that needs a program for its exact size."""
    reason = (
        f"the coupled loss of this task does not read its mask, so a batch of {size} examples is "
        f"not padded to {max_size}: a program was compiled for its size"
    )
    whole = (
        f"{unit} (data × microbatches) does not divide it: every device computes all of its rows"
    )
    return f"{reason}. {whole}." if size % unit else f"{reason}."


def loss_arguments(task: Task, like: TrainState, batch: PyTree) -> tuple[PyTree, ...]:
    """Return the arguments of `task.loss` as `jax.ShapeDtypeStruct`s."""
    size = jax.tree.leaves(batch)[0].shape[0]
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), size))
    states = (like.model_state,) if task.stateful else ()
    masks = (jax.ShapeDtypeStruct((size,), jnp.bool_),) if task.coupled else ()
    return (like.params, *states, batch, keys, *masks)


def reads_mask(task: Task, like: TrainState, batch: PyTree, loss: Callable[..., Any]) -> bool:
    """Return whether the losses, and all model state that depends on the batch, depend on the mask.

    **Arguments:** `like`, the training state, and `batch`, as `jax.ShapeDtypeStruct`s; `loss`,
    `task.loss` in a form that can be traced. Raises `TaskError` where it returns a wrong structure.

    Losses need not whose rows are apart by their trace.
    """
    args = loss_arguments(task, like, batch)

    def checked(*args: PyTree) -> tuple[PyTree, PyTree, PyTree]:
        # Check the output's structure first: its error explains more than the one about the mask.
        count = args[-1].shape[0]
        return split_output(task, loss(*args), args[1] if task.stateful else (), count)

    closed, shapes = jax.make_jaxpr(checked, return_shape=True)(*args)
    count = len(closed.jaxpr.invars)
    rows = len(jax.tree.leaves(args[:-2])) - len(jax.tree.leaves(args[-3]))
    by_mask = _depends(closed.jaxpr, [index == count - 1 for index in range(count)])
    by_rows = _depends(closed.jaxpr, [index >= rows for index in range(count)])
    results = range(len(by_mask))
    losses = jax.tree.leaves(shapes[0])
    first = len(jax.tree.leaves(shapes[:2]))
    needed = [index < len(losses) or (index >= first and by_rows[index]) for index in results]
    unread = [index for index in results if needed[index] and not by_mask[index]]
    return not unread or (unread[-1] < len(losses) and _are_apart(args, checked))


def _are_apart(args: tuple[PyTree, ...], checked: Callable[..., PyTree]) -> bool:
    """Whether each loss reads its own row alone, by the trace with a few rows."""
    *states, batch, keys, mask = args
    few = (*states, *with_rows((batch, keys, mask), ROWS))
    try:
        closed = jax.make_jaxpr(lambda *args: checked(*args)[0])(*few)
    except Exception:  # a loss for a batch of one size
        return False
    others = len(jax.tree.leaves(states))
    is_rows = [index >= others for index in range(len(closed.jaxpr.invars))]
    return not any(one.others().any() for one in row_dependence(closed, is_rows, ROWS))


def _depends(jaxpr: Jaxpr, sources: Sequence[bool]) -> list[bool]:
    """Return for each output whether it depends on any input that `sources` marks.

    Calls are followed inside; for loops and branches every output depends on every input.
    """
    return interpret(
        jaxpr,
        [False] * len(jaxpr.constvars),
        sources,
        default=lambda eqn, inputs: [any(inputs)] * len(eqn.outvars),
        inline=is_call_or_remat,
        lift=lambda _: False,
    )
