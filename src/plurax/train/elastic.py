"""Fit a plan to the devices that are left, so that a gang goes on when a host is gone.

The update does not depend on how many devices share a batch, nor on the number of microbatches, so
`data` shrinks and `microbatches` grows: no device gets a larger microbatch than it had. Example,
two processes with four devices each, of which one is lost:

    Plan(data=4, tensor=2, microbatches=2)    8 devices, microbatches of 1/8 of the batch
    Plan(data=2, tensor=2, microbatches=4)    4 devices, microbatches of 1/8 of the batch

Of a population `member` shrinks. Only under `plurax launch --elastic`, which says so in the
environment; when the host is back, the plan is again the one that was asked for.
"""

import dataclasses
from typing import Any

import jax

from plurax.distributed.environment import is_elastic
from plurax.distributed.global_arrays import process_count
from plurax.plan import Plan
from plurax.task import Task


def plan_for_those_left(plan: Plan, task: Any) -> Plan:
    """Return a plan, shrunk to the devices of all processes where the launcher is elastic."""
    if not is_elastic():
        return plan
    coupled = isinstance(task, Task) and task.couples_microbatches
    return shrink(plan, jax.device_count(), process_count(), keep_microbatches=coupled)


def shrink(plan: Plan, devices: int, processes: int, *, keep_microbatches: bool = False) -> Plan:
    """Return the plan nearest to `plan` for so many devices, equally many of each process.

    A coupled loss compares the examples of a microbatch: there their number is kept. Where even
    `data=1` does not fit, the plan is returned as it is, and refused when its mesh is created.

    >>> shrink(Plan(data=8, microbatches=2), 6, 3)
    Plan(data=6, microbatches=3)
    """
    size = plan.member if plan.member > 1 else plan.data
    other = plan.devices // size
    for smaller in range(min(size, devices // other), 0, -1):
        if smaller * other % processes == 0:
            break
    else:
        return plan
    if plan.member > 1:
        return dataclasses.replace(plan, member=smaller)
    if keep_microbatches or smaller == size:
        return dataclasses.replace(plan, data=smaller)
    more = -(-plan.parts // smaller)
    return dataclasses.replace(plan, data=smaller, microbatches=more)
