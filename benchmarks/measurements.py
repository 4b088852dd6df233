"""What is measured, against what, and the target of each."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

from benchmarks import sizes
from benchmarks.callbacks import callbacks
from benchmarks.compiling import compiling
from benchmarks.divided import divided
from benchmarks.gpu import gpu
from benchmarks.harness import (
    Check,
    Row,
    Side,
    Skipped,
    Worker,
    WorkerSkippedError,
    compare,
    take_turns,
)
from benchmarks.hosts import hosts
from benchmarks.members import members
from benchmarks.pipelines import pipelines
from benchmarks.planning import planning, ranked
from benchmarks.recovery import recovery
from benchmarks.reliability import reliability
from benchmarks.run import Run
from benchmarks.servers import servers
from benchmarks.sources import sources
from benchmarks.uneven import uneven

STEPS = (
    ("plurax", "by hand", "NumPy batch"),
    ("plurax placed", "by hand placed", "batch on the devices"),
    ("plurax rows", "by hand placed", "its arrays on the devices"),
)
"""Sides of `jax_step`, plurax's and by hand, and how the batch comes."""
STEP_TARGET = 1 / 1.02
"""As a speed: a step may take 1.02 times as long as the one by hand."""
ACCUMULATION_TARGETS = {8: 1.2, 16: 1.9}
TRAINING_TARGETS = {"PyTorch DDP": 1.0, "TensorFlow MirroredStrategy": 1.5}
INFERENCE_TARGETS = {"by hand": 1.0, "PyTorch": 1.0, "Keras predict": 1.5}
MAX_COMPILATIONS = 10


def step(run: Run) -> Iterator[Row]:
    """A training step of plurax and the same step written by hand in JAX."""
    for case in run.sizes.step:
        for devices in (1,) if case.members else (1, 8):
            name = f"{case.name}, {_devices(devices)}"
            settings = {
                "devices": devices,
                "network": sizes.to_json(case.network),
                "batch": case.batch,
                "members": case.members,
            }
            try:
                worker = run.jax("jax_step", settings)
            except WorkerSkippedError as reason:
                yield Skipped("step", name, str(reason))
                continue
            with worker:
                for kind, by_hand, how in STEPS:
                    mine = Side(worker, kind, case.units)
                    other = Side(worker, by_hand, case.units)
                    ours, theirs = take_turns([mine, other], case.repeats, warm_up=2)
                    yield compare(
                        "step",
                        f"{name}, {how}",
                        "JAX by hand",
                        ours,
                        theirs,
                        STEP_TARGET,
                        worker.facts,
                    )


def accumulation(run: Run) -> Iterator[Row]:
    """Many microbatches to an update: a plan, and `optax.MultiSteps` in a data-parallel step."""
    case = run.sizes.accumulation
    for microbatches, target in ACCUMULATION_TARGETS.items():
        name = f"{case.name}, {microbatches} microbatches, {_devices(8)}"
        settings = {
            "devices": 8,
            "microbatches": microbatches,
            "network": sizes.to_json(case.network),
            "batch": case.batch,
        }
        try:
            worker = run.jax("jax_accumulation", settings)
        except WorkerSkippedError as reason:
            yield Skipped("accumulation", name, str(reason))
            continue
        with worker:
            sides = [Side(worker, "plurax"), Side(worker, "optax.MultiSteps")]
            ours, theirs = take_turns(sides, case.repeats)
            yield compare(
                "accumulation", name, "optax.MultiSteps", ours, theirs, target, worker.facts
            )


def domains(run: Run) -> Iterator[Row]:
    """The rock domains on two devices: a step, and an epoch over data that stay in memory."""
    batch, steps = run.sizes.domains_batch, run.sizes.domains_steps
    settings = _domains_settings(run, "train", devices=2, batch=batch)
    names = {
        "step": f"step, batch {batch}, {_devices(2)}",
        "epoch": f"epoch, {steps} steps of {batch}, {_devices(2)}",
    }
    with ExitStack() as stack:
        workers, skipped = _open(run, stack, list(TRAINING_TARGETS), settings)
        for side, name in names.items():
            for against, reason in skipped.items():
                yield Skipped("domains", f"{name}, {against}", reason)
            if "plurax" not in workers:
                continue
            sides = {against: Side(worker, side) for against, worker in workers.items()}
            tensorflow = "TensorFlow MirroredStrategy"
            if side == "epoch" and tensorflow in workers:
                sides[f"{tensorflow}, Keras fit"] = Side(workers[tensorflow], "epoch by fit")
            turns = take_turns(list(sides.values()), run.sizes.domains_repeats)
            seconds = dict(zip(sides, turns, strict=True))
            for against in list(sides)[1:]:
                yield compare(
                    "domains",
                    name,
                    against,
                    seconds["plurax"],
                    seconds[against],
                    TRAINING_TARGETS[against.removesuffix(", Keras fit")],
                    _same_network(workers["plurax"], sides[against].worker),
                )


