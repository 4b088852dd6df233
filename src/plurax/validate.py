"""Numbers and paths as users give them, before anything is done with them. Imports no JAX."""

import functools
import inspect
import math
import numbers
import operator
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from plurax import errors
from plurax.argument_check import MAX_NUMBER, fits, is_path, text

Mode = Literal["min", "max"]


def whole_number(value: object, least: int = 1) -> int | None:
    """`value` as an int if it is a whole number from `least` to `MAX_NUMBER`, else None.

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
    return number if least <= number < MAX_NUMBER else None


def check_whole(
    function: str, name: str, value: object, least: int = 1, most: int = 2**31 - 1
) -> int:
    """Return an argument of a public function as an int in a range. Raises `ArgumentError`."""
    number = whole_number(value, least)
    if number is None or number > most:
        raise errors.argument_misfits(
            function, name, text(value), f"a whole number from {least} to {most}"
        )
    return number


def check_number(function: str, name: str, value: object, least: float = -math.inf) -> None:
    """Raise `ArgumentError` for an argument that is no number of at least `least`."""
    if not fits(value, float) or not value >= least:  # type: ignore[operator]
        expected = "a number" if least == -math.inf else f"a number of at least {least:g}"
        raise errors.argument_misfits(function, name, text(value), expected)


def bytes_of(given: object) -> int:
    """Return a number of bytes, as `40e9` or as a command line has it, `"40GB"`.

    Raises `ArgumentError` for what is no number above 0.

    >>> bytes_of("40GB"), bytes_of(4e10)
    (40000000000, 40000000000)
    """
    count = given
    if isinstance(given, str):
        read = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d\d?)?) *([kMGT]?)B?", given)
        count = float(read[1]) * 1000 ** " kMGT".index(read[2] or " ") if read else None
    number = isinstance(count, numbers.Real) and not isinstance(count, bool)
    if not number or not 0 < count < MAX_NUMBER:  # type: ignore[operator]
        raise errors.bytes_not_understood(text(given))
    return int(count)  # type: ignore[call-overload]


def check_choice(function: str, name: str, value: object, choices: Sequence[str]) -> None:
    """Raise `ArgumentError` where an argument is none of some words."""
    if not isinstance(value, str) or value not in choices:
        raise errors.argument_no_choice(function, name, value, text(value), choices)


def sign_of_mode(mode: object) -> int:
    """1 where the smallest score is the best, `"min"`, -1 for `"max"`. Raises `MembersError`."""
    signs = {"min": 1, "max": -1}
    if not isinstance(mode, str) or mode not in signs:
        raise errors.mode_unknown(mode)
    return signs[mode]


def check_seed(seed: object) -> int:
    """A seed as an int. Raises `TaskError`: JAX would take another one modulo 2**32, silently."""
    number = whole_number(seed, 0)
    if number is None or number >= 2**32:
        raise errors.seed_not_a_number(seed)
    return number


def local_path(given: str | os.PathLike[str]) -> Path:
    """A path of this machine's file system. Raises `CheckpointError` for a URL like `gs://...`, and
    for a name that no file can have.

    As a local path, `gs://bucket/run` would be the folder `gs:` in the current directory.
    """
    if match := re.match(r"([a-z][a-z0-9+.-]+):/", os.fspath(given)):
        raise errors.path_is_a_url(os.fspath(given), match.group(1))
    if given and not is_path(given):
        raise errors.path_impossible(text(os.fspath(given)))
    return Path(given)


def check_takes(what: str, function: Any, arguments: str) -> None:
    """Raise `TaskError` unless a function can be called with these arguments, `"params, inputs"`.

    Where Python does not know what it takes, it is left to the call.
    """
    if not callable(function):
        raise errors.function_is_none(what, type(function).__name__, arguments)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*arguments.split(", "))
    except TypeError:
        raise errors.function_takes_others(
            what, arguments, str(signature), place_of(function)
        ) from None


def without_axes(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function; `TaskError` where it communicates over an axis that nothing binds."""

    @functools.wraps(function)
    def called(*args: Any) -> Any:
        try:
            return function(*args)
        except NameError as error:
            found = re.search(r"unbound axis name: (\S+?)\.?(\s|$)", str(error))
            if found is None:
                raise
            raise errors.axis_is_unbound(place_of(function), found[1]) from error

    return called


def place_of(function: Callable[..., Any]) -> str:
    """The file and line where a function is written, ` (model.py:12)`; empty where unknown."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f" ({code.co_filename}:{code.co_firstlineno})" if code else ""
