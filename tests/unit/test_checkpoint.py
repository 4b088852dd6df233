"""Checkpoints: damage is proven, never guessed; one writer per folder; readers write nothing."""

import errno
import fcntl
import json
import multiprocessing
import os
import subprocess
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from tests import models

import plurax as px
from plurax.checkpoint import Checkpoints, arrays, lock, manager
from plurax.checkpoint.arrays import StateHandler
from plurax.checkpoint.damage import Damage
from plurax.checkpoint.description import FORMAT, read_description, sealed
from plurax.checkpoint.limited_wait import LimitedWait
from plurax.checkpoint.lock import FolderLock
from plurax.errors import DamagedCheckpointWarning
from plurax.fingerprint import fingerprint, fingerprints
from plurax.state import TrainState


def make_state(step=1, seed=0, impl=None):
    params = {"w": jax.random.normal(jax.random.key(seed), (300,)) + step}
    zero = jnp.zeros((), jnp.int32)
    return TrainState(zero + step, params, (), (), jax.random.key(seed, impl=impl), zero)


def like(state):
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state
    )


LIKE = like(make_state())


def saved(directory, *steps):
    """A folder with checkpoints of some steps."""
    with Checkpoints(directory, keep=9) as writer:
        for step in steps:
            writer.save(make_state(step), {"note": step})
    return directory


def listing(directory):
    """Everything below a folder, with sizes and times."""
    return {
        str(path.relative_to(directory)): (path.stat().st_size, path.stat().st_mtime_ns)
        for path in [directory, *directory.rglob("*")]
    }


# --- Fingerprints -----------------------------------------------------------------------------

DTYPES = (
    "float32", "bfloat16", "float16", "int32", "uint8", "int16", "bool", "complex64", "int4",
    "uint4", "float8_e4m3fn",
)  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_has_one(dtype):
    values = jnp.arange(24).reshape(2, 3, 4).astype(dtype)
    other = values.at[1, 2, 3].set(jnp.zeros((), dtype))
    assert fingerprints({"x": values}) == fingerprints({"x": values})
    assert fingerprints({"x": values}) != fingerprints({"x": other})


@pytest.mark.usefixtures("x64")
def test_wide_dtypes_too():
    for values, step in (
        (jnp.linspace(0, 1, 7), 1e-15),
        (jnp.linspace(0, 1, 7).astype(complex) * (1 + 1j), 1e-15j),
        (jnp.arange(7) + 2**40, 2**33),
    ):
        assert values.dtype.itemsize >= 8
        assert fingerprints([values]) != fingerprints([values.at[3].add(step)])


def by_hand(words):
    """Both sums in whole numbers of Python, as the module's text has them."""

    def mix(word):
        word = (word ^ word >> 16) * 0x85EBCA6B % 2**32
        word = (word ^ word >> 13) * 0xC2B2AE35 % 2**32
        return word ^ word >> 16

    first = sum(mix(word ^ mix(i)) for i, word in enumerate(words))
    second = sum(
        mix((word ^ mix(2**32 - 1 - i)) * 0x9E3779B1 % 2**32) for i, word in enumerate(words)
    )
    return f"{first % 2**32:08x}{second % 2**32:08x}"


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.float32([[0, 1, 2], [3, 4, 5]]), np.arange(6, dtype="f4").view("u4")),
        (np.asarray([1.5, -2], jnp.bfloat16), [0x3FC0, 0xC000]),
        (np.array([True, False]), [1, 0]),
        (np.int32(-1), [2**32 - 1]),
        (np.zeros((0, 3), "f4"), []),
        (np.complex64([1 + 2j, 3 + 4j]), np.float32([1, 3, 2, 4]).view("u4")),
        (np.asarray([3, -4], jnp.int4), np.float32([3, -4]).view("u4")),
    ],
    ids=lambda value: str(getattr(value, "dtype", "")),
)
def test_fingerprints_are_those_of_every_release(array, words):
    """Or a checkpoint that is whole would be called damaged."""
    assert fingerprints([jnp.asarray(array)])["0"] == by_hand([int(word) for word in words])


