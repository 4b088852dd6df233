"""Sum a function's results over microbatches in one compiled loop."""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from plurax.tree import sum_dtype

Total = TypeVar("Total")


def accumulate(
    fun: Callable[[PyTree, PyTree], tuple[Total, PyTree]], microbatches: int
) -> Callable[[PyTree, PyTree], tuple[Total, PyTree]]:
    """Return `fun(state, rows) -> (total, state)` for rows stacked by microbatch.

    As a program:

        total = 0
        for m in range(microbatches):
            part, state = fun(state, rows[m])
            total = total + part
        return total, state

    **Arguments:**

    - `fun`: returns a tree of sums and the next state.
    - `microbatches`: leading dim of every leaf of the `rows` given to the result.

    Sums are carried in float32 or wider. There is no communication here: each device keeps its own
    sums, unless `fun` reduces them.

    >>> import jax.numpy as jnp
    >>> total, steps = accumulate(lambda s, x: (x.sum(), s + 1), 2)(0, jnp.ones((2, 3)))
    >>> float(total), int(steps)
    (6.0, 2)
    """

    def run(state: PyTree, rows: PyTree) -> tuple[Total, PyTree]:
        if microbatches == 1:
            part, state = fun(state, jax.tree.map(lambda leaf: leaf[0], rows))
            return jax.tree.map(_widen, part), state

        # `jit` caches the trace, so that `eval_shape` and `scan` trace `fun` once together.
        traced = jax.jit(fun)

        def body(carry: tuple[Total, PyTree], row: PyTree) -> tuple[tuple[Total, PyTree], None]:
            total, state = carry
            part, state = traced(state, row)
            return (jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, part), state), None

        shapes, _ = jax.eval_shape(lambda: traced(state, jax.tree.map(lambda x: x[0], rows)))
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, sum_dtype(s.dtype)), shapes)
        (total, state), _ = jax.lax.scan(body, (zeros, state), rows)
        return total, state

    return run


def _widen(value: jax.Array) -> jax.Array:
    return value.astype(sum_dtype(value.dtype))
