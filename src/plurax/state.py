"""What training changes, and what a checkpoint holds."""

import dataclasses
import operator
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Int, Key, PyTree

from plurax import errors

_is_deleted = operator.methodcaller("is_deleted")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """The whole state of a training run; metrics are never in it.

    In the state of a population every leaf has a leading dim of members.

    **Fields:**

    - `step`: batches taken, skipped ones included (int32 scalar).
    - `params`: the parameters.
    - `opt_state`: the optimizer's state.
    - `model_state`: what a stateful task carries besides (batch-norm statistics); else `()`.
    - `key`: the run's random key; step `t` draws from `fold_in(key, t)`.
    - `skipped`: updates left out because loss or gradient was not finite (int32 scalar).
    """

    step: Int[Array, ""]
    params: PyTree
    opt_state: PyTree
    model_state: PyTree
    key: Key[Array, ""]
    skipped: Int[Array, ""]

    @property
    def steps_taken(self) -> int:
        """Steps taken; of a population, by its members."""
        # Of a population each device has some members, and all of them are at the same step.
        step = self.step
        if isinstance(step, jax.Array):
            step = step.addressable_shards[0].data
        return int(np.max(np.asarray(step)))


def check_not_donated(state: PyTree) -> None:
    """Raise `BatchError` where a step has used up any leaf of a state, or of a part of it.

    A program over several devices would not raise: XLA ends the process (seen with JAX 0.10).
    """
    _check_not_donated(jax.tree.leaves(state))


def check_donatable(state: PyTree) -> None:
    """Raise `BatchError` where a step cannot reuse the memory of a state.

    A step has used it up, or an array is in it twice.
    """
    leaves = jax.tree.leaves(state)
    _check_not_donated(leaves)
    if len(set(map(id, leaves))) < len(leaves):
        raise errors.BatchError(
            "an array is twice in this state, and a step reuses the memory of each array once. "
            "Copy it for its second place, jnp.copy(array), or program.place(state), which copies "
            "all."
        )


def _check_not_donated(leaves: list[Any]) -> None:
    try:
        donated = _any_deleted(leaves)
    except jax.errors.ConcretizationTypeError:  # traced: there is no memory yet
        return
    if donated:
        raise errors.BatchError(
            "this state was given to an earlier step, which reused its memory for the new state. "
            "Keep what step returns: state, metrics = program.step(state, batch). To keep an old "
            "state, copy it first: jax.tree.map(jnp.copy, state)."
        )


def _any_deleted(leaves: list[Any]) -> bool:
    try:
        return any(map(_is_deleted, leaves))  # runs in every step, so no Python for each leaf
    except AttributeError:  # leaves from elsewhere may be NumPy arrays, which nobody donates
        return any(getattr(leaf, "is_deleted", bool)() for leaf in leaves)
