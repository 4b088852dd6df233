"""End what a process has started, once that process has ended: `python reaper.py SECONDS`.

The kernel kills the processes that a launcher started when it dies (`plurax.launch.child`), but not
what those started in turn, such as the workers of a data loader; nor does a process that is killed
end the daemons of its Ray, or remove its folders. So a `Reaper` is a process of its own that reads
lines from its standard input:

    +1234       the group of processes 1234, once its leader is started
    -1234       that group has ended
    =A=b        the processes that have the variable A=b in their environment, and so their children
    /some/path  a folder

At the end of the input, which comes when the other process ends in whatever way, all of that is
ended, for `SECONDS` at most, and removed. Run as a file, this needs nothing of plurax.
"""

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

TRACKER = b"resource_tracker import main"
"""In the command of each process that removes shared memory: multiprocessing's, and joblib's."""
ALONE = (sys.executable, "-I", "-S")
"""Python with nothing but its standard library, which starts in a few milliseconds."""


class Reaper:
    """A process that ends what this one has started, once this one has ended.

    **Arguments:** `seconds`, for those processes to end.
    """

    def __init__(self, seconds: float) -> None:
        self._popen = subprocess.Popen(
            [*ALONE, __file__, str(seconds)], stdin=subprocess.PIPE, start_new_session=True
        )

    def tell(self, line: str) -> None:
        """Send it a line."""
        assert self._popen.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._popen.stdin.write(f"{line}\n".encode())
            self._popen.stdin.flush()

    def close(self, seconds: float) -> None:
        """Let it do its work now, and wait for so long."""
        assert self._popen.stdin is not None
        self._popen.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):  # it removes folders
            self._popen.wait(seconds)

    def dismiss(self) -> None:
        """End it without its work, where all is ended and removed."""
        self._popen.kill()
        self._popen.communicate()


def kill_group(group: int) -> set[int]:
    """Send SIGKILL to the processes of a group but its resource trackers; return all of them.

    Python's multiprocessing has one process beside its workers that knows the names of their shared
    memory and semaphores, and removes what is left once the last of them has ended, however it
    ended. Killed with them, as by `os.killpg`, it leaves all of it in `/dev/shm`, which is memory,
    and which nobody else can tell from that of another program: a batch that was between a worker
    and its reader is mapped by nobody. So it alone is left, to do its work and end by itself. What
    a worker had just created and not yet registered when it was killed, nobody knows.
    """
    return _kill_each(lambda: _members(group), lambda pid: pid != group and _is_tracker(pid))


def _kill_each(
    list_pids: Callable[[], Iterator[int]], spared: Callable[[int], bool] = lambda pid: False
) -> set[int]:
    """Send SIGKILL to the processes that are listed, but for those spared; return all of them."""
    killed: set[int] = set()
    while new := {*list_pids()} - killed:  # a process may have started another one meanwhile
        killed |= new
        for pid in new:
            if not spared(pid):
                _send(os.kill, pid)
    return killed


def end_group(group: int, pids: set[int], until: float) -> None:
    """Wait for what `kill_group` found, until a time of CLOCK_MONOTONIC, and kill what is left."""
    _wait(pids, until)
    _send(os.killpg, group)


def _wait(pids: set[int], until: float) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            end = os.pidfd_open(pid)
            try:
                poll = select.poll()
                poll.register(end, select.POLLIN)
                poll.poll(max(0.0, until - time.monotonic()) * 1000)
            finally:
                os.close(end)


def reap(lines: TextIO, seconds: float) -> None:
    """Read lines until the input ends, then end the processes left, and remove the folders."""
    groups, variables, folders = set[int](), list[bytes](), list[str]()
    for line in map(str.rstrip, lines):
        if line[0] == "+":
            groups.add(int(line[1:]))
        elif line[0] == "-":
            groups.discard(int(line[1:]))
        elif line[0] == "=":
            variables.append(line[1:].encode())
        else:
            folders.append(line)
    found = {group: kill_group(group) for group in groups}
    marked = _kill_each(lambda: (pid for variable in variables for pid in _marked(variable)))
    until = time.monotonic() + seconds
    for group, pids in found.items():
        end_group(group, pids, until)
    _wait(marked, until)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _marked(variable: bytes) -> Iterator[int]:
    """Yield the processes that have `NAME=value` in their environment."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if variable in path.read_bytes().split(b"\0"):
                yield int(path.parent.name)


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
    reap(sys.stdin, float(sys.argv[1]))
