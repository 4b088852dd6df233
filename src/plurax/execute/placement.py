"""Place host batches of any size into the fixed rows of a compiled program.

A compiled program has one row count, and a batch may have fewer examples. The batch is padded by
repeating its examples, so that padding rows hold valid numbers, and the real count goes along as a
scalar. Example, `Plan(data=2, microbatches=2)`, compiled for 6 examples:

    padded_size(6)       8 rows, 4 on each device of `data`
    batch of 3           {"x": (3, 5)}
    rows                 {"x": (8, 5)}    examples 0 1 2 0 | 1 2 0 1
    size                 3                rows 3 to 7 are masked out in the sums
"""

import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Int, PyTree

from plurax import errors, tree
from plurax.distributed.global_arrays import is_absent, process_count, put
from plurax.execute.rows import row_numbers
from plurax.mesh import split_rows
from plurax.plan import Plan
from plurax.sources.source import Column, Reading, Source

MAX_ROWS = 2**31 - 1
"""A program counts its rows in int32."""

MAX_COUNTS = 8
"""The largest number of batch sizes whose counts stay on the devices."""


def check_rows(rows: int) -> None:
    """Raise `BatchError` for a number of rows that no program has."""
    if rows > MAX_ROWS:
        raise errors.BatchError(
            f"a batch (batch_size=, chunk=) of {rows:,} rows: a program takes at most "
            f"{MAX_ROWS:,}. Give the number of examples of a step, which has to fit the "
            "devices' memory; plurax.analysis.max_batch_size finds the largest."
        )


class Placed(NamedTuple):
    """A batch on its devices: `rows`, a tree of arrays `(N, ...)`, the first `size` real."""

    rows: PyTree
    size: Any


