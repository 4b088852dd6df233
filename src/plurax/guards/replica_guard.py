"""Compare replicas while training: every some steps, and before anything is saved.

A comparison is dispatched behind the step and read one call later, so that the devices do not wait
for the host. Example, `check_replicas_every=100`, one step per call, a checkpoint at step 250:

    step 100   dispatched        101   read
    step 200   dispatched        201   read
    step 250   dispatched and read, then saved
"""

from typing import Any

from plurax import errors
from plurax.distributed.process_group import ProcessGroup
from plurax.execute.program import Program
from plurax.execute.replicas import ReplicaFinding
from plurax.loop.epoch_metrics import EpochMetrics
from plurax.loop.hook import CallHook, EndHook
from plurax.loop.run import Run
from plurax.state import TrainState


class ReplicaGuard(CallHook, EndHook):
    """The comparisons of a training run.

    **Arguments:** `program`; `every`, steps between two comparisons, or None for none; `group`, the
    processes that train together, for their names.
    """

    def __init__(self, program: Program, every: int | None, group: ProcessGroup) -> None:
        self._program, self._every, self._group = program, every, group
        self._last = 0  # a state that was restored is compared after its first call
        self._pending: tuple[int, Any] | None = None

    def on_call(self, run: Run) -> None:
        """Compare where it is due, and before the state is saved."""
        self.check(run.step, run.state, now=run.due.save)

    def on_end(self, run: Run, metrics: EpochMetrics | None) -> None:
        """Wait for the last comparison."""
        self.wait()

    def check(self, step: int, state: TrainState, *, now: bool = False) -> None:
        """Compare if it is due; with `now`, because the state is to be saved, wait for the result.

        Raises `ReplicaError`, also for the comparison before this one.
        """
        self.wait()
        if self._every is None:
            return
        if now or step // self._every > self._last // self._every:
            self._pending = step, self._program.replicas.compare(state)
        self._last = step
        if now:
            self.wait()

    def wait(self) -> None:
        """Wait for the comparison that was dispatched. Raises `ReplicaError`."""
        if self._pending is not None:
            (step, verdicts), self._pending = self._pending, None
            found = self._program.replicas.findings(verdicts)
            if found:
                raise replica_error(step, found, self._group)


def replica_error(
    step: int, findings: list[ReplicaFinding], group: ProcessGroup
) -> errors.ReplicaError:
    """Return the error for findings after a step: for those that are certain, if there are any."""
    certain = [one for one in findings if one.certain]
    named = certain or findings
    devices = [f"device {one.local} of {group.named(one.process)}" for one in named]
    leaves = list(dict.fromkeys(name for one in named for name in one.leaves))
    return errors.replicas_differ(step, devices, leaves, bool(certain))
