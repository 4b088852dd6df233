"""`plurax machine`, and the machine that an option of other commands names."""

import dataclasses
import sys
from pathlib import Path
from typing import Annotated

import tyro

from plurax import errors
from plurax.analysis.machine_timings import measure_machine
from plurax.cli.arguments import start_devices
from plurax.cli.options import Devices
from plurax.cli.parser import parse_options
from plurax.console import PlainConsole
from plurax.machine import Machine
from plurax.train.learn import learned, machine_of_run

Preset = Annotated[
    str | None,
    tyro.conf.arg(
        metavar="NAME",
        help=f"Print published hardware: {', '.join(Machine.presets())}, or fewer devices of one, "
        "like 4xA100-80GB or A100-80GB.",
    ),
]


@dataclasses.dataclass(frozen=True)
class MachineOptions:
    """Print a machine in TOML: what its devices compute, hold and send.

    Without --preset, measure the machine at hand, in less than a minute. Nothing else should run on
    it then.
    """

    preset: Preset = None
    nodes: int = 1
    """Number of nodes of the preset."""
    measure: bool = False
    """Measure this machine, as without --preset."""
    runs: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="DIR [DIR ...]")] = ()
    """Correct all seconds by what steps took in runs that were trained with --machine: on the
    rates with which they were predicted, or with --measure or --preset on those."""
    devices: Devices = None


def machine_command(arguments: list[str]) -> int:
    """Print a machine: published, measured, or corrected by runs on it."""
    if arguments and not arguments[0].startswith("-"):
        raise errors.MachineError(
            f"plurax machine {arguments[0]}: options begin with --. Published hardware is printed "
            f"by plurax machine --preset {arguments[0]}."
        )
    start_devices(arguments)
    options = parse_options(MachineOptions, "plurax machine", arguments)
    machine = _chosen(options)
    if options.runs:
        machine = learned(machine, options.runs)
    if options.preset is None or options.runs:
        # What is printed is the file, with `> here.toml`; what is said goes beside it.
        print(machine, file=sys.stderr)
    print(machine.to_toml(), end="")
    return 0


def _chosen(options: MachineOptions) -> Machine:
    if options.preset is not None:
        if options.measure or options.devices is not None:
            raise errors.MachineError(
                f"--preset {options.preset} prints published rates; --measure and --devices are "
                "for the machine at hand. Leave out one or the other."
            )
        return Machine.preset(options.preset, options.nodes)
    if options.nodes != 1:
        raise errors.nodes_without_preset(options.nodes, "--preset")
    if options.runs and not options.measure and options.devices is None:
        return machine_of_run(options.runs[0])
    return _measured()


def machine_named(name: str | None, nodes: int) -> Machine:
    """Return published hardware, the machine of a file, or if None this one, measured."""
    return described_machine(name, nodes) or _measured()


def described_machine(name: str | None, nodes: int) -> Machine | None:
    """Return published hardware, the machine of a file, or None for None."""
    if name is not None and not name.endswith(".toml"):
        return Machine.preset(name, nodes)
    if nodes != 1:
        raise errors.nodes_without_preset(nodes, "--machine")
    return None if name is None else Machine.load(name)


def _measured() -> Machine:
    with PlainConsole(stderr=True).status("measuring this machine, up to a minute"):
        return measure_machine()
