"""From a host batch of any size to the rows of a compiled program, on its devices."""

import operator
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import PyTree

from plurax import errors, tree


class Placed(NamedTuple):
    """A batch on its devices: `rows`, a tree of arrays `(N, ...)`, the first `size` being real."""

    rows: PyTree
    size: Any


class Placement:
    """Puts trees of arrays with up to `size` examples into `rows` rows with a given sharding.

    **Arguments:**

    - `like`: a tree of arrays or `jax.ShapeDtypeStruct`s with leading dim `size`.
    - `rows`: leading dim on the devices, at least `size`.
    - `sharding`: of the rows.

    Raises `BatchError` for trees that are not batches.
    """

    def __init__(self, like: PyTree, rows: int, sharding: NamedSharding) -> None:
        self.size = leading_dim(like)
        self.rows = rows
        self.sharding = sharding
        self.structure: Any = jax.tree.structure(like)
        self.like = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), _canonical(leaf)), like
        )
        self._leaves = jax.tree.leaves(self.like)

    def abstract(self) -> PyTree:
        """The rows as `jax.ShapeDtypeStruct`s with their sharding."""
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(
                (self.rows, *leaf.shape[1:]), leaf.dtype, sharding=self.sharding
            ),
            self.like,
        )

    def check(self, batch: PyTree) -> int:
        """The number of examples of a batch. Raises `BatchError` where it does not fit."""
        leaves, structure = jax.tree.flatten(batch)
        fits = structure == self.structure and all(
            np.shape(leaf)[1:] == want.shape[1:]
            and np.ndim(leaf) == len(want.shape)
            and _canonical(leaf) == want.dtype
            for leaf, want in zip(leaves, self._leaves, strict=True)
        )
        if not fits:
            raise errors.batch_mismatch(
                tree.describe(self.like, batch_dim=True), tree.describe(batch)
            )
        count = leading_dim(batch)
        if count > self.size:
            raise errors.batch_too_large(count, self.size)
        return count

    def place(self, batch: PyTree) -> Placed:
        """Check a batch and put it on the devices, filled up by repeating its examples."""
        rows, size = self.fill(batch)
        return Placed(jax.device_put(rows, self.sharding), size)

    def fill(self, batch: PyTree) -> Placed:
        """Check a batch and fill it up; NumPy arrays stay on the host.

        A compiled program takes them from there faster than `jax.device_put` would.
        """
        count = self.check(batch)

        def filled(leaf: Any, like: jax.ShapeDtypeStruct) -> Any:
            if count != self.rows:
                leaf = np.asarray(leaf)
                leaf = np.concatenate([leaf, leaf[np.arange(count, self.rows) % count]])
            if isinstance(leaf, np.ndarray):
                return leaf.astype(like.dtype, copy=False)
            return jax.device_put(leaf, self.sharding)

        return Placed(jax.tree.map(filled, batch, self.like), np.int32(count))


def is_arrays(data: Any) -> bool:
    """Whether `data` is a tree of arrays, rather than an iterable of such trees.

    A list is a sequence of batches; an array, a dict, a tuple or a registered tree is one tree.

    >>> is_arrays({"x": np.ones(3)}), is_arrays([{"x": np.ones(3)}]), is_arrays(iter([]))
    (True, False, False)
    """
    if isinstance(data, list):
        return False
    leaves = jax.tree.leaves(data, is_leaf=_is_stream)
    return bool(leaves) and all(hasattr(leaf, "shape") for leaf in leaves)


def _is_stream(node: Any) -> bool:
    """An iterable that is neither an array nor a tree."""
    known = isinstance(node, Mapping | list | tuple) or hasattr(node, "shape")
    return isinstance(node, Iterable) and not known


def leading_dim(batch: PyTree) -> int:
    """The common leading dim of a tree of arrays. Raises `BatchError`."""
    sizes = {}
    for path, leaf in tree.named_leaves(batch).items():
        if np.ndim(leaf) == 0 and not getattr(leaf, "shape", ()):
            raise errors.batch_leaf_without_dim(path)
        sizes[path] = leaf.shape[0] if hasattr(leaf, "shape") else len(leaf)
    if not sizes or 0 in sizes.values():
        raise errors.batch_is_empty()
    if len(set(sizes.values())) > 1:
        raise errors.batch_uneven_leaves(sizes)
    return next(iter(sizes.values()))


def chunks(data: PyTree | Iterable[PyTree], size: int) -> Iterator[PyTree]:
    """All of a tree of arrays, or of an iterable of such trees, at most `size` rows at a time."""
    for batch in [data] if is_arrays(data) else data:
        for start in range(0, leading_dim(batch), size):
            cut = slice(start, start + size)
            yield jax.tree.map(operator.itemgetter(cut), batch)


def _canonical(leaf: Any) -> np.dtype:
    dtype = leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return dtype
    return jax.dtypes.canonicalize_dtype(dtype)
