"""The output of the processes of this host: all of it in files, and lines in the terminal."""

import contextlib
import sys
from pathlib import Path
from typing import BinaryIO


class Output:
    """Writes the output of processes: of process 0 as it comes, of the others by lines, `[1] ...`.

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
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, process: int, stream: int, data: bytes) -> None:
        """Take what a process has written; `stream` is 0 for its output and 1 for its errors.

        While process 0 is within a line, the lines of the others wait for its end, or for `flush`.
        """
        with contextlib.suppress(OSError):  # a full disk ends no run
            if process not in self._files:
                self._files[process] = (self._folder / f"{process}.log").open("ab", buffering=0)
            self._files[process].write(data)
        if process == 0:
            self._show(stream, data)
            self._within = not data.endswith(b"\n")
        else:
            *lines, rest = (self._partial.pop((process, stream), b"") + data).split(b"\n")
            self._partial[process, stream] = rest
            whole = b"".join(b"[%d] %s\n" % (process, line) for line in lines)
            self._waiting.append((stream, whole))
        if not self._within:
            self.flush()

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
