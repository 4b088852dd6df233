"""The rows of a run: what the loop says of a step, an evaluation, an epoch, or of what happened.

A row is a dict. `kind` is one of `KINDS`, `step` and `epoch` say when, the rest are numbers; of a
population also `members`, a dict of lists with a number for each member. One line of JSON each:

    {"kind": "step", "step": 3, "epoch": 1, "loss": 0.25, "grad_norm": 1.5}
    {"kind": "event", "event": "rollback", "step": 4, "from": 3, "to": 9}
"""

import json
import math
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

from plurax.reading import parse_json

Row = dict[str, Any]

KINDS = ("step", "evaluation", "epoch", "event")
"""The kinds of rows."""

NOT_FINITE = ("nan", "inf", "-inf")
"""The texts that stand in JSON for numbers that JSON cannot hold."""


def read_rows(path: Path) -> Iterator[Row]:
    """Yield the rows of a `metrics.jsonl`, leaving out lines that a kill cut short."""
    for _, _, row in parsed_lines(path):
        if row is not None:
            yield row


def parsed_lines(path: Path) -> Iterator[tuple[int, bytes, Row | None]]:
    """Yield number, bytes and row of each line; None for a line that is not a whole row."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            yield number, line, read_row(line)


def read_row(line: bytes) -> Row | None:
    """Return the row of a line, None for one that is not a whole row."""
    try:
        row = parse_json(line)
    except ValueError:
        return None
    if not line.endswith(b"\n") or not isinstance(row, dict):
        return None
    if not isinstance(row.get("step"), int) or row.get("kind") not in KINDS:
        return None
    return {name: _numbers(value) for name, value in row.items()}


def _numbers(value: Any) -> Any:
    """Decode what `_plain` encoded."""
    if isinstance(value, dict):
        return {name: _numbers(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_numbers(inner) for inner in value]
    if value is None or value in NOT_FINITE:
        return math.nan if value is None else float(value)
    return value


def numbers(row: Row) -> dict[str, float]:
    """Return the numbers of a row by name."""
    return {name: value for name, value in row.items() if isinstance(value, int | float)}


def named_numbers(row: Row, without: Container[str] = ("step",)) -> dict[str, float]:
    """Return the numbers of a row by names like `step/loss`."""
    return {f"{row['kind']}/{name}": v for name, v in numbers(row).items() if name not in without}


def encode_row(row: Row) -> bytes:
    """Encode one row as a line of JSON; a value that is not finite becomes text."""
    return (json.dumps(_plain(row)) + "\n").encode()


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
