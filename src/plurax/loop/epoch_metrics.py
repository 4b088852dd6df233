"""Aggregate the metrics of an epoch's steps, for one network or a population.

Metrics stay on the device while later steps are dispatched: fetching them at once would make the
host wait for each step. Sums are in float64 on the host, added in the order of the steps. Example,
a population of 3 members, two calls of 2 and 1 steps:

    call 1    loss (3, 2)   weight (3, 2)   skipped (3, 2)    queued
    call 2    loss (3,)     -> (3, 1)                         queued; call 1 is still not fetched
    call 3    ...                                             call 1 is fetched and counted
    fetch     sums["loss"] (3,) += weight * loss, step after step, where skipped == 0
    means     sums["loss"] / weight         (3,)
    row       loss = median, loss_best, loss_worst; members = {"loss": [.., .., ..]}
"""

import abc
import dataclasses
import itertools
import math
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from plurax import errors
from plurax.distributed.global_arrays import fetch
from plurax.loop.iterate import StepOutput
from plurax.loop.log_rows import Row
from plurax.members import Members
from plurax.user_frames import warn

COUNTS = ("weight", "examples", "skipped")


FETCH_AFTER = 2
"""Calls whose metrics may still be computing while the next call is dispatched."""

WEIGHTLESS = (
    "The weights of all examples of a step were zero, which has no mean: mix them with others."
)


class EpochMetrics(abc.ABC):
    """Sums of metrics over an epoch's steps; a skipped step adds to `skipped` only.

    Metrics are fetched from the device some calls late, so that the host never waits for the step
    that it has just dispatched.
    """

    def __init__(self, saved: dict[str, Any] | None = None) -> None:
        saved = saved or {}
        self.sums: dict[str, Any] = dict(saved.get("sums", {}))
        self.weight: Any = saved.get("weight", 0.0)
        self.examples: int = saved.get("examples", 0)
        self.skipped: Any = saved.get("skipped", 0)
        self.seconds: float = saved.get("seconds", 0.0)
        self.untimed: int = saved.get("untimed", 0)
        self.timed_steps: int = saved.get("timed_steps", 0)
        self.weightless = False
        self._since: float | None = None
        self.untimed_seconds: float = saved.get("untimed_seconds", 0.0)
        self._waiting: deque[StepOutput] = deque()

    def to_json(self) -> dict[str, Any]:
        """Return the values a checkpoint saves, so that a resumed epoch is reported whole.

        The result is a copy: the checkpoint is written in the background while the sums go on.
        """
        names = ("weight", "examples", "skipped", "seconds", "untimed", "untimed_seconds",
                 "timed_steps")  # fmt: skip
        values = {"sums": dict(self.sums), **{name: getattr(self, name) for name in names}}
        return jax.tree.map(lambda v: v.tolist() if hasattr(v, "tolist") else v, values)

    def add(self, steps: StepOutput, *, fetch_all: bool) -> list[StepOutput]:
        """Queue the output of a call; return the outputs whose metrics are now on the host."""
        self._waiting.append(steps)
        if self._since is None:
            # Wait for the run's first call, and leave it out of the throughput: it may compile.
            asked, before = time.monotonic(), self.examples
            fetched = self.fetch()
            self.untimed_seconds += steps.seconds + time.monotonic() - asked
            self.untimed += self.examples - before
            self.start()
            return fetched
        fetched = self.fetch(0 if fetch_all else FETCH_AFTER)
        self.timed_steps += sum(one.metrics["skipped"].shape[-1] for one in fetched)
        self._take_time()
        return fetched

    def start(self) -> None:
        """Start the clock of an epoch, once the previous epoch has been reported."""
        self._since = time.monotonic()

    def _take_time(self) -> None:
        assert self._since is not None
        now = time.monotonic()
        self.seconds += now - self._since
        self._since = now

    def fetch(self, waiting: int = 0) -> list[StepOutput]:
        """Fetch and count the queued outputs except the last `waiting`, and return them."""
        fetched = []
        while len(self._waiting) > waiting:
            steps = self._waiting.popleft()
            found = jax.tree.map(self._by_step, fetch(steps.metrics))
            columns = slice(*(steps.columns or (None,)))
            host = {name: metric[..., columns] for name, metric in found.items()}
            steps = dataclasses.replace(steps, metrics=host)
            self._count(host)
            fetched.append(steps)
        return fetched

    def _count(self, metrics: dict[str, np.ndarray]) -> None:
        """Add metrics `(..., k)` to the sums `(...)`."""
        if all(value.shape == (1,) for value in metrics.values()):
            self._count_step({name: value.item() for name, value in metrics.items()})
            return
        ok = metrics["skipped"] == 0
        weight = np.where(ok, metrics["weight"], 0.0).astype(np.float64)
        self.weight = _added(self.weight, weight)
        self.examples += int(metrics["examples"].sum())
        self.skipped = self.skipped + (~ok).sum(-1)
        self.weightless |= bool((metrics["weight"] == 0).any())
        for name, values in metrics.items():
            if name not in COUNTS:
                kept = np.where(weight == 0, 0.0, values).astype(np.float64)
                self.sums[name] = _added(self.sums.get(name, 0.0), weight * kept)

    def _count_step(self, metrics: dict[str, float]) -> None:
        """Add the metrics of one step of one network, as Python's floats.

        The bits are those of NumPy's float64, and a step of a tenth of a millisecond is not held up
        by a dozen small arrays.
        """
        ok = metrics["skipped"] == 0
        weight = float(metrics["weight"]) if ok else 0.0
        self.weight = self.weight + weight
        self.examples += int(metrics["examples"])
        self.skipped = self.skipped + (not ok)
        self.weightless |= metrics["weight"] == 0
        for name, value in metrics.items():
            if name not in COUNTS:
                self.sums[name] = self.sums.get(name, 0.0) + (weight * value if ok else 0.0)

    def means(self) -> dict[str, Any]:
        """Return weighted means of the epoch so far, the loss first; NaN for zero weight."""
        names = ["loss", *sorted(set(self.sums) - {"loss"})]
        weight = np.where(np.equal(self.weight, 0), math.nan, self.weight)
        return {name: np.asarray(self.sums.get(name, math.nan)) / weight for name in names}

    @property
    def examples_per_second(self) -> float:
        """Examples per second of wall-clock time in the epoch so far, without the run's first call.

        Examples whose metrics are not fetched yet are not counted. If the first call is the only
        one, its throughput is returned.
        """
        if self.examples == self.untimed:
            return self.examples / max(self.untimed_seconds, 1e-9)
        return (self.examples - self.untimed) / max(self.seconds, 1e-9)

    @abc.abstractmethod
    def fresh(self) -> "EpochMetrics":
        """Return empty metrics for the next epoch that remember which warnings were given."""

    @abc.abstractmethod
    def _by_step(self, metric: np.ndarray) -> np.ndarray:
        """Return a metric of a call with the steps as its last dim."""

    @abc.abstractmethod
    def step_rows(self, steps: StepOutput) -> list[Row]:
        """Return the log rows of each step of a fetched output."""

    @abc.abstractmethod
    def summary(self) -> str:
        """Return a few words on the last step; empty while no metrics have been fetched."""

    @abc.abstractmethod
    def warn_not_finite(self, step: int, why: Callable[[Any], str]) -> None:
        """Warn of skipped updates that were not warned of before.

        **Arguments:** `why`, returns the cause from the mean norm of the epoch's finite gradients.
        """

    @abc.abstractmethod
    def epoch_row(self, step: int, epoch: int, evaluation: dict[str, Any] | None) -> Row:
        """Return the log row of a whole epoch; `evaluation` is what `Program.evaluate` returns."""

    def _row(self, step: int, epoch: int, values: dict[str, Any], skipped: int) -> Row:
        return {
            "kind": "epoch",
            "epoch": epoch,
            "step": step,
            **values,
            "examples": self.examples,
            "skipped": skipped,
            "seconds": self.seconds + self.untimed_seconds,
            "examples_per_second": self.examples_per_second,
        }


