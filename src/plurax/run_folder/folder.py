"""Check a run's folder before resuming in it, and move a run aside before restarting in it."""

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from plurax import errors
from plurax.checkpoint import Checkpoints
from plurax.checkpoint.files import save_errors
from plurax.disk import AppendFile, replace_file, sync_folder
from plurax.execute.array_data import ArrayData
from plurax.execute.program import Program
from plurax.loop.data import Data
from plurax.loop.log_rows import encode_row
from plurax.machine import Machine
from plurax.run_folder.run_file import RUN_FILE, STARTS, noted_compiled, run_toml, utc_now

FILES = (
    "metrics.jsonl", "tensorboard", "plan.toml", "machine.toml", "servers.jsonl", "rollbacks.jsonl",
    RUN_FILE, STARTS,
)  # fmt: skip
"""The files a run writes beside its checkpoints."""


def epoch_length(source: Data) -> int | None:
    """Return an epoch's examples (arrays) or batches (iterable; None without a len)."""
    return source.draws if isinstance(source, ArrayData) else source.batches_per_epoch


def check_same_run(
    directory: str, meta: dict[str, Any], run: dict[str, Any], named: Sequence[str] = ()
) -> None:
    """Raise `CheckpointError` unless a run with these settings may continue from a checkpoint.

    **Arguments:** `named`, arguments of `experiment()` that may differ.
    """
    settings = {name: value for name, value in run.items() if name != "experiment"}
    if not meta.keys() >= {*settings, "position", "tally"}:
        raise errors.CheckpointError(
            f"the checkpoint in {directory} was not written by plurax.fit: it does not record a "
            "position in the data. Restore it with plurax.Checkpoints, or use another directory."
        )
    saved = meta.get("experiment", {})
    changed = {
        name: (saved[name], now)
        for name, now in run.get("experiment", {}).items()
        if name in saved and name not in named and json.dumps(saved[name]) != json.dumps(now)
    }
    if changed:
        raise errors.checkpoint_other_experiment(directory, changed)
    for field, now in settings.items():
        before = meta[field]
        if before == now:
            continue
        if field != "epoch_length":
            raise errors.CheckpointError(
                f"the run saved in {directory} has {field}={before!r} and this one "
                f"{field}={now!r}; continuing would not be the same training. Use the same value, "
                "or another directory."
            )
        if before is not None and now is not None:
            raise errors.CheckpointError(
                f"an epoch of the run saved in {directory} has {before} examples (of an iterable: "
                f"batches) and the data now have {now}; continuing would leave out or repeat some. "
                "Use the same data, or another directory."
            )


def save_settings(
    program: Program, machine: Machine | None, arguments: Mapping[str, Any], step: int, output: Path
) -> None:
    """Write `plan.toml`, `run.toml` and where given `machine.toml`, each atomically.

    **Arguments:** `arguments`, the arguments of `fit`; `step`, at which the run goes on.

    Raises `CheckpointError` where writing fails.
    """
    with save_errors(output):
        replace_file(output / "plan.toml", program.plan.to_toml().encode())
        if machine is not None:
            replace_file(output / "machine.toml", machine.to_toml().encode())
        # Of a run that goes on, the figures stay until its own are known.
        text = run_toml(arguments, program) + noted_compiled(output)
        replace_file(output / RUN_FILE, text.encode())
        starts = AppendFile(output / STARTS)
        starts.write(encode_row({"step": step, "time": utc_now()}))
        starts.close()


def move_run_aside(checkpoints: Checkpoints) -> None:
    """Move a run's files and checkpoints to `before.1` (2, 3, ...) in its folder.

    Checkpoints are moved last: after a kill in between, the folder still holds a run that `fit`
    will not overwrite. Raises `CheckpointError` where moving fails.
    """
    output = checkpoints.directory.parent
    with save_errors(output):
        there = [output / name for name in FILES if (output / name).exists()]
        if not there and not checkpoints.steps() and not checkpoints.damaged():
            return
        for number in itertools.count(1):
            target = output / f"before.{number}"
            if not target.exists():
                break
        target.mkdir()
        for path in there:
            path.rename(target / path.name)
        for folder in (target, output):
            sync_folder(folder)
        checkpoints.move_all(target / "checkpoints")
