"""Populations of small networks: plurax, and four other ways to train them all."""

import dataclasses
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import populations, sizes
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
from benchmarks.run import Run

DEVICES = {"cpu": 2, "gpu": 1}
JAX_SIDES = {
    "vmap": "JAX by hand, vmap of a scan",
    "scan": "JAX by hand, one scan after another",
}
TORCH_SIDES = {
    "loop": "PyTorch, one network after another",
    "torch.func": "PyTorch torch.func",
}
TARGETS = {
    ("spirals", count): {"loop": 100.0, "torch.func": 15.0, "vmap": 4.0, "scan": 4.0}
    for count in (100, 1000)
}
HALVING_TARGET = 0.8
"""How much of the members' proportion the time must fall by."""


def members(run: Run) -> Iterator[Row]:
    """Training many small networks, and one population beside the machine's limits."""
    for case in run.sizes.members:
        with ExitStack() as stack:
            try:
                settings = members_settings(run, case, stack)
                if _limited(run, case):
                    settings["limits"] = dataclasses.asdict(run.sizes.limits)
                mine = stack.enter_context(run.jax("jax_members", settings))
            except WorkerSkippedError as reason:
                yield Skipped("members", case.name, str(reason))
                continue
            workers = dict.fromkeys(JAX_SIDES, mine)
            try:
                torch = stack.enter_context(run.peer("PyTorch members", settings))
                workers |= dict.fromkeys(TORCH_SIDES, torch)
            except WorkerSkippedError as reason:
                for against in TORCH_SIDES.values():
                    yield Skipped("members", f"{case.name}, {against}", str(reason))
            for count, repeats in case.repeats.items():
                yield from _race(case, count, repeats, mine, workers)
            yield _plans(case, mine)
            if _limited(run, case):
                yield _roofline(case, run.sizes.limits, mine)
                yield _halving(case, run.sizes.limits, mine)


def _limited(run: Run, case: sizes.MembersCase) -> bool:
    return case == run.sizes.members[0]


def members_settings(run: Run, case: sizes.MembersCase, stack: ExitStack) -> dict[str, Any]:
    """For all workers of a case; the data go to a file. Raises `WorkerSkippedError`."""
    try:
        data: dict[str, Any] = populations.DATA[case.data]()
    except ImportError as error:
        raise WorkerSkippedError(f"needs scikit-learn for its data ({error})") from error
    # Whole batches only: what is left of an epoch is not there, on any side.
    per_epoch = len(data["x"]) // case.batch
    data = {name: rows[: per_epoch * case.batch] for name, rows in data.items()}
    if case.resampled:
        data["rows"] = populations.bootstrap(
            len(data["x"]), max(case.repeats), case.epochs, per_epoch, case.batch
        )
    path = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "data.npz"
    np.savez(path, **data)
    return {
        "network": sizes.to_json(case.network),
        "widths": case.network.widths,
        "data": str(path),
        "counts": list(case.repeats),
        "resampled": case.resampled,
        "batch": case.batch,
        "steps": case.epochs * per_epoch,
        "steps_per_epoch": per_epoch,
        "limit": case.torch_limit,
        "sample": case.torch_sample,
        "platform": run.platform,
        "devices": DEVICES[run.platform],
        "plan": case.plan,
        "learning_rate": sizes.LEARNING_RATE,
        "scan": True,
    }


def _race(
    case: sizes.MembersCase, count: int, repeats: int, mine: Worker, workers: dict[str, Worker]
) -> Iterator[Row]:
    """All ways to train this many networks, in turn."""
    names = ["plurax", *workers]
    sides = [Side(workers.get(name, mine), f"{name}, {count}") for name in names]
    seconds = dict(zip(names, take_turns(sides, repeats), strict=True))
    for name, worker in workers.items():
        assert worker.facts["parameters"] == mine.facts["parameters"], worker.facts
        against = (JAX_SIDES | TORCH_SIDES)[name]
        facts = {"case": case.name, "members": count, "parameters": mine.facts["parameters"]}
        label = f"{case.name}, {_networks(count)}"
        looped = worker.facts["looped"][str(count)] if name == "loop" else count
        if looped < count:
            label += f" ({looped} of them measured in PyTorch, and scaled)"
            facts["measured"] = looped
        yield compare(
            "members",
            label,
            against,
            seconds["plurax"],
            [value * count / looped for value in seconds[name]],
            TARGETS.get((case.name, count), {}).get(name),
            facts | mine.facts[str(count)],
        )


