"""Accept arrays of NumPy, JAX and other libraries, and reject data of other kinds."""

import os
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from plurax import errors


def as_arrays(data: PyTree) -> PyTree:
    """Convert the arrays of other libraries (a pandas column, a torch tensor) to NumPy's."""
    return jax.tree.map(lambda leaf: np.asarray(leaf) if _foreign(leaf) else leaf, data)


def check_kind(what: str, data: Any) -> None:
    """Raise `BatchError` for data whose conversion to arrays would be ambiguous.

    These are a table, a data set of examples, a dict of lists, and a file name. `what` names the
    argument in the message.
    """
    kind = type(data).__name__
    if isinstance(data, str | bytes | os.PathLike):
        raise errors.data_is_a_name(what, data)
    if hasattr(data, "columns") and hasattr(data, "iloc"):
        raise errors.data_is_a_table(what, kind)
    if hasattr(data, "with_format") and hasattr(data, "features"):
        raise errors.data_is_a_dataset(what, kind)
    if isinstance(data, Mapping):
        if not jax.tree.leaves(data):
            raise errors.batch_is_empty()
        for name, value in data.items():
            if isinstance(value, list | range) or np.isscalar(value):
                raise errors.data_of_lists(what, name, type(value).__name__)


def _foreign(leaf: Any) -> bool:
    known = isinstance(leaf, np.ndarray | np.generic | jax.Array | jax.ShapeDtypeStruct)
    return not known and hasattr(leaf, "__array__")
