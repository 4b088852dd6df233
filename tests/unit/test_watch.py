"""`plurax watch`: frames of a run from its files, while they are written."""

import io
import json
import math

import numpy as np
import pytest
from rich.console import Console
from tests.runs import epoch_row, write_rows, write_run
from tests.unit.test_cli import run

from plurax.checkpoint.lock import FolderLock, writer_of
from plurax.cli.watch_command import watch
from plurax.errors import ExperimentError
from plurax.report.watch_frame import WatchedRun, curve_lines


def shown(watched, width=100):
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(watched.frame(width))
    return console.file.getvalue()


@pytest.fixture
def locked(tmp_path):
    """A run that this process writes, and its lock."""
    folder = write_run(tmp_path / "digits", steps=20, epochs=2)
    (folder / "run.toml").write_text("[options]\nepochs = 4\n")
    (folder / "checkpoints").mkdir()
    lock = FolderLock(folder / "checkpoints" / "writer.lock")
    lock.acquire()
    yield folder, lock
    lock.release()


def append(folder, *rows):
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def test_a_frame_has_the_rows_the_curve_and_the_events(locked):
    folder, _ = locked
    bad = {"kind": "step", "step": 21, "epoch": 3, "loss": math.nan, "skipped": 1}
    append(
        folder, bad, {"kind": "event", "event": "save failed", "step": 21, "reason": "disk full"}
    )
    text = shown(WatchedRun(folder))
    assert "digits  running · epoch 2 of 4 · step 21 · 320 examples/s · 0:01 left" in text
    assert "eval accuracy" in text
    assert "█" in text
    assert "step 21  update skipped (not finite)" in text
    assert "step 21  save failed  reason disk full" in text


def test_what_was_compiled_is_a_line(locked):
    folder, _ = locked
    assert "compiled" not in shown(WatchedRun(folder))
    with (folder / "run.toml").open("a") as file:
        file.write("[compiled]\nseconds = 2.5\npeak_bytes = 2048\ncollectives = 0\n")
    assert "\ncompiled in 2.5 s: 2.0 KiB on a device\n" in shown(WatchedRun(folder))


@pytest.mark.parametrize("width", [40, 60, 200])
def test_a_frame_fits_the_terminal(locked, width):
    assert max(map(len, shown(WatchedRun(locked[0]), width).splitlines())) <= width


def test_a_run_is_watched_until_its_process_lets_go(locked):
    folder, lock = locked
    watched, waits = WatchedRun(folder), []

    def wait(seconds):
        waits.append(seconds)
        append(folder, epoch_row(20 + 10 * len(waits), 2 + len(waits), 0.5))
        if len(waits) == 2:
            lock.release()

    console = Console(file=io.StringIO(), width=100, color_system=None)
    assert watch(watched, console, 0.5, wait=wait) == 0
    assert waits == [0.5, 0.5]
    text = console.file.getvalue()
    assert "digits  finished · epoch 4 of 4 · step 40" in text


def test_control_c_leaves_the_watch_with_130(locked):
    def interrupted(seconds):
        raise KeyboardInterrupt

    console = Console(file=io.StringIO(), width=100)
    assert watch(WatchedRun(locked[0]), console, 1.0, wait=interrupted) == 130


def test_a_run_that_stopped_early_or_was_killed_says_so(locked, monkeypatch):
    folder, lock = locked
    monkeypatch.setattr("plurax.checkpoint.lock._is_gone", lambda owner: True)
    assert WatchedRun(folder).state == "its process is gone"
    lock.release()
    assert WatchedRun(folder).state == "stopped"
    assert WatchedRun(folder).ended


def test_silence_is_said(locked):
    clock = [0.0]
    watched = WatchedRun(locked[0], now=lambda: clock[0])
    clock[0] = 75.0
    watched.read()
    assert watched.state == "running, silent for 1:15"
    append(locked[0], epoch_row(30, 3, 0.5))
    watched.read()
    assert watched.state == "running"


def test_a_log_that_was_cut_is_shown_anew(locked):
    folder, _ = locked
    watched = WatchedRun(folder)
    write_rows(folder / "..", [])  # in another folder, nothing changes
    watched.read()
    assert watched.series.step == 20
    (folder / "new").write_text(json.dumps(epoch_row(10, 1, 0.5)) + "\n")
    (folder / "new").replace(folder / "metrics.jsonl")
    watched.read()
    assert watched.series.step == 10
    assert len(watched.series.epochs) == 1


def test_who_writes_is_read_without_being_in_the_way(tmp_path):
    path = tmp_path / "writer.lock"
    assert writer_of(path) is None
    lock = FolderLock(path)
    lock.acquire()
    assert writer_of(path) is True
    lock.release()
    assert writer_of(path) is None


def test_a_curve_of_blocks():
    lines = [line.plain for line in curve_lines("loss", np.geomspace(100, 1, 50), 10, 3)]
    assert lines[0] == "loss, logarithmic"
    assert len(lines) == 4
    assert all(len(line) <= 11 + 10 for line in lines[1:])
    gaps = np.array([1.0, math.nan, 2.0, 2.0])
    assert [line.plain for line in curve_lines("a", gaps, 4, 1)] == ["a", "         2 ▁ ██"]
    assert curve_lines("a", np.array([math.nan]))[0].plain == "a: no finite value"
    same = [line.plain for line in curve_lines("a", np.ones(3), 3, 1)]
    assert same[1].count("▄") + same[1].count("▅") == 3


def test_the_command(tmp_path, capsys):
    write_run(tmp_path / "a")
    write_run(tmp_path / "b")
    code, out, _ = run(capsys, "watch", tmp_path / "a", "--once")
    assert code == 0
    assert "a  finished · epoch 4 · step 40" in out
    assert run(capsys, "watch", tmp_path / "a")[0] == 0  # it has ended
    code, _, said = run(capsys, "watch", tmp_path, "--once")
    assert code == 2
    assert "holds 2 runs, and plurax watch shows one" in said
    with pytest.raises(ExperimentError, match="no such folder"):
        WatchedRun(tmp_path / "nothing")
