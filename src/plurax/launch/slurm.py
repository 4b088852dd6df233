"""Hosts of a Slurm step, from its environment.

Source: the manual of srun, section "output environment variables", and of scontrol, "hostlist".
"""

import dataclasses
import re
import subprocess
from collections.abc import Mapping

from plurax import errors

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
    first = _first_node(environment["SLURM_STEP_NODELIST"])
    job, step = (environment.get(name, "0") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    port = FIRST_PORT + (int(job) * 7 + int(step)) % PORTS
    return Place(nodes, int(environment["SLURM_NODEID"]), f"{first}:{port}")


def _first_node(nodes: str) -> str:
    """Return the first of a list of nodes, by Slurm's own command where there is one."""
    try:
        done = subprocess.run(
            ["scontrol", "show", "hostnames", nodes],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
        return done.stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return first_node(nodes)


def first_node(nodes: str) -> str:
    """Return the first of a list of nodes.

        >>> first_node("gpu[07-09,12],login1")
        'gpu07'
        >>> first_node("rack[1-2]node[3,5]")
        'rack1node3'

    Raises `ExperimentError` for what is no such list.
    """
    first = re.match(r"(?:[^,\[\]]|\[[^\[\]]*\])+", nodes)
    found = first and re.sub(r"\[(\w+)[^\[\]]*\]", r"\1", first[0])
    if not found or not re.fullmatch(r"[\w.-]+", found):
        raise errors.launch_slurm_nodes(nodes)
    return found
