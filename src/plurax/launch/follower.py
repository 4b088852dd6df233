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
        self._joined = False

    def run(self) -> int:
        """Reach the leader and obey it, again where it is lost; return the exit code."""
        limits = self._settings.limits
        until, refusals = time.monotonic() + limits.join, 0
        while True:
            self._joined = False
            end = self._follow_once()
            if isinstance(end, int):
                return end
            if self._joined:
                if not self._killed_all(end):
                    return ExitCode.PERMANENT
                until, refusals = time.monotonic() + limits.join, 0
                continue
            refusals = refusals + 1 if end == NO_WORD else 0
            if refusals == MAX_REFUSALS or time.monotonic() > until:
                raise self._not_reached(end)
            self._host.wait(limits.retry)
            if self._host.signals:
                return 128 + self._host.signals[0]

    def _follow_once(self) -> int | str:
        """Connect and obey; return the exit code, or why the connection has ended."""
        settings, limits = self._settings, self._settings.limits
        try:
            peer = socket.create_connection(leader_address(settings), timeout=limits.hello)
        except OSError as error:
            return str(error)
        until = time.monotonic() + limits.hello
        connection = Connection(peer, self._host.selector, settings, False, time.monotonic())
        connection.send({"is": "hello", "nonce": connection.nonce})
        while True:
            self._host.wait()
            now = time.monotonic()
            for message in connection.receive(now):
                code = self._obey(connection, message)
                if code is not None:
                    connection.close()
                    return code
            if not self._joined and now > until:
                connection.close("it accepts, and says nothing")
            if connection.closed is not None:
                return connection.closed
            while self._joined and self._host.signals:
                connection.send({"is": "asked", "signal": self._host.signals.pop(0)})
            for report in self._host.taken_reports():
                connection.send(report)

    def _obey(self, connection: Connection, message: Message) -> int | None:
        """Do what the leader says; return the exit code where it says that all is over."""
        settings = self._settings
        if has_form(message, "leader"):
            connection.renew_key(message["nonce"])
            place = {"host": settings.host, "hosts": settings.hosts}
            able = {"processes": settings.processes, "attempt": self._attempt}
            connection.send({"is": "join", **place, **able, "launcher": self._launcher})
        elif message.get("is") == "welcome":
            self._joined = True
            self._events.write("joined", f"host {settings.host} follows the leader")
        elif message.get("is") == "refused":
            connection.close(self._refused(message))
        elif not self._joined or not is_order(message):
            connection.close(NO_LAUNCHER)
        elif message["do"] == "end":
            return int(message["code"])
        else:
            if message["do"] == "start":
                self._attempt = message["attempt"]
            self._host.gang.obey(message)
        return None

    def _refused(self, message: Message) -> str:
        """Return why to try again. Raises `ExperimentError` where that would not help."""
        settings = self._settings
        if message.get("why") == "taken":  # perhaps by this host, before it was lost
            return str(errors.launch_host_taken(settings.host))
        if message.get("why") == "hosts":
            raise errors.ExperimentError(
                f"plurax launch --hosts {settings.hosts}: host 0 was started with --hosts "
                f"{message.get('hosts')}. Give the same number on every host."
            )
        raise errors.launch_host(settings.host, settings.hosts)

    def _killed_all(self, reason: str) -> bool:
        """Kill the processes, as the leader is lost; return whether all of them have ended."""
        sentence = f"the leader is lost: {reason}; its processes here are killed"
        self._events.write("lost", sentence, host=0, reason=reason)
        gang = self._host.gang
        gang.obey({"do": "kill", "stuck": False})
        until = time.monotonic() + self._settings.limits.silence
        while gang.alive and time.monotonic() < until:
            self._host.wait()
        self._host.reports.clear()
        if gang.alive:
            sentence = UNKILLABLE.format(gang.alive[0].number)
            self._events.write("over", sentence, code=int(ExitCode.PERMANENT))
        return not gang.alive

    def _not_reached(self, reason: str) -> errors.ExperimentError:
        coordinator = self._settings.coordinator
        if reason == NO_WORD:
            return errors.ExperimentError(
                f"plurax launch --coordinator {coordinator}: this host and host 0 do not have the "
                "same secret. Set the environment variable PLURAX_TOKEN to the same words on every "
                "host."
            )
        return errors.ExperimentError(
            f"plurax launch --coordinator {coordinator}: host 0 was not reached within "
            f"{self._settings.limits.join:g} s: {reason}. Start plurax launch with --host 0 there, "
            "and check that no firewall is between."
        )
