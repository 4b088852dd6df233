"""`plurax replay`, and the note of how a run was started."""

import hashlib
import json
from pathlib import Path
from typing import Any

import tyro

from plurax import errors
from plurax.cli.arguments import made_experiment, start_devices, value
from plurax.cli.options import ReplayOptions
from plurax.mesh import cpu_devices
from plurax.plan import Plan
from plurax.train.checkpoint import Checkpoints
from plurax.train.checkpoint.manager import state_fingerprints
from plurax.train.replayed import fetched_steps, recorded_runs, replayed
from plurax.train.run_folder import COMMAND


def train_command(arguments: list[str]) -> dict[str, Any]:
    """Return for a run's folder from which file and with which arguments it is trained."""
    return {"file": str(Path(arguments[0]).resolve()), "arguments": arguments[1:]}


def replay_command(arguments: list[str]) -> int:
    """Repeat a run from its record; return 0 where all states are those that were saved."""
    options = tyro.cli(ReplayOptions, prog="plurax replay", args=arguments)
    runs = recorded_runs(options.run)
    file, given = _command(options.run, options.file)
    if value(given, "--devices") is None:
        cpu_devices(max(Plan.from_toml(run[0]["plan"]).devices for run in runs))
    else:
        start_devices(given)
    made, *_ = made_experiment(file, "plurax replay", given)
    steps, same = {*fetched_steps(runs)}, True
    checkpoints = Checkpoints(options.run / "checkpoints")
    for step, state in replayed(made.task, made.optimizer, made.data, options.run, runs, steps):
        found, saved = state_fingerprints(state), checkpoints.fingerprints(step)
        others = [path for path in found if saved is not None and found[path] != saved.get(path)]
        same = same and not others
        said = "equal to its checkpoint, bit for bit"
        if saved is None:
            said = "no checkpoint to compare with"
        elif others:
            said = f"NOT its checkpoint: {', '.join(others)}"
        print(f"step {step}: {_digest(found)}, {said}", flush=True)
    return 0 if same else 1


def _command(run: Path, file: Path | None) -> tuple[Path, list[str]]:
    """Return the file and the arguments with which a run was started."""
    path, said = run / COMMAND, dict[str, Any]()
    if path.is_file():
        said = json.loads(path.read_text())
    elif file is None:
        raise errors.replay_needs_file(str(run))
    return file or Path(said["file"]), said.get("arguments", [])


def _digest(prints: dict[str, str]) -> str:
    return hashlib.sha256(json.dumps(prints, sort_keys=True).encode()).hexdigest()[:16]
