"""Dims that a reshape joins or takes apart, such as the heads of scores in groups.

    scores of 2 heads of keys, each of 3 heads of queries   (B, 2, 3, T, S)   labels b n g t s
    reshaped, for a softmax under one mask of all heads     (B, 6, T, S)             b j t s
    reshaped, for the product with the values               (B, 2, 3, T, S)          b n g t s

A label of a joined dim is known by its parts, `j = (n, g)`, so that taken apart it is these again,
and a number for each of its entries is one for each of theirs.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from plurax.jaxpr.equal_dims import shape_of

Parts = list[tuple[int, int]]
"""The parts of a dim, the outer ones first: the label and the size of each."""


class JoinedDims:
    """The labels of dims that have parts.

    **Arguments:** `numbers`, of new labels; `find`, which returns one of all labels that are equal.
    """

    def __init__(self, numbers: Iterator[int], find: Callable[[int], int]) -> None:
        self._numbers, self._find = numbers, find
        self._apart: dict[int, Parts] = {}

    def of(self, labels: Iterable[int]) -> set[int]:
        """Return the labels of the parts of dims, which of most dims are they themselves."""
        return {part for label in labels for part, _ in self._parts(label, 0)}

    def known(self) -> dict[int, Parts]:
        """Return the parts of each dim that has several."""
        return {self._find(label): self._parts(label, 0) for label in self._apart}

    def reshaped(
        self, eqn: Any, labels: Sequence[int], known: Sequence[int | None]
    ) -> Sequence[int | None]:
        """Return the labels of a reshape's result; those that are `known`, where it cuts parts."""
        sizes = zip(labels, shape_of(eqn.invars[0]), strict=True)
        left = [part for label, size in sizes if size > 1 for part in self._parts(label, size)]
        result: list[int | None] = []
        for before, size in zip(known, shape_of(eqn.outvars[0]), strict=True):
            own: Parts = []
            while left and size > (joined := math.prod(n for _, n in own)):
                own.append(self._outer(left, size // joined))
            if math.prod(n for _, n in own) != size:
                return known
            result.append(self._joined(own) if own else before)
        return result

    def _outer(self, left: Parts, size: int) -> tuple[int, int]:
        """Take the first of the parts that are left, or as much of it as has this size."""
        label, whole = left.pop(0)
        if whole <= size or whole % size:
            return label, whole
        outer, inner = ((next(self._numbers), n) for n in (size, whole // size))
        self._apart[label] = [outer, inner]
        left.insert(0, inner)
        return outer

    def _joined(self, parts: Parts) -> int:
        """Return the label of a dim with these parts."""
        if len(parts) == 1:
            return parts[0][0]
        same = (label for label in self._apart if self._parts(label, 0) == parts)
        label = next(same, None)
        if label is None:
            label = next(self._numbers)
            self._apart[label] = parts
        return self._find(label)

    def _parts(self, label: int, size: int) -> Parts:
        """Return the parts of a dim of this size, none of which has parts."""
        own = self._find(label)
        apart = next((p for one, p in self._apart.items() if self._find(one) == own), None)
        if apart is None:
            return [(own, size)]
        return [part for inner, n in apart for part in self._parts(inner, n)]


def aligned(
    array: Array, labels: Sequence[int], target: Sequence[int], parts: Mapping[int, Parts]
) -> Array:
    """Return an array with its dims, by their labels, where `target` has them, else of size 1.

    **Arguments:** `parts`, of the labels that have several.
    """
    own: Parts = []
    for label, size in zip(labels, array.shape, strict=True):
        own += parts.get(label, [(label, size)]) if size > 1 else [(label, size)]
    array = array.reshape([size for _, size in own])
    wanted = [parts.get(label, [(label, 1)]) for label in target]
    flat = [label for inner in wanted for label, _ in inner]
    kept = [d for d, (label, _) in enumerate(own) if label in flat]
    array = jnp.squeeze(array, tuple(d for d in range(array.ndim) if d not in kept))
    places = [flat.index(own[d][0]) for d in kept]
    order = sorted(range(len(places)), key=places.__getitem__)
    shape = [1] * len(flat)
    for index in order:
        shape[places[index]] = array.shape[index]
    array = array.transpose(order).reshape(shape)
    joined, end = [], 0
    for inner in wanted:
        end += len(inner)
        sizes = shape[end - len(inner) : end]
        if len(inner) > 1 and max(sizes) > 1:
            sizes = shape[end - len(inner) : end] = [size for _, size in inner]
        joined.append(math.prod(sizes))
    return jnp.broadcast_to(array, shape).reshape(joined)
