"""Run collectives of large arrays one after another, so that a GPU's compiler keeps them apart.

XLA combines the reductions of one computation. On TPUs the combined one has many operands; on GPUs
it has a buffer into which all arrays are copied, and out of which all results are. It starts when
the last array is known, which leaves nothing to compute meanwhile:

    w2' = a @ b        12 MiB   all-reduce(w2)            .........|      starts at once, in place
    w1' = c @ d        12 MiB   all-reduce(w1)                      .........|
                                all-reduce(concat(w2, w1))         ...................|

A data dependency of each on the result of the one before keeps them apart. The link sends one after
another anyway. Small arrays, whose sending is mostly waiting, are left to be combined.
"""

from collections.abc import Sequence

from jax import lax
from jaxtyping import Array

from plurax.jaxpr.barrier import order_after

LARGE = 2**20
"""Bytes from which an array is sent by itself: copying it takes longer than another start."""


def is_large(array: Array) -> bool:
    """Whether an array is sent by itself on GPUs."""
    return array.size * array.dtype.itemsize >= LARGE


def psum_in_turn(
    arrays: Sequence[Array],
    names: str | tuple[str, ...],
    groups: list[list[int]] | None = None,
    platform: str | None = None,
) -> list[Array]:
    """Add up arrays over mesh axes. Call it inside `shard_map`.

    **Arguments:** `arrays`, in the order in which they are known; `names` and `groups`, as of
    `lax.psum`; `platform` of the devices: only on GPUs they are added up one after another.
    """

    large, small = list[int](), list[int]()
    for index, array in enumerate(arrays):
        (large if is_large(array) else small).append(index)
    batches = [*([index] for index in large), small] if platform == "gpu" else [large + small]
    sums: dict[int, Array] = {}
    last: Array | None = None
    for batch in filter(None, batches):
        some = after_last([arrays[index] for index in batch], last)
        some = lax.psum(some, names, axis_index_groups=groups)
        sums.update(zip(batch, some, strict=True))
        last = some[0]
    return [sums[index] for index in range(len(arrays))]


def after_last(arrays: Sequence[Array], last: Array | None) -> list[Array]:
    """Return arrays that cannot be sent before `last`, the result of another sending, is known."""
    return list(arrays) if last is None else order_after(arrays, last)
