"""Show training progress: a live bar on a terminal, plain lines elsewhere."""

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:  # Rich is imported when there is something to show
    from rich.console import Console
    from rich.progress import Progress

T = TypeVar("T")

SECONDS_BETWEEN_LINES = 10.0
HIDDEN = {"kind", "step", "epoch", "seconds", "examples_per_second", "weight", "examples",
          "grad_norm", "skipped"}  # fmt: skip


class TrainingProgress:
    """Shows steps, metrics, throughput and remaining time. Use as a context manager.

    **Arguments:**

    - `epochs`: in the whole run; `steps`: in the whole run, None where unknown.
    - `done`: steps taken before (a resumed run).
    - `show`: False shows nothing.
    """

    def __init__(
        self,
        epochs: int,
        steps: int | None,
        done: int,
        show: bool,
        console: "Console | None" = None,
    ) -> None:
        self._console = console or new_console()
        self._epochs = epochs
        self._steps = steps
        self._show = show
        self._started: float | None = None
        self._first = done
        self._last_line = time.monotonic()
        self.closed = False
        self._bar: "Progress | None" = None
        if show and self._console.is_terminal:
            self._bar = _new_bar(self._console)
            self._task = self._bar.add_task("training", total=steps, completed=done, text="")

    def __enter__(self) -> "TrainingProgress":
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def advance(self, step: int, epoch: int, summary: str, examples_per_second: float) -> None:
        """Show that training has reached `step`; `summary` is empty until metrics are fetched."""
        if self._started is None:
            # Start after the first call: the time of compiling does not predict the steps to come.
            self._started, self._first = time.monotonic(), step
        text = f"{summary}  {examples_per_second:,.0f} examples/s" if summary else ""
        if self._bar:
            text += self._remaining(step)
            self._bar.update(
                self._task,
                completed=step,
                text=text,
                description=f"epoch {epoch + 1}/{self._epochs}",
            )
            return
        now = time.monotonic()
        if self._show and now - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = now
            total = f"/{self._steps}" if self._steps else ""
            left = self._remaining(step)
            self._print(f"  step {step}{total}  {text}{left}")

    def epoch(self, row: Mapping[str, Any]) -> None:
        """Print the log row of a finished epoch."""
        self._last_line = time.monotonic()
        width = len(str(self._epochs))
        parts = [f"epoch {row['epoch']:>{width}}/{self._epochs}"]
        parts += [" ".join(item) for item in shown_values(row).items()]
        parts.append(f"{row['examples_per_second']:,.0f} examples/s")
        if row.get("skipped"):
            what = "members frozen" if "members" in row else "updates skipped"
            parts.append(f"{row['skipped']} {what} (not finite)")
        # On a terminal the bar shows the remaining time.
        self._print("  ".join(parts) + ("" if self._bar else self._remaining(row["step"])))

    @contextlib.contextmanager
    def compiling(self, what: str) -> Iterator[None]:
        """Show that `what` is being compiled, and for how long (on a terminal by a clock)."""
        began = time.monotonic()
        if not self._bar:
            self._print(f"compiling {what}")
            yield
            self._print(f"compiled in {time.monotonic() - began:.1f} s")
            return
        task = self._bar.add_task(f"compiling {what}", total=None, text="")
        self._bar.update(self._task, visible=False)
        try:
            yield
        finally:
            self._bar.remove_task(task)
            self._bar.update(self._task, visible=True)

    def compiled(self, calls: Iterator[T], what: str) -> Iterator[T]:
        """Yield the items of a training loop, showing that the first one compiles."""
        end = object()
        with self.compiling(what):
            first = next(calls, end)
        if first is not end:
            yield first  # type: ignore[misc]
        yield from calls

    def note(self, text: str) -> None:
        """Print a line for the user."""
        self._print(text)

    def _print(self, text: str) -> None:
        if not self._show:
            return
        try:
            (self._bar.console if self._bar else self._console).print(text)
        except (BrokenPipeError, SystemExit):  # Rich turns a broken pipe into an exit
            # The reader has closed the pipe (`| head -1`). Stop printing, so that training can
            # save.
            self.closed, self._show = True, False

    def _remaining(self, step: int) -> str:
        if not self._steps or self._started is None or not self._first < step < self._steps:
            return ""
        per_step = (time.monotonic() - self._started) / (step - self._first)
        seconds = round(per_step * (self._steps - step))
        minutes, seconds = divmod(seconds, 60)
        hours, minutes = divmod(minutes, 60)
        clock = f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
        return f"  {clock} left"


def shown_values(row: Mapping[str, Any]) -> dict[str, str]:
    """Return what is shown of a row of an epoch, by name: losses and metrics."""
    return {
        name.replace("_", " "): f"{value:.4f}{_ends(row, name)}"
        for name, value in row.items()
        if name not in HIDDEN
        and isinstance(value, float)
        and not name.endswith(("_best", "_worst"))
    }


def new_console(show: bool = True) -> "Console":
    """Return the console for lines of progress; without `show` it prints nothing."""
    from plurax.console import PlainConsole

    return PlainConsole(quiet=not show)


def _new_bar(console: "Console") -> "Progress":
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    return Progress(
        TextColumn("{task.description}", style="bold", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[text]}", markup=False),
        TimeElapsedColumn(),
        console=console,
    )


def _ends(row: Mapping[str, Any], name: str) -> str:
    """Return the range from the best to the worst member as text, if `row` has both."""
    if f"{name}_best" not in row:
        return ""
    return f" ({row[f'{name}_best']:.4f} to {row[f'{name}_worst']:.4f})"
