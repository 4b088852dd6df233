"""The layout of a population's states: that of one network, with a leading dim of members.

Each device along the mesh axis `member` has equally many slots; where the members do not divide,
repeated members fill the last slots. Example, 5 members under `Plan(member=2)`, a parameter
`f32[3, 4]`:

    canonical    f32[5, 3, 4]
    stored       f32[6, 3, 4], P("member"): members 0 1 2 | 3 4 0
"""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from plurax import errors
from plurax.execute.initial_state import check_state
from plurax.execute.layouts.state_layout import StateLayout
from plurax.sharding.parameter_info import ParameterInfo
from plurax.state import TrainState


class MembersLayout(StateLayout):
    """The layout of the states of `count` members, each of them stored as `inner` says.

    **Attributes:** `count`; `slots`, the members on the devices: `count` rounded up to a multiple
    of the mesh axis `member`.
    """

    def __init__(self, inner: StateLayout, count: int, mesh: Mesh) -> None:
        self._inner, self.count = inner, count
        devices = mesh.shape["member"]
        self.slots = -(-count // devices) * devices

    @property
    def specs(self) -> TrainState:
        """The `PartitionSpec`s of the stored states."""
        return _of_members(self._inner.specs)

    @property
    def varying_axes(self) -> PyTree:
        """Of each stored leaf the mesh axes along which devices hold different values."""
        return jax.tree.map(lambda axes: axes | {"member"}, self._inner.varying_axes)

    @property
    def names(self) -> PyTree:
        """The name of each stored leaf for people."""
        return self._inner.names

    @property
    def gradient_specs(self) -> PyTree:
        """The `PartitionSpec`s of reduced gradients."""
        return _of_members(self._inner.gradient_specs)

    @property
    def canonical(self) -> TrainState:
        """The canonical states as `jax.ShapeDtypeStruct`s."""
        return _many(self.count, self._inner.canonical)

    @property
    def is_canonical(self) -> bool:
        """Whether the members divide over the devices, and nothing of theirs is converted."""
        return self._inner.is_canonical and self.slots == self.count

    def abstract(self, mesh: Mesh) -> TrainState:
        """Return the stored states as global `jax.ShapeDtypeStruct`s with shardings on `mesh`."""
        return jax.tree.map(
            lambda leaf, spec: jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec)
            ),
            _many(self.slots, self._inner.abstract(mesh)),
            self.specs,
        )

    def from_canonical(self, state: TrainState) -> TrainState:
        """Return the stored form of the states of `count` members."""
        if self.slots != self.count:
            members = np.arange(self.slots) % self.count
            state = jax.tree.map(lambda leaf: leaf[members], state)
        if self._inner.is_canonical:
            return state
        return jax.vmap(self._inner.from_canonical, spmd_axis_name="member")(state)

    def to_canonical(self, state: TrainState) -> TrainState:
        """Return the states of `count` members as whole tensors."""
        if not self._inner.is_canonical:
            state = jax.vmap(self._inner.to_canonical, spmd_axis_name="member")(state)
        if self.slots == self.count:
            return state
        return jax.tree.map(lambda leaf: leaf[: self.count], state)

    def parameters(self) -> list[ParameterInfo]:
        """Return the sharding and size of each parameter of one member."""
        return self._inner.parameters()

    def canonical_shardings(self, mesh: Mesh) -> PyTree:
        """Return shardings for the canonical states: split over `member` where that divides."""
        where = P("member") if self.slots == self.count else P()
        return jax.tree.map(lambda _: NamedSharding(mesh, where), self.canonical)

    def check(self, state: TrainState) -> None:
        """Raise `MembersError` for another number of members, `BatchError` for other shapes."""
        if state.step.ndim == 0:
            raise errors.state_of_one_network()
        if state.step.shape[0] != self.count:
            raise errors.MembersError(
                f"the state holds {state.step.shape[0]} members and this program is compiled for "
                f"{self.count}; take those you want (plurax.ensemble.take_members) or compile for "
                "as many."
            )
        check_state(state, self.canonical)


def _of_members(specs: Any) -> Any:
    """Return a tree of `PartitionSpec`s for leaves with a leading dim of members."""
    return jax.tree.map(lambda spec: P("member", *spec), specs, is_leaf=lambda x: isinstance(x, P))


def _many(count: int, one: Any) -> Any:
    """Return a tree of `jax.ShapeDtypeStruct`s with a leading dim."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((count, *leaf.shape), leaf.dtype), one)
