"""What the options choose, for several commands: data, a program, a file to write."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from jaxtyping import PyTree

from plurax import errors
from plurax.checkpoint.restore import make_program
from plurax.cli.options import Common
from plurax.distributed.environment import writes_files
from plurax.execute.program import Program
from plurax.experiment import Experiment
from plurax.loop.data import Data, as_data
from plurax.members import Members
from plurax.plan import Plan
from plurax.task import Task

T = TypeVar("T")


def data_source(
    experiment: Experiment, options: Common, members: Members | None = None
) -> tuple[Data, PyTree]:
    """Return the data, as `members` read them, and the shapes of a full batch."""
    return as_data(
        experiment.data,
        batch_size=options.batch_size,
        seed=experiment.seed,
        shuffle=experiment.shuffle,
        ragged=experiment.ragged,
        members=members,
    )


def is_one_network(experiment: Experiment, options: Common) -> bool:
    """Return whether there is one network: neither members nor a task of hyperparameters."""
    members = options.members.chosen(experiment.members)
    return members is None and isinstance(experiment.task, Task)


def chosen_program(experiment: Experiment, options: Common, plan: Plan) -> Program:
    """Return the program to show or to predict with."""
    members = options.members.chosen(experiment.members)
    source, like = data_source(experiment, options, members)
    task, optimizer = experiment.task, experiment.optimizer
    compiler_options = experiment.compiler_options
    return make_program(task, optimizer, plan, like, members, source, None, None, compiler_options)


def written(path: Path, write: Callable[[Path], T]) -> T:
    """Return `write(path)`; of several processes one writes, the others to nowhere.

    Raises `ExperimentError` where the file cannot be written.
    """
    if not writes_files():
        with tempfile.TemporaryDirectory() as elsewhere:
            return write(Path(elsewhere, path.name))
    try:
        return write(path)
    except (OSError, ValueError) as error:
        raise errors.not_written(str(path), str(error)) from None
