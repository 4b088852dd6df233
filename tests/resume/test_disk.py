"""A disk that is full, read-only, slow or gone, a clock that jumps: training goes on."""

import contextlib
import errno
import itertools
import os
import re
import shutil
import threading
import time
from pathlib import Path

import jax
import pytest
from tests import disks, models

import plurax as px
from plurax import disk, errors
from plurax.checkpoint import Checkpoints, manager
from plurax.checkpoint.arrays import StateHandler
from plurax.cli import dispatch
from plurax.errors import SaveFailedWarning
from plurax.errors.kinds import RunStoppedError
from plurax.execute.array_data import ArrayData, Position
from plurax.exit_codes import ExitCode
from plurax.guards import saving
from plurax.guards.saving import Saving
from plurax.loop.log_rows import read_rows

ROWS = models.data(50)
TASK, OPTIMIZER = models.mlp_task(), models.optimizer()
PLAN = px.Plan(data=2, microbatches=2)
EPOCHS, PER_EPOCH = 6, 13
STEPS = EPOCHS * PER_EPOCH


BATCHES = [batch for batch, _ in ArrayData(ROWS, 4).batches(Position(0))]


def fit(output=None, **options):
    options = {"epochs": EPOCHS, "progress": False, **options}
    return px.fit(TASK, OPTIMIZER, BATCHES, plan=PLAN, output=output, **options)


@pytest.fixture
def before_save(monkeypatch):
    """Register what happens before the save of an epoch (from 1), when the one before has ended."""
    actions, real = {}, Saving.save

    def save(self, snapshot):
        action = actions.get(snapshot.step / PER_EPOCH)
        if action is not None:
            assert not self._checkpoints.busy(60)
            self.check(snapshot.step)
            action()
        real(self, snapshot)

    monkeypatch.setattr(Saving, "save", save)
    return actions.update


@pytest.fixture(scope="module")
def undisturbed():
    return jax.device_get(fit().state.params)


def events(output):
    return [row["event"] for row in read_rows(output / "metrics.jsonl") if row["kind"] == "event"]


def is_whole(output, params):
    """Every step is in the log, the newest checkpoint is that of the end, and nothing is left."""
    rows = [row for row in read_rows(output / "metrics.jsonl") if row["kind"] == "step"]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    for line in (output / "metrics.jsonl").read_bytes().splitlines(keepends=True):
        assert line.endswith(b"}\n")
    assert not list(output.rglob("*tmp*"))
    checkpoints = Checkpoints(output / "checkpoints")
    assert (checkpoints.steps()[-1], checkpoints.damaged()) == (STEPS, [])
    again = fit(output, resume=True)  # restores, and has nothing left to do
    assert models.same_bits(again.state.params, params)


# --- Injected, where no disk can be mounted ---------------------------------------------------


def full(*_args, **_options):
    raise OSError(errno.ENOSPC, "No space left on device")


def fails(monkeypatch, saves, how=full):
    """Let some saves fail in the background, counted from 1."""
    count, real = 0, StateHandler.finalize

    def finalize(self, directory):
        nonlocal count
        count += 1
        if count in saves:
            how()
        real(self, directory)

    monkeypatch.setattr(StateHandler, "finalize", finalize)


@pytest.mark.ci
def test_saves_that_fail_do_not_end_training(tmp_path, monkeypatch, undisturbed):
    fails(monkeypatch, {2, 3, 5})
    with pytest.warns(SaveFailedWarning) as warned:
        result = fit(tmp_path)
    said = [str(one.message) for one in warned if one.category is SaveFailedWarning]
    assert len(said) == 2, "once for each time that the disk stopped working"
    assert "step 26 could not be saved, and training goes on" in said[0]
    assert "No space left on device" in said[0]
    failed, works = "save failed", "saving works again"
    assert events(tmp_path) == [failed, failed, works, failed, works]
    assert models.same_bits(result.state.params, undisturbed)
    is_whole(tmp_path, undisturbed)


def test_older_checkpoints_stay_while_saves_fail(tmp_path, monkeypatch, before_save):
    kept = []
    fails(monkeypatch, {4, 5})

    def look():
        kept.append(Checkpoints(tmp_path / "checkpoints").steps())
        assert not list(tmp_path.rglob("*tmp*"))

    before_save({6: look})
    with pytest.warns(SaveFailedWarning):
        fit(tmp_path)
    assert kept == [[PER_EPOCH, 2 * PER_EPOCH, 3 * PER_EPOCH]]


