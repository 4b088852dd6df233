"""Several processes that train together on this machine, and seconds from a kill to the next step.

Two processes with four devices each, beside one process with eight, the same step by hand, and
processes of PyTorch. All do the same work on the same cores and take turns.
"""

import dataclasses
import statistics
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

from benchmarks import sizes
from benchmarks.harness import (
    Check,
    Row,
    Side,
    Skipped,
    WorkerFailedError,
    WorkerSkippedError,
    compare,
    take_turns,
)
from benchmarks.run import Run

TARGET = 1 / 1.02
"""As a speed: a step may take 1.02 times as long as the one by hand."""
PEER_TARGET = 1.0
PEERS = {
    "data=8": ("PyTorch DDP", "PyTorch DDP of a transformer", "data"),
    "data=8, zero=3": ("PyTorch FSDP2", "PyTorch FSDP2", "fsdp"),
}
"""For each split: what it is called in the rows, in `Run.peer`, and its way there."""
WORDS = {
    "noticed": "the launcher knows",
    "ended": "the others have ended",
    "backoff": "backoff",
    "processes": "processes start and meet",
    "data": "data and program",
    "restore": "restore",
    "step": "compile and first step",
}


def hosts(run: Run) -> Iterator[Row]:
    """Steps under each plan, then kills."""
    case = run.sizes.hosts
    if run.platform != "cpu":
        yield Skipped("hosts", case.name, "its processes share one machine: CPU only")
        return
    for split in case.splits:
        yield from _steps(run, case, split)
    yield _kills(run, case)


def _steps(run: Run, case: sizes.HostsCase, split: str) -> Iterator[Row]:
    """One plan in processes, beside the others, all in turns."""
    how = sizes.SPLITS[split]
    devices = how["data"]
    layout = f"{case.processes} processes × {devices // case.processes} devices"
    name = f"{case.name}, {split}, {layout}"
    settings = {
        **dataclasses.asdict(case.network),
        "devices": devices,
        "processes": case.processes,
        "platform": run.platform,
        "cores": run.cores,
        "learning_rate": sizes.LEARNING_RATE,
        "weight_decay": sizes.WEIGHT_DECAY,
        "split": how,
    }
    with ExitStack() as stack:
        gang = stack.enter_context(run.jax("jax_hosts", settings))
        alone = stack.enter_context(run.jax("jax_divided", settings))
        sides = {
            "plurax": Side(gang, "plurax"),
            "JAX by hand": Side(gang, "by hand"),
            f"plurax, 1 process × {devices} devices": Side(alone, "plurax"),
            f"JAX by hand, 1 process × {devices} devices": Side(alone, "by hand"),
        }
        targets = {"JAX by hand": TARGET}
        said, peer, way = PEERS[split]
        for count in (case.processes, devices):
            against = f"{said}, {count} processes"
            try:
                worker = run.peer(peer, settings | {"way": way, "devices": count})
            except WorkerSkippedError as reason:
                yield Skipped("hosts", f"{name}, {against}", str(reason))
                continue
            stack.enter_context(worker)
            assert worker.facts["parameters"] == gang.facts["parameters"], worker.facts
            assert abs(worker.facts["first_loss"] - gang.facts["first_loss"]) < 1e-2, worker.facts
            sides[against], targets[against] = Side(worker, "step"), PEER_TARGET
        turns = take_turns(list(sides.values()), case.repeats, warm_up=2)
        seconds = dict(zip(sides, turns, strict=True))
        facts = {key: gang.facts[key] for key in ("parameters", "plurax_compile_seconds")}
        for against in list(sides)[1:]:
            yield compare("hosts", name, against, seconds["plurax"], seconds[against],
                          targets.get(against), facts)  # fmt: skip
    yield _in_flight(run, name, settings, case.repeats)


def _in_flight(run: Run, name: str, settings: dict[str, Any], repeats: int) -> Row:
    """By hand without waiting for each step, which Gloo may mix up. In processes of its own."""
    name = f"{name}, JAX by hand: ten steps dispatched without waiting"
    units = 10
    try:
        with run.jax("jax_hosts", settings | {"waits": False}) as worker:
            seconds = [worker.run("by hand", units) / units for _ in range(repeats)]
    except WorkerFailedError as error:
        failed = "its processes ended, or waited for each other for too long"
        return Check("hosts", name, failed, "", None, {"error": str(error)[-500:]})
    took = f"a step {1e3 * statistics.median(seconds):,.0f} ms"
    return Check("hosts", name, took, "", None, {"seconds": seconds})


def _kills(run: Run, case: sizes.HostsCase) -> Row:
    """Kill one process after the other under `plurax launch`."""
    devices = 2 * case.processes
    settings = {
        "network": dataclasses.asdict(case.restarted),
        "examples": 1437,
        "batch": 64,
        "processes": case.processes,
        "devices": devices,
        "checkpoint_every": 20,
    }
    with run.jax("jax_restarts", settings) as worker:
        for _ in range(case.kills):
            worker.run("kill")
        samples = [answer["parts"] for answer in worker.answers["kill"]]
        whole = [answer["seconds"] for answer in worker.answers["kill"]]
        worker.run("end")
    parts = {part: statistics.median(one[part] for one in samples) for part in WORDS}
    found = ", ".join(f"{word} {parts[part]:.2f} s" for part, word in WORDS.items())
    return Check(
        group="hosts",
        name=f"kill -9 of one of {case.processes} processes under plurax launch, "
        f"data={devices}, to the next step",
        found=f"{statistics.median(whole):.2f} s: {found}",
        wanted="",
        reached=None,
        facts={"seconds": whole, "samples": samples, "medians": parts},
    )
