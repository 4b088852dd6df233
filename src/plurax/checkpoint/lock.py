"""Allow one writer per folder, by a file that names the writer and the kernel's lock on that file.

The kernel releases its lock (`flock`) when the process ends, however it ends, and acquires it in
one step; so of two processes that find a dead owner only one takes over. Where the folder is shared
between hosts, the kernel's lock may not reach the others; so the owner's host, process and start
are written into the file, and an owner on another host counts as alive until the file is empty:

    lock free, file empty           nobody writes                      acquire
    lock free, owner of this host   it is dead, or its file system     acquire, if no process with
                                    has no locks                       its number and start lives
    lock free, owner elsewhere      cannot be known from here          refuse
    lock held                       somebody writes                    refuse

The file stays; a writer that closes empties it. So the file is never created twice, or removed
while another process has just opened it.
"""

import contextlib
import fcntl
import json
import os
import socket
import weakref
from pathlib import Path
from typing import Any

from plurax import errors
from plurax.reading import parse_json

LOCK = "writer.lock"
"""The name of the file in a folder of checkpoints."""

Owner = dict[str, Any]
"""`host`, `boot`, `pid` and `started` (ticks since boot), the latter None where unknown."""


class FolderLock:
    """The right to write to a folder, from `acquire` to `release` or the end of the process.

    `acquire` raises `CheckpointError` where another process, or another object of this one, holds
    it, and `OSError` where the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Acquire the lock, or raise `CheckpointError` naming its owner."""
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            # Lock first, then read: the owner cannot change while this process holds the lock.
            free = _try_lock(descriptor)
            owner = _read_owner(descriptor)
            if not free or (owner is not None and not _is_gone(owner)):
                who = "another process"
                if owner is not None and owner["host"] is not None:
                    who = f"process {owner['pid']} on {owner['host']}"
                raise errors.CheckpointError(
                    f"{self.path.parent} is written by {who}, and two writers would destroy each "
                    "other's checkpoints. Wait for it, or choose another output directory. If that "
                    f"process has ended (another host cannot see it), delete {self.path}."
                )
            _write(descriptor, json.dumps(_self()))
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        # A forked child inherits the descriptor and would hold the lock after its parent's end.
        mine = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _forget(mine()))

    def release(self) -> None:
        """Release the lock; do nothing without it."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):  # the folder may have been removed
                _write(self._descriptor, "")
            self._close()

    @property
    def held(self) -> bool:
        """Whether this object holds the lock."""
        return self._descriptor is not None

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _forget(lock: FolderLock | None) -> None:
    if lock is not None:
        lock._close()


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # this file system has no locks: rely on the file's content
        pass
    return True


def _read_owner(descriptor: int) -> Owner | None:
    """Return the owner written in the file, or None; all fields None if it is unreadable."""
    content = os.pread(descriptor, 4096, 0).strip(b"\0 \n")
    if not content:
        return None
    try:
        owner = parse_json(content)
        return {name: owner[name] for name in ("host", "boot", "pid", "started")}
    except (ValueError, TypeError, KeyError):
        return {"host": None, "boot": None, "pid": None, "started": None}


def _write(descriptor: int, text: str) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, text.encode(), 0)
    os.fsync(descriptor)


def _is_gone(owner: Owner) -> bool:
    """Return whether an owner that does not hold the kernel's lock is known to be dead."""
    if owner["host"] != socket.gethostname():
        return False
    if owner["boot"] != _boot():
        return True
    try:
        os.kill(owner["pid"], 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass  # it lives, and is somebody else's
    return _started(owner["pid"]) != owner["started"]


def _self() -> Owner:
    pid = os.getpid()
    return {"host": socket.gethostname(), "boot": _boot(), "pid": pid, "started": _started(pid)}


def _boot() -> str | None:
    """Return the id of this boot of the machine, None where the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


def _started(pid: int) -> int | None:
    """Return when a process started, in ticks since boot; None where it is dead or unknown."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()  # its name, in brackets, may hold anything
    return None if fields[0] in "ZX" else int(fields[19])


def writer_of(path: Path) -> bool | None:
    """Return whether the writer that a lock file names lives, None where it names none.

    The file is only read: a writer that is about to begin is not in its way. A writer on another
    host counts as alive.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        owner = _read_owner(descriptor)
    finally:
        os.close(descriptor)
    return None if owner is None else not _is_gone(owner)
