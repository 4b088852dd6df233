"""Arrays of blocks: stacks, sums, extremes, and lists of arrays some of which are None."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from plurax.jaxpr.forms import EXTREMES
from plurax.tree import sum_dtype


def neutral(name: str, dtype: Any) -> Any:
    """Return what an extreme starts with."""
    if dtype == jnp.bool_:
        return name in ("reduce_and", "reduce_min")
    largest = name == "reduce_max"
    if jnp.issubdtype(dtype, jnp.integer):
        limits = np.iinfo(dtype)
        return limits.min if largest else limits.max
    return -jnp.inf if largest else jnp.inf


def combine(name: str, total: Array, part: Array) -> Array:
    """Return the extreme of two."""
    both = {"max": jnp.maximum, "min": jnp.minimum, "and": jnp.bitwise_and, "or": jnp.bitwise_or}
    return both[EXTREMES[name]](total, part)


def transposed(array: Any, order: tuple[int, ...]) -> Any:
    """Return an array with its dims in an order; the array itself where they are."""
    return array if order == tuple(range(array.ndim)) else array.transpose(order)


def inverse(order: tuple[int, ...]) -> tuple[int, ...]:
    """Return the order that undoes an order of dims."""
    return tuple(map(order.index, range(len(order))))


def wide_dtype(dtype: Any) -> Any:
    """Return the dtype in which blocks are added up."""
    return sum_dtype(dtype) if jnp.issubdtype(dtype, jnp.floating) else dtype


def finite(shift: Array) -> Array:
    """Return the maximum, 0 where there is no score but -inf, which would make 0 of exp a NaN."""
    return jnp.where(shift == -jnp.inf, 0, shift)


def floating(arrays: Sequence[Any], chosen: Sequence[Any]) -> list[Any]:
    """Return the arrays that have a derivative, and None for others and those not `chosen`."""
    return [
        x if mark not in (None, False) and jnp.issubdtype(x.dtype, jnp.inexact) else None
        for x, mark in zip(arrays, chosen, strict=True)
    ]


def filled(arrays: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    """Return the arrays, with those of `others` that are not None in their places."""
    return [x if y is None else y for x, y in zip(arrays, others, strict=True)]


def plus(totals: Sequence[Any], more: Sequence[Any]) -> list[Any]:
    """Add cotangents to their sums."""
    return [None if x is None else x + y.astype(x.dtype) for x, y in zip(totals, more, strict=True)]


def zero_blocks(array: Any, count: int | None = None) -> Any:
    """Return zeros of the shape of an array, or of so many of its blocks."""
    if array is None:
        return None
    return jnp.zeros(array.shape if count is None else (count, *array.shape[1:]), array.dtype)


def stack_blocks(array: Array, dim: int, block: int) -> Array:
    """Return the whole blocks along a dim as `(n, ..., block, ...)`."""
    count = array.shape[dim] // block
    if count * block < array.shape[dim]:
        array = lax.slice_in_dim(array, 0, count * block, axis=dim)
    shape = (*array.shape[:dim], count, block, *array.shape[dim + 1 :])
    return jnp.moveaxis(array.reshape(shape), dim, 0)


def unstack_blocks(stack: Array, dim: int) -> Array:
    """Return blocks `(n, ..., block, ...)` as one array, along a dim of a block."""
    blocks = jnp.moveaxis(stack, 0, dim)
    return blocks.reshape(*blocks.shape[:dim], -1, *blocks.shape[dim + 2 :])
