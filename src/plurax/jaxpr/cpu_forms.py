"""Give convolutions and products the forms that XLA's CPU compiler runs fast, in loops too.

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

A product that sums over several dims has an operand transposed before it, together with all that
computes this operand, number by number along columns: of a perceptron's hidden layer the gradient
of its activation, from five arrays. Over one dim it has none, since the library reads columns:

    the gradient of a weight     dy (64, 64, 1024) by x (64, 64, 256), contracting dims 0 and 1
    as evaluated here            dy (4096, 1024) by x (4096, 256), contracting dim 0

Gradients of four such layers took 0.41 to 0.46 times as long, with a norm before them 0.69 to 0.86
(2 cores; JAX 0.10.2, the former also 0.11.2 and 0.12.0).
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, PyTree

from plurax.jaxpr.compat import Scan, called_jaxpr, is_call_or_remat, is_recomputed
from plurax.jaxpr.interpret import all_equations, bind, interpret


def in_cpu_forms(fun: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Return the same function with its convolutions and products in the forms that are fast.

    Apply it after differentiation, which resolves custom derivatives. Bodies of `lax.scan` are
    evaluated so too. Those of other loops and of branches stay as they are, and what a
    `jax.checkpoint` with a barrier of its own recomputes.

    >>> import jax
    >>> x, kernel = jnp.ones((2, 3, 8)), jnp.ones((4, 3, 5))
    >>> f = in_cpu_forms(lambda x, kernel: jax.lax.conv(x, kernel, (1,), "SAME"))
    >>> f(x, kernel).shape
    (2, 4, 8)
    """

    def reformed(*args: PyTree) -> PyTree:
        closed, shapes = jax.make_jaxpr(fun, return_shape=True)(*args)
        out = _evaluate(closed.jaxpr, closed.consts, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), out)

    return reformed


def _evaluate(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    handlers = {"conv_general_dilated": convolve, "dot_general": multiply, "scan": _scan}
    return interpret(jaxpr, consts, args, handlers, inline=_is_opened)


def _is_opened(eqn: Any) -> bool:
    return is_call_or_remat(eqn) and not is_recomputed(eqn) and _has_others(called_jaxpr(eqn)[0])


def _has_others(jaxpr: Any) -> bool:
    """Whether a jaxpr has convolutions or products that may be in another form."""
    return any(
        eqn.primitive.name == "conv_general_dilated" or _merged(eqn) is not None
        for eqn in all_equations(jaxpr)
    )


def _scan(eqn: Any, operands: Sequence[Any]) -> list[Any]:
    scan = Scan.of(eqn)
    if not _has_others(scan.body):
        return bind(eqn, operands)
    return scan.apply(lambda *args: _evaluate(scan.body, scan.body_consts, args), operands)


# --- Products -------------------------------------------------------------------------------------


def multiply(eqn: Any, arrays: Sequence[Array]) -> list[Array]:
    """Evaluate a product, the dims that it sums over merged into one where they are adjacent."""
    merged = _merged(eqn)
    if merged is None:
        return bind(eqn, arrays)
    dims, count = merged
    operands = [
        lax.collapse(array, start, start + count)
        for array, (start,) in zip(arrays, dims[0], strict=True)
    ]
    return bind(eqn, operands, dimension_numbers=dims)


def _merged(eqn: Any) -> tuple[Any, int] | None:
    """Return the dimension numbers of a product over one dim, and how many dims it stands for.

    None where they are not adjacent, in one order, in both operands.
    """
    if eqn.primitive.name != "dot_general":
        return None
    (left, right), batch = eqn.params["dimension_numbers"]
    count = len(left)
    pairs = sorted(zip(left, right, strict=True))
    starts = [pairs[0][side] for side in (0, 1)] if pairs else []
    if count < 2 or pairs != [(starts[0] + i, starts[1] + i) for i in range(count)]:
        return None
    moved = [
        tuple(dim - count + 1 if dim > start else dim for dim in dims)
        for dims, start in zip(batch, starts, strict=True)
    ]
    return (((starts[0],), (starts[1],)), tuple(moved)), count


# --- Convolutions ---------------------------------------------------------------------------------


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
