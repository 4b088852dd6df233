"""Export a program's predictions to a file that runs without plurax, by `jax.export`."""

import importlib.util
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jaxtyping import PyTree

from plurax import errors
from plurax.disk import make_folder, replace_file
from plurax.distributed.global_arrays import fetch, is_primary
from plurax.execute.gradient import device_predict
from plurax.execute.placement import abstract_batch
from plurax.execute.population import Population
from plurax.execute.program import Program
from plurax.mesh import make_mesh, within
from plurax.plan import Plan
from plurax.sources.adapt import adapt, as_arrays
from plurax.state import TrainState
from plurax.tree import with_rows
from plurax.validate import check_whole, local_path


def export_predict(
    program: Program,
    state: TrainState,
    inputs: PyTree,
    path: str | os.PathLike[str],
    *,
    platforms: Sequence[str] | None = None,
    batch_size: int | None = None,
) -> None:
    """Write the task's `predict` with its parameters to a file that needs JAX alone.

    It runs on one device, with any number of rows, whatever the program's plan:

        with open("digits.jax", "rb") as file:
            predict = jax.export.deserialize(bytearray(file.read()))
        outputs = predict.call(inputs)

    Of a population the file predicts with every member; outputs have a leading dim of members. Call
    it in every process of a gang; one of them writes.

    **Arguments:**

    - `program`, `state`: as for `program.predict`; `inputs`: some rows, of which only shapes and
      dtypes count.
    - `platforms`: on which it is to run, `("cpu", "cuda", "rocm", "tpu")` or some of them; default
      that of this process.
    - `batch_size`: a fixed number of rows; default any. A model that computes with the number of
      its rows may need one.

    JAX promises that later versions read the file for six months.

    Raises `TaskError` for a task without `predict`, and where the function cannot be traced for any
    number of rows; `MissingPackageError` without flatbuffers.
    """
    if importlib.util.find_spec("flatbuffers") is None:
        raise errors.package_missing("the file format of jax.export", "flatbuffers", "export")
    predict = _whole_predict(program, state)
    size: Any = batch_size
    if size is not None:
        size = check_whole("plurax.weights.export_predict", "batch_size", size)
    if batch_size is None:
        (size,) = jax.export.symbolic_shape("batch")
    like = with_rows(abstract_batch(as_arrays(adapt("inputs", inputs))), size)
    try:
        exported = jax.export.export(jax.jit(predict), platforms=platforms)(like)
    except (NotImplementedError, TypeError, ValueError) as error:
        if batch_size is not None or isinstance(error, errors.PluraxError):
            raise
        # A function that fails for a certain number of rows, too, has an error of its own.
        jax.eval_shape(predict, jax.tree.map(_two_rows, like))
        raise errors.TaskError(
            "Task.predict computes with its number of rows, so it cannot be exported for any "
            f"number: give export_predict(batch_size=...) one. JAX: {str(error).splitlines()[0]}"
        ) from error
    data = exported.serialize()
    if is_primary():
        path = local_path(path)
        make_folder(path.parent)
        replace_file(path, bytes(data))


def _two_rows(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((2, *leaf.shape[1:]), leaf.dtype)


def _whole_predict(program: Program, state: TrainState) -> Callable[[PyTree], PyTree]:
    """Return `inputs -> outputs` on one device, with the parameters in it."""
    canonical = program.to_canonical(state)
    params, model_state = fetch((canonical.params, canonical.model_state))
    precision = program.plan.precision
    mesh = make_mesh(Plan(), jax.local_devices()[:1])
    functions = program._functions
    if not isinstance(functions, Population):
        one = device_predict(program._example.task, precision)
        return within(mesh, lambda inputs: one(params, model_state, inputs))
    members = program.members
    assert members is not None
    hyper = members.hyper_arrays()

    def of_member(params: PyTree, model_state: PyTree, hyper: Any, inputs: PyTree) -> PyTree:
        task = functions.make(hyper).task
        return device_predict(task, precision)(params, model_state, inputs)

    each = jax.vmap(of_member, in_axes=(0, 0, 0, None))
    return within(mesh, lambda inputs: each(params, model_state, hyper, inputs))
