"""What a run writes down, so that it can be seen that nothing of it is left. Needs no JAX."""

import contextlib
from multiprocessing import resource_tracker
from pathlib import Path


def note(output, *pids):
    """Write down processes: `PID TICKS`, which no other process ever has both of."""
    with Path(output).with_suffix(".pids").open("a") as file:
        for pid in pids:
            with contextlib.suppress(OSError):  # it has ended meanwhile
                file.write(f"{pid} {began(pid)}\n")


def began(pid):
    """When a process began, in ticks since the start of the machine."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


def children(pid="self"):
    """The processes that a process has started."""
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError):  # a thread that has ended meanwhile
            found += path.read_text().split()
    return [int(pid) for pid in found]


def workers():
    """The processes that load data for this one."""
    return [pid for pid in children() if not is_tracker(pid)]


def is_tracker(pid):
    """Whether it only knows what is to be removed at the end."""
    return b"resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()


class NoteNames:
    """Called in a process, writes down the names of all that it shares by multiprocessing."""

    def __init__(self, output):
        self.path = Path(output).with_suffix(".names")

    def __call__(self, *_):
        register = resource_tracker.register

        def noted(name, kind):
            register(name, kind)  # what was not registered yet, nobody can remove
            with self.path.open("a") as file:
                file.write(f"{'sem.' if kind == 'semaphore' else ''}{name.lstrip('/')}\n")

        resource_tracker.register = noted