WORDS = np.random.default_rng(0).integers(0, 2**32, 64, dtype=np.uint32)
BITS = st.sets(st.tuples(st.integers(0, 63), st.integers(0, 31)), min_size=1, max_size=2)


def differs(words):
    before, after = (np.asarray(fingerprint(jnp.asarray(each))) for each in (WORDS, words))
    return (before != after).all()


@given(BITS)
def test_one_or_two_flipped_bits_show(bits):
    words = WORDS.copy()
    for place, bit in bits:
        words[place] ^= np.uint32(1) << np.uint32(bit)
    assert differs(words)


@given(st.sets(st.integers(0, 63), min_size=1))
def test_flipped_signs_show_even_of_an_even_number_of_words(places):
    words = WORDS.copy()
    words[list(places)] ^= np.uint32(2**31)
    assert differs(words)


def test_swapped_rows_show():
    values = jax.random.normal(jax.random.key(0), (8, 4))
    assert fingerprints([values]) != fingerprints([values[::-1]])


def test_it_does_not_depend_on_the_sharding():
    values = jax.random.normal(jax.random.key(0), (8, 8))
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    prints = {
        fingerprints([jax.device_put(values, NamedSharding(mesh, spec))])["0"]
        for spec in (P(), P("a"), P("b", "a"), P(("a", "b")), P(None, "b"))
    }
    assert len(prints) == 1


# --- The description --------------------------------------------------------------------------


def described(directory, envelope):
    (directory / "meta").mkdir(exist_ok=True)
    text = envelope if isinstance(envelope, bytes) else json.dumps(envelope).encode()
    (directory / "meta" / "metadata").write_bytes(text)
    return directory


