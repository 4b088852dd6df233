"""Store a SHA-256 of each file of a saved state, and verify them.

Orbax reports a truncated file by various errors, and a changed byte often not at all. Digests find
damage before Orbax opens a file; any later error of Orbax is not damage.
"""

import contextlib
import errno
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

from plurax import errors
from plurax.checkpoint.damage import Damage
from plurax.reading import parse_json
from plurax.validate import local_path

DIGESTS = "sha256.json"


@contextlib.contextmanager
def save_errors(directory: Path) -> Iterator[None]:
    """Raise `DiskError` for an `OSError` while a run's folder or its checkpoints are written."""
    try:
        yield
    except OSError as error:
        raise errors.checkpoint_not_written(str(directory), str(error)) from None


def write_digests(directory: Path) -> None:
    """Write the digests of a folder whose files are all written. Raises `OSError`."""
    with (directory / DIGESTS).open("x", encoding="utf-8") as file:
        json.dump(_digests(directory), file)


def verify_files(directory: Path) -> None:
    """Raise `Damage` unless every file is present and unchanged."""
    try:
        saved = parse_json((directory / DIGESTS).read_bytes())
        digests = _digests(directory)
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
        if name not in digests:
            raise Damage(f"{directory.name}/{name} is missing")
        if digests[name] != digest:
            raise Damage(f"the bytes of {directory.name}/{name} are not those that were saved")


def _digests(directory: Path) -> dict[str, str]:
    digests = {}
    for path in sorted(directory.rglob("*")):
        if path.is_file() and path.name != DIGESTS:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            digests[path.relative_to(directory).as_posix()] = digest
    return digests


def usable_folder(directory: str | Path) -> Path:
    """Return the absolute path of a folder for checkpoints.

    Raises `CheckpointError` for a URL, and for a path that the file library under Orbax would
    misread: it takes a backslash for a slash, and accepts only UTF-8.
    """
    path = local_path(directory).absolute()
    if "\\" in str(path):
        raise errors.CheckpointError(
            f"checkpoints cannot be kept in {path}: the library that writes them takes a backslash "
            "for a slash, and would write elsewhere. Choose a directory without one in its path."
        )
    if re.search(r"[\ud800-\udfff\0]", str(path)):
        raise errors.CheckpointError(
            f"checkpoints cannot be kept in {str(path)!r}: the path is not UTF-8 text. Choose "
            "another directory."
        )
    return path
