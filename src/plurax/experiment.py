"""An experiment: what the command line trains, defined by a Python file."""

import inspect
import runpy
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

from plurax import errors
from plurax.members import Members
from plurax.plan import Plan
from plurax.train.fit import fit
from plurax.train.other_names import check_names
from plurax.user_frames import describe_error

P = ParamSpec("P")


def _takes(
    function: Callable[P, Any],
) -> Callable[[Callable[..., None]], Callable[Concatenate["Experiment", P], None]]:
    """Give a constructor the arguments of `function`, for type checkers and `help`."""

    def decorate(init: Callable[..., None]) -> Callable[Concatenate["Experiment", P], None]:
        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        parameters = inspect.signature(function).parameters.values()
        init.__signature__ = inspect.Signature([own, *parameters])  # type: ignore[attr-defined]
        return init

    return decorate


class Experiment:
    """What `plurax train FILE` trains: the result of the file's `experiment()`.

    It takes the arguments of `plurax.fit` and has them as attributes; the command line overrides
    those it names. Raises `ExperimentError` for others.
    """

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    @_takes(fit)
    def __init__(self, *args: Any, **options: Any) -> None:
        try:
            check_names(fit, "Experiment", options)
            bound = inspect.signature(fit).bind(*args, **options)
        except (TypeError, errors.TaskError) as error:
            raise errors.ExperimentError(
                f"plurax.Experiment: {error}; its arguments are those of plurax.fit, by the same "
                "names."
            ) from None
        bound.apply_defaults()
        vars(self).update(bound.arguments)


Report = Callable[[Experiment, Any, Path], Iterable[Path]]
"""`report(experiment, fit_result, directory)` draws what belongs to an experiment, and returns what
it wrote."""


def load(path: str | Path) -> tuple[Callable[..., Experiment], Report | None]:
    """The functions `experiment` and, if there is one, `report` of a Python file.

    Raises `ExperimentError`.
    """
    path = Path(path)
    if not path.is_file():
        raise errors.ExperimentError(
            f"{path}: no such file; give one that defines experiment(), or the folder of a run."
        )
    # As `python FILE` has it, so that a module beside FILE can be imported, now and later.
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        names = runpy.run_path(str(path), run_name=path.stem)
    except errors.PluraxError:
        raise
    except SystemExit as error:
        raise errors.experiment_exits(str(path), describe_error(error)) from None
    except Exception as error:
        raise errors.experiment_failed(str(path), describe_error(error)) from None
    function = names.get("experiment")
    if not callable(function):
        raise errors.ExperimentError(
            f"{path} does not define experiment(). Add:\n\n    def experiment():\n        return "
            "plurax.Experiment(task=..., optimizer=..., data=..., batch_size=..., epochs=...)\n"
        )

    def checked(**arguments: Any) -> Experiment:
        try:
            experiment = function(**arguments)
        except SystemExit as error:
            raise errors.experiment_exits(str(path), describe_error(error)) from None
        if not isinstance(experiment, Experiment):
            raise errors.ExperimentError(
                f"{path}: experiment() returned {type(experiment).__name__}; it must return "
                "plurax.Experiment(...)."
            )
        # The options of the command line are made of these two.
        if not isinstance(experiment.plan, Plan):
            raise errors.plan_is_none(experiment.plan)
        if not isinstance(experiment.members, Members | None):
            raise errors.members_are_none(experiment.members)
        return experiment

    try:
        # Annotations may be strings, which mean something in the file alone.
        signature = inspect.signature(function, eval_str=True)
    except Exception as error:
        raise errors.experiment_failed(str(path), describe_error(error)) from None
    checked.__signature__ = signature  # type: ignore[attr-defined]
    checked.__doc__ = function.__doc__
    report = names.get("report")
    return checked, report if callable(report) else None
