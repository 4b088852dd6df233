"""The log on disk: whole after any kill, and never held in memory."""

import contextlib
import errno
import math
import os
import tempfile
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.draws import draws

from plurax import disk
from plurax.disk import AppendFile, replace_file
from plurax.errors import CheckpointError, DamagedLogWarning
from plurax.execute.array_data import Position
from plurax.loop.epoch_metrics import MembersMetrics, NetworkMetrics
from plurax.loop.iterate import StepOutput
from plurax.loop.log_rows import read_rows
from plurax.members import Members
from plurax.run_folder.log import MetricsLog


def step_row(step, **values):
    return {"kind": "step", "step": step, "epoch": 1, **values}


def epoch_row(step, **values):
    return {"kind": "epoch", "step": step, "epoch": step // 2, **values}


def written(directory, count=6):
    """Steps 1 to `count`, an epoch after every second; the lines of the file."""
    metrics = MetricsLog(directory)
    for step in range(1, count + 1):
        metrics.write(step_row(step, loss=step / 3))
        if step % 2 == 0:
            metrics.write(epoch_row(step, loss=step / 7))
    metrics.close()
    return metrics.path.read_bytes().splitlines(keepends=True)


def resumed(directory, step):
    metrics = MetricsLog(directory, resume_step=step)
    metrics.close()
    return metrics


def test_resuming_keeps_the_lines_up_to_the_checkpoint_as_they_are(tmp_path):
    lines = written(tmp_path)
    metrics = resumed(tmp_path, 4)
    assert metrics.path.read_bytes() == b"".join(lines[:6])
    assert metrics.epochs == [epoch_row(2, loss=2 / 7), epoch_row(4, loss=4 / 7)]
    assert resumed(tmp_path, 0).path.read_bytes() == b""


@pytest.mark.parametrize("cut", [1, 9, -1])
def test_a_last_line_cut_short_after_the_checkpoint_goes_without_a_word(tmp_path, cut):
    lines = written(tmp_path)
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(lines[:-1]) + lines[-1][:cut])
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")][-1] == 6
    assert resumed(tmp_path, 5).path.read_bytes() == b"".join(lines[:7])


@pytest.mark.parametrize(
    "torn", [b'{"kind": "st\n', b"\xff\xfe\n", b"\n", b"12\n", b'{"step": 3}\n', b"\0" * 40 + b"\n"]
)
def test_a_torn_line_in_the_middle_drops_only_itself(tmp_path, torn):
    lines = written(tmp_path)
    (tmp_path / "metrics.jsonl").write_bytes(b"".join([*lines[:2], torn, *lines[3:]]))
    assert len(list(read_rows(tmp_path / "metrics.jsonl"))) == len(lines) - 1
    with pytest.warns(DamagedLogWarning, match=r"line 3 cannot be read and is left out"):
        metrics = resumed(tmp_path, 4)
    assert metrics.path.read_bytes() == b"".join([*lines[:2], *lines[3:6]])


def test_a_kill_while_resuming_leaves_the_log_as_it_was(tmp_path, monkeypatch):
    lines = written(tmp_path)

    def killed(_file):
        raise KeyboardInterrupt

    monkeypatch.setattr(disk.os, "fsync", killed)
    with pytest.raises(KeyboardInterrupt):
        resumed(tmp_path, 2)
    monkeypatch.undo()
    assert (tmp_path / "metrics.jsonl").read_bytes() == b"".join(lines)
    assert resumed(tmp_path, 6).path.read_bytes() == b"".join(lines)


def test_a_full_disk_is_said_and_the_log_goes_on_when_there_is_room(tmp_path, monkeypatch):
    metrics = MetricsLog(tmp_path)
    metrics.write(step_row(1))
    metrics.flush()

    def full(_file):
        raise OSError(errno.ENOSPC, "No space left on device")

    metrics.write(step_row(2))
    with monkeypatch.context() as patched:
        patched.setattr(disk.os, "fsync", full)
        with pytest.raises(CheckpointError, match=r"metrics.jsonl could not be written: No space"):
            metrics.flush()
    metrics.close()
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match=r"could not be written: Not a directory"):
        MetricsLog(tmp_path / "file" / "run")
    assert [row["step"] for row in read_rows(resumed(tmp_path, 1).path)] == [1]


def test_what_was_flushed_is_there_for_others(tmp_path):
    metrics = MetricsLog(tmp_path)
    metrics.write(step_row(1))
    metrics.flush()
    assert list(read_rows(metrics.path)) == [step_row(1)]
    metrics.close()


