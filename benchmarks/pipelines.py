"""A network in stages: schedules beside one device and PyTorch, hybrid plans, compiling."""

import dataclasses
import statistics
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

from benchmarks import sizes
from benchmarks.harness import (
    Check,
    Comparison,
    Row,
    Side,
    Skipped,
    Worker,
    WorkerSkippedError,
    compare,
    take_turns,
)
from benchmarks.run import Run

PEER = "PyTorch pipelining"
PEER_TARGET = 1.0
ALONE = "one device, the same cores"
HYBRID_DEVICES = 8
FLAT = 1.2
"""How many times as long the deepest network may take to compile as the shallowest."""
SAME = 1e-3
"""By how much losses may differ between frameworks that start from the same parameters."""


def pipelines(run: Run) -> Iterator[Row]:
    """Schedules on virtual devices, hybrid plans, and how long compiling takes."""
    case = run.sizes.pipelines
    if run.platform != "cpu":
        yield Skipped("pipelines", case.name, "measured on virtual CPU devices alone")
        return
    for devices in case.devices:
        yield from _stages(run, case, devices)
    yield from _hybrids(run, case)
    yield from _compiling(run, case)


def _settings(run: Run, case: sizes.PipelinesCase) -> dict[str, Any]:
    return {
        "network": sizes.to_json(case.network),
        "batch": case.batch,
        "microbatches": case.microbatches,
        "platform": run.platform,
        "cores": run.cores,
        "learning_rate": sizes.LEARNING_RATE,
        "weight_decay": sizes.WEIGHT_DECAY,
    }


# ---- stages ------------------------------------------------------------------------------------


def _stages(run: Run, case: sizes.PipelinesCase, devices: int) -> Iterator[Row]:
    """Each plan beside the network on one device, then beside PyTorch with the same schedule."""
    settings = _settings(run, case) | {"devices": devices}
    title = f"{case.name}, {devices} devices"
    with ExitStack() as stack:
        try:
            mine = stack.enter_context(
                run.jax("jax_pipelines", settings | {"work": "steps", "plans": case.plans})
            )
        except WorkerSkippedError as reason:
            yield Skipped("pipelines", title, str(reason))
            return
        alone, *ours = take_turns(
            [Side(mine, name) for name in ("sequential", *case.plans)], case.repeats
        )
        for plan, seconds in zip(case.plans, ours, strict=True):
            facts = _facts(mine, plan)
            row = compare("pipelines", f"{title}, {plan}", ALONE, seconds, alone, None, facts)
            yield row
            if "remat" not in sizes.PIPELINES[plan]:
                yield _bubble(run, mine, plan, devices, row)
        for schedule in dict.fromkeys(sizes.PIPELINES[plan]["schedule"] for plan in case.plans):
            try:
                worker = run.peer(PEER, settings | {"schedule": schedule})
            except WorkerSkippedError as reason:
                yield Skipped("pipelines", f"{title}, {schedule}, {PEER}", str(reason))
                continue
            with worker:
                yield from _beside_pytorch(mine, worker, schedule, title, case)


def _facts(mine: Worker, plan: str) -> dict[str, Any]:
    return {"parameters": mine.facts["parameters"], **mine.facts["programs"][plan]}


def _bubble(run: Run, mine: Worker, plan: str, devices: int, row: Comparison) -> Check:
    """What the schedule's idle time predicts, what was measured, and the work that was done for it.

    The prediction is for devices that share nothing. Where they share cores, one that waits leaves
    them to the others, and what is done besides the work needed is what costs. Work needed is the
    processor time of the network on one device, which computes the same products; FLOPs are not to
    be had from programs whose loops differ between devices.
    """
    facts = _facts(mine, plan)
    used = statistics.median(mine.processor_seconds[plan])
    needed = statistics.median(mine.processor_seconds["sequential"])
    predicted, in_step = (devices * (1 - facts[field]) for field in ("bubble", "bubble_in_step"))
    return Check(
        group="pipelines",
        name=f"{row.name}, bubble",
        found=f"bubble {facts['bubble']:.1%} ({facts['bubble_in_step']:.1%} where devices begin "
        f"each unit of work together): {predicted:.2f} × ({in_step:.2f} ×) as fast as one device, "
        f"were each a processor of its own; {row.speed:.2f} × here, {devices} devices sharing "
        f"{run.cores} cores; work done / work needed {used / needed:.2f} (processor time / that of "
        "one device)",
        wanted="",
        reached=None,
        facts=facts
        | {
            "predicted_speed": predicted,
            "predicted_speed_in_step": in_step,
            "speed": row.speed,
            "processor_seconds": used,
            "processor_seconds_of_one_device": needed,
        },
    )


