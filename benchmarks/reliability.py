"""What it costs to watch a training run: copies compared bit by bit, and the watchdog."""

import dataclasses
from collections.abc import Iterator

from benchmarks import sizes
from benchmarks.harness import Check, Row, Skipped, WorkerSkippedError
from benchmarks.run import Run

MOST = 0.01
"""Of the time of a step."""


def reliability(run: Run) -> Iterator[Row]:
    """Each network under each plan: a step, a comparison of the copies, a look of the watchdog."""
    for case in run.sizes.reliability:
        for name, plan in case.plans.items():
            yield _row(run, case, name, plan)


def _row(run: Run, case: sizes.ReliabilityCase, plan: str, fields: dict[str, int]) -> Row:
    name = f"{case.name}, {plan}"
    settings = {"network": dataclasses.asdict(case.network), "batch": case.batch,
                "plan": fields, "rounds": case.rounds, "steps": case.steps}  # fmt: skip
    try:
        worker = run.jax("jax_reliability", settings)
    except WorkerSkippedError as reason:
        return Skipped("reliability", name, str(reason))
    with worker:
        facts = worker.facts
    step, compared, every = facts["step"], facts["compare"], facts["every"]
    copies = compared / (every * step)
    watchdog = facts["watchdog"] / step + facts["look"] / facts["between_looks"]
    found = (
        f"a step {1e3 * step:.2f} ms; a comparison {1e3 * compared:.2f} ms, every {every} steps "
        f"{100 * copies:.2f} %; the watchdog {1e6 * facts['watchdog']:.1f} µs a step and "
        f"{1e3 * facts['look']:.2f} ms every {facts['between_looks']:g} s, {100 * watchdog:.2f} %"
    )
    return Check(
        group="reliability",
        name=name,
        found=found,
        wanted=f"each below {100 * MOST:.0f} % of a step",
        reached=max(copies, watchdog) < MOST,
        facts=facts | {"copies_share": copies, "watchdog_share": watchdog},
    )
