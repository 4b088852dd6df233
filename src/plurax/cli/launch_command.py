"""`plurax launch`: processes that train together, on this host, and again after a fault."""

import dataclasses
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import tyro

from plurax import errors
from plurax.exit_codes import ExitCode
from plurax.launch.events import Events
from plurax.launch.launcher import launch
from plurax.launch.settings import Settings

COMMANDS = ("train", "predict", "plan", "estimate", "verify", "machine", "replay")
"""Commands of plurax that a process can run."""


@dataclasses.dataclass(frozen=True)
class LaunchOptions:
    """Start processes that train together, and start all of them again after a fault.

    What each process runs stands after `--`: a command of plurax, such as `train FILE`, or a Python
    file that calls plurax.initialize().
    """

    processes: int = 1
    """Number of processes on this host."""
    devices: int | None = None
    """Virtual CPU devices of each process. None: the devices that JAX finds."""
    restarts: int = 3
    """Restarts in a row, as long as no new checkpoint is written in between."""
    logs: Path | None = None
    """Folder of each process's whole output. None: a temporary one, kept after a failure."""
    events: Path | None = None
    """File to which a line of JSON is appended for each event. None: launch.jsonl in `logs`."""


def main(arguments: list[str]) -> None:
    """Run the command as the whole program."""
    try:
        raise SystemExit(launch_command(arguments[1:]))
    except errors.PluraxError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(ExitCode.MISTAKE) from None


def launch_command(arguments: list[str]) -> int:
    """Start the processes; return the exit code of the gang."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    options = tyro.cli(LaunchOptions, prog="plurax launch", args=arguments[:end])
    for name, least in (("processes", 1), ("devices", 1), ("restarts", 0)):
        given = getattr(options, name)
        if given is not None and given < least:
            raise errors.launch_number(name, given, least)
    command = program(arguments[end + 1 :])
    own = Path(tempfile.mkdtemp(prefix="plurax-launch-"))
    logs = options.logs or own
    settings = Settings(
        command,
        processes=options.processes,
        devices=options.devices,
        restarts=options.restarts,
        logs=logs,
        status=own / "status",
    )
    code = launch(settings, Events(options.events or logs / "launch.jsonl"))
    if code == ExitCode.DONE or options.logs is not None:
        shutil.rmtree(own, ignore_errors=True)
    if code != ExitCode.DONE:
        print(f"plurax launch: exit code {code}; the whole output is in {logs}", file=sys.stderr)
    return code


def program(given: Sequence[str]) -> tuple[str, ...]:
    """Return what a process runs: this Python, and a script or a command of plurax."""
    if not given:
        raise errors.launch_nothing()
    if given[0].endswith(".py"):
        if not Path(given[0]).is_file():
            raise errors.launch_no_script(given[0])
        return (sys.executable, *given)
    if given[0] not in COMMANDS:
        raise errors.launch_unknown(given[0], COMMANDS)
    return (sys.executable, "-m", "plurax.cli", *given)