class Placement:
    """Places trees of arrays with at most `size` examples into `rows` rows with a given sharding.

    **Arguments:**

    - `like`: a tree of arrays or `jax.ShapeDtypeStruct`s with leading dim `size`.
    - `rows`: leading dim on the devices, at least `size`.
    - `sharding`: the sharding of the rows.
    - `parts`: how many microbatches each device has, where these are not equally many.

    Raises `BatchError` for trees that are not batches.
    """

    def __init__(
        self, like: PyTree, rows: int, sharding: NamedSharding, parts: Sequence[int] = (1,)
    ) -> None:
        self.size = leading_dim(like)
        check_rows(rows)
        self.rows = rows
        self.sharding = sharding
        self.structure: Any = jax.tree.structure(like)
        self.like = abstract_batch(like)
        self._leaves = jax.tree.leaves(self.like)
        self._paths = list(tree.named_leaves(like))
        self._whole = NamedSharding(sharding.mesh, P())
        self._counts: dict[int, Any] = {}
        # Row i has example `numbers()[i] % count`, as in `rows.py`; for batches, not to compile.
        self._numbers = functools.cache(functools.partial(row_numbers, parts, rows))

    @classmethod
    def of(cls, like: PyTree, plan: Plan, mesh: Mesh) -> "Placement":
        """Return the placement of batches of the largest size under a plan."""
        rows = plan.placed_rows(leading_dim(like))
        return cls(like, rows, split_rows(mesh), plan.replica_microbatches)

    def abstract(self) -> PyTree:
        """Return the rows as `jax.ShapeDtypeStruct`s with their sharding."""
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(
                (self.rows, *leaf.shape[1:]), leaf.dtype, sharding=self.sharding
            ),
            self.like,
        )

    def check(self, batch: PyTree, what: str = "the batch") -> int:
        """Return the number of examples of a batch. Raises `BatchError` where it does not fit."""
        leaves, structure = jax.tree.flatten(batch)
        fits = structure == self.structure and all(
            np.shape(leaf)[1:] == want.shape[1:]
            and np.ndim(leaf) == len(want.shape)
            and (getattr(leaf, "dtype", None) == want.dtype or jax_dtype(path, leaf) == want.dtype)
            for path, leaf, want in zip(self._paths, leaves, self._leaves, strict=True)
        )
        if not fits:
            for path, leaf in tree.named_leaves(batch).items():
                jax_dtype(path, leaf)
            raise errors.batch_mismatch(
                tree.describe(self.like, batch_dim=True), tree.describe(batch), what
            )
        for path, leaf in zip(self._paths, leaves, strict=True):
            _check_mask(path, leaf)
        sizes = {np.shape(leaf)[0] for leaf in leaves}
        # This runs in every step, so it compares sizes only; `leading_dim` formats paths for
        # errors.
        count = leading_dim(batch) if len(sizes) != 1 or 0 in sizes else sizes.pop()
        if count > self.size:
            raise errors.BatchError(
                f"{what} has {count} examples and the program was compiled for at most "
                f"{self.size}. Split it, or compile with a batch of {count}; smaller batches need "
                "no new program."
            )
        return count

    def place(self, batch: PyTree, what: str = "the batch") -> Placed:
        """Check a batch, pad it by repeating its examples, and put it on the devices."""
        rows, size = self.fill(batch, what)
        rows = jax.tree.map(self._own_memory, rows)
        if process_count() == 1 and self._on_cpu and self.sharding.mesh.size == 1:
            return Placed(self._copy(rows), size)
        return Placed(put(rows, self.sharding), size)

    @functools.cached_property
    def _on_cpu(self) -> bool:
        return bool(self.sharding.mesh.devices.flat[0].platform == "cpu")

    def _own_memory(self, leaf: Any) -> Any:
        """Return an array that no loader writes the next batch into.

        On CPU JAX does not copy an aligned NumPy array: a program reads its memory when it runs,
        and by then batches further ahead have been read (seen with JAX 0.10).
        """
        return leaf.copy() if self._on_cpu and isinstance(leaf, np.ndarray) else leaf

    @functools.cached_property
    def _copy(self) -> Callable[[PyTree], PyTree]:
        """A compiled copy, which costs a fifth of `jax.device_put` of as many small arrays.

        That is Python, which holds up the thread that dispatches the steps.
        """
        return jax.jit(lambda rows: rows, out_shardings=self.sharding)

    def fill(self, batch: PyTree, what: str = "the batch") -> Placed:
        """Check a batch and pad it; NumPy arrays stay on the host.

        Passing NumPy arrays to a compiled program is faster than `jax.device_put` before the call.
        Rows that are on the devices as the program takes them are passed as they are.
        """
        count = self.check(batch, what)

        def filled(path: str, leaf: Any, like: jax.ShapeDtypeStruct) -> Any:
            if isinstance(leaf, jax.Array):
                if leaf.is_deleted():
                    name = f"batch[{path}]" if path else "the batch"
                    raise errors.BatchError(
                        f"{name} was given to a function that reused its memory (donate_argnums), "
                        "or was deleted. Copy it before that, jnp.copy(array), or load it again."
                    )
                if count == self.rows:
                    return leaf if self._is_placed(leaf) else put(leaf, self.sharding)
            if is_key(like):
                return put(_padded_keys(leaf, self._numbers()), self.sharding)
            if process_count() > 1:  # a program over several processes takes no NumPy arrays
                return self._put_own_rows(path, leaf, count, like)
            leaf = np.asarray(leaf)
            if count != self.rows:
                leaf = leaf[self._numbers() % count]
            return exactly(path, leaf, like.dtype)

        leaves = map(filled, self._paths, jax.tree.leaves(batch), self._leaves)
        return Placed(jax.tree.unflatten(self.structure, leaves), self.number(count))

    def _is_placed(self, leaf: jax.Array) -> bool:
        """Return whether `put` would return these rows as they are, after 50 µs."""
        here = leaf.sharding
        return here == self.sharding or here.is_equivalent_to(self.sharding, leaf.ndim)

    def number(self, count: int) -> Any:
        """Return a number of rows, on the devices.

        The last few stay there: of full batches, and of what is left at the end of an epoch.
        """
        size = self._counts.get(count)
        if size is None:
            if len(self._counts) >= MAX_COUNTS:
                self._counts.clear()
            size = self._counts[count] = put(np.int32(count), self._whole)
        return size

    def write(self, batch: PyTree, leaves: Sequence[np.ndarray], begin: int) -> int:
        """Check a batch, copy it into arrays from row `begin` on; return its number of examples."""
        count = self.check(batch)
        for path, leaf, into in zip(self._paths, jax.tree.leaves(batch), leaves, strict=True):
            into[begin : begin + count] = exactly(path, np.asarray(leaf), into.dtype)
        return count

    def place_order(self, rows: Int[np.ndarray, "S B"], counts: Int[np.ndarray, "S"]) -> Placed:
        """Put the order of steps on the devices: rows of a data set `(S, N)`, padded by repeating.

        **Arguments:** as for `Program.place_epoch`.
        """
        places = self._numbers() % counts[:, None]
        rows = np.take_along_axis(rows, places, axis=1).astype(np.int32)
        columns = NamedSharding(self.sharding.mesh, P(None, *self.sharding.spec))
        return Placed(put(rows, columns), put(counts.astype(np.int32), self._whole))

    def _put_own_rows(
        self, path: str, leaf: Any, count: int, like: jax.ShapeDtypeStruct
    ) -> jax.Array:
        """Return the padded rows over all processes; of `leaf` read this process's own alone."""

        def rows(index: Any) -> np.ndarray:
            places = self._numbers()[index[0]] % count
            return exactly(path, np.asarray(leaf[places]), like.dtype)

        if not isinstance(leaf, Selection):
            leaf = np.asarray(leaf)
        shape = (self.rows, *like.shape[1:])
        return jax.make_array_from_callback(shape, self.sharding, rows)

    def place_own(self, batch: PyTree) -> Placed:
        """Put a batch on the devices of which each process gives its own rows.

        All give equally many, and the batch is theirs in the order of the processes; it fills the
        program's rows. Raises `BatchError` for another number of rows, and where processes share
        rows.
        """
        own = self.own_rows()
        if own is None or self.rows != self.size:
            raise errors.own_rows_not_split(self.size, process_count())
        leaves, structure = jax.tree.flatten(batch)
        count = leading_dim(batch)
        if count != own:
            raise errors.BatchError(
                f"this process gave a batch of {count} examples, and its share is {own}. With "
                "local_batches=True all processes give equally many at every step; use "
                "ragged='drop' to leave out a smaller last batch."
            )
        if structure != self.structure:
            raise errors.batch_mismatch(
                tree.describe(self.like, batch_dim=True), tree.describe(batch)
            )
        placed = [
            jax.make_array_from_process_local_data(
                self.sharding,
                self._own_memory(exactly(path, np.asarray(leaf), like.dtype)),
                (self.rows, *like.shape[1:]),
            )
            for path, leaf, like in zip(self._paths, leaves, self._leaves, strict=True)
        ]
        return Placed(jax.tree.unflatten(self.structure, placed), self.number(self.size))

    def own_rows(self) -> int | None:
        """Return the number of rows that only this process has; None where it shares some."""
        shape = (self.rows,)
        mine, others = set[int](), set[int]()
        here = set(self.sharding.addressable_devices)
        for device, (rows,) in self.sharding.devices_indices_map(shape).items():
            (mine if device in here else others).update(range(*rows.indices(self.rows)))
        return None if mine & others else len(mine)