def _plans(case: sizes.MembersCase, mine: Worker) -> Check:
    """What plurax chose for each number of networks."""
    chosen = {count: mine.facts[str(count)] for count in case.repeats}
    return Check(
        group="members",
        name=f"{case.name}, what plurax chose",
        found="; ".join(
            f"{_networks(count)}: chunk {facts['chunk']}, batch dim {facts['batch_dim']}, "
            f"ready in {facts['plurax_compile_seconds']:.1f} s"
            for count, facts in chosen.items()
        ),
        wanted="",
        reached=None,
        facts={str(count): facts for count, facts in chosen.items()},
    )


def _roofline(case: sizes.MembersCase, limits: sizes.Limits, mine: Worker) -> Check:
    """How much of the machine a population uses: of its matrix products, of its memory."""
    names = [f"plurax, {limits.members}", "matrix product", "triad"]
    ours, products, triads = take_turns([Side(mine, name) for name in names], limits.repeats)
    work = populations.arithmetic(case.network, case.batch)
    # One network's step; the first case has one step in each epoch.
    step = statistics.median(ours) / (limits.members * case.epochs)
    # What the machine can do is its best turn; the triad reads two arrays and writes one.
    peak = 2 * limits.matrix**3 / min(products)
    bandwidth = 3 * 4 * limits.triad / min(triads)
    rate = (work["products"] + work["elementwise"]) / step
    share = {
        "products": work["products"] / step / peak,
        "all": rate / peak,
        "bytes": work["bytes"] / step / bandwidth,
    }
    return Check(
        group="members",
        name=f"{case.name}, {_networks(limits.members)}, beside the machine's limits",
        found=f"{1e6 * step:.2f} µs for a step of one network: {work['products']:,} operations in "
        f"matrix products and {work['elementwise']:,} elementwise, {rate / 1e9:.1f} GFLOP/s; "
        f"its products alone are {100 * share['products']:.0f} % and all {100 * share['all']:.0f} "
        f"% of a large product's {peak / 1e9:.0f} GFLOP/s; {work['bytes']:,} bytes through memory "
        f"would be {100 * share['bytes']:.0f} % of its {bandwidth / 1e9:.1f} GB/s",
        wanted="",
        reached=None,
        facts={
            "seconds_per_step": step,
            "flops_per_second": rate,
            "peak_flops_per_second": peak,
            "bytes_per_second": bandwidth,
            "shares": share,
            **work,
        },
    )


def _halving(case: sizes.MembersCase, limits: sizes.Limits, mine: Worker) -> Check:
    """Whether a population that is halved again and again costs as much less."""
    sides = [Side(mine, f"halving, {count}") for count in limits.halving]
    turns = take_turns(sides, limits.halving_repeats)
    seconds = dict(zip(limits.halving, map(statistics.median, turns), strict=True))
    first = limits.halving[0]
    falls = {count: seconds[first] / seconds[count] for count in limits.halving[1:]}
    parts = [f"{_networks(first)} {1e3 * seconds[first]:.3g} ms"] + [
        f"{count:,} {1e3 * seconds[count]:.3g} ms, {fall:.2f} times faster for "
        f"{first / count:.2f} times fewer"
        for count, fall in falls.items()
    ]
    return Check(
        group="members",
        name=f"{case.name}, {limits.halving_steps} steps while the population shrinks",
        found="; ".join(parts),
        wanted=f"at least {HALVING_TARGET} of the proportion",
        reached=all(fall >= HALVING_TARGET * first / count for count, fall in falls.items()),
        facts={"seconds": {str(count): value for count, value in seconds.items()}},
    )


def _networks(count: int) -> str:
    return "1 network" if count == 1 else f"{count:,} networks"
