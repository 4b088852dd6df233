"""Stop a run whose metric no longer improves."""

from typing import Any

from plurax import errors
from plurax.callbacks.followed_metric import FollowedMetric
from plurax.loop.hook import EpochHook, StartHook, StateHook
from plurax.loop.log_rows import Row
from plurax.loop.run import Run
from plurax.validate import Mode, whole_number


class EarlyStopping(StartHook, EpochHook, StateHook):
    """End training once a metric has not improved for some evaluations (Prechelt, 1998).

    Of members each has its own best value; the run ends once none of them has improved.

    **Arguments:**

    - `metric`: its name in the rows of epochs, such as `"eval_loss"`.
    - `patience`: rows of epochs in a row without improvement.
    - `mode`: whether the smallest (`"min"`) or largest (`"max"`) value is the best; by default as
      the name says: the largest of an accuracy, AUC, F1, IoU, R², reward and the like.
    - `min_delta`: by how much a value has to be better to count, in the metric's unit.

    Raises `TaskError` for other values, and for a metric that a row does not have.

    >>> EarlyStopping("eval_loss", patience=2)
    EarlyStopping('eval_loss', patience=2)
    """

    def __init__(
        self, metric: str, patience: int = 3, *, mode: Mode | None = None, min_delta: float = 0.0
    ) -> None:
        count = whole_number(patience)
        if count is None:
            raise errors.callback_count("EarlyStopping", "patience", patience)
        self._followed = FollowedMetric("EarlyStopping", metric, mode, min_delta)
        self._patience = count

    def __repr__(self) -> str:
        return f"EarlyStopping({self._followed.metric!r}, patience={self._patience})"

    def on_start(self, run: Run) -> None:
        """Do not train on where the run had ended before."""
        self._followed.begin(run)
        self._stop_if_done(run)

    def on_epoch(self, run: Run, row: Row) -> None:
        """Count rows without improvement."""
        self._followed.improved(row)
        self._stop_if_done(run)

    def _stop_if_done(self, run: Run) -> None:
        if (self._followed.waited >= self._patience).all():
            run.stop(f"{self!r}: the best {self._followed.metric} is {self._followed.text()}")

    def get_state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return self._followed.to_json()

    def set_state(self, state: dict[str, Any]) -> None:
        """Take what a checkpoint kept."""
        self._followed.restore(state)
