"""Save, verify and restore training state, with Orbax.

A checkpoint is a folder named by its step:

    8/meta/metadata       the description: position of the run, shapes, fingerprints; a checksum
    8/state/              the arrays, by Orbax
    8/state/sha256.json   a digest of each of those files
    8/residuals/          of workers that push compressed gradients: what each has left to send

Orbax does not notice a flipped byte. Digests find damaged files before Orbax reads them; the
fingerprints, computed on the devices before saving and after restoring, find any other change.
"""

import contextlib
import functools
import itertools
import os
import re
import secrets
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from plurax import errors, tree
from plurax.checkpoint.damage import Damage
from plurax.checkpoint.description import read_description, sealed
from plurax.checkpoint.files import save_errors, usable_folder, verify_files
from plurax.checkpoint.limited_wait import LimitedWait
from plurax.checkpoint.lock import LOCK, FolderLock
from plurax.checkpoint.save_barrier import SaveBarrier
from plurax.disk import FileIdentity, make_folder, sync_folder
from plurax.distributed.process_group import ProcessGroup, open_group
from plurax.fingerprint import fingerprints
from plurax.state import TrainState, check_not_donated
from plurax.timeouts import TIMEOUTS
from plurax.user_frames import warn

T = TypeVar("T")

Meta = dict[str, Any]
Residuals = list[list[np.ndarray]]
"""Of each worker of parameter servers, one array like each parameter."""

PROBE = ".seen-by-all-"
CLOSINGS = 10
"""Times that Orbax's manager is closed; after that its threads are left behind."""

SAVE_SECONDS = TIMEOUTS.save
"""The longest time that anything waits for a save, in seconds."""


