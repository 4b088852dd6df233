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


def work(output, names):
    """Share more and more, until the queue is full."""
    NoteNames(output)()
    while True:
        memory = SharedMemory(create=True, size=8)
        names.put(memory.name)
        memory.close()


def main(output, striker, who):
    attempt, process = (int(os.environ[f"PLURAX_{name}"]) for name in ("ATTEMPT", "PROCESS"))
    note(output, *children(os.getppid()))  # with what ends others when the launcher is killed
    NoteNames(output)()
    context = multiprocessing.get_context("spawn")
    names = context.Queue(2)
    worker = context.Process(target=work, args=(output, names), daemon=True)
    worker.start()
    SharedMemory(names.get()).unlink()
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
