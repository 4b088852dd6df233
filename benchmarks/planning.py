"""Plans searched and estimated: how long it takes, and how near it comes to what is measured."""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from scipy.stats import spearmanr

from benchmarks import sizes
from benchmarks.harness import (
    Check,
    Row,
    Side,
    Skipped,
    WorkerSkippedError,
    compare,
    take_turns,
)
from benchmarks.run import Run

SEARCH_SECONDS = 10.0
DAY, YEAR = 86_400, 31_557_600
"""In seconds."""
CORRELATION = 0.9


def planning(run: Run) -> Iterator[Row]:
    """Searches for models of several sizes, and steps predicted beside published ones."""
    for case in run.sizes.searches:
        yield _search(run, case)
    for block in run.sizes.blocks:
        yield from _blocks(run, block)
    for published in run.sizes.published:
        yield _published(run, published)


def ranked(run: Run) -> Iterator[Row]:
    """Plans of a network by their estimates, beside what they take on this machine."""
    for plans in run.sizes.plans:
        yield _predicted(run, plans)


def _facts(
    run: Run, name: str, program: str, settings: dict[str, Any], group: str = "planning"
) -> dict[str, Any] | Skipped:
    """What a worker has found out, or why it is skipped."""
    try:
        worker = run.jax(program, settings)
    except WorkerSkippedError as reason:
        return Skipped(group, name, str(reason))
    with worker:
        return worker.facts


def _search(run: Run, case: sizes.SearchCase) -> Row:
    settings = {"model": case.model, "batch": case.batch, "machine": case.machine,
                "nodes": case.nodes}  # fmt: skip
    name = f"search for {case.name} on {case.nodes} × {case.machine}"
    facts = _facts(run, name, "jax_search", settings)
    if isinstance(facts, Skipped):
        return facts
    return Check(
        group="planning",
        name=name,
        found=f"{facts['seconds']:.1f} s; {facts['plan']}: {facts['step']:.3g} s a step"
        + (f"; {case.beside}" if case.beside else ""),
        wanted=f"below {SEARCH_SECONDS:.0f} s",
        reached=facts["seconds"] < SEARCH_SECONDS,
        facts=facts,
    )


def _blocks(run: Run, case: sizes.BlockCase) -> Iterator[Row]:
    """The search for one block of a transformer, beside another library's."""
    settings = {
        "width": case.width, "heads": case.heads, "tokens": case.tokens, "batch": case.batch,
        "mesh": list(case.mesh), "devices": math.prod(case.mesh), "nodes": case.nodes,
    }  # fmt: skip
    name, peer = f"search for a block on {case.name}", "meta-pytorch/autoparallel"
    with ExitStack() as stack:
        try:
            theirs = stack.enter_context(run.peer(peer, settings))
            ours = stack.enter_context(run.jax("jax_search_block", settings))
        except WorkerSkippedError as reason:
            yield Skipped("planning", f"{name}, {peer}", str(reason))
            return
        sides = [Side(ours, "mesh given"), Side(ours, "search"), Side(theirs, "search")]
        given, every, other = take_turns(sides, case.repeats, warm_up=0)
    facts = ours.facts | {"other": theirs.facts}
    yield compare("planning", f"{name}, mesh given", peer, given, other, None, facts)
    yield compare("planning", f"{name}, every mesh", peer, every, other, None, facts)


def _published(run: Run, case: sizes.PublishedCase) -> Row:
    """A published training run, and how long it takes as estimated."""
    settings = {
        "model": case.model, "batch": case.batch, "machine": case.machine, "nodes": case.nodes,
        "examples": case.examples, "plan": case.plan,
    }  # fmt: skip
    name = f"{case.name}, on {case.nodes} × {case.machine}"
    facts = _facts(run, name, "jax_published", settings)
    if isinstance(facts, Skipped):
        return facts
    ratio = facts["seconds"] / case.seconds
    devices = "" if facts["devices"] == _devices(case) else f" on {facts['devices']} devices"
    need = f"{facts['bytes'] / 1e9:,.0f} GB of {facts['memory'] / 1e9:,.0f} GB"
    fit = need if facts["fits"] else f"no plan fits, this one needs {need}"
    wanted, reached = "", None
    if case.within is not None:
        wanted = f"within {case.within:.0%} of what is published"
        reached = facts["fits"] and abs(ratio - 1) <= case.within
    return Check(
        group="planning",
        name=name,
        found=f"{_time(facts['seconds'])}, published {_time(case.seconds)}: {ratio:.2f} ×; "
        f"{facts['plan']}{devices}; {fit}",
        wanted=wanted,
        reached=reached,
        facts=facts | {"published": case.seconds, "ratio": ratio},
    )


def _devices(case: sizes.PublishedCase) -> int:
    return case.nodes * int(case.machine.split("x")[0])


def _time(seconds: float) -> str:
    """Three digits in seconds, days or years.

    >>> _time(60.1), _time(34 * DAY), _time(36 * YEAR)
    ('60.1 s', '34 days', '36 years')
    """
    for unit, size in (("years", YEAR), ("days", DAY)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


def _predicted(run: Run, case: sizes.PlansCase) -> Row:
    settings = {
        "network": sizes.to_json(case.network), "batch": case.batch, "members": case.members,
        "plans": list(case.plans), "repeats": case.repeats,
    }  # fmt: skip
    name = f"{len(case.plans)} plans of {case.name} on one device"
    facts = _facts(run, name, "jax_plans", settings, "ranked")
    if isinstance(facts, Skipped):
        return facts
    predicted, measured = facts["predicted"], facts["measured"]
    seconds = {plan: statistics.median(one["turns"]) for plan, one in measured.items()}
    every, turns = ranking(predicted, measured)
    single, _ = ranking(predicted, measured, "alone")
    best = min(predicted, key=lambda plan: predicted[plan]["seconds"])
    errors = sorted(predicted[p]["bytes"] / measured[p]["bytes"] - 1 for p in measured)
    ratios = sorted(predicted[p]["seconds"] / seconds[p] for p in seconds)
    low, _, high = statistics.quantiles(turns, n=4) if len(turns) > 1 else turns * 3
    facts |= {"ranking": every, "ranking_in_a_turn": turns, "alone": single, "chosen": best}
    return Check(
        group="ranked",
        name=name,
        found=f"rank correlation {every:.2f}, of single turns {low:.2f} to {high:.2f}, of steps "
        f"called one by one {single:.2f}; the plan "
        f"expected to be fastest takes {seconds[best] / min(seconds.values()):.2f} × the fastest; "
        f"estimates are {ratios[0]:.2f} to {ratios[-1]:.2f} × what is measured, bytes "
        f"{errors[0]:+.0%} to {errors[-1]:+.0%}",
        wanted=f"a correlation of at least {CORRELATION}",
        reached=every >= CORRELATION,
        facts=facts,
    )


def ranking(
    predicted: Mapping[str, Any], measured: Mapping[str, Any], kind: str = "turns"
) -> tuple[float, list[float]]:
    """Spearman's rank correlation of predicted seconds and medians of the measured ones, and those
    of the single turns. `kind`: of steps in a loop, `turns`, or `alone`."""
    names = list(predicted)
    expected = [predicted[name]["seconds"] for name in names]

    def correlation(seconds: Sequence[float]) -> float:
        return float(spearmanr(expected, seconds).statistic)

    turns = [measured[name][kind] for name in names]
    middle = correlation([statistics.median(own) for own in turns])
    return middle, [correlation(turn) for turn in zip(*turns, strict=True)]
