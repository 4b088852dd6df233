"""Errors about parameter servers."""

from collections.abc import Iterable

from plurax.errors.kinds import CheckpointError, PeerError, PlanError


def optimizer_needs_shards(operation: str) -> PlanError:
    return PlanError(
        "each parameter server holds some of the parameters with their optimizer state, and the "
        f"optimizer's {operation!r} reads tensors of several of them at once. Sums and norms over "
        "all parameters work; so does this optimizer with shards=1."
    )


def optimizer_needs_servers(operation: str) -> PlanError:
    return PlanError(
        f"the optimizer's {operation!r} needs a number of tensors that are on several parameter "
        "servers (of parameters or of the optimizer's state, not of gradients alone). In "
        "mode='sync' the servers exchange it; in 'bounded' and 'async' a worker sends such numbers "
        "along, and cannot know this one. Use mode='sync' or shards=1."
    )


def servers_number(field: str, given: object, least: int) -> PlanError:
    return PlanError(f"Servers({field}={given!r}): {field} is a whole number of at least {least}.")


def servers_unknown(field: str, given: object, known: Iterable[str]) -> PlanError:
    return PlanError(f"Servers({field}={given!r}): {field} is one of {', '.join(known)}.")


def servers_unused(field: str, given: object, mode: str, modes: Iterable[str]) -> PlanError:
    names = " or ".join(f"mode={name!r}" for name in modes)
    return PlanError(
        f"Servers(mode={mode!r}, {field}={given!r}): {field} has no meaning in mode={mode!r}. "
        f"Leave it out, or say {names}."
    )


def servers_staleness_missing() -> PlanError:
    return PlanError(
        "Servers(mode='bounded'): say how many steps a worker may be ahead of the slowest, such as "
        "staleness=3; with staleness=0 all workers take each step together."
    )


def servers_quorum_too_large(quorum: int, workers: int) -> PlanError:
    return PlanError(
        f"Servers(workers={workers}, quorum={quorum}): a batch has as many parts as there are "
        f"workers, so a quorum is at most {workers}."
    )


def servers_lease(given: object) -> PlanError:
    return PlanError(f"Servers(lease={given!r}): a lease is a positive number of seconds.")


def servers_address_unused(address: str, transport: str) -> PlanError:
    return PlanError(
        f"Servers(transport={transport!r}, address={address!r}): only transport='ray' has an "
        "address."
    )


def servers_one_network() -> PlanError:
    return PlanError(
        "parameter servers train one network: leave out members= or servers=. Members never "
        "communicate, so they need no servers; Plan(member=...) distributes them."
    )


def servers_frozen() -> PlanError:
    return PlanError(
        "servers hold every parameter with its optimizer state, and cannot leave out frozen ones "
        "(Task.frozen). Train without servers=, or give frozen parameters updates of zero: "
        "optax.partition({..., 'frozen': optax.set_to_zero()}, labels)."
    )


def servers_kind(given: object) -> PlanError:
    return PlanError(
        f"fit(servers={given!r}): servers is a plurax.Servers, such as "
        "Servers(shards=2, workers=4, mode='bounded', staleness=3), or None."
    )


def servers_coupled(workers: int) -> PlanError:
    return PlanError(
        f"Servers(mode='sync', workers={workers}) divides a batch among workers, and this task's "
        "loss couples the examples of a batch (Task.coupled). Use mode='bounded' or 'async', in "
        "which a worker has a whole batch, or workers=1."
    )


def servers_plan_pipeline_zero(zero: int) -> PlanError:
    return PlanError(
        f"a worker's plan has pipeline > 1 and zero={zero}: the optimizer's state is on the "
        "servers, so ZeRO would divide nothing but gradients that are pushed whole. Say zero=0."
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


def servers_head_gone(address: str, reason: str) -> PeerError:
    return PeerError(
        f"the head of the Ray cluster ({address}) has ended: {reason}. Workers and servers cannot "
        "be started again without it. Training stopped; what was saved last can be resumed."
    )


def servers_raylet_gone() -> PeerError:
    return PeerError(
        "Ray's process on this machine (raylet) has ended. It was killed, perhaps for memory; its "
        "log is in /tmp/ray/session_latest/logs. Workers and servers cannot be started again "
        "without it. Training stopped; what was saved last can be resumed."
    )


def workers_all_gone(workers: int, times: int) -> PlanError:
    return PlanError(
        f"all {workers} workers ended, {times} times each without having computed a gradient; "
        "their processes were killed or found no memory. Training stopped; what was saved last "
        "can be resumed."
    )


def server_keeps_ending(index: int, times: int) -> PlanError:
    return PlanError(
        f"server {index} ended {times} times without having answered; its process was killed or "
        "found no memory. Training stopped; what was saved last can be resumed."
    )


def record_none(directory: str) -> CheckpointError:
    return CheckpointError(
        f"{directory} holds no servers.jsonl, the record that a run with parameter servers writes: "
        "fit(servers=..., output=...) or plurax train --servers. ... Give the folder of such a run."
    )


def record_begins_later(directory: str, step: int) -> CheckpointError:
    return CheckpointError(
        f"the record in {directory} begins at step {step}, where training without servers, or a "
        "run without its record, was resumed. What came before cannot be replayed."
    )


def replay_other_data(directory: str, recorded: int | None, now: int | None) -> CheckpointError:
    return CheckpointError(
        f"an epoch of the run recorded in {directory} has {recorded} examples (of an iterable: "
        f"batches) and the data now have {now}. Replay it with the data it was trained on."
    )


def replay_beyond_record(directory: str, step: int, last: int) -> CheckpointError:
    return CheckpointError(
        f"step {step} of the run in {directory} cannot be replayed: its record ends at step {last}."
    )
