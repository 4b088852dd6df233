"""The training states of a program on its devices, and the way from and to canonical states.

A stored state has the shapes and shardings that the compiled functions take, a canonical one those
of the task and the optimizer, as checkpoints hold it (`layouts/state_layout.py`).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from plurax.distributed.global_arrays import one_at_a_time, put
from plurax.execute.initial_state import check_stored, same_shapes
from plurax.execute.step_functions import StepFunctions
from plurax.state import TrainState, check_not_donated


class StateStore:
    """Puts states on the devices of a program's functions, and brings them back.

    **Attributes:** `shapes`, a stored state as `jax.ShapeDtypeStruct`s with their shardings;
    `shardings`, of these.
    """

    def __init__(self, functions: StepFunctions) -> None:
        self._layout, self._mesh = functions.layout, functions.mesh

    @functools.cached_property
    def shapes(self) -> TrainState:
        """The stored state as a tree of `jax.ShapeDtypeStruct`s with their shardings."""
        return self._layout.abstract(self._mesh)

    @property
    def shardings(self) -> PyTree:
        """The shardings of the stored state."""
        return jax.tree.map(lambda leaf: leaf.sharding, self.shapes)

    @property
    def canonical_shapes(self) -> TrainState:
        """The canonical state as a tree of `jax.ShapeDtypeStruct`s with shardings."""
        return jax.tree.map(
            lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
            self._layout.canonical,
            self._layout.canonical_shardings(self._mesh),
        )

    def place(self, state: TrainState) -> TrainState:
        """See `Program.place`."""
        check_not_donated(state)
        # Copy: the first step donates the state, and the caller's arrays must stay valid.
        copied = jax.tree.map(jnp.copy, state)
        if same_shapes(copied, self.shapes):
            return put(copied, self.shardings)
        self._layout.check(copied)
        given = put(copied, self._layout.canonical_shardings(self._mesh))
        return one_at_a_time(self._stored(given))

    @functools.cached_property
    def _stored(self) -> Any:
        return jax.jit(self._layout.from_canonical, out_shardings=self.shardings)

    def to_canonical(self, state: TrainState) -> TrainState:
        """See `Program.to_canonical`."""
        check_not_donated(state)
        return one_at_a_time(self._layout.to_canonical(state))

    def from_canonical(self, state: TrainState) -> TrainState:
        """See `Program.from_canonical`."""
        # This runs in every step, so it compares shapes only; paths are formatted for errors alone.
        layout = self._layout
        if layout.is_canonical or not same_shapes(state, layout.canonical):
            return state
        return self.place(state)

    def for_inference(self, state: TrainState) -> tuple[PyTree, PyTree]:
        """Return the parameters and the model state to predict with, of a stored or canonical
        state. Raises `BatchError` or `MembersError` for any other."""
        state = self.from_canonical(state)
        if not same_shapes(state, self.shapes):
            self._layout.check(state)
        return state.params, state.model_state

    def check(self, state: TrainState) -> None:
        """Raise why compiled functions did not take a state, if they could not."""
        if state.step.shape != self.shapes.step.shape:
            self._layout.check(state)
        check_stored(state, self.shapes)
