"""`plurax launch`: processes that train together, on this host, and again after a fault."""

import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from plurax import errors
from plurax.cli.commands import COMMANDS
from plurax.cli.parser import parse_options
from plurax.distributed.environment import HostPlace, attempt, host_and_port, slurm_place
from plurax.exit_codes import ExitCode
from plurax.launch.events import Events
from plurax.launch.folders import LaunchFolders
from plurax.launch.launcher import launch
from plurax.launch.ray_hosts import launch_on_ray
from plurax.launch.settings import Limits, Settings
from plurax.terminal import printable

DEFAULT_PORT = 7117
"""Where host 0 listens, unless the coordinator names another port."""
ALONE = HostPlace(Settings.hosts, Settings.host, Settings.coordinator)
LEAST = {"processes": 1, "devices": 1, "restarts": 0, "hosts": 1,
         "join_seconds": 0, "back_seconds": 0, "stop_seconds": 0}  # fmt: skip
"""The smallest number that an option may have."""
MOST_PROCESSES = 1000
"""Of a host. Each is a program of its own, and a launcher has files open for it."""


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
    restarts: int = Settings.restarts
    """Restarts in a row, as long as no new checkpoint is written in between."""
    hosts: int | None = None
    """Number of hosts, each with its own launcher. None: those of the Slurm step, or this one."""
    host: int | None = None
    """Index of this host; host 0 leads the others."""
    coordinator: Annotated[str | None, tyro.conf.arg(metavar="HOST:PORT")] = None
    """Name or address of host 0, and a free port there, by default 7117."""
    ray: Annotated[str | None, tyro.conf.arg(metavar="ADDRESS")] = None
    """Start the launchers on hosts of the Ray cluster at this address, or of the one that `auto`
    finds."""
    join_seconds: float = Limits.join
    """How long to wait for all hosts, at the start and after one was lost."""
    elastic: bool = False
    """Go on with the hosts that are left, and with all once they are back."""
    min_hosts: int = 1
    """With --elastic: the least number of hosts to go on with."""
    back_seconds: float = Limits.back
    """With --elastic: how long to wait for a lost host before the others go on."""
    stop_seconds: float = Limits.stop
    """How long the processes may take to save and end after SIGTERM."""
    logs: Path | None = None
    """Folder of each process's whole output. None: a temporary one, kept after a failure."""
    events: Path | None = None
    """File to which a line of JSON is appended for each event. None: launch.jsonl in `logs`, with
    the index of a host other than 0 in its name."""


def main(arguments: list[str]) -> None:
    """Run the command as the whole program."""
    try:
        raise SystemExit(launch_command(arguments[1:]))
    except errors.PluraxError as error:
        print(printable(f"error: {error}"), file=sys.stderr)
        raise SystemExit(ExitCode.MISTAKE) from None


