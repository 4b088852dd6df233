"""Show how training goes on: its steps on a bar, its epochs in lines."""

import os
from collections.abc import Callable, Iterator

from plurax.loop.epoch_metrics import EpochMetrics
from plurax.loop.hook import CallsHook, EndHook, MetricsHook, RowsHook
from plurax.loop.iterate import StepOutput
from plurax.loop.log_rows import Row
from plurax.loop.run import Run
from plurax.progress.training_progress import TrainingProgress


class ProgressHook(CallsHook, MetricsHook, RowsHook, EndHook):
    """Shows a run on a bar.

    **Arguments:** `more`, which returns what is shown beside the metrics.
    """

    def __init__(self, bar: TrainingProgress, more: Callable[[], str]) -> None:
        self._bar, self._more = bar, more

    def on_calls(self, run: Run, calls: Iterator[StepOutput]) -> Iterator[StepOutput]:
        """Show that the first call compiles."""
        if run.stopped is not None:
            text = f"the run had ended at step {run.step}, nothing is trained: {run.stopped}"
            self._bar.note(text)
        program = run.program
        what = f"{program.plan.sizes_text()}, batches of {program.batch_size}"
        return self._bar.compiled(calls, what)

    def on_metrics(self, run: Run, metrics: EpochMetrics) -> None:
        """Show the step."""
        more = self._more()
        text = metrics.summary() + (f"  {more}" if more else "")
        self._bar.advance(run.step, run.epoch, text, metrics.examples_per_second)
        self._end_if_closed(run)

    def on_rows(self, run: Run, rows: list[Row]) -> None:
        """Show epochs."""
        for row in rows:
            if row["kind"] == "epoch":
                self._bar.epoch(row)
                self._end_if_closed(run)

    def _end_if_closed(self, run: Run) -> None:
        """End the run, as a signal would, where nobody reads any more what is printed."""
        if self._bar.closed:
            run.interrupted = run.interrupted or "SIGPIPE"

    def on_end(self, run: Run, metrics: EpochMetrics | None) -> None:
        """Say why training has ended before its last epoch, if it has."""
        if run.call is not None and run.due.end is not None:
            signal = run.due.end == run.interrupted
            self._bar.note(_stopped(run.due.end, run.step, run.output, signal=signal))


def _stopped(reason: str, step: int, output: os.PathLike[str] | None, *, signal: bool) -> str:
    """Return the line that says why training has ended, and what was saved."""
    if output is None and not signal:
        return f"stopped after step {step}: {reason}"
    if output is None:
        return f"{reason}: stopped after step {step}; nothing was saved (no output directory)."
    where = os.fspath(output)
    return f"{reason}: stopped after step {step} and saved in {where}; resume continues."
