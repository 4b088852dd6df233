"""A task says what is trained, and knows no device."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key, PyTree

from plurax import errors

Losses = Float[Array, "B"]
LossOutput = Losses | tuple[Losses, dict[str, Losses]]


@dataclasses.dataclass(frozen=True)
class Task:
    """What is trained: pure functions over a batch, written as for one device.

    **Fields:**

    - `init(key) -> params`: the parameters, any tree of floating arrays.
    - `loss(params, batch, keys)`: one loss per example, shape `(B,)`; or `((B,) losses,
      {name: (B,) metrics})`. `batch` is a tree of arrays with leading dim `B`, `keys` holds one
      random key per example, shape `(B,)`. The library does every sum.
    - `predict(params, inputs) -> outputs`: trees of arrays with leading dim `B`; row `i` of the
      outputs depends on row `i` of the inputs.
    - `evaluate(params, batch)`: like `loss` without keys, for evaluation (no dropout). Without it,
      evaluation calls `loss` with fixed keys.
    - `weight(batch) -> (B,)`: how much each example counts (its tokens, say); default ones. The
      loss of a step is `sum(weight * loss) / sum(weight)`, over all microbatches and devices.
    - `coupled`: the loss couples examples (contrastive, batch statistics). It is then called as
      `loss(params, batch, keys, mask)` and sees every example of a microbatch across all devices;
      `mask`, shape `(B,)` of bool, is false for rows that only fill up the batch and must be left
      out of what the loss couples.
    - `stateful`: the loss reads and writes model state that is not trained (batch-norm
      statistics). Then `init(key) -> (params, model_state)`, `loss(params, model_state, batch,
      keys, mask) -> (losses, metrics, model_state)`, and `predict` and `evaluate` take
      `model_state` after `params`. Needs `coupled`. Microbatches run in order, and each sees the
      state left by the one before.

    >>> import jax, jax.numpy as jnp
    >>> task = Task(
    ...     init=lambda key: {"w": jnp.zeros(3)},
    ...     loss=lambda params, batch, keys: (batch["x"] @ params["w"] - batch["y"]) ** 2,
    ...     predict=lambda params, inputs: inputs["x"] @ params["w"],
    ... )
    """

    init: Callable[[Key[Array, ""]], Any]
    loss: Callable[..., Any]
    predict: Callable[..., PyTree] | None = None
    evaluate: Callable[..., LossOutput] | None = None
    weight: Callable[[PyTree], Float[Array, "B"]] | None = None
    coupled: bool = False
    stateful: bool = False

    def __post_init__(self) -> None:
        if self.stateful and not self.coupled:
            raise errors.stateful_needs_coupled()


def per_example(
    f: Callable[[PyTree, PyTree, Key[Array, ""]], Any],
) -> Callable[[PyTree, PyTree, Key[Array, "B"]], LossOutput]:
    """Lift a loss written for one example to a batch, with a random key of its own for each.

    **Arguments:**

    - `f(params, example, key)`: returns a scalar loss, or `(loss, {name: scalar})`. `example` is
      the batch's tree without the leading dim.

    **Returns:** a function `(params, batch, keys) -> (B,) losses` for `Task(loss=...)`. Raises
    `TaskError` when `f` does not return scalars.

    >>> import jax, jax.numpy as jnp
    >>> loss = per_example(lambda params, example, key: (params * example["x"]).sum())
    >>> loss(2.0, {"x": jnp.ones((3, 4))}, jax.random.split(jax.random.key(0), 3))
    Array([8., 8., 8.], dtype=float32)
    """

    def one(params: PyTree, example: PyTree, key: Key[Array, ""]) -> Any:
        output = f(params, example, key)
        for leaf in jax.tree.leaves(output):
            if jnp.shape(leaf) != ():
                raise errors.per_example_not_scalar(jnp.shape(leaf))
        return output

    return jax.vmap(one, in_axes=(None, 0, 0))
