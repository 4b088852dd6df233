"""What a launcher says of what happens: a line of JSON in a file, one to read in the terminal."""

import contextlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from plurax.terminal import printable


class Events:
    """Writes events.

    **Arguments:** `path`, a file that is appended to, or None; `stream`, where the readable lines
    go; `now`, seconds since 1970.
    """

    def __init__(
        self,
        path: Path | None,
        stream: TextIO | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._path, self._stream, self._now = path, stream or sys.stderr, now
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, event: str, sentence: str | None = None, /, **fields: Any) -> None:
        """Write an event: its name and fields, and a sentence for the terminal if there is one."""
        row = {"time": round(self._now(), 3), "event": event, **fields}
        if self._path is not None:
            # A full disk ends no run.
            with contextlib.suppress(OSError), self._path.open("a") as file:
                file.write(json.dumps(row) + "\n")
        if sentence is not None:
            with contextlib.suppress(OSError):  # a closed pipe, or a terminal that hung up
                print(printable(f"plurax launch: {sentence}"), file=self._stream, flush=True)
