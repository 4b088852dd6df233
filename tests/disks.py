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
