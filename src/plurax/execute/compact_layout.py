"""Gradients of members on TPUs, in the layout of the state.

Problem. A TPU stores an array in tiles of 8 × 128 numbers over two of its dims, and pads them to
whole tiles. Its compiler keeps the state with little padding, and the result of a product of each
member with the members first. An update that may be left out reads the norm of all gradients
before any of them, so that it is not fused with their products: it would be computed in their
layout, and the state copied there and back. Example, 1,000 members with a matrix (40, 40):

    gradient, a product     members, then rows, then columns      (1000, 40, 128): 3.2 × the bytes
    state                   rows, then columns, then members      (40, 40, 1024)

So gradients are copied to the state's layout once. Numbers are the same, to the last bit.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import optax
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, PyTree

TILE = (8, 128)


def compact_order(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the order of dims, the last one in lanes, in which tiles pad an array the least.

    >>> compact_order((1000, 40, 40)), compact_order((100, 64, 256))
    ((1, 2, 0), (0, 1, 2))
    """

    def padded(order: tuple[int, ...]) -> int:
        sizes = [shape[dim] for dim in order]
        tiles = [-(-size // part) * part for size, part in zip(sizes[-2:], TILE, strict=True)]
        return math.prod([*sizes[:-2], *tiles])

    dims = tuple(range(len(shape)))
    if len(shape) < 2:
        return dims
    # Only which two dims are tiled matters; of equals the first is the usual order.
    last = itertools.permutations(reversed(dims), 2)
    orders = [(*(dim for dim in dims if dim not in two), *reversed(two)) for two in last]
    return min(orders, key=padded)


@jax.custom_batching.custom_vmap
def _compact(leaf: Array) -> Array:
    return leaf


@_compact.def_vmap
def _compact_members(size: int, batched: list[bool], leaf: Array) -> tuple[Array, bool]:
    del size, batched
    return with_layout_constraint(leaf, Layout(compact_order(leaf.shape))), True


def with_compact_gradients(
    optimizer: optax.GradientTransformation,
) -> optax.GradientTransformation:
    """Return the optimizer, which reads the gradients of members in the layout of the state."""

    def update(grads: PyTree, *args: Any, **kwargs: Any) -> tuple[PyTree, PyTree]:
        return optimizer.update(jax.tree.map(_compact, grads), *args, **kwargs)

    return optimizer._replace(update=update)
