"""Compare `metrics.jsonl` with what a checkpoint says of it.

A checkpoint has the length and the SHA-256 of the log when it was saved. The log only grows, so its
beginning stays as it was, until a disk, an editor or another program changes it:

    checkpoint     log at its time     log now
    step 4         1,200 bytes         its first 1,200 bytes: the same
    step 8         2,400 bytes         its first 2,400 bytes: others; the row of step 6 is not there
"""

import contextlib
import hashlib
from pathlib import Path

from plurax import errors
from plurax.checkpoint import Checkpoints
from plurax.loop.log_rows import Row, read_rows
from plurax.run_folder.log import LOG_FILE

MOST_LISTED = 8
"""Ranges of steps that are named."""
PIECE = 1 << 20


def log_damage(output: Path, last: int | None = None) -> tuple[int, str] | None:
    """Return the step of the newest checkpoint and what the log of a run lacks of that time.

    None where it lacks nothing, or no checkpoint says anything of it.

    **Arguments:** `output`, of the run; `last`, the step of the checkpoint to compare with, in
    place of the newest.
    """
    checkpoints = Checkpoints(output / "checkpoints")
    seals = {}
    with contextlib.suppress(errors.CheckpointError):  # of another version
        for step in checkpoints.steps():
            meta = checkpoints.run_meta(step)
            if meta is not None and "log" in meta and (last is None or step <= last):
                seals[step] = meta["log"]
    if not seals:
        return None
    newest, path = max(seals), output / LOG_FILE
    whole = [step for step, seal in seals.items() if _is_whole(path, **seal)]
    if newest in whole:
        return None
    return newest, _described(path, max(whole, default=0), newest)


def damage_row(step: int, reason: str) -> Row:
    """Return the row of a log that says what it lacks."""
    return {"kind": "event", "event": "log damaged", "step": step, "reason": reason}


def _is_whole(path: Path, length: int, sha256: str) -> bool:
    """Return whether a file still begins with what it held."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while length and (piece := file.read(min(length, PIECE))):
                digest.update(piece)
                length -= len(piece)
    except FileNotFoundError:
        return False
    return not length and digest.hexdigest() == sha256


def _described(path: Path, first: int, last: int) -> str:
    """Return what is wrong after step `first`, up to which all is as it was."""
    if not path.exists():
        return "the file is gone"
    there = {row["step"] for row in read_rows(path) if row["kind"] == "step"}
    missing = [step for step in range(first + 1, last + 1) if step not in there]
    if not missing:
        return f"what it says of steps {first + 1} to {last} is not what was written"
    ranges: list[list[int]] = []
    for step in missing:
        if ranges and ranges[-1][1] == step - 1:
            ranges[-1][1] = step
        else:
            ranges.append([step, step])
    named = [f"{a} to {b}" if a != b else str(a) for a, b in ranges]
    more = [f"and {len(named) - MOST_LISTED} more"] if len(named) > MOST_LISTED else []
    rows = "row of a step is" if len(missing) == 1 else "rows of steps are"
    return f"{len(missing)} {rows} missing: {', '.join(named[:MOST_LISTED] + more)}"
