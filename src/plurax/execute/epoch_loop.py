"""Run many steps in one compiled loop over data that stay on the devices."""

import itertools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Int, PyTree

from plurax.execute.over_members import traced_once
from plurax.execute.step import Metrics, Step
from plurax.state import TrainState

Loop = Callable[
    [TrainState, PyTree, Int[Array, "S N"], Int[Array, "S"], Int[Array, ""], Int[Array, ""]],
    tuple[TrainState, Metrics],
]


def equal_sizes(
    rows: Int[np.ndarray, "S B"], counts: Int[np.ndarray, "S"]
) -> Iterator[tuple[int, Int[np.ndarray, "T size"], int, int]]:
    """Split an epoch where the batch size changes.

    Yields, for each run of equal sizes: the size, the rows of its steps without padding, its first
    step and its end.

    >>> rows, counts = np.array([[0, 1], [2, 3], [4, 4]]), np.array([2, 2, 1])
    >>> [(size, rows.tolist(), start, end) for size, rows, start, end in equal_sizes(rows, counts)]
    [(2, [[0, 1], [2, 3]], 0, 2), (1, [[4]], 2, 3)]
    """
    rows, counts = np.asarray(rows), np.asarray(counts)
    edges = [0, *(np.flatnonzero(np.diff(counts)) + 1).tolist(), len(counts)]
    for start, end in itertools.pairwise(edges):
        size = int(counts[start])
        yield size, rows[start:end, :size], start, end


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
        once = traced_once(step)  # for the shapes of its metrics, and in the loop

        def take(t: Int[Array, ""]) -> PyTree:
            chosen = jax.tree.map(lambda leaf: leaf.at[rows[t]].get(mode="promise_in_bounds"), data)
            return jax.lax.with_sharding_constraint(chosen, where)

        def body(
            t: Int[Array, ""], carry: tuple[TrainState, Metrics]
        ) -> tuple[TrainState, Metrics]:
            state, metrics = carry
            state, now = once(state, take(t), counts[t])
            return state, jax.tree.map(lambda all_, one: all_.at[t].set(one), metrics, now)

        _, shapes = jax.eval_shape(lambda: once(state, take(first), counts[first]))
        metrics = jax.tree.map(lambda s: jnp.zeros((rows.shape[0],), s.dtype), shapes)
        return jax.lax.fori_loop(first, stop, body, (state, metrics))

    return loop
