"""Say which argument of a public function is to blame when a call fails with a raw error.

Functions check what only they know: ranges, shapes, what goes with what. What an annotation says
already is checked here, for all of them at once, and only once a call has failed: it costs nothing
where all is well, and a function's own message, which says more, comes first.

    px.compile(task, optimizer, plan, batch, devices="x")
      make_mesh reads device.process_index          AttributeError: 'str' object has no ...
      "x" is no Sequence[jax.Device], nor None      ArgumentError: plurax.compile(devices='x'): ...

`plurax.lazy` puts this around each public name. Imports no JAX.
"""

import errno
import functools
import inspect
import numbers
import os
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any, Literal

from plurax import errors
from plurax.user_frames import is_users, leave_users_frames

MAX_NUMBER = 2**63
"""Whole numbers of this size and above count nothing; Python cannot even print those of 4,300
digits."""

PATH_ERRORS = (
    errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.EACCES, errno.EPERM,
    errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL, errno.EROFS,
)  # fmt: skip
"""What the system says of a path that was given wrongly, and not of a disk."""


def explain(public: str, value: Any) -> Any:
    """Return a public function that explains its failures; a class is changed where it stands.

    **Arguments:** `public`, the name by which users call it, `plurax.fit`.
    """
    if inspect.isfunction(value) and not hasattr(value, "explains"):
        return _explained(public, value)
    if inspect.isclass(value) and "explains" not in vars(value):
        if issubclass(value, BaseException):
            return value
        setattr(value, "explains", True)  # noqa: B010  no attribute that mypy knows
        for name, member in list(vars(value).items()):
            if name.startswith("_") and name not in ("__init__", "__call__"):
                continue
            shown = public if name.startswith("_") else f"{public}.{name}"
            if isinstance(member, classmethod | staticmethod):
                setattr(value, name, type(member)(_explained(shown, member.__func__)))
            elif inspect.isfunction(member) and not getattr(member, "__isabstractmethod__", False):
                setattr(value, name, _explained(shown, member))
    return value


def _explained(public: str, function: Callable[..., Any]) -> Callable[..., Any]:
    if inspect.isgeneratorfunction(inspect.unwrap(function)):  # it runs after the call
        return function

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except errors.PluraxError as error:
            leave_users_frames(error)
            raise
        except Exception as error:
            leave_users_frames(error)
            explanation = (
                None if is_users(error) else _explanation(public, function, args, kwargs, error)
            )
            if explanation is None:
                raise
            raise explanation from None

    call.explains = True  # type: ignore[attr-defined]
    return call


def _explanation(
    public: str,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    error: Exception,
) -> errors.PluraxError | None:
    """Return our error for the first argument that is not what its annotation says, or None."""
    signature = inspect.signature(function)
    try:
        arguments = signature.bind(*args, **kwargs).arguments
    except TypeError as missing:
        known = [name for name in signature.parameters if name != "self"]
        unknown = [name for name in kwargs if name not in known]
        if unknown:
            return errors.argument_unknown(public, unknown[0], None, known)
        return errors.ArgumentError(
            f"{public}(...): {missing}. Its arguments are {', '.join(known)}."
        )
    try:
        hints = typing.get_type_hints(function)
    except NameError:  # a forward reference to what is imported for type checkers only
        annotated = function.__annotations__.items()
        hints = {name: hint for name, hint in annotated if not isinstance(hint, str)}
    for name, value in arguments.items():
        kind = signature.parameters[name].kind
        values = {name: value}
        if kind is inspect.Parameter.VAR_POSITIONAL:
            values = {f"{name}[{index}]": entry for index, entry in enumerate(value)}
        elif kind is inspect.Parameter.VAR_KEYWORD:
            values = value
        for shown, entry in values.items():
            hint = hints.get(name, Any)
            if not fits(entry, hint):
                return errors.argument_misfits(public, shown, text(entry), hint_text(hint))
            if name != "self" and not _is_printable(entry):
                return errors.argument_misfits(public, shown, text(entry), "a value of usual size")
            if isinstance(entry, str) and entry != entry.encode(errors="ignore").decode():
                half = "a text of whole characters, which UTF-8 can hold"
                return errors.argument_misfits(public, shown, text(entry), half)
            if isinstance(error, OSError) and _names(entry, error):
                return errors.ArgumentError(
                    f"{public}({shown}={text(entry)}): {error.strerror}. Give another path."
                )
            if isinstance(error, OverflowError | MemoryError) and _is_large(entry):
                return errors.ArgumentError(
                    f"{public}({shown}={text(entry)}): {shown} counts what has to fit in memory, "
                    "and must be a whole number of at least 0 that does."
                )
    return None


def _is_large(value: object) -> bool:
    """Whether a number counts more than there can be, or less than nothing."""
    return isinstance(value, numbers.Real) and not 0 <= value < 2**31  # type: ignore[operator]


def _names(value: object, error: OSError) -> bool:
    """Whether a file-system error is about the path that is this argument."""
    if error.errno not in PATH_ERRORS or not isinstance(value, str | os.PathLike):
        return False
    if not isinstance(error.filename, str):
        return False
    # Or a new file beside it, which is to take its place.
    folders = [os.path.dirname(os.path.abspath(one)) for one in (value, error.filename)]
    return str(value) in error.filename or folders[0] == folders[1]


# --- Values and annotations -----------------------------------------------------------------------


