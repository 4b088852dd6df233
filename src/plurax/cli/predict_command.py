"""`plurax predict`: run a trained network over inputs from a file."""

import dataclasses
import zipfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from plurax import errors, tree
from plurax.checkpoint import Checkpoints
from plurax.checkpoint.restore import restore
from plurax.cli.chosen import chosen_program, written
from plurax.cli.options import Common
from plurax.cli.parse import parse
from plurax.disk import replacing
from plurax.execute.placement import chunks
from plurax.reading import refusing
from plurax.user_frames import describe_error, is_users
from plurax.validate import local_path


@dataclasses.dataclass(frozen=True)
class Predict(Common):
    """Run the trained network over inputs from a file, whatever their number."""

    output: Path
    """Output directory of a training run."""
    inputs: Path
    """A .npy file (one array), or .npz (a dict of arrays), with the inputs in the leading dim."""
    predictions: Path = Path("predictions.npy")
    """File for the outputs: .npy for one array, .npz for a dict of arrays."""
    chunk: int | None = None
    """Inputs at a time; default the batch size."""
    best: bool = False
    """Predict with the state that the callback KeepBest has kept, in place of the newest."""


def predict_command(arguments: list[str]) -> int:
    """Run the trained network over inputs, and write its outputs."""
    experiment, options, *_ = parse(arguments, "predict", Predict)
    directory = local_path(options.output) / ("best" if options.best else "checkpoints")
    if not directory.is_dir():
        raise _nothing_saved(options)
    inputs = _read_arrays(options.inputs)
    program = chosen_program(experiment, options, options.chosen_plan())
    with Checkpoints(directory) as checkpoints:
        restored = restore(program, checkpoints)
    if restored is None:
        raise _nothing_saved(options)
    try:
        outputs = program.predict(restored[0], inputs, chunk=options.chunk)
    except Exception as error:
        if not is_users(error) or isinstance(error, errors.PluraxError):
            raise
        data = tree.describe(next(chunks(experiment.data, 1)), batch_dim=True)
        held = tree.describe(inputs)
        raise errors.BatchError(
            f"the task's predict cannot take what {options.inputs} holds:\n{describe_error(error)}"
            f"\n  {options.inputs} holds:\n{held}\n  the data of the experiment hold:\n{data}"
        ) from None
    outputs = jax.tree.map(_of_numpy, outputs)
    path = written(options.predictions, lambda path: _write_arrays(path, outputs))
    print(f"wrote {path}:\n{tree.describe(outputs)}")
    return 0


def _nothing_saved(options: Predict) -> errors.CheckpointError:
    if options.best:
        return errors.CheckpointError(
            f"{options.output} holds no best state, which --best predicts with: train with "
            'callbacks=[plurax.callbacks.KeepBest("eval_loss")]. Without --best the newest state '
            "is taken."
        )
    return errors.CheckpointError(
        f"{options.output} holds no checkpoint; train with this directory first."
    )


def _read_arrays(path: Path) -> Any:
    with refusing(
        lambda reason: errors.BatchError(
            f"{path} is not a .npy or .npz file of plain arrays: {reason}"
        )
    ):
        if not path.is_file():
            raise errors.BatchError(f"{path}: no such file; --inputs wants a .npy or .npz file.")
        with path.open("rb") as file:
            loaded = np.load(file, allow_pickle=False)
            return loaded if isinstance(loaded, np.ndarray) else dict(loaded)


def _write_arrays(path: Path, outputs: Any) -> Path:
    single = isinstance(outputs, np.ndarray)
    stem = path.stem if path.suffix in (".npy", ".npz") else path.name
    path = path.with_name(stem + (".npy" if single else ".npz"))
    with replacing(path) as new:
        if single:
            with new.open("wb") as file:
                np.save(file, outputs, allow_pickle=False)
            return path
        # Written by hand because `np.savez` accepts no array named `file`.
        with zipfile.ZipFile(new, "w") as archive:
            for name, leaf in tree.named_leaves(outputs).items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                    np.lib.format.write_array(file, leaf, allow_pickle=False)
    return path


def _of_numpy(array: np.ndarray) -> np.ndarray:
    """Cast to a dtype that NumPy can load: bfloat16 and the like to float32."""
    if array.dtype.kind != "V":
        return array
    return array.astype(np.float32 if jnp.issubdtype(array.dtype, jnp.inexact) else np.int32)
