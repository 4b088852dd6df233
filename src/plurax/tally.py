"""What an epoch adds up to, from the metrics of its steps."""

import dataclasses
import math
import warnings
from collections import deque
from typing import Any

import jax
import numpy as np

from plurax.log import Row
from plurax.loop import Steps


class NonFiniteWarning(UserWarning):
    """A loss or gradient was not finite; the update was left out."""


SETTLE_AFTER = 2
"""Turns whose metrics may still be computing while the next is started."""


class Tally:
    """Sums over an epoch's steps; a skipped step counts only as skipped.

    Metrics are fetched from the device some turns late, so that the host never waits for the step
    it has just started.
    """

    def __init__(self, saved: dict[str, Any] | None = None) -> None:
        saved = saved or {}
        self.sums: dict[str, float] = dict(saved.get("sums", {}))
        self.weight: float = saved.get("weight", 0.0)
        self.examples: int = saved.get("examples", 0)
        self.skipped: int = saved.get("skipped", 0)
        self.seconds: float = saved.get("seconds", 0.0)
        self.last_loss = math.nan
        self._warned = self.skipped > 0
        self._waiting: deque[Steps] = deque()

    def to_json(self) -> dict[str, Any]:
        """What a checkpoint keeps, so that a resumed epoch is reported whole.

        A snapshot: the checkpoint is written in the background, while the tally goes on.
        """
        names = ("weight", "examples", "skipped", "seconds")
        return {"sums": dict(self.sums), **{name: getattr(self, name) for name in names}}

    def add(self, steps: Steps, *, settle_all: bool) -> list[Steps]:
        """Take a turn; return those whose metrics have arrived, metrics on the host."""
        self._waiting.append(steps)
        return self.settle(0 if settle_all else SETTLE_AFTER)

    def settle(self, waiting: int = 0) -> list[Steps]:
        """Count the turns up to the last `waiting` ones, and return them."""
        settled = []
        while len(self._waiting) > waiting:
            steps = self._waiting.popleft()
            host = jax.tree.map(np.atleast_1d, jax.device_get(steps.metrics))
            steps = dataclasses.replace(steps, metrics=host)
            self._count(steps)
            settled.append(steps)
        return settled

    def _count(self, steps: Steps) -> None:
        metrics = steps.metrics
        ok = metrics["skipped"] == 0
        weight = np.where(ok, metrics["weight"], 0.0).astype(np.float64)
        self.weight += float(weight.sum())
        self.examples += int(metrics["examples"].sum())
        self.skipped += int((~ok).sum())
        self.seconds += steps.seconds
        self.last_loss = float(metrics["loss"][-1])
        for name, values in metrics.items():
            if name not in ("weight", "examples", "skipped"):
                kept = np.where(ok, values, 0.0).astype(np.float64)
                self.sums[name] = self.sums.get(name, 0.0) + float((weight * kept).sum())

    @property
    def examples_per_second(self) -> float:
        """Throughput of the epoch so far, waiting for data included, compilation left out."""
        return self.examples / max(self.seconds, 1e-9)

    def warn_not_finite(self, step: int) -> None:
        """Say so at the first skipped update of an epoch; the epoch's row has the count."""
        if self.skipped and not self._warned:
            self._warned = True
            warnings.warn(
                f"at or before step {step} the loss or its gradient was not finite: the update was "
                "left out on all devices and the parameters are unchanged. A smaller learning "
                "rate or optax.clip_by_global_norm may help; a NaN in the data will come again.",
                NonFiniteWarning,
                stacklevel=3,
            )

    def epoch_row(self, step: int, epoch: int) -> Row:
        """What is reported of a whole epoch: weighted means, the loss first."""
        names = ["loss", *sorted(set(self.sums) - {"loss"})]
        means = {name: self.sums.get(name, 0.0) / self.weight if self.weight else math.nan
                 for name in names}  # fmt: skip
        return {
            "kind": "epoch",
            "epoch": epoch,
            "step": step,
            **means,
            "examples": self.examples,
            "skipped": self.skipped,
            "seconds": self.seconds,
            "examples_per_second": self.examples_per_second,
        }
