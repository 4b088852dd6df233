"""How the coordinator calls workers and servers, wherever they are.

A worker or a server is an object whose methods are called one after the other, in the order in
which the coordinator calls them. A call returns at once, with references to its results; a result
that is there may be handed to another call, and goes from one to the other without passing the
coordinator:

    pulled = [transport.call(shard, "pull", 0, 7, returns=2)[1] for shard in shards]
    header, *content = transport.call(worker, "gradients", ticket, 7, *pulled, returns=3)
    transport.wait([header])                        # until one of them is there
    replies = [transport.call(shard, "push", transport.get(header), part)[0]
               for shard, part in zip(shards, content)]

Since all calls come from one place, all servers see pulls and pushes in the same order: what a
worker pulls is the same version of every shard.
"""

import abc
import dataclasses
import time
from collections.abc import Callable, Collection
from typing import Any


class ActorGoneError(Exception):
    """A worker or a server ended before it answered."""


class ResultLostError(Exception):
    """A result is gone with the machine on which it was."""


@dataclasses.dataclass(frozen=True, eq=False)
class Actor:
    """A worker or a server.

    **Fields:** `name`, such as `worker 2`; `handle`, what the transport knows it by.
    """

    name: str
    handle: Any


class Transport(abc.ABC):
    """Starts workers and servers, and calls them."""

    @abc.abstractmethod
    def start(self, name: str, make: Callable[..., Any], *args: Any, devices: int) -> Actor:
        """Start the object `make(*args)` with some devices of its own; 0 of a server."""

    @abc.abstractmethod
    def call(
        self, actor: Actor, method: str, *args: Any, returns: int = 1, lasting: bool = False
    ) -> list[Any]:
        """Call a method, at the latest at the next `wait`; return a reference to each result.

        Arguments may be references; their arrays are the method's until it returns. The method
        returns a tuple where `returns` is more than 1. `lasting` results outlive its process.
        """

    @abc.abstractmethod
    def put(self, value: Any) -> Any:
        """Return a reference to a value that several calls are given."""

    @abc.abstractmethod
    def wait(self, references: Collection[Any], seconds: float) -> list[Any]:
        """Return those that have a result or an error, once there is one or the time is over."""

    @abc.abstractmethod
    def get(self, reference: Any) -> Any:
        """Return a result.

        Raises `ActorGoneError`, `ResultLostError`, or what the method raised.
        """

    @abc.abstractmethod
    def stop(self, actor: Actor) -> None:
        """End a worker or a server at once; calls that it has not answered fail."""

    @abc.abstractmethod
    def silent(self, actors: Collection[Actor], seconds: float) -> list[Actor]:
        """Return those that have not shown for so long that they live, on the monotonic clock."""

    def now(self) -> float:
        """Return seconds on the monotonic clock."""
        return time.monotonic()

    @abc.abstractmethod
    def close(self) -> None:
        """End all."""
