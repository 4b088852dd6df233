"""Give convolutions the order of dims that XLA's CPU compiler runs fast, in loops too.

On CPU a convolution runs as a call of Eigen where batch, space and channels come in this order, and
as plain loops, 20 to 60 times slower, where they do not. XLA reorders the dims of those that are
outside any loop, and of no others (https://github.com/jax-ml/jax/issues/12868). The derivatives of
a convolution always come in another order, and a training step is in a loop: over the steps of an
epoch, over microbatches, over members. So the dims are reordered here, after differentiation:

    the gradient of a kernel     x (32, 100, 64) by dy (32, 100, 64), contracting dim 0
    as JAX writes it             convolution, dims f0b_i0o->0bf, window 100: plain loops
    as evaluated here            transpose x to (64, 100, 32) and dy to (100, 32, 64),
                                 convolution, dims b0f_0io->b0f, window 100: Eigen
                                 transpose (64, 3, 64) to (3, 64, 64)

The numbers are the same bit for bit as outside a loop. Twenty steps of two such layers in a loop
took 1.5 s before, and 0.026 s after (2 cores, JAX 0.10.2).
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, PyTree

from plurax.jaxpr.compat import called_jaxpr, is_call
from plurax.jaxpr.interpret import bind, holds, interpret


def channels_last(fun: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Return the same function with the dims of its convolutions reordered.

    Apply it after differentiation, which resolves custom derivatives. Convolutions in loops and
    branches of the function itself stay as they are.

    >>> import jax
    >>> x, kernel = jnp.ones((2, 3, 8)), jnp.ones((4, 3, 5))
    >>> f = channels_last(lambda x, kernel: jax.lax.conv(x, kernel, (1,), "SAME"))
    >>> f(x, kernel).shape
    (2, 4, 8)
    """

    def reordered(*args: PyTree) -> PyTree:
        closed, shapes = jax.make_jaxpr(fun, return_shape=True)(*args)
        out = interpret(
            closed.jaxpr,
            closed.consts,
            jax.tree.leaves(args),
            {"conv_general_dilated": convolve},
            inline=_calls_convolution,
        )
        return jax.tree.unflatten(jax.tree.structure(shapes), out)

    return reordered


def _calls_convolution(eqn: Any) -> bool:
    return is_call(eqn) and holds(called_jaxpr(eqn)[0], "conv_general_dilated")


def convolve(eqn: Any, arrays: Sequence[Array], **changed: Any) -> list[Array]:
    """Evaluate a convolution with the batch first and the channels last.

    `changed`: parameters that are other than in the equation.
    """
    dims = eqn.params["dimension_numbers"]
    space = len(dims.lhs_spec) - 2
    last = lax.ConvDimensionNumbers(
        lhs_spec=(0, space + 1, *range(1, space + 1)),
        rhs_spec=(space + 1, space, *range(space)),
        out_spec=(0, space + 1, *range(1, space + 1)),
    )
    if dims == last:
        return bind(eqn, arrays, **changed)
    x = jnp.transpose(arrays[0], _order(dims.lhs_spec, last.lhs_spec))
    kernel = jnp.transpose(arrays[1], _order(dims.rhs_spec, last.rhs_spec))
    (out,) = bind(eqn, [x, kernel], dimension_numbers=last, **changed)
    return [jnp.transpose(out, _order(last.out_spec, dims.out_spec))]


def _order(now: Sequence[int], wanted: Sequence[int]) -> tuple[int, ...]:
    """Return the permutation that takes the dims of one specification to those of another."""
    order = np.zeros(len(now), int)
    order[list(wanted)] = now
    return tuple(int(dim) for dim in order)
