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
        for name in case.ways:
            yield _way(run, case, name)


def _way(run: Run, case: sizes.UnevenCase, name: str) -> Row:
    title = f"{case.data}, {name}"
    settings = dataclasses.asdict(case) | {"way": sizes.UNEVEN[name]}
    settings["learning_rate"] = sizes.LEARNING_RATE
    try:
        worker = run.jax("jax_uneven", settings)
    except WorkerSkippedError as reason:
        return Skipped("uneven", title, str(reason))
    with worker:
        worker.run("train", case.epochs)
        (facts,) = worker.answers["train"]
    # The first one also starts everything and compiles.
    epoch = statistics.median(facts["epochs"][1:])
    count = epochs_to(case.loss, facts["losses"])
    reached = math.isfinite(count)
    found = f"loss {facts['losses'][-1]:.3f} after {case.epochs} epochs"
    if reached:
        found = f"{count * epoch:.1f} s, {count:.2f} epochs"
    return Check(
        group="uneven",
        name=f"{title}, to a held-out loss of {case.loss}",
        found=f"{found}, {epoch:.2f} s each{_staleness(facts['account'])}",
        wanted="",
        reached=None,
        facts=facts | {"seconds": count * epoch if reached else None},
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