class Checkpoints:
    """The checkpoints of one run, in one directory; the newest `keep` are kept.

    Opening, listing and restoring write nothing, so a run can be inspected while it trains. The
    first `save`, or `lock`, makes this object the directory's only writer until `close`; where
    another process writes, that raises `CheckpointError` naming it. Saving goes on in the
    background while training continues; `close` waits for it. Use as a context manager.

    Of several processes (`group`, default all) every one makes the same calls; process 0 is the
    writer, and each writes and reads the shards of its own devices.

    A save that fails leaves nothing behind, older checkpoints stay, and the next one may succeed. A
    folder that was removed is created anew by the next save.

    **Attributes:** `proven`: the newest checkpoint up to this step is kept, too, however old.

    Raises `CheckpointError` for a directory whose name cannot be used.
    """

    def __init__(
        self, directory: str | Path, *, keep: int = 3, group: ProcessGroup | None = None
    ) -> None:
        self.directory = usable_folder(directory)
        self._keep = keep
        self._given = group
        self._opened: ProcessGroup | None = None
        self._lock = FolderLock(self.directory / LOCK)
        self._manager: Any = None
        self._place: FileIdentity | None = None  # of the lock
        self._writing: LimitedWait | None = None  # of the save that was not waited for yet
        self._stuck = False
        self._barrier: SaveBarrier | None = None
        self._sweeper: threading.Thread | None = None
        self._damaged: set[int] = set()  # found while only reading
        self.proven = -1

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        for group in (self._given, self._opened):
            if kind is not None and group is not None:
                group.leave()  # the others may be in a step, and not close too
        self.close()

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint on disk, ascending."""
        return sorted(int(name) for name in self._names() if _is_step(name))

    def damaged(self) -> list[str]:
        """Return the names of the checkpoints that were set aside."""
        return [name for name in self._names() if _is_step(name.partition(".damaged")[0])
                and ".damaged" in name]  # fmt: skip

    def _names(self) -> list[str]:
        try:
            return sorted(path.name for path in self.directory.iterdir() if path.is_dir())
        except (FileNotFoundError, NotADirectoryError):
            return []

    # --- Writing ------------------------------------------------------------------------------

    def lock(self) -> None:
        """Become the directory's only writer, and remove saves that a dead writer left unfinished.

        From then on `restore` renames damaged checkpoints. Raises `CheckpointError` where another
        process writes, or the directory cannot be written.
        """
        if self._manager is not None:
            return
        held = self._lock.held  # after a save that failed
        try:
            self._group.on_primary(self._become_writer)
            self._check_shared()
            self._group.together(self._open_manager)
        finally:
            if self._manager is None and not held:
                self._lock.release()

    def _become_writer(self) -> None:
        with save_errors(self.directory):
            make_folder(self.directory)
            if not self._lock.held:
                self._lock.acquire()
                self._place = FileIdentity(self._lock.path)
            self._remove_unfinished()
            for step in filter(self._is_there, self._damaged):
                self._set_aside(step)

    def _check_shared(self) -> None:
        """Raise `CheckpointError` unless every process sees the directory of the first one.

        By a file of a new name: each may have a folder of that name on a disk of its own.
        """
        if self._group.count == 1:
            return
        name = self._group.on_primary(self._write_probe)
        seen = self._group.all_gather((self.directory / name).exists())
        self._group.on_primary(self._remove_unfinished)
        if not all(seen):
            raise errors.CheckpointError(
                f"process {seen.index(False)} does not see {self.directory}, into which process 0 "
                "writes. The processes save one checkpoint together: give an output on a file "
                "system that all hosts share."
            )

    def _write_probe(self) -> str:
        """Create an empty file that no earlier run has, and return its name."""
        probe = self.directory / f"{PROBE}{secrets.token_hex(8)}"
        with save_errors(self.directory):
            probe.touch()
            return probe.name

    def _open_manager(self) -> None:
        from plurax.checkpoint.arrays import open_manager

        with save_errors(self.directory):
            if self._barrier is None and self._group.count > 1:
                self._barrier = SaveBarrier(open_group(), self.directory)
            preserved, barrier = self._preserved, self._barrier
            self._manager = open_manager(self.directory, preserved, SAVE_SECONDS, barrier)

    def _remove_unfinished(self) -> None:
        for unfinished in self.directory.glob("*.orbax-checkpoint-tmp*"):
            shutil.rmtree(unfinished, ignore_errors=True)
        for probe in self.directory.glob(f"{PROBE}*"):
            probe.unlink(missing_ok=True)

    def _find_again(self) -> None:
        """Lock anew a folder that was removed while this object wrote to it.

        Raises `DiskError` where its disk is no longer there.
        """
        if not self._group.on_primary(self._is_in_place):
            self._close_manager()
            self._lock.release()

    def _is_in_place(self) -> bool:
        with save_errors(self.directory):
            return self._place is None or self._place.is_there()

    def _close_manager(self) -> None:
        """Close Orbax's manager, which raises each error of a save that failed once more."""
        manager, self._manager = self._manager, None
        for _ in range(CLOSINGS if manager is not None else 0):
            with contextlib.suppress(Exception):
                manager.close()
                return

    def save(self, state: TrainState, meta: Meta, residuals: Residuals | None = None) -> None:
        """Save a state and its JSON description; return before the bytes are on disk.

        **Arguments:** `residuals`, of each worker what it has left to send.

        A state that is already saved is not written again. Raises `CheckpointError` if this save or
        the previous one failed, or if the state is older than the newest saved, or differs from the
        one saved at the same step.
        """
        check_not_donated(state)
        self.wait()
        self._find_again()
        self.lock()
        assert self._manager is not None
        # Fingerprints are computed on the devices, before any byte passes through Orbax.
        plain, others = _plain(state)
        prints = state_fingerprints(state)
        step, newest = state.steps_taken, max(self._group.on_primary(self.steps), default=-1)
        if step <= newest:
            if self._group.on_primary(lambda: self.fingerprints(step)) != prints:
                raise errors.checkpoint_not_newer(str(self.directory), step, newest)
            return
        described: dict[str, Any] = {
            "shapes": tree.describe(plain) + others,
            "key_impls": _key_impls(state),
            "fingerprints": prints,
        }
        arrays: dict[str, PyTree] = {"state": plain}
        if residuals:
            arrays["residuals"] = jax.tree.map(_unless_empty, residuals)
            described["workers"] = len(residuals)
        from plurax.checkpoint.arrays import write_step

        saving = (self._manager, step, arrays, sealed({"run": meta, **described}))
        saved = self._or_not_written(lambda: write_step(*saving))
        assert saved, "Orbax leaves out only steps that are not newer"
        self._writing = LimitedWait(self._manager.wait_until_finished)

    def busy(self, seconds: float = 0.0) -> bool:
        """Return whether a save is still being written, `seconds` from now at the latest."""
        if self._writing is None:
            return False
        return any(self._group.all_gather(not self._writing.is_over(seconds)))

    def verify(self, step: int) -> None:
        """Read back what was saved at a step, and set it aside where it is not what was written.

        Raises `DiskError` then, and where it cannot be read.
        """
        try:
            self._read_by_primary(functools.partial(self._verify, step))
        except Damage as damage:
            raise errors.checkpoint_not_written(
                str(self.directory), self._report(step, str(damage))
            ) from None

    def _verify(self, step: int) -> None:
        with save_errors(self.directory):
            read_description(self.directory / str(step))
            verify_files(self.directory / str(step) / "state")

    def move_all(self, target: Path) -> None:
        """Move all checkpoints, including damaged ones, to a new directory. Raises `OSError`."""
        self.lock()
        self.wait()
        assert self._manager is not None
        make_folder(target)
        for name in [*self.damaged(), *map(str, self.steps())]:
            (self.directory / name).rename(target / name)
        for folder in (target, self.directory):
            sync_folder(folder)
        self._manager.reload()

    def _preserved(self, steps: Sequence[int]) -> list[bool]:
        """Return which checkpoints are kept when another is saved."""
        proven = max((step for step in steps if step <= self.proven), default=None)
        return [step in steps[-self._keep :] or step == proven for step in steps]

    def remove_after(self, step: int) -> None:
        """Remove the checkpoints of later steps, each at once. Raises `DiskError`."""
        self.lock()
        assert self._manager is not None
        self._group.on_primary(functools.partial(self._remove_after, step))
        self._manager.reload()

    def _remove_after(self, step: int) -> None:
        with save_errors(self.directory):
            for later in reversed(self.steps()):
                if later > step:
                    aside = self.directory / f"{later}.orbax-checkpoint-tmp-removed"
                    (self.directory / str(later)).rename(aside)
            sync_folder(self.directory)
            self._remove_unfinished()

    def wait(self) -> None:
        """Wait until all saves are on disk.

        Raises `DiskError` if a save failed, or takes longer than `SAVE_SECONDS`.
        """
        if self._writing is None and not self._stuck:
            return
        if self._stuck or self.busy(SAVE_SECONDS):
            self._stuck = True
            raise errors.checkpoint_too_slow(str(self.directory), SAVE_SECONDS)
        assert self._writing is not None
        self._or_not_written(self._writing.result)
        if self._group.is_primary:
            self._sweep()
        self._writing = None

    def _sweep(self) -> None:
        """Remove, in the background, the files of checkpoints that are not kept."""
        from plurax.checkpoint.arrays import REMOVED

        def sweep() -> None:
            with contextlib.suppress(OSError):
                # The folder itself stays: the next save may move another checkpoint into it.
                for one in (self.directory / REMOVED).iterdir():
                    shutil.rmtree(one, ignore_errors=True)

        self._sweeper = threading.Thread(target=sweep, name="plurax-sweep", daemon=True)
        self._sweeper.start()

    def _or_not_written(self, write: Callable[[], T]) -> T:
        """Return `write()`. Raises `DiskError` in all processes where it fails in one."""

        def described() -> T:
            try:
                return write()
            except Exception as error:
                text = str(self.directory), _reason(error)
                raise errors.checkpoint_not_written(*text) from error

        try:
            return self._group.together(described)
        except errors.DiskError:
            self._writing = None
            # It counts a failed save as an existing one; `lock` opens another.
            self._close_manager()
            if self._group.is_primary:
                with contextlib.suppress(OSError):
                    self._remove_unfinished()
            raise

    def close(self) -> None:
        """Wait for saves, and release the directory.

        Where a save does not end, the directory stays locked until the process ends.
        """
        if self._stuck:
            return
        try:
            if self._manager is not None and not self._group.left:
                self.wait()
        finally:
            if not self._stuck:
                self._close_manager()
                if self._sweeper is not None:
                    self._sweeper.join(SAVE_SECONDS)
                if self._lock.held:
                    with contextlib.suppress(OSError):
                        self._remove_unfinished()
                self._lock.release()
            for one in (self._opened, self._barrier):
                if one is not None:
                    one.close()

    # --- Several processes --------------------------------------------------------------------

    @property
    def _group(self) -> ProcessGroup:
        """The processes that save and restore together: those given, or all."""
        if self._given is not None:
            return self._given
        if self._opened is None:
            self._opened = open_group()
        return self._opened

    def _read_by_primary(self, read: Callable[[], Any]) -> Any:
        """Return what process 0 reads, JSON. Raises in all processes what it raises, `Damage` too.

        One process reads the descriptions and verifies the files: not each of them every byte.
        """

        def described() -> dict[str, Any]:
            try:
                return {"found": read()}
            except Damage as damage:
                return {"damage": str(damage)}

        answer = self._group.on_primary(described)
        if "damage" in answer:
            raise Damage(answer["damage"])
        return answer["found"]

    # --- Reading ------------------------------------------------------------------------------

    def restore(
        self, like: TrainState | Callable[[Meta], TrainState]
    ) -> tuple[TrainState, Meta] | None:
        """Return the newest undamaged state and its JSON description; None if there is none.

        **Arguments:**

        - `like`: `Program.canonical_shapes`: shapes, dtypes and shardings of each leaf. The plan
          that saved the state does not matter. Or a function that returns them from the
          description.

        Damaged checkpoints are skipped with a `DamagedCheckpointWarning`, and renamed
        `<step>.damaged` by the writer (see `lock`). Raises `CheckpointError` where only damaged
        ones are left, now or from before, and where the state is of another task, optimizer or
        version of plurax. Any other error, such as insufficient memory, propagates unchanged.
        """
        self.wait()
        reasons: list[str] = []
        steps = self._group.on_primary(self.steps)
        newest = max(steps, default=-1)
        while steps:
            step = steps.pop()
            try:
                return self._restore(step, like)
            except Exception as error:
                # A writer may have deleted this step while it was read, having saved newer ones:
                # look again.
                now = self._group.on_primary(self.steps)
                if step not in now or now[-1] > newest:
                    steps, newest, reasons = now, max(now, default=-1), []
                elif isinstance(error, Damage):
                    reasons.append(self._report(step, str(error)))
                else:
                    raise
        before = [] if reasons else self._group.on_primary(self.damaged)
        reasons += [f"{name}: set aside before" for name in before]
        if reasons:
            raise errors.checkpoint_all_damaged(str(self.directory), reasons)
        return None

    def residuals(self, step: int, like: list[np.ndarray]) -> Residuals | None:
        """Return what each worker had left to send at a step that was restored; None if not saved.

        **Arguments:** `like`, of one worker.
        """
        directory = self.directory / str(step)
        workers = read_description(directory).get("workers") if self._is_there(step) else None
        if workers is None:
            return None
        from plurax.checkpoint.arrays import read_arrays

        stored = [_unless_empty(leaf) for leaf in like]
        found: Residuals = read_arrays(directory / "residuals", [stored] * workers)
        return [[a if b is None else b for a, b in zip(like, each, strict=True)] for each in found]

    def run_meta(self, step: int) -> Meta | None:
        """Return the JSON description that was saved at a step; None where it is damaged."""
        try:
            found: Meta = read_description(self.directory / str(step))["run"]
            return found
        except Damage:
            return None

    def fingerprints(self, step: int) -> dict[str, str] | None:
        """Return the fingerprint of each leaf that was saved at a step, by path; None without."""
        try:
            found: dict[str, str] = read_description(self.directory / str(step))["fingerprints"]
            return found
        except Damage:
            return None

    def _restore(
        self, step: int, like: TrainState | Callable[[Meta], TrainState]
    ) -> tuple[TrainState, Meta]:
        directory = self.directory / str(step)
        described = self._read_by_primary(lambda: read_description(directory))
        if callable(like):
            like = like(described["run"])
        plain_like, others = _plain(like)
        shapes = tree.describe(plain_like) + others
        if shapes != described["shapes"]:
            differ = tree.differences(shapes, described["shapes"])
            raise errors.checkpoint_mismatch(str(self.directory), differ)
        names = ["state", "residuals"] if "workers" in described else ["state"]
        for name in names:
            self._read_by_primary(functools.partial(verify_files, directory / name))
        from plurax.checkpoint.arrays import read_arrays

        plain = read_arrays(directory / "state", plain_like)
        found, saved = fingerprints(plain), described["fingerprints"]
        changed = [path for path, value in found.items() if value != saved.get(path)]
        if changed:
            raise Damage(f"the bytes of {', '.join(changed)} are not those that were saved")
        return _as_saved(plain, described["key_impls"], like), described["run"]

    def _is_there(self, step: int) -> bool:
        return (self.directory / str(step)).is_dir()

    def _report(self, step: int, damage: str) -> str:
        """Set a damaged checkpoint aside, or remember it; warn; return the reason."""
        reason = f"step {step}: {damage}"
        if not self._lock.held:
            self._damaged.add(step)
            what = "passed over; training with resume sets it aside"
        else:
            what = f"set aside as {self._group.on_primary(lambda: self._set_aside(step))}"
            if self._manager is not None:
                self._manager.reload()
        warn(f"the checkpoint of {reason}; {what}", errors.DamagedCheckpointWarning)
        return reason

    def _set_aside(self, step: int) -> str:
        for attempt in itertools.count(1):
            target = self.directory / f"{step}.damaged{'' if attempt == 1 else f'.{attempt}'}"
            if not target.exists():
                break
        (self.directory / str(step)).rename(target)
        sync_folder(self.directory)
        return target.name


