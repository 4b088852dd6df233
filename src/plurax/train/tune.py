"""`tune`: measure the open choices of a population's plan by short runs."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jaxtyping import PyTree

from plurax.checkpoint.restore import make_program
from plurax.distributed.global_arrays import MEASURE_IN_ONE, check_alone
from plurax.execute.array_data import ArrayData
from plurax.execute.check import check_population
from plurax.execute.choose_chunk import Candidate
from plurax.execute.population import HyperFn
from plurax.loop.data import as_data
from plurax.members import Members
from plurax.plan import Plan
from plurax.task import Task


@dataclasses.dataclass(frozen=True)
class Tuning:
    """The result of `tune`.

    **Fields:** `plan`, with `chunk` and `batch_dim` set; `measured`, the candidates, in the order
    they were tried.
    """

    plan: Plan
    measured: list[Candidate]

    def __str__(self) -> str:
        chosen = f"chunk={self.plan.chunk}, batch_dim={self.plan.batch_dim}"
        return "\n".join([f"fastest: {chosen}", *(f"  {one} a step" for one in self.measured)])


def tune(
    task: Task | HyperFn,
    optimizer: Any,
    data: PyTree | Iterable[PyTree],
    *,
    members: Members,
    plan: Plan = Plan(),  # noqa: B008  frozen
    batch_size: int | None = None,
    shuffle: bool = True,
    devices: Sequence[jax.Device] | None = None,
) -> Tuning:
    """Measure which chunk and batch dim are fastest for a population, on this machine.

    `fit` and `compile` choose both from the shapes and the device, at once and always alike. This
    compiles and times a handful of candidates instead, which takes seconds to minutes. Pass the
    resulting plan to `fit`: a run repeats bit for bit under the same plan, and clocks do not
    repeat.

    **Arguments:** as for `fit`. Fields that the plan already sets are not measured.

    Raises the errors that `fit` raises before its first step, and `ProcessError` in one of several
    processes, each of which has a clock of its own.
    """
    check_population(task, optimizer, plan, members)
    check_alone("plurax.ensemble.tune", MEASURE_IN_ONE)
    if plan.chunk is not None and plan.batch_dim is not None:
        return Tuning(plan, [])
    read, like = as_data(data, batch_size=batch_size, seed=0, shuffle=shuffle, ragged="pad",
                         members=members)  # fmt: skip
    program = make_program(task, optimizer, plan, like, members, read, None, devices)
    arrays = read.arrays if isinstance(read, ArrayData) else None
    return Tuning(*program.measure(plan, arrays))
