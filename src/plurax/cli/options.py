"""Define the options of the commands; the fields' docstrings are their help."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import tyro

from plurax.execute.array_data import Ragged
from plurax.members import Members
from plurax.plan import Plan
from plurax.resample import Everything, Resample, bootstrap, kfold

Devices = Annotated[
    str | None,
    tyro.conf.arg(
        metavar="N|cores",
        help="Use N virtual CPU devices, or one per core, whatever hardware there is.",
    ),
]


@dataclasses.dataclass(frozen=True)
class Population:
    """Many networks in one program; the other fields of the file's members stay."""

    seeds: int | None
    """Number of members, with the seeds 0, 1, 2, ...; None: as in the file."""
    resample: Literal["file", "none", "bootstrap", "kfold"] = "file"
    """Rows each member trains on: as in the file, all, a bootstrap sample, all but a fold."""
    folds: int = 5
    """Number of folds of kfold."""

    def __post_init__(self) -> None:
        kfold(self.folds)  # raises for an invalid number of folds, used or not

    def chosen(self, members: Members | None) -> Members | None:
        """Return the file's members with the options applied; None for one network."""
        if self.seeds is None and self.resample == "file":
            return members
        members = members or Members(self.seeds)
        resample: dict[str, Callable[[], Resample]] = {
            "file": lambda: members.resample,
            "none": Everything,
            "bootstrap": bootstrap,
            "kfold": lambda: kfold(self.folds),
        }
        seeds = members.seeds if self.seeds is None else self.seeds
        return dataclasses.replace(members, seeds=seeds, resample=resample[self.resample]())


@dataclasses.dataclass(frozen=True)
class Common:
    """Options of every command."""

    plan: Plan
    """How training is distributed over devices."""
    plan_file: Path | None
    """Read the plan from this TOML file instead."""
    devices: Devices
    members: Population
    """Many networks in one program."""
    batch_size: int | None
    """Examples per step."""

    def chosen_plan(self) -> Plan:
        """Return the plan from `plan_file`, if given, else from the options."""
        return Plan.load(self.plan_file) if self.plan_file else self.plan


@dataclasses.dataclass(frozen=True)
class Train(Common):
    """Train the experiment, with checkpoints, metrics and curves in the output directory."""

    epochs: int
    """Passes over the data."""
    seed: int
    """Seed of initialisation, dropout and order."""
    ragged: Ragged
    """Treatment of a smaller last batch."""
    report_every: int
    """Epochs between rows of history, evaluations and checkpoints."""
    checkpoint_every: int | None
    """Steps between additional checkpoints."""
    output: Path
    """Directory for checkpoints, metrics, curves and the plan."""
    resume: bool = False
    """Continue from the newest checkpoint in the output directory."""
    restart: bool = False
    """Start from scratch in an output directory that holds a run, which is moved to before.1."""
    progress: bool = True
    """Show progress."""


@dataclasses.dataclass(frozen=True)
class Predict(Common):
    """Run the trained network over inputs from a file, whatever their number."""

    output: Path
    """Output directory of a training run."""
    inputs: Path
    """A .npy file (one array), or .npz (a dict of arrays), with the inputs in the leading dim."""
    predictions: Path = Path("predictions.npy")
    """File for the outputs: .npy for one array, .npz for a dict of arrays."""
    chunk: int | None = None
    """Inputs at a time; default the batch size."""


@dataclasses.dataclass(frozen=True)
class Show(Common):
    """Show a plan on a machine: shards, memory per device, communication of the compiled step.

    For a pipeline, also its timeline.
    """

    save: Path | None = None
    """Draw memory, communication and timelines to this PNG, too."""
    tune: Path | None = None
    """Measure members' chunk and batch_dim by short runs, and write the plan to this TOML file, for
    --plan-file."""
    compare: bool = False
    """Compile a pipeline under every named schedule, and show them side by side."""


@dataclasses.dataclass(frozen=True)
class Verify(Common):
    """Train some steps under the plan and on one device, on CPU devices, and compare all tensors.

    Exits with 1 where one differs.
    """

    steps: int = 3
    """Steps to take."""
    seed: int = 0
    """Seed of initialisation and dropout."""
