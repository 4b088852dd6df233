"""Check the arguments of `fit` before anything is compiled or written."""

import itertools
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
from jaxtyping import PyTree

from plurax import errors
from plurax.distributed.global_arrays import check_here
from plurax.execute.check import check_kinds
from plurax.execute.placement import is_arrays
from plurax.execute.program import Program
from plurax.guards.saving import check_room
from plurax.loop.training_loop import Cadence
from plurax.members import Members
from plurax.plan import Plan
from plurax.server.servers import Servers
from plurax.sources.adapt import adapt
from plurax.train.elastic import plan_for_those_left
from plurax.train.serve import check_servers
from plurax.validate import local_path, whole_number


def checked_cadence(
    epochs: int,
    report_every: int,
    evaluate_every: int | None,
    checkpoint_every: int | None,
    check_replicas_every: Any,
) -> Cadence:
    """Return how long a run is and what it does how often, as Python integers. Raises `BatchError`
    for others.
    """
    what = {
        "epochs": "the number of passes over the data, a whole number ≥ 1",
        "report_every": "a whole number of epochs, at least 1",
        "checkpoint_every": "the number of steps between checkpoints, a whole number ≥ 1, or leave "
        "it out to save with each report only",
        "evaluate_every": "the number of steps between evaluations, a whole number ≥ 1, or leave "
        "it out to evaluate after each epoch only",
        "check_replicas_every": "the number of steps between comparisons, a whole number ≥ 1, or "
        "None to compare nothing",
    }

    def positive(name: str, given: Any) -> int:
        number = whole_number(given)
        if number is None:
            raise errors.BatchError(f"{name}={given!r}: give {what[name]}.")
        return number

    def steps(name: str, given: Any) -> int | None:
        return None if given is None else positive(name, given)

    steps("check_replicas_every", check_replicas_every)
    return Cadence(
        positive("epochs", epochs),
        positive("report_every", report_every),
        steps("evaluate_every", evaluate_every),
        steps("checkpoint_every", checkpoint_every),
    )


def output_folder(given: str | Path) -> Path:
    """Return the output directory, if it can be one. Raises `CheckpointError`."""
    directory = local_path(given)
    there = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    if not there.is_dir():
        raise errors.CheckpointError(
            f"{directory} could not be written to: {there} is a file, and output is a directory. "
            "Give another name, or move the file away."
        )
    if not os.access(there, os.W_OK | os.X_OK):
        read_only = os.statvfs(there).f_flag & os.ST_RDONLY
        reason = "the file system is read-only at" if read_only else "no permission to write in"
        raise errors.checkpoint_not_written(str(directory), f"{reason} {there}")
    return directory


def check_arguments(
    task: Any,
    optimizer: Any,
    plan: Plan,
    members: Members | None,
    servers: Servers | None,
    devices: Sequence[jax.Device] | None,
) -> Plan:
    """Raise for arguments of wrong kinds, and for devices that are not here; return the plan, for
    the devices that are left.
    """
    check_here(devices)
    check_kinds(task, optimizer, plan, members)
    check_servers(servers, task, plan, members)
    return plan_for_those_left(plan, task)


def check_run(
    program: Program,
    evaluation: PyTree | Iterable[PyTree] | None,
    output: Path | None,
    batches: int = 0,
    evaluate_every: int | None = None,
) -> PyTree | Iterable[PyTree] | None:
    """Raise before the first step what the evaluation and the checkpoints would raise after it.

    Return the evaluation as it is read, so that a table is converted once; of it the first
    `batches`, 0 for all.
    """
    if evaluation is not None:
        evaluation = adapt("evaluation", evaluation)
        program.check_evaluation(evaluation)
    elif evaluate_every is not None:
        raise errors.BatchError(
            f"evaluate_every={evaluate_every} needs data to evaluate on: give fit(evaluation=...) "
            "too."
        )
    if output is not None:
        check_room(output, program.canonical_shapes)
    return _first(evaluation, batches, program.batch_size) if batches else evaluation


def _first(data: Any, batches: int, batch_size: int) -> Any:
    """Return the first batches of evaluation data, for a fast development run."""
    if data is None:
        return None
    if is_arrays(data):
        return jax.tree.map(lambda leaf: leaf[: batches * batch_size], data)
    return list(itertools.islice(data, batches))
