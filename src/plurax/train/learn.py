"""Correct a machine by what steps took on it: the pairs that runs with a machine have logged.

Rates are measured one by one, and a step is more than their sum: caches, contention, the host. What
is left over is one number, the median of measured by predicted seconds. Example, of two runs:

    runs/a    predicted 10 ms    measured 12, 11 and 11.5 ms    1.15
    runs/b    predicted 40 ms    measured 42 and 44 ms          1.075
    correction                                                  1.11

Seconds that were predicted with an earlier correction are compared as if there had been none.
"""

import dataclasses
import statistics
from collections.abc import Sequence
from pathlib import Path

from plurax import errors
from plurax.loop.log_rows import read_rows
from plurax.machine import Machine


def learned(machine: Machine, runs: Sequence[Path]) -> Machine:
    """Return a machine with the correction that runs on it ask for.

    Raises `MachineError` for a run that has no prediction, or was predicted on another machine.
    """
    ratios = [statistics.median(_ratios(run, machine.name)) for run in runs]
    correction = float(f"{statistics.median(ratios):.3g}")  # a measurement has no more digits
    groups = [
        (count, dataclasses.replace(kind, correction=correction)) for count, kind in machine.groups
    ]
    return dataclasses.replace(machine, correction=correction, groups=groups)


def machine_of_run(run: Path) -> Machine:
    """Return the machine on which a run was predicted. Raises `MachineError` if there is none."""
    _log(run)
    if not (run / "machine.toml").is_file():
        raise errors.run_without_predictions(str(run))
    return Machine.load(run / "machine.toml")


def _log(run: Path) -> Path:
    log = run / "metrics.jsonl"
    if not log.is_file():
        raise errors.MachineError(
            f"--runs {run}: there is no metrics.jsonl in it. Give the output directory of a run: "
            "plurax machine --runs runs/digits."
        )
    return log


def _ratios(run: Path, name: str) -> list[float]:
    """Return measured by predicted seconds of every epoch of a run."""
    found = [row["estimate"] for row in read_rows(_log(run)) if "estimate" in row]
    timed = [one for one in found if "seconds" in one["measured"]]
    if not timed:
        raise errors.run_without_predictions(str(run))
    for one in timed:
        if one["machine"] != name:
            raise errors.MachineError(
                f"--runs {run}: its steps were predicted on {one['machine']!r}, and the machine to "
                f"correct is {name!r}. What steps take on one machine says nothing about another: "
                "give the runs of one machine."
            )
    return [
        one["correction"] * one["measured"]["seconds"] / one["predicted"]["seconds"]
        for one in timed
    ]
