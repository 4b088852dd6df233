"""The training loop: count, evaluate, save, stop; read top to bottom.

The loop says what happens, and hooks do the rest: they show, log, guard and save (see `hook`). The
order of events matters: a stop always leaves a checkpoint of exactly what was logged. An example,
epochs of 100 steps, a checkpoint every 60, a callback that asks for the end after epoch 1:

    step 60     a call; its steps counted, their rows whole; the run saved
    step 100    a call; its steps counted, their rows whole; evaluated; on_epoch asks for the end;
                the epoch's row whole; the run saved; over
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, Literal

from plurax.execute.array_data import Position
from plurax.loop.call_hooks import Hooks
from plurax.loop.epoch_metrics import EpochMetrics
from plurax.loop.hook import RunSnapshot
from plurax.loop.iterate import Calls, StepOutput
from plurax.loop.log_rows import Row
from plurax.loop.planned_end import PlannedEnd
from plurax.loop.run import Due, Run
from plurax.state import TrainState


@dataclasses.dataclass(frozen=True)
class Cadence:
    """How long a run is, and what it does how often: arguments of `fit`."""

    epochs: int
    report_every: int
    evaluate_every: int | None
    checkpoint_every: int | None

    def reports(self, call: StepOutput) -> bool:
        """Return whether a call ends an epoch that is reported."""
        epoch = call.position.epoch
        return call.epoch_done and (epoch % self.report_every == 0 or epoch == self.epochs)

    def evaluates(self, step: int) -> bool:
        """Return whether a step within an epoch is followed by an evaluation."""
        return self.evaluate_every is not None and step % self.evaluate_every == 0

    def saves(self, step: int) -> bool:
        """Return whether a step is followed by a checkpoint, whatever else it is followed by."""
        return self.checkpoint_every is not None and step % self.checkpoint_every == 0


@dataclasses.dataclass(frozen=True)
class TrainingLoop:
    """The training loop, and all it works with.

    **Fields:**

    - `run`: the run as its hooks see it, the program and the processes included; `hooks`.
    - `cadence`: how long it is, and what it does how often; `ending`: what ends it before.
    - `calls(state, **schedule)`: `train_iter` of the program and the data, or that of servers.
    - `restart()`: returns state, position and sums of the newest checkpoint.
    - `local_batches`: as in `fit`.
    - `work(phase)`: is entered while the run is saved, for the watchdog.
    """

    run: Run
    hooks: Hooks
    cadence: Cadence
    ending: PlannedEnd
    calls: Callable[..., Iterator[StepOutput]]
    restart: Callable[[], tuple[TrainState, Position, EpochMetrics]]
    work: Callable[[Literal["save"]], contextlib.AbstractContextManager[None]]
    local_batches: bool

    def train(self, position: Position, metrics: EpochMetrics) -> None:
        """Train from a position in the data and the sums of its epoch, to the end."""
        run, hooks = self.run, self.hooks
        calls = Calls(self._begin, run.state, position)
        reported = False
        for call in hooks.watch(run, calls):
            state = run.see(call)
            signal, planned = self.ending.agree(ready=call.fetched)
            run.due = due = self._due(call, signal, planned)
            hooks.call(run)
            fetched = metrics.add(call, fetch_all=due.any or hooks.stops_at(call.step))
            hooks.steps(run, fetched, [row for one in fetched for row in metrics.step_rows(one)])
            if run.rewinding:
                metrics = self._rewind(calls)
                continue
            hooks.metrics(run, metrics)
            reported = due.report
            if due.report:
                self._report(call, metrics)
                planned = planned or self.ending.agree().planned  # a callback may ask for the end
                metrics = metrics.fresh() if call.epoch_done else metrics
            elif due.evaluate:
                self._report(call, metrics, kind="evaluation")
            if run.state is not state:  # a hook has set something in it
                calls.replace(run.state)
            if planned and signal is None:
                event = {"kind": "event", "event": "stopped", "step": call.step}
                hooks.rows(run, [{**event, "reason": planned}])
            if due.save:
                is_last = due.report and call.position.epoch == self.cadence.epochs
                self._save(call, metrics, last=bool(is_last or signal or planned))
            if signal or planned:
                run.due = dataclasses.replace(due, end=signal or planned)
                run.interrupted = signal or run.interrupted
                break
            if due.report or due.evaluate:
                metrics.start()
        hooks.end(run, None if reported else metrics)

    def _begin(self, state: TrainState, start: Position) -> Iterator[StepOutput]:
        """Return the calls from a state and a position on; none where the run had ended before."""
        if self.ending.agree().planned:  # a limit was reached, or a callback ends the run
            return iter(())
        return self.calls(
            state,
            start=start,
            epochs=self.cadence.epochs,
            report_every=self.cadence.report_every,
            checkpoint_every=self.cadence.checkpoint_every,
            next_stop=self._next_stop,
            stopping=self.ending.stopping,
        )

    def _next_stop(self, step: int) -> int | None:
        """Return the first step after `step` at whose end the loop has to look."""
        every = self.cadence.evaluate_every if self.run.evaluates else None
        due = None if every is None else step + every - step % every
        return min(filter(None, (due, self.ending.next_stop(step))), default=None)

    def _due(self, call: StepOutput, signal: str | None, planned: str | None) -> Due:
        """Return what follows upon a call. A run that a signal ends is saved, and not reported."""
        report = self.cadence.reports(call) or (planned is not None and signal is None)
        end = signal or planned
        return Due(
            report=report,
            evaluate=self.run.evaluates and self.cadence.evaluates(call.step) and not report,
            save=self.hooks.saves and (report or self.cadence.saves(call.step) or end is not None),
            end=end,
        )

    def _report(self, call: StepOutput, metrics: EpochMetrics, kind: str = "epoch") -> None:
        """Evaluate; let hooks add to the row of an epoch, or of a time within it, and see it."""
        row: Row = metrics.epoch_row(call.step, call.epoch, self.run.evaluate(call.state))
        self.hooks.report(self.run, {**row, "kind": kind})

    def _save(self, call: StepOutput, metrics: EpochMetrics, *, last: bool) -> None:
        """Save the state, and what a checkpoint says of the run beside it."""
        run = self.run
        position = call.position.to_json()
        if self.local_batches:  # each process has its own rows, and iterator
            position["iterator"] = run.group.all_gather(position["iterator"])

        def meta() -> dict[str, Any]:
            return {**run.settings, "position": position, "tally": metrics.to_json()}

        canonical = functools.partial(run.program.to_canonical, run.state)
        with self.work("save"):
            self.hooks.save(run, RunSnapshot(call.step, canonical, meta, call.residuals, last))

    def _rewind(self, calls: Calls) -> EpochMetrics:
        """Go on from the newest checkpoint; hooks drop what came after it."""
        with self.work("save"):
            state, position, metrics = self.restart()
            self.run.go_back(state)
            self.hooks.rewind(self.run)
            calls.restart(state, position)
        return metrics
