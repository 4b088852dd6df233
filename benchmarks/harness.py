"""The rule against noise: sides take turns, and the ratio is that of their medians.

A side is a piece of work in a worker process that says how long it took. Sides that are compared
run in the same session, one after the other and never at the same time (A B A B ...), after a
warm-up of each.
"""

import dataclasses
import json
import statistics
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

ROOT = Path(__file__).resolve().parent.parent


class WorkerSkippedError(Exception):
    """A worker cannot run on this machine; the message says why."""


class WorkerFailedError(Exception):
    """A worker stopped; the message holds the end of what it printed."""


class Worker:
    """A process that holds sides. Use in a `with` statement.

    **Arguments:**

    - `python`: the interpreter, plurax's own or the peers'.
    - `module`: under `benchmarks.workers`; it calls `serve`.
    - `settings`: for its `build`, as JSON.

    Raises `WorkerSkippedError` where the machine cannot run it; every request raises
    `WorkerFailedError` where the process has died.

    **Attributes:** `facts`; `processor_seconds`, for each side what the process and all its threads
    used in each turn so far, per unit, processes it has started not counted; `answers`, for each
    side all that it answered in each turn so far.
    """

    def __init__(self, python: str, module: str, settings: dict[str, Any]) -> None:
        self.module = module
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115, closed in __exit__
        self._process = subprocess.Popen(
            [python, "-m", f"benchmarks.workers.{module}", json.dumps(settings)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        try:
            hello = self._read()
            if "skipped" in hello:
                raise WorkerSkippedError(hello["skipped"])
        except Exception:
            self.__exit__(None, None, None)
            raise
        self.facts: dict[str, Any] = hello["facts"]
        self.processor_seconds: dict[str, list[float]] = {}
        self.answers: dict[str, list[dict[str, Any]]] = {}

    def run(self, side: str, units: int = 1) -> float:
        """Seconds that a side takes for this many units."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"side": side, "units": units}) + "\n")
        self._process.stdin.flush()
        answer = self._read()
        self.processor_seconds.setdefault(side, []).append(answer["processor_seconds"] / units)
        self.answers.setdefault(side, []).append(answer)
        return answer["seconds"]

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._log.seek(0)
            raise WorkerFailedError(
                f"The worker {self.module} stopped:\n{self._log.read()[-3000:]}"
            )
        return json.loads(line)

    def __enter__(self) -> Self:
        return self

    def close(self) -> None:
        """Let the process end, and wait for it."""
        self.__exit__(None, None, None)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        self._log.close()


@dataclasses.dataclass(frozen=True)
class Side:
    """A side of a worker; `run` gives seconds per unit."""

    worker: Worker
    name: str
    units: int = 1

    def run(self) -> float:
        return self.worker.run(self.name, self.units) / self.units


def take_turns(sides: Sequence[Side], repeats: int, *, warm_up: int = 1) -> list[list[float]]:
    """Seconds per unit of each side in each of `repeats` rounds, in which all take their turn.

    Every other round runs backwards, so that no side always follows the same one.
    """
    seconds: list[list[float]] = [[] for _ in sides]
    order = list(range(len(sides)))
    for round_ in range(warm_up + repeats):
        for i in order if round_ % 2 == 0 else reversed(order):
            taken = sides[i].run()
            if round_ >= warm_up:
                seconds[i].append(taken)
    return seconds


@dataclasses.dataclass(frozen=True)
class Seconds:
    """How long one side took: the median over repeats, and the quartiles around it."""

    median: float
    low: float
    high: float
    repeats: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        low, high = _quartiles(values)
        return cls(statistics.median(values), low, high, len(values))


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One row: plurax against another way to do the same work.

    **Fields:** `speed` is the other's median over plurax's, so 2 means twice as fast; `spread` are
    the quartiles of the same ratio taken round by round; `target` is the least `speed` wanted,
    None where none was set.
    """

    group: str
    name: str
    against: str
    plurax: Seconds
    other: Seconds
    speed: float
    spread: tuple[float, float]
    target: float | None
    reached: bool | None
    facts: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Check:
    """One row without a race: what was found, what was wanted, and whether they agree.

    Where nothing particular was wanted, `wanted` is empty and `reached` None.
    """

    group: str
    name: str
    found: str
    wanted: str
    reached: bool | None
    facts: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Skipped:
    """One row that this machine did not measure, and why."""

    group: str
    name: str
    reason: str


Row = Comparison | Check | Skipped


def compare(
    group: str,
    name: str,
    against: str,
    plurax: Sequence[float],
    other: Sequence[float],
    target: float | None,
    facts: dict[str, Any],
) -> Comparison:
    """The row of two sides that took turns."""
    mine, theirs = Seconds.of(plurax), Seconds.of(other)
    speed = theirs.median / mine.median
    return Comparison(
        group=group,
        name=name,
        against=against,
        plurax=mine,
        other=theirs,
        speed=speed,
        spread=_quartiles([b / a for a, b in zip(plurax, other, strict=True)]),
        target=target,
        reached=None if target is None else speed >= target,
        facts=facts,
    )


def _quartiles(values: Sequence[float]) -> tuple[float, float]:
    if len(values) == 1:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high
