"""Train with smaller steps once a metric no longer improves."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import PyTree

from plurax import errors
from plurax.callbacks.followed_metric import FollowedMetric
from plurax.callbacks.wrapped_optimizer import wrapped
from plurax.loop.hook import EpochHook, EvaluationHook, OptimizerHook, StartHook, StateHook
from plurax.loop.log_rows import Row
from plurax.loop.run import Run
from plurax.validate import Mode, whole_number

SCALE = "learning_rate_scale"
"""The hyperparameter that the callback adds to the optimizer, and its name in the rows."""


class ReduceOnPlateau(OptimizerHook, StartHook, EvaluationHook, EpochHook, StateHook):
    """Multiply the learning rate by a factor whenever a metric has stopped to improve.

        updates = scale * optimizer's updates        in every step, under every plan
        scale = factor * scale                       after `patience` values without improvement

    So it works with every optimizer, and on top of its schedule. The scale is a part of the
    optimizer's state, thus in every checkpoint; of members each has its own. A metric of the
    evaluation is looked at after each evaluation, within an epoch too (`fit(evaluate_every=...)`),
    others after each epoch. The rows of epochs have the scale as `learning_rate_scale`.

    **Arguments:**

    - `metric`: its name in the rows, such as `"eval_loss"`.
    - `factor`: between 0 and 1.
    - `patience`: values in a row without improvement.
    - `mode`: whether the smallest (`"min"`) or largest (`"max"`) value is the best; by default as
      the name says: the largest of an accuracy, AUC, F1, IoU, R², reward and the like.
    - `min_delta`: by how much a value has to be better to count, in the metric's unit.

    Raises `TaskError` for other values, for a metric that a row does not have, and with parameter
    servers. `torch.optim.lr_scheduler.ReduceLROnPlateau` and `keras.callbacks.ReduceLROnPlateau`
    do the same.

    >>> ReduceOnPlateau("eval_loss", factor=0.1, patience=2)
    ReduceOnPlateau('eval_loss', factor=0.1, patience=2)
    """

    def __init__(
        self,
        metric: str,
        factor: float = 0.5,
        patience: int = 3,
        *,
        mode: Mode | None = None,
        min_delta: float = 0.0,
    ) -> None:
        count = whole_number(patience)
        if count is None:
            raise errors.callback_count("ReduceOnPlateau", "patience", patience)
        if isinstance(factor, bool) or not isinstance(factor, float | int) or not 0 < factor < 1:
            raise errors.TaskError(
                f"ReduceOnPlateau(factor={factor!r}): give a number > 0 and < 1, such as 0.5; the "
                "learning rate is multiplied by it."
            )
        self._followed = FollowedMetric("ReduceOnPlateau", metric, mode, min_delta)
        self._factor, self._patience = float(factor), count

    def __repr__(self) -> str:
        metric = self._followed.metric
        return f"ReduceOnPlateau({metric!r}, factor={self._factor}, patience={self._patience})"

    def wrap_optimizer(self, optimizer: Any) -> Any:
        """Return the optimizer with its updates scaled."""
        return wrapped(_scaled, optimizer)

    def on_start(self, run: Run) -> None:
        """Refuse parameter servers, and a metric that no row will have, before the first step."""
        self._followed.begin(run)
        run.set_hyperparams()

    def on_evaluation(self, run: Run, row: Row) -> None:
        """Look at a metric of the evaluation."""
        if self._followed.metric.startswith("eval_"):
            self._look(run, row)

    def on_epoch(self, run: Run, row: Row) -> None:
        """Look at any other metric, and log the scale."""
        if not self._followed.metric.startswith("eval_"):
            self._look(run, row)
        scale = run.hyperparams[SCALE]
        row[SCALE] = float(np.median(scale))
        if run.members is not None:
            row["members"][SCALE] = scale.tolist()

    def _look(self, run: Run, row: Row) -> None:
        """Count values without improvement, and reduce the scale where there were enough."""
        self._followed.improved(row)
        reduce = self._followed.waited >= self._patience
        if reduce.any():
            self._followed.waited = np.where(reduce, 0, self._followed.waited)
            scale = run.hyperparams[SCALE] * np.where(reduce, self._factor, 1.0)
            run.set_hyperparams(**{SCALE: scale if run.members is not None else scale[0]})

    def get_state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps; the scale is in the optimizer's state."""
        return self._followed.to_json()

    def set_state(self, state: dict[str, Any]) -> None:
        """Take what a checkpoint kept."""
        self._followed.restore(state)


def _scaled(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Return an optimizer that multiplies its updates by a number kept in its state."""

    def init(params: PyTree) -> PyTree:
        return {"hyperparams": {SCALE: jnp.ones((), jnp.float32)}}

    def update(updates: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, PyTree]:
        scale = state["hyperparams"][SCALE]
        return jax.tree.map(lambda update: update * scale.astype(update.dtype), updates), state

    return optax.chain(optimizer, optax.GradientTransformation(init, update))
