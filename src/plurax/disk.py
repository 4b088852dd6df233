"""Files on a disk that may fill up, turn read-only or vanish, of a machine that may lose power.

A file is on disk when its bytes are (`fsync`), and can be found there when the folder is that names
it. So whatever is replaced goes in this order, and a power cut leaves the old content or the new:

    write .run.toml.new     sync the file     rename it to run.toml     sync the folder

What cannot be written to a log waits in memory, and the file never holds half a record:

    records     a b c        waiting: a b c      on disk:
    flush                    waiting:            on disk: a b c
    records     d e          the disk takes half of d: the file is cut back to a b c
    room again, flush        waiting:            on disk: a b c d e
"""

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from plurax import errors

BUFFER = 64 * 1024
"""Bytes that wait in memory before they are written without a `flush`."""


class FileIdentity:
    """Where a file stands, to notice that it was removed or replaced, or its disk unmounted."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = _identity(path)
        self._device = path.parent.stat().st_dev

    def is_there(self) -> bool:
        """Return whether the same file still stands there; False where it may be created anew.

        Raises `OSError` where another disk has taken the place of the one it stood on.
        """
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            if _identity(self.path) == self._file:
                return True
        folder = next(one for one in self.path.parents if one.exists())
        if folder.stat().st_dev != self._device:
            raise OSError(errno.ENODEV, f"{folder} is not on the disk it was on", str(self.path))
        return False


def _identity(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_dev, found.st_ino


class AppendFile:
    """A file to which whole records are appended; those that do not fit wait in memory.

    A file that is removed while it is open is written anew, whole. Raises `OSError` where the file
    cannot be opened.

    **Attributes:** `trouble`, why the last attempt to write failed; None once one succeeds.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.trouble: OSError | None = None
        self._waiting = bytearray()
        self._write_at = BUFFER
        self._open()

    def _open(self) -> None:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._file = os.open(self.path, flags, 0o644)
        try:
            sync_folder(self.path.parent)
        except OSError:
            os.close(self._file)
            raise
        self._end = os.fstat(self._file).st_size
        self._place = FileIdentity(self.path)

    def write(self, record: bytes) -> None:
        """Append a record. A disk that takes no more is no error here; see `trouble`."""
        self._waiting += record
        if len(self._waiting) >= self._write_at:
            with contextlib.suppress(OSError):
                self._drain()

    def flush(self) -> None:
        """Return when all records are on disk. Raises `OSError`; the records then still wait."""
        try:
            if not self._place.is_there():
                self._write_anew()
            self._drain()
            os.fsync(self._file)
        except OSError as error:
            self.trouble = error
            raise

    def close(self) -> None:
        """Flush and close. Raises `OSError`."""
        try:
            self.flush()
        finally:
            os.close(self._file)

    def _drain(self) -> None:
        try:
            if self.trouble is not None:  # half a record may be left, which could not be cut off
                os.ftruncate(self._file, self._end)
            left = bytes(self._waiting)
            while left:
                left = left[os.write(self._file, left) :]
            self._end += len(self._waiting)
            self._waiting.clear()
        except OSError as error:
            self.trouble = error
            self._write_at = len(self._waiting) + BUFFER  # not at every record from here on
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._end)
            raise
        self.trouble, self._write_at = None, BUFFER

    def _write_anew(self) -> None:
        """Write what the removed file holds, which its descriptor still reads, to a new one."""
        old, end = self._file, self._end
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(old, "rb", closefd=False) as file:
            file.seek(0)
            replace_file(self.path, file.read(end))
        self._open()
        os.close(old)


@contextlib.contextmanager
def log_errors(path: Path) -> Iterator[None]:
    """Raise `DiskError` for an `OSError` while a log is written."""
    try:
        yield
    except OSError as error:
        raise errors.DiskError(
            f"the log {path} could not be written: {error.strerror or str(error)}. Make room or "
            "give another directory; what is saved stays, and resume goes on from it."
        ) from error


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file's content atomically, as `replacing` does. Raises `OSError`."""
    with replacing(path) as new:
        new.write_bytes(content)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the path of a new file, which replaces `path` atomically when the block ends.

    Readers, a kill and a power cut find the old content or the new one; with the return the new one
    is on disk. A link stays, and what it leads to is replaced; what is no file, such as
    `/dev/stdout`, is written to directly.

    Raises `OSError`, and leaves nothing behind where anything is raised.
    """
    if path.parent == Path("/dev") or (path.exists() and not path.is_file()):
        yield path
        return
    path = Path(os.path.realpath(path))
    new = path.with_name(f".{path.name}.new")
    try:
        new.unlink(missing_ok=True)  # of a process that was killed, or a link of somebody else
        yield new
        if path.exists():
            shutil.copymode(path, new)
        sync_file(new)
        new.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            new.unlink()
        raise
    sync_folder(path.parent)


def make_folder(folder: Path) -> None:
    """Create a folder and those above it that are missing, on disk. Raises `OSError`."""
    missing = [one for one in (folder, *folder.parents) if not one.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for one in reversed(missing):
        sync_folder(one.parent)


def sync_file(path: Path) -> None:
    """Return when the bytes of a file are on disk, whoever wrote them. Raises `OSError`."""
    _sync(path, os.O_RDONLY)


def sync_folder(folder: Path) -> None:
    """Return when the names in a folder are on disk. Raises `OSError`.

    Some file systems of a network cannot be asked, nor can a folder that may not be read.
    """
    try:
        _sync(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EACCES):
            raise


def sync_tree(folder: Path) -> None:
    """Return when all that is below a folder is on disk. Raises `OSError`."""

    def refuse(error: OSError) -> None:
        raise error

    for path, _, files in os.walk(folder, topdown=False, onerror=refuse):
        for name in files:
            sync_file(Path(path, name))
        sync_folder(Path(path))


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
