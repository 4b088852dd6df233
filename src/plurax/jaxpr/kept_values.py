"""Choose which matrix products the backward pass finds, within a number of bytes.

Rematerialization by a policy keeps the results of all matrix products, or of none. In between there
is a choice for each: kept, it takes its bytes; computed again, its operations. So those are kept
first that take the most operations for each of their bytes, twice the terms of a sum by the bytes
of a number. A layer of a transformer on x (4096, 1024), bfloat16, 16 heads, 1,024 tokens:

    result                            terms     within 1/4 of 232 MiB     within 1/2
    q, k, v, out       8 MiB each     1,024     kept                      kept
    attention @ v      8 MiB          1,024     kept                      kept
    up, gate           32 MiB each    1,024     do not fit                kept
    scores             128 MiB        64        -                         do not fit
    down               8 MiB          4,096     no derivative reads it: it is added to x

What is no product is computed again, as under `dots`. So are products in a loop or in a function
with a derivative of its own: their derivatives need what is computed inside, not the result alone.

Budgets are those of torch.compile ("activation memory budget", between what a compiler saves and
recomputing everything: https://pytorch.org/blog/activation-checkpointing-techniques); the choice by
operations and bytes is that of selective recomputation (Korthikanti et al. 2022,
https://arxiv.org/abs/2205.05198, section 5).
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Literal
from jaxtyping import Array, PyTree

from plurax.jaxpr.compat import is_linear, is_plain_call
from plurax.jaxpr.interpret import (
    FlatEquations,
    bind,
    evaluate,
    flat_equations,
    needed,
    variables,
)
from plurax.jaxpr.product_dims import product_operations

KEPT = "plurax.kept"
"""The name of what is kept."""

_LINEAR = frozenset([
    "add", "add_any", "broadcast_in_dim", "concatenate", "pad", "reduce_sum", "reshape", "rev",
    "slice", "squeeze", "sub", "transpose",
])  # fmt: skip
"""Operations whose derivatives read no operand."""


def with_names(fun: Callable[..., PyTree], budget: float) -> Callable[..., PyTree]:
    """Return the function with the name `KEPT` on what is kept.

    `budget`: the share, between 0 and 1, of the bytes of all products that a derivative reads, or
    needs to compute again what it reads.
    """

    def named(*args: PyTree) -> PyTree:
        closed, shapes = jax.make_jaxpr(fun, return_shape=True)(*args)
        jaxpr = closed.jaxpr
        flat = flat_equations(jaxpr.eqns, jaxpr.outvars, inline=is_plain_call)
        known = {**dict(zip(jaxpr.constvars, closed.consts, strict=True)), **flat.constants}
        known |= zip(jaxpr.invars, jax.tree.leaves(args), strict=True)
        kept = _within(flat, set(known), budget)

        def bound(eqn: Any, arrays: Sequence[Array]) -> list[Array]:
            results = zip(eqn.outvars, bind(eqn, arrays), strict=True)
            return [checkpoint_name(x, KEPT) if var in kept else x for var, x in results]

        out = evaluate(flat.eqns, known, flat.results, default=bound)
        return jax.tree.unflatten(jax.tree.structure(shapes), out)

    return named


def _within(flat: FlatEquations, known: set[Any], budget: float) -> set[Any]:
    """Return the variables that are kept, of those that are not `known` anyway."""
    read = [var for eqn in flat.eqns for var in _read_backward(eqn)]
    products = [
        (eqn.outvars[0], operations / max(1, _bytes(eqn.outvars[0])))
        for eqn in needed(flat.eqns, read, known)
        if (operations := product_operations(eqn)) and _can_be_kept(eqn.outvars[0])
    ]
    left = budget * sum(_bytes(var) for var, _ in products)
    kept = set()
    for var, _ in sorted(products, key=lambda product: -product[1]):
        if _bytes(var) <= left:
            left -= _bytes(var)
            kept.add(var)
    return kept


def _read_backward(eqn: Any) -> list[Any]:
    """Return the operands that the derivative of an equation may read."""
    name = eqn.primitive.name
    scaled = name == "mul" and any(isinstance(atom, Literal) for atom in eqn.invars)
    scaled |= name == "div" and isinstance(eqn.invars[1], Literal)
    if is_linear(eqn) or name in _LINEAR or scaled:
        return []
    return variables(eqn.invars[:1] if name == "select_n" else eqn.invars)


def _can_be_kept(var: Any) -> bool:
    """Whether JAX can keep it: it rounds what it keeps, which takes real numbers."""
    return jnp.issubdtype(var.aval.dtype, jnp.floating)


def _bytes(var: Any) -> int:
    return math.prod(var.aval.shape) * var.aval.dtype.itemsize
