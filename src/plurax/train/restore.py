"""Prepare a population for `fit`: its program, its data, and its checkpoints, grown or resumed.

A population may grow: a run of 10 members resumed with 12 keeps the ten and trains the two new ones
alone up to the same step, then joins them. That is exact, because members do not depend on each
other. Example, a parameter of shape `(3, 5)` per member, checkpoint at step 400:

    checkpoint               (10, 3, 5)   members 0 to 9; its table must equal the first ten now
    _catch_up(10, 11)        ( 2, 3, 5)   a program for two members runs steps 0 to 400
    join_members             (12, 3, 5)   placed on the devices; training goes on at step 400
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from plurax import errors
from plurax.ensemble.select import join_members
from plurax.execute.check import check_kinds
from plurax.execute.members_program import ANY_ROWS, MembersProgram
from plurax.execute.placement import leading_dim
from plurax.execute.program import Program
from plurax.execute.program_cache import cached_program, shapes_key
from plurax.execute.reads import EpochSpec
from plurax.members import Members
from plurax.mesh import make_mesh
from plurax.plan import Plan
from plurax.resample import Everything
from plurax.state import TrainState
from plurax.train.checkpoint import Checkpoints
from plurax.train.data import ArrayData, Data, StreamData
from plurax.train.iterate import train_iter

AnyProgram = Program | MembersProgram


def with_resampling(members: Members, source: Data) -> Data:
    """Return the data with the population's resampling and epoch length.

    Raises `MembersError` for resampling of data that are not arrays, and `BatchError` where a
    member's sample needs more rows than there are.
    """
    if isinstance(source, StreamData):
        if not isinstance(members.resample, Everything):
            raise errors.resample_needs_arrays(type(members.resample).__name__.lower())
        return source
    length = members.epoch_length(leading_dim(source.arrays))
    return dataclasses.replace(source, resample=members.resample, length=length)


def make_program(
    task: Any,
    optimizer: Any,
    plan: Plan,
    like: PyTree,
    members: Members | None,
    source: Data,
    resident: bool | None,
    devices: Sequence[jax.Device] | None,
) -> AnyProgram:
    """Return the program of one network, or of a population that reads `source`."""
    check_kinds(task, optimizer, plan, members)
    mesh = make_mesh(plan, devices)
    key = (optimizer, plan, shapes_key(like), tuple(mesh.devices.flat))
    if members is None:
        return cached_program(
            task, ("network", *key), lambda: Program(task, optimizer, plan, like, mesh)
        )
    reading, data = None, None
    if isinstance(source, ArrayData) and resident is not False:
        data = source.arrays
        reading = EpochSpec(
            members.resample,
            leading_dim(data),
            source.draws,
            source.batch_size,
            source.batches_per_epoch,
            source.shuffle,
        )
    elif not isinstance(members.resample, Everything):
        # Residence is never dropped silently: what members read may not depend on a memory budget.
        raise errors.resample_needs_arrays(type(members.resample).__name__.lower())
    hyper = {name: str(values.dtype) for name, values in members.cohort(ANY_ROWS).hyper.items()}
    program = cached_program(
        task,
        ("members", *key, members.count, tuple(hyper.items()), reading),
        lambda: MembersProgram(
            task, optimizer, plan, like, mesh, members, reading=reading, data=data
        ),
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


def members_meta(program: AnyProgram) -> dict[str, Any]:
    """Return the description of the members that a checkpoint saves, `{}` for one network."""
    if not isinstance(program, MembersProgram):
        return {}
    members = program.members
    return {"members": {"table": members.table(), "resample": repr(members.resample)}}


def restore(
    program: AnyProgram, checkpoints: Checkpoints, source: Data | None = None
) -> tuple[TrainState, dict[str, Any]] | None:
    """Return the newest state and its description, placed for this program, or None.

    Members that the checkpoint does not hold first catch up on `source`.
    """
    if not isinstance(program, MembersProgram):
        restored = checkpoints.restore(program.canonical_shapes)
        return None if restored is None else (program.place(restored[0]), restored[1])
    restored = checkpoints.restore(lambda meta: _shapes_saved(program, meta, grow=bool(source)))
    if restored is None:
        return None
    state, meta = restored
    count = len(meta["members"]["table"])
    if count < program.count and source is not None:
        late = _catch_up(program, source, range(count, program.count), state.steps_taken)
        state = join_members(state, jax.device_put(late, _first(program)))
        meta["tally"] = {}
    return program.place(state), meta


def _shapes_saved(program: MembersProgram, meta: dict[str, Any], *, grow: bool) -> TrainState:
    """Return the shapes of the members in a checkpoint. Raises `MembersError` if they differ."""
    now = members_meta(program)["members"]
    before = meta.get("members", {"table": [], "resample": now["resample"]})
    if before["resample"] != now["resample"]:
        raise errors.members_other_resample(before["resample"], now["resample"])
    count = len(before["table"])
    if not count or before["table"] != now["table"][:count] or (not grow and count < program.count):
        raise errors.members_not_grown(count, program.count)
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((count, *x.shape[1:]), x.dtype, sharding=_first(program)),
        program.canonical_shapes,
    )


def _first(program: MembersProgram) -> Any:
    return jax.sharding.SingleDeviceSharding(program.mesh.devices.flat[0])


def _catch_up(
    program: MembersProgram, source: Data, indices: Sequence[int], steps: int
) -> TrainState:
    """Train some members from the start up to step `steps`."""
    late = program.of(program.members.take(indices))
    state = late.init()
    per_epoch = source.batches_per_epoch
    epochs = -(-steps // per_epoch) if per_epoch else np.iinfo(np.int32).max
    ends = {"epochs": epochs, "report_every": epochs, "checkpoint_every": steps}
    for turn in train_iter(late, state, source, **ends):  # type: ignore[arg-type]
        state = turn.state
        if turn.step >= steps:
            break
    return late.to_canonical(state)
