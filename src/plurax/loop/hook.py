"""The events of the training loop: each is the method of an abstract class.

A hook is an object that has any of these methods; the classes say with which arguments, and by
them it is found. A callback of the user's may be a plain object, so they are protocols. What
belongs to plurax derives from those that it listens to.

What a callback of the user's may listen to:

    on_start(run)              before the first step, after a checkpoint was restored
    on_step(run, row)          for each step, once its metrics are on the host
    on_evaluation(run, row)    after an evaluation, with the row of its epoch, or a row of its own
    on_epoch(run, row)         after an epoch that is reported, before it is logged and saved
    on_save(run, step)         before a checkpoint is begun: write what shall agree with it
    on_stop(run)               at the end, after an error too

Metrics reach the host some calls late, so that it never waits for the step that it has just
dispatched. A callback that has to see the state after a certain step says so by `next_stop`:

    next_stop(step) -> int | None    the first step after `step` where a call of the loop shall end,
                                     with `run.step` and `run.state` those of the last row

What has to happen in every step belongs into the compiled program, as part of the optimizer:

    wrap_optimizer(optimizer)        returns the optimizer to train with

A callback whose state checkpoints shall keep has both of these, in one class:

    get_state() -> JSON value        what a checkpoint keeps
    set_state(state)                 before the run starts, and where a run goes back

What the rest of plurax listens to besides stands below, in the order of a call: `on_calls` once,
`on_call`, `on_rows`, `on_fetched`, `on_metrics`, `on_checkpoint`; `on_rewind` and `on_end`.
"""

import abc
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Protocol, runtime_checkable

import numpy as np

from plurax.loop.epoch_metrics import EpochMetrics
from plurax.loop.iterate import StepOutput
from plurax.loop.log_rows import Row
from plurax.loop.run import Run
from plurax.state import TrainState


@runtime_checkable
class StartHook(Protocol):
    """Listens to the start of a run."""

    @abc.abstractmethod
    def on_start(self, run: Run) -> None:
        """Open, and check, before the first step; `run` is at the step that it goes on from."""


@runtime_checkable
class StepHook(Protocol):
    """Listens to each step."""

    @abc.abstractmethod
    def on_step(self, run: Run, row: Row) -> None:
        """See the row of a step, or add to it. `run` may be some steps further."""


@runtime_checkable
class EvaluationHook(Protocol):
    """Listens to each evaluation."""

    @abc.abstractmethod
    def on_evaluation(self, run: Run, row: Row) -> None:
        """See the row with the evaluation, or add to it; `run` is at its step."""


@runtime_checkable
class EpochHook(Protocol):
    """Listens to each epoch that is reported."""

    @abc.abstractmethod
    def on_epoch(self, run: Run, row: Row) -> None:
        """See the row of the epoch, or add to it; `run` is at its step."""


@runtime_checkable
class SaveHook(Protocol):
    """Listens to each checkpoint."""

    @abc.abstractmethod
    def on_save(self, run: Run, step: int) -> None:
        """Write to disk what the checkpoint of this step shall not be ahead of."""


@runtime_checkable
class StopHook(Protocol):
    """Listens to the end of a run."""

    @abc.abstractmethod
    def on_stop(self, run: Run) -> None:
        """Close; `run.stopped` says why the run ends, `run.failed` whether by an error."""


@runtime_checkable
class NextStopHook(Protocol):
    """Has to see the state after certain steps."""

    @abc.abstractmethod
    def next_stop(self, step: int) -> int | None:
        """Return the first step after `step` at whose end a call shall end; None for none."""


@runtime_checkable
class StateHook(Protocol):
    """Has a state that checkpoints keep, so that a resumed run goes on with it."""

    @abc.abstractmethod
    def get_state(self) -> Any:
        """Return what a checkpoint keeps, JSON."""

    @abc.abstractmethod
    def set_state(self, state: Any) -> None:
        """Take what a checkpoint kept, before the run starts, and where it goes back."""


@runtime_checkable
class OptimizerHook(Protocol):
    """Follows the parameters in the compiled step."""

    @abc.abstractmethod
    def wrap_optimizer(self, optimizer: Any) -> Any:
        """Return the optimizer to train with; of members, a function of their hyperparameters."""


@dataclasses.dataclass(frozen=True)
class RunSnapshot:
    """What a checkpoint is of.

    **Fields:**

    - `step`: its number; `state()`: the state, canonical.
    - `meta()`: what stands beside the state, once hooks have written what shall agree with it.
    - `residuals`: as in `StepOutput`.
    - `last`: whether no other follows, so that this one has to be waited for.
    """

    step: int
    state: Callable[[], TrainState]
    meta: Callable[[], dict[str, Any]]
    residuals: list[list[np.ndarray]] | None
    last: bool


@runtime_checkable
class CallsHook(Protocol):
    """Sees what happens between the calls of the loop."""

    @abc.abstractmethod
    def on_calls(self, run: Run, calls: Iterator[StepOutput]) -> Iterator[StepOutput]:
        """Yield the calls."""


@runtime_checkable
class CallHook(Protocol):
    """Listens to each call, before anything is known of its steps."""

    @abc.abstractmethod
    def on_call(self, run: Run) -> None:
        """Look at `run.state`, and `run.due`; do not wait for the devices."""


@runtime_checkable
class FetchedHook(Protocol):
    """Listens to the metrics of calls, as they come to the host."""

    @abc.abstractmethod
    def on_fetched(self, run: Run, calls: list[StepOutput]) -> None:
        """Judge the steps of these calls; set `run.rewinding` to go back."""


@runtime_checkable
class MetricsHook(Protocol):
    """Listens to the sums of an epoch, as they grow."""

    @abc.abstractmethod
    def on_metrics(self, run: Run, metrics: EpochMetrics) -> None:
        """Show them, or warn of them."""


@runtime_checkable
class RowsHook(Protocol):
    """Listens to rows that are whole."""

    @abc.abstractmethod
    def on_rows(self, run: Run, rows: list[Row]) -> None:
        """Show them, or write them."""


@runtime_checkable
class CheckpointHook(Protocol):
    """Saves the run."""

    @abc.abstractmethod
    def on_checkpoint(self, run: Run, snapshot: RunSnapshot) -> None:
        """Save what the snapshot is of; the next call reuses the memory of its state."""


@runtime_checkable
class RewindHook(Protocol):
    """Listens to a run that goes back."""

    @abc.abstractmethod
    def on_rewind(self, run: Run) -> None:
        """Forget what came after `run.step`."""


@runtime_checkable
class EndHook(Protocol):
    """Listens to the end of training, which no error has ended."""

    @abc.abstractmethod
    def on_end(self, run: Run, metrics: EpochMetrics | None) -> None:
        """Wait for what is under way, and say what is left to say."""
