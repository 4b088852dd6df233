"""The functions of one network on all devices of a mesh.

A backend gives the functions of one device; `Network` runs them on every device, with the state
split as the layout says and rows split over `data`. Example, `Plan(data=2)`, a batch of 8 rows:

    argument    global       on one device
    state       (10, 6)      (10, 6)     replicated
    rows        (8, 3)       (4, 3)      P("data")
    count       ()           ()          8, or fewer where the last rows are padding
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from plurax import errors
from plurax.execute.backends.backend import Backend
from plurax.execute.backends.choose import make_backend
from plurax.execute.compiler_options import Options
from plurax.execute.epoch_loop import make_loop
from plurax.execute.gradient import Totals
from plurax.execute.initial_state import new_state
from plurax.execute.manual_axes import on_most_axes
from plurax.execute.rows import Chunk
from plurax.execute.step import Gradients, Metrics, Step, gradient_specs
from plurax.execute.step_functions import StepFunctions
from plurax.mesh import on_accelerator, replicated, split_rows, within
from plurax.plan import Plan
from plurax.state import TrainState
from plurax.task import Task


class Network(StepFunctions):
    """The functions of one network.

    **Arguments:** `task`, `optimizer`, `plan`, `mesh`; `batch`, of the largest size as
    `jax.ShapeDtypeStruct`s; `rows`, the sharding of a step's rows: split over `data`, or replicated
    where they do not divide; `backend`, made for them if None; `options` of the compiler.
    """

    arguments = ()
    count = None

    def __init__(
        self,
        task: Task,
        optimizer: optax.GradientTransformation,
        plan: Plan,
        mesh: Mesh,
        batch: PyTree,
        rows: NamedSharding,
        backend: Backend | None = None,
        options: Options = (),
    ) -> None:
        self.task, self.optimizer, self.plan, self.mesh = task, optimizer, plan, mesh
        self.backend = backend or make_backend(task, optimizer, plan, mesh, batch)
        self.layout = self.backend.layout
        self.metrics_sharding, self.outputs_sharding = replicated(mesh), split_rows(mesh)
        self._rows, self.options = rows, options

    def init(self, key: Any, start: Mapping[str, jax.Array]) -> TrainState:
        """Return a fresh stored state for the key of a seed, and parameters that start by path."""
        return self.layout.from_canonical(new_state(self.task, self.optimizer, key, start))

    def trim(self, values: PyTree) -> PyTree:
        """Return the values: one network fills no slots."""
        return values

    def outputs(self, values: PyTree) -> PyTree:
        """Return the values: their rows lead."""
        return values

    @property
    def _split(self) -> bool:
        return self._rows != replicated(self.mesh)

    @property
    def _step(self) -> Step:
        step = self.backend.step(split=self._split, select=on_accelerator(self.mesh))
        return self._on_devices(step, "sr." if self._split else "s..", "s.")

    def gradients(
        self, state: TrainState, rows: PyTree, count: Any, first: Any = None
    ) -> Gradients:
        """Return the sums over `rows`, leaves `(N, ...)`, of which `count` are real.

        `first` is the index of the first in the step's batch, where others compute the rest of it.
        """
        fun = self.backend.gradients(split=self._split)
        part = (count,) if first is None else (count, first)
        takes = ("sr" if self._split else "s.") + "." * len(part)
        sums: Gradients = self._on_devices(fun, takes, "g")(state, rows, *part)
        return sums

    def apply(self, state: TrainState, sums: Gradients) -> tuple[TrainState, Metrics]:
        """Update the state from the sums over a batch."""
        updated: tuple[TrainState, Metrics] = self._on_devices(
            self.backend.apply(select=on_accelerator(self.mesh)), "sg", "s."
        )(state, sums)
        return updated

    def step(self, state: TrainState, rows: PyTree, count: Any) -> tuple[TrainState, Metrics]:
        """Update the state once from `rows`, leaves `(N, ...)`, of which `count` are real."""
        return self._step(state, rows, count)

    def check_order(self, order: tuple[Any, ...]) -> None:
        """Raise `BatchError` unless it is the order of an epoch."""
        if not order:
            raise errors.BatchError(
                "program.loop of one network needs the order of an epoch: order = "
                "program.place_epoch(rows, counts), as "
                "plurax.train.ArrayData(...).epoch_order(epoch) returns rows and counts."
            )

    def loop(
        self, state: TrainState, data: PyTree, rows: Any, counts: Any, first: Any, stop: Any
    ) -> tuple[TrainState, Metrics]:
        """Run steps `first` to `stop` of an epoch. See `make_loop`."""
        return make_loop(self._step, self._rows)(state, data, rows, counts, first, stop)

    def evaluate(self, params: PyTree, model_state: PyTree, rows: PyTree, chunk: Chunk) -> Totals:
        """Return the totals of `rows`, a chunk of the data, without gradient."""
        evaluate = self._on_devices(self.backend.evaluate(), "pmr.", ".")
        totals: Totals = evaluate(params, model_state, rows, chunk)
        return totals

    def predict(self, params: PyTree, model_state: PyTree, rows: PyTree) -> PyTree:
        """Return the outputs of `rows`, split over `data`."""
        return self._on_devices(self.backend.predict(), "pmr", "r")(params, model_state, rows)

    def _on_devices(self, fun: Callable[..., Any], takes: str, gives: str) -> Callable[..., Any]:
        """Run `fun` on every device, its arguments and results split by kind.

        Letters of `takes` and `gives`: `s`, state; `p`, parameters; `m`, model state; `g`,
        gradients; `r`, rows split over `data`; `.`, replicated.
        """
        axes, specs = self.backend.manual_axes, self.layout.specs
        sums = gradient_specs(P(), self.layout.gradient_specs, specs.model_state)
        kinds = {
            "s": specs, "p": specs.params, "m": specs.model_state, "g": sums,
            "r": P("data"), ".": P(),
        }  # fmt: skip
        if any(self.mesh.shape[axis] > 1 for axis in axes) or axes == set(self.mesh.axis_names):
            fun = on_most_axes(fun, self.mesh, set(axes), kinds, takes, gives)
        # On a mesh of one device XLA finds no mesh, but a model may name its axes.
        return within(self.mesh, fun) if self.mesh.size == 1 else fun
