"""What the processes of a gang agree on, on their hosts: who is there, when to stop, what was read.

Device collectives keep the processes in step, but they must not be asked for what only the host
knows, and they name nobody who is missing. So for one call of `fit` each process holds one
connection to process 0, and all take part in rounds, in the same order:

    round         process 0 has    process 1 sends    process 2 sends    all receive
    stop?         null             "SIGTERM"          null               [null, "SIGTERM", null]
    newest step   1200             null               null               [1200, null, null]

A message is a line of JSON; whoever does not send one within the limit is named. Where there is
one process a round is its own value, and nothing is opened.
"""

import contextlib
import json
import secrets
import selectors
import socket
import time
from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax
import numpy as np
from jax.experimental import multihost_utils

from plurax import errors
from plurax.distributed.environment import gang_of
from plurax.timeouts import TIMEOUTS

T = TypeVar("T")

CONNECT_SECONDS = 60.0
"""For all processes to connect with process 0."""
TOKEN_SECONDS = 10.0
"""For whoever connects to say the gang's secret."""
ROUND_SECONDS = TIMEOUTS.gang_round
"""How long one process may be later than the others: it may compile, or wait for a disk."""


class ProcessGroup:
    """The processes of a gang, from one of them. Every method is called by all, in one order.

    **Attributes:** `count`, `index`; `is_primary`, whether this process writes files and shows
    progress; `seconds`, how much later than the others a process may be in a round; `left`, whether
    it takes part no more.
    """

    seconds = ROUND_SECONDS

    def __init__(self, index: int = 0, sockets: list[socket.socket] | None = None) -> None:
        self.index, self.count = index, 1
        self._sockets = sockets or []
        self._received = [b""] * len(self._sockets)
        self.left = False
        self._names: list[str] = []
        if sockets:
            self._names = self._exchange(socket.gethostname())
            self.count = len(self._names)

    @property
    def is_primary(self) -> bool:
        """Whether this is process 0."""
        return self.index == 0

    def all_gather(self, value: Any) -> list[Any]:
        """Return a value of each process, JSON, in their order. Raises `ProcessError`."""
        return [value] if self.count == 1 else self._exchange(value)

    def on_primary(self, function: Callable[[], Any]) -> Any:
        """Call a function in process 0 alone; return its result, JSON, in all processes.

        What it raises is raised in all of them.
        """
        result, error = None, None
        if self.is_primary:
            try:
                result = function()
            except Exception as raised:
                if self.count == 1:
                    raise
                error = raised
        answer, *_ = self.all_gather([result, _described(error)])
        if error is not None:
            raise error
        result, described = answer
        if described is not None:
            kind, text = described
            raise _raised(kind, text, self.named(0))
        return result

    def together(self, function: Callable[[], T]) -> T:
        """Call a function in every process; where it raises in one, raise in all of them."""
        result, error = None, None
        try:
            result = function()
        except Exception as raised:
            if self.count == 1:
                raise
            error = raised
        answers = self.all_gather(_described(error))
        if error is not None:
            raise error
        for process, described in enumerate(answers):
            if described is not None:
                kind, text = described
                raise _raised(kind, text, self.named(process), in_text=True)
        return cast(T, result)

    def named(self, process: int) -> str:
        """Return a process and its host for a sentence, such as `process 3 on node7`."""
        host = f" on {self._names[process]}" if self._names else ""
        return f"process {process}{host}"

    def leave(self) -> None:
        """Close the connections, because of an error that perhaps only this process has.

        Later rounds raise `PeerError`, here and in the others, instead of waiting for each other.
        """
        self.left = self.count > 1
        self.close()

    def close(self) -> None:
        """Close the connections."""
        for connection in self._sockets:
            connection.close()

    # --- Rounds -------------------------------------------------------------------------------

    def _exchange(self, value: Any) -> list[Any]:
        if self.left:
            raise errors.process_ended(self.named(self.index))
        line = json.dumps(value).encode() + b"\n"
        if self.index:
            self._send(0, line)
            values: list[Any] = json.loads(self._receive()[0])
            return values
        values = [value, *map(json.loads, self._receive())]
        line = json.dumps(values).encode() + b"\n"
        for place in range(len(self._sockets)):
            self._send(place, line)
        return values

    def _send(self, place: int, line: bytes) -> None:
        try:
            self._sockets[place].sendall(line)
        except OSError:
            raise errors.process_ended(self._other(place)) from None

    def _receive(self) -> list[bytes]:
        """Return a line from each connection, in whatever order they come.

        Whoever has ended is noticed at once, while others are still busy.
        """
        deadline = time.monotonic() + self.seconds
        with selectors.DefaultSelector() as selector:
            for place, connection in enumerate(self._sockets):
                if b"\n" not in self._received[place]:
                    selector.register(connection, selectors.EVENT_READ, place)
            while selector.get_map():
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    late = [self._other(key.data) for key in selector.get_map().values()]
                    raise errors.PeerError(
                        f"{', '.join(late)} did not take part for {self.seconds:.0f} s, while the "
                        "others waited for it. It may hang, or do something that the others do "
                        "not: every process must make the same calls."
                    )
                for key, _ in ready:
                    self._received[key.data] += self._read(key.data)
                    if b"\n" in self._received[key.data]:
                        selector.unregister(key.fileobj)
        lines = []
        for place, received in enumerate(self._received):
            line, _, self._received[place] = received.partition(b"\n")
            lines.append(line)
        return lines

    def _read(self, place: int) -> bytes:
        try:
            data = self._sockets[place].recv(2**16)
        except OSError:
            data = b""
        if not data:
            raise errors.process_ended(self._other(place))
        return data

    def _other(self, place: int) -> str:
        """Return the process at the other end of a connection, for a sentence."""
        return self.named(0 if self.index else place + 1)


