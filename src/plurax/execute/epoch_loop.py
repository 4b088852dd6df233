"""Run many steps in one compiled loop over data that stay on the devices."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jaxtyping import Array, Int, PyTree

from plurax.execute.step import Metrics, Step
from plurax.state import TrainState

Loop = Callable[
    [TrainState, PyTree, Int[Array, "S N"], Int[Array, "S"], Int[Array, ""], Int[Array, ""]],
    tuple[TrainState, Metrics],
]


def make_loop(step: Step, where: NamedSharding) -> Loop:
    """Return `(state, data, rows, counts, first, stop) -> (state, metrics)` over many steps.

    As a program:

        for t in range(first, stop):
            state, metrics[t] = step(state, data[rows[t]], counts[t])

    **Arguments of the result:**

    - `data`: tree of arrays `(examples, ...)`, replicated; nothing is copied.
    - `rows`: `(S, N)` integers, the example in each row of each step; N split over `data`.
    - `counts`: `(S,)` integers, how many rows of each step are real.
    - `first`, `stop`: integer scalars; one compiled program runs every range.

    `where` is the sharding of a step's rows. Metrics have shape `(S,)`; outside `first:stop` they
    are zero.
    """

    def loop(
        state: TrainState,
        data: PyTree,
        rows: Int[Array, "S N"],
        counts: Int[Array, "S"],
        first: Int[Array, ""],
        stop: Int[Array, ""],
    ) -> tuple[TrainState, Metrics]:
        def take(t: Int[Array, ""]) -> PyTree:
            chosen = jax.tree.map(lambda leaf: leaf.at[rows[t]].get(mode="promise_in_bounds"), data)
            return jax.lax.with_sharding_constraint(chosen, where)

        def body(
            t: Int[Array, ""], carry: tuple[TrainState, Metrics]
        ) -> tuple[TrainState, Metrics]:
            state, metrics = carry
            state, now = step(state, take(t), counts[t])
            return state, jax.tree.map(lambda all_, one: all_.at[t].set(one), metrics, now)

        _, shapes = jax.eval_shape(lambda: step(state, take(first), counts[first]))
        metrics = jax.tree.map(lambda s: jnp.zeros((rows.shape[0],), s.dtype), shapes)
        return jax.lax.fori_loop(first, stop, body, (state, metrics))

    return loop
