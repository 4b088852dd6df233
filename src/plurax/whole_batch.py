"""Losses of all examples of a step, whatever its microbatches (`execute/backends/apart.py`)."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from plurax import errors
from plurax.tree import sum_dtype
from plurax.validate import check_takes, place_of


@dataclasses.dataclass(frozen=True)
class OverBatch:
    """A loss of all examples of a step; `over_batch` creates it, and says what its fields are.

    Called as any coupled loss it is that of the examples it gets. A plan with microbatches calls
    its two functions apart.
    """

    outputs: Callable[..., PyTree]
    losses: Callable[..., Any]

    def __call__(self, params: PyTree, *rest: Any) -> Any:
        """Return the losses; `rest`, with model state first if the task has it, is as of a loss."""
        *states, batch, keys, mask = rest
        outputs = self.outputs(params, *states, batch, keys)
        _check_outputs(outputs, len(mask), place_of(self.outputs))
        return self.losses(*states, outputs, batch, mask)

    def check(self, params: str, *, stateful: bool) -> None:
        """Raise `TaskError` where a function does not take what it will be given."""
        check_takes("over_batch(outputs, ...)", self.outputs, f"{params}, batch, keys")
        state = "model_state, " if stateful else ""
        check_takes("over_batch(..., losses)", self.losses, f"{state}outputs, batch, mask")


@dataclasses.dataclass(frozen=True)
class WeightedOutputs:
    """The sum of each example's outputs times numbers, the derivatives of an `OverBatch` by them.

    It is the loss of a task of which a row of the batch is `(row, numbers)`; it reads model state,
    and leaves it as it is.

    **Fields:** `outputs`, as of `OverBatch`; `stateful`, whether it takes model state.
    """

    outputs: Callable[..., PyTree]
    stateful: bool

    def __call__(self, params: PyTree, *rest: Any) -> Any:
        """Return one number for each example."""
        *states, (batch, numbers), keys = rest
        total = weighted(self.outputs(params, *states, batch, keys), numbers)
        return (total, {}, *states) if self.stateful else total


def weighted(outputs: PyTree, numbers: Sequence[Array]) -> Float[Array, "B"]:
    """Return the sum of each example's outputs, those that have derivatives, times `numbers`."""
    total: Any = 0.0
    for array, by in zip(differentiable(outputs), numbers, strict=True):
        terms = (array * by.astype(array.dtype)).real
        total += terms.reshape(len(terms), -1).sum(1, dtype=sum_dtype(terms.dtype))
    return total


def _check_outputs(outputs: PyTree, size: int, where: str) -> None:
    """Raise `TaskError` where an output does not have one row per example, or none a derivative."""
    for leaf in jax.tree.leaves(outputs):
        if jnp.shape(leaf)[:1] != (size,):
            raise errors.TaskError(
                f"over_batch(outputs, ...){where}: an output has shape {jnp.shape(leaf)}; it must "
                f"have the leading dim {size}, one row per example. Leave to `losses` what is "
                "summed over examples, and repeat what is one for all, such as a temperature: "
                "jnp.broadcast_to(temperature, (B,))."
            )
    if not differentiable(outputs):
        raise errors.TaskError(
            f"over_batch(outputs, ...){where}: no output is floating, so the losses have no "
            "gradient. Return what they are computed from."
        )


def differentiable(outputs: PyTree) -> list[Array]:
    """Return the leaves of outputs that have derivatives: those that are no integers or truths."""
    leaves = map(jnp.asarray, jax.tree.leaves(outputs))
    return [leaf for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.inexact)]


def over_batch(outputs: Callable[..., PyTree], losses: Callable[..., Any]) -> OverBatch:
    """Return a loss that couples all examples of a step, whatever microbatches a plan has.

    **Arguments:**

    - `outputs(params, batch, keys)`: what the losses need of each example, a tree of arrays with
      leading dim `B`: embeddings, an expert's scores. Row `i` depends on row `i` alone.
    - `losses(outputs, batch, mask)`: one loss for each example, shape `(B,)`, or `((B,) losses,
      {name: (B,) metrics})`, from the outputs of all examples of the step; `mask`, shape `(B,)` of
      bool, is false for padding rows, which must not enter what it couples.

    Of a task with model state both take `model_state` before the outputs and the batch, and
    `losses` returns `(losses, metrics, model_state)`.

    **Returns:** a loss for `Task(loss=...)`, which is `coupled`. With one microbatch it is computed
    as any coupled loss. With more, the outputs of each are computed first, then the losses of all
    and their derivatives by the outputs, and then the outputs of each again, with their gradients:
    a step holds the activations of a microbatch, and computes the forward pass twice.

    Source: GradCache (Gao et al. 2021, https://arxiv.org/abs/2101.06983).

    Raises `TaskError`, with the task, where a function takes other arguments.

    >>> import jax.numpy as jnp, plurax as px
    >>> loss = px.over_batch(
    ...     lambda params, batch, keys: batch["x"] @ params,
    ...     lambda outputs, batch, mask: (outputs - outputs.sum(where=mask) / mask.sum()) ** 2,
    ... )
    >>> px.Task(init=lambda key: jnp.ones(3), loss=loss).coupled
    True
    """
    return OverBatch(outputs, losses)
