"""Stop training at Ctrl-C and SIGTERM, after a step, in all processes at the same one."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from plurax.distributed.environment import status_folder
from plurax.exit_codes import ExitCode
from plurax.notebook import in_notebook

SAME_SECONDS = 5.0
"""Within which a signal and its copy reach a process that has a launcher."""


class StopSignals:
    """Record Ctrl-C and SIGTERM in `name`; end the process at once at the second signal.

    The name may also be set to the signal of another process, at which all of them end.

    Python runs its signal handlers between two bytecodes, so not while XLA compiles. The C handler
    writes every signal to a pipe, and a thread that reads the pipe ends the process at the second.
    A signal that was ignored when the process began (a background job) stays ignored.

    Slurm sends a signal to every process of a step, and the launcher, which gets it too, passes it
    on. So under a launcher what comes within a short time is one signal. In the kernel of a
    notebook a second signal raises KeyboardInterrupt, as ever, for the kernel has to go on.

    **Arguments:** `launched`, whether this process has a launcher; `clock`; `end`, what ends the
    process.
    """

    def __init__(
        self,
        launched: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
        end: Callable[[int], object] = os._exit,
    ) -> None:
        self.name: str | None = None
        self._launched = status_folder() is not None if launched is None else launched
        self._clock, self._end = clock, end
        self._in_kernel = in_notebook()
        self._before: dict[signal.Signals, Any] = {}
        self._pipe: tuple[int, int] | None = None
        self._woken = -1

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is not threading.main_thread():
            return self
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._note)
        read, write = os.pipe()
        os.set_blocking(write, False)
        self._woken = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        self._pipe = (read, write)
        threading.Thread(target=self._watch, args=(read,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            # None: of C, which Python cannot set again.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if self._pipe is not None:
            signal.set_wakeup_fd(self._woken)
            os.close(self._pipe[1])

    def deliver(self, processes: int) -> None:
        """Give the signal that ended training its usual end, now that all is saved and closed.

        A handler that the caller has set is called, and may return. Without one SIGTERM ends the
        process: by the signal, or, as one of several `processes` or with a launcher, with the
        status that says that it has saved. After a Ctrl-C the caller goes on, with what is trained.
        """
        number = getattr(signal.Signals, self.name or "", None)
        if number not in self._before:
            return
        handler = self._before[number]
        has_own = callable(handler) and handler is not signal.default_int_handler
        if not has_own and number == signal.SIGINT:
            return
        if not has_own and (self._launched or processes > 1):
            raise SystemExit(ExitCode.PREEMPTED)
        sys.stdout.flush()
        sys.stderr.flush()
        signal.raise_signal(number)

    def _note(self, number: int, _frame: object) -> None:
        if self.name is not None:  # only under a launcher; the thread ends this process
            return
        self.name = signal.Signals(number).name
        os.write(2, f"\n{self.name}: stopping after this step; once more ends at once\n".encode())
        for other, before in () if self._launched else self._before.items():
            signal.signal(other, before if self._in_kernel else signal.SIG_DFL)

    def _watch(self, read: int) -> None:
        """Read signals from the pipe on another thread, until its other end is closed."""
        first: float | None = None
        while got := os.read(read, 1):
            if got[0] not in (signal.SIGINT, signal.SIGTERM):
                continue
            if first is None or self._in_kernel:
                first = self._clock()
            elif not self._launched or self._clock() - first > SAME_SECONDS:
                self._end(128 + got[0])
        os.close(read)
