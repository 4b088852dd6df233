"""Small disks that fill up; real ones where this process may mount them."""

import contextlib
import os
import subprocess

import pytest


@contextlib.contextmanager
def mounted(folder, *options, size="600k"):
    """A `tmpfs` over a folder; skips the test where mounting is not permitted."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", ",".join((f"size={size}", *options)), "tmpfs"]
    try:
        done = subprocess.run([*command, str(folder)], capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("this system has no mount")
    if done.returncode:
        pytest.skip(f"a tmpfs cannot be mounted: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], capture_output=True)


def unmount(folder):
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder):
    """Take all room that is left; returns a function that frees it."""
    path = folder / "filled"
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        for size in (4096, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(size))
    return lambda: os.unlink(path)


class Syncs:
    """Which files and folders are on disk: those that were synced since they last changed.

    What C++ syncs is not seen.
    """

    def __init__(self, monkeypatch):
        self._synced, self.renamed, real = {}, {}, os.fsync

        def fsync(descriptor):
            real(descriptor)
            found = os.fstat(descriptor)
            self._synced[found.st_dev, found.st_ino] = found.st_mtime_ns

        def rename(old, new):
            self.renamed[os.fspath(new)] = self.missing(old)
            real_rename(old, new)

        real_rename = os.rename
        monkeypatch.setattr(os, "fsync", fsync)
        monkeypatch.setattr(os, "rename", rename)

    def missing(self, path):
        """What is not on disk, of a file, or of a folder and all below it."""
        below = [path, *(os.path.join(at, name) for at, folders, files in os.walk(path)
                         for name in (*folders, *files))]  # fmt: skip
        return [os.fspath(one) for one in below if not self._is_synced(one)]

    def _is_synced(self, path):
        found = os.stat(path)
        return self._synced.get((found.st_dev, found.st_ino)) == found.st_mtime_ns


@contextlib.contextmanager
def ext4(image, folder, *, size=64 << 20):
    """A file system in a file, over a folder; a copy of the file is what a power cut leaves.

    Skips the test where mounting is not permitted.
    """
    folder.mkdir(parents=True)
    if not image.exists():
        with image.open("wb") as file:
            file.truncate(size)
        _or_skip("mkfs.ext4", "-q", "-F", str(image))
    _or_skip("mount", "-o", "loop", str(image), str(folder))
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def _or_skip(*command):
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip(f"this system has no {command[0]}")
    if done.returncode:
        pytest.skip(f"{command[0]} is not permitted: {done.stderr.strip()}")
