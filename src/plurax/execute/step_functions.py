"""The contract between a program and what it compiles: the functions of a step over whole arrays.

`Network` has the functions of one network, `Population` those of many. `Program` compiles them,
places batches and states, and calls them. Every function takes `arguments` after the state: what
all calls pass unchanged, such as the members' seeds and hyperparameters.

                 one network                          a population of K members
    init         (key, start) -> state                (members, start) -> states (K, ...)
    step         (state, rows, count)                 (states, members, rows, count)
                   -> state, metrics ()                 -> states, metrics (K,)
    loop         (state, data, rows, counts, ...)     (states, members, data, ...)
                   -> state, metrics (S,)               -> states, metrics (K, calls)
    evaluate     (params, model_state, rows, chunk)   (params, model_state, members, rows, chunk)
    predict      (params, model_state, rows)          (params, model_state, members, rows)
"""

import abc
from typing import Any

from jax.sharding import Mesh, NamedSharding
from jaxtyping import PyTree

from plurax.execute.backends.backend import Backend
from plurax.execute.compiler_options import Options
from plurax.execute.gradient import Totals
from plurax.execute.layouts.state_layout import StateLayout
from plurax.execute.step import Gradients, Metrics
from plurax.plan import Plan
from plurax.state import TrainState


class StepFunctions(abc.ABC):
    """The functions of a program. See the module's table.

    **Attributes:** `count`, the number of members, None for one network; `plan`; `mesh`;
    `options`, with which the functions are compiled; `backend`, of one network; `layout`, of the
    state; `metrics_sharding`, of the metrics of a step or loop; `outputs_sharding`, of predictions.
    """

    count: int | None
    plan: Plan
    mesh: Mesh
    options: Options
    backend: Backend
    layout: StateLayout
    metrics_sharding: NamedSharding
    outputs_sharding: NamedSharding

    @property
    @abc.abstractmethod
    def arguments(self) -> tuple[PyTree, ...]:
        """Arrays on the devices that follow the state in every call."""

    @abc.abstractmethod
    def trim(self, values: PyTree) -> PyTree:
        """Return results of a call without those of the members that only fill the slots."""

    @abc.abstractmethod
    def outputs(self, values: PyTree) -> PyTree:
        """Return predictions, rows leading, as users get them: `(N, ...)` or `(K, N, ...)`."""

    @abc.abstractmethod
    def init(self, *arguments: Any) -> TrainState:
        """Return a fresh stored state."""

    @abc.abstractmethod
    def step(self, state: TrainState, *arguments: Any) -> tuple[TrainState, Metrics]:
        """Update the state once: `(state, *arguments, rows, count)`, `count` of the rows real."""

    @abc.abstractmethod
    def gradients(self, state: TrainState, *arguments: Any) -> Gradients:
        """Return the first half of a step: `(state, *arguments, rows, count)`."""

    @abc.abstractmethod
    def apply(self, state: TrainState, *arguments: Any) -> tuple[TrainState, Metrics]:
        """Return the second half of a step: `(state, *arguments, gradients)`."""

    @abc.abstractmethod
    def check_order(self, order: tuple[Any, ...]) -> None:
        """Raise `BatchError` unless `loop` takes this order."""

    @abc.abstractmethod
    def loop(self, state: TrainState, *arguments: Any) -> tuple[TrainState, Metrics]:
        """Run many steps: `(state, *arguments, data, *order, first, stop)`."""

    @abc.abstractmethod
    def evaluate(self, params: PyTree, model_state: PyTree, *arguments: Any) -> Totals:
        """Return totals without gradient: `(params, model_state, *arguments, rows, chunk)`."""

    @abc.abstractmethod
    def predict(self, params: PyTree, model_state: PyTree, *arguments: Any) -> PyTree:
        """Return outputs, rows leading: `(params, model_state, *arguments, rows)`."""
