"""Find how many members fit in memory, from compiled programs, without running one."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jaxtyping import PyTree

from plurax import errors
from plurax.analysis.batch_size import largest_below
from plurax.execute.check import check_kinds
from plurax.execute.compiled_functions import trace_step
from plurax.execute.placement import Placement
from plurax.execute.population import HyperFn, Population
from plurax.hlo.memory import memory as compiled_memory
from plurax.members import Members
from plurax.mesh import make_mesh, memory_budget
from plurax.plan import Plan
from plurax.task import Task
from plurax.validate import bytes_of

FIRST_CHUNK = 16
"""Members at a time, where the plan leaves `chunk` open."""


@dataclasses.dataclass(frozen=True)
class MaxMembers:
    """The largest population that fits a budget; `int()` of it is its number of members.

    **Fields:**

    - `count`: members; a multiple of the plan's `member * chunk`.
    - `bytes`: the compiled step's peak on one device with that many.
    - `next_count`, `next_bytes`: the next larger population, and its peak, which exceeds the
      budget. `next_bytes` is None if the search ended before it was known.
    - `budget`: bytes per device.
    - `compilations`: the number of programs compiled.
    """

    count: int
    bytes: int
    next_count: int
    next_bytes: int | None
    budget: int
    compilations: int

    def __index__(self) -> int:
        return self.count


def max_members(
    task: Task | HyperFn,
    optimizer: Any,
    plan: Plan,
    batch: PyTree,
    *,
    members: Members | None = None,
    memory: float | str | None = None,
    devices: Sequence[jax.Device] | None = None,
) -> MaxMembers:
    """Return how many members fit in memory, without running a step: at most 10 compilations.

    **Arguments:**

    - `task`, `optimizer`, `plan`, `batch`: as for `compile`. If the plan leaves `chunk` open,
      members are assumed to run in chunks of 16, or one by one where that does not fit.
    - `members`: for the names of their hyperparameters, if they have any.
    - `memory`: bytes per device, such as `40e9` or `"40GB"`. Default: what the device reports as
      its limit; where it reports none (CPU), half of the machine's memory divided by the plan's
      devices. Data that stay on the devices need room in addition:
      `memory=budget - bytes_of_data`.

    Raises `MembersError` where not even the smallest population fits.
    """
    members = members or Members(1)
    check_kinds(task, optimizer, plan, members)
    mesh = make_mesh(plan, devices)
    budget = memory_budget(mesh) if memory is None else bytes_of(memory)
    placement = Placement.of(batch, plan, mesh)
    for chunk in [plan.chunk] if plan.chunk else [FIRST_CHUNK, 1]:
        chosen = dataclasses.replace(plan, chunk=chunk, batch_dim=plan.batch_dim or "major")
        like = placement.like
        population = Population(task, optimizer, chosen, mesh, like, members)
        unit = plan.member * chunk

        # Search in whole chunks on every device: a partial chunk would compile a second body.
        def peak(units: int) -> int:
            step = trace_step(population.abstract_of(units * unit), placement)  # noqa: B023
            return compiled_memory(step.lower().compile()).peak

        fits, fits_bytes, over, over_bytes, compilations = largest_below(peak, budget)
        if fits:
            break
    else:
        raise errors.MembersError(
            f"no population fits: the smallest possible, {unit} member(s), needs {fits_bytes:,} "
            f"bytes on a device and the budget is {budget:,}. A smaller chunk and more "
            "microbatches need less memory."
        )
    return MaxMembers(
        count=fits * unit,
        bytes=fits_bytes,
        next_count=(fits + 1) * unit,
        next_bytes=over_bytes if over == fits + 1 else None,
        budget=budget,
        compilations=compilations,
    )
