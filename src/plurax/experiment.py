"""An experiment: what the command line trains, defined by a Python file."""

import dataclasses
import inspect
import runpy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import optax
from jaxtyping import PyTree

from plurax import errors
from plurax.data import Ragged
from plurax.execute.members import Maker
from plurax.members import Members
from plurax.plan import Plan
from plurax.task import Task


@dataclasses.dataclass(frozen=True)
class Experiment:
    """What `plurax train FILE` trains: the result of the file's `experiment()`.

    The fields are the arguments of `plurax.fit`; the command line overrides those it names.
    """

    task: Task | Maker
    """What is trained; with members perhaps a function of a member's hyperparameters."""
    optimizer: optax.GradientTransformation | Maker
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
    try:
        names = runpy.run_path(str(path), run_name=path.stem)
    except errors.PluraxError:
        raise
    except Exception as error:
        raise errors.experiment_failed(str(path), f"{type(error).__name__}: {error}") from error
    function = names.get("experiment")
    if not callable(function):
        raise errors.experiment_missing_function(str(path))

    def checked(**arguments: Any) -> Experiment:
        made = function(**arguments)
        if not isinstance(made, Experiment):
            raise errors.experiment_wrong_type(str(path), type(made).__name__)
        return made

    checked.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    checked.__doc__ = function.__doc__
    report = names.get("report")
    return checked, report if callable(report) else None
