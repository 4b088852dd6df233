"""Log the learning rate."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from plurax import errors
from plurax.distributed.global_arrays import fetch
from plurax.loop.hook import EpochHook, StartHook, StepHook
from plurax.loop.log_rows import Row
from plurax.loop.run import Run

BLOCK = 1024
"""Rates computed at once."""


class LearningRate(StartHook, StepHook, EpochHook):
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
        self._first, self._rates = 0, list[float]()

    def on_start(self, run: Run) -> None:
        """Find the rate, before the first step."""
        if self._schedule is None and _rates(run) is None:
            raise errors.TaskError(
                "LearningRate() finds no learning rate in the optimizer's state. Give it the "
                "schedule, LearningRate(schedule), or write "
                "optax.inject_hyperparams(optax.adam)(learning_rate=schedule)."
            )
        self._skipped = int(np.max(fetch(run.state.skipped)))

    def on_step(self, run: Run, row: Row) -> None:
        """Add the rate of a step."""
        if self._schedule is None:
            return
        # A small step takes tens of microseconds; this one, a fraction of one.
        index = row["step"] - 1 - self._skipped - self._first
        if not 0 <= index < len(self._rates):
            self._look_ahead(index + self._first)
            index = 0
        row["learning_rate"] = self._rates[index]
        if run.members is None and row["skipped"]:
            self._skipped += 1

    def on_epoch(self, run: Run, row: Row) -> None:
        """Add the rate of the next update."""
        if self._schedule is not None:
            count = row["step"] - self._skipped
            if not 0 <= count - self._first < len(self._rates):
                self._look_ahead(count)
            row["learning_rate"] = self._rates[count - self._first]
            return
        rates = _rates(run)
        row["learning_rate"] = float(np.median(rates))
        if run.members is not None:
            row["members"]["learning_rate"] = np.asarray(rates).tolist()

    def _look_ahead(self, first: int) -> None:
        """Compute the rates of the next updates."""
        schedule = self._schedule
        constant = not callable(schedule)
        self._first = first
        self._rates = [float(schedule)] * BLOCK if constant else _block(schedule, first).tolist()  # type: ignore[arg-type]


@functools.partial(jax.jit, static_argnums=0)
def _block(schedule: optax.Schedule, first: Int[Array, ""] | int) -> Float[Array, "N"]:
    """Return the rates of the next updates; one call for each would cost more than a small step."""
    return jax.vmap(schedule)(first + jnp.arange(BLOCK, dtype=jnp.int32))


def _rates(run: Run) -> Any:
    """Return the learning rate in the optimizer's state, of members one each; None without."""
    state = run.program.to_canonical(run.state).opt_state
    # `inject_hyperparams` keeps the state of a schedule under the same name.
    rate = optax.tree_utils.tree_get(
        state, "learning_rate", filtering=lambda _, value: isinstance(value, jax.Array)
    )
    return None if rate is None else jax.tree.map(np.asarray, fetch(rate))
