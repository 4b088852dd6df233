"""A command line before it is parsed: devices come first, then the arguments of the file itself."""

import dataclasses
import inspect
import math
import os
from collections.abc import Callable
from typing import Any

from plurax import errors
from plurax.mesh import cpu_devices, virtual_devices
from plurax.plan import MESH_AXES, Plan

REHEARSED = 64
"""The most virtual devices that a rehearsal takes by itself."""


def experiment_dataclass(function: Callable[..., Any]) -> type:
    """A dataclass of those parameters of a file's `experiment(...)` that have a name."""
    fields = []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        kind = str if parameter.annotation is parameter.empty else parameter.annotation
        default = () if parameter.default is parameter.empty else (parameter.default,)
        fields.append((name, kind, *default))
    made = dataclasses.make_dataclass("Experiment", fields, frozen=True)
    made.__doc__ = "Arguments of the file's own experiment(...)."
    return made


def experiment_args(arguments: list[str]) -> list[str]:
    """The arguments for the file's own `experiment(...)`, with their values."""
    kept, keep = [], False
    for argument in arguments:
        if argument.startswith("-"):
            keep = argument.startswith("--experiment.")
        if keep:
            kept.append(argument)
    return kept


def start_devices(arguments: list[str], *, rehearsal: bool = False) -> None:
    """Obey `--devices` before anything else uses JAX.

    Without it, a plan on the command line that needs no more devices than there are cores gets as
    many CPU devices, in case there is nothing else; for a `rehearsal`, in which nothing is trained
    for its result, as many as it needs.
    """
    chosen = value(arguments, "--devices")
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
        raise errors.devices_not_understood(chosen) from None
    virtual_devices(count)


def shrink_data_axis(plan: Plan, arguments: list[str], available: int) -> Plan:
    """The file's own `data` gives way to the axes that the command line names."""
    named = [axis for axis in MESH_AXES if value(arguments, f"--plan.{axis}") is not None]
    if not named or "data" in named or plan.devices <= available:
        return plan
    return dataclasses.replace(plan, data=max(1, available // (plan.devices // plan.data)))


def value(arguments: list[str], name: str) -> str | None:
    """The value of an option, before the options are parsed."""
    found = None
    for index, argument in enumerate(arguments):
        if argument == name and index + 1 < len(arguments):
            found = arguments[index + 1]
        elif argument.startswith(f"{name}="):
            found = argument.removeprefix(f"{name}=")
    return found
