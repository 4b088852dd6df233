"""Parse a command's line: the file's experiment, and options with its values as defaults."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import tyro

from plurax import experiment
from plurax.cli.arguments import made_experiment, shrink_data_axis, start_devices
from plurax.cli.file_or_run import file_or_run, with_remembered
from plurax.cli.grouped import HELP, parse_options
from plurax.cli.options import (
    DiffOptions,
    EstimateOptions,
    PopulationOptions,
    Predict,
    Show,
    Train,
    Verify,
    fit_options,
    train_class,
)
from plurax.members import Members


def train_options(file: Path, made: experiment.Experiment) -> Train:
    """Return the default options of `plurax train` for a file's experiment."""
    own = {name: getattr(made, name) for name in fit_options()}
    output = Path(made.output or Path("runs") / file.stem)
    return train_class()(**{**own, **common_options(made), "output": output})


def predict_options(file: Path, made: experiment.Experiment) -> Predict:
    """Return the default options of `plurax predict` for a file's experiment."""
    return Predict(**common_options(made), output=Path("runs") / file.stem, inputs=tyro.MISSING)


def show_options(_file: Path, made: experiment.Experiment) -> Show:
    """Return the default options of `plurax plan` for a file's experiment."""
    return Show(**common_options(made))


def verify_options(_file: Path, made: experiment.Experiment) -> Verify:
    """Return the default options of `plurax verify` for a file's experiment."""
    return Verify(**common_options(made))


def estimate_options(_file: Path, made: experiment.Experiment) -> EstimateOptions:
    """Return the default options of `plurax estimate` for a file's experiment."""
    return EstimateOptions(**common_options(made))


def diff_options(_file: Path, made: experiment.Experiment) -> DiffOptions:
    """Return the default options of `plurax plan --diff` for a file's experiment."""
    return DiffOptions(**common_options(made))


def common_options(made: experiment.Experiment) -> dict[str, Any]:
    """Return the default options that all commands share."""
    return {
        "plan": made.plan,
        "plan_file": None,
        "devices": None,
        "members": PopulationOptions(None if made.members is None else _seeds(made.members)),
        "batch_size": made.batch_size,
    }


class Parsed(NamedTuple):
    """What a command line says: an experiment, options, the file's report and the file."""

    made: experiment.Experiment
    options: Any
    report: experiment.Report | None
    file: Path


def parse(
    arguments: list[str],
    command: str,
    defaults: Callable[[Path, experiment.Experiment], Any],
) -> Parsed:
    """Return the file's experiment, and the options with its values as defaults, or with a run's.

    Devices come first, because importing the file may start JAX; then the arguments of the file's
    `experiment(...)`, given as `--experiment.NAME`; then all options, with `--help`.
    """
    program = f"plurax {command} FILE"
    if arguments[:1] and arguments[0] in HELP:  # with the defaults of plurax itself
        nothing: Any = None
        default = defaults(Path("FILE"), experiment.Experiment(nothing, nothing, nothing))
        parse_options(type(default), program, arguments[:1], default=default)
    source = file_or_run(arguments, command)
    file, run, rest = source.file, source.run, source.rest
    rehearsal = command in ("plan", "verify", "estimate")
    start_devices(source.devices, rehearsal=rehearsal or run is not None)
    made, own, report = made_experiment(file, program, source.experiment)
    default = defaults(file, made)
    if run is not None:
        default = with_remembered(default, run, rest)
    # One level of options, so that --plan.data stays short.
    kind = type(default)
    with_own = dataclasses.make_dataclass(
        kind.__name__, [("experiment", type(own))], bases=(kind,), frozen=True, kw_only=True
    )
    values = {field.name: getattr(default, field.name) for field in dataclasses.fields(kind)}
    with_own.__doc__ = kind.__doc__
    options: Any = parse_options(
        with_own, program, rest, default=with_own(**values, experiment=own)
    )
    # What a run has trained is also used where there are fewer devices.
    smaller = run is not None and command == "predict"
    plan = shrink_data_axis(options.plan, rest, len(jax.devices()), unasked=smaller)
    return Parsed(made, dataclasses.replace(options, plan=plan), report, file)


def _seeds(members: Members) -> int | None:
    return members.seeds if isinstance(members.seeds, int) else None
