"""Lift a function of one member to all members of a device, some of them at a time.

Problem. K networks on one device need K times the temporaries of one if they run together, and
leave the device idle if they run one by one. So `chunk` members run together, as one `vmap`, and a
`fori_loop` goes over the chunks. Example, a state `f32[9, 3, 5]` of 9 members, `chunk=4`:

    loop iteration 0    ( 4, 3, 5)   members 0 to 3, one `vmap`
    loop iteration 1    ( 4, 3, 5)   members 4 to 7
    after the loop      ( 1, 3, 5)   member 8: a second, smaller `vmap` is compiled for it
    results             ( 9, ...)

Each chunk is read with `dynamic_slice` and written back with `dynamic_update_slice`, so the loop
holds one state of all members and the temporaries of one chunk.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from plurax.jaxpr.compat import AS_EQUATIONS


def over_members(
    step: Callable[..., tuple[PyTree, PyTree]],
    chunk: int | None,
    *,
    keep: bool = True,
    in_branch: bool = False,
) -> Callable[..., tuple[PyTree, PyTree]]:
    """Return `(state, members, *shared) -> (state, results)` over all members.

    As a program:

        for k in range(members):
            state[k], results[k] = step(state[k], members[k], *shared)

    **Arguments:**

    - `step`: `(state, member, *shared) -> (state, results)` of one member.
    - `chunk`: members at a time; None for all.
    - `keep`: whether the states are written back; without it `step` returns `()` for a state.
    - `in_branch`: whether each chunk of a loop is computed in a branch, as on CPU it should be: XLA
      fuses what is computed into the write to the state of all members, computes it again for
      others who read it, and copies that whole state in every iteration, so that they read the old
      one. Nothing is fused out of a branch. It is always taken, which the compiler cannot know.

    >>> step = lambda state, rate, x: (state - rate * x, state)
    >>> states, results = over_members(step, 2)(jnp.ones(3), jnp.arange(3.0), 2.0)
    >>> states.tolist(), results.tolist()
    ([1.0, -1.0, -3.0], [1.0, 1.0, 1.0])
    """

    def run(state: PyTree, members: PyTree, *shared: Any) -> tuple[PyTree, PyTree]:
        count = jax.tree.leaves(members)[0].shape[0]
        size = min(chunk or count, count)
        # `shared` (batch, data, step numbers) has no member dim.
        each = traced_once(jax.vmap(step, in_axes=(0, 0, *[None] * len(shared))))

        def cut(leaf: Array, first: Any, size: int) -> Array:
            return jax.lax.dynamic_slice_in_dim(leaf, first, size)

        def some(first: Any, size: int, state: PyTree) -> tuple[PyTree, PyTree]:
            of_some = jax.tree.map(lambda leaf: cut(leaf, first, size), (state, members))
            return each(*of_some, *shared)

        if size == count:
            return some(0, count, state)

        def put(all_: PyTree, new: PyTree, first: Any) -> PyTree:
            return jax.tree.map(
                lambda a, n: jax.lax.dynamic_update_slice_in_dim(a, n, first, 0), all_, new
            )

        def body(first: Any, size: int, carry: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
            state, results = carry
            if in_branch and not isinstance(first, int):
                new, result = jax.lax.cond(
                    first < count,
                    lambda: some(first, size, state),
                    lambda: (jax.tree.map(lambda x: cut(x, first, size), state), nothing(size)),
                )
            else:
                new, result = some(first, size, state)
            return (put(state, new, first) if keep else state), put(results, result, first)

        shapes = jax.eval_shape(lambda: some(0, size, state)[1])

        def nothing(size: int) -> PyTree:
            return jax.tree.map(lambda s: jnp.zeros((size, *s.shape[1:]), s.dtype), shapes)

        results = nothing(count)
        whole, rest = divmod(count, size)
        carry = jax.lax.fori_loop(
            0, whole, lambda i, carry: body(i * size, size, carry), (state, results)
        )
        # `vmap` needs a static size, so the remainder is one more call with a size of its own.
        carry = body(whole * size, rest, carry) if rest else carry
        return carry if keep else ((), carry[1])

    return run


def traced_once(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Return `fun` to be traced once, though asked for the shapes of its results before its calls.

    The equations are part of the caller's, as those of `fun` itself would be.
    """
    return jax.jit(fun, inline=AS_EQUATIONS)
