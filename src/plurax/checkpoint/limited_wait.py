"""Wait for a limited time for a function that blocks, and has no limit of its own.

Orbax's `wait_until_finished` returns when a save is on disk, however long that takes. Here it is
called on a thread, which sets an event when it has returned or raised:

    waiting = LimitedWait(manager.wait_until_finished)
    waiting.is_over(0.0)      False: the save is being written
    waiting.is_over(5.0)      True, as soon as it is on disk
    waiting.result()          raises what the function has raised

The thread is a daemon: a disk that does not answer keeps no process alive.
"""

import threading
from collections.abc import Callable


class LimitedWait:
    """A call of `function` on a thread of its own, begun at once."""

    def __init__(self, function: Callable[[], object]) -> None:
        self._function = function
        self._over = threading.Event()
        self._error: BaseException | None = None
        threading.Thread(target=self._run, name="plurax-wait", daemon=True).start()

    def _run(self) -> None:
        try:
            self._function()
        except BaseException as error:
            self._error = error
        finally:
            self._over.set()

    def is_over(self, seconds: float = 0.0) -> bool:
        """Return whether the function has returned or raised, `seconds` from now at the latest."""
        return self._over.wait(seconds)

    def result(self) -> None:
        """Wait without a limit, and raise what the function raised."""
        self._over.wait()
        if self._error is not None:
            raise self._error
