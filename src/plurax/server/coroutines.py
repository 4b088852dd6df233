"""Coroutines that wait for results of calls, and go on in the order in which these arrive.

A call of a worker or a server returns at once (`plurax.server.transport`). What is to be done with
its answer is the rest of a coroutine, which gives up the one thread of the coordinator only where
it says `await`. Example, a push to two servers, of which the second answers first:

    async def push(server):                           coroutines.start(together(map(push, servers)))
        (reference,) = transport.call(server, ...)    both are called
        await arrival(reference)                      coroutines.resume([reference of server 1])
        return transport.get(reference)               server 1's is at its end, server 0's waits
                                                      coroutines.resume([reference of server 0])
    replies = await together(map(push, servers))      [reply of server 0, reply of server 1]

`asyncio` is not used: its loop cannot run where one runs already, as in a notebook; and who waits
here is `Transport.wait`, which is Ray's.
"""

import types
from collections.abc import Collection, Coroutine, Generator, Iterable
from typing import Any, TypeVar

T = TypeVar("T")
Awaiting = Coroutine[Collection[Any], Any, T]
"""It yields the references of which it awaits one, and is sent the one that has arrived."""


class Coroutines:
    """Coroutines that run side by side; after an error of one, none of them is resumed."""

    def __init__(self) -> None:
        self._waiting: dict[Any, Awaiting[Any]] = {}

    @property
    def awaited(self) -> list[Any]:
        """The references that are awaited, the oldest first."""
        return [*self._waiting]

    def start(self, coroutine: Awaiting[Any]) -> None:
        """Run a coroutine up to its first `await`."""
        self._run(coroutine, None)

    def resume(self, arrived: Iterable[Any]) -> None:
        """Go on with the coroutines that await these references."""
        for reference in arrived:
            self._run(self._waiting.pop(reference), reference)

    def _run(self, coroutine: Awaiting[Any], arrived: Any) -> None:
        try:
            awaited = coroutine.send(arrived)
        except StopIteration:
            return
        self._waiting |= dict.fromkeys(awaited, coroutine)


@types.coroutine
def arrival(reference: Any) -> Generator[Collection[Any], Any, Any]:
    """Wait until a result, or an error, is there; return its reference."""
    return (yield (reference,))


@types.coroutine
def together(coroutines: Iterable[Awaiting[T]]) -> Generator[Collection[Any], Any, list[T]]:
    """Run coroutines side by side; return what each returns, once all have ended."""
    running, returned = Coroutines(), dict[int, T]()

    async def run(index: int, coroutine: Awaiting[T]) -> None:
        returned[index] = await coroutine

    for index, coroutine in enumerate(coroutines):
        running.start(run(index, coroutine))
    while running.awaited:
        running.resume([(yield running.awaited)])
    return [returned[index] for index in sorted(returned)]
