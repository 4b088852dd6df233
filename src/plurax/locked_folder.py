"""A folder that goes with its process, however that ends.

A process that ends removes its folder. One that is killed cannot; so each holds a lock on its
folder, which the kernel frees with it, and the next process that makes one of the same kind removes
those whose lock is free:

    /dev/shm/plurax-a1b2    locked by a run that lives: stays
    /dev/shm/plurax-c3d4    its run was killed: removed by the next

Whoever else may write to the parent can put anything there, so only a folder of this user is
touched, and nothing is opened that could block, such as a pipe.
"""

import fcntl
import os
import shutil
import tempfile
import weakref
from pathlib import Path


class LockedFolder:
    """A new folder of this process.

    **Arguments:** `parent`, where it is created; `prefix` of its name, which says its kind.

    **Attributes:** `path`; `close()`, which removes it, as the end of this process does.
    """

    def __init__(self, parent: Path, prefix: str) -> None:
        for left in parent.glob(f"{prefix}*"):
            _remove_if_left(left)
        new = Path(tempfile.mkdtemp(prefix=f".{prefix}", dir=parent))
        lock = os.open(new, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        self.path = new.rename(parent / new.name[1:])  # with its lock, or not there
        self.close = weakref.finalize(self, _close, self.path, lock)


def _close(path: Path, lock: int) -> None:
    shutil.rmtree(path, ignore_errors=True)
    os.close(lock)


def _remove_if_left(path: Path) -> None:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        lock = os.open(path, flags)
    except OSError:
        return  # no folder, of another user, or gone
    try:
        if os.fstat(lock).st_uid == os.geteuid():
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
    except OSError:
        pass  # its process lives
    finally:
        os.close(lock)
