"""How the training state lies on the devices of a pipeline.

Stacked layers are dealt out to stages and split over `pipeline` by their leading dim. What belongs
to one stage (an embedding, a head, a stage of a marked model) lies on its device in a flat buffer,
as long on every device as the longest stage needs; what several stages use is on all.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, PyTree

from plurax.execute.layouts.state_shardings import ParameterInfo, StateShardings
from plurax.pipeline.packing import Packing, empty, longest
from plurax.pipeline.stage_update import broadcast_from_stage
from plurax.pipeline.stages import LayerAssignment
from plurax.sharding.rules import filled_shape, match_opt_state_to_params
from plurax.state import TrainState

ON_ALL = -1
"""The home of a tensor that is on all devices of the pipeline."""

EVERYWHERE = P(("data", "pipeline", "tensor"))
"""How buffers lie of which every device has its own."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Staged:
    """A tree like the parameters, as the devices of a pipeline have it.

    **Fields:** `rest`, the tensors that are on all of them or split over them; `homed`, flat
    buffers by dtype with those that live on one.
    """

    rest: tuple[Any, ...]
    homed: dict[str, Any]


class StagePlacement:
    """Which leaves of a tree live on which device of the pipeline, and where in its buffers.

    **Arguments:** `like`, the tree as `jax.ShapeDtypeStruct`s of one device's shards; `homes`, a
    device or `ON_ALL` for each leaf; `devices`.

    **Attributes:** `homes`; `packings` by device; `lengths` of the buffers.
    """

    def __init__(self, like: PyTree, homes: Sequence[int], devices: int) -> None:
        leaves, self.structure = jax.tree.flatten(like)
        self.homes = list(homes)
        self.packings = [
            Packing([leaf for leaf, home in zip(leaves, homes, strict=True) if home == device])
            for device in range(devices)
        ]
        self.lengths = longest(self.packings)

    def own(self, device: int) -> list[int]:
        """The leaves that live on a device."""
        return [place for place, home in enumerate(self.homes) if home == device]

    def place(self, leaf: int) -> tuple[int, int]:
        """The home of a leaf, and its place in the packing there."""
        home = self.homes[leaf]
        return home, self.homes[:leaf].count(home)

    def staged(self, tree: PyTree) -> Staged:
        """From a tree of which every device has all."""
        leaves = jax.tree.leaves(tree)

        def branch(device: int) -> dict[str, Array]:
            return self.written(device, [leaves[place] for place in self.own(device)])

        rest = tuple(a for a, home in zip(leaves, self.homes, strict=True) if home == ON_ALL)
        return Staged(rest, self.on_each(branch) if self.lengths else {})

    def written(
        self, device: int, arrays: Sequence[Array], *, wide: bool = False
    ) -> dict[str, Array]:
        """The buffers of a device with its own leaves in them; sums in float32 or wider."""
        return self.packings[device].write(empty(self.lengths, wide=wide), arrays)

    def gathered(self, staged: Staged) -> PyTree:
        """A tree of which every device has all."""
        shapes = {
            place: self.packings[home].leaves[at]
            for place in range(len(self.homes))
            for home, at in [self.place(place)]
            if home != ON_ALL
        }

        def branch(device: int) -> dict[int, Array]:
            found = dict(
                zip(self.own(device), self.packings[device].read(staged.homed), strict=True)
            )
            return {
                place: found.get(place, jnp.zeros(like.shape, like.dtype))
                for place, like in shapes.items()
            }

        told = broadcast_from_stage(self.on_each(branch)) if shapes else {}
        rest = iter(staged.rest)
        leaves = [told[p] if p in told else next(rest) for p in range(len(self.homes))]
        return jax.tree.unflatten(self.structure, leaves)

    def values(self, staged: Staged) -> list[Array | None]:
        """For each leaf its array, None where it lives on one device."""
        rest = iter(staged.rest)
        return [next(rest) if home == ON_ALL else None for home in self.homes]

    def on_each(self, branch: Callable[[int], Any]) -> Any:
        """Each device of the pipeline does its own; inside `shard_map`."""
        at = lax.axis_index("pipeline")
        return lax.switch(at, [lambda d=d: branch(d) for d in range(len(self.packings))])


