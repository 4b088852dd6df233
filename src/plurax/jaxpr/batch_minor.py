"""Compute with the batch in the minor dim: a transformation of a traced function.

The result of a small matrix product `(B, F) @ (F, G)` has the minor dim `G`, perhaps 2 or 10, which
does not fill a CPU's vector registers. With the batch in the minor dim the same product is
`(G, F) @ (F, B)`, and vectors run over the batch. So the function is written the ordinary way, and
its equations are evaluated on arrays stored with dim 0 last.

    batch 64, features 16, hidden 10

    equation              as written              as stored and computed
    x                     (64, 16)                (16, 64), `batch_last`
    h = x @ w             (64, 16) @ (16, 10)     (10, 16) @ (16, 64) = (10, 64)
    c = broadcast b       (10,) to (64, 10)       (10,) to (10, 64)
    a = tanh(h + c)       (64, 10)                (10, 64)
    s = sort(a)           (64, 10)                no rule: transposed to (64, 10), then sorted

How a value is stored changes the order of sums, and nothing else.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, PyTree

from plurax.jaxpr.compat import ELEMENTWISE, REDUCTIONS, is_call
from plurax.jaxpr.interpret import bind, interpret

FEW = 4
"""Up to this many terms or rows, a matrix product is written out as multiplications and additions
(measured: docs/performance.md).
"""


class Stored(NamedTuple):
    """A value: its `array`, and `batch_last`, whether dim 0 is stored last."""

    array: Array
    batch_last: bool = False

    def to_first(self) -> Array:
        """Return the array in the order as written."""
        return jnp.moveaxis(self.array, -1, 0) if self.batch_last else self.array

    def to_last(self) -> Array:
        """Return the array with dim 0 last."""
        return self.array if self.batch_last else jnp.moveaxis(self.array, 0, -1)


def batch_minor(fun: Callable[..., PyTree], batch_argument: int) -> Callable[..., PyTree]:
    """Return the same function, computed with dim 0 of one argument's leaves as the minor dim.

    Apply it after differentiation, which resolves custom derivatives.

    **Arguments:** `fun`, a function of trees of arrays; `batch_argument`, the index of the argument
    whose leaves have shape `(B, ...)`.

    >>> import jax.numpy as jnp
    >>> f = batch_minor(lambda w, x: jnp.tanh(x @ w), batch_argument=1)
    >>> f(jnp.ones((2, 3)), jnp.zeros((5, 2))).shape
    (5, 3)
    """

    def batch_last(*args: PyTree) -> PyTree:
        closed, shapes = jax.make_jaxpr(fun, return_shape=True)(*args)
        values = []
        for index, arg in enumerate(args):
            for leaf in jax.tree.leaves(arg):
                value = Stored(jnp.asarray(leaf))
                # A vector has its batch dim last already.
                wide = index == batch_argument and value.array.ndim >= 2
                values.append(Stored(value.to_last(), True) if wide else value)
        size = jax.tree.leaves(args[batch_argument])[0].shape[0]
        out = interpret(
            closed.jaxpr,
            closed.consts,
            values,
            {"annotate": lambda eqn, inputs: inputs},
            functools.partial(_evaluate, size=size),
            inline=is_call,
            lift=Stored,
        )
        return jax.tree.unflatten(jax.tree.structure(shapes), [value.to_first() for value in out])

    return batch_last


def _evaluate(eqn: Any, inputs: list[Stored], size: int) -> list[Stored]:
    """Evaluate one equation, by its rule if it has one; `size` is the length of the batch."""
    result = _by_rule(eqn, inputs, size) if eqn.outvars else None  # a print has none
    if result is not None:
        return [result]
    return list(map(Stored, bind(eqn, [value.to_first() for value in inputs])))


def _by_rule(equation: Any, inputs: Sequence[Stored], size: int) -> Stored | None:
    """Return the result with the batch last; None if no input has it last, or without a rule."""
    name, params = equation.primitive.name, equation.params
    shape = equation.outvars[0].aval.shape
    if name == "broadcast_in_dim":
        return _broadcast(inputs[0], shape, params["broadcast_dimensions"], size)
    if not any(value.batch_last for value in inputs):
        if name == "reshape" and jnp.shape(inputs[0].array) == (size,) and shape[:1] == (size,):
            return Stored(lax.reshape(inputs[0].array, (*shape[1:], size)), True)
        return None
    if name in ELEMENTWISE:
        arrays = [v.to_last() if jnp.ndim(v.array) == len(shape) else v.array for v in inputs]
        return Stored(equation.primitive.bind(*arrays, **params), True)
    if name in REDUCTIONS:
        return _reduce(equation, inputs[0])
    if name == "dot_general":
        return _dot(inputs[0], inputs[1], params)
    value = inputs[0]
    if name == "reshape" and shape[:1] == (size,) and params["dimensions"] is None:
        return Stored(lax.reshape(value.array, (*shape[1:], size)), len(shape) > 1)
    if name == "squeeze" and 0 not in params["dimensions"]:
        return Stored(lax.squeeze(value.array, [d - 1 for d in params["dimensions"]]),
                      len(shape) > 1)  # fmt: skip
    if name == "transpose" and params["permutation"][0] == 0:
        order = [d - 1 for d in params["permutation"][1:]]
        return Stored(lax.transpose(value.array, [*order, len(order)]), True)
    if name == "concatenate" and params["dimension"] > 0:
        return Stored(lax.concatenate([v.to_last() for v in inputs], params["dimension"] - 1), True)
    if name == "slice":
        strides = params["strides"] or (1,) * len(shape)
        bounds = (params["start_indices"], params["limit_indices"], strides)
        return Stored(lax.slice(value.array, *((*b[1:], b[0]) for b in bounds)), True)
    return None


def _broadcast(
    value: Stored, shape: Sequence[int], dimensions: Sequence[int], size: int
) -> Stored | None:
    """Broadcast with the batch last; None if the result has no batch."""
    batched = len(shape) > 1 and shape[0] == size
    if value.batch_last:
        if not batched or dimensions[0] != 0:
            return None
        order = [*dimensions[1:], dimensions[0]]
    else:
        if not batched or (0 in dimensions and value.array.ndim > 1):
            return None
        order = list(dimensions)
    stored_dims = [len(shape) - 1 if d == 0 else d - 1 for d in order]
    return Stored(lax.broadcast_in_dim(value.array, (*shape[1:], shape[0]), stored_dims), True)


def _reduce(equation: Any, value: Stored) -> Stored:
    """Reduce over dims, renumbered for the stored order."""
    rank = value.array.ndim
    axes = tuple(rank - 1 if axis == 0 else axis - 1 for axis in equation.params["axes"])
    if equation.primitive.name in ("argmax", "argmin"):
        best = jnp.max if equation.primitive.name == "argmax" else jnp.min
        out = _first_best(value.array, axes[0], best, equation.params["index_dtype"])
    else:
        out = equation.primitive.bind(value.array, **{**equation.params, "axes": axes})
    return Stored(out, 0 not in equation.params["axes"] and out.ndim > 1)


def _first_best(array: Array, axis: int, best: Callable[..., Array], dtype: Any) -> Array:
    """Return the index of the first maximum (minimum), or of the first NaN, in loops that
    vectorize.

    XLA's CPU compiler reduces pairs of value and index one by one.
    """
    is_best = array == best(array, axis=axis, keepdims=True)
    if jnp.issubdtype(array.dtype, jnp.inexact):
        is_best |= array != array
    index = lax.broadcasted_iota(dtype, array.shape, axis)
    return jnp.min(jnp.where(is_best, index, jnp.asarray(array.shape[axis] - 1, dtype)), axis=axis)


def _dot(left: Stored, right: Stored, params: Any) -> Stored | None:
    """Multiply two tensors, in the operand order that leaves the batch in the minor dim."""
    (left_sum, right_sum), (left_batch, right_batch) = params["dimension_numbers"]
    if left_batch or right_batch:
        return None

    # Dims are those of the written order; `stored_dim` gives their position in the stored order.
    def stored_dim(value: Stored, dim: int) -> int:
        return (dim - 1) % value.array.ndim if value.batch_last else dim

    def free(side: str, value: Stored, summed: Sequence[int]) -> list[tuple[str, int]]:
        return [(side, d) for d in range(value.array.ndim) if d not in summed]

    def stored_order(labels: list[tuple[str, int]], value: Stored) -> list[tuple[str, int]]:
        return sorted(labels, key=lambda label: stored_dim(value, label[1]))

    left_free, right_free = free("l", left, left_sum), free("r", right, right_sum)
    written = [*left_free, *right_free]
    side = {"l": left, "r": right}
    batch_first = len(written) > 1 and written[0][1] == 0 and side[written[0][0]].batch_last
    wanted = [*written[1:], written[0]] if batch_first else written
    l_stored, r_stored = stored_order(left_free, left), stored_order(right_free, right)
    l_dims = [stored_dim(left, d) for d in left_sum]
    r_dims = [stored_dim(right, d) for d in right_sum]
    options: dict[str, Any] = {key: params[key] for key in ("precision", "preferred_element_type")}
    dtype = params["preferred_element_type"] or left.array.dtype
    # Only a matrix by a matrix is written out, and only at the default precision.
    plain_product = len(left_free) == len(right_free) == len(left_sum) == 1
    if batch_first and plain_product and not options["precision"]:
        big, small = (left, right) if left.batch_last else (right, left)
        b_dims, s_dims = (l_dims, r_dims) if left.batch_last else (r_dims, l_dims)
        big_SB = big.array if b_dims[0] == 0 else big.array.T
        small_SG = small.array if s_dims[0] == 0 else small.array.T
        few = _few_terms(big_SB.astype(dtype), small_SG.astype(dtype))
        if few is not None:
            return Stored(few, True)
    if [*r_stored, *l_stored] == wanted or l_stored[-1:] == wanted[-1:]:
        out = lax.dot_general(right.array, left.array, ((r_dims, l_dims), ((), ())), **options)
        got = [*r_stored, *l_stored]
    else:
        out = lax.dot_general(left.array, right.array, ((l_dims, r_dims), ((), ())), **options)
        got = [*l_stored, *r_stored]
    # Neither operand order gives the wanted dims: transpose the result.
    if got != wanted:
        out = lax.transpose(out, [got.index(label) for label in wanted])
    return Stored(out, batch_first)


def _few_terms(big_SB: Array, small_SG: Array) -> Array | None:
    """Return `small.T @ big` written out, if it has too few terms or rows for a matrix product.

    The multiplications and additions are fused into one loop with the operations around them.
    """
    terms, rows = small_SG.shape
    if 0 < terms <= FEW:
        products = [small_SG[k][:, None] * big_SB[k][None, :] for k in range(terms)]
        return functools.reduce(jnp.add, products)
    if 0 < rows <= FEW:
        return jnp.stack([jnp.sum(small_SG[:, k, None] * big_SB, axis=0) for k in range(rows)])
    return None
