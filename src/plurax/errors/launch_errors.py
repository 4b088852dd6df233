"""Errors about several processes, and about the launcher that starts them."""

from plurax.errors.kinds import ExperimentError


def launch_host(host: int | None, hosts: int) -> ExperimentError:
    found = "is missing" if host is None else f"{host}"
    return ExperimentError(
        f"plurax launch --hosts {hosts}: --host {found}. Each host runs one launcher, with an "
        f"index of its own from 0 to {hosts - 1}; host 0 leads, and the coordinator is there."
    )


def launch_host_taken(host: int) -> ExperimentError:
    return ExperimentError(
        f"another launcher has come with --host {host}, and it lives. Give each host an index of "
        "its own."
    )
