"""Workers and servers as threads of this process."""

import concurrent.futures
import queue
import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import Any

import jax

from plurax.server.transport import Actor, ActorGoneError, Transport


class Threads(Transport):
    """Runs each worker and server in a thread. They share this process's memory and devices.

    Each worker has devices of its own where there are enough of them.
    """

    def __init__(self) -> None:
        self._actors: list[Actor] = []
        self._taken = 0

    def start(self, name: str, make: Callable[..., Any], *args: Any, devices: int) -> Actor:
        """Start the object `make(*args)` in a thread, a worker with `devices=` of its own."""
        options = {"devices": self._devices(devices)} if devices else {}
        thread = _Thread(name, lambda: make(*args, **options))
        actor = Actor(name, thread)
        self._actors.append(actor)
        return actor

    def _devices(self, count: int) -> list[jax.Device]:
        devices = jax.devices()
        if self._taken + count > len(devices):
            self._taken = 0
        self._taken += count
        return devices[self._taken - count : self._taken]

    def call(
        self, actor: Actor, method: str, *args: Any, returns: int = 1, lasting: bool = False
    ) -> list[Any]:
        """Call a method; return a future of each of its results."""
        return actor.handle.call(method, args, returns)

    def put(self, value: Any) -> Any:
        """Return the value: threads share memory."""
        return value

    def wait(self, references: Collection[Any], seconds: float) -> list[Any]:
        """Return the futures that are done, once there is one or the time is over."""
        done, _ = concurrent.futures.wait(
            references, seconds, return_when=concurrent.futures.FIRST_COMPLETED
        )
        return [reference for reference in references if reference in done]

    def get(self, reference: Any) -> Any:
        """Return a result. Raises `ActorGoneError`, or what the method raised."""
        return reference.result()

    def stop(self, actor: Actor) -> None:
        """End a thread after the call that it computes; those that wait fail."""
        actor.handle.stop()
        self._actors.remove(actor)

    def silent(self, actors: Collection[Actor], seconds: float) -> list[Actor]:
        """Return nothing: a thread does not end by itself."""
        return []

    def close(self) -> None:
        """End all threads."""
        for actor in list(self._actors):
            self.stop(actor)


class _Thread:
    """An object that is made, at its first call, and called in a thread of its own."""

    def __init__(self, name: str, make: Callable[[], Any]) -> None:
        self._calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._stopped = threading.Event()
        # A setting of `with jax.enable_x64()` is one of a thread.
        run = jax.enable_x64(bool(jax.config.read("jax_enable_x64")))(self._run)
        threading.Thread(target=run, args=(make,), name=name, daemon=True).start()

    def call(self, method: str, args: tuple[Any, ...], returns: int) -> list[Future[Any]]:
        results: list[Future[Any]] = [Future() for _ in range(returns)]
        self._calls.put(((method, *args), results))
        return results

    def stop(self) -> None:
        self._stopped.set()
        self._calls.put(None)

    def _run(self, make: Callable[[], Any]) -> None:
        target: Any = None

        def call(method: str, *args: Any) -> Any:
            nonlocal target
            if target is None:
                target = make()
            return getattr(target, method)(*args)

        while (request := self._calls.get()) is not None:
            arguments, results = request
            if self._stopped.is_set():
                give(results, error=ActorGoneError())
            else:
                answer(call, arguments, results)


def answer(fun: Callable[..., Any], args: tuple[Any, ...], results: list[Future[Any]]) -> None:
    """Call a function with arguments of which some are futures, and give its results."""
    try:
        value = fun(*(a.result() if isinstance(a, Future) else a for a in args))
    except BaseException as error:
        give(results, error=error)
    else:
        give(results, value)


def give(results: list[Future[Any]], value: Any = None, error: BaseException | None = None) -> None:
    """Give the results of a call, or the error with which it failed, to their futures."""
    values = [value] if len(results) == 1 or error is not None else list(value)
    for index, result in enumerate(results):
        if error is not None:
            result.set_exception(error)
        else:
            result.set_result(values[index])
