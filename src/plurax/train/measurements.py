"""Estimate the step of a run before it runs, and measure it beside.

Without a machine nothing more is traced. With one, the step is traced once more before it is
compiled; memory and bytes are read from the program that ran, after the first epoch.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxtyping import PyTree

from plurax import errors, tree
from plurax.analysis.compiled_figures import CompiledFigures
from plurax.analysis.estimate import Estimate, estimate
from plurax.analysis.measured import Measured, predicted_line
from plurax.execute.array_data import ArrayData
from plurax.execute.program import Program
from plurax.loop.data import Data
from plurax.loop.epoch_metrics import EpochMetrics
from plurax.loop.hook import EndHook, EpochHook, MetricsHook, RowsHook
from plurax.loop.iterate import stays_resident
from plurax.loop.log_rows import Row
from plurax.loop.run import Run
from plurax.machine import Machine
from plurax.run_folder.run_file import note_compiled
from plurax.user_frames import warn


def estimate_run(
    program: Program,
    optimizer: Any,
    like: PyTree,
    source: Data,
    resident: bool | None,
    machine: Machine | None,
) -> Estimate | None:
    """Return the estimate of a run's step, data that stay on the devices included.

    None without a machine, and for a population. Raises `MachineError` for a plan of more devices
    than the machine has.
    """
    if machine is None:
        return None
    if not isinstance(machine, Machine):
        raise errors.machine_wrong_type(machine)
    if program.members is not None:
        return None
    estimated = estimate(program.task, optimizer, program.plan, like, machine)
    if not (isinstance(source, ArrayData) and stays_resident(program, source, resident)):
        return estimated
    plan, steps = program.plan, source.batches_per_epoch
    order = 4 * steps * (plan.placed_rows(program.batch_size) // plan.data)  # 4: int32
    memory = {**estimated.memory, "data": tree.byte_count(source.arrays) + order}
    return dataclasses.replace(estimated, memory=memory)


class Measurements(MetricsHook, EpochHook, EndHook):
    """What the steps of a run take, hold and send, beside their estimate.

    **Arguments:** `predicted`, by `estimate_run`; `note`, which shows a line to the user.

    **Attributes:** `measured`, over all epochs so far, None before the first; `shown`, of it.
    """

    def __init__(self, predicted: Estimate, program: Program, note: Callable[[str], None]) -> None:
        self.measured: Measured | None = None
        self._estimate, self._mesh, self._note = predicted, program.mesh, note
        self._steps, self._seconds = 0, 0.0
        self.shown: Measured | None = None
        self._metrics: EpochMetrics | None = None
        note(predicted_line(predicted))

    def on_metrics(self, run: Run, metrics: EpochMetrics) -> None:
        """Keep the sums, for the row that follows."""
        self._metrics = metrics

    def on_epoch(self, run: Run, row: Row) -> None:
        """Add the epoch; its row gets predicted and measured, under `estimate`."""
        assert self._metrics is not None
        row["estimate"] = self._add(run, self._metrics)

    def on_end(self, run: Run, metrics: EpochMetrics | None) -> None:
        """Add what no row has reported."""
        if metrics is not None and run.call is not None:
            self._add(run, metrics)

    def _add(self, run: Run, metrics: EpochMetrics) -> dict[str, Any]:
        """Add the steps of an epoch, and return what its row says of them."""
        assert run.call is not None
        assert run.call.compiled is not None
        read = self.measured or Measured.of(self._estimate, run.call.compiled, self._mesh)
        self._steps += metrics.timed_steps
        self._seconds += metrics.seconds
        self.measured = _timed(read, self._seconds, self._steps)
        return _timed(read, metrics.seconds, metrics.timed_steps).to_json()

    def show(self) -> None:
        """Show what was measured, if anything is new."""
        if self.measured is not None and self.measured != self.shown:
            self._note(self.measured.line())
            self.shown = self.measured


def measure_run(
    predicted: Estimate | None,
    machine: Machine | None,
    program: Program,
    note: Callable[[str], None],
) -> Measurements | None:
    """Return the measurements of a run beside its estimate, None where nothing is estimated."""
    if predicted is not None:
        return Measurements(predicted, program, note)
    if machine is not None:
        note("predicted  nothing: the step of one network is estimated, not a population's")
    return None


class MeasuredLine(RowsHook, EndHook):
    """Shows what was measured, below the line of the first epoch, and at the end if it is more."""

    def __init__(self, measurements: Measurements) -> None:
        self._measurements = measurements

    def on_rows(self, run: Run, rows: list[Row]) -> None:
        """Show it below the first epoch."""
        if self._measurements.shown is None:
            self._measurements.show()

    def on_end(self, run: Run, metrics: EpochMetrics | None) -> None:
        """Show what all epochs say."""
        self._measurements.show()


class CompiledNote(RowsHook, EndHook):
    """Writes what the compiler made of the program to `run.toml`, once: after the first epoch.

    **Arguments:** `output`, the folder of the run.
    """

    def __init__(self, output: Path) -> None:
        self._output, self._noted = output, False

    def on_rows(self, run: Run, rows: list[Row]) -> None:
        """Write it once an epoch is logged."""
        if not self._noted and any(row["kind"] == "epoch" for row in rows):
            self._note(run)

    def on_end(self, run: Run, metrics: EpochMetrics | None) -> None:
        """Write it of a run that ends within its first epoch."""
        if not self._noted:
            self._note(run)

    def _note(self, run: Run) -> None:
        self._noted = True
        if run.call is None or run.call.compiled is None:
            return
        try:
            figures = CompiledFigures.of(run.program, run.call.compiled)
            if figures is not None:
                note_compiled(self._output, figures.table())
        except Exception as error:  # figures are no reason to end a run
            warn(
                f"the figures of the compiled program are not in {self._output}/run.toml: {error}. "
                "Training goes on without them; what is saved is not affected.",
                errors.SaveFailedWarning,
            )


def _timed(read: Measured, seconds: float, steps: int) -> Measured:
    return dataclasses.replace(read, seconds=seconds / steps if steps else None)
