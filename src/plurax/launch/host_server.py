"""The leader's connections to the launchers of the other hosts."""

import contextlib
import dataclasses
import secrets
import selectors
import socket
from collections.abc import Callable

from plurax import errors
from plurax.launch.connection import NO_LAUNCHER, Connection, is_proof, leader_address, proof
from plurax.launch.hosts import HostEvent, Joined, Lost, Received
from plurax.launch.protocol import Message, is_hello, is_report
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
        self._new: list[_Newcomer] = []
        self._hosts: dict[int, _Member] = {}

    def send(self, host: int, order: Message) -> None:
        """Send an order to a host, or drop it; one that is lost gets none."""
        if host in self._hosts and order["do"] == "drop":
            self._hosts[host].connection.close("it does not answer")
        elif host in self._hosts:
            self._hosts[host].connection.send(order)

    def receive(self) -> list[HostEvent]:
        """Return what has happened since the last call."""
        now = self._clock()
        found: list[HostEvent] = []
        for new in [*self._new]:
            hello = new.connection.receive_one(now)
            if hello is not None:
                self._new.remove(new)
                found += self._welcome(new, hello)
                continue
            if new.connection.closed is not None or now > new.until:
                new.connection.close()
                self._new.remove(new)
        for host, member in [*self._hosts.items()]:
            for one in member.connection.receive(now):
                if is_report(one):
                    found.append(Received(host, one))
                else:
                    member.connection.close(NO_LAUNCHER)
            if member.connection.closed is not None:
                found.append(Lost(host, member.connection.closed))
                del self._hosts[host]
        return found

    def close(self, code: int, seconds: float) -> None:
        """Let all hosts end with an exit code, and wait until the network has taken that."""
        connections = [member.connection for member in self._hosts.values()]
        for connection in connections:
            connection.send({"do": "end", "code": code})
        until = self._clock() + seconds
        while not all(one.is_sent for one in connections) and self._clock() < until:
            for key, _ in self._selector.select(0.1):
                key.data()
        for connection in [*connections, *(new.connection for new in self._new)]:
            connection.close()
        self._selector.unregister(self._listening)
        self._listening.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # gone already, or too many open files: try again later
            peer, _ = self._listening.accept()
            now = self._clock()
            limits = self._settings.limits
            if len(self._new) >= self._settings.hosts + MAX_STRANGERS:
                # A launcher says who it is at once, so who has waited longest is none.
                self._new.pop(0).connection.close("others came after it")
            connection = Connection(peer, self._selector, limits.silence, now)
            nonce = secrets.token_hex(16)
            connection.send({"is": "leader", "nonce": nonce})
            self._new.append(_Newcomer(connection, nonce, now + limits.hello))

    def _welcome(self, new: "_Newcomer", hello: Message) -> list[HostEvent]:
        """Take a host in, or refuse it by name; a launcher that comes again replaces itself."""
        host, token = hello.get("host"), self._settings.token
        why = self._refusal(hello, new.nonce)
        if why is not None:
            new.connection.send({"is": "refused", **why})
            new.connection.close()
            return []
        assert isinstance(host, int)
        found: list[HostEvent] = []
        if host in self._hosts:
            self._hosts.pop(host).connection.close()
            found.append(Lost(host, "it came again"))
        self._hosts[host] = _Member(new.connection, hello["launcher"])
        answer = proof(token or "", "leader", str(hello.get("nonce")))
        new.connection.send({"is": "welcome", "proof": answer})
        return [*found, Joined(host, int(hello["processes"]), int(hello["attempt"]))]

    def _refusal(self, hello: Message, nonce: str) -> Message | None:
        """Return why a host is refused, or None."""
        host, hosts, token = hello.get("host"), self._settings.hosts, self._settings.token
        if not is_hello(hello):
            return {"why": "words"}
        if not is_proof(token or "", f"host {host}", nonce, hello.get("proof")):
            return {"why": "token"}
        if hello.get("hosts") != hosts:
            return {"why": "hosts", "hosts": hosts}
        assert isinstance(host, int)
        if not 0 < host < hosts:
            return {"why": "host"}
        member = self._hosts.get(host)
        if member is not None and member.launcher != hello["launcher"]:
            return {"why": "taken"}
        return None


@dataclasses.dataclass(frozen=True)
class _Newcomer:
    """Who has connected and not yet said who it is."""

    connection: Connection
    nonce: str
    until: float


@dataclasses.dataclass(frozen=True)
class _Member:
    connection: Connection
    launcher: str
