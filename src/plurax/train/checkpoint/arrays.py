"""The arrays of a state, written and read by Orbax.

Orbax is slow to import: this module is imported where the first checkpoint is written or read.
"""

from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
from jaxtyping import PyTree

from plurax.train.checkpoint.files import verify_files, write_digests


class StateHandler(ocp.StandardCheckpointHandler):  # type: ignore[misc]
    """Orbax's handler of arrays; before a checkpoint is committed, the digests are added."""

    def finalize(self, directory: Any) -> None:
        """Called by Orbax in the background, when all files are written."""
        super().finalize(directory)
        write_digests(Path(directory))


@ocp.args.register_with_handler(StateHandler, for_save=True)
class StateSave(ocp.args.StandardSave):  # type: ignore[misc]
    """What to save."""


@ocp.args.register_with_handler(StateHandler, for_restore=True)
class StateRestore(ocp.args.StandardRestore):  # type: ignore[misc]
    """What to restore: shapes, dtypes and shardings."""


def open_manager(directory: Path, keep: int) -> ocp.CheckpointManager:
    """Orbax's manager of a folder, to write."""
    # Orbax finds the parts of its database by a glob of the whole path, where these would be
    # patterns. Without the database each array is a file of its own: slower, but right.
    plain = not set("*?[") & set(str(directory))
    # Of the checkpoints that are there it needs the steps alone; its notes on them may be damaged.
    options = ocp.CheckpointManagerOptions(
        max_to_keep=keep, create=True, lightweight_initialize=True
    )
    return ocp.CheckpointManager(
        directory,
        options=options,
        item_handlers={
            "state": StateHandler(use_ocdbt=plain),
            "meta": ocp.JsonCheckpointHandler(),
        },
    )


def write_state(
    manager: ocp.CheckpointManager, step: int, state: PyTree, description: dict[str, Any]
) -> bool:
    """Begin to write a step; whether Orbax takes it for one to be written."""
    items = {"state": StateSave(state), "meta": ocp.args.JsonSave(description)}
    return bool(manager.save(step, args=ocp.args.Composite(**items)))


def read_state(step: Path, like: PyTree) -> PyTree:
    """The state of a checkpoint, as `like` says. Raises `Damage`, and whatever Orbax raises."""
    verify_files(step / "state")
    with ocp.Checkpointer(StateHandler()) as checkpointer:
        return checkpointer.restore(step / "state", args=StateRestore(like))
