"""Values as a TOML text; `plurax.reading` has the other way. Imports no JAX.

    >>> print(write_toml({"name": "here", "flops": {"float32": 1e12}, "levels": [{"devices": 8}]}))
    name = "here"
    <BLANKLINE>
    [flops]
    float32 = 1000000000000.0
    <BLANKLINE>
    [[levels]]
    devices = 8
    <BLANKLINE>

Plans and machines are edited by hand. So a list stands in one line (tomli-w 1.2 gives each item
one), a rate is `3.12e+14` (312000000000000.0 in tomli-w and tomlkit), what TOML has not is text.
tomlkit 0.15 takes 27 s for the hyperparameters of 10,000 members, two numbers each; this 0.06 s.
"""

import enum
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any


def write_toml(table: Mapping[str, Any], *, float_text: Callable[[float], str] = repr) -> str:
    """Return a table as TOML, those in it after its plain values; an empty one is left out.

    What TOML has not (None, a path) is written as the text that `str` gives.

    **Arguments:** `float_text`, how a float is written.
    """
    return "\n".join(_lines(table, "", float_text)) + "\n"


def _lines(
    table: Mapping[str, Any], prefix: str, float_text: Callable[[float], str]
) -> Iterator[str]:
    for key, value in table.items():
        if not isinstance(value, Mapping) and not _is_array_of_tables(value):
            yield f"{_key(key)} = {toml_value(value, float_text)}"
    for key, value in table.items():
        name = f"{prefix}{_key(key)}"
        if isinstance(value, Mapping):
            if any(not isinstance(inner, Mapping) for inner in value.values()):
                yield from ("", f"[{name}]")
            yield from _lines(value, f"{name}.", float_text)
        elif _is_array_of_tables(value):
            for each in value:
                yield from ("", f"[[{name}]]")
                yield from _lines(each, f"{name}.", float_text)


def _is_array_of_tables(value: Any) -> bool:
    is_list = isinstance(value, Sequence) and not isinstance(value, str | bytes)
    return is_list and len(value) > 0 and all(isinstance(each, Mapping) for each in value)


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _text(name)


def toml_value(value: Any, float_text: Callable[[float], str] = repr) -> str:
    """Return a value in TOML; what TOML has not, as text."""
    if isinstance(value, enum.Enum):
        return toml_value(value.name, float_text)
    if hasattr(value, "dtype") and getattr(value, "shape", None) == ():  # a number of NumPy
        value = value.item()
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return float_text(value)
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return f"[{', '.join(toml_value(each, float_text) for each in value)}]"
    return _text(str(value))


def _text(text: str) -> str:
    """Return a basic string of TOML, which is JSON's with DEL escaped too."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007F")