def test_flipped_bits_of_a_description_show(tmp_path):
    content = json.dumps(sealed({"epoch": 3, "fingerprints": {}, "x": [0.5, None]})).encode()
    assert read_description(described(tmp_path, content))["epoch"] == 3
    for place in range(0, 8 * len(content), 3):
        flipped = bytearray(content)
        flipped[place // 8] ^= 1 << place % 8
        try:
            assert read_description(described(tmp_path, bytes(flipped)))["epoch"] == 3
        except Damage:
            continue
        # Only what means the same: the case of a letter in an escape, say.
        assert json.loads(flipped) == json.loads(content)


@pytest.mark.parametrize("content", [b"", b"[1]", b"{}", b"\xff", b'"text"', b"null"])
def test_a_torn_description_is_damage(tmp_path, content):
    said = "is no longer JSON" if content in (b"", b"\xff") else "is not as it was saved"
    with pytest.raises(Damage, match=f"^its description {said}$"):
        read_description(described(tmp_path, content))


def test_a_missing_description_is_damage(tmp_path):
    with pytest.raises(Damage, match=r"^its description is missing$"):
        read_description(tmp_path)


def test_another_version_is_not_damage(tmp_path, monkeypatch):
    saved(tmp_path, 1)
    monkeypatch.setattr("plurax.checkpoint.description.FORMAT", FORMAT + 1)
    newer = sealed({"unheard": "of"})
    monkeypatch.undo()
    described(tmp_path / "1", newer)
    with Checkpoints(tmp_path) as writer:
        writer.lock()
        with pytest.raises(
            px.errors.CheckpointError, match=r"written by a newer version of plurax"
        ):
            writer.restore(LIKE)
        first = {"fingerprints": {}, "shapes": "", "key_impl": "rbg", "run": {}}
        described(tmp_path / "1", first)
        with pytest.raises(
            px.errors.CheckpointError, match=r"written by an older version of plurax"
        ):
            writer.restore(LIKE)
        assert writer.steps() == [1]


def test_what_is_no_json_is_refused_before_anything_is_written(tmp_path):
    with (
        Checkpoints(tmp_path) as writer,
        pytest.raises(
            px.errors.CheckpointError, match=r"what is to be saved beside the state is not JSON"
        ),
    ):
        writer.save(make_state(), {"seed": np.int64(3)})
    assert Checkpoints(tmp_path).steps() == []


def test_the_algorithm_of_a_key_comes_back(tmp_path):
    state = make_state(impl="rbg")
    with Checkpoints(tmp_path) as writer:
        writer.save(state, {})
        writer.wait()
        restored, _ = writer.restore(like(state))
        assert str(jax.random.key_impl(restored.key)) == "rbg"
        assert models.same_bits(jax.random.bits(restored.key), jax.random.bits(state.key))
        # The data of unsafe_rbg have the same shape.
        with pytest.raises(px.errors.CheckpointError, match=r"another task or optimizer"):
            writer.restore(like(make_state(impl="unsafe_rbg")))


def test_random_keys_and_arrays_without_elements_come_back(tmp_path):
    """Of parameters, the optimizer's state and model state, under another plan."""

    def loss(params, state, batch, keys, mask):
        kept, key = jax.random.split(state["key"])
        noise = jnp.where(mask, jax.random.normal(key, ()), 0)
        return batch["x"] @ params["w"] * noise, {}, {"key": kept}

    task = px.Task(
        init=lambda key: ({"w": jnp.ones(5), "none": jnp.zeros((0, 3))}, {"key": key}),
        loss=loss, evaluate=lambda params, state, batch: batch["x"] @ params["w"],
        stateful=True, coupled=True,
    )  # fmt: skip
    rule = optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(1)), optax.adam(0.1))

    def fitted(epochs, plan=px.Plan(), **options):  # noqa: B008  frozen
        return px.fit(task, rule, models.data(16), plan=plan, epochs=epochs, batch_size=8,
                      progress=False, **options)  # fmt: skip

    whole = fitted(2)
    fitted(1, output=tmp_path)
    resumed = fitted(2, px.Plan(data=2, zero=1), output=tmp_path, resume=True)
    found, expected = (jax.tree.leaves(run.state) for run in (resumed, whole))
    for one, other in zip(found, expected, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
    assert models.max_rel_error(resumed.state.params, whole.state.params) < 1e-5
    data = [jax.random.key_data(run.state.model_state["key"]) for run in (resumed, whole)]
    assert models.same_bits(*data)
    started = px.start_from(task, tmp_path).init(jax.random.key(0))[0]
    assert models.same_bits(started, resumed.state.params)


# --- What is damage, and what is not ----------------------------------------------------------


def files_of(directory):
    return sorted(path for path in directory.rglob("*") if path.is_file())


def test_any_file_that_is_changed_or_missing_is_noticed_or_not_needed(tmp_path):
    saved(tmp_path, 1)
    files = files_of(tmp_path / "1")
    assert len(files) > 6
    noticed = set()
    for path in files:
        content = path.read_bytes()
        for change in ("flip", "cut", "remove"):
            changed = bytearray(content)
            if change == "flip" and content:
                changed[len(content) // 2] ^= 1
            path.unlink() if change == "remove" else path.write_bytes(
                changed[: len(content) // 2] if change == "cut" else changed
            )
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DamagedCheckpointWarning)
                try:
                    state, meta = Checkpoints(tmp_path).restore(LIKE)
                    assert models.same_bits(state.params, make_state(1).params)
                    assert meta == {"note": 1}
                except px.errors.CheckpointError:
                    noticed.add((path.name, change))
        path.write_bytes(content)
    for path in files:
        if path.name not in ("_CHECKPOINT_METADATA", "commit_success.txt"):  # Orbax's own notes
            assert (path.name, "flip") in noticed, path


@pytest.mark.parametrize("content", [b"", b"{", b'{"item_handlers": 3}', b"[]", b"\xff", None])
def test_notes_of_orbax_are_not_needed_to_go_on(tmp_path, content):
    for path in saved(tmp_path, 1).rglob("_CHECKPOINT_METADATA"):
        path.unlink() if content is None else path.write_bytes(content)
    with Checkpoints(tmp_path) as writer:
        writer.lock()
        assert writer.restore(LIKE)[1] == {"note": 1}
        writer.save(make_state(2), {"note": 2})
        writer.wait()
        assert writer.restore(LIKE)[1] == {"note": 2}


def test_values_that_were_wrong_when_they_were_written_are_noticed(tmp_path):
    """The files are as they were saved; the fingerprint was taken before."""
    saved(tmp_path, 1)
    values = read_description(tmp_path / "1")
    values["fingerprints"]["params/w"] = "0" * 16
    described(tmp_path / "1", sealed(values))
    with Checkpoints(tmp_path) as writer:
        writer.lock()
        with (
            pytest.warns(DamagedCheckpointWarning, match="params/w are not those.*as 1.damaged"),
            pytest.raises(
                px.errors.CheckpointError, match=r"(?s)no checkpoint in .* can be restored.*-"
            ),
        ):
            writer.restore(LIKE)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory"),
        PermissionError(errno.EACCES, "not yours"),
        RuntimeError("nobody knows"),
        ValueError("nobody knows"),
        KeyboardInterrupt(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_is_not_damage_is_passed_on_and_condemns_nothing(tmp_path, monkeypatch, error):
    saved(tmp_path, 1, 2)

    def fails(*_args):
        raise error

    monkeypatch.setattr(arrays, "read_arrays", fails)
    with Checkpoints(tmp_path) as writer:
        writer.lock()
        with pytest.raises(type(error)):
            writer.restore(LIKE)
        assert (writer.steps(), writer.damaged()) == ([1, 2], [])
    monkeypatch.undo()
    assert Checkpoints(tmp_path).restore(LIKE)[1] == {"note": 2}


def test_what_cannot_be_read_is_damage_and_what_may_not_be_is_not(tmp_path, monkeypatch):
    saved(tmp_path, 1)

    def fails(number):
        def digest(*_):
            raise OSError(number, "no", "file")

        monkeypatch.setattr("plurax.checkpoint.files.hashlib.file_digest", digest)

    fails(errno.EACCES)
    with pytest.raises(PermissionError):
        Checkpoints(tmp_path).restore(LIKE)
    fails(errno.EIO)
    with (
        pytest.warns(DamagedCheckpointWarning, match="cannot be read"),
        pytest.raises(px.errors.CheckpointError),
    ):
        Checkpoints(tmp_path).restore(LIKE)


def test_a_second_damaged_one_of_a_step_finds_a_name(tmp_path):
    saved(tmp_path, 1)
    (tmp_path / "2").mkdir()
    (tmp_path / "2.damaged").mkdir()
    with Checkpoints(tmp_path) as writer:
        writer.lock()
        with pytest.warns(DamagedCheckpointWarning, match=r"set aside as 2\.damaged\.2"):
            assert writer.restore(LIKE)[1] == {"note": 1}
        writer.save(make_state(2), {})
        writer.wait()
        assert writer.steps() == [1, 2]


# --- Saving -----------------------------------------------------------------------------------


def test_an_older_or_another_state_is_refused_and_the_same_is_not(tmp_path):
    with Checkpoints(saved(tmp_path, 2, 4), keep=9) as writer:
        before = listing(tmp_path)
        writer.save(make_state(4), {"note": "again"})
        writer.save(make_state(2), {"note": "again"})
        for state in (make_state(4, seed=1), make_state(2, seed=1), make_state(3)):
            with pytest.raises(
                px.errors.CheckpointError, match=r"checkpoints follow the order of steps"
            ):
                writer.save(state, {})
        writer.wait()
        after = listing(tmp_path)
        assert {name: after[name] for name in before if name not in (".", lock_name())} == {
            name: before[name] for name in before if name not in (".", lock_name())
        }
        assert writer.restore(LIKE)[1] == {"note": 4}


def lock_name():
    return manager.LOCK


@pytest.mark.parametrize(
    "part",
    [(ocp.CheckpointManager, "save"), (StateHandler, "finalize")],
    ids=["at once", "in the background"],
)
def test_a_full_disk_is_said_and_the_next_save_works(tmp_path, monkeypatch, part):
    with Checkpoints(saved(tmp_path, 1)) as writer:

        def full(self, *_args, **_options):
            raise OSError(errno.ENOSPC, "No space left on device")

        def save():
            writer.save(make_state(2), {})
            writer.wait()

        with monkeypatch.context() as patched:
            patched.setattr(*part, full)
            with pytest.raises(
                px.errors.CheckpointError, match=r"could not be written.*No space left"
            ):
                save()
        assert writer.steps() == [1]
        writer.save(make_state(2), {})
        writer.wait()
        assert writer.steps() == [1, 2]


def test_a_manager_that_never_closes_does_not_keep_the_folder(tmp_path, monkeypatch):
    def broken(self):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched, Checkpoints(saved(tmp_path, 1)) as writer:
        writer.lock()
        patched.setattr(ocp.CheckpointManager, "close", broken)
    with Checkpoints(tmp_path) as writer:
        writer.lock()


def test_all_checkpoints_are_moved_damaged_ones_too(tmp_path):
    (saved(tmp_path / "run", 1, 2) / "1").rename(tmp_path / "run" / "1.damaged")
    with Checkpoints(tmp_path / "run") as writer:
        writer.move_all(tmp_path / "before")
        assert (writer.steps(), writer.damaged(), writer.restore(LIKE)) == ([], [], None)
        writer.save(make_state(1), {"note": "anew"})
    before = Checkpoints(tmp_path / "before")
    assert (before.steps(), before.damaged()) == ([2], ["1.damaged"])
    assert before.restore(LIKE)[1] == {"note": 2}
    assert Checkpoints(tmp_path / "run").restore(LIKE)[1] == {"note": "anew"}


# --- Folders ----------------------------------------------------------------------------------

NAMES = (
    "with spaces", "ünïcödé 模型", "[brackets]", "[", "]", "run*", "what?", "{a,b}", "'quoted'",
    '"twice"', "100%", "%41", "-dash", "~home", "$HOME", "#3", "a:b", "line\nbreak", "long" * 50,
    "3.orbax-checkpoint-tmp", "a;b|c&d",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_folders_of_any_name(tmp_path, name):
    saved(tmp_path / name / "checkpoints", 1)
    # A pattern that reads its neighbours' files would find these.
    (tmp_path / "runs").mkdir()
    with Checkpoints(tmp_path / name / "checkpoints") as writer:
        writer.save(make_state(2), {"note": 2})
        writer.wait()
        state, meta = writer.restore(LIKE)
    assert meta == {"note": 2}
    assert models.same_bits(state.params, make_state(2).params)


def test_a_folder_may_be_moved_to_a_name_that_is_a_pattern(tmp_path):
    saved(tmp_path / "plain", 1).rename(tmp_path / "[a]*")
    assert Checkpoints(tmp_path / "[a]*").restore(LIKE)[1] == {"note": 1}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("back\\slash", r"takes a backslash for a slash, and would write elsewhere"),
        ("\udcff", r"the path is not UTF-8 text"),
        ("gs://bucket/run", r"plurax writes to the file system of this machine"),
    ],
)
def test_folders_that_cannot_be_are_refused_before_training(tmp_path, name, message):
    with pytest.raises(px.errors.CheckpointError, match=message):
        Checkpoints(name if "://" in name else tmp_path / name)


# --- Readers and the writer -------------------------------------------------------------------


def test_reading_writes_nothing(tmp_path):
    saved(tmp_path, 1, 2)
    unfinished = tmp_path / "3.orbax-checkpoint-tmp"
    unfinished.mkdir()
    (unfinished / "half").write_text("a save that is under way")
    (tmp_path / "2" / "meta" / "metadata").write_text("damaged")
    before = listing(tmp_path)
    with Checkpoints(tmp_path) as reader:
        assert reader.steps() == [1, 2]
        with pytest.warns(DamagedCheckpointWarning, match="step 2: .*; passed over"):
            assert reader.restore(LIKE)[1] == {"note": 1}
    assert listing(tmp_path) == before
    with Checkpoints(tmp_path / "not there") as reader:
        assert reader.steps() == []
        assert reader.restore(LIKE) is None
    assert not (tmp_path / "not there").exists()


def test_a_reader_that_begins_to_write_sets_aside_what_it_found(tmp_path):
    saved(tmp_path, 1, 2)
    (tmp_path / "2" / "meta" / "metadata").write_text("damaged")
    with Checkpoints(tmp_path) as mine:
        with pytest.warns(DamagedCheckpointWarning):
            mine.restore(LIKE)
        mine.save(make_state(2), {"note": "anew"})
    assert Checkpoints(tmp_path).damaged() == ["2.damaged"]
    assert Checkpoints(tmp_path).restore(LIKE)[1] == {"note": "anew"}


def test_only_the_writer_removes_what_was_left_unfinished(tmp_path):
    (tmp_path / "3.orbax-checkpoint-tmp").mkdir()
    with Checkpoints(tmp_path):
        assert (tmp_path / "3.orbax-checkpoint-tmp").exists()
    with Checkpoints(tmp_path) as first, Checkpoints(tmp_path) as second:
        first.lock()
        assert not (tmp_path / "3.orbax-checkpoint-tmp").exists()
        (tmp_path / "4.orbax-checkpoint-tmp").mkdir()
        with pytest.raises(
            px.errors.CheckpointError, match=rf"is written by process {os.getpid()} on "
        ):
            second.lock()
        assert (tmp_path / "4.orbax-checkpoint-tmp").exists()
    with Checkpoints(tmp_path) as third:
        third.lock()


def test_a_checkpoint_that_its_writer_removes_meanwhile_is_no_damage(tmp_path, monkeypatch):
    saved(tmp_path, 1, 2)
    real = arrays.read_arrays

    def slow(folder, like):
        step = folder.parent
        if step.name == "2":
            step.rename(tmp_path / "gone")
            saved(tmp_path, 3)
        return real(folder, like)

    monkeypatch.setattr(arrays, "read_arrays", slow)
    assert Checkpoints(tmp_path).restore(LIKE)[1] == {"note": 3}


@pytest.mark.parametrize("meanwhile", ["set aside", "followed by another"])
def test_a_damaged_checkpoint_that_its_writer_knows_of_is_no_news(tmp_path, monkeypatch, meanwhile):
    """It is gone, or a newer one is there: either is enough to look again, without a warning."""
    saved(tmp_path, 1, 2)
    real = arrays.read_arrays

    def slow(folder, like):
        step = folder.parent
        if step.name == "2" and meanwhile == "set aside":
            step.rename(tmp_path / "2.damaged")
            raise FileNotFoundError(step)
        if step.name == "2":
            saved(tmp_path, 3)
            raise Damage("torn")
        return real(folder, like)

    monkeypatch.setattr(arrays, "read_arrays", slow)
    found = 1 if meanwhile == "set aside" else 3
    assert Checkpoints(tmp_path).restore(LIKE)[1] == {"note": found}


# --- The lock ---------------------------------------------------------------------------------


def taken(path):
    mine = FolderLock(path)
    mine.acquire()
    mine.release()
    return True


def owner(**changes):
    return json.dumps({**lock._self(), **changes}).encode()


def dead():
    with subprocess.Popen(["true"]) as process:
        process.wait()
        return process.pid


@pytest.mark.parametrize(
    ("content", "free"),
    [
        (lambda: b"", True),
        (lambda: b"\0" * 90, True),  # a machine that lost power
        (lambda: owner(pid=dead()), True),
        (lambda: owner(started=1), True),  # the number was given to another process
        (lambda: owner(boot="before"), True),
        (lambda: owner(pid=1, started=lock._started(1)), False),
        (lambda: owner(), False),  # where the kernel's lock is none
        (lambda: owner(host="elsewhere"), False),
        (lambda: owner(host="elsewhere", pid=dead()), False),
        (lambda: b'{"host": "el', False),
        (lambda: b"[]", False),
    ],
    ids=lambda value: str(value) if isinstance(value, bool) else "",
)
def test_who_may_take_a_lock(tmp_path, content, free):
    path = tmp_path / "writer.lock"
    path.write_bytes(content())
    if free:
        assert taken(path)
        assert path.read_bytes() == b""
    else:
        before = path.read_bytes()
        with pytest.raises(
            px.errors.CheckpointError, match=r"two writers would destroy each other's"
        ):
            taken(path)
        assert path.read_bytes() == before


def test_the_kernels_lock_is_enough(tmp_path):
    """Its owner has not written who it is yet."""
    path = tmp_path / "writer.lock"
    with path.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(
            px.errors.CheckpointError, match=r"two writers would destroy each other's"
        ):
            taken(path)
    assert taken(path)


HOLDS = """
import sys
from pathlib import Path
from plurax.checkpoint.lock import FolderLock
mine = FolderLock(Path(sys.argv[1]))
mine.acquire()
print("held", flush=True)
sys.stdin.read()  # until it is killed, or the test is gone
"""


def test_a_live_process_keeps_it_and_a_killed_one_does_not(tmp_path):
    path = tmp_path / "writer.lock"
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout.readline() == b"held\n"
        with pytest.raises(
            px.errors.CheckpointError, match=rf"is written by process {process.pid} on "
        ):
            taken(path)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # dead, and nobody has asked yet
        assert taken(path)


def test_a_child_that_was_forked_does_not_hold_it(tmp_path):
    path = tmp_path / "writer.lock"
    mine = FolderLock(path)
    mine.acquire()
    hold, go = multiprocessing.Pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that JAX has threads
        child = os.fork()
    if not child:
        hold.send(None)
        hold.recv()
        mine.release()  # it is not the child's
        os._exit(0)
    again = FolderLock(path)
    try:
        with pytest.raises(px.errors.CheckpointError):
            taken(path)
        go.recv()
        mine.release()
        again.acquire()  # the child lives, and holds nothing
    finally:
        go.send(None)
        os.waitpid(child, 0)
    assert json.loads(path.read_bytes())["pid"] == os.getpid()
    again.release()


def test_runs_in_two_threads_of_a_process_save_at_once(tmp_path, monkeypatch):
    """As those of a sweep do: Orbax numbers the saves of a process, and mixed up two at once."""
    monkeypatch.setattr(manager, "SAVE_SECONDS", 20)
    states = [make_state(step=step) for step in range(8)]

    def run(name):
        with Checkpoints(tmp_path / name, keep=9) as writer:
            for state in states:
                writer.save(state, {})
        return writer.steps()

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(run, "ab")) == [list(range(8))] * 2


# --- Waiting ----------------------------------------------------------------------------------


def test_a_limited_wait_ends_with_the_function_or_with_its_limit():
    go = threading.Event()
    waiting = LimitedWait(go.wait)
    assert not waiting.is_over()
    assert not waiting.is_over(0.01)
    go.set()
    assert waiting.is_over(30)
    waiting.result()


def test_a_limited_wait_raises_what_the_function_raised():
    waiting = LimitedWait(lambda: 1 / 0)
    assert waiting.is_over(30)
    with pytest.raises(ZeroDivisionError):
        waiting.result()
