"""Shuffle and resample rows with pure functions, without storing any permutation.

Problem. A thousand members each read the same data in their own order, with their own bootstrap
sample, a new order every epoch, inside a compiled loop. A permutation table per member costs as
much memory as data. Instead the row at a position is computed when it is read, from `(seed, member,
epoch, position)` and the number of rows alone: it does not depend on the batch size, the plan or
the mesh, the data are on a device once, and a run resumes at any step.

    row(seed, member, epoch, position) = choose(j),  j = shuffle(pass)[position mod size]

`size` is the number of draws in one pass of a member; `choose` is the resampling, which maps draw
`j` to a row. A member with fewer draws than the longest starts another pass within the epoch, in a
new order. If one batch is a whole pass, its order does not matter and stays the same.

Shuffling needs a random permutation of `range(size)` that can be evaluated at one index. A Feistel
network is one on a domain a * b: each round adds to one half a hash of the other, modulo the half's
size, which can be undone, so the whole is one-to-one. Indices that land outside `range(size)` go
through the network again ("cycle walking"). Example: `permuted_index(i, size=7, key=5)`:

    a = ceil(sqrt 7) = 3,  b = ceil(7 / 3) = 3      the network permutes 0 .. 8
    index i           0   1   2   3   4   5   6
    one pass          0   4   3   7   5   2   1     7 is not below 7 ...
    again                         6                 ... so 7 goes through once more
    result            0   4   3   6   5   2   1     a permutation of 0 .. 6

Source: J. Black and P. Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002.
"""

import abc
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, UInt32

from plurax import errors
from plurax.validate import check_seed, whole_number

ROUNDS = 10
"""Feistel rounds; with ten, all orders of a handful of rows come out about equally often."""

Word = UInt32[Array, "..."]


@runtime_checkable
class Resample(Protocol):
    """How a member draws its rows. Frozen and comparable; checkpoints save its `repr`."""

    @abc.abstractmethod
    def size(self, count: int, member: int) -> int:
        """Return the number of draws in one pass of a member over data of `count` rows."""

    @abc.abstractmethod
    def choose(self, draw: Word, count: int, seed: Word, member: Word) -> Word:
        """Return the row of a draw; elementwise over `draw`, the others scalars; all uint32."""

    def held_out(self, count: int, seed: int, member: int) -> Int[np.ndarray, "R"]:
        """Return the rows that a member never trains on, ascending, int64: "out of bag"."""
        return np.setdiff1d(np.arange(count), draws(self, count, seed, member))


def hash_u32(*words: Word | int) -> Word:
    """Hash 32-bit words to one: Murmur3's body and finalizer (A. Appleby, public domain)."""
    state = jnp.uint32(0x9E3779B9)
    for word in words:
        state = (state ^ jnp.asarray(word).astype(jnp.uint32)) * jnp.uint32(0xCC9E2D51)
        state = (state ^ (state >> 15)) * jnp.uint32(0x85EBCA6B)
        state = (state ^ (state >> 13)) * jnp.uint32(0xC2B2AE35)
        state = state ^ (state >> 16)
    return state


def permuted_index(index: Word, size: Word | int, key: Word) -> Word:
    """Return the image of `index` under a pseudo-random permutation of `range(size)`; elementwise.

    A Feistel network over Z_a × Z_b, with a = ceil(sqrt size) and the smallest b for which
    a·b ≥ size, applied until the value is below `size` (cycle walking): a permutation without a
    table. Values are uint32, `key` a number or of the rank of `index`; `size` may be up to 2³¹. The
    top of this file has an example.

    >>> import jax.numpy as jnp
    >>> sorted(permuted_index(jnp.arange(7, dtype=jnp.uint32), 7, jnp.uint32(5)).tolist())
    [0, 1, 2, 3, 4, 5, 6]
    """
    size = jnp.asarray(size).astype(jnp.uint32)
    # Near-square halves waste few indices: a·b - size < a, so nearly all values need one pass.
    a = jnp.maximum(jnp.ceil(jnp.sqrt(size.astype(jnp.float32))).astype(jnp.uint32), 1)
    b = (size + a - 1) // a
    keys = [hash_u32(key, step) for step in range(ROUNDS)]

    def shift(value: Word, other: Word, step: int, modulus: Word) -> Word:
        word = (other ^ keys[step]) * jnp.uint32(0x85EBCA6B)
        word = (word ^ (word >> 15)) * jnp.uint32(0xC2B2AE35)
        # Scale 16 bits of hash to the modulus, which needs no integer division.
        drawn = ((word >> 16) * modulus) >> 16
        moved = value + drawn
        # Addition modulo `modulus` can be undone given `other`: this makes a round one-to-one.
        return jnp.where(moved >= modulus, moved - modulus, moved)

    def walk(value: Word) -> Word:
        left, right = value // b, value % b
        for step in range(0, ROUNDS, 2):
            left = shift(left, right, step, a)
            right = shift(right, left, step + 1, b)
        return left * b + right

    # Cycle walking ends: the network permutes the domain, and the cycle through a value that
    # started below `size` returns below `size`. The loop runs until every element is inside.
    def again(value: Word) -> Word:
        return jnp.where(value < size, value, walk(value))

    return jax.lax.while_loop(lambda v: jnp.any(v >= size), again, walk(index))


