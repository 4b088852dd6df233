"""Numbers and paths as users give them, before anything is done with them. Imports no JAX."""

import operator
import os
import re
from pathlib import Path

from plurax import errors


def whole_number(value: object, least: int = 1) -> int | None:
    """`value` as an int if it is a whole number of at least `least`, else None.

    NumPy's integers are whole numbers; floats and bools are not, be their value one or not: `3.0`
    is more often a mistake than meant.

    >>> whole_number(3), whole_number(3.0), whole_number(True), whole_number(0)
    (3, None, None, None)
    """
    if isinstance(value, bool):
        return None
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None
    return number if number >= least else None


def local_path(given: str | os.PathLike[str]) -> Path:
    """A path of this machine's file system. Raises `CheckpointError` for a URL like `gs://...`.

    As a local path, `gs://bucket/run` would be the folder `gs:` in the current directory.
    """
    if match := re.match(r"([a-z][a-z0-9+.-]+):/", os.fspath(given)):
        raise errors.path_is_a_url(os.fspath(given), match.group(1))
    return Path(given)
