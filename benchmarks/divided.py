"""One network split over devices: plans of plurax, the same by hand, and other frameworks."""

import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

from benchmarks import sizes
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

TARGET = 1 / 1.02
"""As a speed: a step may take 1.02 times as long as the one by hand."""
PEER_TARGET = 1.0
MORE = 1.01
"""By how much bytes may differ: plurax also sums metrics and the norm that guards the update."""
PEERS: dict[str, dict[str, dict[str, Any]]] = {
    "data=8, zero=3": {"PyTorch FSDP2": {"way": "fsdp"}},
    "tensor=8": {
        "PyTorch tensor parallel": {"way": "tensor"},
        "Keras ModelParallel": {"mesh": [1, 8]},
    },
    "data=2, tensor=4": {"Keras ModelParallel": {"mesh": [2, 4]}},
}
"""For each split, the frameworks that have the same."""


def divided(run: Run) -> Iterator[Row]:
    """A transformer under each plan: time, bytes sent and memory."""
    for case in run.sizes.divided:
        for split in case.splits:
            yield from _split(run, case, split)


def _split(run: Run, case: sizes.DividedCase, split: str) -> Iterator[Row]:
    """One plan beside the same by hand and in other frameworks, all in turn."""
    name = f"{case.name}, {split}"
    how = sizes.SPLITS[split]
    devices = how.get("data", 1) * how.get("tensor", 1)
    settings = divided_settings(run, case.network, devices)
    with ExitStack() as stack:
        try:
            mine = stack.enter_context(run.jax("jax_divided", settings | {"split": how}))
        except WorkerSkippedError as reason:
            yield Skipped("divided", name, str(reason))
            return
        ours = Side(mine, "plurax")
        hands = {f"JAX {hand}": Side(mine, hand) for hand in mine.facts["by hand"]}
        yield from _race(name, ours, hands, case.repeats, TARGET)
        for hand, costs in mine.facts["by hand"].items():
            yield _costs(f"{name}, JAX {hand}", mine.facts["plurax"], costs)
        peers: dict[str, Side] = {}
        for peer, given in PEERS.get(split, {}).items():
            try:
                worker = stack.enter_context(run.peer(peer, settings | given))
            except WorkerSkippedError as reason:
                yield Skipped("divided", f"{name}, {peer}", str(reason))
                continue
            check_same(mine, worker)
            peers[peer] = Side(worker, "step")
        if peers:
            yield from _race(name, ours, peers, case.peer_repeats, PEER_TARGET)


def _race(
    name: str, ours: Side, others: dict[str, Side], repeats: int, target: float
) -> Iterator[Row]:
    """A step of plurax and of others, all in turn."""
    mine, *theirs = take_turns([ours, *others.values()], repeats)
    known = ("parameters", "plurax_compile_seconds")
    facts = {name: ours.worker.facts[name] for name in known}
    for against, seconds in zip(others, theirs, strict=True):
        yield compare("divided", name, against, mine, seconds, target, facts)


def check_same(mine: Worker, other: Worker) -> None:
    """The same network: as many parameters, and the same loss before training."""
    assert other.facts["parameters"] == mine.facts["parameters"], other.facts
    assert abs(other.facts["first_loss"] - mine.facts["first_loss"]) < 1e-2, other.facts


def divided_settings(run: Run, network: sizes.Bytewise, devices: int) -> dict[str, Any]:
    """Settings of a worker that trains the transformer of the example."""
    return {
        **dataclasses.asdict(network),
        "devices": devices,
        "platform": run.platform,
        "cores": run.cores,
        "learning_rate": sizes.LEARNING_RATE,
        "weight_decay": sizes.WEIGHT_DECAY,
    }


def _costs(name: str, mine: dict[str, Any], other: dict[str, Any]) -> Check:
    """What a device sends and holds in a step, beside what it does by hand."""
    parts = {
        "results of collectives": "collective_bytes",
        "state and batch": "arguments",
        "temporaries": "temporaries",
    }
    found = [
        f"{part} {_mib(mine[field])}, by hand {_mib(other[field])}" for part, field in parts.items()
    ]
    memory, memory_by_hand = (side["arguments"] + side["temporaries"] for side in (mine, other))
    return Check(
        group="divided",
        name=name,
        found="; ".join(found),
        wanted="as many bytes from collectives, no more memory (1 % off at most)",
        reached=mine["collective_bytes"] <= MORE * other["collective_bytes"]
        and memory <= MORE * memory_by_hand,
        facts={"plurax": mine, "by hand": other},
    )


def _mib(count: int) -> str:
    return f"{count / sizes.MIB:,.1f} MiB"
