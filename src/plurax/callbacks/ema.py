"""Average the parameters over the steps."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from plurax import errors
from plurax.callbacks.wrapped_optimizer import wrapped
from plurax.loop.hook import EvaluationHook, OptimizerHook
from plurax.loop.log_rows import Row
from plurax.loop.run import Run
from plurax.state import TrainState


class EmaState(NamedTuple):
    """The state of an optimizer that also averages: its own, and the average."""

    inner: Any
    average: PyTree


class Ema(OptimizerHook, EvaluationHook):
    """Keep an exponential moving average of the parameters (Polyak & Juditsky, 1992).

        average = decay * average + (1 - decay) * params        after every step

    The average is part of the optimizer's state: it is computed in the compiled step, sharded as
    the parameters are, and in every checkpoint. A step that is left out leaves it as it was.

    **Arguments:** `decay`, in [0, 1); `evaluate`, whether to evaluate the average too, and add what
    is found to the rows of epochs under `eval_ema_...`.

    Raises `TaskError` for another decay.
    """

    def __init__(self, decay: float = 0.999, *, evaluate: bool = True) -> None:
        if isinstance(decay, bool) or not isinstance(decay, float | int) or not 0 <= decay < 1:
            raise errors.TaskError(
                f"Ema(decay={decay!r}): give a number ≥ 0 and < 1, such as 0.999."
            )
        self._decay, self._evaluate = decay, evaluate

    def wrap_optimizer(self, optimizer: Any) -> Any:
        """Return the optimizer with the average beside its own state."""
        return wrapped(_averaging, optimizer, self._decay)

    def on_evaluation(self, run: Run, row: Row) -> None:
        """Evaluate the average."""
        if not self._evaluate:
            return
        canonical = run.program.to_canonical(run.state)
        averaged = run.program.place(dataclasses.replace(canonical, params=self.params(canonical)))
        found = run.evaluate(averaged) or {}
        for name, value in found.items():
            row[f"eval_ema_{name}"] = float(jnp.median(jnp.asarray(value)))
            if run.members is not None:
                row["members"][f"eval_ema_{name}"] = jax.device_get(value).tolist()

    def params(self, state: TrainState) -> PyTree:
        """Return the average in a state that `fit` returned; frozen parameters are as they are.

        Raises `TaskError` for a state of a run without this callback.
        """
        if not isinstance(state.opt_state, EmaState):
            raise errors.TaskError(
                "the optimizer's state has no average of the parameters: train with "
                "callbacks=[plurax.callbacks.Ema(...)], and ask for params(result.state) of that "
                "run."
            )
        return jax.tree.map(
            lambda average, now: now if _is_frozen(average) else average,
            state.opt_state.average,
            state.params,
            is_leaf=_is_frozen,
        )


def _is_frozen(leaf: Any) -> bool:
    """Return whether an optimizer's tree has nothing here, because the parameter is not trained."""
    return isinstance(leaf, optax.MaskedNode)


def _averaging(
    optimizer: optax.GradientTransformation, decay: float
) -> optax.GradientTransformationExtraArgs:
    inner = optax.with_extra_args_support(optimizer)

    def init(params: PyTree) -> EmaState:
        return EmaState(inner.init(params), jax.tree.map(jnp.copy, params))

    def update(
        gradients: PyTree, state: EmaState, params: PyTree = None, **extra: Any
    ) -> tuple[PyTree, EmaState]:
        updates, own = inner.update(gradients, state.inner, params, **extra)
        moved = optax.apply_updates(params, updates)
        average = optax.incremental_update(moved, state.average, 1 - decay)
        return updates, EmaState(own, average)

    return optax.GradientTransformationExtraArgs(init, update)
