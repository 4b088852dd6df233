"""A connection between two launchers: lines of JSON, and proof that both know the same secret.

The lines carry orders such as "start attempt 3" and reports such as "process 5 ended with 137", and
never a program: what a host runs stands on its own command line. Both sides
prove that they know PLURAX_TOKEN before anything else is read, and it does not cross the network:
each sends random bytes, and the other answers with their HMAC.
"""

import contextlib
import hashlib
import hmac
import json
import selectors
import socket

from plurax import errors
from plurax.launch.protocol import Message
from plurax.launch.settings import Settings

MAX_LINE = 1 << 16
"""Bytes of a line; whoever sends a longer one is no launcher."""
NO_LAUNCHER = "what it sent is no message of a launcher"


def proof(token: str, side: str, nonce: str) -> str:
    """Return what shows that a side ("leader" or "host 3") knows the token."""
    key, words = _bytes(token), _bytes(f"{side} {nonce}")
    return hmac.new(key, words, hashlib.sha256).hexdigest()


def is_proof(token: str, side: str, nonce: str, given: object) -> bool:
    """Return whether a proof is right, in a time that does not depend on it."""
    return hmac.compare_digest(_bytes(proof(token, side, nonce)), _bytes(str(given)))


def _bytes(text: str) -> bytes:
    """Encode any text: a stranger's may have lone surrogates, which UTF-8 has no bytes for."""
    return text.encode(errors="surrogatepass")


def leader_address(settings: Settings) -> tuple[str, int]:
    """Return the name or address of host 0, and the port of its launcher.

    Raises `ExperimentError` where this host has a loopback address for that name, as in many an
    `/etc/hosts`, and `OSError` where it has none.
    """
    name, port = settings.leader_name(), int(settings.coordinator.rpartition(":")[2])
    found = socket.gethostbyname(name)
    if found.startswith("127.") and not name.startswith(("127.", "localhost")):
        raise errors.ExperimentError(
            f"plurax launch --coordinator {name}: on host {settings.host} this name is {found}, "
            "which leads to no other host. Give host 0's address in the network, or correct "
            "/etc/hosts there."
        )
    return name, port


class Connection:
    """Sends and receives messages without ever waiting.

    **Arguments:** `peer`, a connected socket; `selector`, which is waited on; `silence`, seconds
    without a message after which the other side is taken for lost; `now`, the time.
    """

    def __init__(
        self, peer: socket.socket, selector: selectors.BaseSelector, silence: float, now: float
    ) -> None:
        peer.setblocking(False)
        with contextlib.suppress(OSError):  # not a TCP socket, in tests
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._peer, self._selector, self._silence = peer, selector, silence
        self._heard = self._spoken = now
        self._unread, self._unsent = b"", b""
        self._messages: list[Message] = []
        self.closed: str | None = None
        """Why the connection has ended."""
        selector.register(peer, selectors.EVENT_READ, self._ready)

    def send(self, message: Message) -> None:
        """Send a message, now or when the network takes it."""
        if self.closed is None:
            self._unsent += json.dumps(message).encode() + b"\n"
            self._write()

    def receive(self, now: float) -> list[Message]:
        """Return what has come since the last call; say a sign of life where it is time for one."""
        messages, self._messages = self._messages, []
        if messages:
            self._heard = now
        elif now - self._heard > self._silence:
            self.close(f"nothing was heard of it for {self._silence:g} s")
        if now - self._spoken > self._silence / 6:
            self._spoken = now
            self.send({"is": "alive"})
        return [message for message in messages if message.get("is") != "alive"]

    def receive_one(self, now: float) -> Message | None:
        """Return the first message that has come, or None; the others wait for the next call."""
        messages = self.receive(now)
        self._messages = messages[1:] + self._messages
        return messages[0] if messages else None

    @property
    def is_sent(self) -> bool:
        """Whether the network has taken all that was sent."""
        return not self._unsent or self.closed is not None

    def close(self, reason: str = "closed") -> None:
        """End the connection."""
        if self.closed is None:
            self.closed = reason
            self._selector.unregister(self._peer)
            self._peer.close()

    def _ready(self) -> None:
        self._write()
        self._read()

    def _read(self) -> None:
        if self.closed is not None:
            return
        try:
            data = self._peer.recv(1 << 16)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self.close(str(error))
            return
        if not data:
            self.close("it closed the connection")
            return
        *lines, self._unread = (self._unread + data).split(b"\n")
        if len(self._unread) > MAX_LINE:
            self.close(NO_LAUNCHER)
        for line in lines:
            self._parse(line)

    def _parse(self, line: bytes) -> None:
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):  # the latter for "[[[[...", nested too deeply
            message = None
        if isinstance(message, dict):
            self._messages.append(message)
        else:
            self.close(NO_LAUNCHER)

    def _write(self) -> None:
        if self.closed is not None:
            return
        try:
            if self._unsent:
                self._unsent = self._unsent[self._peer.send(self._unsent) :]
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            self._read()  # the other side may have said "end" before it closed
            self.close(str(error))
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0)
        self._selector.modify(self._peer, events, self._ready)
