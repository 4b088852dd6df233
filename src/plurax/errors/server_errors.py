"""Errors about parameter servers."""

from plurax.errors.kinds import PlanError


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
