"""Rows per second of each data source under `fit`, beside a loop over the same data by hand."""

import dataclasses
import statistics
from collections.abc import Iterator

from benchmarks import sizes
from benchmarks.harness import Check, Row, Side, Skipped, WorkerSkippedError, compare, take_turns
from benchmarks.run import Run

TARGET = 0.95


def sources(run: Run) -> Iterator[Row]:
    """Epochs over each source: `fit`, and its own loop with a jitted step."""
    for case in run.sizes.sources:
        for source in case.sources:
            yield from _source(run, case, source)


def _source(run: Run, case: sizes.SourcesCase, source: str) -> Iterator[Row]:
    """The sides of one source, in turns, and what each took."""
    settings = {"source": source, "network": dataclasses.asdict(case.network),
                "rows": case.rows, "batch": case.batch, "epochs": case.epochs}  # fmt: skip
    try:
        worker = run.jax("jax_sources", settings)
    except WorkerSkippedError as reason:
        yield Skipped("sources", f"{source}, {case.name}", str(reason))
        return
    with worker:
        names = list(worker.facts["sides"])
        seconds = take_turns([Side(worker, name) for name in names], case.repeats)
        facts = {"rows": case.rows * case.epochs, "batch": case.batch}
        # On a machine with other work the one side with more threads gets more of it.
        used = {
            name: 1e6 / facts["rows"] * statistics.median(worker.processor_seconds[name][1:])
            for name in names
        }
    by_hand = seconds[names.index("by hand")]
    for name, mine in zip(names, seconds, strict=True):
        if name != "by hand":
            label = f"{source}{name.removeprefix('fit')}, {case.name}"
            against = worker.facts["by_hand"]
            yield compare("sources", label, against, mine, by_hand, TARGET, facts)
    rates = {
        name: facts["rows"] / statistics.median(each)
        for name, each in zip(names, seconds, strict=True)
    }
    found = "; ".join(
        f"{name} {rate / 1e3:,.0f} and {used[name]:.2f} s" for name, rate in rates.items()
    )
    label = f"{source}, {case.name}: thousand rows a second, processor seconds for a million"
    facts = {"rows_per_second": rates, "processor_seconds_of_a_million": used}
    yield Check("sources", label, found, "", None, facts)
