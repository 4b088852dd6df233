"""What a launcher is asked to do, and its limits."""

import dataclasses
from pathlib import Path

from plurax.timeouts import TIMEOUTS


@dataclasses.dataclass(frozen=True)
class Limits:
    """Seconds that a launcher waits for one thing or another; tests choose others.

    A process that is stuck ends itself first, with a better message: the launcher counts `slack`
    from the limit of the process's watchdog, which `plurax.timeouts` nests within the others.
    """

    aftermath: float = 2.0
    """After a process ended abnormally, for the others to end by themselves."""
    killed: float = 0.5
    """After a signal ended a process, which the others cannot outlive: for their own reports."""
    finish: float = 600.0
    """After a process has done its work, for the others to finish too."""
    stop: float = 120.0
    """After SIGTERM, for all to save and end."""
    abort: float = TIMEOUTS.abort
    """After SIGABRT, for a stuck process to write its stacks and end."""
    slack: float = TIMEOUTS.slack
    """After the deadline in a process's status."""
    poll: float = 0.2
    """Between two readings of the status files."""
    cleanup: float = 5.0
    """After a process ended, for what it started to end, and to remove its shared memory."""
    backoff: float = 1.0
    """Before the first restart in a row; twice as long before each further one."""
    max_backoff: float = 60.0
    join: float = 300.0
    """For all hosts to come, or for the leader to be reached; also after one was lost."""
    back: float = 60.0
    """With `elastic`, for a lost host to come back before the others go on without it."""
    hello: float = 10.0
    """For whoever connects to say who it is."""
    silence: float = 30.0
    """Without a word from another host, or from a process that was killed."""
    retry: float = 1.0
    """Between two tries to reach the leader."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """Of one launcher."""

    command: tuple[str, ...]
    """The program and its arguments: what each process runs."""
    processes: int = 1
    """Processes on this host."""
    devices: int | None = None
    """Virtual CPU devices of each process; None: what JAX finds."""
    restarts: int = 3
    """Restarts in a row, without a new checkpoint in between."""
    logs: Path = Path("logs")
    """Folder of each process's output."""
    status: Path = Path("status")
    """Folder below which each attempt has the folder of its status files; removed at the end."""
    hosts: int = 1
    """Hosts, each with one launcher."""
    host: int = 0
    """Index of this one; host 0 leads the others."""
    coordinator: str = "127.0.0.1:0"
    """Where host 0 listens: its name or address, and a port."""
    token: str | None = dataclasses.field(default=None, repr=False)
    """A secret that all launchers share."""
    elastic: bool = False
    """Whether to go on with the hosts that are left."""
    min_hosts: int = 1
    """Of them, with `elastic`."""
    first_attempt: int = 0
    """How often the processes were started before, as in a job that Slurm has requeued."""
    limits: Limits = Limits()

    def leader_name(self) -> str:
        """Return the name or address of host 0."""
        return self.coordinator.rpartition(":")[0]