def open_group() -> ProcessGroup:
    """Open the group of all processes; all call it, and close it. Raises `ProcessError`."""
    return ProcessGroup() if jax.process_count() == 1 else _connected()


def _connected() -> ProcessGroup:
    """Connect every process with process 0.

    Where it listens, and a secret that only this gang knows, are broadcast over the devices.
    """
    index, count = jax.process_index(), jax.process_count()
    if index:
        host, port, token = _broadcast(None)
        try:
            connection = socket.create_connection((host, port), timeout=CONNECT_SECONDS)
            connection.sendall(f"{token} {index}\n".encode())
        except OSError as error:
            raise errors.ProcessError(
                f"process 0 could not be reached at {host}:{port}: {error}. The hosts must reach "
                "each other at all ports."
            ) from None
        _prepare(connection, ROUND_SECONDS)
        return ProcessGroup(index, [connection])
    host, token = _own_address(), secrets.token_hex(16)
    with socket.create_server((host, 0), backlog=count) as server:
        _broadcast((host, server.getsockname()[1], token))
        return ProcessGroup(0, _accepted(server, token, count))


def _accepted(server: socket.socket, token: str, count: int) -> list[socket.socket]:
    """Return a connection of each other process, in their order."""
    connections: dict[int, socket.socket] = {}
    deadline = time.monotonic() + CONNECT_SECONDS
    while len(connections) < count - 1:
        try:
            server.settimeout(max(0.0, deadline - time.monotonic()))
            connection, _ = server.accept()
        except OSError:
            for other in connections.values():
                other.close()
            missing = sorted(set(range(1, count)) - set(connections))
            raise errors.ProcessError(
                f"process {', '.join(map(str, missing))} did not connect within "
                f"{CONNECT_SECONDS:.0f} s. The hosts must reach each other at all ports."
            ) from None
        process = _announced(connection, token)
        if process is None:  # a stranger
            connection.close()
        else:
            _prepare(connection, ROUND_SECONDS)
            connections[process] = connection
    return [connections[process] for process in range(1, count)]


def _announced(connection: socket.socket, token: str) -> int | None:
    """Return which process has connected; None for one that does not say the gang's secret."""
    _prepare(connection, TOKEN_SECONDS)
    line = b""
    with contextlib.suppress(OSError):
        while not line.endswith(b"\n") and len(line) < 100 and (byte := connection.recv(1)):
            line += byte
    given, _, process = line.partition(b" ")
    return int(process) if secrets.compare_digest(given, token.encode()) else None


def _prepare(connection: socket.socket, seconds: float) -> None:
    connection.settimeout(seconds)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _broadcast(address: tuple[str, int, str] | None) -> tuple[str, int, str]:
    """Return what process 0 gives."""
    text = np.zeros(256, np.uint8)
    if address is not None:
        encoded = json.dumps(address).encode()
        text[: len(encoded)] = list(encoded)
    text = np.asarray(multihost_utils.broadcast_one_to_all(text), np.uint8)
    host, port, token = json.loads(bytes(text).rstrip(b"\0"))
    return host, port, token


def _own_address() -> str:
    """Return this host's address, as others reach it: process 0's is that of the coordinator."""
    gang = gang_of()
    if gang is not None:
        return gang.address[0]
    probe = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with probe, contextlib.suppress(OSError):
        probe.connect(("192.0.2.1", 9))  # sends nothing: only looks up the route
        return str(probe.getsockname()[0])
    return "127.0.0.1"


# --- Errors of one process, in the others -------------------------------------------------------


def _described(error: Exception | None) -> tuple[str, str] | None:
    return None if error is None else (type(error).__name__, str(error))


def _raised(kind: str, text: str, who: str, in_text: bool = False) -> Exception:
    """Return the error of a process; `in_text`: an error of plurax says too whose it is."""
    kinds = {error.__name__: error for error in _subclasses(errors.PluraxError)}
    if kind not in kinds:
        return errors.ProcessError(f"{who} failed, so all of them stop: {kind}: {text}")
    return kinds[kind](f"{who}: {text}" if in_text else text)


def _subclasses(kind: type[Exception]) -> list[type[Exception]]:
    return [kind, *(each for child in kind.__subclasses__() for each in _subclasses(child))]