def launch_command(arguments: list[str]) -> int:
    """Start the processes; return the exit code of the gang."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    options = parse_options(LaunchOptions, "plurax launch", arguments[:end])
    check_numbers(options)
    command = program(arguments[end + 1 :])
    place = placed(options)
    if not 1 <= options.min_hosts <= place.hosts:
        raise errors.ExperimentError(
            f"plurax launch --hosts {place.hosts} --min-hosts {options.min_hosts}: give a number "
            f"from 1 to {place.hosts}."
        )
    token = None if options.ray is not None else token_for(place.hosts)
    check_writable(options)
    folders = LaunchFolders(options.logs)
    settings = Settings(
        command,
        processes=options.processes,
        devices=options.devices,
        restarts=options.restarts,
        logs=folders.logs,
        status=folders.status,
        hosts=place.hosts,
        host=place.host,
        coordinator=place.coordinator,
        token=token,
        elastic=options.elastic,
        min_hosts=options.min_hosts,
        first_attempt=attempt(),
        limits=Limits(
            join=options.join_seconds, back=options.back_seconds, stop=options.stop_seconds
        ),
    )
    file = "launch.jsonl" if place.host == 0 else f"launch-{place.host}.jsonl"
    events = Events(options.events or folders.logs / file)
    code = int(ExitCode.DONE)
    try:
        if options.ray is None:
            code = launch(settings, events)
        else:
            code = launch_on_ray(options.ray, settings, options.logs, events)
    finally:
        logs = folders.close(code)
    if code != ExitCode.DONE:
        print(f"plurax launch: exit code {code}; the whole output is in {logs}", file=sys.stderr)
    return code


def check_numbers(options: LaunchOptions) -> None:
    """Raise `ExperimentError` for a number below the least that makes sense."""
    for name, least in LEAST.items():
        number = getattr(options, name)
        if number is not None and not number >= least:  # nor is nan
            raise errors.ExperimentError(
                f"plurax launch --{name.replace('_', '-')} {number}: give a number of at least "
                f"{least}."
            )
    if options.processes > MOST_PROCESSES:
        raise errors.ExperimentError(
            f"plurax launch --processes {options.processes}: start at most {MOST_PROCESSES} "
            "processes on a host; one of them can have all of its devices."
        )


def token_for(hosts: int) -> str | None:
    """Return the secret that the launchers share. Raises `ExperimentError` where it is missing."""
    token = os.environ.get("PLURAX_TOKEN")
    if hosts > 1 and not token:
        raise errors.ExperimentError(
            f"plurax launch on {hosts} hosts: without a secret anyone who reaches the port of host "
            "0 could join in place of a host. Set the environment variable PLURAX_TOKEN to the "
            "same secret on every host; in a Slurm script write export PLURAX_TOKEN=$(openssl rand "
            "-hex 16) before srun."
        )
    return token


def check_writable(options: LaunchOptions) -> None:
    """Create the folders of the options. Raises `ExperimentError` where they cannot be written."""
    try:
        if options.logs is not None:
            options.logs.mkdir(parents=True, exist_ok=True)
        if options.events is not None:
            options.events.parent.mkdir(parents=True, exist_ok=True)
            options.events.open("a").close()
    except OSError as error:
        raise errors.not_written(str(error.filename), str(error.strerror)) from None


def placed(options: LaunchOptions) -> HostPlace:
    """Return this host's place among the hosts: of the options, of Slurm, or alone."""
    hosts, host, coordinator = options.hosts, options.host, options.coordinator
    if options.ray is not None:
        if hosts is None or (host, coordinator) != (None, None):
            raise errors.ExperimentError(
                "plurax launch --ray: say on how many hosts, as in --ray auto --hosts 4; --host "
                "and --coordinator are Ray's to choose."
            )
        return HostPlace(hosts, Settings.host, Settings.coordinator)
    if hosts is None:
        if host is not None or coordinator is not None:
            raise errors.ExperimentError(
                "plurax launch: --host and --coordinator are for several hosts. Say how many there "
                "are, as in --hosts 4 --host 2 --coordinator host0:7117."
            )
        return slurm_place(os.environ) or ALONE
    if hosts == 1 and host in (None, 0):
        return ALONE
    if host is None or not 0 <= host < hosts:
        raise errors.launch_host(host, hosts)
    text = coordinator or ""
    address = host_and_port(text if ":" in text else f"{text}:{DEFAULT_PORT}")
    if address is None:
        wanted = "give a name or address, and a port below 65536"
        problem = "is missing" if coordinator is None else f"{coordinator}: {wanted}"
        raise errors.ExperimentError(
            f"plurax launch --hosts {hosts}: --coordinator {problem}. On every host say where host "
            "0 listens, a free port of it, as in --coordinator host0:7117."
        )
    return HostPlace(hosts, host, "{}:{}".format(*address))


def program(arguments: Sequence[str]) -> tuple[str, ...]:
    """Return what a process runs: this Python, and a script or a command of plurax."""
    if not arguments:
        raise errors.ExperimentError(
            "plurax launch: say after -- what each process runs: a command of plurax, as in plurax "
            "launch --processes 2 -- train FILE, or a script of your own, as in plurax launch "
            "--processes 2 -- script.py."
        )
    name = arguments[0]
    if name.endswith(".py"):
        if not Path(name).is_file():
            raise errors.ExperimentError(f"plurax launch -- {name}: there is no such file.")
        return (sys.executable, *arguments)
    commands = [command.name for command in COMMANDS if command.gangs]
    if name not in commands:
        hint = " Leave plurax out." if name == "plurax" else errors.did_you_mean(name, commands)
        raise errors.ExperimentError(
            f"plurax launch -- {name}: what each process runs is a path that ends in .py, or a "
            f"command of plurax: {', '.join(commands)}.{hint}"
        )
    return (sys.executable, "-m", "plurax.cli", *arguments)
