"""The training loop of `fit`: count, evaluate, log, save, stop; read top to bottom.

The order matters. A stop always leaves a checkpoint of exactly what was logged. An example, epochs
of 100 steps, a checkpoint every 60, a callback that asks for the end after epoch 1:

    step 60     counted, logged, saved
    step 100    counted, logged; evaluated; on_epoch asks for the end; its row logged; saved; over
"""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jaxtyping import PyTree

from plurax import errors
from plurax.checkpoint import Checkpoints
from plurax.checkpoint.manager import Meta
from plurax.checkpoint.restore import members_meta
from plurax.distributed.process_group import ProcessGroup
from plurax.execute.array_data import Position
from plurax.execute.program import Program
from plurax.guards.not_finite import why_not_finite
from plurax.guards.replica_guard import ReplicaGuard
from plurax.guards.rollback import Rollbacks
from plurax.guards.saving import Saving
from plurax.guards.stop_signals import StopSignals
from plurax.guards.watchdog import Watchdog
from plurax.loop.data import Data
from plurax.loop.epoch_metrics import EpochMetrics
from plurax.loop.hooks import Hooks, Run
from plurax.loop.iterate import Calls, StepOutput, train_iter
from plurax.loop.log_rows import Row
from plurax.loop.planned_end import PlannedEnd
from plurax.progress.console_progress import TrainingProgress
from plurax.run_folder.log import MetricsLog
from plurax.server.coordinator import Coordinator
from plurax.state import TrainState
from plurax.train.measurements import Measurements
from plurax.train.serve import serve_iter


@dataclasses.dataclass(frozen=True)
class TrainingLoop:
    """The training loop, and all it works with.

    **Fields:** as the arguments of `fit`, and

    - `run`: the run as its callbacks see it, the program and the processes included.
    - `begin(resume)`: returns state, position and sums to begin with, of the newest checkpoint.
    - `coordinator`: of parameter servers, or None.
    - `log`: None in processes that write none.
    """

    run: Run
    source: Data
    evaluate_every: int | None
    epochs: int
    report_every: int
    checkpoint_every: int | None
    resident: bool | None
    local_batches: bool
    begin: Callable[[bool], tuple[TrainState, Position, EpochMetrics]]
    hooks: Hooks
    coordinator: Coordinator | None
    end: PlannedEnd
    stop: StopSignals
    dog: Watchdog
    log: MetricsLog | None
    bar: TrainingProgress
    saving: Saving
    rollbacks: Rollbacks
    measurements: Measurements
    guard: ReplicaGuard

    def train(self, position: Position, metrics: EpochMetrics) -> TrainState:
        """Train from a position in the data and the sums of its epoch, to the end."""
        run, bar, saving = self.run, self.bar, self.saving
        calls = Calls(self._calls, run.state, position)  # callbacks may have set something in it
        watched = self.dog.watch(calls, lambda: saving.newest)
        for steps in bar.compiled(watched, _described(run.program)):
            state = run.see(steps)
            signal = self.stop.agree(run.group, steps.fetched)  # read once; later ones come next
            ending = signal or self.end.agree(steps.fetched)
            report = self._reports(steps) or (ending is not None and signal is None)
            save = saving.wanted and (report or self._saves(steps.step) or ending is not None)
            saving.check(steps.step)
            self.guard.check(steps.step, state, now=save)
            evaluate = self._evaluates_within(steps.step) and not report
            wanted = report or save or evaluate or ending is not None
            wanted = wanted or self.hooks.stops_at(steps.step)
            fetched = metrics.add(steps, fetch_all=wanted)
            self._write(self.hooks.steps(run, map(metrics.step_rows, fetched)))
            if self.rollbacks.due(fetched, self.source.batches_per_epoch, saving):
                state, metrics = self._go_back(calls)
                continue
            bar.advance(steps.step, steps.position.epoch, *self._summary(metrics))
            if run.is_primary:
                why = functools.partial(why_not_finite, run.program, self.source)
                metrics.warn_not_finite(steps.step, why)
            if report:
                self._report(steps, metrics)
                ending = ending or self.end.agree()
                metrics = metrics.fresh() if steps.epoch_done else metrics
            elif evaluate:
                self._evaluate(steps, metrics)
                ending = ending or self.end.agree()
            if run.state is not state:
                state = run.state
                calls.replace(state)
            if ending and signal is None:
                self._write([_event("stopped", steps.step, reason=ending)])
            if save:
                is_last = report and steps.position.epoch == self.epochs
                self._save(steps, metrics, last=is_last or ending is not None)
            if ending:
                self.measurements.add(steps, metrics, reported=report)
                bar.note(_stopped(ending, steps.step, run.output, signal=signal is not None))
                break
            self.stop.name = self.stop.name or ("SIGPIPE" if bar.closed else None)
            if report or evaluate:
                metrics.start()
        self.guard.wait()
        self.measurements.show(at_end=True)
        return run.state

    def ended(self) -> tuple[str | None, str | None]:
        """Return the signal that ended training, or why it ended as planned; of both, one or none.

        To be called once training has ended.
        """
        self.stop.name = self.stop.agree(self.run.group, ready=True)
        planned = None if self.stop.name else self.run.stopped
        self.run.stopped = self.stop.name or planned
        return self.stop.name, planned

    def _calls(self, state: TrainState, start: Position) -> Iterator[StepOutput]:
        """Return the calls of the loop: of one program, or of workers and servers."""
        run = self.run
        if reason := self.end.agree():  # a limit was reached before, or a callback ends the run
            self.bar.note(f"the run had ended at step {run.step}, nothing is trained: {reason}")
            return iter(())
        schedule: Any = {
            "start": start,
            "epochs": self.epochs,
            "report_every": self.report_every,
            "checkpoint_every": self.checkpoint_every,
            "next_stop": self._next_stop,
            "stopping": lambda: self.stop.called() or self.end.called(),
        }
        if self.coordinator is None:
            schedule |= {"resident": self.resident, "group": run.group}
            return train_iter(run.program, state, self.source, **schedule)
        return serve_iter(self.coordinator, run.program, state, self.source, **schedule)

    def _reports(self, steps: StepOutput) -> bool:
        epoch = steps.position.epoch
        return steps.epoch_done and (epoch % self.report_every == 0 or epoch == self.epochs)

    def _saves(self, step: int) -> bool:
        return _is_due(step, self.checkpoint_every)

    def _evaluates_within(self, step: int) -> bool:
        """Return whether a step within an epoch is followed by an evaluation."""
        return self.run.evaluates and _is_due(step, self.evaluate_every)

    def _next_stop(self, step: int) -> int | None:
        """Return the first step after `step` at whose end the loop has to look."""
        every = self.evaluate_every if self.run.evaluates else None
        due = None if every is None else step + every - step % every
        return min(filter(None, (due, self.end.next_stop(step))), default=None)

    def _report(self, steps: StepOutput, metrics: EpochMetrics) -> None:
        """Evaluate; add the row of an epoch to the history and the log, and show it."""
        row = metrics.epoch_row(steps.step, steps.epoch, self.run.evaluate(steps.state))
        row |= self.measurements.add(steps, metrics)
        row |= {"servers": self.coordinator.account.to_json()} if self.coordinator else {}
        self.hooks.report(self.run, row)
        self.bar.epoch(row)
        self.measurements.show()
        self._write([row])

    def _evaluate(self, steps: StepOutput, metrics: EpochMetrics) -> None:
        """Evaluate within an epoch; add a row of its own to the log."""
        row = metrics.epoch_row(steps.step, steps.epoch, self.run.evaluate(steps.state))
        row |= {"kind": "evaluation"}
        self.hooks.report(self.run, row)
        self._write([row])

    def _save(self, steps: StepOutput, metrics: EpochMetrics, *, last: bool) -> None:
        """Save the state, and what a checkpoint says of the run beside it.

        Where each process has its own rows, the state of the iterators of all.
        """
        run = self.run
        position = steps.position.to_json()
        if self.local_batches:
            position["iterator"] = run.group.all_gather(position["iterator"])

        def described() -> Meta:
            self.hooks.save(run, steps.step)
            if self.coordinator:
                self.coordinator.flush()
            return {
                **run.settings,
                "position": position,
                "tally": metrics.to_json(),
                **members_meta(run.program),
                "rollbacks": self.rollbacks.to_json(),
                "callbacks": self.hooks.to_json(),
            }

        canonical = functools.partial(run.program.to_canonical, run.state)
        with self.dog.work("save"):
            self.saving.save(steps.step, canonical, described, steps.residuals, last=last)

    def _go_back(self, calls: Calls) -> tuple[TrainState, EpochMetrics]:
        """Go on from the newest checkpoint; drop what was logged after it."""
        with self.dog.work("save"):
            state, position, metrics = self.begin(True)
            step = state.steps_taken
            if self.log:
                self.log.cut(step)
            self.rollbacks.write(self.log, step)
            self.run.go_back(state)
            calls.restart(state, position)
        return state, metrics

    def _write(self, rows: Iterable[Row]) -> None:
        if self.log:
            for row in rows:
                self.log.write(row)

    def _summary(self, metrics: EpochMetrics) -> tuple[str, float]:
        servers = f"  {self.coordinator.summary()}" if self.coordinator else ""
        return metrics.summary() + servers, metrics.examples_per_second


