"""`plurax estimate`, and `plurax plan --diff`: what plans cost on a machine, by formulas."""

import dataclasses
import itertools
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import tyro
from jaxtyping import PyTree

from plurax import errors
from plurax.analysis.comparison import Comparison
from plurax.analysis.estimate import Estimate, estimate, human_seconds
from plurax.cli.arguments import value
from plurax.cli.chosen import data_source
from plurax.cli.machine_command import machine_named
from plurax.cli.options import Common, Show
from plurax.cli.parse import parse
from plurax.cli.parser import HELP
from plurax.experiment import Experiment
from plurax.machine import Machine
from plurax.members import Members
from plurax.plan import Plan

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
    estimated = ToEstimate.of(experiment, options).estimate(options.chosen_plan())
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
    asked, estimates = ToEstimate.of(experiment, options), {}
    for path, plan in plans.items():
        try:
            estimates[path] = asked.estimate(plan)
        except errors.PlanError as error:
            raise errors.plan_in_a_file(path, error) from None
    print(Comparison(estimates[paths[0]], estimates[paths[1]], (paths[0], paths[1])))
    return 0


class ToEstimate(NamedTuple):
    """What an estimate is of, beside a plan: `like`, shapes of a batch; `members`, or None."""

    task: Any
    optimizer: Any
    like: PyTree
    machine: Machine
    members: Members | None

    @staticmethod
    def of(experiment: Experiment, options: EstimateOptions | DiffOptions | Show) -> "ToEstimate":
        """Return what an experiment and the options say."""
        members = options.members.chosen(experiment.members)
        machine = machine_named(options.machine, options.nodes)
        like = data_source(experiment, options, members)[1]
        return ToEstimate(experiment.task, experiment.optimizer, like, machine, members)

    def estimate(self, plan: Plan) -> Estimate:
        """Return the estimate of a plan."""
        return estimate(self.task, self.optimizer, plan, self.like, self.machine, self.members)
