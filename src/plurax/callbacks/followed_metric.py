"""A metric that a callback follows from epoch to epoch, of one network or of each member."""

import fnmatch
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Bool

from plurax import errors
from plurax.loop.log_rows import Row
from plurax.loop.run import Run
from plurax.validate import Mode, rises


class FollowedMetric:
    """The best value of a metric so far.

    **Arguments:** `callback`, the name to use in errors; `metric`, its name in the rows of epochs;
    `mode`, whether the smallest or the largest value is the best, None to guess by the name;
    `min_delta`, by how much a value has to be better.

    **Attributes:** `best`, shape `(members,)`, `(1,)` for one network; `waited`, how many values in
    a row were not better, of the same shape.

    Raises `TaskError` for another mode.
    """

    def __init__(self, callback: str, metric: str, mode: Mode | None, min_delta: float) -> None:
        if mode not in ("min", "max", None):
            raise errors.TaskError(
                f"{callback}(mode={mode!r}): give 'min', 'max', or None to guess by the name."
            )
        self.metric, self._callback = metric, callback
        self._sign = -1.0 if mode == "max" or (mode is None and rises(metric)) else 1.0
        self._min_delta = min_delta
        self.best: np.ndarray | None = None
        self.waited = np.zeros(1, int)

    def begin(self, run: Run) -> None:
        """Forget an earlier run, and make room for the members that a population has grown by.

        Raises `TaskError` where no row will have the metric.
        """
        if run.step == 0:
            self.restore({"best": None})
        if self.best is not None:
            late = np.zeros((run.members.count if run.members else 1) - len(self.best), int)
            self.best = np.append(self.best, late + math.nan)
            self.waited = np.append(self.waited, late)
        names = run.metric_names()
        if names is None:
            return
        base = self.metric.replace("eval_ema_", "eval_", 1)  # which EMA adds
        if not any(fnmatch.fnmatchcase(base, name) for name in names):
            raise errors.callback_metric_missing(self._callback, self.metric, names)

    def improved(self, row: Row) -> Bool[np.ndarray, "M"]:
        """Return who is better in this row than ever before, and remember it.

        A value that is not finite is better than none.

        Raises `TaskError` for a row without this metric.
        """
        now = np.atleast_1d(self._value(row)).astype(np.float64)
        if self.best is None:
            self.best = np.full(now.shape, math.nan)
        better = self._sign * now < self._sign * self.best - self._min_delta
        better |= np.isnan(self.best) & np.isfinite(now)
        self.best = np.where(better, now, self.best)
        self.waited = np.where(better, 0, self.waited + 1)
        return better

    def _value(self, row: Row) -> Any:
        values = row.get("members", row)
        if self.metric not in values:
            there = [name for name, value in values.items() if isinstance(value, float | list)]
            raise errors.callback_metric_missing(self._callback, self.metric, there)
        value = values[self.metric]
        if np.asarray(value).dtype.kind not in "fiu" or np.ndim(value) > ("members" in row):
            kind = type(value).__name__
            raise errors.TaskError(
                f"the callback {self._callback} follows {self.metric!r}, which is a {kind} in the "
                "row; name a number."
            )
        return value

    def to_json(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        best = None if self.best is None else [float(one) for one in self.best]
        return {"best": best, "waited": self.waited.tolist()}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Take what a checkpoint kept."""
        best = saved["best"]
        self.best = None if best is None else np.asarray(best, np.float64)
        self.waited = np.asarray(saved.get("waited", np.zeros(len(best or [0]), int)))

    def text(self) -> str:
        """Return the best value, of members the best of all, as text."""
        if self.best is None or not np.isfinite(self.best).any():
            return "none"
        return f"{self._sign * np.nanmin(self._sign * self.best):.6g}"