def bounded(word: Word, size: Word | int) -> Word:
    """Scale a hash word to a number below `size`: the high 32 bits of the 64-bit product."""
    size = jnp.asarray(size).astype(jnp.uint32)
    # Without x64 JAX has no 64-bit integers: multiply in 16-bit halves, keeping the carries.
    low = (word & 0xFFFF) * (size & 0xFFFF)
    cross = (word >> 16) * (size & 0xFFFF)
    other = (word & 0xFFFF) * (size >> 16)
    middle = (low >> 16) + (cross & 0xFFFF) + (other & 0xFFFF)
    return (word >> 16) * (size >> 16) + (cross >> 16) + (other >> 16) + (middle >> 16)


@dataclasses.dataclass(frozen=True)
class Everything(Resample):
    """Every row once in a pass: no resampling."""

    def size(self, count: int, member: int) -> int:
        """Return `count`."""
        return count

    def choose(self, draw: Word, count: int, seed: Word, member: Word) -> Word:
        """Return the draw itself."""
        return draw


@dataclasses.dataclass(frozen=True)
class Bootstrap(Resample):
    """As many draws as there are rows, with replacement (B. Efron, Ann. Statist. 7, 1979).

    A member's draws stay the same in every epoch; only their order changes.
    """

    def size(self, count: int, member: int) -> int:
        """Return `count`: as many draws as rows."""
        return count

    def choose(self, draw: Word, count: int, seed: Word, member: Word) -> Word:
        """Return a row hashed from seed, member and draw."""
        return bounded(hash_u32(seed, member, draw, 0xB007), count)


