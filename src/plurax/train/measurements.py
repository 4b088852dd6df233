"""Estimate the step of a run before it runs, and measure it beside.

Without a machine nothing is traced, compiled or read. With one, the step is traced once more before
it is compiled; memory and bytes are read from the program that ran, after the first epoch.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxtyping import PyTree

from plurax import errors, tree
from plurax.analysis.estimate import Estimate, estimate
from plurax.analysis.measured import Measured, predicted_line
from plurax.execute.array_data import ArrayData
from plurax.execute.program import Program
from plurax.loop.data import Data
from plurax.loop.epoch_metrics import EpochMetrics
from plurax.loop.iterate import StepOutput, stays_resident
from plurax.loop.log_rows import Row
from plurax.machine import Machine


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
    found = estimate(program.task, optimizer, program.plan, like, machine)  # type: ignore[arg-type]
    if not (isinstance(source, ArrayData) and stays_resident(program, source, resident)):
        return found
    plan, steps = program.plan, source.batches_per_epoch
    order = 4 * steps * (plan.padded_size(program.batch_size) // plan.data)  # 4: int32
    memory = {**found.memory, "data": tree.byte_count(source.arrays) + order}
    return dataclasses.replace(found, memory=memory)


class Measurements:
    """What the steps of a run take, hold and send, beside their estimate; nothing without one.

    **Arguments:** `predicted`, by `estimate_run`; `note`, which shows a line to the user.

    **Attributes:** `measured`, over all epochs so far; None before the first.
    """

    def __init__(
        self,
        predicted: Estimate | None,
        machine: Machine | None,
        program: Program,
        note: Callable[[str], None],
    ) -> None:
        self.measured: Measured | None = None
        self._estimate, self._mesh, self._note = predicted, program.mesh, note
        self._steps, self._seconds = 0, 0.0
        self._shown: Measured | None = None
        if predicted is not None:
            note(predicted_line(predicted))
        elif machine is not None:
            note("predicted  nothing: the step of one network is estimated, not a population's")

    def add(self, steps: StepOutput, metrics: EpochMetrics, *, reported: bool = False) -> Row:
        """Add an epoch, unless it was `reported`, that is, added before.

        Return what its row gets: predicted and measured, under `estimate`.
        """
        if self._estimate is None or reported:
            return {}
        assert steps.compiled is not None
        read = self.measured or Measured.of(self._estimate, steps.compiled, self._mesh)
        self._steps += metrics.timed_steps
        self._seconds += metrics.seconds
        self.measured = _timed(read, self._seconds, self._steps)
        return {"estimate": _timed(read, metrics.seconds, metrics.timed_steps).to_json()}

    def show(self, *, at_end: bool = False) -> None:
        """Show what was measured, after the first epoch, and at the end if there were more."""
        if self.measured is not None and (self._shown is None or at_end):
            if self.measured != self._shown:
                self._note(self.measured.line())
            self._shown = self.measured


def _timed(read: Measured, seconds: float, steps: int) -> Measured:
    return dataclasses.replace(read, seconds=seconds / steps if steps else None)
