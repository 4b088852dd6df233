"""`plurax replay`: repeat a run with parameter servers from its record."""

import dataclasses
import hashlib
import json
from pathlib import Path

import tyro

from plurax import errors
from plurax.checkpoint import Checkpoints
from plurax.checkpoint.manager import state_fingerprints
from plurax.cli.arguments import load_experiment, start_devices
from plurax.cli.file_or_run import ExperimentSource, run_file_of
from plurax.cli.parser import parse_options
from plurax.experiment import Experiment
from plurax.mesh import cpu_devices
from plurax.plan import Plan
from plurax.run_folder.run_file import RunSettings, read_run_file
from plurax.train.replayed import fetched_steps, recorded_runs, replayed


@dataclasses.dataclass(frozen=True)
class ReplayOptions:
    """Repeat a run with parameter servers from its record, in one process.

    Say for each state that was saved whether it comes out the same bit for bit; exit with 1 where
    one does not.
    """

    run: tyro.conf.Positional[Path]
    """The run's output directory."""
    file: tyro.conf.Positional[Path | None] = None
    """The file that defines experiment(); by default the one the run was trained from."""


def replay_command(arguments: list[str]) -> int:
    """Repeat a run from its record; return 0 where all states are those that were saved."""
    options = parse_options(ReplayOptions, "plurax replay", arguments)
    runs = recorded_runs(options.run)
    devices = max(Plan.from_toml(run[0]["plan"]).devices for run in runs)
    experiment = _experiment(options.run, options.file, devices)
    steps, same = {*fetched_steps(runs)}, True
    checkpoints = Checkpoints(options.run / "checkpoints")
    setup = experiment.task, experiment.optimizer, experiment.data
    for step, state in replayed(*setup, options.run, runs, steps):
        prints, saved = state_fingerprints(state), checkpoints.fingerprints(step)
        others = [path for path in prints if saved is not None and prints[path] != saved.get(path)]
        same = same and not others
        verdict = "equal to its checkpoint, bit for bit"
        if saved is None:
            verdict = "no checkpoint to compare with"
        elif others:
            verdict = f"NOT its checkpoint: {', '.join(others)}"
        print(f"step {step}: {_digest(prints)}, {verdict}", flush=True)
    return 0 if same else 1


def _experiment(folder: Path, file: Path | None, devices: int) -> Experiment:
    """Return the experiment of a run, with its own arguments, once there are devices for it."""
    run = read_run_file(folder)
    if run is None:
        if file is None:
            raise errors.run_without_file(str(folder), "replay")
        run = RunSettings(folder, file, {}, {}, None)
    asked = run.options.get("devices")
    if asked is None:
        cpu_devices(devices)
    else:
        start_devices([f"--devices={asked}"])
    source = ExperimentSource(file or run_file_of(run, "replay"), run, [])
    experiment, *_ = load_experiment(source.file, "plurax replay", source.experiment)
    return experiment


def _digest(prints: dict[str, str]) -> str:
    return hashlib.sha256(json.dumps(prints, sort_keys=True).encode()).hexdigest()[:16]
