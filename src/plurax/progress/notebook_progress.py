"""Show training progress in a notebook: a bar and a table of epochs, updated in place."""

import contextlib
import html
import time
from collections.abc import Iterator, Mapping
from typing import Any

from plurax.notebook import html_table
from plurax.progress.training_progress import TrainingProgress, shown_values

SECONDS_BETWEEN_FRAMES = 0.2
SHOWN_ROWS, SHOWN_NOTES = 20, 10


class NotebookProgress(TrainingProgress):
    """One output of a cell, which replaces itself."""

    def __init__(self, epochs: int, steps: int | None, done: int, show: bool) -> None:
        super().__init__(epochs, steps, done, show)
        self._step, self._line = done, ""
        self._rows: list[dict[str, str]] = []
        self._notes: list[str] = []
        self._handle: Any = None
        self._drawn = 0.0

    def __enter__(self) -> "NotebookProgress":
        self._draw()
        return self

    def __exit__(self, *_: object) -> None:
        self._draw()

    def _advance(self, step: int, epoch: str, text: str, remaining: str) -> None:
        self._step = step
        self._line = f"{epoch}  {text}{remaining}"
        if time.monotonic() - self._drawn >= SECONDS_BETWEEN_FRAMES:
            self._draw()

    def epoch(self, row: Mapping[str, Any]) -> None:
        """Add the log row of a finished epoch to the table."""
        self._step = row["step"]
        self._rows.append({"epoch": f"{row['epoch']}/{self._epochs}", **shown_values(row)})
        self._draw()

    @contextlib.contextmanager
    def compiling(self, what: str) -> Iterator[None]:
        """Show that `what` is being compiled."""
        self._line = f"compiling {what}"
        self._draw()
        try:
            yield
        finally:
            self._line = ""

    def note(self, text: str) -> None:
        """Add a line below the table."""
        self._notes.append(text.strip())
        self._draw()

    def _draw(self) -> None:
        """Show all of it anew, in the place where it was first shown."""
        if not self._show:
            return
        from IPython.display import HTML, display

        self._drawn = time.monotonic()
        page = HTML(self._html())
        if self._handle is None:
            self._handle = display(page, display_id=True)
        else:
            self._handle.update(page)

    def _html(self) -> str:
        total = f"/{self._steps}" if self._steps else ""
        value = f' value="{self._step}" max="{self._steps}"' if self._steps else ""
        parts = [
            f"<progress{value}></progress> step {self._step}{total} &nbsp; "
            f"{html.escape(self._line)}"
        ]
        if self._rows:
            columns = list(self._rows[-1])
            shown = [[row.get(name, "") for name in columns] for row in self._rows[-SHOWN_ROWS:]]
            parts.append(html_table("", columns, shown))
        notes = html.escape("\n".join(self._notes[-SHOWN_NOTES:]))
        parts += [f"<pre>{notes}</pre>"] if notes else []
        return "\n".join(parts)
