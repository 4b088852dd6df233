"""Damaged and hostile files of every kind that is read: a value, or an error of ours."""

import contextlib
import json
import os
import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from flax.serialization import to_bytes
from hypothesis import given
from hypothesis import strategies as st
from tests.draws import draws

import plurax as px
from plurax import errors
from plurax.checkpoint.damage import Damage
from plurax.checkpoint.description import read_description, sealed
from plurax.checkpoint.files import DIGESTS, verify_files, write_digests
from plurax.cli.predict_command import _read_arrays
from plurax.guards.rollback import Rollback, Rollbacks
from plurax.guards.status import Status, StatusFile
from plurax.loop.log_rows import read_rows
from plurax.reading import parse_json
from plurax.report.page.run_data import read_settings
from plurax.run_folder.run_file import read_run_file
from plurax.server.record import read_events
from plurax.sources.adapt import adapt
from plurax.sources.source import in_memory


def save_arrays(path, *, compressed=False):
    save = np.savez_compressed if compressed else np.savez
    save(path, x=np.arange(600.0), y=np.ones((3, 4), np.int32))


def describe(path):
    (path.parent / "meta").mkdir(exist_ok=True)
    path.write_text(json.dumps(sealed({"a": 1})))


def digest(path):
    path.unlink(missing_ok=True)
    (path.parent / "bytes").write_bytes(b"x")
    write_digests(path.parent)


def save_table(path):
    table = pa.table({"x": np.arange(600.0), "y": np.arange(600, dtype=np.int32)})
    if path.suffix == ".parquet":
        pq.write_table(table, path)
    else:
        with pa.ipc.new_file(path, table.schema) as file:
            file.write_table(table)


def read_data(path):
    data = in_memory(adapt("data", str(path)))
    assert data.keys() == {"x", "y"}


def save_rollback(path):
    path.write_text('{"kind": "event", "event": "rollback", "from": 4, "to": 2}\n' * 2)


def read_rollbacks(path):
    group = SimpleNamespace(on_primary=lambda read: read())
    checkpoints = SimpleNamespace(directory=path.parent / "checkpoints", steps=list)
    rollbacks = Rollbacks(Rollback(), checkpoints, group)
    rollbacks.read()
    rollbacks.write(None, 4)


# For each kind: the name of its file, how it is written, how it is read.
FILES = {
    "plan": ("p.toml", lambda path: px.Plan(data=2).save(path), px.Plan.load),
    "machine": (
        "m.toml",
        lambda path: px.Machine.preset("8xA100-80GB").save(path),
        px.Machine.load,
    ),
    "settings": ("s.toml", lambda path: path.write_text("[plan]\ndata = 2\n"), read_settings),
    "run": (
        "run.toml",
        lambda path: path.write_text("[options]\nseed = 1\n[plan]\ndata = 2\n"),
        lambda path: read_run_file(path.parent),
    ),
    "log": (
        "metrics.jsonl",
        lambda path: path.write_text('{"kind": "step", "step": 1, "loss": 0.5}\n' * 3),
        lambda path: list(read_rows(path)),
    ),
    "record": ("e.jsonl", lambda path: path.write_text('{"event": "push"}\n' * 3), read_events),
    "description": (
        "meta/metadata",
        describe,
        lambda path: read_description(path.parent.parent),
    ),
    "digests": (DIGESTS, digest, lambda path: verify_files(path.parent)),
    "npy": (
        "a.npy",
        lambda path: np.save(path, np.arange(600.0)),
        lambda path: adapt("data", str(path)),
    ),
    "npz": ("a.npz", save_arrays, lambda path: adapt("data", str(path))),
    "compressed": (
        "c.npz",
        lambda path: save_arrays(path, compressed=True),
        lambda path: adapt("data", str(path)),
    ),
    "inputs": ("i.npz", lambda path: save_arrays(path, compressed=True), _read_arrays),
    "safetensors": (
        "w.safetensors",
        lambda path: px.weights.save({"w": np.ones((3, 4))}, path),
        px.weights.load,
    ),
    "msgpack": (
        "w.msgpack",
        lambda path: path.write_bytes(to_bytes({"w": np.ones((3, 4)), "b": {"c": np.ones(3)}})),
        px.weights.load,
    ),
    "parquet": ("t.parquet", save_table, read_data),
    "arrow": ("t.arrow", save_table, read_data),
    "status": (
        "7.json",
        lambda path: StatusFile(path.parent, 7).write(Status(3, "step", 2, None)),
        lambda path: StatusFile(path.parent, 0).others(),
    ),
    "rollbacks": ("rollbacks.jsonl", save_rollback, read_rollbacks),
}
REFUSED = (errors.PluraxError, Damage)

