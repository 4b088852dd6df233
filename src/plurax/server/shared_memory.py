"""Arrays that processes of one machine hand each other, in memory that they share.

A process writes the arrays that it returns into a file of /dev/shm, which is memory. Another maps
that file and reads them where they are. Whoever called says when the file may be written again:

    server 0         writes 2 MB to server-0/0, returns Lent("server-0/0", ...)
    worker 1         is given that, maps server-0/0, computes, returns
    the coordinator  drops it, and names server-0/0 in its next call of server 0
    server 0         writes the next 2 MB there

So an array is copied once, and memory is claimed once. Ray's object store reaches all machines, but
each of its objects is created, sealed, pinned and freed by messages between processes: 2 MB from
one process to another take 4 ms there.

What is lent is valid until the call that it is given to returns. A file of a process that has ended
is removed with the last that was lent of it.
"""

import errno
import mmap
import os
import pickle
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plurax import errors

FOLDER = Path("/dev/shm")
"""Where files are memory that all processes of a machine can map."""
LEAST_BYTES = 1 << 16
"""Of an array that is lent; smaller ones go with the message."""
ALIGNMENT = 64
"""Of an array in a file, in bytes: JAX uses such memory as it is."""
MAPPINGS = 64
"""Files that a process keeps mapped at most."""


@dataclass(frozen=True)
class Lent:
    """A value whose large arrays are in a file.

    **Fields:** `content`, the value but for these arrays; `path`, the file; `places`, of each of
    them where it begins and ends, in bytes.
    """

    content: bytes
    path: str
    places: tuple[tuple[int, int], ...]


class Lender:
    """Writes values into files of one folder; of one process.

    **Arguments:** `folder`, which is there.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._files: dict[str, mmap.mmap] = {}
        self._free: dict[int, list[str]] = {}

    def lend(self, value: Any) -> Any:
        """Return the value, as `Lent` where it has large arrays.

        Raises `PlanError` where there is no memory left.
        """
        large: list[memoryview] = []

        def is_small(buffer: pickle.PickleBuffer) -> bool:
            raw = buffer.raw()
            if raw.nbytes >= LEAST_BYTES:
                large.append(raw)
            return raw.nbytes < LEAST_BYTES

        content = pickle.dumps(value, 5, buffer_callback=is_small)
        if not large:
            return value
        places, end = [], 0
        for raw in large:
            begin = -(-end // ALIGNMENT) * ALIGNMENT
            end = begin + raw.nbytes
            places.append((begin, end))
        path = self._file(end)
        memory = memoryview(self._files[path])
        for raw, (begin, end) in zip(large, places, strict=True):
            memory[begin:end] = raw
        return Lent(content, path, tuple(places))

    def _file(self, size: int) -> str:
        """Return a file of this size that nobody reads."""
        free = self._free.get(size)
        if free:
            return free.pop()
        path = f"{self._folder}/{len(self._files)}"
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, size)  # an error now, no signal when it is written
            self._files[path] = mmap.mmap(descriptor, size)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            left = shutil.disk_usage(FOLDER).free
            raise errors.servers_store_too_small(size, left, f"{FOLDER} has") from None
        finally:
            os.close(descriptor)
        return path

    def take_back(self, paths: Sequence[str]) -> None:
        """Write to these files again; nobody reads them any more."""
        for path in paths:
            self._free.setdefault(len(self._files[path]), []).append(path)


class Borrower:
    """Reads what others lend; of one process."""

    def __init__(self) -> None:
        self._files: dict[str, mmap.mmap] = {}

    def borrow(self, value: Any) -> Any:
        """Return the value that was lent, or one that was not; its large arrays are read-only."""
        if not isinstance(value, Lent):
            return value
        memory = memoryview(self._file(value.path))
        return pickle.loads(value.content, buffers=[memory[a:b] for a, b in value.places])

    def _file(self, path: str) -> mmap.mmap:
        if path not in self._files:
            # Of a process that has ended: its memory would stay as long as it is mapped.
            self._files = {one: m for one, m in self._files.items() if Path(one).exists()}
            while len(self._files) >= MAPPINGS:
                del self._files[next(iter(self._files))]
            with open(path, "rb") as file:
                self._files[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return self._files[path]


def copied(value: Any) -> Any:
    """Return the value that was lent, or one that was not, with arrays of its own."""
    if not isinstance(value, Lent):
        return value
    content = Path(value.path).read_bytes()
    return pickle.loads(value.content, buffers=[bytearray(content[a:b]) for a, b in value.places])
