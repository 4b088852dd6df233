"""Keep the state whose metric was the best.

Of members each keeps the state of its own best epoch. Example, three members after epochs 1 and 2:

    eval_loss    0.5 0.4 0.9       all are better than nothing         kept: epoch 1 1 1
    eval_loss    0.3 0.6 0.7       members 0 and 2 are better          kept: epoch 2 1 2

It is written in the background, and what a checkpoint says of the best state agrees with it:

    best state of an earlier step      on disk before the checkpoint is begun
    best state of the same step        may be lost in a kill: the checkpoint has that state
    a save that failed                 the best is the one on disk again; a later one may be better
"""

import contextlib
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool

from plurax import errors
from plurax.callbacks.followed_metric import FollowedMetric
from plurax.checkpoint import Checkpoints
from plurax.checkpoint.restore import members_meta, restore
from plurax.ensemble.select import take_members
from plurax.execute.program import Program
from plurax.loop.hook import EpochHook, SaveHook, StartHook, StateHook, StopHook
from plurax.loop.log_rows import Row
from plurax.loop.run import Run
from plurax.state import TrainState
from plurax.user_frames import warn
from plurax.validate import Mode


class KeepBest(StartHook, EpochHook, SaveHook, StopHook, StateHook):
    """Keep the state of the epoch whose metric was the best.

    With an `output` it is saved in the folder `best` there, as any checkpoint is; else a copy stays
    on the devices, as for members in any case.

    **Arguments:** `metric`, `mode` and `min_delta` as for `EarlyStopping`.

    A disk that fails for a while ends nothing: a `SaveFailedWarning` says which state was not kept.

    Raises `TaskError` for another mode, and for a metric that a row does not have;
    `CheckpointError` where the folder cannot be written at the start.
    """

    def __init__(
        self, metric: str = "eval_loss", *, mode: Mode | None = None, min_delta: float = 0.0
    ) -> None:
        self._followed = FollowedMetric("KeepBest", metric, mode, min_delta)
        self._saved: Checkpoints | None = None
        self._best: TrainState | None = None
        self._step = -1  # of the last that was better
        self._on_disk: list[float] | None = None
        self._writing = self._restored = False

    def on_start(self, run: Run) -> None:
        """Go on from what a run that is resumed has kept."""
        self._followed.begin(run)
        self._best = None
        if run.output is None:
            return
        # Two are kept: a run may resume before the newer of them.
        self._saved = Checkpoints(run.output / "best", keep=2, group=run.group)
        self._go_on(run)

    def _go_on(self, run: Run) -> None:
        """Go on at a checkpoint, after a start or a rollback, with what is on disk."""
        assert self._saved is not None
        self._restored = self._writing = False
        if run.step == 0 or self._followed.best is None:
            self._on_disk = None
            self._saved.remove_after(-1)
            return
        self._saved.remove_after(self._step)
        if run.members is not None:
            state = run.program.to_canonical(run.state)
            restored = restore(run.program, self._saved, lambda new, _: take_members(state, new))
            self._best = None if restored is None else run.program.to_canonical(restored[0])
        now, self._on_disk = self._values(), run.group.on_primary(self._read)
        if self._on_disk is not None and now is not None:  # a population may have grown
            self._on_disk += [math.nan] * (len(now) - len(self._on_disk))
        lost = _differ(now, self._on_disk)
        if not lost.any():
            return
        if self._step == run.step:  # killed while it was written
            self._save(run, lost)
        else:
            self._forget(f"step {self._step} is not in {self._saved.directory}")

    def on_epoch(self, run: Run, row: Row) -> None:
        """Keep the state where it is the best."""
        self._settle(run)
        better = self._followed.improved(row)
        if better.any():
            self._step = run.step
            self._save(run, better)

    def on_save(self, run: Run, step: int) -> None:
        """Wait for the best state of an earlier step."""
        if self._step < step:
            self._settle(run)

    def _save(self, run: Run, better: Bool[np.ndarray, "M"]) -> None:
        """Keep the state of those that are better, and begin to write it."""
        state = run.program.to_canonical(run.state)
        if run.members is not None and self._best is not None:
            self._best = state = _merged(better, state, self._best)
        elif run.members is not None or self._saved is None:
            self._best = state = jax.tree.map(jnp.copy, state)  # the next step reuses its memory
        if self._saved is not None:
            said = {"metric": self._followed.metric, "best": self._values()}
            try:
                self._saved.save(state, {"step": run.step, **said, **members_meta(run.program)})
                self._writing = True
            except errors.DiskError as error:
                self._forget(f"step {run.step} could not be saved: {error}")

    def _settle(self, run: Run, *, again: bool = False) -> None:
        """Wait for the save under way; where it failed, try `again` while the state is there."""
        if self._saved is None or not (self._writing or self._restored):
            return
        self._writing = False
        try:
            self._saved.wait()
            if self._restored:
                self._go_on(run)
                return
            self._on_disk = self._values()
        except errors.DiskError as error:
            if again and self._step == run.step:
                self._save(run, _differ(self._values(), self._on_disk))
                self._settle(run)
            else:
                self._forget(f"step {self._step} could not be saved: {error}")

    def _forget(self, why: str) -> None:
        """Go back to the best that is on disk, and say so."""
        warn(
            f"KeepBest: the state of {why}. The best before it is kept, and the next state that is "
            "better than that is saved.",
            errors.SaveFailedWarning,
        )
        self._followed.restore({"best": self._on_disk})

    def _values(self) -> list[float] | None:
        return self._followed.to_json()["best"]

    def _read(self) -> list[float] | None:
        """Return the best values of the state on disk."""
        assert self._saved is not None
        meta = [self._saved.run_meta(step) for step in self._saved.steps()[-1:]]
        return meta[0]["best"] if meta and meta[0] else None

    def on_stop(self, run: Run) -> None:
        """Wait for the save under way."""
        if self._saved is not None:
            with contextlib.closing(self._saved):
                self._settle(run, again=not run.failed)

    def restore(self, program: Program) -> TrainState:
        """Return the best state, placed for a program such as `result.program`.

        Raises `TaskError` where none was kept.
        """
        best = self._best
        if best is None and self._saved is not None:
            restored = Checkpoints(self._saved.directory).restore(program.canonical_shapes)
            best = None if restored is None else restored[0]
        if best is None:
            raise errors.TaskError(
                f"KeepBest({self._followed.metric!r}) has kept no state yet: it keeps one after "
                f"the first epoch whose {self._followed.metric} is a finite number."
            )
        return program.place(best)

    def get_state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {"best": self._values(), "step": self._step}

    def set_state(self, state: dict[str, Any]) -> None:
        """Take what a checkpoint kept."""
        self._followed.restore(state)
        self._step, self._restored = state["step"], True


def _differ(now: list[float] | None, before: list[float] | None) -> Bool[np.ndarray, "M"]:
    """Return whose best value is another than before."""
    if now is None or before is None or len(now) != len(before):
        return np.ones(len(now or [0.0]), bool)
    return ~np.isclose(now, before, rtol=0.0, atol=0.0, equal_nan=True)


@jax.jit
def _merged(better_M: Bool[np.ndarray, "M"], new: TrainState, old: TrainState) -> TrainState:
    """Return the new state of the members that are better, and the old one of the others."""

    def chosen(new_M: jax.Array, old_M: jax.Array) -> jax.Array:
        return jnp.where(better_M.reshape(-1, *[1] * (new_M.ndim - 1)), new_M, old_M)

    return jax.tree.map(chosen, new, old)