def test_values_that_are_not_finite_come_back(tmp_path):
    metrics = MetricsLog(tmp_path)
    row = epoch_row(2, loss=math.inf, members={"loss": [1.0, math.nan, -math.inf], "seen": [1, 2]})
    metrics.write(row)
    metrics.close()
    (again,) = read_rows(metrics.path)
    np.testing.assert_equal(again, row)
    np.testing.assert_equal(resumed(tmp_path, 2).epochs, [row])
    metrics.path.write_text('{"kind": "epoch", "step": 2, "epoch": 1, "members": {"x": [null]}}\n')
    assert math.isnan(next(read_rows(metrics.path))["members"]["x"][0])


def test_steps_are_not_kept_in_memory(tmp_path):
    metrics = MetricsLog(tmp_path)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for step in range(10_000):
        metrics.write(step_row(10 * step + 1, loss=float(step)))
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    metrics.close()
    assert grown < 100_000


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_means_of_an_epoch_do_not_depend_on_how_its_steps_are_grouped(sizes):
    """How many steps a turn takes is chosen by the clock."""
    rng = np.random.default_rng(0)
    count = sum(sizes)
    metrics = {
        "loss": rng.normal(size=(3, count)).astype(np.float32) * 10.0 ** rng.integers(-6, 6, count),
        "weight": rng.random((3, count)),
        "examples": np.ones(count),
        "skipped": rng.integers(0, 2, (3, count)),
    }

    def means(make, select, pieces):
        tally = make()
        start = 0
        for size in pieces:
            turn = {name: select(value)[..., start : start + size]
                    for name, value in metrics.items()}  # fmt: skip
            start += size
            tally.add(StepOutput(None, start, turn, 0.1, Position(), False), fetch_all=True)
        return tally.means()["loss"]

    def one(value):
        return value if value.ndim == 1 else value[0]

    for make, select in ((NetworkMetrics, one), (lambda: MembersMetrics(Members(3)), lambda v: v)):
        assert np.array_equal(
            means(make, select, sizes), means(make, select, [count]), equal_nan=True
        )


@draws(40)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=12),
    st.lists(st.sampled_from([0, 1, 3, 9, 90])),
)
def test_a_file_never_ends_in_half_a_record(sizes, room):
    """Whatever a disk takes of each attempt; once there is room, all is there in its order."""
    records = [bytes([65 + index]) * size + b"\n" for index, size in enumerate(sizes)]
    real, left = os.write, [*room]

    def write(file, data):
        taken = min(left.pop(0), len(data)) if left else len(data)
        if not taken:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(file, bytes(data[:taken]))

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk.os, "write", write)
        file = AppendFile(Path(folder, "rows"))
        for record in records:
            file.write(record)
            with contextlib.suppress(OSError):
                file.flush()
            found = file.path.read_bytes()
            assert b"".join(records).startswith(found)
            assert not found or found.endswith(b"\n")
            assert (file.trouble is None) == (found.endswith(record))
        left.clear()
        file.close()
        assert file.path.read_bytes() == b"".join(records)


def test_half_a_record_that_could_not_be_cut_off_is_cut_off_later(tmp_path, monkeypatch):
    def broken(*_args):
        raise OSError(errno.EIO, "Input/output error")

    def half(descriptor, data):
        if len(data) == 1:
            broken()
        return real(descriptor, data[:-1])

    file, real = AppendFile(tmp_path / "rows"), os.write
    file.write(b"a\n")
    with monkeypatch.context() as patched:
        patched.setattr(disk.os, "write", half)
        patched.setattr(disk.os, "ftruncate", broken)
        with pytest.raises(OSError, match="Input/output"):
            file.flush()
    assert file.path.read_bytes() == b"a"
    file.write(b"b\n")
    file.close()
    assert file.path.read_bytes() == b"a\nb\n"


def test_a_file_that_was_removed_or_replaced_is_written_anew(tmp_path):
    file = AppendFile(tmp_path / "rows")
    file.write(b"a\n")
    file.flush()
    (tmp_path / "rows").unlink()
    file.write(b"b\n")
    file.flush()
    assert (tmp_path / "rows").read_bytes() == b"a\nb\n"
    (tmp_path / "other").write_bytes(b"x\n")
    (tmp_path / "other").replace(tmp_path / "rows")
    file.write(b"c\n")
    file.close()
    assert (tmp_path / "rows").read_bytes() == b"a\nb\nc\n"


def test_a_file_that_cannot_be_replaced_leaves_nothing_behind(tmp_path, monkeypatch):
    def full(_file):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(disk.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        replace_file(tmp_path / "plan.toml", b"data = 2")
    assert not list(tmp_path.iterdir())