def _reason(error: Exception) -> str:
    """Return what went wrong, of the disk in the words of the operating system."""
    codes = re.findall(r"os_error_code='(\d+)'", str(error))
    return os.strerror(int(codes[0])) if codes else str(error)


def _is_step(name: str) -> bool:
    return name.isascii() and name.isdigit() and str(int(name)) == name


def state_fingerprints(state: TrainState) -> dict[str, str]:
    """Return the fingerprint of each leaf of a state, canonical, by path."""
    return fingerprints(_plain(state)[0])


# --- The state as ordinary arrays -------------------------------------------------------------


def _plain(state: TrainState) -> tuple[dict[str, PyTree], str]:
    """Return the state as a dict of ordinary arrays, and a text that lists all others.

    Random keys become their data, arrays without elements, which Orbax does not write, None. Leaves
    of `state` may be `jax.ShapeDtypeStruct`s.
    """

    def plain(leaf: Any) -> Any:
        if not _is_key(leaf):
            return _unless_empty(leaf)
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.random.key_data(leaf)
        data = jax.eval_shape(jax.random.key_data, leaf)
        sharding = leaf.sharding or state.step.sharding
        return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=sharding)

    others = _others(state).items()
    text = "".join(f"\n    {path} is a {leaf.dtype}" for path, leaf in others)
    return jax.tree.map(plain, _parts(state)), text


