"""The files of a saved state: written and read by Orbax, with a SHA-256 of each beside them.

Orbax reads a truncated file with some error, and a changed byte often with none. With the digests,
damage is known before Orbax looks at a file; whatever it raises after that is not damage.
"""

import errno
import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
from jaxtyping import PyTree

from plurax import errors
from plurax.checkpoint.damage import Damage
from plurax.validate import local_path

DIGESTS = "sha256.json"


class StateHandler(ocp.StandardCheckpointHandler):  # type: ignore[misc]
    """Orbax's handler of arrays; before a checkpoint is committed, the digests are added."""

    def finalize(self, directory: Any) -> None:
        """Called by Orbax in the background, when all files are written."""
        super().finalize(directory)
        with (Path(directory) / DIGESTS).open("x", encoding="utf-8") as file:
            json.dump(_digests(Path(directory)), file)
            file.flush()
            os.fsync(file.fileno())


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


def read_state(step: Path, like: PyTree) -> PyTree:
    """The state of a checkpoint, as `like` says. Raises `Damage`, and whatever Orbax raises."""
    verify_files(step / "state")
    with ocp.Checkpointer(StateHandler()) as checkpointer:
        return checkpointer.restore(step / "state", args=StateRestore(like))


def verify_files(directory: Path) -> None:
    """Raise `Damage` unless every file is there as it was saved."""
    try:
        saved = json.loads((directory / DIGESTS).read_bytes())
        found = _digests(directory)
    except (FileNotFoundError, NotADirectoryError):
        raise Damage(f"{directory.name}/{DIGESTS} is missing") from None
    except ValueError:
        raise Damage(f"{directory.name}/{DIGESTS} is no longer JSON") from None
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        raise Damage(f"{error.filename or directory} cannot be read: {error.strerror}") from None
    if not isinstance(saved, dict) or not saved:
        raise Damage(f"{directory.name}/{DIGESTS} is not as it was saved")
    for name, digest in saved.items():
        if name not in found:
            raise Damage(f"{directory.name}/{name} is missing")
        if found[name] != digest:
            raise Damage(f"the bytes of {directory.name}/{name} are not those that were saved")


def _digests(directory: Path) -> dict[str, str]:
    found = {}
    for path in sorted(directory.rglob("*")):
        if path.is_file() and path.name != DIGESTS:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            found[path.relative_to(directory).as_posix()] = digest
    return found


def usable_folder(directory: str | Path) -> Path:
    """The absolute path of a folder for checkpoints.

    Raises `CheckpointError` for a URL, and for a path that the file library under Orbax takes for
    another: it reads a backslash as a slash, and knows only UTF-8.
    """
    path = local_path(directory).absolute()
    if "\\" in str(path):
        raise errors.folder_with_backslash(str(path))
    if re.search(r"[\ud800-\udfff\0]", str(path)):
        raise errors.folder_not_text(repr(str(path)))
    return path
