"""Log the learning rate."""

from typing import Any

import jax
import numpy as np
import optax

from plurax import errors
from plurax.distributed.global_arrays import fetch
from plurax.train.hooks import Run
from plurax.train.log import Row


class LearningRate:
    """Add `learning_rate` to the rows of a run.

    **Arguments:** `schedule`, the optax schedule or number that the optimizer was given. Without
    it, the rate that `optax.inject_hyperparams` keeps in the optimizer's state is logged, once an
    epoch.

    A step that was left out does not advance the schedule; it counts steps whose update was made.

    Raises `TaskError` where there is neither.
    """

    def __init__(self, schedule: optax.ScalarOrSchedule | None = None) -> None:
        self._schedule = schedule
        self._skipped = 0

    def on_start(self, run: Run) -> None:
        """Find the rate, before the first step."""
        if self._schedule is None and _rates(run) is None:
            raise errors.learning_rate_not_found()
        self._skipped = int(np.max(fetch(run.state.skipped)))

    def on_step(self, run: Run, row: Row) -> None:
        """Add the rate of a step."""
        if self._schedule is None:
            return
        row["learning_rate"] = self._at(row["step"] - 1 - self._skipped)
        self._skipped += int(row.get("skipped", 0)) if run.members is None else 0

    def on_epoch(self, run: Run, row: Row) -> None:
        """Add the rate after an epoch's last step."""
        if self._schedule is not None:
            row["learning_rate"] = self._at(row["step"] - self._skipped)
            return
        rates = _rates(run)
        row["learning_rate"] = float(np.median(rates))
        if run.members is not None:
            row["members"]["learning_rate"] = np.asarray(rates).tolist()

    def _at(self, count: int) -> float:
        schedule = self._schedule
        return float(schedule(count) if callable(schedule) else schedule)  # type: ignore[arg-type]


def _rates(run: Run) -> Any:
    """Return the learning rate in the optimizer's state, of members one each; None without."""
    state = run.program.to_canonical(run.state).opt_state
    # `inject_hyperparams` keeps the state of a schedule under the same name.
    rate = optax.tree_utils.tree_get(
        state, "learning_rate", filtering=lambda _, value: isinstance(value, jax.Array)
    )
    return None if rate is None else jax.tree.map(np.asarray, fetch(rate))