def test_training_stops_after_some_failures_in_a_row(tmp_path, monkeypatch):
    fails(monkeypatch, range(2, 9))
    with (
        pytest.warns(SaveFailedWarning),
        pytest.raises(
            errors.SavingStoppedError,
            match=r"(?s)3 saves in a row failed, and the last \d+ steps are not saved; the "
            r"checkpoint of step 13 is kept, and resume goes on there.*No space left",
        ),
    ):
        fit(tmp_path)
    assert Checkpoints(tmp_path / "checkpoints").steps() == [PER_EPOCH]
    assert not list(tmp_path.rglob("*tmp*"))
    assert issubclass(errors.SavingStoppedError, px.errors.CheckpointError | RunStoppedError)
    monkeypatch.undo()
    fit(tmp_path, resume=True)


def test_the_last_save_is_read_back_and_written_again(tmp_path, monkeypatch, undisturbed):
    real = Checkpoints.verify
    seen = []

    def verify(self, step):
        if not seen:
            (self.directory / str(step) / "meta" / "metadata").write_text("torn")
        seen.append(step)
        real(self, step)

    monkeypatch.setattr(Checkpoints, "verify", verify)
    with pytest.warns((SaveFailedWarning, px.errors.DamagedCheckpointWarning)):
        fit(tmp_path)
    assert seen == [STEPS, STEPS]
    assert Checkpoints(tmp_path / "checkpoints").damaged() == [f"{STEPS}.damaged"]
    assert models.same_bits(fit(tmp_path, resume=True).state.params, undisturbed)


def test_a_slow_disk_does_not_hold_up_training(tmp_path, monkeypatch, undisturbed):
    """The second save ends when the last one is due, and those between are left out."""
    monkeypatch.setattr(saving, "PATIENCE", 0.0)
    released, real = threading.Event(), Saving.save

    def save(self, snapshot):
        if snapshot.last:
            released.set()
        real(self, snapshot)

    monkeypatch.setattr(Saving, "save", save)
    fails(monkeypatch, {2}, released.wait)
    fit(tmp_path)
    assert set(events(tmp_path)) == {"save left out"}
    is_whole(tmp_path, undisturbed)


def test_a_disk_that_does_not_answer_is_not_waited_for_forever(tmp_path, monkeypatch):
    monkeypatch.setattr(saving, "PATIENCE", 0.0)
    monkeypatch.setattr(manager, "SAVE_SECONDS", 0.6)
    released = threading.Event()
    fails(monkeypatch, {2}, released.wait)
    try:
        with (
            pytest.warns(SaveFailedWarning),
            pytest.raises(errors.SavingStoppedError, match=r"is still not written to .* after 0.6"),
        ):
            fit(tmp_path, epochs=2)
        with pytest.raises(px.errors.CheckpointError, match=r"is written by process"):
            Checkpoints(tmp_path / "checkpoints").lock()  # that save may still end
    finally:
        released.set()
        for thread in threading.enumerate():
            if thread.name in ("save_finalize", "async_save"):
                thread.join()


def test_a_folder_that_is_removed_is_created_anew(tmp_path, before_save, undisturbed):
    before_save({3: lambda: shutil.rmtree(tmp_path / "run")})
    fit(tmp_path / "run")
    is_whole(tmp_path / "run", undisturbed)


def test_a_folder_that_is_removed_during_a_save_is_created_anew(tmp_path, monkeypatch, undisturbed):
    fails(monkeypatch, {3}, lambda: shutil.rmtree(tmp_path / "run"))
    with pytest.warns(SaveFailedWarning):
        fit(tmp_path / "run")
    is_whole(tmp_path / "run", undisturbed)


def test_a_disk_without_room_is_refused_before_training(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(9, 9, 0))
    with pytest.raises(
        px.errors.CheckpointError, match=r"has 0 B left\. Make room, or give an output"
    ):
        fit(tmp_path)
    assert not (tmp_path / "metrics.jsonl").exists()


# --- Real ones --------------------------------------------------------------------------------


def test_a_real_disk_is_full_at_the_start(tmp_path):
    with disks.mounted(tmp_path / "disk") as disk:
        free = disks.fill(disk)
        with pytest.raises(px.errors.CheckpointError, match=r"No space left|left\. Make room"):
            fit(disk / "run")
        free()
        fit(disk / "run", epochs=1)