def _unless_empty(leaf: Any) -> Any:
    return None if 0 in leaf.shape else leaf


def _as_saved(plain: dict[str, PyTree], impls: dict[str, str], like: TrainState) -> TrainState:
    """Return the state that `_plain` converted; `like` says what is empty."""
    arrays = tree.named_leaves(plain)

    def saved(path: Any, leaf: Any) -> Any:
        name = tree.path_name(path)
        if name not in arrays:
            return jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding)
        impl = impls.get(name)
        return arrays[name] if impl is None else jax.random.wrap_key_data(arrays[name], impl=impl)

    return TrainState(**jax.tree.map_with_path(saved, _parts(like)))


def _key_impls(state: TrainState) -> dict[str, str]:
    keys = {path: leaf for path, leaf in _others(state).items() if _is_key(leaf)}
    return {path: str(jax.random.key_impl(leaf)) for path, leaf in keys.items()}


def _others(state: TrainState) -> dict[str, Any]:
    named = tree.named_leaves(_parts(state))
    return {path: leaf for path, leaf in named.items() if _is_key(leaf) or 0 in leaf.shape}


def _parts(state: TrainState) -> dict[str, PyTree]:
    names = ("step", "params", "opt_state", "model_state", "key", "skipped")
    return {name: getattr(state, name) for name in names}


def _is_key(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)
