"""The launcher of a host that another one leads: it reaches the leader, obeys it and reports to it.

When the leader is lost its processes are killed, and it is looked for again: its host, or its
launcher, may come back.
"""

import secrets
import socket
import time

from plurax import errors
from plurax.exit_codes import ExitCode
from plurax.launch.connection import NO_LAUNCHER, Connection, is_proof, leader_address, proof
from plurax.launch.events import Events
from plurax.launch.host import Host
from plurax.launch.protocol import Message, is_order
from plurax.launch.settings import Settings
from plurax.launch.supervisor import UNKILLABLE

SILENT = "it accepts, and says nothing"


def follow(settings: Settings, host: Host, events: Events) -> int:
    """Follow the leader until it says that all is over; return the exit code.

    Raises `ExperimentError` where the leader cannot be reached, or refuses this host.
    """
    return _Follower(settings, host, events).run()


class _Follower:
    """What a follower knows between two connections to its leader."""

    def __init__(self, settings: Settings, host: Host, events: Events) -> None:
        self._settings, self._host, self._events = settings, host, events
        self._launcher, self._attempt = secrets.token_hex(8), -1

    def run(self) -> int:
        """Reach the leader, obey it; again where it is lost."""
        while True:
            connection = self._reach()
            if isinstance(connection, int):
                return connection
            self._events.write("joined", f"host {self._settings.host} follows the leader")
            code = self._obey(connection)
            if code is not None:
                return code
            said = f"the leader is lost: {connection.closed}; its processes here are killed"
            self._events.write("lost", said, host=0, reason=connection.closed)
            self._host.gang.obey({"do": "kill", "stuck": False})
            until = time.monotonic() + self._settings.limits.silence
            while self._host.gang.alive and time.monotonic() < until:
                self._host.wait()
            if self._host.gang.alive:
                number, code = self._host.gang.alive[0].number, int(ExitCode.PERMANENT)
                self._events.write("over", UNKILLABLE.format(number), code=code)
                return code
            self._host.reports.clear()

    def _reach(self) -> Connection | int:
        """Return a connection to the leader, or an exit code where a signal came first."""
        limits = self._settings.limits
        until = time.monotonic() + limits.join
        while True:
            try:
                address = leader_address(self._settings)
                peer = socket.create_connection(address, timeout=limits.hello)
            except OSError as error:
                reason = str(error)
            else:
                now = time.monotonic()
                connection = Connection(peer, self._host.selector, limits.silence, now)
                found = self._greet(connection)
                if found is None:
                    return connection
                connection.close()
                reason = found
            if time.monotonic() > until:
                raise errors.ExperimentError(
                    f"plurax launch --coordinator {self._settings.coordinator}: host 0 was not "
                    f"reached within {limits.join:g} s: {reason}. Start plurax launch with --host "
                    "0 there, and check that no firewall is between."
                )
            self._host.wait(limits.retry)
            if self._host.signals:
                return 128 + self._host.signals[0]

    def _greet(self, connection: Connection) -> str | None:
        """Say who this is; return why that has to be tried again, or None for a welcome."""
        settings, nonce = self._settings, secrets.token_hex(16)
        token, name = settings.token or "", f"host {settings.host}"
        leader = self._answer(connection)
        if leader is None:
            return connection.closed or SILENT
        hello = {
            "is": "hello",
            "host": settings.host,
            "hosts": settings.hosts,
            "processes": settings.processes,
            "attempt": self._attempt,
            "launcher": self._launcher,
            "nonce": nonce,
            "proof": proof(token, name, str(leader.get("nonce"))),
        }
        connection.send(hello)
        answer = self._answer(connection)
        if answer is None:
            return connection.closed or SILENT
        if answer.get("is") == "welcome":
            if is_proof(token, "leader", nonce, answer.get("proof")):
                return None
            answer = {"why": "token"}
        connection.close()
        if answer.get("why") == "taken":  # perhaps by this host, before it was lost
            return errors.launch_host_taken(settings.host).args[0]
        raise self._refused(answer)

    def _refused(self, answer: Message) -> errors.ExperimentError:
        settings = self._settings
        if answer.get("why") == "token":
            return errors.ExperimentError(
                f"plurax launch --coordinator {settings.coordinator}: this host and host 0 do not "
                "have the same secret. Set the environment variable PLURAX_TOKEN to the same words "
                "on every host."
            )
        if answer.get("why") == "hosts":
            return errors.ExperimentError(
                f"plurax launch --hosts {settings.hosts}: host 0 was started with --hosts "
                f"{answer.get('hosts')}. Give the same number on every host."
            )
        return errors.launch_host(settings.host, settings.hosts)

    def _answer(self, connection: Connection) -> Message | None:
        """Return the next message; None where none comes."""
        until = time.monotonic() + self._settings.limits.hello
        while connection.closed is None and time.monotonic() < until:
            message = connection.receive_one(time.monotonic())
            if message is not None:
                return message
            self._host.wait()
        return connection.receive_one(time.monotonic())

    def _obey(self, connection: Connection) -> int | None:
        """Do what the leader orders; return its exit code, or None where it is lost."""
        host = self._host
        while True:
            host.wait()
            for order in connection.receive(time.monotonic()):
                if not is_order(order):
                    connection.close(NO_LAUNCHER)
                    break
                if order["do"] == "end":
                    connection.close()
                    return int(order["code"])
                self._do(order)
            if connection.closed is not None:
                return None
            for number in host.taken_signals():
                connection.send({"is": "asked", "signal": number})
            for report in host.taken_reports():
                connection.send(report)

    def _do(self, order: Message) -> None:
        if order["do"] == "start":
            self._attempt = order["attempt"]
        self._host.gang.obey(order)
