"""Parameter servers: updates and bytes per second, beside TensorFlow's and Ray's store used raw.

Two workers and two servers are processes on one machine, and what they send each other goes through
loopback or shared memory. The batch is small: what counts is how fast a gradient is pushed and the
parameters are pulled, 2 × 4 bytes for each parameter in an update.

Sides have the same names in all workers: `update`, asynchronous training; `exchange`, as many bytes
with nothing computed between; others only for their latencies. Latencies are lists of seconds in
the answers of a side.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

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

TENSORFLOW = "TensorFlow ParameterServerStrategy"
RAY = "Ray's object store used raw"
BYTES = 2 * 4
"""Pushed and pulled for each float32 parameter in an update."""
RATES = ("update", "exchange")
"""Sides of which units and bytes per second are shown."""
TARGETS = {TENSORFLOW: ("update", 3.0), RAY: ("exchange", 0.8)}
"""Of each peer the side that is compared, and the speed wanted."""
PERCENTILES = (50, 95, 99)
TRIALS = 2
"""Turns of each of TensorFlow's ways, before the fastest is measured."""


def servers(run: Run) -> Iterator[Row]:
    """A small and a larger network, trained and exchanged in every way that there is."""
    for case in run.sizes.servers:
        yield from _case(run, case)


def _case(run: Run, case: sizes.ServersCase) -> Iterator[Row]:
    with ExitStack() as stack:
        workers: dict[str, Worker] = {}
        for name, start in WORKERS.items():
            try:
                workers[name] = stack.enter_context(start(run, case))
            except WorkerSkippedError as reason:
                yield Skipped("servers", f"{case.name}, {name}", str(reason))
        seconds = _seconds(case, workers)
        for name, worker in workers.items():
            yield _figures(case, name, worker, seconds[name])
        if "plurax" in workers:
            yield from _comparisons(case, seconds)


def _comparisons(
    case: sizes.ServersCase, seconds: dict[str, dict[str, list[float]]]
) -> Iterator[Row]:
    """The seconds of an update or an exchange of plurax beside those of the peers."""
    for against, (side, target) in TARGETS.items():
        if against in seconds:
            yield compare(
                "servers",
                f"{case.name}, batch {case.batch}, {side}",
                against,
                seconds["plurax"][side],
                seconds[against][side],
                target,
                {},
            )


def _seconds(
    case: sizes.ServersCase, workers: dict[str, Worker]
) -> dict[str, dict[str, list[float]]]:
    """For each worker and side the seconds of a unit; the same side of all workers in turn."""
    seconds: dict[str, dict[str, list[float]]] = {name: {} for name in workers}
    sides = dict.fromkeys(side for worker in workers.values() for side in worker.facts["sides"])
    for side in sides:
        names = [name for name, worker in workers.items() if side in worker.facts["sides"]]
        units = case.exchanges if side == "exchange" else case.updates
        turns = take_turns([Side(workers[name], side, units) for name in names], case.repeats)
        for name, taken in zip(names, turns, strict=True):
            seconds[name][side] = taken
    return seconds


def _figures(
    case: sizes.ServersCase, name: str, worker: Worker, seconds: dict[str, list[float]]
) -> Check:
    """Units and bytes per second of each side, and the percentiles of what it answered."""
    found, facts = [], {}
    for side, taken in seconds.items():
        rate = 1 / statistics.median(taken)
        size = BYTES * worker.facts["parameters"]
        latencies = _latencies(worker.answers[side][-case.repeats :])
        if side in RATES:
            found.append(f"{rate:,.3g} {side}s/s, {rate * size / 1e6:,.0f} MB/s")
        found += [
            f"{what} p50 {1e3 * p50:.3g}, p95 {1e3 * p95:.3g}, p99 {1e3 * p99:.3g} ms"
            for what, (p50, p95, p99) in latencies.items()
        ]
        facts[side] = {"seconds": taken, "bytes_per_second": rate * size, "latencies": latencies}
    return Check(
        group="servers",
        name=f"{case.name}, batch {case.batch}, {name}",
        found="; ".join(found),
        wanted="",
        reached=None,
        facts=worker.facts | facts,
    )


def _latencies(answers: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
    """The percentiles of all lists of seconds in the answers, those of all turns together."""
    names = [name for name, value in answers[0].items() if isinstance(value, list)]
    return {
        name: np.percentile(
            [seconds for answer in answers for seconds in answer[name]], PERCENTILES
        ).tolist()
        for name in names
    }


# ---- the workers -------------------------------------------------------------------------------


def _settings(run: Run, case: sizes.ServersCase) -> dict[str, Any]:
    return {
        "widths": case.network.widths,
        "batch": case.batch,
        "packed": case.packed,
        "servers": case.servers,
        "workers": case.workers,
        "platform": run.platform,
        "cores": run.cores,
        "learning_rate": sizes.LEARNING_RATE,
    }


def _tensorflow(run: Run, case: sizes.ServersCase) -> Worker:
    """TensorFlow, with its matrices on the servers in the way that trains fastest here."""
    settings = _settings(run, case)
    seconds = {}
    for way in case.ways:
        with run.peer(TENSORFLOW, settings | {"way": way}) as trial:
            (taken,) = take_turns([Side(trial, "update", case.updates)], TRIALS)
        seconds[way] = statistics.median(taken)
    best = min(seconds, key=lambda way: seconds[way])
    worker = run.peer(TENSORFLOW, settings | {"way": best})
    worker.facts["seconds by way"] = seconds
    return worker


def _ray(run: Run, case: sizes.ServersCase) -> Worker:
    """Ray, with an array of as many elements as the network has parameters."""
    return run.jax("ray_store", _settings(run, case))


def _plurax(run: Run, case: sizes.ServersCase) -> Worker:
    return run.jax("jax_servers", _settings(run, case))


WORKERS: dict[str, Callable[[Run, sizes.ServersCase], Worker]] = {
    "plurax": _plurax,
    TENSORFLOW: _tensorflow,
    RAY: _ray,
}
