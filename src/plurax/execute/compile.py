"""`compile`: join a task and a plan to a program."""

from collections.abc import Mapping, Sequence

import jax
import optax
from jaxtyping import PyTree

from plurax import errors
from plurax.execute.array_data import ArrayData
from plurax.execute.check import check_kinds
from plurax.execute.placement import leading_dim
from plurax.execute.population import HyperFn
from plurax.execute.program import Program
from plurax.members import Members
from plurax.mesh import make_mesh
from plurax.plan import Plan
from plurax.task import Task


def compile(
    task: Task | HyperFn,
    optimizer: optax.GradientTransformation | HyperFn,
    plan: Plan,
    batch: PyTree,
    *,
    members: Members | None = None,
    data: ArrayData | None = None,
    devices: Sequence[jax.Device] | None = None,
    compiler_options: Mapping[str, bool | int | float | str] | None = None,
) -> Program:
    """Compile one training step of a task under a plan.

    **Arguments:**

    - `task`, `optimizer`, `plan`: the task, the optimizer and the plan.
    - `batch`: a batch of the largest size wanted: a tree of arrays, or of
      `jax.ShapeDtypeStruct`s, with a common leading dim. Every smaller batch runs in the same
      program.
    - `members`: a population to train instead of one network. Task and optimizer may then be
      functions of a member's hyperparameters, `hyper -> Task`, `hyper -> optax transformation`.
    - `data`: arrays that stay on the devices, which each member reads in its own order by the
      members' resampling; `program.loop` then runs many steps at once. `batch` has their batch
      size. Only for members: one network is given the order of each epoch (`place_epoch`).
    - `devices`: the devices, default `jax.devices()`; the plan takes the first it needs.
    - `compiler_options`: options of XLA's compiler for these devices, by the names of its flags,
      such as `{"xla_gpu_enable_pipelined_all_gather": True}`. Everything that the program compiles
      is compiled with them.

    **Returns:** a `Program`. No parameter exists yet.

    Raises `PlanError` where the plan does not fit the devices, `TaskError` where the task breaks
    its contract, `BatchError` where `batch` is not one, `ArgumentError` where the compiler does not
    take its options.

    >>> import jax, jax.numpy as jnp, optax, plurax as px
    >>> task = px.Task(
    ...     init=lambda key: jnp.zeros(3),
    ...     loss=lambda params, batch, keys: (batch["x"] @ params - batch["y"]) ** 2,
    ... )
    >>> batch = {"x": jnp.ones((4, 3)), "y": jnp.ones(4)}
    >>> program = px.compile(task, optax.sgd(0.1), px.Plan(microbatches=2), batch)
    >>> state = program.init(seed=0)
    >>> state, metrics = program.step(state, batch)
    >>> float(metrics["loss"])
    1.0
    """
    check_kinds(task, optimizer, plan, members)
    mesh = make_mesh(plan, devices)
    if data is None:
        program = Program(
            task, optimizer, plan, batch, mesh, members, compiler_options=compiler_options
        )
        program.compiled_step  # noqa: B018  compiled here, so that errors appear here
        return program
    if members is None:
        raise errors.MembersError(
            "compile(data=...) is for members, each of which reads the arrays in its own order. "
            "For one network leave it out: loop(state, place_data(arrays), place_epoch(rows, "
            "counts), start, stop) takes the order of each epoch."
        )
    if not isinstance(data, ArrayData):
        raise errors.MembersError(
            "compile(data=...) takes arrays and the order in which members read them, and this is "
            f"a {type(data).__name__}. Write data=plurax.train.ArrayData(arrays, batch_size)."
        )
    if data.batch_size > leading_dim(batch):
        raise errors.steps_exceed_batch("compile", data.batch_size, leading_dim(batch))
    data = data.read_by(members)
    program = Program(task, optimizer, plan, batch, mesh, members, data, compiler_options)
    program.compile_loop(data.arrays)
    return program
