"""Parse a line with FILE: its experiment, and options that have its values as defaults."""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import jax

from plurax.cli.arguments import load_experiment, shrink_data_axis, start_devices
from plurax.cli.file_or_run import file_or_run, with_remembered
from plurax.cli.options import Common, default_options
from plurax.cli.parser import HELP, parse_options
from plurax.experiment import Experiment, Report
from plurax.targets import Target


class Parsed(NamedTuple):
    """What a command line says: an experiment, options, the file's report and the file."""

    experiment: Experiment
    options: Any
    report: Report | None
    file: Path


def parse(arguments: list[str], command: str, kind: type[Common]) -> Parsed:
    """Return the file's experiment, and the options with its values as defaults, or with a run's.

    Devices come first, because importing the file may start JAX; then the arguments of the file's
    `experiment(...)`, given as `--experiment.NAME`; then all options, with `--help`.
    """
    program = f"plurax {command} FILE"
    if arguments[:1] and arguments[0] in HELP:  # with the defaults of plurax itself
        nothing: Any = None
        default = default_options(kind, Path("FILE"), Experiment(nothing, nothing, nothing))
        parse_options(kind, program, arguments[:1], default=default)
    source = file_or_run(arguments, command)
    file, run, rest = source.file, source.run, source.rest
    rehearsal = command in ("plan", "verify", "estimate")
    start_devices(source.devices, rehearsal=rehearsal or run is not None)
    experiment, own, report = load_experiment(file, program, source.experiment)
    default = default_options(kind, file, experiment, own)
    if run is not None:
        default = with_remembered(default, run, rest)
    options = parse_options(kind, program, rest, default=default)
    # What a run has trained is also used where there are fewer devices.
    smaller = run is not None and command == "predict"
    absent = getattr(options, "compile_for", None)
    devices = len(jax.devices()) if absent is None else Target.of(absent).machine.devices
    plan = shrink_data_axis(options.plan, rest, devices, unasked=smaller)
    return Parsed(experiment, dataclasses.replace(options, plan=plan), report, file)
