"""A connection between two launchers: lines of JSON, each with a proof that its sender may speak.

The lines carry orders such as "start attempt 3" and reports such as "process 5 ended with 137", and
never a program: what a host runs stands on its own command line. Whoever does not know PLURAX_TOKEN
gets no answer, not even a word. The token does not cross the network; each line begins with an HMAC
(RFC 2104) of its words, who says them, and how many it has said before:

    follower  f3a1... {"is": "hello", "nonce": "b2..."}              key: the token
    leader    07cc... {"is": "leader", "nonce": "9e..."}             key: the token
    follower  91d0... {"is": "join", "host": 1, ...}                 key: HMAC(token, both nonces)
    leader    be52... {"is": "welcome"}                              and so on, until it is closed

Who has listened can repeat the first line, and gets a nonce that is of no use without the token; a
later line is right in no other connection and in no other place.
"""

import contextlib
import hashlib
import hmac
import json
import secrets
import selectors
import socket

from plurax import errors
from plurax.launch.protocol import Message
from plurax.launch.settings import Settings

MAX_LINE = 1 << 16
"""Bytes of a line; whoever sends a longer one is no launcher."""
NO_LAUNCHER = "what it sent is no message of a launcher"
NO_WORD = "it closed the connection without a word"


def leader_address(settings: Settings) -> tuple[str, int]:
    """Return the name or address of host 0, and the port of its launcher.

    Raises `ExperimentError` where this host has a loopback address for that name, as in many an
    `/etc/hosts`, and `OSError` where it has none.
    """
    name, port = settings.leader_name(), int(settings.coordinator.rpartition(":")[2])
    address = socket.gethostbyname(name)
    if address.startswith("127.") and not name.startswith(("127.", "localhost")):
        raise errors.ExperimentError(
            f"plurax launch --coordinator {name}: on host {settings.host} this name is {address}, "
            "which leads to no other host. Give host 0's address in the network, or correct "
            "/etc/hosts there."
        )
    return name, port


class Connection:
    """Sends and receives messages without ever waiting.

    **Arguments:** `peer`, a connected socket; `selector`, which is waited on; `settings`, for the
    token, and the silence after which the other side is taken for lost; `leads`, whether this is
    the leader's side; `now`, the time.

    **Attributes:** `nonce`, random characters of this side; `closed`, why the connection has ended.
    """

    def __init__(
        self,
        peer: socket.socket,
        selector: selectors.BaseSelector,
        settings: Settings,
        leads: bool,
        now: float,
    ) -> None:
        peer.setblocking(False)
        with contextlib.suppress(OSError):  # not a TCP socket, in tests
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._peer, self._selector, self._silence = peer, selector, settings.limits.silence
        self._leads, self._sent, self._received = leads, 0, 0
        self._heard = self._spoken = now
        self._unread, self._unsent = b"", b""
        self._messages: list[Message] = []
        # Bytes of the environment that are no UTF-8 are lone surrogates here.
        self._key = (settings.token or "").encode(errors="surrogatepass")
        self.nonce = secrets.token_hex(16)
        self.closed: str | None = None
        selector.register(peer, selectors.EVENT_READ, self._ready)

    def renew_key(self, nonce: str) -> None:
        """Prove all that follows by a key of this connection alone; `nonce`: the other side's."""
        nonces = [nonce, self.nonce] if self._leads else [self.nonce, nonce]
        self._key = hmac.digest(self._key, json.dumps(nonces).encode(), "sha256")

    def send(self, message: Message) -> None:
        """Send a message, now or when the network takes it."""
        if self.closed is None:
            words = json.dumps(message).encode()
            self._unsent += self._proof(self._leads, self._sent, words) + b" " + words + b"\n"
            self._sent += 1
            self._write()

    def receive(self, now: float) -> list[Message]:
        """Return what has come since the last call; say a sign of life where it is time for one."""
        messages, self._messages = self._messages, []
        if messages:
            self._heard = now
        elif now - self._heard > self._silence:
            self.close(f"nothing was heard of it for {self._silence:g} s")
        if self._received and now - self._spoken > self._silence / 6:
            self._spoken = now
            self.send({"is": "alive"})
        return [message for message in messages if message.get("is") != "alive"]

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

    def _proof(self, of_leader: bool, count: int, words: bytes) -> bytes:
        line = f"{'leader' if of_leader else 'follower'} {count} ".encode() + words
        return hmac.new(self._key, line, hashlib.sha256).hexdigest().encode()

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
            self.close("it closed the connection" if self._received else NO_WORD)
            return
        *lines, self._unread = (self._unread + data).split(b"\n")
        if len(self._unread) > MAX_LINE:
            self.close(NO_LAUNCHER)
        for line in lines:
            self._parse(line)

    def _parse(self, line: bytes) -> None:
        proof, _, words = line.partition(b" ")
        if not hmac.compare_digest(proof, self._proof(not self._leads, self._received, words)):
            self.close(NO_LAUNCHER)
        if self.closed is None:
            self._received += 1
            self._messages.append(json.loads(words))

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
