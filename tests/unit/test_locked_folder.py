"""Folders that go with their process: what is left is swept, and nothing else is touched."""

import os
import signal
import subprocess
import sys

import pytest

from plurax.locked_folder import LockedFolder

KILLED = """
import os, pathlib, signal, sys
from plurax.locked_folder import LockedFolder
folder = LockedFolder(pathlib.Path(sys.argv[1]), "kind-")
(folder.path / "file").write_text("content")
print(folder.path, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def killed(parent):
    """Return the folder that a killed process has left."""
    done = subprocess.run([sys.executable, "-c", KILLED, parent], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    return type(parent)(done.stdout.strip())


def test_the_next_removes_what_a_killed_process_has_left(tmp_path):
    living = LockedFolder(tmp_path, "kind-")
    left = killed(tmp_path)
    assert left.is_dir()
    LockedFolder(tmp_path, "other-")
    assert left.is_dir()
    mine = LockedFolder(tmp_path, "kind-")
    assert not left.exists()
    assert living.path.is_dir()
    mine.close()
    assert not mine.path.exists()


@pytest.mark.parametrize("what", ["pipe", "link", "file", "of another user"])
def test_what_a_stranger_puts_there_neither_blocks_nor_is_removed(tmp_path, monkeypatch, what):
    """Opening a pipe would wait for who writes to it."""
    path, aim = tmp_path / "kind-strange", tmp_path / "aim"
    aim.mkdir()
    if what == "pipe":
        os.mkfifo(path)
    elif what == "link":
        path.symlink_to(aim)
    elif what == "file":
        path.write_text("content")
    else:
        path.mkdir()
        monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    LockedFolder(tmp_path, "kind-").close()
    assert {one.name for one in tmp_path.iterdir()} == {"kind-strange", "aim"}
