"""Files that are replaced: the old content or the new, whenever the process ends."""

import errno
import os
import stat
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests import models

import plurax as px
from plurax import disk
from plurax.cli.predict_command import _write_arrays
from plurax.disk import make_folder, replace_file, replacing, sync_folder
from plurax.report.page.render import write_report

ROWS = models.data(50)
OUTPUTS = {"file": np.arange(6.0), "y": np.ones((2, 3), np.float32)}


def program():
    batch = {name: rows[:16] for name, rows in ROWS.items()}
    return px.compile(models.mlp_task(), optax.sgd(0.1), px.Plan(), batch)


def sweep():
    members = px.Members(2, {"rate": [0.1, 0.2]})
    return px.sweep(models.mlp_task(), lambda hyper: optax.sgd(hyper["rate"]), ROWS,
                    members=members, epochs=1, batch_size=16, progress=False)  # fmt: skip


def report(path):
    run = path.parent / "run"
    if not run.exists():
        px.fit(models.mlp_task(), optax.sgd(0.1), ROWS, batch_size=16, output=run, progress=False)
    write_report(run, path)


WRITERS = {
    "report.html": report,
    "outputs.npz": lambda path: _write_arrays(path, OUTPUTS),
    "outputs.npy": lambda path: _write_arrays(path, OUTPUTS["y"]),
    "table.csv": lambda path: sweep().save_csv(path),
    "calibration.json": lambda path: px.ensemble.save_calibration(
        path.parent, {"a": px.ensemble.calibration(np.array([[0.8, 0.2]] * 4), np.zeros(4, int))}
    ),
    "curves.png": lambda path: px.train.draw_curves(
        [{"kind": "epoch", "step": 1, "epoch": 1, "loss": 0.5}], path
    ),
    "plan.toml": px.Plan(data=2).save,
    "machine.toml": px.Machine.preset("V100-32GB").save,
    "model.export": lambda path: px.weights.export_predict(
        program(), program().init(0), ROWS, path
    ),
    "a.safetensors": lambda path: px.weights.save({"a": jnp.ones(3)}, path),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_file_holds_the_old_content_until_the_new_is_on_disk(tmp_path, monkeypatch, name):
    path = tmp_path / name
    WRITERS[name](path)
    path.write_bytes(b"before")

    def killed(new):
        assert os.path.getsize(new) > 6
        assert path.read_bytes() == b"before"
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(disk, "sync_file", killed)
        with pytest.raises(KeyboardInterrupt):
            WRITERS[name](path)
    assert path.read_bytes() == b"before"
    assert not [one.name for one in tmp_path.iterdir() if one.name.startswith(".")]
    WRITERS[name](path)
    assert path.read_bytes() != b"before"


def test_what_is_written_is_read_again(tmp_path):
    _write_arrays(tmp_path / "a", OUTPUTS)
    with np.load(tmp_path / "a.npz") as found:
        assert {name: found[name].tolist() for name in found} == {
            name: rows.tolist() for name, rows in OUTPUTS.items()
        }
    px.train.draw_curves([{"kind": "epoch", "step": 1, "epoch": 1, "loss": 1.0}], tmp_path / "b")
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")


def test_a_link_and_the_rights_of_a_file_stay(tmp_path):
    (tmp_path / "there").write_text("old")
    (tmp_path / "there").chmod(0o640)
    (tmp_path / "link").symlink_to("there")
    replace_file(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "there").read_text() == "new"
    assert stat.S_IMODE((tmp_path / "there").stat().st_mode) == 0o640


def test_what_is_no_file_is_written_to(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        replace_file(tmp_path / "pipe", b"new")
        assert os.read(reader, 9) == b"new"
    finally:
        os.close(reader)
    replace_file(Path("/dev/stdout"), b"")
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_what_a_killed_process_or_a_stranger_left_is_not_written_through(tmp_path):
    (tmp_path / "elsewhere").write_text("not ours")
    (tmp_path / ".a.new").symlink_to("elsewhere")
    replace_file(tmp_path / "a", b"new")
    assert (tmp_path / "elsewhere").read_text() == "not ours"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["a", "elsewhere"]


def test_an_error_leaves_nothing_behind(tmp_path):
    def half():
        with replacing(tmp_path / "a") as new:
            new.write_text("half")
            raise ValueError("in the middle")

    with pytest.raises(ValueError, match="in the middle"):
        half()
    assert not list(tmp_path.iterdir())


def test_a_folder_and_those_above_it_are_on_disk(tmp_path, monkeypatch):
    synced, real = [], os.fsync

    def fsync(descriptor):
        synced.append(os.fstat(descriptor).st_ino)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    make_folder(tmp_path / "a" / "b")
    assert synced == [os.stat(one).st_ino for one in (tmp_path, tmp_path / "a")]
    make_folder(tmp_path / "a" / "b")
    assert len(synced) == 2


@pytest.mark.parametrize("number", ["EINVAL", "ENOTSUP", "EACCES"])
def test_a_file_system_that_cannot_sync_folders_is_borne(tmp_path, monkeypatch, number):
    def fsync(descriptor):
        raise OSError(getattr(errno, number), "no")

    monkeypatch.setattr(os, "fsync", fsync)
    sync_folder(tmp_path)
    with pytest.raises(OSError, match="no"):
        disk.sync_file(__file__)
