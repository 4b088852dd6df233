"""What a process says of itself to its launcher: a file that it replaces, whole, again and again.

The launcher gives the folder in `PLURAX_STATUS`, and process 2 writes `2.json` into it:

    {"phase": "step", "step": 1200, "saved": 1000, "deadline": 53170.2}

`phase` is what it does: `start`, `compile`, `step`, `evaluate`, `save`, `wait`. `step` is the last
one it has finished; `saved`, the newest checkpoint, None without one; `deadline`, when its watchdog
will have ended it if it does not go on, on the clock CLOCK_MONOTONIC, None without a watchdog.
"""

import contextlib
import dataclasses
import json
import threading
from pathlib import Path
from typing import Any, Literal

from plurax.reading import parse_json

Phase = Literal["start", "compile", "step", "evaluate", "save", "wait"]


@dataclasses.dataclass(frozen=True)
class Status:
    """What a process does. See the module."""

    phase: Phase
    step: int
    saved: int | None
    deadline: float | None


class StatusFile:
    """The file of a process's status.

    **Arguments:** `folder`; `process`, its index.
    """

    def __init__(self, folder: Path, process: int) -> None:
        self.folder, self.process = folder, process
        self._written: Status | None = None
        self._lock = threading.Lock()

    @property
    def deadline(self) -> float | None:
        """The deadline that the file has now."""
        written = self._written
        return None if written is None else written.deadline

    def write(self, status: Status) -> None:
        """Replace the file, if there is anything new; a disk that fails ends nothing."""
        path = self.folder / f"{self.process}.json"
        with self._lock, contextlib.suppress(OSError):
            if status == self._written:
                return
            part = path.with_suffix(".part")
            part.write_text(json.dumps(dataclasses.asdict(status)))
            part.replace(path)
            self._written = status

    def others(self) -> dict[int, dict[str, Any]]:
        """Return what the other processes of this host say, by their index."""
        statuses: dict[int, dict[str, Any]] = {}
        with contextlib.suppress(OSError):
            for path in sorted(self.folder.glob("*.json")):
                if path.stem.isdecimal() and int(path.stem) != self.process:
                    with contextlib.suppress(OSError, ValueError):
                        if isinstance(status := parse_json(path.read_bytes()), dict):
                            statuses[int(path.stem)] = status
        return statuses
