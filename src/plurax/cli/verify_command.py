"""`plurax verify`: compare steps under a plan with those of one device."""

import dataclasses

from plurax import errors
from plurax.analysis.verify import verify
from plurax.cli.chosen import data_source, is_one_network
from plurax.cli.options import Common
from plurax.cli.parse import parse
from plurax.console import PlainConsole
from plurax.execute.placement import chunks, leading_dim


@dataclasses.dataclass(frozen=True)
class Verify(Common):
    """Train some steps under the plan and on one device, on CPU devices, and compare all tensors.

    Exits with 1 where one differs.
    """

    steps: int = 3
    """Steps to take."""
    seed: int = 0
    """Seed of initialisation and dropout."""


def verify_command(arguments: list[str]) -> int:
    """Train some steps under the plan and on one device; return 1 where they differ."""
    experiment, options, *_ = parse(arguments, "verify", Verify)
    if not is_one_network(experiment, options):
        raise errors.ExperimentError(
            "plurax verify compares one network under a plan with the same on one device, and this "
            "experiment has members, or a task that is a function of hyperparameters. A member is "
            "trained exactly as one network; verify the task of one of them."
        )
    _, like = data_source(experiment, options)
    batch = next(chunks(experiment.data, leading_dim(like)))
    result = verify(
        experiment.task, experiment.optimizer, options.chosen_plan(), batch,
        steps=options.steps, seed=options.seed,
    )  # fmt: skip
    PlainConsole().print(str(result))
    return 0 if result.ok else 1
