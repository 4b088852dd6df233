"""A watchdog: it ends a process that is stuck, and says where it hangs.

A rank that waits for ever, in a collective, a lock, a reader of data, holds all others. `fit` says
what it begins (`work`, `watch`), and a thread looks every fifth of a second how long that has
taken. The limit of a step is 20 times the median of the steps before, and at least `TIMEOUTS.step`:

    steps of 0.1 s    limit 180 s                         the least
    steps of 20 s     limit 400 s                         20 times the median
    the first one     limit 1500 s                        it compiles
    later ones        at least 3 times the first          another shape of batch compiles anew

Those that only wait for a process behind them, on the same host, let that one go first.

Past its limit the stacks of all threads are written to stderr, the process is named, and it ends
with the exit code STUCK, for a launcher to restart the gang. Only time in which this process could
run counts: one that was suspended (Ctrl-Z, a laptop that sleeps) is not stuck. A process that holds
the GIL cannot be ended from within; its launcher sees its status grow old, and sends SIGABRT, upon
which `faulthandler` writes the stacks without the GIL.

What this costs a step: two reads of a clock and a few writes of attributes.
"""

import contextlib
import dataclasses
import faulthandler
import os
import socket
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, Protocol, TypeVar

from plurax.distributed.environment import gang_of, status_folder, watchdog_seconds
from plurax.exit_codes import ExitCode
from plurax.guards.status import Phase, Status, StatusFile
from plurax.loop.hook import CallsHook
from plurax.loop.iterate import StepOutput
from plurax.loop.run import Run
from plurax.timeouts import TIMEOUTS

FACTOR = 20
"""A step is stuck after so many times the median of those before."""

FIRST_FACTOR = 3
"""... and not before so many times the first, which compiled, as a later one may."""

REMEMBERED = 101
"""Steps of which the median is taken."""

ASLEEP = 10
"""A look that comes later than after so many intervals has found the process suspended."""


class Item(Protocol):
    """What the training loop yields: the number of the last step that was taken."""

    @property
    def step(self) -> int:
        """Its number."""


FIRST_TO_OTHERS = TIMEOUTS.slack + 2 * TIMEOUTS.abort + 10 * TIMEOUTS.look
"""Seconds after the deadline of a process behind that one waits for its end."""

T = TypeVar("T", bound=Item)


@dataclasses.dataclass(frozen=True)
class WatchdogLimits:
    """Seconds that a piece of work may take, and between two looks. See `Timeouts`."""

    look: float = TIMEOUTS.look
    step: float = TIMEOUTS.step
    longest_step: float = TIMEOUTS.longest_step
    long_work: float = TIMEOUTS.long_work


class _TimedWork(NamedTuple):
    """A piece of work: what it is, when it began, and how long the process had slept by then."""

    phase: Phase
    began: float
    slept: float


