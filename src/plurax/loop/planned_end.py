"""End training before its last epoch: by a signal, or as planned.

Planned is the end after a number of steps, after a time, or as a callback asks. All processes end
after the same step: what one of them finds, by its own clock, counts for all.
"""

import math
import time
from collections.abc import Callable
from numbers import Real
from typing import Any, NamedTuple

from plurax import errors
from plurax.loop.call_hooks import Callbacks
from plurax.loop.run import Run
from plurax.validate import whole_number


class Ending(NamedTuple):
    """Why training ends, in all processes alike; both None to go on.

    **Fields:** `signal`, its name; `planned`, the reason.
    """

    signal: str | None
    planned: str | None


class PlannedEnd:
    """When a run is to end before its last epoch, and where its loop has to look.

    **Arguments:** `max_steps` and `max_seconds`, None for no limit; `signal`, which returns the
    signal that this process has got; `clock`, in seconds.
    """

    def __init__(
        self,
        max_steps: int | None,
        max_seconds: float | None,
        callbacks: Callbacks,
        run: Run,
        signal: Callable[[], str | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_steps, self._max_seconds, self._callbacks = max_steps, max_seconds, callbacks
        self._run, self._signal, self._clock, self._began = run, signal, clock, clock()

    def next_stop(self, step: int) -> int | None:
        """Return the first step after `step` at whose end the loop has to look."""
        limit = self._max_steps if self._max_steps and self._max_steps > step else None
        return min(filter(None, (limit, self._callbacks.next_stop(step))), default=None)

    def stopping(self) -> bool:
        """Return whether this process wants training to end; data are not waited for then."""
        return self._signalled() is not None or self._is_over()

    def agree(self, *, ready: bool = True) -> Ending:
        """Return why training ends after this step, in all processes alike.

        Where this one is not `ready`, it asks for nothing.
        """
        run = self._run
        asked = (self._signalled(), run.stopped if self._is_over() else None)
        answers = run.group.all_gather(asked if ready else (None, None))
        signal, planned = (next(filter(None, each), None) for each in zip(*answers, strict=True))
        run.stopped = run.stopped or planned
        return Ending(signal, planned)

    def _signalled(self) -> str | None:
        return self._run.interrupted or self._signal()

    def _is_over(self) -> bool:
        run, limit = self._run, self._max_seconds
        if self._max_steps is not None and run.step >= self._max_steps:
            run.stop(f"max_steps={self._max_steps}")
        if limit is not None and self._clock() - self._began >= limit:
            run.stop(f"max_seconds={limit:g}")
        return run.stopped is not None


def check_limits(max_steps: Any, max_seconds: Any, fast_dev_run: Any) -> tuple[int | None, int]:
    """Return the limit of steps, and the steps of a fast development run or 0.

    Raises `TaskError` for others.
    """
    steps = None if max_steps is None else whole_number(max_steps)
    if max_steps is not None and steps is None:
        raise errors.TaskError(
            f"fit(max_steps={max_steps!r}): give a whole number ≥ 1, or None for no limit."
        )
    if max_seconds is not None and not _is_positive(max_seconds):
        raise errors.TaskError(
            f"fit(max_seconds={max_seconds!r}): give a number > 0, or None for no limit."
        )
    few = 1 if fast_dev_run is True else whole_number(fast_dev_run or 0, least=0)
    if few is None:
        raise errors.TaskError(
            f"fit(fast_dev_run={fast_dev_run!r}): give a number of steps, True for one, or 0 for a "
            "whole run."
        )
    return steps, few


def _is_positive(number: Any) -> bool:
    numeric = isinstance(number, Real) and number is not True
    return numeric and 0 < float(number) < math.inf
