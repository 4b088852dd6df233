"""Processes of a run with parameter servers are killed or stopped: seconds until it goes on.

All is read from the run's record, `servers.jsonl`, into which each signal is written too. Example,
`bounded`, worker 1 is killed:

    {"event": "struck", "processes": ["worker 1"], "at": 8.0}
    {"event": "worker lost", "worker": 1, "life": 0, "at": 8.1}
    {"event": "pull", "worker": 0, "life": 0, "sequence": 70, "at": 8.2}
    {"event": "push", "worker": 0, "life": 0, "sequence": 70, "at": 8.3}    the next update
    {"event": "pull", "worker": 1, "life": 1, "sequence": 71, "at": 11.0}
    {"event": "push", "worker": 1, "life": 1, "sequence": 71, "at": 12.0}   at work again

gives 0.3 s to the next update, 4 s to the work, and between two updates 3.7 s at most.
"""

import dataclasses
import itertools
import statistics
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from benchmarks import sizes
from benchmarks.harness import Check, Row, Skipped, WorkerSkippedError
from benchmarks.run import Run

Event = dict[str, Any]


class Recovery(NamedTuple):
    """Seconds from a signal.

    **Fields:** `update`, to the next update of the parameters by a gradient that was pulled after
    it (in `sync` of a batch that was not done before); `work`, to the first work of all restarted
    processes: a worker's next gradient, for a server the next gradient of its parameters; `gap`,
    the longest time between two updates until then.
    """

    update: float
    work: float
    gap: float


def recovery(run: Run) -> Iterator[Row]:
    """Each kind of death in each mode."""
    for case in run.sizes.recovery:
        try:
            worker = run.jax("jax_recovery", dataclasses.asdict(case))
        except WorkerSkippedError as reason:
            yield Skipped("recovery", case.name, str(reason))
            continue
        with worker:
            for mode in case.modes:
                worker.run(mode)
                for name, samples in worker.answers[mode][-1]["samples"].items():
                    yield _row(case, mode, name, [Recovery(*one) for one in samples])


def _row(case: sizes.RecoveryCase, mode: str, name: str, samples: Sequence[Recovery]) -> Check:
    medians = Recovery(*(statistics.median(column) for column in zip(*samples, strict=True)))
    given_up = f", given up after {case.lease:g} s" if name in sizes.STOPPED else ""
    return Check(
        group="recovery",
        name=f"{case.name}, {mode}: {name}{given_up}",
        found=f"next update after {medians.update:.2f} s, at work again after {medians.work:.2f} s,"
        f" longest time between updates {medians.gap:.2f} s",
        wanted="",
        reached=None,
        facts={"lease": case.lease, "medians": medians._asdict()}
        | {"samples": [one._asdict() for one in samples]},
    )


def recovered(events: Sequence[Event]) -> Recovery | None:
    """Return the seconds, or None where the processes are not all back.

    **Arguments:** `events`, of the record, the first the `struck` one, with `processes`, the names
    of those that got a signal, and in `sync` `committed`, the last batch before it.
    """
    struck, *others = events
    begin, before = struck["at"], struck["committed"]
    lost, back, updates = set[str](), dict[str, float](), [begin]
    pulled: dict[tuple[int, int, int], frozenset[str]] = {}  # by gradient who had ended before
    for event in others:
        kind = event["event"]
        if kind in ("worker lost", "server lost"):
            who = kind.partition(" ")[0]
            lost.add(f"{who} {event[who]}")
        elif kind == "pull":
            pulled[_gradient(event)] = frozenset(lost)
        elif kind == "push" and _gradient(event) in pulled:
            servers = (one for one in pulled[_gradient(event)] if one.startswith("server"))
            for name in (f"worker {event['worker']}", *servers):
                if name in lost:
                    back.setdefault(name, event["at"])
            if before is None:
                updates.append(event["at"])
        elif kind == "commit" and before is not None and event["step"] > before:
            updates.append(event["at"])
    if not {*struck["processes"]} <= {*back}:
        return None
    work = max(back[name] for name in struck["processes"])
    until = next((at for at in updates[1:] if at >= work), None)
    if until is None:
        return None
    pairs = itertools.pairwise(at for at in updates if at <= until)
    return Recovery(updates[1] - begin, work - begin, max(b - a for a, b in pairs))


def _gradient(event: Event) -> tuple[int, int, int]:
    return event["worker"], event["life"], event["sequence"]
