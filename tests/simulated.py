"""Workers and servers in one thread, in an order that a seed decides.

Each call waits in its actor's queue; whenever the coordinator waits, one actor is drawn and answers
its next call. So a seed is an interleaving, and the same seed gives the same one: a fault that one
run in a thousand has can be found, and had again. Time passes only here: 10 ms a call. What a
method is given is overwritten once it has returned.

    queues      worker 0: gradients    server 0: push, pull    server 1: pull
    drawn       server 1               pull is answered
    drawn       worker 0               not yet: server 0 has not answered its pull
"""

import pickle
import weakref
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import Any

import numpy as np

from plurax.server.messages import Pulled
from plurax.server.thread_transport import answer, give
from plurax.server.transport import Actor, ActorGoneError, ResultLostError, Transport

SECONDS_PER_CALL = 0.01


class Simulated(Transport):
    """Runs workers and servers in turns, drawn at random.

    Each is on a machine of its own, where the parameters, gradients and states lie that it returns;
    other results travel with its answer.

    **Arguments:** `seed`; `fault`, called with the transport before each turn: it may `kill`,
    `stall` or `resume`.

    **Attributes:** `turns`, how many there were; `actors`, those that live, by name.
    """

    def __init__(
        self, seed: int, fault: Callable[["Simulated"], None] = lambda transport: None
    ) -> None:
        self.random, self._fault = np.random.default_rng(seed), fault
        self.turns, self._idle = 0, 0.0
        self.actors: dict[str, Actor] = {}
        self._stalled: dict[str, float] = {}

    def now(self) -> float:
        """Return the seconds that have passed in the simulation."""
        return self.turns * SECONDS_PER_CALL + self._idle

    def start(self, name: str, make: Callable[..., Any], *args: Any, devices: int) -> Actor:
        """Start the object `make(*args)`; it is made at its first call."""
        values = [_there(one.result()) if isinstance(one, Future) else one for one in args]
        actor = Actor(name, _CallQueue(lambda: make(*values)))
        self.actors[name] = actor
        self._stalled.pop(name, None)
        return actor

    def call(
        self, actor: Actor, method: str, *args: Any, returns: int = 1, lasting: bool = False
    ) -> list[Any]:
        """Put a call into an actor's queue; return a future of each of its results."""
        results: list[Future[Any]] = [Future() for _ in range(returns)]
        if actor.handle.ended:
            give(results, error=ActorGoneError(actor.name))
        else:
            actor.handle.calls.append((method, args, results, lasting))
        return results

    def put(self, value: Any) -> Any:
        """Return the value."""
        return value

    def wait(self, references: Collection[Any], seconds: float) -> list[Any]:
        """Let actors take turns until one of these is there; return one of them."""
        until = self.now() + seconds
        while True:
            done = [reference for reference in references if reference.done()]
            if done:
                return [done[self.random.integers(len(done))]]
            if self.now() >= until:
                return []
            self._fault(self)
            if not any(reference.done() for reference in references):
                self._turn()

    def _turn(self) -> None:
        ready = [
            actor
            for name, actor in sorted(self.actors.items())
            if actor.handle.ready() and name not in self._stalled
        ]
        if not ready:
            if not self._stalled:
                raise AssertionError(f"nobody can take a turn, after {self.turns}")
            self._idle += 1.0
            return
        self.turns += 1
        ready[self.random.integers(len(ready))].handle.answer()

    def get(self, reference: Any) -> Any:
        """Return a result. Raises `ActorGoneError`, or what the method raised."""
        if not reference.done():
            raise AssertionError("nobody takes a turn while the coordinator gets a result")
        return _there(reference.result())

    def kill(self, name: str, machine: bool = False) -> None:
        """End an actor, if it lives: what it has not answered fails.

        With its `machine`, what is stored there is lost.
        """
        actor = self.actors.pop(name, None)
        if actor is not None:
            for one in actor.handle.large if machine else ():
                one.lost = True
            self._stalled.pop(name, None)
            actor.handle.end(name)

    def stall(self, name: str) -> None:
        """Let an actor take no turn until `resume`."""
        if name in self.actors:
            self._stalled.setdefault(name, self.now())

    def resume(self, name: str) -> None:
        """Let an actor take turns again."""
        self._stalled.pop(name, None)

    def stop(self, actor: Actor) -> None:
        """End an actor at once; calls that it has not answered fail."""
        actor.handle.end(actor.name)
        if self.actors.get(actor.name) is actor:
            self.actors.pop(actor.name)
            self._stalled.pop(actor.name, None)

    def silent(self, actors: Collection[Actor], seconds: float) -> list[Actor]:
        """Return those that are stalled for so long."""
        found = [a for a in actors if self.now() - self._stalled.get(a.name, np.inf) > seconds]
        return [actor for actor in found if self.actors.get(actor.name) is actor]

    def close(self) -> None:
        """End all."""
        self.actors.clear()


class _CallQueue:
    """An object and the calls that wait for it."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make, self._made = make, None
        self.calls: deque[Any] = deque()
        self.large: weakref.WeakSet[_Large] = weakref.WeakSet()
        self.ended = False

    def ready(self) -> bool:
        """Return whether the next call has all its arguments."""
        return bool(self.calls) and all(
            argument.done() for argument in self.calls[0][1] if isinstance(argument, Future)
        )

    def answer(self) -> None:
        """Answer the next call."""
        method, args, results, lasting = self.calls.popleft()
        if self._made is None:
            self._made = self._make()

        def called(*args: Any) -> Any:
            found = _lent(getattr(self._made, method), tuple(map(_there, args)))
            one = len(results) == 1
            kept = [self._kept(value, lasting) for value in ([found] if one else found)]
            return kept[0] if one else kept

        answer(called, args, results)

    def _kept(self, value: Any, lasting: bool) -> Any:
        """Return what a result is while it is on its way."""
        if lasting or not isinstance(value, tuple | Pulled):
            return value
        large = _Large(value)
        self.large.add(large)
        return large

    def end(self, name: str) -> None:
        """Fail all calls."""
        self.ended = True
        while self.calls:
            give(self.calls.popleft()[2], error=ActorGoneError(name))


class _Large:
    """A result that is stored on the machine of its actor."""

    def __init__(self, value: Any) -> None:
        self.value, self.lost = value, False


def _there(result: Any) -> Any:
    """Return a result. Raises `ResultLostError` for one that is lost."""
    if not isinstance(result, _Large):
        return result
    if result.lost:
        raise ResultLostError
    return result.value


def _lent(method: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Call a method with arrays that are its own until it returns, as other transports lend."""
    buffers: list[pickle.PickleBuffer] = []
    content = pickle.dumps(args, 5, buffer_callback=buffers.append)
    memory = [_aligned(buffer.raw()) for buffer in buffers]
    try:
        return method(*pickle.loads(content, buffers=memory))
    finally:
        for one in memory:
            one.fill(255)


def _aligned(content: memoryview) -> np.ndarray:
    """Return a copy that JAX would use as it is."""
    memory = np.empty(content.nbytes + 64, np.uint8)
    first = -memory.ctypes.data % 64
    memory[first : first + content.nbytes] = content
    return memory[first : first + content.nbytes]