def test_a_real_disk_is_full_for_some_epochs(tmp_path, before_save, undisturbed):
    with disks.mounted(tmp_path / "disk") as disk, contextlib.ExitStack() as stack:
        before_save({3: lambda: stack.callback(disks.fill(disk)), 5: stack.close})
        with pytest.warns(SaveFailedWarning, match="No space left on device"):
            fit(disk / "run")
        assert events(disk / "run")[-1] == "saving works again"
        is_whole(disk / "run", undisturbed)


def test_a_real_disk_has_no_room_for_the_log(tmp_path, before_save, undisturbed):
    """Checkpoints are on another one; none of them gets ahead of the log."""
    seen = []
    with (
        disks.mounted(tmp_path / "run", size="100k") as run,
        disks.mounted(run / "checkpoints"),
        contextlib.ExitStack() as stack,
    ):

        def look():
            logged = [row["step"] for row in read_rows(run / "metrics.jsonl")]
            seen.append((Checkpoints(run / "checkpoints").steps()[-1], max(logged)))
            stack.close()

        before_save({3: lambda: stack.callback(disks.fill(run)), 6: look})
        with pytest.warns(SaveFailedWarning, match="No space left on device"):
            fit(run)
        ((newest, logged),) = seen
        assert newest <= logged < 5 * PER_EPOCH
        is_whole(run, undisturbed)


class Late:
    """Adds a column while the disk is full."""

    def on_epoch(self, run, row):
        if row["epoch"] == 3:
            row["late"] = 1.0


def test_a_real_disk_is_full_while_callbacks_write_to_it(tmp_path, before_save, undisturbed):
    """A table with a new column, rows, events and the best state: all are there in the end."""
    best, kept = px.callbacks.KeepBest("loss"), {}

    class Keeps:
        def on_epoch(self, run, row):
            kept[run.step] = run.params()

    with disks.mounted(tmp_path / "disk", size="2m") as disk, contextlib.ExitStack() as stack:
        before_save({2: lambda: stack.callback(disks.fill(disk)), 4: stack.close})
        callbacks = [Late(), Keeps(), best, px.callbacks.Csv(disk / "table.csv"),
                     px.callbacks.JsonLines(disk / "rows.jsonl"),
                     px.callbacks.TensorBoard(disk / "board")]  # fmt: skip
        with pytest.warns(SaveFailedWarning, match="No space left on device") as warned:
            result = fit(disk / "run", callbacks=callbacks)
        assert any("KeepBest: the state of step" in str(one.message) for one in warned)
        header, *lines = (disk / "table.csv").read_text().splitlines()
        assert "late" in header.split(",")
        assert len(lines) == EPOCHS
        rows = [row["step"] for row in read_rows(disk / "rows.jsonl") if row["kind"] == "step"]
        assert rows == list(range(1, STEPS + 1))
        losses = {row["step"]: row["loss"] for row in result.history}
        found = best.restore(result.program)
        assert found.steps_taken == min(losses, key=losses.get)
        assert models.same_bits(found.params, kept[found.steps_taken])
        assert models.same_bits(result.state.params, undisturbed)


@pytest.mark.parametrize("which", ["Csv", "JsonLines", "TensorBoard"])
def test_a_logger_that_cannot_write_at_the_end_says_so(tmp_path, monkeypatch, which):
    logger = getattr(px.callbacks, which)(tmp_path / "there")
    monkeypatch.setattr(disk.AppendFile, "_drain", full)
    with pytest.raises(errors.DiskError, match=r"the log .*there could not be written: No space"):
        fit(callbacks=[logger], epochs=1)


def test_an_error_of_a_callback_is_no_error_of_the_disk(tmp_path):
    class Uploads:
        def on_save(self, run, step):
            raise ConnectionResetError("by peer")

    with pytest.raises(ConnectionResetError, match="by peer"):
        fit(tmp_path, callbacks=[Uploads()])


def test_the_best_state_of_a_checkpoint_is_there_after_a_kill(tmp_path):
    """Its own save was not on disk yet; the checkpoint of the same step has that state."""
    best, kept = px.callbacks.KeepBest("loss"), tmp_path / "best"
    whole = fit(tmp_path, epochs=2, callbacks=[best])
    wanted = jax.device_get(best.restore(whole.program).params)
    assert Checkpoints(kept).steps() == [PER_EPOCH, 2 * PER_EPOCH]
    shutil.rmtree(kept / str(2 * PER_EPOCH))
    again = px.callbacks.KeepBest("loss")
    resumed = fit(tmp_path, epochs=2, resume=True, callbacks=[again])
    assert models.same_bits(again.restore(resumed.program).params, wanted)


