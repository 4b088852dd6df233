"""The description of a checkpoint: JSON with a format version and a checksum.

    {"format": 2, "sha256": "<of format and values>", "values": {...}}

This envelope stays the same in every later format, so that any version of plurax can distinguish a
newer checkpoint from a damaged one.
"""

import errno
import hashlib
import json
from pathlib import Path
from typing import Any

from plurax import errors
from plurax.checkpoint.damage import Damage
from plurax.reading import parse_json

FORMAT = 2
"""The current format; format 1 had no checksum."""

FIRST_FORMAT = {"fingerprints", "shapes", "key_impl"}
"""The keys of every description of format 1."""


def sealed(values: dict[str, Any]) -> dict[str, Any]:
    """Return the description to write. Raises `CheckpointError` for values JSON cannot hold."""
    try:
        values = json.loads(json.dumps(values))  # keys are text from here on
    except (TypeError, ValueError) as error:
        raise errors.CheckpointError(
            f"what is to be saved beside the state is not JSON: {error}. Give numbers, texts, "
            "lists and dicts of Python's own; of a NumPy scalar its .item()."
        ) from None
    return {"format": FORMAT, "sha256": _digest(FORMAT, values), "values": values}


def read_description(step: Path) -> dict[str, Any]:
    """Return the values of a checkpoint's description.

    Raises `Damage`, or `CheckpointError` where another version of plurax wrote it.
    """
    try:
        content = (step / "meta" / "metadata").read_bytes()
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP):
            raise
        raise Damage("its description is missing") from None
    try:
        envelope = parse_json(content)
    except ValueError:
        raise Damage("its description is no longer JSON") from None
    if not isinstance(envelope, dict):
        raise Damage("its description is not as it was saved")
    if envelope.keys() >= FIRST_FORMAT and "sha256" not in envelope:
        raise errors.CheckpointError(
            f"{step} was written by an older version of plurax: its format is 1, and this version "
            f"reads format {FORMAT}. Use the plurax it was written with, or train anew in another "
            "directory."
        )
    version, values = envelope.get("format"), envelope.get("values")
    if envelope.get("sha256") != _digest(version, values):
        raise Damage("its description is not as it was saved")
    if version != FORMAT:
        raise errors.CheckpointError(
            f"{step} was written by a newer version of plurax: its format is {version}, and this "
            f"version reads format {FORMAT}. Install a newer plurax to go on from it."
        )
    assert isinstance(values, dict)
    return values


def _digest(version: Any, values: Any) -> str:
    text = json.dumps([version, values], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
