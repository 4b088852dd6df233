"""The contract of a backend: what a plan makes of one network on one device.

A backend gives the functions of one device, which run inside `jax.shard_map` (a plan of one device
needs none), and the layout of the state. `Network` runs them on all devices of the mesh for one
network, `Population` for every member of a population. Four backends give the contract:

    backend      plan splits                            on one device
    replicated   the batch alone                        the whole network, its own rows
    sharded      operators, parameters, the optimizer   shards of all tensors, its own rows
    pipelined    the network into stages                its stages' tensors, its own rows
    apart        as another, which computes outputs     its rows' outputs, losses of all, gradients

Functions that differ between members (a learning rate) are given by `of`, once per member: a
backend keeps what all members share, such as shardings and stages.
"""

import abc
from collections.abc import Callable

import optax
from jaxtyping import PyTree

from plurax.execute.gradient import Totals
from plurax.execute.layouts.state_layout import StateLayout
from plurax.execute.rows import Chunk
from plurax.execute.step import Gradients, Metrics, Step
from plurax.state import TrainState
from plurax.task import Task


class Backend(abc.ABC):
    """A task's functions on one device under a plan, and the layout of the state.

    **Attributes:** `layout`; `manual_axes`, the mesh axes over which its functions are written for
    one device: the others are left to XLA.
    """

    layout: StateLayout
    manual_axes: frozenset[str]

    @abc.abstractmethod
    def of(self, task: Task, optimizer: optax.GradientTransformation) -> "Backend":
        """Return a copy for another member of a population.

        Its task and optimizer may contain traced values, such as a learning rate.
        """

    @abc.abstractmethod
    def own(self, state: TrainState) -> TrainState:
        """Return this device's part of a replicated state."""

    @abc.abstractmethod
    def gradients(self, *, split: bool = True) -> Callable[..., Gradients]:
        """Return `(state, rows, count, first=None) -> gradients` on one device, reduced over all.

        `rows` are this device's; with `split=False` (a coupled loss only) those of all devices.
        `first` is as for `make_gradients`.
        """

    @abc.abstractmethod
    def apply(
        self, *, freeze: bool = False, select: bool = False
    ) -> Callable[[TrainState, Gradients], tuple[TrainState, Metrics]]:
        """Return `(state, gradients) -> (state, metrics)` on one device. See `make_apply`."""

    def step(self, *, freeze: bool = False, select: bool = False, split: bool = True) -> Step:
        """Return `(state, rows, count) -> (state, metrics)`: `gradients`, then `apply`."""
        gradients = self.gradients(split=split)
        apply = self.apply(freeze=freeze, select=select)
        return lambda state, rows, count: apply(state, gradients(state, rows, count))

    @abc.abstractmethod
    def evaluate(self) -> Callable[[PyTree, PyTree, PyTree, Chunk], Totals]:
        """Return `(params, model_state, rows, chunk) -> totals` on one device, without gradient."""

    @abc.abstractmethod
    def predict(self) -> Callable[[PyTree, PyTree, PyTree], PyTree]:
        """Return `(params, model_state, inputs) -> outputs` on one device, for its own rows."""