def _beside_pytorch(
    mine: Worker, other: Worker, schedule: str, title: str, case: sizes.PipelinesCase
) -> Iterator[Row]:
    """The same schedule, stages, microbatches, parameters and batch in both."""
    assert other.facts["parameters"] == mine.facts["parameters"], other.facts
    pairs = zip(mine.facts["losses"], other.facts["losses"], strict=True)
    assert all(abs(a - b) < SAME for a, b in pairs), (mine.facts, other.facts)
    plans = [plan for plan in case.plans if sizes.PIPELINES[plan]["schedule"] == schedule]
    sides = [Side(other, "step"), *(Side(mine, plan) for plan in plans)]
    theirs, *ours = take_turns(sides, case.peer_repeats)
    peer = {
        "pytorch_threads": other.facts["threads"],
        "pytorch_seconds_by_threads": other.facts["seconds_by_threads"],
        "pytorch_resident": other.facts["resident"],
    }
    for plan, seconds in zip(plans, ours, strict=True):
        name, facts = f"{title}, {plan}", _facts(mine, plan) | peer
        yield compare("pipelines", name, PEER, seconds, theirs, PEER_TARGET, facts)
        yield _memory(facts, name)


def _memory(facts: dict[str, Any], name: str) -> Check:
    """What a device needs by the compiler, and what the operating system gives.

    PyTorch's processes have no compiler to ask: their resident size grows by what they allocate and
    by what the allocator keeps. All devices of plurax share a process, so that only the sum of all
    is the same quantity on both sides.
    """
    compiled, resident = facts["compiled_peak_per_device"], facts["resident_of_all_devices"]
    theirs = facts["pytorch_resident"]
    found, reached = f"per device {_mib(compiled)} (compiled peak)", None
    if resident is not None and None not in theirs:
        found += (
            f", PyTorch's largest process {_mib(max(theirs))} (resident); all devices "
            f"{_mib(resident)}, PyTorch's processes {_mib(sum(theirs))} (both resident: growth from"
            " before the parameters to the peak of two steps, having done the same before)"
        )
        reached = compiled < max(theirs) and resident < sum(theirs)
    return Check(
        group="pipelines",
        name=f"{name}, memory beside {PEER}",
        found=found,
        wanted="less than PyTorch, both for one device and for all",
        reached=reached,
        facts=facts,
    )


# ---- hybrids -----------------------------------------------------------------------------------


def _hybrids(run: Run, case: sizes.PipelinesCase) -> Iterator[Row]:
    """Plans over several axes beside the fastest of what was written by hand."""
    settings = _settings(run, case) | dataclasses.asdict(case.hybrid)
    settings |= {"devices": HYBRID_DEVICES, "hybrids": case.hybrids, "by_hand": case.by_hand}
    try:
        worker = run.jax("jax_hybrids", settings)
    except WorkerSkippedError as reason:
        yield Skipped("pipelines", "hybrid plans", str(reason))
        return
    with worker:
        names = [*case.hybrids, *case.by_hand]
        turns = take_turns([Side(worker, name) for name in names], case.hybrid_repeats)
        seconds = dict(zip(names, turns, strict=True))
        medians = {name: statistics.median(taken) for name, taken in seconds.items()}
        best = min(case.by_hand, key=lambda name: medians[name])
        facts = {"parameters": worker.facts["parameters"], "best_by_hand": best}
        title = f"{worker.facts['parameters'] / 1e6:.1f}M parameters, 8 devices"
        for plan in case.hybrids:
            name, against = f"{title}, {plan}", f"the fastest by hand: JAX, {best}"
            yield compare("pipelines", name, against, seconds[plan], seconds[best], None, facts)
        memory = {name: sum(parts.values()) for name, parts in worker.facts["memory"].items()}
        yield Check(
            group="pipelines",
            name=f"{title}, hybrid plans and splits by hand",
            found="; ".join(
                f"{'by hand ' if name in case.by_hand else ''}{name}: {1e3 * medians[name]:.0f} "
                f"ms, {_mib(memory[name])} per device"
                for name in names
            ),
            wanted="",
            reached=None,
            facts=facts | {"seconds": medians, "memory": worker.facts["memory"]},
        )


# ---- compiling ---------------------------------------------------------------------------------


def _compiling(run: Run, case: sizes.PipelinesCase) -> Iterator[Row]:
    """How long the shallowest and deeper networks take to compile, on four devices."""
    name = f"time to compile, {case.devices[0]} devices, 1f1b"
    settings = _settings(run, case) | {
        "work": "compile",
        "network": sizes.to_json(case.compiled),
        "devices": case.devices[0],
        "depths": case.depths,
        "compilations": case.compilations,
    }
    try:
        worker = run.jax("jax_pipelines", settings)
    except WorkerSkippedError as reason:
        yield Skipped("pipelines", name, str(reason))
        return
    with worker:
        seconds = worker.facts["seconds"]
    medians = {depth: statistics.median(taken) for depth, taken in seconds.items()}
    shallow, deep = (str(depth) for depth in (case.depths[0], case.depths[-1]))
    ratio = medians[deep] / medians[shallow]
    times = ", ".join(f"{depth}: {taken:.2f} s" for depth, taken in medians.items())
    yield Check(
        group="pipelines",
        name=name,
        found=f"by layers {times}; {deep} layers {ratio:.2f} × as long as {shallow}",
        wanted=f"at most {FLAT} × as long",
        reached=ratio <= FLAT,
        facts={"seconds": seconds, "ratio": ratio},
    )


def _mib(count: int) -> str:
    return f"{count / sizes.MIB:,.1f} MiB"
