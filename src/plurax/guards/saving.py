"""Save while training goes on: a disk that is full, slow, read-only or gone does not end it.

Example, a checkpoint every 100 steps, `ATTEMPTS` = 3:

    step 100    saved
    step 200    no room: one warning, a row in the log; the checkpoint of step 100 stays
    step 300    no room: a row in the log
    step 400    saved, for there is room again: a note, and the count starts anew
    step 500    is still being written at step 600: after `PATIENCE` that one is left out

Had step 400 failed too, training would have stopped with a `SavingStoppedError`.
"""

import contextlib
import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

from plurax import errors, tree
from plurax.checkpoint import Checkpoints
from plurax.checkpoint.manager import Meta
from plurax.checkpoint.restore import members_meta
from plurax.distributed.process_group import ProcessGroup
from plurax.guards.rollback import Rollbacks
from plurax.loop.hook import CallHook, CheckpointHook, RewindHook, RunSnapshot
from plurax.loop.run import Run
from plurax.run_folder.log import MetricsLog
from plurax.state import TrainState
from plurax.user_frames import warn

ATTEMPTS = 3
"""Saves that fail in a row before training stops."""


PATIENCE = 5.0
"""Seconds that training waits for the save before, once, until that has ended."""


class Saving(CallHook, CheckpointHook, RewindHook):
    """Saves a run, and bears a disk that fails.

    **Arguments:** `rollbacks`, which a checkpoint records; `log`, None in processes that write
    none; `note`, which shows a line to the user; `group`, the processes that save together.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        rollbacks: Rollbacks,
        log: MetricsLog | None,
        note: Callable[[str], None],
        group: ProcessGroup,
    ) -> None:
        self._checkpoints, self._rollbacks, self._log = checkpoints, rollbacks, log
        self._note, self._group = note, group
        self._saved: int | None = max(checkpoints.steps(), default=None)
        self._writing: int | None = None
        self._failed = 0
        self._alarmed = self._slow = False

    def newest(self) -> int | None:
        """Return the step of the newest checkpoint, None without one."""
        return self._saved

    def check(self, step: int) -> None:
        """Notice, without waiting, what failed in the background.

        Raises `SavingStoppedError` after `ATTEMPTS` failures in a row.
        """
        if self._writing is not None and not self._checkpoints.busy():
            self._finish(step)
        if self._log and self._log.trouble and not self._alarmed:
            self._alarm(step, step, f"{self._log.path}: {self._log.trouble.strerror}")

    def on_call(self, run: Run) -> None:
        """Notice what failed in the background."""
        self.check(run.step)

    def on_checkpoint(self, run: Run, snapshot: RunSnapshot) -> None:
        """Save, with what resuming needs to know of members and rollbacks."""

        def meta() -> Meta:
            rollbacks = self._rollbacks.to_json()
            return {**snapshot.meta(), **members_meta(run.program), "rollbacks": rollbacks}

        self.save(dataclasses.replace(snapshot, meta=meta))

    def on_rewind(self, run: Run) -> None:
        """Take the checkpoint that training goes back to for the newest."""
        self._saved = run.step

    def wait(self, step: int) -> None:
        """Wait for the save under way. Raises as `check`."""
        if self._writing is not None:
            self._finish(step)

    def save(self, snapshot: RunSnapshot) -> None:
        """Save in the background.

        `snapshot.meta` writes what has to be on disk before, and raises `DiskError` where it
        cannot.

        Where the save before is still being written, this one is left out, so that training does
        not wait for a slow disk. At the last it waits for both, reads back what was written, and
        tries again where that fails.

        Raises `SavingStoppedError` after `ATTEMPTS` failures in a row.
        """
        if not snapshot.last and self._checkpoints.busy(0.0 if self._slow else PATIENCE):
            self._leave_out(snapshot.step)
            return
        if self._writing is not None:
            self._finish(snapshot.step)
        started = self._start(snapshot)
        while snapshot.last and not (started and self._finish(snapshot.step, verify=True)):
            started = self._start(snapshot)

    def _start(self, snapshot: RunSnapshot) -> bool:
        """Start to save, and return whether the disk took what has to be written at once."""
        step = snapshot.step
        try:
            # No checkpoint is ever ahead of its logs.
            meta = snapshot.meta()
            log = self._group.on_primary(self._log.flush if self._log else lambda: None)
        except errors.DiskError as error:
            self._fail(step, step, error)
            return False
        try:
            self._checkpoints.save(snapshot.state(), {**meta, "log": log}, snapshot.residuals)
        except (errors.DiskError, OSError) as error:
            self._fail(step, step, error)
            return False
        self._writing = step
        return True

    def _leave_out(self, step: int) -> None:
        if not self._slow:
            self._note(f"step {step} is not saved: step {self._writing} is still being written")
        self._slow = True
        self._event("save left out", step)

    def _finish(self, step: int, *, verify: bool = False) -> bool:
        """Wait for the save under way, and return whether it succeeded."""
        assert self._writing is not None
        saved, self._writing, self._slow = self._writing, None, False
        try:
            self._checkpoints.wait()
            if verify:
                self._checkpoints.verify(saved)
        except (errors.DiskError, OSError) as error:
            self._fail(step, saved, error)
            return False
        if self._failed:
            self._note(f"step {saved} is saved; saving works again")
            self._event("saving works again", step)
        self._saved, self._failed, self._alarmed = saved, 0, False
        return True

    def _fail(self, step: int, saving: int, error: Exception) -> None:
        """Count a failed save, warn at the first, and stop training at the last."""
        self._failed += 1
        self._alarm(step, saving, str(error))
        if self._failed >= ATTEMPTS:
            kept = "no checkpoint is there, so resume starts from the beginning"
            if self._saved is not None:
                kept = f"the checkpoint of step {self._saved} is kept, and resume goes on there"
            raise errors.SavingStoppedError(
                f"training stopped at step {step}: {self._failed} saves in a row failed, and the "
                f"last {step - (self._saved or 0)} steps are not saved; {kept}.\n  the last "
                f"reason: {error}\nMake room on the disk of {self._checkpoints.directory}, or see "
                "why it cannot be written, then resume."
            ) from error

    def _alarm(self, step: int, saving: int, reason: str) -> None:
        self._event("save failed", step, saving=saving, reason=reason)
        text = f"step {saving} could not be saved, and training goes on: {reason}"
        if self._alarmed:
            self._note(text)
            return
        self._alarmed = True
        warn(
            f"{text}. Older checkpoints are kept, and the next save tries again; after {ATTEMPTS} "
            "failures in a row training stops.",
            errors.SaveFailedWarning,
        )

    def _event(self, event: str, step: int, **more: object) -> None:
        if self._log:
            self._log.write({"kind": "event", "event": event, "step": step, **more})


def check_room(output: Path, state: TrainState) -> None:
    """Raise `CheckpointError` where the disk of `output` has no room for one checkpoint.

    **Arguments:** `state`, its shapes.
    """
    folder = next(one for one in (output, *output.absolute().parents) if one.exists())
    parts = (state.params, state.opt_state, state.model_state)
    needed = sum(map(tree.byte_count, parts))
    with contextlib.suppress(OSError):  # a file system that does not say
        free = shutil.disk_usage(folder).free
        if free < needed:
            raise errors.DiskError(
                f"a checkpoint takes {tree.human_bytes(needed)}, and the disk of {output} has "
                f"{tree.human_bytes(free)} left. Make room, or give an output directory on another "
                "disk."
            )
