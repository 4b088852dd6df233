"""Write weights to a file that other libraries read."""

import os

import numpy as np
from jaxtyping import PyTree

from plurax import errors, tree
from plurax.disk import make_folder, replacing
from plurax.distributed.global_arrays import fetch, is_primary
from plurax.lazy import imported
from plurax.validate import local_path


def save(params: PyTree, path: str | os.PathLike[str]) -> None:
    """Write parameters to a `.safetensors` file, named by path, `"encoder/0/kernel"`.

    Call it in every process of a gang; one of them writes. The file appears when it is whole.

    **Arguments:** `params`, a tree of arrays, on any devices (those of
    `program.to_canonical(state)` have their usual shapes); `path`, which ends in `.safetensors`.

    Raises `CheckpointError` for another ending, `MissingPackageError` without safetensors.
    """
    path = local_path(path)
    if path.suffix != ".safetensors":
        raise errors.CheckpointError(
            f"{path}: weights are written to a .safetensors file; name it so."
        )
    safetensors = imported("safetensors.numpy", ".safetensors files", "safetensors", "safetensors")
    whole = {name: np.ascontiguousarray(leaf) for name, leaf in named(params).items()}
    for name, leaf in whole.items():
        if leaf.dtype.kind not in "biufV":  # V: bfloat16
            raise errors.CheckpointError(
                f"the parameter {name!r} is {leaf.dtype}, which no .safetensors file holds. Give "
                "real and imaginary parts as two arrays, or save the state by plurax.Checkpoints."
            )
    if is_primary():
        make_folder(path.parent)
        with replacing(path) as new:
            safetensors.save_file(whole, new)


def named(params: PyTree) -> dict[str, np.ndarray]:
    """Return the arrays of a tree on the host, by path."""
    return tree.named_leaves(fetch(params))
