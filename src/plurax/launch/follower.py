"""The launcher of a host that another one leads: it reaches the leader, obeys it and reports to it.

When the leader is lost its processes are killed, and it is looked for again: its host, or its
launcher, may come back.
"""

import secrets
import socket
import time

from plurax import errors
from plurax.exit_codes import ExitCode
from plurax.launch.connection import NO_LAUNCHER, NO_WORD, Connection, leader_address
from plurax.launch.events import Events
from plurax.launch.host import Host
from plurax.launch.protocol import Message, has_form, is_order
from plurax.launch.settings import Settings
from plurax.launch.supervisor import UNKILLABLE

SILENT = "it accepts, and says nothing"
MAX_REFUSALS = 3
"""How often the leader closes a connection without a word before the secret is to blame.

It does so, too, when it ends, but then it does not listen any more.
"""


def follow(settings: Settings, host: Host, events: Events) -> int:
    """Follow the leader until it says that all is over; return the exit code.

    Raises `ExperimentError` where the leader cannot be reached, or refuses this host.
    """
    return _Following(settings, host, events).run()


class _Following:
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
        settings, limits = self._settings, self._settings.limits
        until, refusals = time.monotonic() + limits.join, 0
        while True:
            try:
                peer = socket.create_connection(leader_address(settings), timeout=limits.hello)
            except OSError as error:
                reason: str | None = str(error)
            else:
                now = time.monotonic()
                connection = Connection(peer, self._host.selector, settings, False, now)
                reason = self._greet(connection)
                if reason is None:
                    return connection
                connection.close()
            refusals = refusals + 1 if reason == NO_WORD else 0
            late = time.monotonic() > until
            if refusals == MAX_REFUSALS or (refusals and late):
                raise errors.ExperimentError(
                    f"plurax launch --coordinator {settings.coordinator}: this host and host 0 do "
                    "not have the same secret. Set the environment variable PLURAX_TOKEN to the "
                    "same words on every host."
                )
            if late:
                raise errors.ExperimentError(
                    f"plurax launch --coordinator {settings.coordinator}: host 0 was not "
                    f"reached within {limits.join:g} s: {reason}. Start plurax launch with --host "
                    "0 there, and check that no firewall is between."
                )
            self._host.wait(limits.retry)
            if self._host.signals:
                return 128 + self._host.signals[0]

    def _greet(self, connection: Connection) -> str | None:
        """Say who this is; return why that has to be tried again, or None for a welcome."""
        settings = self._settings
        connection.send({"is": "hello", "nonce": connection.nonce})
        answer = self._answer(connection)
        if answer is not None and has_form(answer, "leader"):
            connection.renew_key(answer["nonce"])
            place = {"host": settings.host, "hosts": settings.hosts}
            able = {"processes": settings.processes, "attempt": self._attempt}
            connection.send({"is": "join", **place, **able, "launcher": self._launcher})
            answer = self._answer(connection)
        if answer is None:
            return connection.closed or SILENT
        if answer.get("is") == "welcome":
            return None
        if answer.get("why") == "taken":  # perhaps by this host, before it was lost
            return errors.launch_host_taken(settings.host).args[0]
        connection.close()
        if answer.get("why") == "hosts":
            raise errors.ExperimentError(
                f"plurax launch --hosts {settings.hosts}: host 0 was started with --hosts "
                f"{answer.get('hosts')}. Give the same number on every host."
            )
        raise errors.launch_host(settings.host, settings.hosts)

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
                if order["do"] == "start":
                    self._attempt = order["attempt"]
                host.gang.obey(order)
            if connection.closed is not None:
                return None
            for number in host.taken_signals():
                connection.send({"is": "asked", "signal": number})
            for report in host.taken_reports():
                connection.send(report)
