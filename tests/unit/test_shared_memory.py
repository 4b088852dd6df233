"""Arrays that processes lend each other: what is read is what was written, and nothing is left."""

import errno
import gc
import os
import subprocess
import sys
import tempfile

import numpy as np
import pytest

import plurax as px
from plurax.locked_folder import LockedFolder
from plurax.server import shared_memory
from plurax.server.shared_memory import Borrower, Lender, Lent, copied

LARGE = np.arange(50_000, dtype=np.float32)


@pytest.fixture(autouse=True)
def memory(tmp_path, monkeypatch):
    """A folder in place of /dev/shm, which not every machine has."""
    monkeypatch.setattr(shared_memory, "FOLDER", tmp_path)
    return tmp_path


@pytest.fixture
def shared(memory):
    folder = LockedFolder(memory, "plurax-")
    yield folder
    folder.close()
    assert not folder.path.exists()


def new_folder(shared):
    """The folder of a process."""
    return tempfile.mkdtemp(dir=shared.path)


def test_large_arrays_are_lent_and_small_ones_sent(shared):
    lender, borrower = Lender(new_folder(shared)), Borrower()
    value = (3, {"a": LARGE, "b": LARGE[:7], "c": [LARGE[::-1].copy()]})
    lent = lender.lend(value)
    assert isinstance(lent, Lent)
    assert len(lent.places) == 2
    assert len(lent.content) < 2000
    for read in (borrower.borrow, copied):
        number, found = read(lent)
        assert number == 3
        np.testing.assert_array_equal(found["a"], LARGE)
        np.testing.assert_array_equal(found["b"], LARGE[:7])
        np.testing.assert_array_equal(found["c"][0], LARGE[::-1])
    _, found = borrower.borrow(lent)
    assert not found["a"].flags.writeable
    assert found["c"][0].ctypes.data % shared_memory.ALIGNMENT == 0
    small = {"b": LARGE[:7]}
    assert lender.lend(small) is small
    assert borrower.borrow(small) is copied(small) is small


def test_a_file_is_written_again_only_when_it_was_given_back(shared):
    lender, borrower = Lender(new_folder(shared)), Borrower()
    first, second = lender.lend(LARGE), lender.lend(LARGE + 1)
    assert first.path != second.path
    own = copied(first)
    lender.take_back([first.path])
    third = lender.lend(LARGE + 2)
    assert third.path == first.path
    np.testing.assert_array_equal(borrower.borrow(second), LARGE + 1)
    np.testing.assert_array_equal(borrower.borrow(third), LARGE + 2)
    np.testing.assert_array_equal(own, LARGE)
    # Of another size it is of no use.
    lender.take_back([third.path])
    assert lender.lend(LARGE[:-1]).path not in (first.path, second.path)


def test_memory_of_a_process_that_ended_is_unmapped(shared, monkeypatch):
    borrower = Borrower()
    lenders = [Lender(new_folder(shared)) for _ in range(2)]
    ended = lenders[0].lend(LARGE)
    borrower.borrow(ended)
    os.unlink(ended.path)
    borrower.borrow(lenders[1].lend(LARGE))
    assert list(borrower._files) == [f"{lenders[1]._folder}/0"]
    monkeypatch.setattr(shared_memory, "MAPPINGS", 3)
    for step in range(5):
        np.testing.assert_array_equal(borrower.borrow(lenders[1].lend(LARGE + step)), LARGE + step)
        assert len(borrower._files) <= 3


def test_no_memory_left_is_an_error_before_anything_is_written(shared, memory, monkeypatch):
    def full(descriptor, first, size):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    said = rf"0\.00 GB of memory that processes share, and {memory}"
    with pytest.raises(px.errors.PlanError, match=said):
        Lender(new_folder(shared)).lend(LARGE)


def test_what_a_killed_process_left_is_removed_by_the_next(shared, memory):
    code = (
        "import os, pathlib, signal\n"
        "from plurax.locked_folder import LockedFolder\n"
        f"folder = LockedFolder(pathlib.Path({str(memory)!r}), 'plurax-')\n"
        "print(folder.path, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    left = killed.stdout.strip()
    assert os.path.isdir(left), killed.stderr
    another = LockedFolder(memory, "plurax-")
    assert not os.path.exists(left)
    assert shared.path.exists()  # of a run that lives
    path = another.path
    del another
    gc.collect()
    assert not path.exists()