def _added(total: Any, values: np.ndarray) -> np.ndarray:
    """Add `values` (..., k) to `total` (...), one step after the other.

    The number of steps per call depends on a clock. Adding in the order of steps makes the bits of
    the sum independent of it.
    """
    before = np.broadcast_to(np.asarray(total, np.float64), values.shape[:-1])[..., None]
    return np.cumsum(np.concatenate([before, values], -1), -1)[..., -1]


class NetworkMetrics(EpochMetrics):
    """The metrics of one network."""

    def __init__(self, saved: dict[str, Any] | None = None) -> None:
        super().__init__(saved)
        self._warned = self.skipped > 0
        self._last = math.nan

    def fresh(self) -> "NetworkMetrics":
        """Return empty metrics; skipped updates are warned of once."""
        fresh = NetworkMetrics()
        fresh._warned = self._warned
        return fresh

    def _by_step(self, metric: np.ndarray) -> np.ndarray:
        return np.atleast_1d(metric)

    def step_rows(self, steps: StepOutput) -> list[Row]:
        """Return one row per step with every metric."""
        self._last = float(steps.metrics["loss"][-1])
        count = len(steps.metrics["loss"])
        names = ["kind", "step", "epoch", *steps.metrics]
        numbers = range(steps.step - count + 1, steps.step + 1)
        values = (value.tolist() for value in steps.metrics.values())
        # A small step takes tens of microseconds, and making its row one.
        columns = zip(
            itertools.repeat("step"), numbers, itertools.repeat(steps.epoch), *values, strict=False
        )
        return [dict(zip(names, row, strict=True)) for row in columns]

    def summary(self) -> str:
        """Return the last loss as text."""
        return "" if math.isnan(self._last) and not self.skipped else f"loss {self._last:.4g}"

    def warn_not_finite(self, step: int, why: Callable[[Any], str]) -> None:
        """Warn at the first skipped update of a run; the rows of its epochs have the counts."""
        if self.skipped and not self._warned:
            self._warned = True
            cause = WEIGHTLESS if self.weightless else why(self.means().get("grad_norm", math.nan))
            cause = cause or (
                "A smaller learning rate or optax.clip_by_global_norm may help; a NaN in the data "
                "will come again."
            )
            warn(
                f"at or before step {step} the loss or its gradient was not finite: the update was "
                f"left out on all devices and the parameters are unchanged. {cause} This is said "
                "once; `skipped` of an epoch counts such steps.",
                errors.NonFiniteWarning,
            )

    def epoch_row(self, step: int, epoch: int, evaluation: dict[str, Any] | None) -> Row:
        """Return weighted means of the training metrics, and the evaluation's under `eval_...`."""
        values = {name: float(mean) for name, mean in self.means().items()}
        for name, value in (evaluation or {}).items():
            values[f"eval_{name}"] = value.tolist() if isinstance(value, np.ndarray) else value
        return self._row(step, epoch, values, int(self.skipped))


