"""Numbers and paths as users give them, before anything is done with them. Imports no JAX."""

import dataclasses
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

RISING = (
    "acc", "accuracy", "auc", "auroc", "bleu", "iou", "precision", "psnr", "recall", "return",
    "reward", "ssim",
)  # fmt: skip
"""How a word ends in the name of a metric whose largest value is the best, a number aside. Of a
score the name does not say it: FID and Brier's fall."""

FALLING = ("loss", "error", "err")
"""Words in the name of a metric whose smallest value is the best, whatever the others are."""


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


def changed_fields(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass that differ from their default, by name."""
    return {
        field.name: own
        for field in dataclasses.fields(value)
        if (own := getattr(value, field.name)) != field.default
    }


def changed_repr(value: object) -> str:
    """Return the `repr` of a dataclass without the fields that have their default."""
    fields = (f"{name}={own!r}" for name, own in changed_fields(value).items())
    return f"{type(value).__name__}({', '.join(fields)})"


def check_whole(function: str, name: str, value: object, most: int = 2**31 - 1) -> int:
    """Return an argument of a public function as an int of at least 1. Raises `ArgumentError`."""
    number = whole_number(value)
    if number is None or number > most:
        raise errors.argument_misfits(
            function, name, text(value), f"a whole number from 1 to {most}"
        )
    return number


def check_number(function: str, name: str, value: object, least: float = -math.inf) -> None:
    """Raise `ArgumentError` for an argument that is no number of at least `least`."""
    if not fits(value, float) or not value >= least:  # type: ignore[operator]
        expected = "a number" if least == -math.inf else f"a number of at least {least:g}"
        raise errors.argument_misfits(function, name, text(value), expected)


def bytes_of(value: object) -> int:
    """Return a number of bytes, as `40e9` or as a command line has it, `"40GB"`.

    Raises `ArgumentError` for what is no number above 0.

    >>> bytes_of("40GB"), bytes_of(4e10)
    (40000000000, 40000000000)
    """
    count = value
    if isinstance(value, str):
        read = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d\d?)?) *([kMGT]?)B?", value)
        count = float(read[1]) * 1000 ** " kMGT".index(read[2] or " ") if read else None
    number = isinstance(count, numbers.Real) and not isinstance(count, bool)
    if not number or not 0 < count < MAX_NUMBER:  # type: ignore[operator]
        raise errors.ArgumentError(
            f"memory={text(value)} is no number of bytes above 0: write 40GB, 512MB or 4e10, and "
            "in Python '40GB' or 40e9."
        )
    return int(count)  # type: ignore[call-overload]


def check_choice(function: str, name: str, value: object, choices: Sequence[str]) -> None:
    """Raise `ArgumentError` where an argument is none of some words."""
    if not isinstance(value, str) or value not in choices:
        hint = errors.did_you_mean(value, choices) if isinstance(value, str) else ""
        raise errors.ArgumentError(
            f"{function}({name}={text(value)}): {name} must be one of "
            f"{', '.join(map(repr, choices))}.{hint}"
        )


def rises(metric: str) -> bool:
    """Whether a metric is better where it is larger, as far as its name says.

    >>> rises("eval_accuracy"), rises("top-5-acc"), rises("mIoU"), rises("f1_loss")
    (True, True, True, False)
    """
    words = re.split(r"[^a-z0-9]+", metric.lower())
    if any(word in FALLING for word in words):
        return False
    return any(
        word in ("f1", "r2") or word.rstrip("0123456789s").endswith(RISING) for word in words
    )


def sign_of_mode(mode: object) -> int:
    """1 where the smallest score is the best, `"min"`, -1 for `"max"`. Raises `MembersError`."""
    signs = {"min": 1, "max": -1}
    if not isinstance(mode, str) or mode not in signs:
        raise errors.MembersError(
            f"mode={mode!r}: choose 'min' where the smallest metric is the best (a loss), or 'max' "
            "(an accuracy)."
        )
    return signs[mode]


def check_seed(seed: object) -> int:
    """A seed as an int. Raises `TaskError`: JAX would take another one modulo 2**32, silently."""
    number = whole_number(seed, 0)
    if number is None or number >= 2**32:
        raise errors.TaskError(f"seed={seed!r}: give a whole number from 0 to 2**32 - 1.")
    return number


def local_path(path: str | os.PathLike[str]) -> Path:
    """A path of this machine's file system. Raises `CheckpointError` for a URL like `gs://...`, and
    for a name that no file can have.

    As a local path, `gs://bucket/run` would be the folder `gs:` in the current directory.
    """
    if match := re.match(r"([a-z][a-z0-9+.-]+):/", os.fspath(path)):
        raise errors.CheckpointError(
            f"{os.fspath(path)}: plurax writes to the file system of this machine, and "
            f"{match.group(1)}:// is another. Mount the bucket and give the path where it is "
            "mounted, or write to a folder and copy it."
        )
    if path and not is_path(path):
        raise errors.CheckpointError(
            f"{text(os.fspath(path))} is no path: each name in it has at most 255 bytes, none of "
            "them NUL."
        )
    return Path(path)


def check_takes(what: str, function: Any, arguments: str) -> None:
    """Raise `TaskError` unless a function can be called with these arguments, `"params, inputs"`.

    Where Python does not know what it takes, it is left to the call.
    """
    if not callable(function):
        raise errors.TaskError(
            f"{what} is a {type(function).__name__}, and must be a function of ({arguments})."
        )
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
            match = re.search(r"unbound axis name: (\S+?)\.?(\s|$)", str(error))
            if match is None:
                raise
            raise errors.TaskError(
                f"a function of the task{place_of(function)} communicates over an axis "
                f"{match[1]!r}, as functions for jax.pmap do. plurax does every sum over devices, "
                "and a coupled loss sees the examples of all of them: leave out jax.lax.pmean, "
                "psum and the like, and axis_name in batch norm."
            ) from error

    return called


def place_of(function: Callable[..., Any]) -> str:
    """The file and line where a function is written, ` (model.py:12)`; empty where unknown."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f" ({code.co_filename}:{code.co_firstlineno})" if code else ""