DEEP = b"[" * 100_000 + b"]" * 100_000
DIGITS = b"9" * 5000
CONTENTS = [
    b"", b"\0", b"\xff\xfe", b"x", DEEP, b"a = " + DEEP, b'{"a": ' * 9999, DIGITS,
    b"data = " + DIGITS,
    b"data = 0x" + b"f" * 5000, b".".join([b"a"] * 4000) + b" = 1", b"[" + DIGITS + b"]\n",
    b'{"kind": "step", "step": ' + DIGITS + b"}\n", b'{"kind": "step", "step": 1, "a": ' + DEEP,
    b"nan", b"null", b"[]", b"3", b'{"format": 2}', b"PK\5\6" + b"\0" * 18, b"PK\3\4" + b"\0" * 50,
    b"\x93NUMPY\1\0v\0{'descr': '<f8', 'fortran_order': False, 'shape': (999999999999999,), }",
    b"\x93NUMPY\1\0v\0{'descr': '<f8', 'fortran_order': False, 'shape': (-1,), }",
    b"\x93NUMPY\1\0\xff\xff" + b"(" * 9999, b"\xff" * 8 + b"{}",
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("files")


def written(folder, kind):
    name, write, read = FILES[kind]
    path = folder / kind / name
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path)
    return path, read


def try_to(read, path):
    with contextlib.suppress(REFUSED):
        read(path)


@pytest.mark.parametrize("kind", FILES)
def test_a_whole_file_is_read(folder, kind):
    path, read = written(folder, kind)
    read(path)


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("content", CONTENTS, ids=range(len(CONTENTS)))
def test_hostile_contents_are_refused_in_our_words(folder, kind, content):
    path, read = written(folder, kind)
    path.write_bytes(content)
    try_to(read, path)


@pytest.mark.parametrize("kind", FILES)
@draws(25)
@given(data=st.data())
def test_a_damaged_file_is_read_or_refused_in_our_words(folder, kind, data):
    path, read = written(folder, kind)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(1, len(content)))])
    try_to(read, path)


@pytest.mark.parametrize("kind", FILES)
def test_a_folder_a_loop_of_links_or_no_file_is_refused_in_our_words(tmp_path, kind):
    path, read = written(tmp_path, kind)
    path.unlink()
    for make in (lambda: None, path.mkdir, lambda: (path.rmdir(), os.symlink(path, path))):
        make()
        if kind not in ("log", "digests"):  # of these the caller asks first whether they are there
            try_to(read, path)


@pytest.mark.parametrize("read", [px.Plan.load, px.Machine.load, px.weights.load, _read_arrays])
@pytest.mark.parametrize("name", ["a\0b", "y" * 300, "y/" * 3000, ""])
def test_names_that_no_file_has_are_refused_in_our_words(read, name):
    with pytest.raises(errors.PluraxError):
        read(Path(name))


@pytest.mark.parametrize(
    ("lost", "said"),
    [
        (DIGESTS, f"{DIGESTS} is missing"),
        ("a.bin", "state/a.bin is missing"),
        ("b.bin", "the bytes of state/b.bin are not those that were saved"),
    ],
)
def test_what_is_lost_of_a_saved_state_is_named(tmp_path, lost, said):
    for name in ("a.bin", "b.bin"):
        (tmp_path / "state" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "state" / name).write_bytes(b"saved")
    write_digests(tmp_path / "state")
    verify_files(tmp_path / "state")
    (tmp_path / "state" / lost).unlink()
    if lost == "b.bin":
        (tmp_path / "state" / lost).write_bytes(b"other")
    with pytest.raises(Damage, match=said):
        verify_files(tmp_path / "state")


def test_deep_json_is_refused_and_named():
    with pytest.raises(ValueError, match="it is nested too deeply"):
        parse_json("[" * 200 + "]" * 200)


def test_an_encrypted_archive_says_so(tmp_path):
    save_arrays(path := tmp_path / "a.npz")
    content = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        offsets = [info.header_offset for info in archive.infolist()]
    for offset in offsets:
        content[offset + 6] |= 1
    at = content.find(b"PK\1\2")
    while at >= 0:
        content[at + 8] |= 1
        at = content.find(b"PK\1\2", at + 1)
    path.write_bytes(content)
    with pytest.raises(errors.BatchError, match="encrypted"):
        _read_arrays(path)
