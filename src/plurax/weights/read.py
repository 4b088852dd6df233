"""Read weights from files of several kinds, as NumPy arrays by path.

model.safetensors      by the library of that name
model.msgpack          what `flax.serialization.to_bytes` wrote
a folder               an Orbax checkpoint; of a run of plurax the parameters of its newest one
"""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from plurax import errors, tree
from plurax.lazy import imported
from plurax.reading import refusing
from plurax.validate import local_path


def load(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Return the arrays of a file or folder of weights by path, `"encoder/0/kernel"`.

    **Arguments:** `path`, of a `.safetensors` or `.msgpack` file, of an Orbax checkpoint, or of the
    `output` of a run, of which the newest checkpoint's parameters are read. The arrays of a
    population have a leading dim of members.

    Raises `CheckpointError` for what is none of these, `MissingPackageError` where the library of a
    format is not installed.
    """
    path = local_path(path)
    with refusing(lambda reason: errors.weights_damaged(str(path), reason)):
        return _read(path)


def _read(path: Path) -> dict[str, np.ndarray]:
    if path.is_dir():
        return _read_orbax(path)
    readers: dict[str, Callable[[Path], Any]] = {
        ".safetensors": _read_safetensors,
        ".msgpack": _read_msgpack,
    }
    if not path.exists() or path.suffix not in readers:
        raise errors.weights_unknown(str(path), path.exists())
    return _named(readers[path.suffix](path))


def _named(arrays: Any) -> dict[str, np.ndarray]:
    return {name.replace(".", "/"): leaf for name, leaf in tree.named_leaves(arrays).items()}


def _read_safetensors(path: Path) -> Any:
    safetensors = imported("safetensors.numpy", ".safetensors files", "safetensors", "safetensors")
    return safetensors.load_file(path)


def _read_msgpack(path: Path) -> Any:
    serialization = imported("flax.serialization", ".msgpack files", "flax", "flax")
    return serialization.msgpack_restore(path.read_bytes())


def _read_orbax(path: Path) -> dict[str, np.ndarray]:
    import orbax.checkpoint as ocp  # slow to import

    folder = _arrays_folder(path.absolute())
    if folder is None:
        raise errors.weights_unknown(str(path), True)
    # The handler, not a checkpointer: that logs a warning where a checkpoint has no metadata of its
    # own, as those have none that are parts of others.
    handler = ocp.PyTreeCheckpointHandler()
    damaged = refusing(lambda reason: errors.weights_damaged(str(folder), reason))
    with contextlib.closing(handler), damaged:
        like = handler.metadata(folder).tree
        state = isinstance(like, dict) and {"params", "opt_state", "step"} <= like.keys()
        like = {"params": like["params"]} if state else like
        kinds = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), like)
        read = ocp.args.PyTreeRestore(like, restore_args=kinds, partial_restore=True)
        arrays = handler.restore(folder, args=read)
    return _named(arrays["params"] if state else arrays)


def _arrays_folder(path: Path) -> Path | None:
    """Return the folder of a checkpoint's arrays: this one, or one of the newest step in it."""
    if (path / "_METADATA").exists():
        return path
    for name in ("state", "default", "checkpoints"):
        if (path / name).is_dir():
            return _arrays_folder(path / name)
    steps = [one for one in path.iterdir() if one.name.isdecimal()]
    return _arrays_folder(max(steps, key=lambda one: int(one.name))) if steps else None