def fits(value: Any, hint: Any) -> bool:
    """Whether a value is what an annotation says; True for annotations that are not understood.

    Arrays of no dim are numbers, arrays are sequences, and objects with the fields of a
    `NamedTuple` are one, as for the functions that take them.

    >>> fits(3, int), fits(True, int), fits("x", Sequence[str]), fits(["x"], Sequence[str])
    (True, False, False, True)
    """
    kind, parts = typing.get_origin(hint) or hint, typing.get_args(hint)
    if kind is typing.Union or kind is types.UnionType:
        of_path = any(part is Path or typing.get_origin(part) is os.PathLike for part in parts)
        if of_path and isinstance(value, str | os.PathLike):
            return is_path(value)
        return any(fits(value, part) for part in parts)
    if kind is Literal:
        return isinstance(value, str | int | None) and value in parts
    if kind is None or kind is type(None):
        return value is None
    if kind in (int, float, bool):
        return _is_number(value, kind)
    if kind is Callable or kind is typing.get_origin(Callable[[], None]):
        return callable(value)
    if not isinstance(kind, type) or kind in (Any, object):
        return True
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return all(hasattr(value, field) for field in kind._fields)
    if kind is Sequence and hasattr(value, "__array__") and hasattr(value, "ndim"):
        return value.ndim > 0 and (not parts or all(fits(one, parts[0]) for one in value))
    if not isinstance(value, kind) or (kind is not str and _is_text_as_items(value, kind)):
        return False
    return _items_fit(value, kind, parts)


def _is_text_as_items(value: Any, kind: type) -> bool:
    return issubclass(kind, Iterable) and isinstance(value, str | bytes) and kind is not type(value)


def _items_fit(value: Any, kind: type, parts: tuple[Any, ...]) -> bool:
    if not parts:
        return True
    if isinstance(value, Mapping) and len(parts) == 2:
        return all(fits(key, parts[0]) and fits(one, parts[1]) for key, one in value.items())
    if isinstance(value, tuple) and kind is tuple and parts[-1] is not Ellipsis:
        return len(value) == len(parts) and all(map(fits, value, parts))
    if isinstance(value, Sequence | AbstractSet):
        return all(fits(one, parts[0]) for one in value)
    return True


def _is_number(value: Any, kind: type) -> bool:
    dtype = getattr(value, "dtype", None)
    if dtype is not None and getattr(value, "shape", None) == ():
        letters = {int: "iu", float: "iuf", bool: "b"}[kind]
        return getattr(dtype, "kind", "") in letters
    if kind is bool or isinstance(value, bool):
        return kind is bool and isinstance(value, bool)
    if isinstance(value, int):
        return abs(value) < MAX_NUMBER
    return kind is float and isinstance(value, float)


def is_path(value: str | os.PathLike[str]) -> bool:
    """Whether a file system can hold a file of this name."""
    try:
        name = os.fsencode(value)
    except (UnicodeEncodeError, TypeError):
        return False
    return bool(name) and b"\0" not in name and all(len(one) < 256 for one in name.split(b"/"))


def _is_printable(value: object) -> bool:
    """Whether `repr` ends: a list of a thousand lists in each other has none, nor has 10**5000."""
    try:
        repr(value)
    except Exception:
        return False
    return True


def text(value: object) -> str:
    """Return a value as a message shows it, in a few words.

    >>> text([1, 2]), text(10**5000)
    ('[1, 2]', 'a whole number of 5001 digits')
    """
    if isinstance(value, int) and abs(value) >= MAX_NUMBER:
        return f"a whole number of {int(value.bit_length() * 0.30103) + 1} digits"
    try:
        shown = " ".join(repr(value).split())
    except Exception:
        return f"a {type(value).__name__} that Python cannot print"
    return shown if len(shown) <= 60 else f"{shown[:56]}...{shown[-1]}"


def hint_text(hint: Any) -> str:
    """Return an annotation in words.

    >>> hint_text(int | None), hint_text(Literal["a", "b"]), hint_text(Sequence[str])
    ('a whole number or None', "'a' or 'b'", 'a sequence, each a text')
    """
    kind, parts = typing.get_origin(hint) or hint, typing.get_args(hint)
    if kind is typing.Union or kind is types.UnionType:
        if any(part is Path or typing.get_origin(part) is os.PathLike for part in parts):
            parts = (Path, *(part for part in parts if part is type(None)))
        return _either(list(dict.fromkeys(map(hint_text, parts))))
    if kind is Literal:
        return _either([repr(part) for part in parts])
    words = {
        type(None): "None", None: "None", int: "a whole number", float: "a number", str: "a text",
        bool: "True or False", Path: "a path, of names of at most 255 bytes",
    }  # fmt: skip
    if kind in words:
        return words[kind]
    if kind is typing.get_origin(Callable[[], None]):
        return "a function"
    if kind in (Mapping, dict):
        return f"a dict of {hint_text(parts[0])} to {hint_text(parts[1])}" if parts else "a dict"
    if kind in (Sequence, list, tuple, Iterable, AbstractSet, frozenset):
        name = {Sequence: "a sequence", Iterable: "an iterable"}.get(kind, f"a {kind.__name__}")
        items = [hint_text(part) for part in parts if part is not Ellipsis]
        return f"{name}, each {_either(list(dict.fromkeys(items)))}" if items else name
    module, name = getattr(kind, "__module__", ""), getattr(kind, "__name__", str(kind))
    if module.startswith("jaxtyping"):
        return f"an array {name}"
    return "anything" if kind is Any else f"a {name}"


def _either(choices: list[str]) -> str:
    return choices[0] if len(choices) == 1 else f"{', '.join(choices[:-1])} or {choices[-1]}"
