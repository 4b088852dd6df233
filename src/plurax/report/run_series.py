"""The series of a run: the numbers of its rows, which a picture, the page and the terminal draw.

rows of metrics.jsonl                            what they become
{"kind": "step", "step": 1, "loss": 2.3}         steps("loss")
{"kind": "epoch", "step": 8, "loss": 1.9, ...    line("loss", epochs): means of epochs
 "eval_loss": 2.0,                               line("eval_loss", evaluations)
 "members": {"loss": [1.7, 2.1]}}                bands("loss", epochs, (0, 0.5, 1))
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

import numpy as np
from jaxtyping import Float

from plurax.loop.log_rows import Row

NOT_METRICS = frozenset(("kind", "step", "epoch", "weight", "examples", "skipped", "seconds"))
"""Numbers of a row that are no curve."""
ENDS = ("_best", "_worst")
"""How the names of metrics end that are those of the best and of the worst member."""
WIDE = 30
"""Values over a larger factor than this are drawn by their logarithm."""


class Series(NamedTuple):
    """The values of a metric at some steps, both `(N,)`."""

    steps: Float[np.ndarray, "N"]
    values: Float[np.ndarray, "N"]


class Bands(NamedTuple):
    """The members of a population at some steps.

    **Fields:** `quantiles`, a row for each share that was asked for; `best`, the index of the
    member with the lowest last loss, of the evaluation where there was one, and its `values`.
    """

    steps: Float[np.ndarray, "N"]
    quantiles: Float[np.ndarray, "Q N"]
    best: int
    values: Float[np.ndarray, "N"]


class RunSeries:
    """What the rows of a run say; more are added as they are written.

    **Fields:** `epochs`, `evaluations` (those of epochs too) and `events`, rows; `skipped`, steps
    without an update; `step`, the last one that was logged, 0 before the first.
    """

    def __init__(self, rows: Iterable[Row] = ()) -> None:
        self.epochs: list[Row] = []
        self.evaluations: list[Row] = []
        self.events: list[Row] = []
        self.skipped: list[int] = []
        self.step, self._examples = 0, 0
        self._columns: dict[str, tuple[list[int], list[float]]] = {}
        self.add(rows)

    def add(self, rows: Iterable[Row]) -> None:
        """Add rows in the order in which they were written."""
        for row in rows:
            if row["kind"] == "event":
                self.events.append(row)
                continue
            self.step = max(self.step, row["step"])
            if row["kind"] == "step":
                self._add_step(row)
            else:
                self.evaluations.append(row)
                self.epochs += [row] if row["kind"] == "epoch" else []

    def _add_step(self, row: Row) -> None:
        for name in metrics_of(row):
            steps, values = self._columns.setdefault(name, ([], []))
            steps.append(row["step"])
            values.append(row[name])
        self._examples = max(self._examples, row.get("examples", 0))
        if row.get("skipped"):
            self.skipped.append(row["step"])

    @property
    def metrics(self) -> list[str]:
        """The metrics of the steps."""
        return list(self._columns)

    def steps(self, metric: str) -> Series:
        """Return a metric over the steps that have it."""
        steps, values = self._columns.get(metric, ((), ()))
        return Series(np.asarray(steps, np.float64), np.asarray(values, np.float64))

    @property
    def last(self) -> Row:
        """The last row of an epoch, empty before the first."""
        return self.epochs[-1] if self.epochs else {}

    @property
    def final(self) -> Row:
        """The last value of each metric: after the last epoch, else of the last step."""
        return self.last or {name: values[-1] for name, (_, values) in self._columns.items()}

    @property
    def members(self) -> int | None:
        """The number of members of a population, None for one network."""
        values = self.last.get("members")
        return max(map(len, values.values()), default=0) if isinstance(values, dict) else None

    @property
    def batch_size(self) -> int | None:
        """The most examples of a step."""
        return self._examples or None

    @property
    def seconds(self) -> float:
        """Seconds of all epochs, without evaluation and saving."""
        return float(sum(row.get("seconds", 0.0) for row in self.epochs))

    @property
    def estimates(self) -> list[tuple[int, Row]]:
        """Step and `estimate` of each epoch that was both predicted and measured."""
        pairs = [(row["step"], row.get("estimate")) for row in self.epochs]
        return [(step, pair) for step, pair in pairs if isinstance(pair, dict)]


def line(name: str, rows: Sequence[Row]) -> Series:
    """Return a metric over the rows that have it."""
    points = [(row["step"], row[name]) for row in rows if is_number(row.get(name))]
    return Series(*np.asarray(points, np.float64).reshape(-1, 2).T)


def bands(name: str, rows: Sequence[Row], shares: Sequence[float]) -> Bands | None:
    """Return the members at the rows that have them; None where none of them is finite."""
    rows = [row for row in rows if name in (row.get("members") or {})]
    if not rows:
        return None
    last = rows[-1]["members"]
    count = len(last[name])
    values_NM = np.full((len(rows), count), np.nan)
    for index, row in enumerate(rows):  # a population that has grown had fewer members before
        early = np.asarray(row["members"][name], np.float64)[:count]
        values_NM[index, : len(early)] = early
    values_NM = np.where(np.isfinite(values_NM), values_NM, np.nan)
    kept = np.isfinite(values_NM).any(axis=1)
    if not kept.any():
        return None
    losses = np.asarray(last.get("eval_loss", last.get("loss", last[name])), np.float64)[:count]
    best = int(np.argmin(np.where(np.isfinite(losses), losses, np.inf)))
    steps = np.asarray([row["step"] for row in rows], np.float64)[kept]
    quantiles = np.nanquantile(values_NM[kept], shares, axis=1)
    return Bands(steps, quantiles, best, values_NM[kept, best])


def metrics_of(row: Mapping[str, Any]) -> list[str]:
    """Return the names of the numbers of a row that are metrics."""
    return [name for name, value in row.items() if is_number(value) and name not in NOT_METRICS]


def details(row: Mapping[str, Any], hidden: Sequence[str] = ("kind", "step", "event")) -> str:
    """Return what else the row of an event says."""
    return ", ".join(f"{name} {value}" for name, value in row.items() if name not in hidden)


def is_number(value: object) -> TypeGuard[int | float]:
    """Return whether a value of a row is a number, and no truth value."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def crowds_low(values: Sequence[Any] | np.ndarray) -> bool:
    """Return whether values crowd at the low end of a wide range, as those of `log_uniform` do."""
    numbers = np.asarray(values, np.float64)
    numbers = numbers[np.isfinite(numbers)]
    if not numbers.size or numbers.min() <= 0 or numbers.max() <= WIDE * numbers.min():
        return False
    return bool(np.median(numbers) < 0.2 * numbers.max())
