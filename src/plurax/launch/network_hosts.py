"""This host, and those whose launchers reach it over the network."""

import socket
import time

from plurax.launch.host import Host
from plurax.launch.host_server import HostServer
from plurax.launch.hosts import HostEvent, Hosts, Joined, Received
from plurax.launch.protocol import Message
from plurax.launch.settings import Settings


class NetworkHosts(Hosts):
    """Host 0, which is this one, and the others if there are several."""

    def __init__(self, settings: Settings, host: Host) -> None:
        self._settings, self._host = settings, host
        several = settings.hosts > 1
        self._others = HostServer(settings, host.selector, time.monotonic) if several else None
        self._events: list[HostEvent] = [Joined(0, settings.processes)]

    def wait(self) -> list[HostEvent]:
        """Wait until something happens here or on another host, and return it."""
        if not self._events:
            self._host.wait()
        events = [*self._events, *(Received(0, report) for report in self._host.taken_reports())]
        self._events.clear()
        return events + (self._others.receive() if self._others is not None else [])

    def send(self, host: int, order: Message) -> None:
        """Obey an order, or send it to another host."""
        if host == 0:
            self._host.gang.obey(order)
        elif self._others is not None:
            self._others.send(host, order)

    def coordinator(self, host: int) -> str:
        """Return this host's address, and a free port."""
        assert host == 0, "without the host that leads nothing starts"
        name = self._settings.leader_name()
        return f"{name}:{free_port(name)}"

    def close(self, code: int) -> None:
        """Let the other hosts end; what runs here ends with its `Host`."""
        if self._others is not None:
            self._others.close(code, self._settings.limits.hello)


def free_port(name: str) -> int:
    """Return a port of this host that nobody listens at."""
    with socket.socket() as listening:
        listening.bind((name, 0))
        return int(listening.getsockname()[1])
