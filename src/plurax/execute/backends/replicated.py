"""A training step with the whole network on every device; only the batch is split.

The task's functions run unchanged, so XLA may fuse all of them. One device runs:

    for each microbatch: loss and gradient on its rows
    all-reduce the sums over `data`, once; on GPUs while the last microbatch's gradient is computed
    the update, the same on every device
"""

import copy
from collections.abc import Callable

import jax
import optax
from jaxtyping import PyTree

from plurax.execute import early_reduction
from plurax.execute.backends.backend import Backend
from plurax.execute.gradient import Totals, device_predict, evaluation, gradient
from plurax.execute.initial_state import new_state
from plurax.execute.layouts.state_shardings import StateShardings
from plurax.execute.rows import Chunk
from plurax.execute.step import Gradients, Metrics, make_apply, make_gradients, whole_update
from plurax.execute.totals import (
    coupled_totals,
    device_evaluation,
    device_totals,
    over_data,
    uneven_totals,
)
from plurax.jaxpr.cpu_forms import in_cpu_forms
from plurax.plan import Plan
from plurax.sharding.reduce_dtype import SumRounding
from plurax.sharding.rules import Rules
from plurax.state import TrainState
from plurax.task import Task


class ReplicatedBackend(Backend):
    """A task's functions on one device that has all of the network. See `Backend`."""

    layout: StateShardings
    manual_axes = frozenset({"data"})

    def __init__(
        self,
        task: Task,
        optimizer: optax.GradientTransformation,
        plan: Plan,
        *,
        platform: str | None = None,
    ) -> None:
        self.task, self.optimizer, self.plan = task, optimizer, plan
        self._platform = platform
        like = jax.eval_shape(lambda: new_state(task, optimizer, jax.random.key(0)))
        stacked = [False] * len(jax.tree.leaves(like.params))
        self.layout = StateShardings(like, plan, Rules((), {}), {}, stacked, frozen=task.frozen)

    def of(self, task: Task, optimizer: optax.GradientTransformation) -> "ReplicatedBackend":
        """Return a copy for another member of a population."""
        other = copy.copy(self)
        other.task, other.optimizer = task, optimizer
        return other

    def own(self, state: TrainState) -> TrainState:
        """Return the state: every device has all of it."""
        return state

    def gradients(self, *, split: bool = True) -> Callable[..., Gradients]:
        """Return `(state, rows, count, first=None) -> gradients`, reduced over all devices."""
        plan = self.plan
        fun = gradient(self.task, plan.precision, plan.batch_dim, plan.remat, ordered=True)
        if self._platform == "cpu":
            fun = in_cpu_forms(fun)
        if not self.task.coupled:
            rounding = SumRounding(plan.reduce_dtype, self._platform)
            reduce, last = over_data(plan.data, rounding), None
            if early_reduction.reduces_early(plan, self._platform):
                last = early_reduction.reduced_gradient(fun, rounding)
                fun, reduce = early_reduction.in_order(fun), over_data(1)
            totals = device_totals(fun, plan.replica_microbatches, reduce, last)
        else:
            totals = (coupled_totals if split else uneven_totals)(fun, plan.most_microbatches)
        return make_gradients(totals)

    def apply(
        self, *, freeze: bool = False, select: bool = False
    ) -> Callable[[TrainState, Gradients], tuple[TrainState, Metrics]]:
        """Return `(state, gradients) -> (state, metrics)`, the same on every device."""
        update = whole_update(self.optimizer, self.task.frozen)
        return make_apply(update, self.layout.gradient_dtypes, freeze=freeze, select=select)

    def evaluate(self) -> Callable[[PyTree, PyTree, PyTree, Chunk], Totals]:
        """Return `(params, model_state, rows, chunk) -> totals` on one device."""
        return device_evaluation(evaluation(self.task, self.plan.precision), self.plan.data)

    def predict(self) -> Callable[[PyTree, PyTree, PyTree], PyTree]:
        """Return `(params, model_state, inputs) -> outputs` on one device, for its own rows."""
        return device_predict(self.task, self.plan.precision)
