"""Four workers, one of them four times as slow: seconds to a fixed loss, in every mode."""

import dataclasses
import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks import sizes
from benchmarks.harness import Check, Row, Skipped, WorkerSkippedError
from benchmarks.run import Run


def uneven(run: Run) -> Iterator[Row]:
    """The examples under all-reduce and under each mode of the servers."""
    for case in run.sizes.uneven:
        try:
            goal = _goal(run, case)
        except WorkerSkippedError as reason:
            yield Skipped("uneven", case.data, str(reason))
            continue
        for name in case.ways:
            yield _way(run, case, name, goal)


def _goal(run: Run, case: sizes.UnevenCase) -> float:
    """What one device reaches in `case.goal` epochs of batches of all workers together."""
    batch = case.workers * case.batch
    alone = dataclasses.replace(case, workers=1, batch=batch, seconds=0.0)
    found = _trained(run, alone, None, case.goal)
    return math.ceil(100 * found["losses"][-1]) / 100


def _trained(
    run: Run, case: sizes.UnevenCase, way: dict[str, Any] | None, epochs: int
) -> dict[str, Any]:
    settings = dataclasses.asdict(case) | {"way": way, "learning_rate": sizes.LEARNING_RATE}
    with run.jax("jax_uneven", settings) as worker:
        worker.run("train", epochs)
        return worker.answers["train"][0]


def _way(run: Run, case: sizes.UnevenCase, name: str, goal: float) -> Row:
    title = f"{case.data}, {name}"
    epochs = case.epochs * (2 if name == "async" else 1)
    facts = _trained(run, case, sizes.UNEVEN[name], epochs)
    # The first one also starts everything and compiles.
    epoch = statistics.median(facts["epochs"][1:])
    count = epochs_to(goal, facts["losses"])
    reached = math.isfinite(count)
    found = f"loss {facts['losses'][-1]:.3f} after {epochs} epochs"
    if reached:
        found = f"{count * epoch:.1f} s, {count:.2f} epochs"
    return Check(
        group="uneven",
        name=f"{title}, to a held-out loss of {goal:g}",
        found=f"{found}, {epoch:.2f} s each{_staleness(facts['account'])}",
        wanted="",
        reached=None,
        facts={"data": case.data, "way": name, "goal": goal, "epoch": epoch}
        | facts
        | {"seconds": count * epoch if reached else None},
    )


def epochs_to(loss: float, losses: Sequence[float]) -> float:
    """After how many epochs a loss is reached, if it falls exponentially within each; or inf.

    In the first epoch it counts as reached at the end.

    >>> epochs_to(0.2, [0.8, 0.4, 0.1])
    2.5
    """
    for index, after in enumerate(losses):
        if after <= loss:
            if index == 0:
                return 1.0
            before = losses[index - 1]
            return index + math.log(before / loss) / math.log(before / after)
    return math.inf


def _staleness(account: dict[str, Any] | None) -> str:
    if account is None:
        return ""
    counts = {int(versions): count for versions, count in account["staleness"].items()}
    mean = sum(versions * count for versions, count in counts.items()) / sum(counts.values())
    dropped = account["dropped_examples"]
    return f"; staleness {mean:.2f}" + (f", {dropped:,} examples dropped" if dropped else "")
