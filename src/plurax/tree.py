"""Trees of arrays: the paths of their leaves, their bytes, and how to show them."""

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree


def path_name(path: tuple[Any, ...]) -> str:
    """The path of a leaf as text, keys joined by slashes.

    >>> import jax
    >>> [path_name(p) for p, _ in jax.tree.leaves_with_path({"a": [1, {"b": 2}]})]
    ['a/0', 'a/1/b']
    """
    return jax.tree_util.keystr(path, simple=True, separator="/")


def named_leaves(tree: PyTree) -> dict[str, Any]:
    """Leaves by path."""
    return {path_name(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


def sum_dtype(dtype: jax.typing.DTypeLike) -> np.dtype:
    """Return the dtype in which values of `dtype` are summed: float32 or wider.

    >>> str(sum_dtype("bfloat16")), str(sum_dtype("float64")), str(sum_dtype("int32"))
    ('float32', 'float64', 'float32')
    """
    with jax.numpy_dtype_promotion("standard"):  # also where a user has set it to be strict
        return jnp.promote_types(dtype, jnp.float32)


def with_rows(batch: PyTree, count: Any) -> PyTree:
    """Return the shapes and dtypes of a batch with another number of rows, the leading dim.

    >>> with_rows({"x": np.zeros((8, 3))}, 2)
    {'x': ShapeDtypeStruct(shape=(2, 3), dtype=float64)}
    """
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((count, *leaf.shape[1:]), leaf.dtype), batch
    )


def byte_count(tree: PyTree) -> int:
    """Bytes of all arrays (or `jax.ShapeDtypeStruct`s) of a tree, each counted whole."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def human_bytes(count: float) -> str:
    """Format bytes for people, in powers of 1024.

    >>> human_bytes(512), human_bytes(1536), human_bytes(3 * 1024**3)
    ('512 B', '1.5 KiB', '3.0 GiB')
    """
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    for unit in units[:-1]:
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} {units[-1]}"


def parameter_count(tree: PyTree) -> int:
    """Number of elements of all arrays of a tree."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def describe(tree: PyTree, *, batch_dim: bool = False, indent: str = "    ") -> str:
    """One line per leaf, `path: dtype[shape]`; with `batch_dim` the leading dim reads `B`."""
    lines = []
    for name, leaf in named_leaves(tree).items():
        dims = [str(size) for size in np.shape(leaf)]
        if batch_dim and dims:
            dims[0] = "B"
        dtype = getattr(leaf, "dtype", type(leaf).__name__)
        lines.append(f"{indent}{name or '(the array)'}: {dtype}[{','.join(dims)}]")
    return "\n".join(lines) or f"{indent}(no arrays)"


def differences(here: str, there: str) -> dict[str, tuple[str | None, str | None]]:
    """Return the leaves that differ between two descriptions, with what each says, None if nothing.

    >>> differences("a: float32[3]\\nb: int32[]", "a: float32[4]\\nb: int32[]\\nkey is a key<fry>")
    {'a': ('float32[3]', 'float32[4]'), 'key': (None, 'key<fry>')}
    """
    ours, theirs = _lines(here), _lines(there)
    names = dict.fromkeys([*ours, *theirs])
    both = {name: (ours.get(name), theirs.get(name)) for name in names}
    return {name: said for name, said in both.items() if said[0] != said[1]}


def _lines(description: str) -> dict[str, str]:
    parts = [re.split(": | is a ", line.strip(), maxsplit=1) for line in description.splitlines()]
    return {one[0]: one[1] for one in parts if len(one) == 2}
