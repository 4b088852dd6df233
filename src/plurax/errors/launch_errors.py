"""Errors about several processes, and about the launcher that starts them."""

from collections.abc import Sequence

from plurax.errors import hints
from plurax.errors.kinds import ExperimentError


def launch_nothing() -> ExperimentError:
    return ExperimentError(
        "plurax launch: say after -- what each process runs: a command of plurax, as in "
        "plurax launch --processes 2 -- train FILE, or a script of your own, as in "
        "plurax launch --processes 2 -- script.py."
    )


def launch_unknown(given: str, commands: Sequence[str]) -> ExperimentError:
    return ExperimentError(
        f"plurax launch -- {given}: what each process runs is a path that ends in .py, or a "
        f"command of plurax: {', '.join(commands)}.{hints.did_you_mean(given, commands)}"
    )


def launch_no_script(path: str) -> ExperimentError:
    return ExperimentError(f"plurax launch -- {path}: there is no such file.")


def launch_hosts_missing() -> ExperimentError:
    return ExperimentError(
        "plurax launch: --host and --coordinator are for several hosts. Say how many there are, as "
        "in --hosts 4 --host 2 --coordinator host0:7117."
    )


def launch_coordinator(given: str | None, hosts: int) -> ExperimentError:
    wanted = "give a name or address, and a port below 65536"
    found = "is missing" if given is None else f"{given}: {wanted}"
    return ExperimentError(
        f"plurax launch --hosts {hosts}: --coordinator {found}. On every host say where host 0 "
        "listens, a free port of it, as in --coordinator host0:7117."
    )


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


def launch_other_hosts(hosts: int, leaders: object) -> ExperimentError:
    return ExperimentError(
        f"plurax launch --hosts {hosts}: host 0 was started with --hosts {leaders}. Give the same "
        "number on every host."
    )


def launch_token(coordinator: str) -> ExperimentError:
    return ExperimentError(
        f"plurax launch --coordinator {coordinator}: this host and host 0 do not have the same "
        "secret. Set the environment variable PLURAX_TOKEN to the same words on every host."
    )


def launch_token_missing(hosts: int) -> ExperimentError:
    return ExperimentError(
        f"plurax launch on {hosts} hosts: without a secret anyone who reaches the port of host 0 "
        "could join in place of a host. Set the environment variable PLURAX_TOKEN to the same "
        "secret on every host; in a Slurm script write export PLURAX_TOKEN=$(openssl rand -hex 16) "
        "before srun."
    )


def launch_not_reached(coordinator: str, seconds: float, reason: str) -> ExperimentError:
    return ExperimentError(
        f"plurax launch --coordinator {coordinator}: host 0 was not reached within {seconds:g} s: "
        f"{reason}. Start plurax launch with --host 0 there, and check that no firewall is between."
    )


def launch_cannot_listen(coordinator: str, reason: str) -> ExperimentError:
    return ExperimentError(
        f"plurax launch --coordinator {coordinator} --host 0: cannot listen there: {reason}. The "
        "coordinator is a name or address of host 0 itself, and a port that nobody else uses."
    )


def launch_loopback(name: str, host: int, address: str) -> ExperimentError:
    return ExperimentError(
        f"plurax launch --coordinator {name}: on host {host} this name is {address}, which leads "
        "to no other host. Give host 0's address in the network, or correct /etc/hosts there."
    )


def launch_elastic_hosts(least: int, hosts: int) -> ExperimentError:
    return ExperimentError(
        f"plurax launch --hosts {hosts} --min-hosts {least}: give a number from 1 to {hosts}."
    )


def launch_slurm_tasks(tasks: int, nodes: int) -> ExperimentError:
    return ExperimentError(
        f"plurax launch in a Slurm step of {tasks} tasks on {nodes} nodes: a launcher starts all "
        "processes of its node. Write srun --ntasks-per-node=1 plurax launch --processes N -- ..., "
        "or leave out plurax launch."
    )


def launch_ray_token() -> ExperimentError:
    return ExperimentError(
        "plurax launch --ray: whoever reaches a Ray cluster can run code on it, so plurax uses "
        "only one that asks for a token. Start every node of the cluster with RAY_AUTH_MODE=token, "
        "and set here RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH=FILE, with the cluster's token."
    )


def launch_ray_hosts() -> ExperimentError:
    return ExperimentError(
        "plurax launch --ray: say on how many hosts, as in --ray auto --hosts 4; --host and "
        "--coordinator are Ray's to choose."
    )


def launch_ray_not_reached(address: str, reason: str) -> ExperimentError:
    return ExperimentError(
        f"plurax launch --ray {address}: there is no Ray cluster that answers, or it refuses this "
        f"token (RAY_AUTH_TOKEN_PATH). Ray says: {reason}"
    )


def launch_ray_too_small(hosts: int, found: int) -> ExperimentError:
    return ExperimentError(
        f"plurax launch --ray --hosts {hosts}: the cluster has {found} nodes. Give a smaller "
        "number, or add nodes."
    )


def launch_ray_busy(hosts: int, wanted: str, seconds: float) -> ExperimentError:
    return ExperimentError(
        f"plurax launch --ray --hosts {hosts}: within {seconds:g} s the cluster had no {hosts} "
        f"nodes with {wanted} free on each. Wait for its other jobs, or ask for fewer hosts."
    )


def launch_number(option: str, given: float, least: float) -> ExperimentError:
    return ExperimentError(f"plurax launch --{option} {given}: give a number of at least {least}.")
