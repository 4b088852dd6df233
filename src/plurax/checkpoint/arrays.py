"""Write and read the arrays of a state with Orbax.

Orbax is slow to import: import this module where the first checkpoint is written or read.
"""

import asyncio
import dataclasses
import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
from jaxtyping import PyTree

from plurax.checkpoint.files import write_digests
from plurax.disk import sync_file, sync_folder, sync_tree

REMOVED = "removed.orbax-checkpoint-tmp"
"""The folder into which checkpoints go that are not kept, until their files are removed."""
STARTING = threading.Lock()
"""Held while a save starts, in which Orbax counts the saves of a process and reads that number: of
two that start at once, in threads as those of a sweep, each would wait for files of the other."""


class StateHandler(ocp.StandardCheckpointHandler):  # type: ignore[misc]
    """Orbax's handler of arrays, which adds digests before a checkpoint is committed."""

    def finalize(self, directory: Any) -> None:
        """Add the digests; Orbax calls this in the background, when all files are written."""
        super().finalize(directory)
        write_digests(Path(directory))


@ocp.args.register_with_handler(StateHandler, for_save=True)
class StateSave(ocp.args.StandardSave):  # type: ignore[misc]
    """The state to save."""


@ocp.args.register_with_handler(StateHandler, for_restore=True)
class StateRestore(ocp.args.StandardRestore):  # type: ignore[misc]
    """The shapes, dtypes and shardings to restore."""


class DurablePath(ocp.path.atomicity.AtomicRenameTemporaryPath):  # type: ignore[misc]
    """Orbax's temporary folder of a checkpoint, on disk before it is renamed, and after.

    Orbax syncs only what its library of arrays writes: after a power cut the other files are empty,
    and the folder has its old name. What its own `finalize` writes just before the rename, a mark
    and a time, nobody here reads.
    """

    async def finalize(self) -> None:
        """Sync all files and folders, rename, and sync the folder above."""
        if SUFFIX in self.get().parent.name:  # a part of a checkpoint, which is synced as a whole
            await super().finalize()
            return
        await asyncio.to_thread(sync_tree, Path(self.get()))
        await super().finalize()
        await asyncio.to_thread(_sync_renamed, Path(self.get_final()))


SUFFIX = ocp.path.atomicity.TMP_DIR_SUFFIX


def _sync_renamed(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_file():
            sync_file(path)
    sync_folder(folder)
    sync_folder(folder.parent)


class Manager(ocp.CheckpointManager):  # type: ignore[misc]
    """Orbax's manager of a folder, without a traceback in the log for each error that it raises."""

    def __init__(self, *args: Any, **options: Any) -> None:
        for name in LOGGERS:
            logging.getLogger(name).addFilter(_is_news)
        super().__init__(*args, **options)

    def close(self) -> None:
        """Wait for saves; then errors are logged again."""
        try:
            super().close()
        finally:
            for name in LOGGERS:
                logging.getLogger(name).removeFilter(_is_news)


LOGGERS = ("absl", "asyncio")


def _is_news(record: logging.LogRecord) -> bool:
    """Return whether a record is no traceback of Orbax, of which a failed save logs a dozen."""
    ours = "orbax" in record.pathname or "orbax-checkpoint" in record.getMessage()
    return not (record.exc_info and ours)


@dataclasses.dataclass(frozen=True)
class Preserved:
    """Orbax's policy for which checkpoints are kept, by a function of their steps, ascending."""

    of_steps: Callable[[Sequence[int]], list[bool]]

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Return for each checkpoint whether it is kept."""
        return self.of_steps([one.step for one in checkpoints])


def open_manager(
    directory: Path,
    preserved: Callable[[Sequence[int]], list[bool]],
    seconds: float,
    barrier: Callable[..., None] | None,
) -> Manager:
    """Return Orbax's manager of a folder, for writing; a save fails after so many seconds.

    **Arguments:** `preserved`, which of the steps that have a checkpoint keep it; `barrier`, of
    several processes, or None.
    """
    # Orbax finds the parts of its database (OCDBT) by a glob of the whole path, in which these
    # characters are patterns. Without the database each array is its own file: slower, but right.
    plain = not set("*?[") & set(str(directory))
    # The manager needs the steps of existing checkpoints alone; their metadata may be damaged.
    options = ocp.CheckpointManagerOptions(
        preservation_policy=Preserved(preserved),
        todelete_subdir=REMOVED,  # at once, by a rename
        create=True,
        lightweight_initialize=True,
        temporary_path_class=DurablePath,
        async_options=ocp.AsyncOptions(timeout_secs=round(seconds), barrier_sync_fn=barrier),
    )
    return Manager(
        directory,
        options=options,
        item_handlers={
            "state": StateHandler(use_ocdbt=plain),
            "residuals": StateHandler(use_ocdbt=plain),
            "meta": ocp.JsonCheckpointHandler(),
        },
    )


def write_step(
    manager: ocp.CheckpointManager, step: int, arrays: dict[str, PyTree], description: Any
) -> bool:
    """Start writing a step, trees of arrays by name; return whether Orbax accepted it."""
    items = {name: StateSave(tree) for name, tree in arrays.items()}
    items["meta"] = ocp.args.JsonSave(description)
    with STARTING:
        return bool(manager.save(step, args=ocp.args.Composite(**items)))


def read_arrays(folder: Path, like: PyTree) -> PyTree:
    """Return a tree of arrays of a checkpoint, in the shapes and shardings of `like`.

    Leaves of `like` may be NumPy arrays; so are what is read for them. Raises any error of Orbax.
    """
    with ocp.Checkpointer(StateHandler()) as checkpointer:
        return checkpointer.restore(folder, args=StateRestore(like))