class Watchdog:
    """Ends this process when a piece of work takes longer than its limit. Use as a context manager.

    **Arguments:**

    - `enabled`: whether it ends anything; else `work` and `watch` only pass on.
    - `status`: where to write what this process does, or None.
    - `process`: this process's index, to name it.
    - `limits`: of pieces of work.
    - `clock`, `end`: the monotonic clock, and what ends the process with an exit code.

    **Attributes:** `step`, the last step that was finished.
    """

    def __init__(
        self,
        *,
        enabled: bool = True,
        status: StatusFile | None = None,
        process: int = 0,
        limits: WatchdogLimits = WatchdogLimits(),
        clock: Callable[[], float] = time.monotonic,
        end: Callable[[int], object] = os._exit,
    ) -> None:
        self.enabled, self.step = enabled, 0
        self._status, self._process, self._limits = status, process, limits
        self._clock, self._end = clock, end
        self._saved: Callable[[], int | None] = _nothing
        self._durations: dict[Phase, deque[float]] = {}
        self._first: dict[Phase, float] = {}
        self._slept, self._looked = 0.0, clock()
        self._behind: dict[int, int] = {}
        self._until = 0.0
        self._work: _TimedWork | None = None
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    @classmethod
    def of_gang(
        cls, processes: int, process: int, environment: Mapping[str, str] = os.environ
    ) -> "Watchdog":
        """Return the watchdog of one of several processes, or of one that has a launcher.

        A process alone is not ended: whoever has started it sees it hang, may have stopped it, and
        nobody would start it again. `PLURAX_WATCHDOG` in the environment is the least limit of a
        step in seconds; 0 turns the watchdog off. Raises `ProcessError` for another text in it.
        """
        gang, folder = gang_of(environment), status_folder(environment)
        process = gang.process if gang else process  # they may train alone, each
        status = None if folder is None else StatusFile(folder, process)
        given = watchdog_seconds(environment)
        least = WatchdogLimits.step if given is None else given
        return cls(
            enabled=least > 0 and (processes > 1 or status is not None),
            status=status,
            process=process,
            limits=WatchdogLimits(step=least, long_work=max(least, WatchdogLimits.long_work)),
        )

    def __enter__(self) -> "Watchdog":
        if self.enabled or self._status is not None:
            with contextlib.suppress(OSError, ValueError, AttributeError):  # stderr is no file
                if not faulthandler.is_enabled():
                    faulthandler.enable()
            self._begin("start")
            self.look()
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread is not None:
            self._over.set()
            self._thread.join()
            self._work = None
            self._write_status()

    # --- What the training loop begins and ends -----------------------------------------------

    @contextlib.contextmanager
    def work(self, phase: Phase) -> Iterator[None]:
        """Watch a piece of work; what was watched before begins anew after it."""
        if self._thread is None:
            yield
            return
        before = self._work
        self._begin(phase)
        try:
            yield
            self._done()
        finally:
            self._begin(before.phase if before else "wait")

    def watch(
        self, items: Iterator[T], saved: Callable[[], int | None] | None = None
    ) -> Iterator[T]:
        """Yield the items of the training loop; each until the next is one step to watch.

        **Arguments:** `saved`, which returns the newest checkpoint; a thread calls it.
        """
        if self._thread is None:
            yield from items
            return
        self._saved = saved or self._saved
        self._begin("compile")
        try:
            for item in items:
                self._done()
                self.step = item.step
                self._begin("step")
                yield item
        finally:
            self._begin("save")  # what is left to write

    def _begin(self, phase: Phase) -> None:
        self._work = work = _TimedWork(phase, self._clock(), self._slept)
        written = (self._status and self._status.deadline) or 0.0
        # The thread writes the status. What has been written of longer work, such as to compile,
        # must not stand while this hangs in a way that keeps the thread from looking.
        slack = TIMEOUTS.slack
        sooner = written > work.began + self._limits.longest_step + slack
        if sooner and written > self._limit_passes(work) + slack:
            self._write_status()

    def _done(self) -> None:
        """Remember how long the piece of work took that is done now."""
        work = self._work
        assert work is not None
        seconds = self._clock() - work.began - (self._slept - work.slept)
        phase = work.phase
        if phase not in self._first:
            self._first[phase] = seconds
            self._durations[phase] = deque(maxlen=REMEMBERED)
        else:
            self._durations[phase].append(seconds)

    # --- The thread ---------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._over.wait(self._limits.look):
            self.look()

    def look(self) -> None:
        """Look once: write the status, and end the process if it is stuck."""
        now, work = self._clock(), self._work
        between, self._looked = now - self._looked, now
        if between > ASLEEP * self._limits.look:
            self._slept += between
        if self.enabled and work is not None:
            limit = self._limit_passes(work)
            self._behind, others_until = self._find_behind() if now > limit else ({}, 0.0)
            # One that waits for a process of this host lets that one end first, or be ended by the
            # launcher, which then names the right one.
            self._until = max(limit, others_until)
            if now > self._until:
                self._end_process(work.phase, now - limit + self.limit(work.phase))
        self._write_status()

    def _limit_passes(self, work: _TimedWork) -> float:
        """Return when a piece of work will have taken longer than its limit."""
        return work.began + (self._slept - work.slept) + self.limit(work.phase)

    def limit(self, phase: Phase) -> float:
        """Return the seconds that a piece of work may take."""
        limits = self._limits
        before = list(self._durations.get(phase, ()))
        if phase in ("start", "compile", "save") or not before:
            return limits.long_work
        usual = FACTOR * statistics.median(before)
        first = FIRST_FACTOR * max(self._first[phase], self._first.get("compile", 0.0))
        return max(limits.step, min(usual, limits.longest_step), min(first, limits.long_work))

    def _write_status(self) -> None:
        if self._status is None:
            return
        work, deadline = self._work, None
        if work is not None and self.enabled:
            deadline = max(self._limit_passes(work), self._until if self._behind else 0.0)
        phase = work.phase if work else "wait"
        self._status.write(Status(phase, self.step, self._saved(), deadline))

    def _end_process(self, phase: Phase, seconds: float) -> None:
        """Write where this process hangs, and end it."""
        text = (
            f"process {self._process} (pid {os.getpid()} on {socket.gethostname()}) is stuck: "
            f"{WORK[phase]} after step {self.step} has taken {seconds:.0f} s, and its limit is "
            f"{self.limit(phase):.0f} s"
        )
        behind = ", ".join(f"{process} (step {step})" for process, step in self._behind.items())
        text += f". Behind it, and more likely the cause: process {behind}" if behind else ""
        with contextlib.suppress(Exception):  # nothing may keep it from ending
            print(f"\nplurax: {text}. Its threads:", file=sys.stderr, flush=True)
            faulthandler.dump_traceback(all_threads=True)
        self._over.set()
        self._end(ExitCode.STUCK)

    def _find_behind(self) -> tuple[dict[int, int], float]:
        """Return the processes of this host that are behind, with their steps, and when the last
        of them will have been ended."""
        others = {} if self._status is None else self._status.others()
        steps = {process: one.get("step", 0) for process, one in others.items()}
        last = min(steps.values(), default=self.step)
        behind = {process: step for process, step in steps.items() if step == last < self.step}
        deadlines = [others[process].get("deadline") or 0.0 for process in behind]
        return behind, max(deadlines, default=0.0) + FIRST_TO_OTHERS


class WatchedCalls(CallsHook):
    """Lets a watchdog watch the calls of the training loop.

    **Arguments:** `newest`, which returns the newest checkpoint; a thread calls it.
    """

    def __init__(self, watchdog: Watchdog, newest: Callable[[], int | None]) -> None:
        self._watchdog, self._newest = watchdog, newest

    def on_calls(self, run: Run, calls: Iterator[StepOutput]) -> Iterator[StepOutput]:
        """Yield the calls; each until the next is one step to watch."""
        return self._watchdog.watch(calls, self._newest)


WORK: Mapping[Phase, str] = {
    "start": "the start",
    "compile": "the first step, with its compilation,",
    "step": "a step",
    "evaluate": "an evaluation",
    "save": "a save",
    "wait": "waiting for data",
}
"""What a phase is called in a sentence."""


def _nothing() -> None:
    """Return that nothing is saved yet."""
