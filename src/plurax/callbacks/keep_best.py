"""Keep the state whose metric was the best.

Of members each keeps the state of its own best epoch. Example, three members after epochs 1 and 2:

    eval_loss    0.5 0.4 0.9       all are better than nothing         kept: epoch 1 1 1
    eval_loss    0.3 0.6 0.7       members 0 and 2 are better          kept: epoch 2 1 2
"""

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool

from plurax import errors
from plurax.callbacks.followed_metric import FollowedMetric, Mode
from plurax.execute.program import Program
from plurax.state import TrainState
from plurax.train.checkpoint import Checkpoints
from plurax.train.hooks import Run
from plurax.train.log import Row
from plurax.train.restore import members_meta


class KeepBest:
    """Keep the state of the epoch whose metric was the best.

    With an `output` it is saved in the folder `best` there, as any checkpoint is; else a copy stays
    on the devices, as for members in any case.

    **Arguments:** `metric`, `mode` and `min_delta` as for `EarlyStopping`.

    Raises `TaskError` for another mode, and for a metric that a row does not have;
    `CheckpointError` where the state cannot be saved.
    """

    def __init__(
        self, metric: str = "eval_loss", *, mode: Mode | None = None, min_delta: float = 0.0
    ) -> None:
        self._followed = FollowedMetric("KeepBest", metric, mode, min_delta)
        self._saved: Checkpoints | None = None
        self._best: TrainState | None = None

    def on_start(self, run: Run) -> None:
        """Go on from what a run that is resumed has kept."""
        self._best = None
        if run.output is None:
            return
        # Two are kept: a run may resume before the newer of them.
        self._saved = Checkpoints(run.output / "best", keep=2, group=run.group)
        if run.step == 0 or self._followed.best is None:
            self._saved.remove_after(-1)
            return
        self._saved.remove_after(run.step)
        if run.members is not None:
            restored = self._saved.restore(run.program.canonical_shapes)
            self._best = None if restored is None else restored[0]

    def on_epoch(self, run: Run, row: Row) -> None:
        """Keep the state where it is the best."""
        better = self._followed.improved(row)
        if not better.any():
            return
        state = run.program.to_canonical(run.state)
        if run.members is not None and self._best is not None:
            self._best = state = _merged(better, state, self._best)
        elif run.members is not None or self._saved is None:
            self._best = state = jax.tree.map(jnp.copy, state)  # the next step reuses its memory
        if self._saved is not None:
            said = {"metric": self._followed.metric, "best": self._followed.to_json()}
            self._saved.save(state, {"step": run.step, **said, **members_meta(run.program)})

    def on_stop(self, run: Run) -> None:
        """Wait for the save under way."""
        if self._saved is not None:
            with contextlib.closing(self._saved):
                self._saved.wait()

    def restore(self, program: Program) -> TrainState:
        """Return the best state, placed for a program such as `result.program`.

        Raises `TaskError` where none was kept.
        """
        best = self._best
        if best is None and self._saved is not None:
            restored = Checkpoints(self._saved.directory).restore(program.canonical_shapes)
            best = None if restored is None else restored[0]
        if best is None:
            raise errors.nothing_kept(self._followed.metric)
        return program.place(best)

    def get_state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {"best": self._followed.to_json()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Take what a checkpoint kept."""
        self._followed.restore(state["best"])


@jax.jit
def _merged(better_M: Bool[np.ndarray, "M"], new: TrainState, old: TrainState) -> TrainState:
    """Return the new state of the members that are better, and the old one of the others."""

    def chosen(new_M: jax.Array, old_M: jax.Array) -> jax.Array:
        return jnp.where(better_M.reshape(-1, *[1] * (new_M.ndim - 1)), new_M, old_M)

    return jax.tree.map(chosen, new, old)