class Selection:
    """Chosen rows of an array, read when they are asked for: `Selection(array, rows)[index]`."""

    def __init__(self, array: Any, rows: Int[np.ndarray, "N"]) -> None:
        self._array, self._rows = array, rows
        self.shape = (len(rows), *array.shape[1:])
        self.dtype, self.ndim = np.dtype(array.dtype), len(self.shape)

    def __getitem__(self, index: Any) -> np.ndarray:
        return np.asarray(self._array[self._rows[index]])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self[:], dtype)


def select_rows(array: Any, rows: Int[np.ndarray, "N"]) -> np.ndarray:
    """Return rows of an array; of a column in a file no others are read."""
    return array[rows] if isinstance(array, Column) else np.asarray(array)[rows]


def exactly(path: str, leaf: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Cast an array to a dtype that JAX computes with, without changing its values.

    Integers must stay equal. Floats may be rounded, as everywhere in JAX, but a finite one must
    not become infinite. Raises `BatchError` with the leaf's path.
    """
    if leaf.dtype == dtype:
        return leaf
    try:
        with np.errstate(over="raise"):
            cast = leaf.astype(dtype)
    except FloatingPointError:
        worst = leaf.flat[int(np.argmax(np.nan_to_num(np.abs(leaf), posinf=0.0)))]
        raise errors.batch_value_too_large(path, str(leaf.dtype), worst, str(dtype)) from None
    if dtype.kind in "iu":
        wrong = cast != leaf
        if wrong.any():
            first = leaf.flat[int(np.argmax(wrong))]
            raise errors.batch_value_too_large(path, str(leaf.dtype), first, str(dtype))
    return cast


def device_data(data: PyTree, sharding: NamedSharding) -> PyTree:
    """Put a whole data set on the devices, its values unchanged. Raises `BatchError`.

    Where its rows are split over devices that do not divide them, the last rows are repeated. For
    devices that are not here data and result may be `jax.ShapeDtypeStruct`s.
    """
    if is_absent(sharding.mesh.devices.flat[0]):
        rows = leading_dim(data)
        rows += -rows % sharding.mesh.shape["data"] if sharding.spec else 0
        return Placement(data, rows, sharding).abstract()
    if sharding.spec:
        return _spread(data, sharding)
    leaves = [
        leaf if isinstance(leaf, jax.Array) else exactly(path, np.asarray(leaf), dtype)
        for path, leaf in tree.named_leaves(data).items()
        for dtype in [jax_dtype(path, leaf)]
    ]
    return put(jax.tree.unflatten(jax.tree.structure(data), leaves), sharding)


def _spread(data: PyTree, sharding: NamedSharding) -> PyTree:
    """Split the rows of a data set over the devices; of it read this process's own rows alone."""
    count = leading_dim(data)
    rows = count + -count % sharding.mesh.shape["data"]

    def leaf(path: Any, array: Any) -> jax.Array:
        name = tree.path_name(path)
        dtype = jax_dtype(name, array)

        def own(index: Any) -> np.ndarray:
            places = np.minimum(np.arange(rows)[index[0]], count - 1)
            return exactly(name, np.asarray(array[places]), dtype)

        shape = (rows, *array.shape[1:])
        return jax.make_array_from_callback(shape, sharding, own)

    return jax.tree.map_with_path(leaf, data)


def is_arrays(data: Any) -> bool:
    """Return whether `data` is a tree of arrays, rather than an iterable of such trees.

    A list is a sequence of batches; an array, a dict, a tuple or a registered tree is one tree.

    >>> is_arrays({"x": np.ones(3)}), is_arrays([{"x": np.ones(3)}]), is_arrays(iter([]))
    (True, False, False)
    """
    if isinstance(data, list):
        return False
    leaves = jax.tree.leaves(data, is_leaf=_is_stream)
    return bool(leaves) and all(hasattr(leaf, "shape") for leaf in leaves)


def _is_stream(node: Any) -> bool:
    """Return whether a node is an iterable that is neither an array nor a tree."""
    known = isinstance(node, Mapping | list | tuple) or hasattr(node, "shape")
    return isinstance(node, Iterable) and not known


def leading_dim(batch: PyTree) -> int:
    """Return the common leading dim of a tree of arrays. Raises `BatchError`."""
    sizes = {}
    for path, leaf in tree.named_leaves(batch).items():
        if np.ndim(leaf) == 0 and not getattr(leaf, "shape", ()):
            for name, node in _lists(batch).items():
                if path.startswith(f"{name}/"):
                    raise errors.BatchError(
                        f"batch[{name}] is a list of {len(node)} items, and what a batch holds is "
                        "arrays. Make an array of it: np.asarray(values, np.float32), of whole "
                        "numbers np.int32."
                    )
            raise errors.BatchError(
                f"batch[{path}] is a scalar; every array of a batch needs the batch as its leading "
                "dim. Close over constants in the loss instead."
            )
        _check_mask(path, leaf)
        sizes[path] = leaf.shape[0] if hasattr(leaf, "shape") else len(leaf)
    if not sizes or 0 in sizes.values():
        raise errors.batch_is_empty()
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{path}: {size}" for path, size in sizes.items())
        raise errors.BatchError(
            f"the arrays of a batch must have the same leading dim; given {listed}."
        )
    return next(iter(sizes.values()))


def _check_mask(path: str, leaf: Any) -> None:
    """Raise `BatchError` for a NumPy array whose mask hides values, which devices would see."""
    if isinstance(leaf, np.ma.MaskedArray) and np.ma.is_masked(leaf):
        raise errors.BatchError(
            f"{f'batch[{path}]' if path else 'the batch'} is a masked array, and no device has its "
            "mask: fill in what is masked, x.filled(0), and give ~np.ma.getmaskarray(x) beside it, "
            "for the loss to weigh by."
        )


def _lists(batch: PyTree) -> dict[str, list[Any]]:
    """Return the outermost lists in a batch, by path; a batch that is a list itself is a tree."""
    leaves = jax.tree.leaves_with_path(
        batch, is_leaf=lambda node: node is not batch and isinstance(node, list)
    )
    return {tree.path_name(path): node for path, node in leaves if isinstance(node, list)}


def abstract_batch(batch: PyTree) -> PyTree:
    """Return a batch as `jax.ShapeDtypeStruct`s. Raises `BatchError` where it is not one."""
    leading_dim(batch)
    leaves = [
        jax.ShapeDtypeStruct(np.shape(leaf), jax_dtype(path, leaf))
        for path, leaf in tree.named_leaves(batch).items()
    ]
    return jax.tree.unflatten(jax.tree.structure(batch), leaves)


def chunks(data: PyTree | Iterable[PyTree] | Source, size: int) -> Iterator[PyTree]:
    """Yield at most `size` rows at a time of a tree of arrays, or of an iterable of trees."""
    if isinstance(data, Source):
        data = data.batches(Reading(size), 0, 0)
    for batch in [data] if is_arrays(data) else data:
        for start in range(0, leading_dim(batch), size):
            cut = slice(start, start + size)
            yield jax.tree.map(operator.itemgetter(cut), batch)


def is_key(leaf: Any) -> bool:
    """Return whether an array holds random keys, which have no form as a NumPy array."""
    return bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def _padded_keys(keys: Any, places: Int[np.ndarray, "N"]) -> jax.Array:
    """Return the random keys at some places: the given ones, repeated."""
    numbers = np.asarray(jax.random.key_data(keys))
    padded = numbers[places % len(numbers)]
    return jax.random.wrap_key_data(jnp.asarray(padded), impl=jax.random.key_impl(keys))


def jax_dtype(path: str, leaf: Any) -> np.dtype:
    """Return the dtype that JAX gives a leaf. Raises `BatchError` for a leaf without numbers."""
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            return leaf.dtype
        dtype = leaf.dtype
    else:
        known = isinstance(leaf, np.ndarray | Selection | Column)
        dtype = leaf.dtype if known else np.asarray(leaf).dtype
    number = jnp.issubdtype(dtype, jnp.number) and dtype.kind != "m"
    if not (number or dtype == np.bool_):
        raise errors.batch_leaf_not_numbers(path, str(dtype), dtype.kind)
    info = jnp.finfo if jnp.issubdtype(dtype, jnp.inexact) else jnp.iinfo
    if number and info(dtype).bits < 8:
        raise errors.BatchError(
            f"{f'batch[{path}]' if path else 'the batch'} has dtype {dtype}, and JAX gives no "
            "arrays of less than a byte a number to programs on a mesh of devices. Give it in a "
            f"dtype of a byte, jnp.int8 say, and cast it in the loss where that needs {dtype}."
        )
    return jax.dtypes.canonicalize_dtype(dtype.newbyteorder("="))  # FITS and NetCDF have ">f4"
