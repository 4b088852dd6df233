"""`plurax estimate`, and `plurax plan --diff`: what plans cost on a machine, by formulas."""

import dataclasses
import itertools
from pathlib import Path
from typing import Annotated, TypeVar

import tyro
from jaxtyping import PyTree

from plurax import errors
from plurax.analysis.comparison import Comparison
from plurax.analysis.estimate import estimate, human_seconds
from plurax.cli.arguments import value
from plurax.cli.chosen import data_source, is_one_network
from plurax.cli.machine_command import machine_named
from plurax.cli.options import Common, Show
from plurax.cli.parse import parse
from plurax.cli.parser import HELP
from plurax.experiment import Experiment
from plurax.machine import Machine
from plurax.plan import Plan
from plurax.task import Task

T = TypeVar("T")


MachineName = Annotated[
    str | None,
    tyro.conf.arg(
        metavar="PRESET|FILE",
        help="Published hardware, like 8xA100-80GB, or a TOML file. None: this machine, measured.",
    ),
]


@dataclasses.dataclass(frozen=True)
class EstimateOptions(Common):
    """Say what a plan takes, holds and sends on a machine, without compiling or training anything.

    Neither its devices nor its memory need to be here.
    """

    machine: MachineName = None
    nodes: int = 1
    """Number of nodes of the published hardware."""
    examples: float | None = None
    """Say also how long that many examples take, and how many device-hours."""


Hidden = Annotated[T, tyro.conf.Fixed, tyro.conf.Suppress]
"""An option of `Common` that a command does not have."""


@dataclasses.dataclass(frozen=True)
class DiffOptions(Common):
    """Say what differs between two plan files, and what it costs on a machine, by their estimates.

    Nothing is compiled; neither the devices nor their memory need to be here.
    """

    plan: Hidden[Plan]
    plan_file: Hidden[Path | None]
    machine: MachineName = None
    nodes: int = 1
    """Number of nodes of the published hardware."""


def estimate_command(arguments: list[str]) -> int:
    """Print the estimate of a plan."""
    experiment, options, *_ = parse(arguments, "estimate", EstimateOptions)
    task, machine, like = to_estimate(experiment, options, "estimate")
    estimated = estimate(task, experiment.optimizer, options.chosen_plan(), like, machine)
    print(estimated)
    if options.examples is not None:
        takes = human_seconds(estimated.seconds_for(options.examples))
        hours = estimated.device_hours(options.examples)
        print(f"{options.examples:,.0f} examples take {takes}: {hours:,.3g} device-hours")
    return 0


def diff_command(arguments: list[str]) -> int:
    """Compare two plans, given as files in front of the other options."""
    file = value(arguments, "--diff")
    place = next(i for i, argument in enumerate(arguments) if argument.split("=")[0] == "--diff")
    rest = arguments[:place] + arguments[place + (1 if "=" in arguments[place] else 2) :]
    paths = list(itertools.takewhile(lambda argument: not argument.startswith("-"), rest))
    asked_help = bool({*HELP} & {*rest})
    if not file or (len(paths) != 2 and not asked_help):
        raise errors.ExperimentError(
            f"plurax plan {' '.join(arguments)}: --diff compares two plan files, which come first. "
            "Write plurax plan a.toml b.toml --diff FILE, where FILE defines experiment()."
        )
    plans = {path: Plan.load(path) for path in paths}
    experiment, options, *_ = parse([file, *rest[len(paths) :]], "plan A B --diff", DiffOptions)
    task, machine, like = to_estimate(experiment, options, "plan --diff")
    estimates = {}
    for path, plan in plans.items():
        try:
            estimates[path] = estimate(task, experiment.optimizer, plan, like, machine)
        except errors.PlanError as error:
            raise errors.plan_in_a_file(path, error) from None
    print(Comparison(estimates[paths[0]], estimates[paths[1]], (paths[0], paths[1])))
    return 0


def to_estimate(
    experiment: Experiment, options: EstimateOptions | DiffOptions | Show, command: str
) -> tuple[Task, Machine, PyTree]:
    """Return the task, the machine of the options, and the shapes of a batch."""
    if not is_one_network(experiment, options):
        raise errors.ExperimentError(
            f"plurax {command} is for one network, and this experiment has members, or a task that "
            "is a function of hyperparameters. plurax plan shows what a population's program holds."
        )
    machine = machine_named(options.machine, options.nodes)
    return experiment.task, machine, data_source(experiment, options)[1]
