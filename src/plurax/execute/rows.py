"""The rows of a step: which are real, and the random key of each.

A batch of `n` examples lies in `N >= n` rows, so that one compiled program takes every batch size.
Row `i` holds example `i mod n`: rows beyond the batch repeat a real example, with its own key, and
are left out by selection. Multiplying them by zero would turn an overflow in one into a NaN.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Key, PyTree


class Rows(NamedTuple):
    """Some rows of a step's batch.

    **Fields:** `batch`, a tree of arrays `(N, ...)`; `keys`, shape `(N,)`, one random key per row;
    `mask`, shape `(N,)`, true where the row is an example of the batch.
    """

    batch: PyTree
    keys: Key[Array, "N"]
    mask: Bool[Array, "N"]


def index_rows(
    batch: PyTree, key: Key[Array, ""], count: Int[Array, ""], first: Int[Array, ""] | int = 0
) -> Rows:
    """Give each row its key and mask; `first` is the number of the first row in the whole batch.

    Keys depend on the step's key and the example's number only, never on the mesh.
    """
    size = jax.tree.leaves(batch)[0].shape[0]
    numbers = first + jnp.arange(size, dtype=jnp.int32)
    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, numbers % count)
    return Rows(batch, keys, numbers < count)


def index_device_rows(
    batch: PyTree, key: Key[Array, ""], count: Int[Array, ""], devices: int
) -> Rows:
    """`number_rows` for the rows of one of so many devices, inside `shard_map` over `data`."""
    size = jax.tree.leaves(batch)[0].shape[0]
    first = jax.lax.axis_index("data") * size if devices > 1 else 0
    return index_rows(batch, key, count, first)
