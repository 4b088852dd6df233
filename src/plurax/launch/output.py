"""The output of the processes of this host: all of it in files, and lines in the terminal."""

import contextlib
import re
import sys
from pathlib import Path
from typing import BinaryIO

ERROR = b"error: "
MAX_LINE = 1 << 16
"""Bytes after which a line is shown without its end, as of a progress bar that never has one."""
NOISE = re.compile(rb"^\[Gloo\] Rank \d+ is connected to [^\n]*\n", re.MULTILINE)
"""What JAX's collectives between CPUs print in each process, several times; only in the files."""


class Output:
    """Writes the output of processes: of process 0 as it comes, of the others by lines, `[1] ...`.

    An error that several of the others end with is shown once: all find the same mistake.

    **Arguments:** `folder`, in which process `i` has the file `i.log`, of all attempts; `streams`,
    where the standard output and the standard error go.
    """

    def __init__(self, folder: Path, streams: tuple[BinaryIO, BinaryIO] | None = None) -> None:
        self._folder = folder
        self._streams = streams or (sys.stdout.buffer, sys.stderr.buffer)
        self._partial: dict[tuple[int, int], bytes] = {}
        self._files: dict[int, BinaryIO] = {}
        self._waiting: list[tuple[int, bytes]] = []
        self._within = self._gone = False
        self._errors: set[bytes] = set()
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, process: int) -> Path:
        """Return the file of a process."""
        return self._folder / f"{process}.log"

    def write(self, process: int, stream: int, data: bytes) -> None:
        """Take what a process has written; `stream` is 0 for its output and 1 for its errors.

        While process 0 is within a line, the lines of the others wait for its end, or for `flush`.
        """
        with contextlib.suppress(OSError):  # a full disk ends no run
            if process not in self._files:
                self._files[process] = self.path(process).open("ab", buffering=0)
            self._files[process].write(data)
        if process == 0:
            data = NOISE.sub(b"", data)
            self._errors.update(line for line in data.split(b"\n") if line.startswith(ERROR))
            self._show(stream, data)
            self._within = bool(data) and not data.endswith(b"\n")
        else:
            *lines, rest = (self._partial.pop((process, stream), b"") + data).split(b"\n")
            if len(rest) > MAX_LINE:
                lines, rest = [*lines, rest], b""
            self._partial[process, stream] = rest
            lines = [line for line in lines if self._is_news(line)]
            whole = b"".join(b"[%d] %s\n" % (process, line) for line in lines)
            self._waiting.append((stream, whole))
        if not self._within:
            self.flush()

    def _is_news(self, line: bytes) -> bool:
        """Return whether to show a line of another process than process 0."""
        if NOISE.match(line + b"\n") or line in self._errors:
            return False
        if line.startswith(ERROR):
            self._errors.add(line)
        return True

    def flush(self) -> None:
        """Write the lines that wait."""
        if self._waiting and self._within:
            self._show(0, b"\n")
            self._within = False
        for stream, lines in self._waiting:
            self._show(stream, lines)
        self._waiting.clear()

    def close(self) -> None:
        """Write the lines that have no end, and close the files."""
        self.flush()
        for (process, stream), rest in self._partial.items():
            if rest:
                self._show(stream, b"[%d] %s\n" % (process, rest))
        self._partial.clear()
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _show(self, stream: int, data: bytes) -> None:
        """Write to the terminal. Where its reader is gone, the run goes on without one."""
        if not data or self._gone:
            return
        try:
            self._streams[stream].write(data)
            self._streams[stream].flush()
        except OSError:  # a closed pipe, or a terminal that hung up
            self._gone = True