class MembersMetrics(EpochMetrics):
    """The metrics of a population: sums of shape `(members,)`.

    A row has the median over members of every metric, `loss_best` and `loss_worst`, and under
    `members` all values. Frozen members are left out of the medians.
    """

    def __init__(self, members: Members, saved: dict[str, Any] | None = None) -> None:
        super().__init__(saved)
        self._members = members
        self.sums = {name: np.asarray(values) for name, values in self.sums.items()}
        self.weight, self.skipped = np.asarray(self.weight), np.asarray(self.skipped)
        self._frozen: set[int] = set()
        self._last: np.ndarray | None = None

    def fresh(self) -> "MembersMetrics":
        """Return empty metrics; a frozen member stays frozen and is warned of once."""
        fresh = MembersMetrics(self._members)
        fresh._frozen = self._frozen
        return fresh

    def _by_step(self, metric: np.ndarray) -> np.ndarray:
        return metric[:, None] if metric.ndim == 1 else metric

    def step_rows(self, steps: StepOutput) -> list[Row]:
        """Return the median, best and worst loss of each step."""
        loss = steps.metrics["loss"].astype(np.float64)
        loss = np.where(steps.metrics["skipped"] == 0, loss, math.nan)
        self._last = loss[:, -1]
        first = steps.step - loss.shape[1] + 1
        return [
            {"kind": "step", "step": step, "epoch": steps.epoch, **_spread("loss", now)}
            for step, now in enumerate(loss.T, first)
        ]

    def summary(self) -> str:
        """Return the best, median and worst loss of the last step as text."""
        if self._last is None:
            return ""
        spread = _spread("loss", self._last)
        best, median, worst = (spread[n] for n in ("loss_best", "loss", "loss_worst"))
        return f"loss best {best:.4g} median {median:.4g} worst {worst:.4g}"

    def warn_not_finite(self, step: int, why: Callable[[Any], str]) -> None:
        """Warn of the members that were frozen since the last warning; say why at the first."""
        new = sorted(set(np.flatnonzero(self.skipped).tolist()) - self._frozen)
        if not new:
            return
        cause = "" if self._frozen else why(self.means().get("grad_norm", math.nan))
        self._frozen |= set(new)
        warn_frozen(self._members, new, f"at or before step {step}", cause)

    def epoch_row(self, step: int, epoch: int, evaluation: dict[str, Any] | None) -> Row:
        """Return the spread of each metric over members, and all values under `members`."""
        every = self.means() | {f"eval_{k}": v for k, v in (evaluation or {}).items()}
        values: dict[str, Any] = {}
        # A frozen member's evaluation is finite: it keeps the parameters from before the failure.
        well = np.broadcast_to(np.equal(self.skipped, 0), (self._members.count,))
        for name, all_ in every.items():
            if np.ndim(all_) > 1:  # an array of each member, such as a confusion matrix
                continue
            values |= _spread(name, all_[well], ends=name in ("loss", "eval_loss"))
        frozen = int(np.count_nonzero(self.skipped))
        row = self._row(step, epoch, values, frozen)
        return {**row, "members": {name: all_.tolist() for name, all_ in every.items()}}


def warn_frozen(members: Members, new: list[int], when: str, why: str = "") -> None:
    """Warn of frozen members, given by index."""
    named = "; ".join(
        ", ".join(f"{name} {value:.6g}" for name, value in row.items())
        for row in members.take(new[:5]).table()
    )
    more = f" and {len(new) - 5} more" if len(new) > 5 else ""
    warn(
        f"{when} the loss or its gradient was not finite in {len(new)} of {members.count} members, "
        f"which are frozen as they were while the others go on: {named}{more}. {why}".rstrip(),
        errors.NonFiniteWarning,
    )


def _spread(name: str, values: np.ndarray, *, ends: bool = True) -> dict[str, float]:
    finite = values[np.isfinite(values)]
    if not len(finite):
        finite = np.asarray([math.nan])
    spread = {name: float(np.median(finite))}
    if ends:
        spread |= {f"{name}_best": float(finite.min()), f"{name}_worst": float(finite.max())}
    return spread
