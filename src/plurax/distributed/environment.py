"""Read from the environment which process of a gang this one is.

A *gang* is the processes that train one network together, each a JAX process with devices of its
own. Its launcher describes it in variables:

    PLURAX_COORDINATOR=10.0.0.1:41234   where JAX's coordination service listens, in process 0
    PLURAX_PROCESSES=4                  how many processes there are
    PLURAX_PROCESS=2                    which one this is
    PLURAX_DEVICES=8                    virtual CPU devices of each, to rehearse; often not given
    PLURAX_ATTEMPT=1                    how often the gang was restarted
    PLURAX_ELASTIC=1                    it goes on without hosts that are gone
    PLURAX_STATUS=/run/0                the folder into which each process writes what it does
    PLURAX_WATCHDOG=180                 the least limit of a step in seconds; 0: no watchdog

Inside a step of Slurm (`srun`) the same is derived from Slurm's variables. Slurm has one process
on each node, or one for each GPU:

    srun --nodes 4 --ntasks-per-node 1    a process owns all devices of its node
    srun --nodes 4 --ntasks-per-node 8    process 11 owns the fourth device of its node
    srun --nodes 4 --ntasks-per-node 1 plurax launch --processes 8    a launcher on each node

Source of Slurm's variables: https://slurm.schedmd.com/srun.html
"""

import dataclasses
import os
import re
from collections.abc import Mapping
from pathlib import Path

from plurax import errors
from plurax.validate import whole_number

FIRST_PORT, PORTS = 20_000, 10_000
"""The ports of Slurm steps: below those that Linux gives to outgoing connections, from 32768."""


@dataclasses.dataclass(frozen=True)
class GangEnvironment:
    """A gang as one of its processes sees it.

    **Fields:** `coordinator`, `host:port` of JAX's coordination service; `processes`, their number;
    `process`, this one's index; `devices`, virtual CPU devices of each process, or None for those
    there are; `local_devices`, which devices of its host this process owns, or None for all.
    """

    coordinator: str
    processes: int
    process: int
    devices: int | None = None
    local_devices: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if host_and_port(self.coordinator) is None:
            raise errors.ProcessError(
                f"coordinator={self.coordinator!r} is no address. Write the host of process 0 and "
                "a free port of it: coordinator='host0:1234'."
            )
        if whole_number(self.processes) is None:
            raise errors.ProcessError(
                f"processes={self.processes!r} must be a positive whole number, such as 2."
            )
        if whole_number(self.process, 0) is None or self.process >= self.processes:
            raise errors.ProcessError(
                f"process={self.process!r} is not one of {self.processes} processes: they are "
                f"numbered 0 to {self.processes - 1}."
            )

    @property
    def address(self) -> tuple[str, int]:
        """The coordinator's host and port."""
        address = host_and_port(self.coordinator)
        assert address is not None
        return address


@dataclasses.dataclass(frozen=True)
class HostPlace:
    """Of the launcher of one host among those of others."""

    hosts: int
    host: int
    coordinator: str


def host_and_port(address: str) -> tuple[str, int] | None:
    """Return the parts of `host:port`; None for what is no such address."""
    host, _, port = address.rpartition(":")
    return (host, int(port)) if host and port.isdecimal() and 0 < int(port) < 2**16 else None


def gang_of(environment: Mapping[str, str] = os.environ) -> GangEnvironment | None:
    """Return the gang that the environment describes, or None. Raises `ProcessError`."""
    if "PLURAX_PROCESSES" in environment:
        return _launched(environment)
    if int(environment.get("SLURM_STEP_NUM_TASKS", 1)) > 1 and "SLURM_PROCID" in environment:
        return _slurm(environment)
    return None


