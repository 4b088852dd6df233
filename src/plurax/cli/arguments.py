"""Read a command line before it is parsed: devices first, then the experiment's arguments.

Importing the experiment file may start JAX, and the number of CPU devices is fixed from then on;
and the options' defaults come from calling `experiment(...)` with its arguments. So the command
line is read three times: for devices, for `--experiment.NAME`, and whole.
"""

import dataclasses
import inspect
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from plurax import errors
from plurax.cli.parser import run_tyro
from plurax.distributed.compilation_cache import make_cache_safe
from plurax.distributed.environment import gang_of
from plurax.distributed.initialize import initialize
from plurax.experiment import Experiment, Report, load
from plurax.mesh import cpu_devices, virtual_devices
from plurax.plan import MESH_AXES, Plan

REHEARSED = 64
"""The largest number of virtual devices that a rehearsal creates without being asked."""


def experiment_dataclass(function: Callable[..., Any]) -> type:
    """Return a dataclass of the named parameters of a file's `experiment(...)`."""
    fields = []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        kind = str if parameter.annotation is parameter.empty else parameter.annotation
        default = () if parameter.default is parameter.empty else (parameter.default,)
        fields.append((name, kind, *default))
    return dataclasses.make_dataclass("Experiment", fields, frozen=True)


def load_experiment(
    file: Path, program: str, arguments: list[str]
) -> tuple[Experiment, Any, Report | None]:
    """Return a file's experiment, its arguments as a dataclass, and its report."""
    function, report = load(file)
    own = experiment_dataclass(function)
    wrapped = dataclasses.make_dataclass("Own", [("experiment", own)], frozen=True)
    chosen = run_tyro(wrapped, experiment_args(arguments), prog=program).experiment
    return function(**vars(chosen)), chosen, report


def experiment_args(arguments: list[str]) -> list[str]:
    """Return the arguments `--experiment.NAME` with their values."""
    kept, keep = [], False
    for argument in arguments:
        if argument.startswith("-"):
            keep = argument.startswith("--experiment.")
        if keep:
            kept.append(argument)
    return kept


def experiment_names(arguments: list[str]) -> list[str]:
    """Return the names of the arguments `--experiment.NAME`, dotted; of a flag both it may be.

    >>> experiment_names(["--experiment.learning-rate=0.1", "--experiment.net.no-bias"])
    ['learning_rate', 'net.no_bias', 'net.bias']
    """
    names = []
    for argument in arguments:
        if argument.startswith("--experiment."):
            name = argument.partition("=")[0].removeprefix("--experiment.").replace("-", "_")
            above, dot, last = name.rpartition(".")
            names += [name, f"{above}{dot}{last[3:]}"] if last.startswith("no_") else [name]
    return names


def start_devices(arguments: list[str], *, rehearsal: bool = False) -> None:
    """Apply `--devices` before anything else uses JAX. Raises `PlanError`.

    Without the option, a plan on the command line that needs no more devices than there are cores
    gets as many CPU devices, in case JAX runs on CPU; a `rehearsal`, in which nothing is trained
    for its result, gets as many as it needs, up to `REHEARSED`. A process of several first joins
    the others.
    """
    make_cache_safe()
    if (absent := value(arguments, "--compile-for")) is not None:
        if value(arguments, "--devices") is not None:
            raise errors.PlanError(
                f"--devices makes devices here, and --compile-for {absent} names all that there "
                "are. Leave --devices out."
            )
        # The package of its compiler would otherwise look for a device of its kind.
        jax.config.update("jax_platforms", "cpu")
        return
    chosen = value(arguments, "--devices")
    if gang_of() is not None:
        if chosen is not None:
            raise errors.ProcessError(
                f"--devices {chosen} is for one process. Say how many devices each of several "
                "processes has where they are started: plurax launch --processes 2 --devices 4 -- "
                "train FILE."
            )
        initialize()
        return
    cores = len(os.sched_getaffinity(0))
    if chosen is None:
        sizes = [value(arguments, f"--plan.{axis}") or "1" for axis in MESH_AXES]
        wanted = math.prod(int(size) for size in sizes if size.isdecimal())
        if 1 < wanted <= (max(cores, REHEARSED) if rehearsal else cores):
            cpu_devices(wanted)
        return
    count = cores if chosen == "cores" else chosen
    try:
        count = int(count)
    except ValueError:
        raise errors.PlanError(
            f"--devices {chosen}: give a number of virtual CPU devices, or 'cores' for one per "
            "core."
        ) from None
    virtual_devices(count)


def shrink_data_axis(
    plan: Plan, arguments: list[str], available: int, *, unasked: bool = False
) -> Plan:
    """Shrink the file's `data` to make room for the axes that the command line names.

    `unasked`: also where it names none.
    """
    named = [axis for axis in MESH_AXES if value(arguments, f"--plan.{axis}") is not None]
    if not (named or unasked) or "data" in named or plan.devices <= available:
        return plan
    return dataclasses.replace(plan, data=max(1, available // (plan.devices // plan.data)))


def value(arguments: list[str], name: str) -> str | None:
    """Return the value of an option, before the options are parsed."""
    text = None
    for index, argument in enumerate(arguments):
        if argument == name and index + 1 < len(arguments):
            text = arguments[index + 1]
        elif argument.startswith(f"{name}="):
            text = argument.removeprefix(f"{name}=")
    return text
