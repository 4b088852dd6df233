"""Convert data of any library that plurax knows; leave all others as they are.

A library is known by the name of the module that an object's class, or one that it extends, comes
from, so no library is imported that the object has not loaded. Example:

    class Mine(torch.utils.data.Dataset)    extends a class of `torch`: `plurax.sources.torch`
"""

import importlib
import os
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from plurax import errors
from plurax.sources.data_files import open_path
from plurax.sources.source import Column, Source

LIBRARIES = {
    "datasets": "hugging_face",
    "numpy": "data_files",
    "pandas": "pandas",
    "polars": "polars",
    "pyarrow": "arrow",
    "tensorflow": "tensorflow",
    "torch": "torch",
}
"""The module of this package that reads what a library gives."""


def adapt(what: str, data: Any) -> Any:
    """Return data as arrays in a tree, as a `Source`, or as they are (an iterable of batches).

    `what` names the argument in messages. Raises `BatchError` for data that are no numbers, by the
    name of their column, and for files that cannot be read.
    """
    if isinstance(data, Source):
        return data
    if isinstance(data, str | bytes | os.PathLike):
        return open_path(what, data)
    adapted = _by_library(what, data)
    if adapted is data:
        _check_kind(what, data)
        if isinstance(data, Mapping):
            adapted = _part(what, data)
            if not jax.tree.leaves(adapted):
                raise errors.batch_is_empty()
    return adapted


def as_arrays(data: PyTree) -> PyTree:
    """Convert the arrays of other libraries (a pandas column, a torch tensor) to NumPy's."""
    return jax.tree.map(lambda leaf: _array(leaf) if _foreign(leaf) else leaf, data)


def _by_library(what: str, data: Any) -> Any:
    """Return what the module of the data's library makes of them, or the data."""
    if isinstance(data, np.ndarray | np.generic):
        return data
    for kind in type(data).__mro__:
        module = LIBRARIES.get(kind.__module__.partition(".")[0])
        if module is not None:
            return importlib.import_module(f"plurax.sources.{module}").adapt(what, data)
    return data


def _part(what: str, value: Any) -> Any:
    """Return a part of a dict of data: a list of numbers and a file of an array become arrays."""
    if isinstance(value, Mapping):
        parts = {key: _part(f"{what}[{key!r}]", each) for key, each in value.items()}
        same = all(parts[key] is value[key] for key in parts)
        return value if same else parts
    if isinstance(value, list | range):
        return _of_list(what, value)
    if isinstance(value, str | os.PathLike) and os.fspath(value).endswith(".npy"):
        return open_path(what, value)
    if np.isscalar(value) or isinstance(value, os.PathLike):
        raise errors.BatchError(
            f"{what} is a {type(value).__name__}, and a dict of data holds arrays with the "
            "examples in the leading dim; write np.asarray([...]), or close over a constant in the "
            "loss."
        )
    return value


def _of_list(what: str, values: "list[Any] | range") -> np.ndarray:
    """Return a list of numbers, or of lists of equally many, as an array."""
    try:
        array = np.asarray(values)
    except ValueError:  # lists of different lengths
        raise errors.BatchError(
            f"{what} is a list of lists of different lengths, and an array has one shape; pad them "
            "to one length, and weigh the padding by 0 in the loss."
        ) from None
    if array.dtype.kind not in "biufcV":  # V: bfloat16
        raise errors.BatchError(
            f"{what} is a list that holds {_first_other(values)!r}, and a device holds numbers. "
            f"Number the classes first: np.unique({what}, return_inverse=True)[1]; fill in what is "
            "missing."
        )
    return array


def _first_other(values: Any) -> object:
    """Return the first value in lists of lists that is no number."""
    for value in values:
        if isinstance(value, list | tuple):
            return _first_other(value)
        if not isinstance(value, int | float):
            return value
    return values[0]


def _check_kind(what: str, data: Any) -> None:
    """Raise `BatchError` for data of libraries that plurax does not know."""
    kind = type(data).__name__
    if hasattr(data, "columns") and hasattr(data, "iloc"):
        raise errors.BatchError(
            f"{what} is a table ({kind}), and the loss takes arrays; give a dict of arrays: {{'x': "
            "table[features].to_numpy(np.float32), 'y': table['label'].to_numpy()}."
        )
    if hasattr(data, "with_format") and hasattr(data, "features"):
        raise errors.BatchError(
            f"{what} is a data set of single examples ({kind}); give its columns as arrays, "
            "dataset.with_format('numpy')[:], or batches of it: "
            "list(dataset.with_format('numpy').iter(batch_size))."
        )
    arrays = data if isinstance(data, list) and all(hasattr(x, "shape") for x in data) else []
    if len(shapes := {array.shape[1:] for array in arrays}) > 1:
        kinds = ", ".join(map(str, sorted(shapes)))
        raise errors.BatchError(
            f"{what} is a list of {len(arrays)} arrays whose examples have different shapes, "
            f"{kinds}, and a list is read as batches, one after the other. Columns are a tuple, "
            "(x, y), or a dict, {'x': x, 'y': y}."
        )
    # Neither arrays, nor batches to take one after the other, nor a tree that JAX knows.
    has_items = hasattr(data, "shape") or hasattr(data, "__iter__") or hasattr(data, "__getitem__")
    if data is None or (not has_items and jax.tree.leaves([data])[0] is data):
        raise errors.BatchError(
            f"{what} of type {kind} are not supported; give arrays in a tree (a dict of arrays "
            "with the same leading dim), a Grain dataset of batches, or an iterable of batches."
        )


def _foreign(leaf: Any) -> bool:
    known = np.ndarray | np.generic | jax.Array | jax.ShapeDtypeStruct | Column
    return not isinstance(leaf, known) and hasattr(leaf, "__array__")


def _array(leaf: Any) -> np.ndarray:
    """Return an array of another library as NumPy's."""
    return np.asarray(_by_library("data", leaf))
