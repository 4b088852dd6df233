"""Plans searched and estimated: how long it takes, and how near it comes to what is measured."""

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks import sizes
from benchmarks.harness import Check, Row, Skipped, WorkerSkippedError
from benchmarks.run import Run

SEARCH_SECONDS = 10.0
CORRELATION = 0.95
APART = 1.2
"""Plans are compared whose predicted seconds differ by at least 20 %."""


def planning(run: Run) -> Iterator[Row]:
    """Searches for models of several sizes; plans predicted and measured on virtual devices."""
    for case in run.sizes.searches:
        yield _search(run, case)
    for plans in run.sizes.plans:
        yield _predicted(run, plans)


def _search(run: Run, case: sizes.SearchCase) -> Row:
    settings = {"model": case.model, "batch": case.batch, "machine": case.machine,
                "nodes": case.nodes}  # fmt: skip
    name = f"search for {case.name} on {case.nodes} × {case.machine}"
    try:
        worker = run.jax("jax_search", settings)
    except WorkerSkippedError as reason:
        return Skipped("planning", name, str(reason))
    with worker:
        facts = worker.facts
    return Check(
        group="planning",
        name=name,
        found=f"{facts['seconds']:.1f} s; {facts['plan']}: {facts['step']:.3g} s a step",
        wanted=f"below {SEARCH_SECONDS:.0f} s",
        reached=facts["seconds"] < SEARCH_SECONDS,
        facts=facts,
    )


def _predicted(run: Run, case: sizes.PlansCase) -> Row:
    settings = {
        "network": sizes.to_json(case.network), "batch": case.batch, "devices": 8,
        "plans": list(case.plans), "rules": case.rules, "repeats": case.repeats,
    }  # fmt: skip
    name = f"{len(case.plans)} plans of {case.name} on 8 virtual devices"
    try:
        worker = run.jax("jax_plans", settings)
    except WorkerSkippedError as reason:
        return Skipped("planning", name, str(reason))
    with worker:
        facts = worker.facts
    predicted, measured = facts["predicted"], facts["measured"]
    agree = agreement(_seconds(predicted), _seconds(measured))
    best = min(predicted, key=lambda plan: predicted[plan]["seconds"])
    least = min(one["seconds"] for one in measured.values())
    errors = sorted(predicted[p]["bytes"] / measured[p]["bytes"] - 1 for p in measured)
    facts = facts | {"agreement": agree, "chosen": best}
    return Check(
        group="planning",
        name=name,
        found=f"rank correlation {agree:.2f}; the plan chosen takes "
        f"{measured[best]['seconds'] / least:.2f} × the fastest; memory {errors[0]:+.0%} to "
        f"{errors[-1]:+.0%}",
        wanted=f"a correlation of at least {CORRELATION}, at most 1.05 ×",
        reached=agree >= CORRELATION and measured[best]["seconds"] <= 1.05 * least,
        facts=facts,
    )


def _seconds(plans: Mapping[str, Any]) -> dict[str, float]:
    return {name: one["seconds"] for name, one in plans.items()}


def agreement(predicted: Mapping[str, float], measured: Mapping[str, float]) -> float:
    """Kendall's rank correlation over the pairs whose predicted seconds differ enough.

    1 if all pairs are in the same order, -1 if none is.
    """
    score = count = 0
    for a, b in itertools.combinations(predicted, 2):
        low, high = sorted((a, b), key=lambda plan: predicted[plan])
        if predicted[high] >= APART * predicted[low]:
            count += 1
            score += 1 if measured[high] > measured[low] else -1
    return score / count if count else 1.0