@dataclasses.dataclass(frozen=True)
class KFold(Resample):
    """Member `m` trains on all rows except those of fold `m mod folds`.

    Folds are disjoint, complete, differ in size by at most one row, and are the same for all
    members of the same `seed`. Raises `MembersError` for fewer than two folds.
    """

    folds: int
    seed: int

    def __post_init__(self) -> None:
        folds = whole_number(self.folds, 2)
        if folds is None:
            raise errors.MembersError(
                f"plurax.ensemble.kfold({self.folds!r}): at least 2 folds are needed to leave one "
                "out."
            )
        object.__setattr__(self, "folds", folds)
        object.__setattr__(self, "seed", check_seed(self.seed))

    def size(self, count: int, member: int) -> int:
        """Return the number of rows in the other folds.

        Raises `BatchError` where there are more folds than rows.
        """
        if count < self.folds:
            raise errors.BatchError(
                f"plurax.ensemble.kfold({self.folds}): the data have only {count} rows; use fewer "
                "folds."
            )
        fold = member % self.folds
        return count - (count * (fold + 1) // self.folds - count * fold // self.folds)

    def choose(self, draw: Word, count: int, seed: Word, member: Word) -> Word:
        """Skip the fold left out in the permuted order of rows, and return the row."""
        # Compute the fold bounds on the host: `count * fold` could overflow uint32 on the device.
        bounds = jnp.asarray([count * f // self.folds for f in range(self.folds + 1)], jnp.uint32)
        fold = member % self.folds
        start, stop = bounds[fold], bounds[fold + 1]
        position = jnp.where(draw < start, draw, draw + (stop - start))
        return permuted_index(position, count, hash_u32(self.seed, 0xF01D))


@dataclasses.dataclass(frozen=True)
class Subsample(Resample):
    """Member `m` trains on `sizes[m mod len(sizes)]` rows drawn without replacement.

    For learning curves over data sizes. Sizes are whole numbers of rows, or fractions below 1:
    `1.0` and `2.5` are neither.
    A member's larger samples hold its smaller ones.
    """

    sizes: tuple[float, ...]

    def __post_init__(self) -> None:
        sizes = tuple(map(_size, self.sizes))
        if not sizes or None in sizes:
            raise errors.MembersError(
                f"plurax.ensemble.subsample({self.sizes!r}): give sizes above 0: whole numbers of "
                "rows, or fractions below 1."
            )
        object.__setattr__(self, "sizes", sizes)

    def size(self, count: int, member: int) -> int:
        """Return the member's size in rows. Raises `BatchError` where the data have fewer."""
        wanted = self.sizes[member % len(self.sizes)]
        rows = round(wanted * count) if wanted < 1 else int(wanted)
        if not 1 <= rows <= count:
            raise errors.BatchError(
                f"plurax.ensemble.subsample: a size of {wanted} is not between 1 and the {count} "
                "rows of the data."
            )
        return rows

    def choose(self, draw: Word, count: int, seed: Word, member: Word) -> Word:
        """Return the row at place `draw` of a permutation of all rows that is the member's own."""
        return permuted_index(draw, count, hash_u32(seed, member, 0x5AB5))


def _size(value: Any) -> float | None:
    """Return a whole number of rows or a fraction below 1; None for others, such as 1.0 and 2.5."""
    rows = whole_number(value)
    if rows is not None or isinstance(value, str | bytes | bool):
        return rows
    try:
        share = float(value)
    except (TypeError, ValueError):
        return None
    return share if 0 < share < 1 else None


def bootstrap() -> Bootstrap:
    """Return a resampling in which each member draws as many rows as there are, with replacement.

    >>> bootstrap().size(100, member=3)
    100
    """
    return Bootstrap()


def kfold(folds: int, *, seed: int = 0) -> KFold:
    """Return a resampling in which member `m` leaves out fold `m mod folds`.

    `seed` determines which rows each fold has.

    >>> fold = kfold(3)
    >>> [fold.held_out(4, seed=0, member=member).size for member in range(3)]
    [1, 1, 2]
    """
    return KFold(folds, seed)


def subsample(sizes: float | Sequence[float]) -> Subsample:
    """Return a resampling: member `m` draws `sizes[m mod len(sizes)]` rows without replacement.

    >>> subsample([0.1, 50]).size(100, member=0), subsample([0.1, 50]).size(100, member=1)
    (10, 50)
    """
    many: Any = sizes if np.ndim(sizes) else (sizes,)
    return Subsample(tuple(many))


# Compiled by itself: JAX traces it once for all loops that draw rows in the same way.
@functools.partial(jax.jit, static_argnames=("resample", "count", "shuffle", "whole"))
def stream_row(
    resample: Resample,
    count: int,
    size: Word,
    seed: Word,
    member: Word,
    epoch: Word,
    position: Word,
    *,
    shuffle: bool = True,
    whole: int | None = None,
) -> Int[Array, "..."]:
    """Return the row at positions of a member's epoch; elementwise over `position`, int32.

    **Arguments:** `count`, rows of the data; `size`, `resample.size(count, member)`; `seed`,
    `member`, `epoch` and `position`, uint32. Without `shuffle` draws come in ascending order in
    every pass. `whole`, the draws of an epoch that is one batch, else None: a member whose pass has
    that many draws keeps its order, which cannot matter.
    """
    draw = position % size
    if shuffle:
        key = hash_u32(seed, epoch, position // size, 0x0EDE)
        shuffled = permuted_index(draw, size, key)
        draw = shuffled if whole is None else jnp.where(size == whole, draw, shuffled)
    return resample.choose(draw, count, seed, member).astype(jnp.int32)


def draws(resample: Resample, count: int, seed: int, member: int) -> Int[np.ndarray, "D"]:
    """Return the rows of one pass of a member, unshuffled, one per draw, on the host."""
    return epoch_rows(resample, count, seed, member, 0, shuffle=False)


def epoch_rows(
    resample: Resample,
    count: int,
    seed: int,
    member: int,
    epoch: int,
    *,
    length: int | None = None,
    shuffle: bool = True,
    one_batch: bool = False,
) -> Int[np.ndarray, "D"]:
    """Return the first `length` rows (default: one pass) of a member's epoch, on the host, int64.

    The order stays the same where the epoch is `one_batch` and one pass.
    """
    size = resample.size(count, member)
    shuffle = shuffle and not (one_batch and (length or size) == size)
    words = np.asarray([size, seed & 0xFFFFFFFF, member, epoch], np.uint32)
    rows = _epoch_rows(resample, count, length or size, shuffle, words)
    return np.asarray(rows, np.int64)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _epoch_rows(
    resample: Resample, count: int, length: int, shuffle: bool, words: UInt32[Array, "4"]
) -> Int[Array, "D"]:
    position = jnp.arange(length, dtype=jnp.uint32)
    size, seed, member, epoch = words
    return stream_row(resample, count, size, seed, member, epoch, position, shuffle=shuffle)
