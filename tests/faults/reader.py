"""A process that reads from a worker as Grain does, in a second: `reader.py OUTPUT STRIKER WHO`.

The worker puts the names of shared memory into a queue. In the first attempt process `STRIKER`
kills itself, its worker or the launcher; a dead worker is an error.
"""

import multiprocessing
import os
import signal
import sys
from multiprocessing.shared_memory import SharedMemory

from tests.faults.notes import NoteNames, children, note

LIMIT = 60
"""Seconds for the worker to share its memory."""


def work(output, names, shared):
    """Share some memory, say so, and wait for ever.

    A worker that is killed while it creates more may leave it: Python registers it a moment later.
    """
    NoteNames(output)()
    for _ in range(3):
        memory = SharedMemory(create=True, size=8)
        names.put(memory.name)
        memory.close()
    shared.set()
    signal.pause()


def main(output, striker, who):
    attempt, process = (int(os.environ[f"PLURAX_{name}"]) for name in ("ATTEMPT", "PROCESS"))
    note(output, *children(os.getppid()))  # with what ends others when the launcher is killed
    NoteNames(output)()
    context = multiprocessing.get_context("spawn")
    names, shared = context.Queue(), context.Event()
    worker = context.Process(target=work, args=(output, names, shared), daemon=True)
    worker.start()
    SharedMemory(names.get()).unlink()  # the others are between both, and nobody maps them
    assert shared.wait(LIMIT)
    note(output, *children())
    if attempt == 0 and process == int(striker):
        pids = {"process": os.getpid(), "worker": worker.pid, "launcher": os.getppid()}
        os.kill(pids[who], signal.SIGKILL)
        worker.join()
        raise RuntimeError("the worker has died")
    if attempt == 0:
        signal.pause()


if __name__ == "__main__":
    main(*sys.argv[1:])
