"""Give the rows of a step their mask and their random keys.

A batch of `n` examples occupies `N >= n` rows, so that one compiled program takes every batch size.
Row `i` holds example `i mod n`: padding rows repeat a real example, with its key, and are excluded
by `where`. Multiplying them by zero instead would turn an overflow in one of them into a NaN.

    n = 3, N = 4, 2 devices     device 0     device 1
    row                         0     1      2     3
    example = row mod 3         0     1      2     0
    key                         k0    k1     k2    k0
    mask = row < 3              T     T      T     F
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Key, PyTree


class Rows(NamedTuple):
    """Rows of a step's batch.

    **Fields:** `batch`, a tree of arrays `(N, ...)`; `keys`, shape `(N,)`, one random key per row;
    `mask`, shape `(N,)`, true for a real row.
    """

    batch: PyTree
    keys: Key[Array, "N"]
    mask: Bool[Array, "N"]


class StepKey(NamedTuple):
    """The random key of a step, and which examples of the step's batch are here.

    **Fields:** `key`; `first`, the index of the first of these examples in the step's batch, where
    others compute the rest of it, or None.
    """

    key: Key[Array, ""]
    first: Int[Array, ""] | None = None


class Chunk(NamedTuple):
    """Which examples of an evaluation a call has.

    **Fields:** `first`, the index of the first of them in all data; `examples`, how many they are.
    """

    first: Int[Array, ""]
    examples: Int[Array, ""]


def abstract_rows(batch: PyTree) -> Rows:
    """Return rows as `jax.ShapeDtypeStruct`s, for a batch of such with leaves `(N, ...)`."""
    size = jax.tree.leaves(batch)[0].shape[0]
    rows: Rows = jax.eval_shape(
        lambda: Rows((), jax.random.split(jax.random.key(0), size), jnp.ones(size, jnp.bool_))
    )
    return rows._replace(batch=batch)


def index_rows(
    batch: PyTree,
    key: Key[Array, ""] | StepKey,
    count: Int[Array, ""],
    first: Int[Array, ""] | int = 0,
) -> Rows:
    """Give each row its key and mask; `first` is the index of the first row in the whole batch.

    A key depends on the step's key and the example's index only, never on the mesh.
    """
    size = jax.tree.leaves(batch)[0].shape[0]
    numbers = first + jnp.arange(size, dtype=jnp.int32)
    key, before = key if isinstance(key, StepKey) else (key, None)
    examples = numbers % count if before is None else before + numbers % count
    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, examples)
    return Rows(batch, keys, numbers < count)


def index_device_rows(
    batch: PyTree, key: Key[Array, ""] | StepKey, count: Int[Array, ""], parts: Sequence[int]
) -> Rows:
    """Call `index_rows` for one device's rows, inside `shard_map` over `data`.

    `parts`: the number of microbatches of each device.
    """
    size = jax.tree.leaves(batch)[0].shape[0]
    return index_rows(batch, key, count, first_row(parts, size))


def first_row(parts: Sequence[int], size: int) -> Int[Array, ""] | int:
    """Return the index in the whole batch of the first of this device's `size` rows."""
    if len(set(parts)) == 1:
        return jax.lax.axis_index("data") * size if len(parts) > 1 else 0
    return of_this_device(row_numbers(parts, size * len(parts))[::size])


def of_this_device(values: Any) -> Int[Array, ""]:
    """Return one of the values of all devices of `data`, inside `shard_map` over it."""
    return jnp.asarray(values, jnp.int32)[jax.lax.axis_index("data")]


def row_numbers(parts: Sequence[int], rows: int) -> Int[np.ndarray, "N"]:
    """Return the index in the whole batch of each of the rows on all devices.

    A device has its `parts` microbatches of consecutive rows. All have room for the most: what
    fills it up, here rows 2 to 5 on the first device, is not read.

    >>> row_numbers((1, 3), 12).reshape(2, 6).tolist()
    [[0, 1, 2, 3, 4, 5], [2, 3, 4, 5, 6, 7]]
    """
    counts, size = np.asarray(parts), rows // len(parts)
    first = (np.cumsum(counts) - counts) * (size // max(parts))
    numbers: np.ndarray = (first[:, None] + np.arange(size)).reshape(-1)
    return numbers
