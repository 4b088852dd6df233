"""Hosts of a Slurm step, from its environment.

Source: the manual of srun, section "output environment variables".
"""

import dataclasses
from collections.abc import Mapping

from plurax import errors
from plurax.distributed.environment import first_host, step_port


@dataclasses.dataclass(frozen=True)
class HostPlace:
    """Of one host among others."""

    hosts: int
    host: int
    coordinator: str


def slurm_place(environment: Mapping[str, str]) -> HostPlace | None:
    """Return this host's place in a Slurm step; None outside of one.

    Raises `ExperimentError` for a step with several tasks on a node.
    """
    names = ("SLURM_PROCID", "SLURM_NODEID", "SLURM_STEP_NUM_NODES", "SLURM_STEP_NODELIST")
    if not all(name in environment for name in names):
        return None
    nodes = int(environment["SLURM_STEP_NUM_NODES"])
    tasks = int(environment.get("SLURM_STEP_NUM_TASKS", nodes))
    if tasks != nodes:
        raise errors.ExperimentError(
            f"plurax launch in a Slurm step of {tasks} tasks on {nodes} nodes: a launcher starts "
            "all processes of its node. Write srun --ntasks-per-node=1 plurax launch --processes N "
            "-- ..., or leave out plurax launch."
        )
    first = first_host(environment["SLURM_STEP_NODELIST"])
    return HostPlace(nodes, int(environment["SLURM_NODEID"]), f"{first}:{step_port(environment)}")
