"""The launcher of this host: it leads the others, or follows the one that does."""

import socket
import time

from plurax.launch.events import Events
from plurax.launch.follower import follow
from plurax.launch.host import Host, this_host
from plurax.launch.hosts import HostServer, Joined, Received
from plurax.launch.output import Output
from plurax.launch.protocol import Message
from plurax.launch.settings import Settings
from plurax.launch.supervisor import Supervisor


def launch(settings: Settings, events: Events, output: Output | None = None) -> int:
    """Run this host's processes of a gang until it is over; return the gang's exit code."""
    with this_host(settings, output or Output(settings.logs)) as host:
        if settings.host > 0:
            return follow(settings, host, events)
        return _Leader(settings, host, events).run()


class _Leader:
    """Host 0: asks the supervisor what to do, and has it done here and on the other hosts."""

    def __init__(self, settings: Settings, host: Host, events: Events) -> None:
        self._settings, self._host = settings, host
        several = settings.hosts > 1
        self._hosts = HostServer(settings, host.selector, time.monotonic) if several else None
        self._orders: list[tuple[int, Message]] = []
        self._supervisor = Supervisor(
            settings,
            lambda host, order: self._orders.append((host, order)),
            events,
            self._coordinator,
            time.monotonic(),
        )

    def run(self) -> int:
        """Lead until all is over; return the exit code."""
        code = 1
        try:
            self._supervisor.joined(0, self._settings.processes, time.monotonic())
            while self._supervisor.code is None:
                self._obey()
                self._host.wait()
                self._look()
            self._obey()
            code = self._supervisor.code
        finally:
            if self._hosts is not None:
                self._hosts.close(code, self._settings.limits.hello)
        return code

    def _look(self) -> None:
        """Pass on what has happened."""
        supervisor, now = self._supervisor, time.monotonic()
        for number in self._host.taken_signals():
            supervisor.asked(number, now)
        for report in self._host.taken_reports():
            supervisor.received(0, report, now)
        for event in self._hosts.receive() if self._hosts is not None else ():
            if isinstance(event, Joined):
                supervisor.joined(event.host, event.processes, now, event.attempt)
            elif isinstance(event, Received):
                supervisor.received(event.host, event.message, now)
            else:
                supervisor.lost(event.host, event.reason, now)
        supervisor.tick(now)

    def _obey(self) -> None:
        for host, order in self._orders:
            if host == 0:
                self._host.gang.obey(order)
            elif self._hosts is not None and order["do"] == "drop":
                self._hosts.drop(host)
            elif self._hosts is not None:
                self._hosts.send(host, order)
        self._orders.clear()

    def _coordinator(self) -> str:
        """Return where JAX's coordination service shall listen: a free port of this host."""
        name = self._settings.leader_name()
        return f"{name}:{free_port(name)}"


def free_port(name: str) -> int:
    """Return a port of this host that nobody listens at."""
    with socket.socket() as listening:
        listening.bind((name, 0))
        return int(listening.getsockname()[1])
