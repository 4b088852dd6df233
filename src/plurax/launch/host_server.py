"""The leader's connections to the launchers of the other hosts."""

import contextlib
import dataclasses
import selectors
import socket
from collections.abc import Callable

from plurax import errors
from plurax.launch.connection import NO_LAUNCHER, Connection, leader_address
from plurax.launch.hosts import HostEvent, Joined, Lost, Received
from plurax.launch.protocol import Message, has_form, is_report
from plurax.launch.settings import Settings

MAX_STRANGERS = 64
"""Connections beside those of the hosts that may be open before they say who they are."""


class HostServer:
    """Accepts the launchers of other hosts, and passes on what they report.

    **Arguments:** `settings`; `selector`, which is waited on; `clock`.

    Raises `ExperimentError` where the coordinator's address cannot be listened at, or is loopback.
    """

    def __init__(
        self, settings: Settings, selector: selectors.BaseSelector, clock: Callable[[], float]
    ) -> None:
        self._settings, self._selector, self._clock = settings, selector, clock
        try:
            self._listening = socket.create_server(leader_address(settings), backlog=128)
        except OSError as error:
            raise errors.ExperimentError(
                f"plurax launch --coordinator {settings.coordinator} --host 0: cannot listen "
                f"there: {error}. The coordinator is a name or address of host 0 itself, and a "
                "port that nobody else uses."
            ) from None
        self._listening.setblocking(False)
        selector.register(self._listening, selectors.EVENT_READ, self._accept)
        self._strangers: list[_Stranger] = []
        self._hosts: dict[int, _Follower] = {}

    def send(self, host: int, order: Message) -> None:
        """Send an order to a host, or drop it; one that is lost gets none."""
        if host in self._hosts and order["do"] == "drop":
            self._hosts[host].connection.close("it does not answer")
        elif host in self._hosts:
            self._hosts[host].connection.send(order)

    def receive(self) -> list[HostEvent]:
        """Return what has happened since the last call."""
        now = self._clock()
        events: list[HostEvent] = []
        for stranger in [*self._strangers]:
            message = stranger.connection.receive_one(now)
            if message is not None:
                events += self._greet(stranger, message)
            elif stranger.connection.closed is not None or now > stranger.until:
                stranger.connection.close()
                self._strangers.remove(stranger)
        for host, follower in [*self._hosts.items()]:
            for report in follower.connection.receive(now):
                if is_report(report):
                    events.append(Received(host, report))
                else:
                    follower.connection.close(NO_LAUNCHER)
            if follower.connection.closed is not None:
                events.append(Lost(host, follower.connection.closed))
                del self._hosts[host]
        return events

    def close(self, code: int, seconds: float) -> None:
        """Let all hosts end with an exit code, and wait until the network has taken that."""
        connections = [follower.connection for follower in self._hosts.values()]
        for connection in connections:
            connection.send({"do": "end", "code": code})
        until = self._clock() + seconds
        while not all(one.is_sent for one in connections) and self._clock() < until:
            for key, _ in self._selector.select(0.1):
                key.data()
        for connection in [*connections, *(stranger.connection for stranger in self._strangers)]:
            connection.close()
        self._selector.unregister(self._listening)
        self._listening.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # gone already, or too many open files: try again later
            peer, _ = self._listening.accept()
            now = self._clock()
            if len(self._strangers) >= self._settings.hosts + MAX_STRANGERS:
                # A launcher says who it is at once, so who has waited longest is none.
                self._strangers.pop(0).connection.close("others came after it")
            connection = Connection(peer, self._selector, self._settings, True, now)
            self._strangers.append(_Stranger(connection, now + self._settings.limits.hello))

    def _greet(self, stranger: "_Stranger", message: Message) -> list[HostEvent]:
        """Answer who knows the secret; take a host in, or refuse it by name.

        A launcher that comes again replaces itself.
        """
        connection = stranger.connection
        if has_form(message, "hello"):
            connection.send({"is": "leader", "nonce": connection.nonce})
            connection.renew_key(message["nonce"])
            return []
        self._strangers.remove(stranger)
        why = self._refusal(message)
        if why is not None:
            connection.send({"is": "refused", **why})
            connection.close()
            return []
        host, events = int(message["host"]), list[HostEvent]()
        if host in self._hosts:
            self._hosts.pop(host).connection.close()
            events.append(Lost(host, "it came again"))
        self._hosts[host] = _Follower(connection, message["launcher"])
        connection.send({"is": "welcome"})
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
        follower = self._hosts.get(message["host"])
        if follower is not None and follower.launcher != message["launcher"]:
            return {"why": "taken"}
        return None


@dataclasses.dataclass(frozen=True)
class _Stranger:
    """Who has connected and not yet said who it is."""

    connection: Connection
    until: float


@dataclasses.dataclass(frozen=True)
class _Follower:
    connection: Connection
    launcher: str
