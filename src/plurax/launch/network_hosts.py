"""This host, and those whose launchers reach it over the network."""

import contextlib
import selectors
import socket
import time
from collections.abc import Callable

from plurax import errors
from plurax.launch.connection import NO_LAUNCHER, Connection, leader_address
from plurax.launch.host import Host
from plurax.launch.hosts import HostEvent, Hosts, Joined, Lost, Received
from plurax.launch.protocol import Message, has_form, is_report
from plurax.launch.settings import Settings

MAX_STRANGERS = 64
"""Connections beside those of the hosts that may be open before they say who they are."""


class NetworkHosts(Hosts):
    """Host 0, which is this one, and the others if there are several.

    Raises `ExperimentError` where the coordinator's address cannot be listened at, or is loopback.
    """

    def __init__(
        self, settings: Settings, host: Host, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._settings, self._host, self._clock = settings, host, clock
        self._events: list[HostEvent] = [Joined(0, settings.processes)]
        self._peers: list[_Peer] = []
        self._listening: socket.socket | None = None
        if settings.hosts > 1:
            self._listening = self._listen()

    def wait(self) -> list[HostEvent]:
        """Wait until something happens here or on another host, and return it."""
        if not self._events:
            self._host.wait()
        events, self._events = self._events, []
        events += [Received(0, report) for report in self._host.taken_reports()]
        now = self._clock()
        for peer in [*self._peers]:
            for message in peer.connection.receive(now):
                events += self._take(peer, message)
            if peer.host is None and now > peer.until:
                peer.connection.close()
            if peer.connection.closed is not None:
                self._peers.remove(peer)
                if peer.host is not None:
                    events.append(Lost(peer.host, peer.connection.closed))
        return events

    def send(self, host: int, order: Message) -> None:
        """Obey an order, or send it to another host."""
        peer = self._peer(host)
        if host == 0:
            self._host.gang.obey(order)
        elif peer is not None and order["do"] == "drop":
            peer.connection.close("it does not answer")
        elif peer is not None:
            peer.connection.send(order)

    def coordinator(self, host: int) -> str:
        """Return this host's address, and a free port."""
        assert host == 0, "without the host that leads nothing starts"
        name = self._settings.leader_name()
        return f"{name}:{free_port(name)}"

    def close(self, code: int) -> None:
        """Let the other hosts end, and wait until the network has taken that.

        What runs here ends with its `Host`.
        """
        connections = [peer.connection for peer in self._peers if peer.host is not None]
        for connection in connections:
            connection.send({"do": "end", "code": code})
        until = self._clock() + self._settings.limits.hello
        while not all(connection.is_sent for connection in connections) and self._clock() < until:
            for key, _ in self._host.selector.select(0.1):
                key.data()
        for peer in self._peers:
            peer.connection.close()
        if self._listening is not None:
            self._host.selector.unregister(self._listening)
            self._listening.close()

    def _listen(self) -> socket.socket:
        try:
            listening = socket.create_server(leader_address(self._settings), backlog=128)
        except OSError as error:
            raise errors.ExperimentError(
                f"plurax launch --coordinator {self._settings.coordinator} --host 0: cannot listen "
                f"there: {error}. The coordinator is a name or address of host 0 itself, and a "
                "port that nobody else uses."
            ) from None
        listening.setblocking(False)
        self._host.selector.register(
            listening, selectors.EVENT_READ, lambda: self._accept(listening)
        )
        return listening

    def _peer(self, host: int) -> "_Peer | None":
        return next((peer for peer in self._peers if peer.host == host), None)

    def _accept(self, listening: socket.socket) -> None:
        with contextlib.suppress(OSError):  # gone already, or too many open files: try again later
            socket_, _ = listening.accept()
            now = self._clock()
            strangers = [peer for peer in self._peers if peer.host is None]
            if len(strangers) >= self._settings.hosts + MAX_STRANGERS:
                # A launcher says who it is at once, so who has waited longest is none.
                strangers[0].connection.close()
                self._peers.remove(strangers[0])
            connection = Connection(socket_, self._host.selector, self._settings, True, now)
            self._peers.append(_Peer(connection, now + self._settings.limits.hello))

    def _take(self, peer: "_Peer", message: Message) -> list[HostEvent]:
        """Take a message: a greeting, or a report of a host."""
        connection = peer.connection
        if peer.host is not None and is_report(message):
            return [Received(peer.host, message)]
        if peer.host is not None:
            connection.close(NO_LAUNCHER)
        elif has_form(message, "hello"):
            connection.send({"is": "leader", "nonce": connection.nonce})
            connection.renew_key(message["nonce"])
        elif (why := self._refusal(message)) is not None:
            connection.send({"is": "refused", **why})
            connection.close()
        else:
            return self._welcome(peer, message)
        return []

    def _welcome(self, peer: "_Peer", message: Message) -> list[HostEvent]:
        """Take a host in; a launcher that comes again replaces itself."""
        host, events = int(message["host"]), list[HostEvent]()
        before = self._peer(host)
        if before is not None:
            before.connection.close()
            before.host = None
            events.append(Lost(host, "it came again"))
        peer.host, peer.launcher = host, message["launcher"]
        peer.connection.send({"is": "welcome"})
        return [*events, Joined(host, int(message["processes"]), int(message["attempt"]))]

    def _refusal(self, message: Message) -> Message | None:
        """Return why a host is refused, or None."""
        hosts = self._settings.hosts
        if not has_form(message, "join"):
            return {"why": "words"}
        if message["hosts"] != hosts:
            return {"why": "hosts", "hosts": hosts}
        if not 0 < message["host"] < hosts:
            return {"why": "host"}
        peer = self._peer(message["host"])
        if peer is not None and peer.launcher != message["launcher"]:
            return {"why": "taken"}
        return None


class _Peer:
    """Who has connected: a stranger `until` a time, then the launcher of a host."""

    def __init__(self, connection: Connection, until: float) -> None:
        self.connection, self.until = connection, until
        self.host: int | None = None
        self.launcher = ""


def free_port(name: str) -> int:
    """Return a port of this host that nobody listens at."""
    with socket.socket() as listening:
        listening.bind((name, 0))
        return int(listening.getsockname()[1])
