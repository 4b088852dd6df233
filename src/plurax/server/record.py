"""The record of a run: who pulled and pushed, in which order; a run can be repeated from it.

`servers.jsonl` has one event a line, in the order in which the coordinator called the servers:

    {"event": "start", "step": 0, "seed": 0, "batch_size": 128, ...}    settings, position in data
    {"event": "worker ready", "worker": 1, "life": 0, "at": 1.2}
    {"event": "pull", "step": 0, "part": 0, "worker": 1, "life": 0, "sequence": 0, "at": 1.2}
    {"event": "compute", "worker": 1, "life": 0, "sequence": 0, "at": 1.3}   parameters have come
    {"event": "push", "worker": 1, "life": 0, "sequence": 0, "at": 1.5}
    {"event": "late", "worker": 2, "life": 0, "sequence": 3}     computed, not pushed (quorum)
    {"event": "refused", "server": 0, "worker": 1, ..., "reason": "lost on the way"}
    {"event": "commit", "step": 0, "parts": [0, 1]}        `sync`: all servers update
    {"event": "snapshot", "number": 1}                     asked of all servers
    {"event": "saved", "server": 0, "number": 1}           from now on it is restarted from this one
    {"event": "worker lost", "worker": 1, "life": 0}       its next life has 1
    {"event": "server lost", "server": 0, "version": 38, "restored": 24, "number": 1}
    {"event": "fetched", "step": 469}                      nothing is on its way: state as saved

Beside `start` and `fetched`, all events have `at`: seconds since the workers were started.
Refusals that follow from this order, such as of a push that a server has had, are not listed.
A run that resumes at step 469 drops what stands after that line, and begins with a `start`; its
`"residuals": true` says that workers began with what those before had left to send.
"""

import json
from pathlib import Path
from typing import Any

from plurax import errors
from plurax.disk import AppendFile, log_errors, replace_file
from plurax.reading import parse_json, refusing

FILE = "servers.jsonl"

Event = dict[str, Any]


class Record:
    """Writes the events of a run to `servers.jsonl` in its directory.

    **Arguments:** `directory`; `step`, at which the run begins: events after it are dropped.

    Raises `DiskError` where the file cannot be written.
    """

    def __init__(self, directory: Path, step: int) -> None:
        self.path = directory / FILE
        with log_errors(self.path):
            replace_file(self.path, self._up_to(step) if step else b"")
            self._file = AppendFile(self.path)

    def _up_to(self, step: int) -> bytes:
        """Return the lines up to the one that says that this step was fetched; none without one."""
        fetched = _line({"event": "fetched", "step": step})
        record = self.path.read_bytes() if self.path.exists() else b""
        before, line, _ = record.rpartition(fetched)
        return before + line

    def write(self, event: Event) -> None:
        """Add an event; it is on disk after the next `flush`."""
        self._file.write(_line(event))

    def flush(self) -> None:
        """Return when all events are on disk. Raises `DiskError`, and the events then wait."""
        with log_errors(self.path):
            self._file.flush()

    def close(self) -> None:
        """Flush, and end the record. Raises `DiskError`."""
        with log_errors(self.path):
            self._file.close()


def read_events(path: Path) -> list[Event]:
    """Return the events of a record; a last line that was cut is left out."""
    with refusing(lambda reason: errors.record_unreadable(str(path), reason)):
        lines = path.read_text().splitlines(keepends=True)
        return [parse_json(line) for line in lines if line.endswith("\n")]


def _line(event: Event) -> bytes:
    return (json.dumps(event) + "\n").encode()
