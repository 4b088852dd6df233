"""End process groups whose launcher has ended: `python reaper.py SECONDS FOLDER`, reads its input.

The kernel kills the processes that a launcher started when it dies (`plurax.launch.child`), but not
what those started in turn, such as the workers of a data loader. They are in the group of their
process. A line `+ID` on the standard input adds a group and `-ID` removes one; at the end of the
input, which comes when the launcher ends in whatever way, every group left is ended, for `SECONDS`
at most, and `FOLDER`, in which the processes wrote their status, is removed. Run as a file, this
needs nothing of plurax.
"""

import contextlib
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

TRACKER = b"resource_tracker import main"
"""In the command of each process that removes shared memory: multiprocessing's, and joblib's."""


def kill_group(group: int) -> set[int]:
    """Send SIGKILL to the processes of a group but its resource trackers; return all of them.

    Python's multiprocessing has one process beside its workers that knows the names of their shared
    memory and semaphores, and removes what is left once the last of them has ended, however it
    ended. Killed with them, as by `os.killpg`, it leaves all of it in `/dev/shm`, which is memory,
    and which nobody else can tell from that of another program: a batch that was between a worker
    and its reader is mapped by nobody. So it alone is left, to do its work and end by itself. What
    a worker had just created and not yet registered when it was killed, nobody knows.
    """
    found: set[int] = set()
    while new := {*_members(group)} - found:  # a process may have started another one meanwhile
        found |= new
        for pid in new:
            if pid == group or not _is_tracker(pid):
                _send(os.kill, pid)
    return found


def end_group(group: int, pids: set[int], until: float) -> None:
    """Wait for what `kill_group` found, until a time of CLOCK_MONOTONIC, and kill what is left."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            end = os.pidfd_open(pid)
            try:
                poll = select.poll()
                poll.register(end, select.POLLIN)
                poll.poll(max(0.0, until - time.monotonic()) * 1000)
            finally:
                os.close(end)
    _send(os.killpg, group)


def reap(lines: TextIO, seconds: float, folder: Path) -> None:
    """Read groups until the input ends, then end those left, and remove the folder."""
    groups = set()
    for line in lines:
        group = int(line[1:])
        if line[0] == "+":
            groups.add(group)
        else:
            groups.discard(group)
    found = {group: kill_group(group) for group in groups}
    until = time.monotonic() + seconds
    for group, pids in found.items():
        end_group(group, pids, until)
    shutil.rmtree(folder, ignore_errors=True)


def _members(group: int) -> Iterator[int]:
    """Yield the processes of a group that live."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, own = path.read_text(errors="replace").rpartition(")")[2].split()[:3]
            if int(own) == group and state not in "ZX":
                yield int(path.parent.name)


def _is_tracker(pid: int) -> bool:
    try:
        return TRACKER in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _send(kill: Callable[[int, int], None], target: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        kill(target, signal.SIGKILL)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the input's end is what ends it
    reap(sys.stdin, float(sys.argv[1]), Path(sys.argv[2]))
