"""Hosts of a Slurm step, from its environment.

Source: the manual of srun, section "output environment variables".
"""

import dataclasses
from collections.abc import Mapping

from plurax import errors
from plurax.distributed.environment import first_host

FIRST_PORT, PORTS = 20_000, 10_000
"""A leader's port is among these, by the number of the job: two jobs may share a node."""


@dataclasses.dataclass(frozen=True)
class Place:
    """Of one host among others."""

    hosts: int
    host: int
    coordinator: str


def slurm_place(environment: Mapping[str, str]) -> Place | None:
    """Return this host's place in a Slurm step; None outside of one.

    Raises `ExperimentError` for a step with several tasks on a node.
    """
    names = ("SLURM_PROCID", "SLURM_NODEID", "SLURM_STEP_NUM_NODES", "SLURM_STEP_NODELIST")
    if not all(name in environment for name in names):
        return None
    nodes = int(environment["SLURM_STEP_NUM_NODES"])
    tasks = int(environment.get("SLURM_STEP_NUM_TASKS", nodes))
    if tasks != nodes:
        raise errors.launch_slurm_tasks(tasks, nodes)
    first = first_host(environment["SLURM_STEP_NODELIST"])
    job, step = (environment.get(name, "0") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    port = FIRST_PORT + (int(job) * 7 + int(step)) % PORTS
    return Place(nodes, int(environment["SLURM_NODEID"]), f"{first}:{port}")
