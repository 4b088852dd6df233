"""Several processes: hosts, servers and replicas that cannot train together."""

from collections.abc import Sequence

from plurax.errors.kinds import ExperimentError, PeerError, PlanError, ReplicaError


def process_ended(who: str) -> PeerError:
    return PeerError(
        f"{who} has ended, so this one cannot go on. Its own output says why; the newest "
        "checkpoint is kept, and `plurax launch` restarts all of them from it."
    )


def optimizer_needs_shards(operation: str) -> PlanError:
    return PlanError(
        "each parameter server holds some of the parameters with their optimizer state, and the "
        f"optimizer's {operation!r} reads tensors of several of them at once. Sums and norms over "
        "all parameters work; so does this optimizer with shards=1."
    )


def servers_need_token(address: str | None) -> PlanError:
    why = "whoever reaches a Ray cluster can run code on it, so plurax uses only one that asks for "
    if address is None:
        return PlanError(
            f"Servers(transport='ray'): {why}a token, and Ray was imported before without. Set "
            "RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH=FILE before `import ray`, or import "
            "plurax's fit first."
        )
    return PlanError(
        f"Servers(address={address!r}): {why}a token. Start every node of the cluster with "
        "RAY_AUTH_MODE=token, and set here RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH=FILE, with "
        "the cluster's token."
    )


def servers_not_reached(address: str, reason: str) -> PlanError:
    return PlanError(
        f"Servers(address={address!r}): there is no Ray cluster that answers, or it refuses this "
        f"token (RAY_AUTH_TOKEN_PATH). Ray says: {reason}"
    )


def servers_store_too_small(wanted: int, found: int, where: str) -> PlanError:
    return PlanError(
        f"what workers and servers send each other needs {wanted / 1e9:.2f} GB of memory that "
        f"processes share, and {where} {found / 1e9:.2f} GB: Ray would write the rest to disk. "
        "Take fewer workers, a compression, or more shared memory (of a container: --shm-size)."
    )


def replicas_differ(
    step: int, devices: Sequence[str], leaves: Sequence[str], certain: bool
) -> ReplicaError:
    who = " and ".join(devices)
    if certain:
        verb = "holds" if len(devices) == 1 else "hold"
        what = f"{who} {verb} other bits than most copies of {_some(leaves)}"
    else:
        what = f"{who} hold different bits in {_some(leaves)}, and no majority says which are right"
    return ReplicaError(
        f"after step {step} {what}. They are computed from the same sums and must be equal, so a "
        "device's memory or arithmetic is at fault. Each checkpoint was compared before it was "
        "saved: resume from the newest, and leave that device out if it happens again."
    )


def _some(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


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