def writes_files(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether this process writes the files of a run: it is alone, or the first."""
    gang = gang_of(environment)
    return gang is None or gang.process == 0


def attempt(environment: Mapping[str, str] = os.environ) -> int:
    """Return how often the launcher has restarted this gang, or Slurm has requeued the job."""
    return int(environment.get("PLURAX_ATTEMPT") or environment.get("SLURM_RESTART_COUNT") or 0)


def status_folder(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Return the folder into which a launcher wants this process to write what it does."""
    folder = environment.get("PLURAX_STATUS")
    return Path(folder) if folder else None


def watchdog_seconds(environment: Mapping[str, str] = os.environ) -> int | None:
    """Return the least limit of a step that is asked for, or None. Raises `ProcessError`."""
    return _number(environment, "PLURAX_WATCHDOG") if environment.get("PLURAX_WATCHDOG") else None


def is_elastic(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether the launcher goes on without hosts that are gone."""
    return environment.get("PLURAX_ELASTIC") == "1"


def _launched(environment: Mapping[str, str]) -> GangEnvironment:
    names = ("PLURAX_COORDINATOR", "PLURAX_PROCESSES", "PLURAX_PROCESS")
    missing = [name for name in names if not environment.get(name)]
    if missing:
        raise errors.ProcessError(
            f"the environment has some of {', '.join(names)}, and not {', '.join(missing)}. "
            "`plurax launch` sets all of them; unset them all to train in one process."
        )
    return GangEnvironment(
        environment["PLURAX_COORDINATOR"],
        _number(environment, "PLURAX_PROCESSES"),
        _number(environment, "PLURAX_PROCESS"),
        _number(environment, "PLURAX_DEVICES") if environment.get("PLURAX_DEVICES") else None,
    )


def _number(environment: Mapping[str, str], name: str) -> int:
    try:
        return int(environment[name])
    except ValueError:
        raise errors.ProcessError(
            f"the environment variable {name}={environment[name]!r} must be a whole number."
        ) from None


def _slurm(environment: Mapping[str, str]) -> GangEnvironment:
    hosts = environment.get("SLURM_STEP_NODELIST") or environment["SLURM_NODELIST"]
    per_node = environment.get("SLURM_STEP_TASKS_PER_NODE", "1")
    alone = per_node.partition("(")[0] == "1"
    return GangEnvironment(
        f"{first_host(hosts)}:{step_port(environment)}",
        int(environment["SLURM_STEP_NUM_TASKS"]),
        int(environment["SLURM_PROCID"]),
        local_devices=None if alone else (int(environment["SLURM_LOCALID"]),),
    )


def slurm_place(environment: Mapping[str, str]) -> HostPlace | None:
    """Return the place of a launcher in a Slurm step; None outside of one.

    Raises `ExperimentError` for a step with several tasks on a node.
    """
    names = ("SLURM_PROCID", "SLURM_NODEID", "SLURM_STEP_NUM_NODES", "SLURM_STEP_NODELIST")
    if not all(name in environment for name in names):
        return None
    nodes = int(environment["SLURM_STEP_NUM_NODES"])
    tasks = int(environment.get("SLURM_STEP_NUM_TASKS", nodes))
    if tasks != nodes:
        raise errors.ExperimentError(
            f"plurax launch in a Slurm step of {tasks} tasks on {nodes} nodes: a launcher starts "
            "all processes of its node. Write srun --ntasks-per-node=1 plurax launch --processes N "
            "-- ..., or leave out plurax launch."
        )
    first = first_host(environment["SLURM_STEP_NODELIST"])
    return HostPlace(nodes, int(environment["SLURM_NODEID"]), f"{first}:{step_port(environment)}")


def step_port(environment: Mapping[str, str]) -> int:
    """Return a port for a Slurm step, which its processes agree on without talking.

    Two jobs may share a node, and a requeued one may find its old port still in use.
    """
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    job, step, restart = (int(environment.get(name) or 0) for name in names)
    return FIRST_PORT + (job * 31 + step * 7 + restart) % PORTS


def first_host(nodes: str) -> str:
    """Return the first host of a Slurm node list.

    >>> first_host("gpu[007-012,020],cpu3"), first_host("a-1,b"), first_host("r[1-2]n[3,5]-ib")
    ('gpu007', 'a-1', 'r1n3-ib')
    """
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    assert first is not None
    return re.sub(r"\[(\w*)[^\]]*\]", r"\1", first[0])
