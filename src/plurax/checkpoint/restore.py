"""Prepare a population for `fit`: its program, its data, and its checkpoints, grown or resumed.

A population may grow: a run of 10 members resumed with 12 keeps the ten and trains the two new ones
alone up to the same step, then joins them. That is exact, because members do not depend on each
other. Example, a parameter of shape `(3, 5)` per member, checkpoint at step 400:

    checkpoint               (10, 3, 5)   members 0 to 9; its table must equal the first ten now
    catch_up(10, 11)         ( 2, 3, 5)   a program for two members runs steps 0 to 400
    join_members             (12, 3, 5)   placed on the devices; training goes on at step 400
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from plurax import errors
from plurax.checkpoint import Checkpoints
from plurax.distributed.global_arrays import check_here, process_count, put
from plurax.ensemble.select import join_members
from plurax.execute.array_data import ArrayData
from plurax.execute.check import check_kinds
from plurax.execute.compiler_options import checked_options
from plurax.execute.program import Program
from plurax.execute.program_cache import cached_program, shapes_key
from plurax.loop.data import Data
from plurax.loop.iterate import train_iter
from plurax.members import Members
from plurax.mesh import make_mesh, replicated
from plurax.plan import Plan
from plurax.resample import Everything
from plurax.state import TrainState

Late = Callable[[Sequence[int], int], TrainState]


def make_program(
    task: Any,
    optimizer: Any,
    plan: Plan,
    like: PyTree,
    members: Members | None,
    source: Data,
    resident: bool | None,
    devices: Sequence[jax.Device] | None,
    compiler_options: Mapping[str, Any] | None = None,
) -> Program:
    """Return the program of one network, or of a population that reads `source`."""
    check_kinds(task, optimizer, plan, members)
    mesh = make_mesh(plan, devices)
    options = checked_options(compiler_options)
    key = (optimizer, plan, shapes_key(like), tuple(mesh.devices.flat), options)
    if members is None:
        return cached_program(
            task,
            ("network", *key),
            lambda: Program(task, optimizer, plan, like, mesh, compiler_options=dict(options)),
        )
    data = source if isinstance(source, ArrayData) and resident is not False else None
    if data is None and not isinstance(members.resample, Everything):
        # Residence is never dropped silently: what members read may not depend on a memory budget.
        raise errors.resample_needs_arrays(type(members.resample).__name__.lower())
    hyper = tuple((name, str(dtype)) for name, dtype in members.hyper_dtypes.items())
    reads = None if data is None else data.epoch_spec
    program = cached_program(
        task,
        ("members", *key, members.count, hyper, reads),
        lambda: Program(task, optimizer, plan, like, mesh, members, data, dict(options)),
    )
    return program.of(members)


def saved_tuning(plan: Plan, output: str | Path | None) -> Plan:
    """Return the plan, its open choices from `plan.toml` in `output`, so that bits repeat."""
    path = None if output is None else Path(output) / "plan.toml"
    if path is None or not path.is_file():
        return plan
    before = Plan.load(path)
    return dataclasses.replace(
        plan, chunk=plan.chunk or before.chunk, batch_dim=plan.batch_dim or before.batch_dim
    )


def members_meta(program: Program) -> dict[str, Any]:
    """Return the description of the members that a checkpoint saves, `{}` for one network."""
    members = program.members
    if members is None:
        return {}
    return {"members": {"table": members.table(), "resample": repr(members.resample)}}


def restore(
    program: Program, checkpoints: Checkpoints, late: Late | None = None
) -> tuple[TrainState, dict[str, Any]] | None:
    """Return the newest state and its description, placed for this program, or None.

    Members that the checkpoint does not hold are those of `late(indices, step)`.
    """
    check_here(program.mesh.devices.flat)
    if program.members is None:
        restored = checkpoints.restore(program.canonical_shapes)
        return None if restored is None else (program.place(restored[0]), restored[1])
    restored = checkpoints.restore(lambda meta: _shapes_saved(program, meta, grow=late is not None))
    if restored is None:
        return None
    (state, meta), wanted = restored, program.members.count
    count = len(meta["members"]["table"])
    if count < wanted and late is not None:
        new = put(late(range(count, wanted), state.steps_taken), _where(program))
        state = join_members(state, new)
        meta["tally"] = {}
    return program.place(state), meta


def _shapes_saved(program: Program, meta: dict[str, Any], *, grow: bool) -> TrainState:
    """Return the shapes of the members in a checkpoint. Raises `MembersError` if they differ."""
    now = members_meta(program)["members"]
    before = meta.get("members", {"table": [], "resample": now["resample"]})
    if before["resample"] != now["resample"]:
        raise errors.CheckpointError(
            f"the members of the checkpoint read their data by {before['resample']} and these by "
            f"{now['resample']}; continuing would not be the same training. Use the same "
            "resampling, or another output directory."
        )
    count, wanted = len(before["table"]), len(now["table"])
    if not count or before["table"] != now["table"][:count] or (not grow and count < wanted):
        if not count:
            raise errors.CheckpointError(
                f"the checkpoint holds one network, and a population of {wanted} is asked for. "
                "Leave members out, or train the population in another output directory."
            )
        raise errors.CheckpointError(
            f"the checkpoint holds {count} members and {wanted} are asked for, which do not begin "
            "with the same ones: seeds, hyperparameters and resampling of the first must not "
            "change. Train another population in another output directory."
        )
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((count, *x.shape[1:]), x.dtype, sharding=_where(program)),
        program.canonical_shapes,
    )


def _where(program: Program) -> Any:
    """Return where members are put together: on the first device; of several processes, on all."""
    if process_count() > 1:
        return replicated(program.mesh)
    return jax.sharding.SingleDeviceSharding(program.mesh.devices.flat[0])


def catch_up(program: Program, source: Data, indices: Sequence[int], steps: int) -> TrainState:
    """Train some members from the start up to step `steps`."""
    assert program.members is not None
    late = program.of(program.members.take(indices))
    state, per_epoch = late.init(), source.batches_per_epoch
    epochs = -(-steps // per_epoch) if per_epoch else np.iinfo(np.int32).max
    ends = {"epochs": epochs, "report_every": epochs, "checkpoint_every": steps}
    for call in train_iter(late, state, source, **ends):  # type: ignore[arg-type]
        state = call.state
        if call.step >= steps:
            break
    return late.to_canonical(state)
