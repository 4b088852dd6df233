"""Files that users give, and that a crash or another program may have changed: one boundary.

Parsers fail in more ways than they say: TOML and JSON by `RecursionError` where tables are nested
too deeply and by `ValueError` at a number of 4,300 digits, zip files by `zlib.error`,
`NotImplementedError` and `RuntimeError`, a NumPy header of a huge shape by `MemoryError`, a path by
`OSError` and, with a NUL in it, by `ValueError`. Whatever it is, it says that a file cannot be
read, and why:

    with refusing(lambda reason: errors.plan_not_toml(source, reason)):
        values = parse_toml(text)

Imports no JAX.
"""

import contextlib
import json
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from plurax import errors
from plurax.argument_check import MAX_NUMBER

MAX_DEPTH = 50
"""Tables in tables; those of plurax are three deep, and `repr` ends at some three hundred."""


@contextlib.contextmanager
def refusing(error: Callable[[str], Exception]) -> Iterator[None]:
    """Raise `error(reason)` for whatever a parser raises; errors of plurax pass."""
    try:
        yield
    except errors.PluraxError:
        raise
    except Exception as raised:
        raise error(reason_of(raised)) from None


def reason_of(error: Exception) -> str:
    """Return in a line why something cannot be read.

    >>> reason_of(RecursionError()), reason_of(FileNotFoundError(2, "No such file or directory"))
    ('it is nested too deeply', 'No such file or directory')
    """
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, MemoryError):
        return "it says that it holds more than the memory of this machine"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if "integer string conversion" in str(error):
        return "it has a number of thousands of digits"
    text = lines[0] if lines else type(error).__name__
    return text if len(text) <= 200 else f"{text[:197]}..."


def read_text(path: str | Path) -> str:
    """Return the text of a file, without the byte order mark with which some editors begin it."""
    return Path(path).read_text(encoding="utf-8-sig")


def parse_toml(text: str) -> dict[str, Any]:
    """Return the tables of a TOML text. Raises `ValueError` alone."""
    with refusing(ValueError):
        return _checked(tomllib.loads(text))


def parse_json(text: str | bytes) -> Any:
    """Return a value in JSON. Raises `ValueError` alone."""
    with refusing(ValueError):
        return _checked(json.loads(text))


def _checked(value: Any) -> Any:
    """Return a parsed value that every function here can print. Raises `ValueError`."""
    left = [(value, 0)]
    while left:
        nested, depth = left.pop()
        if depth > MAX_DEPTH:
            raise ValueError("it is nested too deeply")
        if isinstance(nested, int) and not -MAX_NUMBER <= nested < 2 * MAX_NUMBER:
            raise ValueError("it has a whole number of more than 64 bits")
        if isinstance(nested, Mapping):
            left += [(each, depth + 1) for each in nested.values()]
        elif isinstance(nested, list):
            left += [(each, depth + 1) for each in nested]
    return value
