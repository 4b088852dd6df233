"""What training shows while it runs, wherever it is shown."""

import abc
import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Any, Self, TypeVar

T = TypeVar("T")

HIDDEN = {"kind", "step", "epoch", "seconds", "examples_per_second", "weight", "examples",
          "grad_norm", "skipped"}  # fmt: skip


class TrainingProgress(abc.ABC):
    """Shows steps, metrics, throughput and remaining time. Use as a context manager.

    **Arguments:**

    - `epochs`: in the whole run; `steps`: in the whole run, None where unknown.
    - `done`: steps taken before (a resumed run).
    - `show`: False shows nothing.

    **Attributes:** `closed`, whether nobody reads any more what is shown.
    """

    def __init__(self, epochs: int, steps: int | None, done: int, show: bool) -> None:
        self._epochs, self._steps, self._show = epochs, steps, show
        self._started: float | None = None
        self._first = done
        self.closed = False

    @abc.abstractmethod
    def __enter__(self) -> Self: ...

    @abc.abstractmethod
    def __exit__(self, *_: object) -> None: ...

    def advance(self, step: int, epoch: int, summary: str, examples_per_second: float) -> None:
        """Show that training has reached `step`; `summary` is empty until metrics are fetched."""
        if self._started is None:
            # Start after the first call: the time of compiling does not predict the steps to come.
            self._started, self._first = time.monotonic(), step
        text = f"{summary}  {examples_per_second:,.0f} examples/s" if summary else ""
        self._advance(step, f"epoch {epoch + 1}/{self._epochs}", text, self._remaining(step))

    @abc.abstractmethod
    def _advance(self, step: int, epoch: str, text: str, remaining: str) -> None:
        """Show a step; it comes for every call, so what is shown has to be limited."""

    @abc.abstractmethod
    def epoch(self, row: Mapping[str, Any]) -> None:
        """Show the log row of a finished epoch."""

    @abc.abstractmethod
    def compiling(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Show that `what` is being compiled, until the context is left."""

    @abc.abstractmethod
    def note(self, text: str) -> None:
        """Show a line for the user."""

    def compiled(self, calls: Iterator[T], what: str) -> Iterator[T]:
        """Yield the items of a training loop, showing that the first one compiles."""
        end = object()
        with self.compiling(what):
            first = next(calls, end)
        if first is not end:
            yield first  # type: ignore[misc]
        yield from calls

    def _remaining(self, step: int) -> str:
        if not self._steps or self._started is None or not self._first < step < self._steps:
            return ""
        per_step = (time.monotonic() - self._started) / (step - self._first)
        return f"  {clock_text(per_step * (self._steps - step))} left"


def clock_text(seconds: float) -> str:
    """Return a time as a clock shows it, `1:15` or `1:01:15`."""
    minutes, left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{left:02}" if hours else f"{minutes}:{left:02}"


def shown_values(row: Mapping[str, Any]) -> dict[str, str]:
    """Return what is shown of a row of an epoch, by name: losses and metrics."""
    return {
        name.replace("_", " "): f"{value:.4f}{_ends(row, name)}"
        for name, value in row.items()
        if name not in HIDDEN
        and isinstance(value, float)
        and not name.endswith(("_best", "_worst"))
    }


def _ends(row: Mapping[str, Any], name: str) -> str:
    """Return the range from the best to the worst member as text, if `row` has both."""
    best, worst = (row.get(f"{name}_{end}") for end in ("best", "worst"))
    return "" if best is None or worst is None else f" ({best:.4f} to {worst:.4f})"