def evaluated(
    program: Program, data: PyTree | Iterable[PyTree] | None, dog: Watchdog, state: TrainState
) -> dict[str, Any] | None:
    """Return the metrics of a state on evaluation data; None without them."""
    if data is None:
        return None
    with dog.work("evaluate"):
        return program.evaluate(state, data)


def saved_text(checkpoints: Checkpoints | None, group: ProcessGroup) -> str:
    """Return a sentence on what was saved, for the error that ends training."""
    if checkpoints is None:
        return "Nothing was saved (no output directory)."
    group.leave()  # the others may have memory left, and not be here
    with contextlib.suppress(errors.CheckpointError, errors.PeerError):
        checkpoints.wait()
    steps = checkpoints.steps()
    if not steps:
        return "No checkpoint was saved yet."
    return f"The checkpoint of step {steps[-1]} is saved; resume under another plan goes on there."


def _is_due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def _event(event: str, step: int, **more: object) -> Row:
    return {"kind": "event", "event": event, "step": step, **more}


def _described(program: Program) -> str:
    return f"{program.plan.sizes_text()}, batches of {program.batch_size}"


def _stopped(reason: str, step: int, output: os.PathLike[str] | None, *, signal: bool) -> str:
    """Return the line that says why training has ended, and what was saved."""
    if output is None and not signal:
        return f"stopped after step {step}: {reason}"
    if output is None:
        return f"{reason}: stopped after step {step}; nothing was saved (no output directory)."
    where = os.fspath(output)
    return f"{reason}: stopped after step {step} and saved in {where}; resume continues."
