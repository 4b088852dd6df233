"""The hosts of a gang, as the launcher that leads them sees them: orders go, events come.

There are two kinds: this host with those that reach it over the network
(`plurax.launch.network_hosts`), and the hosts of a Ray cluster (`plurax.launch.ray_hosts`). Both do
what one supervisor decides.
"""

import abc
import dataclasses

from plurax.launch.protocol import Message


@dataclasses.dataclass(frozen=True)
class Joined:
    """A host has come, and can start a number of processes; `attempt`: the last that it saw."""

    host: int
    processes: int
    attempt: int = -1


@dataclasses.dataclass(frozen=True)
class Received:
    """A host has reported something."""

    host: int
    message: Message


@dataclasses.dataclass(frozen=True)
class Lost:
    """A host is gone."""

    host: int
    reason: str


HostEvent = Joined | Received | Lost


class Hosts(abc.ABC):
    """Carries orders to the hosts, and what happens on them back.

    To add a way to reach hosts: a subclass, with which `plurax.launch.launcher.lead` is called.
    """

    @abc.abstractmethod
    def wait(self) -> list[HostEvent]:
        """Wait until something happens, for a short time at most; return what has happened.

        A host joins before it reports, and does neither once it is lost, until it joins again.
        """

    @abc.abstractmethod
    def send(self, host: int, order: Message) -> None:
        """Send an order to a host, without waiting; one that is lost gets none.

        The order `drop` is for this class itself: give a host up that does not do what it is asked.
        """

    @abc.abstractmethod
    def coordinator(self, host: int) -> str:
        """Return an address of a host, and a port that nobody listens at there now.

        JAX's coordination service listens there in the next attempt, whose first process is on that
        host.
        """

    @abc.abstractmethod
    def close(self, code: int) -> None:
        """Let all hosts end, with the exit code of the gang."""
