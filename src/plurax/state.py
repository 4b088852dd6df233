"""What training changes, and what a checkpoint holds."""

import dataclasses

import jax
import numpy as np
from jaxtyping import Array, Int, Key, PyTree


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