def inference(run: Run) -> Iterator[Row]:
    """Rock domains of many blocks: coordinates in, logits out, both NumPy arrays."""
    settings = _domains_settings(run, "predict", devices=1, batch=run.sizes.inference_chunk)
    peers = [name for name in INFERENCE_TARGETS if name != "by hand"]
    with ExitStack() as stack:
        workers, skipped = _open(run, stack, peers, settings)
        for against, reason in skipped.items():
            yield Skipped("inference", against, reason)
        if "plurax" not in workers:
            return
        amounts = (
            (run.sizes.inference_rows, run.sizes.inference_repeats, "", "few"),
            (run.sizes.inference_all_rows, 1, ", all", "all"),
        )
        for rows, repeats, suffix, peer_side in amounts:
            name = f"{rows:,} blocks" + (", once" if repeats == 1 else "")
            sides = {
                "plurax": Side(workers["plurax"], "plurax" + suffix),
                "by hand": Side(workers["plurax"], "by hand" + suffix),
                **{
                    against: Side(workers[against], peer_side)
                    for against in peers
                    if against in workers
                },
            }
            # The one long pass needs no warm-up of its own: the short ones went before.
            turns = take_turns(list(sides.values()), repeats, warm_up=min(1, repeats - 1))
            seconds = dict(zip(sides, turns, strict=True))
            for against in list(sides)[1:]:
                yield compare(
                    "inference",
                    name,
                    "JAX by hand" if against == "by hand" else against,
                    seconds["plurax"],
                    seconds[against],
                    INFERENCE_TARGETS[against],
                    _same_network(workers["plurax"], sides[against].worker),
                )


def max_batch_size(run: Run) -> Iterator[Row]:
    """The largest batch within a memory budget, checked with the compiler's own numbers."""
    plans = ({"data": 1}, {"data": 2, "microbatches": 4})
    for case in run.sizes.batch_size:
        for plan in plans:
            written = ", ".join(f"{field}={value}" for field, value in plan.items())
            name = f"{case.name}, {case.memory / sizes.MIB:,.0f} MiB, {written}"
            settings = {
                "network": sizes.to_json(case.network),
                "plan": plan,
                "memory": case.memory,
            }
            try:
                worker = run.jax("jax_batch_size", settings)
            except WorkerSkippedError as reason:
                yield Skipped("max_batch_size", name, str(reason))
                continue
            with worker:
                found = worker.facts
            fits = found["peak_bytes"] <= case.memory < found["next_peak_bytes"]
            yield Check(
                group="max_batch_size",
                name=name,
                found=f"{found['size']:,} examples need {_mib(found['peak_bytes'])}, one more "
                f"{_mib(found['next_peak_bytes'])}; {found['compilations']} compilations",
                wanted=f"fits, one more does not, at most {MAX_COMPILATIONS} compilations",
                reached=fits and found["compilations"] <= MAX_COMPILATIONS,
                facts=found,
            )


MEASUREMENTS: dict[str, Callable[[Run], Iterator[Row]]] = {
    "step": step,
    "accumulation": accumulation,
    "domains": domains,
    "inference": inference,
    "max_batch_size": max_batch_size,
    "members": members,
    "gpu": gpu,
    "divided": divided,
    "pipelines": pipelines,
    "compile": compiling,
    "planning": planning,
    "ranked": ranked,
    "servers": servers,
    "uneven": uneven,
    "recovery": recovery,
    "reliability": reliability,
    "callbacks": callbacks,
    "hosts": hosts,
    "sources": sources,
}


def _domains_settings(run: Run, work: str, *, devices: int, batch: int) -> dict[str, Any]:
    return {
        "work": work,
        "width": run.sizes.domains.width,
        "devices": devices,
        "batch": batch,
        "steps": run.sizes.domains_steps,
        "rows": run.sizes.inference_rows,
        "all_rows": run.sizes.inference_all_rows,
        "platform": run.platform,
        "cores": run.cores,
        "learning_rate": sizes.LEARNING_RATE,
        "weight_decay": sizes.WEIGHT_DECAY,
    }


def _open(
    run: Run, stack: ExitStack, peers: list[str], settings: dict[str, Any]
) -> tuple[dict[str, Worker], dict[str, str]]:
    """Workers by name, `plurax` first, and why others are missing."""
    workers: dict[str, Worker] = {}
    skipped: dict[str, str] = {}
    try:
        workers["plurax"] = stack.enter_context(run.jax("jax_domains", settings))
    except WorkerSkippedError as reason:
        return {}, dict.fromkeys(peers, str(reason))
    # What the network is made of besides its parameters, from the example itself.
    given = settings | workers["plurax"].facts["network"]
    for name in peers:
        try:
            workers[name] = stack.enter_context(run.peer(name, given))
        except WorkerSkippedError as reason:
            skipped[name] = str(reason)
    return workers, skipped


def _same_network(mine: Worker, other: Worker) -> dict[str, Any]:
    """The facts of a row; both sides must have as many parameters."""
    parameters = mine.facts["parameters"]
    assert other.facts["parameters"] == parameters, (other.module, other.facts, parameters)
    return {
        "parameters": parameters,
        "plurax_compile_seconds": mine.facts["plurax_compile_seconds"],
    }


def _devices(count: int) -> str:
    return "1 device" if count == 1 else f"{count} devices"


def _mib(count: int) -> str:
    return f"{count / sizes.MIB:,.1f} MiB"