def test_a_best_state_that_is_gone_is_said(tmp_path):
    class Worse:
        def on_epoch(self, run, row):
            row["score"] = float(row["epoch"])

    fit(tmp_path, epochs=2, callbacks=[Worse(), px.callbacks.KeepBest("score", mode="min")])
    shutil.rmtree(tmp_path / "best")
    best = px.callbacks.KeepBest("score", mode="min")
    with pytest.warns(SaveFailedWarning, match=r"KeepBest: the state of step 13 is not in .*best"):
        result = fit(tmp_path, epochs=3, resume=True, callbacks=[Worse(), best])
    assert best.restore(result.program).steps_taken == 3 * PER_EPOCH


def test_a_real_disk_is_read_only_for_some_epochs(tmp_path, before_save, undisturbed):
    """Another one is in its place, as after an error that made the kernel mount it anew."""
    folder = tmp_path / "run" / "checkpoints"
    with disks.mounted(tmp_path / "whether it can be mounted"), contextlib.ExitStack() as stack:
        read_only = disks.mounted(folder, "ro")
        before_save({3: lambda: stack.enter_context(read_only), 5: lambda: disks.unmount(folder)})
        with pytest.warns(SaveFailedWarning, match="is not on the disk it was on"):
            fit(tmp_path / "run")
        is_whole(tmp_path / "run", undisturbed)


def test_a_real_disk_that_is_read_only_is_refused_before_training(tmp_path):
    with (
        disks.mounted(tmp_path / "disk", "ro") as disk,
        pytest.raises(px.errors.CheckpointError, match="the file system is read-only at"),
    ):
        fit(disk / "run")


def test_nothing_is_written_where_a_disk_was_mounted(tmp_path, before_save):
    with disks.mounted(tmp_path / "disk") as disk:
        before_save({3: lambda: disks.unmount(disk)})
        with (
            pytest.warns(SaveFailedWarning),
            pytest.raises(errors.SavingStoppedError, match="is not on the disk it was on"),
        ):
            fit(disk / "run")
        assert not list(disk.iterdir())


def test_a_command_that_stopped_so_says_it_by_its_status(monkeypatch, capsys):
    def train(_arguments):
        raise errors.SavingStoppedError("training stopped at step 60: 3 saves in a row failed")

    monkeypatch.setattr("plurax.cli.train_command.train_experiment", train)
    with pytest.raises(SystemExit) as ended:
        dispatch.main(["train", "file.py"])
    assert ended.value.code == ExitCode.PERMANENT
    assert "error: training stopped at step 60: 3 saves in a row" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore::plurax.errors.SaveFailedWarning")
@pytest.mark.parametrize("jump", [-3600.0, 3600.0])
def test_a_clock_that_jumps_changes_nothing(tmp_path, monkeypatch, undisturbed, jump):
    """Checkpoints are ordered by their steps, and waits measured by a clock that does not jump.

    Orbax's own waits inside a save are not: one that the jump hits may fail, and the next succeeds.
    """
    real, calls = time.time, itertools.count()
    monkeypatch.setattr(time, "time", lambda: real() + jump * (next(calls) > 100))
    fit(tmp_path)
    monkeypatch.undo()
    is_whole(tmp_path, undisturbed)
    for age, step in enumerate(reversed(Checkpoints(tmp_path / "checkpoints").steps())):
        at = real() + jump * (1 + age)
        os.utime(tmp_path / "checkpoints" / str(step), (at, at))
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        checkpoints.lock()
        assert checkpoints.run_meta(checkpoints.steps()[-1])["position"]["epoch"] == EPOCHS
    is_whole(tmp_path, undisturbed)


def test_no_wait_is_measured_by_the_clock_of_the_wall():
    """It only stamps TensorBoard's events and the starts of a run."""
    source = Path(px.__file__).parent
    found = {
        str(path.relative_to(source))
        for path in source.rglob("*.py")
        if re.search(r"\btime\.time\(|\bdatetime\b|st_mtime", path.read_text())
    }
    assert found == {"event_file.py", "run_folder/run_file.py"}
