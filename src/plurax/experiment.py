"""An experiment: what the command line trains, defined by a Python file."""

import dataclasses
import inspect
import runpy
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import optax
from jaxtyping import PyTree

from plurax import errors
from plurax.execute.array_data import Ragged
from plurax.execute.population import HyperFn
from plurax.members import Members
from plurax.plan import Plan
from plurax.task import Task
from plurax.user_frames import told


@dataclasses.dataclass(frozen=True)
class Experiment:
    """What `plurax train FILE` trains: the result of the file's `experiment()`.

    The fields are the arguments of `plurax.fit`; the command line overrides those it names.
    """

    task: Task | HyperFn
    """What is trained; with members perhaps a function of a member's hyperparameters."""
    optimizer: optax.GradientTransformation | HyperFn
    """By which rule; with members perhaps a function of a member's hyperparameters."""
    data: PyTree | Iterable[PyTree]
    """Arrays in a tree, a Grain dataset of batches, or an iterable of batches."""
    batch_size: int | None = None
    """Examples of a step; needed for arrays."""
    epochs: int = 1
    """Passes over the data."""
    plan: Plan = Plan()  # noqa: RUF009  frozen
    """How training is spread over devices."""
    members: Members | None = None
    """A population to train instead of one network."""
    evaluation: PyTree | Iterable[PyTree] | None = None
    """Data to evaluate on after each epoch."""
    seed: int = 0
    """Of initialisation, dropout and order."""
    shuffle: bool = True
    """Whether arrays are taken in a new order each epoch."""
    ragged: Ragged = "pad"
    """What to do with a smaller last batch."""
    report_every: int = 1
    """Epochs between rows of history, evaluations and checkpoints."""
    checkpoint_every: int | None = None
    """Steps between checkpoints, besides those."""


Report = Callable[[Experiment, Any, Path], Iterable[Path]]
"""`report(experiment, fit_result, directory)` draws what belongs to an experiment, and returns what
it wrote."""


def load(path: str | Path) -> tuple[Callable[..., Experiment], Report | None]:
    """The functions `experiment` and, if there is one, `report` of a Python file.

    Raises `ExperimentError`.
    """
    path = Path(path)
    if not path.is_file():
        raise errors.experiment_missing_file(str(path))
    # As `python FILE` has it, so that a module beside FILE can be imported, now and later.
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        names = runpy.run_path(str(path), run_name=path.stem)
    except errors.PluraxError:
        raise
    except SystemExit as error:
        raise errors.experiment_exits(str(path), told(error)) from None
    except Exception as error:
        raise errors.experiment_failed(str(path), told(error)) from None
    function = names.get("experiment")
    if not callable(function):
        raise errors.experiment_missing_function(str(path))

    def checked(**arguments: Any) -> Experiment:
        try:
            made = function(**arguments)
        except SystemExit as error:
            raise errors.experiment_exits(str(path), told(error)) from None
        if not isinstance(made, Experiment):
            raise errors.experiment_wrong_type(str(path), type(made).__name__)
        # The options of the command line are made of these two.
        if not isinstance(made.plan, Plan):
            raise errors.plan_is_none(made.plan)
        if not isinstance(made.members, Members | None):
            raise errors.members_are_none(made.members)
        return made

    try:
        # Annotations may be strings, which mean something in the file alone.
        signature = inspect.signature(function, eval_str=True)
    except Exception as error:
        raise errors.experiment_failed(str(path), told(error)) from None
    checked.__signature__ = signature  # type: ignore[attr-defined]
    checked.__doc__ = function.__doc__
    report = names.get("report")
    return checked, report if callable(report) else None
