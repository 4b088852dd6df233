"""Show training progress: a live bar on a terminal, plain lines elsewhere."""

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from plurax.progress.training_progress import TrainingProgress, shown_values

if TYPE_CHECKING:  # Rich is imported when there is something to show
    from rich.console import Console
    from rich.progress import Progress

SECONDS_BETWEEN_LINES = 10.0


class ConsoleProgress(TrainingProgress):
    """A bar where the console is a terminal, else lines."""

    def __init__(
        self,
        epochs: int,
        steps: int | None,
        done: int,
        show: bool,
        console: "Console | None" = None,
    ) -> None:
        super().__init__(epochs, steps, done, show)
        self._console = console or new_console()
        self._last_line = time.monotonic()
        self._bar: "Progress | None" = None
        if show and self._console.is_terminal:
            self._bar = _new_bar(self._console)
            self._task = self._bar.add_task("training", total=steps, completed=done, text="")

    def __enter__(self) -> "ConsoleProgress":
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def _advance(self, step: int, epoch: str, text: str, remaining: str) -> None:
        if self._bar:
            text += remaining
            self._bar.update(self._task, completed=step, text=text, description=epoch)
            return
        now = time.monotonic()
        if self._show and now - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = now
            total = f"/{self._steps}" if self._steps else ""
            self.note(f"  step {step}{total}  {text}{remaining}")

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
        self.note("  ".join(parts) + ("" if self._bar else self._remaining(row["step"])))

    @contextlib.contextmanager
    def compiling(self, what: str) -> Iterator[None]:
        """Show that `what` is being compiled, and for how long (on a terminal by a clock)."""
        began = time.monotonic()
        if not self._bar:
            self.note(f"compiling {what}")
            yield
            self.note(f"compiled in {time.monotonic() - began:.1f} s")
            return
        task = self._bar.add_task(f"compiling {what}", total=None, text="")
        self._bar.update(self._task, visible=False)
        try:
            yield
        finally:
            self._bar.remove_task(task)
            self._bar.update(self._task, visible=True)

    def note(self, text: str) -> None:
        """Print a line."""
        if not self._show:
            return
        try:
            (self._bar.console if self._bar else self._console).print(text)
        except (BrokenPipeError, SystemExit):  # Rich turns a broken pipe into an exit
            # The reader has closed the pipe (`| head -1`). Stop printing, so that training can
            # save.
            self.closed, self._show = True, False


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
