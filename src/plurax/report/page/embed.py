"""Values as the JSON that stands in a page."""

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from plurax.report.run_series import is_number


def json_value(value: Any, digits: int = 5) -> Any:
    """Return a value of a run as JSON holds it, arrays and tables too.

    Numbers have some digits, whole ones all of theirs; those that are not finite are None. What is
    of no kind that JSON has is its text.

    >>> json_value({"loss": np.array([0.1234567, 3.0, np.nan])})
    {'loss': [0.12346, 3, None]}
    """
    if isinstance(value, Mapping):
        return {str(name): json_value(inner, digits) for name, inner in value.items()}
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [json_value(inner, digits) for inner in value]
    if not is_number(value):
        return value if value is None or isinstance(value, bool) else str(value)
    if not math.isfinite(value):
        return None
    whole = float(value).is_integer() and abs(value) < 1e15
    return int(value) if whole else float(f"{value:.{digits}g}")


def embedded(payload: Any) -> str:
    """Return values as JSON that cannot end the element of a page that it stands in.

    >>> embedded({"name": "</script>"})
    '{"name":"\\\\u003c/script\\\\u003e"}'
    """
    text = json.dumps(payload, separators=(",", ":"), allow_nan=False)
    for letter in "<>&":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text  # json.dumps has escaped what is not ASCII