class StagedState:
    """The state of a pipeline's program, and how any other becomes one.

    **Arguments:** `inner`, how the tensors lie over the other axes, layers dealt; `homes` of the
    parameters; `dealing` of the layers; `layered`, for each parameter whether layers are stacked in
    it; `mesh`.

    **Attributes:** `params`, `opt_state` and `shards` (gradients): their `StagePlacement`.
    """

    is_padded = True

    def __init__(
        self,
        inner: StateShardings,
        homes: Sequence[int | None],
        dealing: LayerAssignment,
        layered: Sequence[bool],
        mesh: Mesh,
    ) -> None:
        self.inner, self.dealing, self.mesh = inner, dealing, mesh
        self._layered = layered
        sizes = {axis: mesh.shape[axis] for axis in mesh.axis_names}
        like, lies = inner.like, inner.lies
        devices = sizes["pipeline"]
        given = [ON_ALL if home is None else home for home in homes]
        # Whatever the optimizer keeps for a parameter lives where that does, be its shape another.
        owner = match_opt_state_to_params(like.opt_state, like.params, dims=0)
        kept = [given[n] if n >= 0 else ON_ALL for n in jax.tree.leaves(owner)]

        def local(leaf: Any, one: Any) -> jax.ShapeDtypeStruct:
            filled = filled_shape(leaf.shape, one, sizes)
            return jax.ShapeDtypeStruct(one.shard_shape(filled, sizes), leaf.dtype)

        def of(tree: PyTree, lying: PyTree, at: Sequence[int]) -> StagePlacement:
            return StagePlacement(jax.tree.map(local, tree, lying), at, devices)

        self.params = of(like.params, lies.params, given)
        self.shards = of(like.params, inner.shards, given)
        self.opt_state = of(like.opt_state, lies.opt_state, kept)

    # --- What a program asks ------------------------------------------------------------------

    @property
    def specs(self) -> TrainState:
        """The state's `PartitionSpec`s."""
        return self._with(self.inner.specs, self._staged_specs)

    def abstract_state(self, mesh: Mesh) -> TrainState:
        """The state as `jax.ShapeDtypeStruct`s on a mesh."""
        whole = self.inner.abstract_state(mesh)

        def staged(homes: StagePlacement, tree: PyTree) -> Staged:
            ways = mesh.shape["data"] * mesh.shape["pipeline"] * mesh.shape["tensor"]
            leaves = jax.tree.leaves(tree)
            rest = tuple(a for a, h in zip(leaves, homes.homes, strict=True) if h == ON_ALL)
            homed = {
                name: jax.ShapeDtypeStruct(
                    (ways * length,), name, sharding=NamedSharding(mesh, EVERYWHERE)
                )
                for name, length in homes.lengths.items()
            }
            return Staged(rest, homed)

        return self._with(whole, staged)

    def tree_like(self, mesh: Mesh) -> TrainState:
        """The state as a tree of tensors on a mesh, before what belongs to stages is packed."""
        return self.inner.abstract_state(mesh)

    def pad(self, state: TrainState) -> TrainState:
        """From a state of whole tensors, in the order of the layers."""
        filled = self.inner.pad(self.dealt(state))
        return self._mapped(self.staged, self.inner.specs, self.specs)(filled)

    def unpad(self, state: TrainState) -> TrainState:
        """A state of whole tensors, in the order of the layers."""
        return self._cut(state)

    @functools.cached_property
    def _cut(self) -> Callable[[TrainState], TrainState]:
        def cut(state: TrainState) -> TrainState:
            whole = self._mapped(self.gathered, self.specs, self.inner.specs)(state)
            return self.undealt(self.inner.unpad(whole))

        return jax.jit(cut)

    def parameters(self) -> list[ParameterInfo]:
        """How each parameter lies."""
        return [self._at_home(place, one) for place, one in enumerate(self.inner.parameters())]

    def _at_home(self, place: int, one: ParameterInfo) -> ParameterInfo:
        home = self.params.homes[place]
        if home == ON_ALL:
            return one
        text = f"on device {home} of the pipeline"
        note = f"{text}; {one.note}" if one.note else text
        return dataclasses.replace(one, note=note, home=home)

    # --- On one device ------------------------------------------------------------------------

    def staged(self, state: TrainState) -> TrainState:
        """A device's share of a state in shards, of whose stages' tensors it has all."""
        return self._with(state, StagePlacement.staged)

    def gathered(self, state: TrainState) -> TrainState:
        """A state in shards, of whose stages' tensors every device has all."""
        return self._with(state, StagePlacement.gathered)

    # --- Layers -------------------------------------------------------------------------------

    def dealt(self, state: TrainState) -> TrainState:
        """Layers in the order in which devices have them, filled up with zeros."""
        return assign_layers(state, self._layered, self.dealing)

    def undealt(self, state: TrainState) -> TrainState:
        """Layers in their own order."""
        return assign_layers(state, self._layered, self.dealing, back=True)

    # --- Inside -------------------------------------------------------------------------------

    def _with(self, state: TrainState, change: Callable[[StagePlacement, Any], Any]) -> TrainState:
        return dataclasses.replace(
            state,
            params=change(self.params, state.params),
            opt_state=change(self.opt_state, state.opt_state),
        )

    def _staged_specs(self, homes: StagePlacement, specs: PyTree) -> Staged:
        leaves = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, P))
        rest = tuple(s for s, home in zip(leaves, homes.homes, strict=True) if home == ON_ALL)
        return Staged(rest, dict.fromkeys(homes.lengths, EVERYWHERE))

    def _mapped(self, fun: Any, takes: PyTree, gives: PyTree) -> Any:
        return jax.shard_map(
            fun, mesh=self.mesh, in_specs=(takes,), out_specs=gives, check_vma=False
        )


def assign_layers(
    state: TrainState, layered: Sequence[bool], dealing: LayerAssignment, *, back: bool = False
) -> TrainState:
    """The layers of a state dealt out to stages, or back in their own order."""
    if dealing.depth == 0 or dealing.even:
        return state
    places = np.asarray(dealing.layers)
    order = np.argsort(np.where(places < 0, len(places), places), kind="stable")[: dealing.depth]

    def move(leaf: Any) -> Any:
        if back:
            return leaf[order]
        there = (places >= 0).reshape(-1, *[1] * (leaf.ndim - 1))
        return jnp.where(there, leaf[np.maximum(places, 0)], jnp.zeros((), leaf.dtype))

    def moved(leaf: Any, number: int) -> Any:
        return move(leaf) if number >= 0 and layered[number] else leaf

    owner = match_opt_state_to_params(state.opt_state, state.params, dims=1)
    numbers = jax.tree.unflatten(jax.tree.structure(state.params), range(len(layered)))
    return dataclasses.replace(
        state,
        params=jax.tree.map(moved, state.params, numbers),
        opt_state=jax.tree.map(moved, state.opt_state, owner),
    )
