"""The placement of the training state on the devices of a pipeline.

A stage's parameters and their optimizer state must be stored on that stage's device only, although
all devices of a mesh run one program with arrays of the same shapes. Stacked layers are ordered by
device, padded and split over `pipeline` along their leading dim. Parameters of a single stage (an
embedding, a head, a stage of an annotated model) are packed into one flat buffer per dtype, as long
on all devices as the longest stage needs. Parameters that several stages use are on all devices.

Example: 2 devices, embedding `f32[100, 8]` on stage 0, 5 layers `f32[5, 8, 8]`, head `f32[8, 10]`
on stage 1, all float32; `Staged` on each device, and as global arrays:

    rest            layers    f32[3, 8, 8] per device    global f32[6, 8, 8], P("pipeline")
                                                         one row of zeros
    stage_buffers   float32   f32[800] per device        global f32[1600], `EVERYWHERE`
                      device 0    [0:800] the embedding
                      device 1    [0:80] the head, the rest unused

`from_canonical` brings a state of whole tensors, as a checkpoint has it, to this form;
`to_canonical` brings it back.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, PyTree

from plurax.execute.initial_state import check_state
from plurax.execute.layouts.state_layout import StateLayout, stored_where_equal
from plurax.execute.layouts.state_shardings import StateShardings
from plurax.freezing import frozen_leaves
from plurax.pipeline.layer_rows import layers_to_rows, rows_to_layers
from plurax.pipeline.packing import Packing, buffer_dtype, flat_shapes, max_lengths, zeros
from plurax.pipeline.stage_update import broadcast_from_stage
from plurax.pipeline.stages import LayerAssignment
from plurax.sharding.parameter_info import ParameterInfo
from plurax.sharding.rules import is_sharding, match_opt_state_to_params, padded_shape
from plurax.state import TrainState

ON_ALL = -1
"""The entry in `homes` of a tensor that is on all devices of the pipeline."""

NO_GRADIENT = -2
"""The entry in `homes` of the gradient of a frozen parameter, which no device has."""

_SPLIT = ("data", "pipeline", "context", "tensor")

EVERYWHERE = P(_SPLIT)
"""The `PartitionSpec` of buffers that differ on every device."""


Stacked = tuple[PyTree, PyTree]
"""Of parameters and of optimizer state, trees of whether layers are stacked in a leaf."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Staged:
    """A tree like the parameters in the form that the devices of a pipeline store.

    **Fields:** `rest`, the leaves that are on all devices or split over them, in order;
    `stage_buffers`, by dtype a flat buffer with the leaves that only this device has.
    """

    rest: tuple[Any, ...]
    stage_buffers: dict[str, Any]


class StagePlacement:
    """The device of each leaf of a tree, and its offset in that device's buffers.

    **Arguments:** `like`, the tree as `jax.ShapeDtypeStruct`s of one device's shards; `homes`, for
    each leaf a device of the pipeline, `ON_ALL` or `NO_GRADIENT`; `devices`, their number.

    **Attributes:** `homes`; `packings`, one `Packing` per device; `lengths`, the number of elements
    of the buffers by dtype, the same on all devices; `structure`, of the tree.
    """

    def __init__(self, like: PyTree, homes: Sequence[int], devices: int) -> None:
        leaves, self.structure = jax.tree.flatten(like)
        self.homes = list(homes)
        self.packings = [
            Packing([leaf for leaf, home in zip(leaves, homes, strict=True) if home == device])
            for device in range(devices)
        ]
        self.lengths = max_lengths(one.lengths for one in self.packings)

    @property
    def devices(self) -> list[int | None]:
        """For each leaf the one device that has it, or None."""
        return [None if home == ON_ALL else home for home in self.homes]

    def own(self, device: int) -> list[int]:
        """Return the indices of the leaves that only `device` has."""
        return [index for index, home in enumerate(self.homes) if home == device]

    def locate(self, leaf: int) -> tuple[int, int]:
        """Return the device of a leaf and its index in that device's packing."""
        home = self.homes[leaf]
        return home, self.homes[:leaf].count(home)

    def split(self, tree: PyTree) -> tuple[tuple[Any, ...], list[Any]]:
        """Return the leaves of a tree that are on all devices, and those that some devices lack."""
        pairs = list(zip(jax.tree.leaves(tree), self.homes, strict=True))
        common = tuple(leaf for leaf, home in pairs if home == ON_ALL)
        return common, [leaf for leaf, home in pairs if home != ON_ALL]

    def staged(self, tree: PyTree) -> Staged:
        """Return this device's part of a tree of which every device has all leaves."""
        leaves = jax.tree.leaves(tree)

        def branch(device: int) -> dict[str, Array]:
            return self.written(device, [leaves[index] for index in self.own(device)])

        common, _ = self.split(tree)
        return Staged(common, self.on_each(branch) if self.lengths else {})

    def written(
        self, device: int, arrays: Sequence[Array], *, wide: bool = False
    ) -> dict[str, Array]:
        """Return a device's buffers with the leaves that only it has; with `wide` for sums, in
        float32 or wider."""
        return self.packings[device].write(zeros(flat_shapes(self.lengths), wide=wide), arrays)

    def gathered(self, staged: Staged) -> PyTree:
        """Broadcast each stage's leaves to all stages; return the tree with all leaves.

        Leaves split over `pipeline` stay split.
        """
        shapes = {
            index: self.packings[home].leaves[at]
            for index in range(len(self.homes))
            for home, at in [self.locate(index)]
            if home != ON_ALL
        }

        def branch(device: int) -> dict[int, Array]:
            own_leaves = dict(
                zip(self.own(device), self.packings[device].read(staged.stage_buffers), strict=True)
            )
            return {
                index: own_leaves.get(index, jnp.zeros(like.shape, like.dtype))
                for index, like in shapes.items()
            }

        # Every device passes its leaves and zeros for the others'; the sum over `pipeline` has all.
        broadcast = broadcast_from_stage(self.on_each(branch)) if shapes else {}
        rest = iter(staged.rest)
        leaves = [broadcast[p] if p in broadcast else next(rest) for p in range(len(self.homes))]
        return jax.tree.unflatten(self.structure, leaves)

    def values(self, staged: Staged) -> list[Array | None]:
        """Return each leaf's array, or None where only one device has it."""
        rest = iter(staged.rest)
        return [next(rest) if home == ON_ALL else None for home in self.homes]

    def on_each(self, branch: Callable[[int], Any]) -> Any:
        """Run `branch(d)` on device `d` of the pipeline; to be called inside `shard_map`."""
        at = lax.axis_index("pipeline")
        return lax.switch(at, [lambda d=d: branch(d) for d in range(len(self.packings))])


class StagedState(StateLayout):
    """The placement of a pipeline's state, and the conversions to and from whole tensors.

    **Arguments:**

    - `inner`: the shardings over the other mesh axes, of a state whose layers are ordered by stage.
    - `homes`: for each parameter the one device that has it, or None.
    - `assignment`: the assignment of layers to stages.
    - `stacked`: which leaves have stacked layers (see `stacked_leaves`).
    - `mesh`: the mesh.

    **Attributes:** `params`, `opt_state` and `shards` (of the gradients), each a `StagePlacement`.
    """

    is_canonical = False

    def __init__(
        self,
        inner: StateShardings,
        homes: Sequence[int | None],
        assignment: LayerAssignment,
        stacked: Stacked,
        mesh: Mesh,
    ) -> None:
        self.inner, self.assignment, self.mesh = inner, assignment, mesh
        self.stacked = stacked
        sizes = {axis: mesh.shape[axis] for axis in mesh.axis_names}
        like, shardings = inner.like, inner.shardings
        devices = sizes["pipeline"]
        param_homes = [ON_ALL if home is None else home for home in homes]
        # A leaf of the optimizer state is placed with its parameter, even if its shape differs: the
        # row and column statistics of Adafactor.
        owner = match_opt_state_to_params(like.opt_state, like.params, dims=0)
        kept = [param_homes[n] if n >= 0 else ON_ALL for n in jax.tree.leaves(owner)]

        def local(leaf: Any, one: Any) -> jax.ShapeDtypeStruct:
            # A device stores its shard of the padded tensor.
            filled = padded_shape(leaf.shape, one, sizes)
            return jax.ShapeDtypeStruct(one.shard_shape(filled, sizes), leaf.dtype)

        def of(tree: PyTree, shardings: PyTree, at: Sequence[int]) -> StagePlacement:
            return StagePlacement(jax.tree.map(local, tree, shardings), at, devices)

        self.params = of(like.params, shardings.params, param_homes)
        is_frozen = frozen_leaves(inner.frozen, like.params)
        with_gradient = [
            NO_GRADIENT if no else home for home, no in zip(param_homes, is_frozen, strict=True)
        ]
        self.shards = of(like.params, inner.shards, with_gradient)
        self.opt_state = of(like.opt_state, shardings.opt_state, kept)

    # --- The contract -------------------------------------------------------------------------

    @property
    def specs(self) -> TrainState:
        """The state's `PartitionSpec`s."""
        return self._with(self.inner.specs, self._staged_specs)

    @property
    def varying_axes(self) -> TrainState:
        """Of each stored leaf the mesh axes along which devices hold different values.

        A buffer of a stage's own leaves varies along `pipeline`, and along the axes over which one
        of its leaves is split; along others all devices hold the same, although its
        `PartitionSpec`, `EVERYWHERE`, says nothing of it.
        """

        def staged(homes: StagePlacement, axes: PyTree) -> Staged:
            common, of_stages = homes.split(axes)
            buffers = frozenset({"pipeline"}).union(*of_stages)
            return Staged(common, dict.fromkeys(homes.lengths, buffers))

        return self._with(self.inner.varying_axes, staged)

    @property
    def names(self) -> TrainState:
        """The name of each stored leaf for people; of a buffer, those of the leaves in it."""

        def staged(homes: StagePlacement, names: PyTree) -> Staged:
            common, of_stages = homes.split(names)
            text = of_stages[0] if len(of_stages) == 1 else f"one of {', '.join(of_stages)}"
            return Staged(common, dict.fromkeys(homes.lengths, text))

        return self._with(self.inner.names, staged)

    @property
    def gradient_specs(self) -> Staged:
        """The `PartitionSpec`s of reduced gradients."""
        specs = jax.tree.map(lambda one: one.spec, self.inner.shards, is_leaf=is_sharding)
        return self._staged_specs(self.shards, specs)

    @property
    def gradient_dtypes(self) -> Staged:
        """The dtypes of the parameters that have a gradient."""
        common, _ = self.shards.split(self.inner.like.params)
        buffers = {name: np.dtype(buffer_dtype(name)) for name in self.shards.lengths}
        return Staged(tuple(leaf.dtype for leaf in common), buffers)

    @functools.cached_property
    def canonical(self) -> TrainState:
        """The whole tensors, layers in order, as `jax.ShapeDtypeStruct`s."""
        return jax.eval_shape(self.in_order, self.inner.like)

    def abstract(self, mesh: Mesh) -> TrainState:
        """Return the packed state as global `jax.ShapeDtypeStruct`s with shardings on `mesh`."""
        whole = self.inner.abstract(mesh)

        def staged(homes: StagePlacement, tree: PyTree) -> Staged:
            ways = math.prod(mesh.shape[axis] for axis in _SPLIT)
            common, _ = homes.split(tree)
            stage_buffers = {
                name: jax.ShapeDtypeStruct(
                    (ways * length,), buffer_dtype(name), sharding=NamedSharding(mesh, EVERYWHERE)
                )
                for name, length in homes.lengths.items()
            }
            return Staged(common, stage_buffers)

        return self._with(whole, staged)

    def canonical_shardings(self, mesh: Mesh) -> PyTree:
        """Return the shardings before packing, replicated where a tensor is padded."""
        return stored_where_equal(self.canonical, self.inner.abstract(mesh), mesh)

    def check(self, state: TrainState) -> None:
        """Raise `BatchError` where a canonical state has other structure, shapes or dtypes."""
        check_state(state, self.canonical)

    def from_canonical(self, state: TrainState) -> TrainState:
        """Bring a state of whole tensors, layers in order, to the form that devices store."""
        filled = self.inner.from_canonical(self.by_device(state))
        return self._mapped(self.staged, self.inner.specs, self.specs)(filled)

    def to_canonical(self, state: TrainState) -> TrainState:
        """Return the state as whole tensors, layers in order."""
        return self._cut(state)

    @functools.cached_property
    def _cut(self) -> Callable[[TrainState], TrainState]:
        def cut(state: TrainState) -> TrainState:
            whole = self._mapped(self.gathered, self.specs, self.inner.specs)(state)
            return self.in_order(self.inner.to_canonical(whole))

        return jax.jit(cut)

    def parameters(self) -> list[ParameterInfo]:
        """Return the sharding, size and device of each parameter."""
        return [self._with_home(index, one) for index, one in enumerate(self.inner.parameters())]

    def _with_home(self, index: int, info: ParameterInfo) -> ParameterInfo:
        home = self.params.homes[index]
        if home == ON_ALL:
            return info
        text = f"on device {home} of the pipeline"
        note = f"{text}; {info.note}" if info.note else text
        return dataclasses.replace(info, note=note, home=home)

    # --- On one device ------------------------------------------------------------------------

    def staged(self, state: TrainState) -> TrainState:
        """Return this device's part of a sharded state in which it has all stages' tensors."""
        return self._with(state, StagePlacement.staged)

    def gathered(self, state: TrainState) -> TrainState:
        """Return the sharded state in which every device has all stages' tensors."""
        return self._with(state, StagePlacement.gathered)

    # --- Layers -------------------------------------------------------------------------------

    def by_device(self, state: TrainState) -> TrainState:
        """Return the state with its layers ordered by device and padded with zeros."""
        return assign_layers(state, self.stacked, self.assignment)

    def in_order(self, state: TrainState) -> TrainState:
        """Return the state with its layers in order, without padding."""
        return assign_layers(state, self.stacked, self.assignment, back=True)

    # --- Inside -------------------------------------------------------------------------------

    def _with(self, state: TrainState, change: Callable[[StagePlacement, Any], Any]) -> TrainState:
        return dataclasses.replace(
            state,
            params=change(self.params, state.params),
            opt_state=change(self.opt_state, state.opt_state),
        )

    def _staged_specs(self, homes: StagePlacement, specs: PyTree) -> Staged:
        common, _ = homes.split(specs)
        return Staged(common, dict.fromkeys(homes.lengths, EVERYWHERE))

    def _mapped(self, fun: Any, takes: PyTree, gives: PyTree) -> Any:
        return jax.shard_map(
            fun, mesh=self.mesh, in_specs=(takes,), out_specs=gives, check_vma=False
        )


def assign_layers(
    state: TrainState, stacked: Stacked, assignment: LayerAssignment, *, back: bool = False
) -> TrainState:
    """Order the stacked layers of a state by device, with padding; or, with `back`, undo that.

    With 4 layers on 3 devices, rows `[0 1 | 2 - | 3 -]`: a leaf `(4, ...)` becomes `(6, ...)`, two
    of its rows zeros. `stacked` is what `stacked_leaves` returned.
    """
    if assignment.in_order:
        return state

    def moved(leaf: Any, is_stacked: bool) -> Any:
        if not is_stacked:
            return leaf
        # Padding is zeros, not a copy of a layer, so that norms over all rows count no layer twice.
        return (rows_to_layers if back else layers_to_rows)(leaf, assignment)

    params, opt_state = (
        jax.tree.map(moved, tree, flags)
        for tree, flags in zip((state.params, state.opt_state), stacked, strict=True)
    )
    return dataclasses.replace(state, params=params, opt_state=opt_state)


def stacked_leaves(state: TrainState, layered: Sequence[bool]) -> Stacked:
    """Return which parameters, and which leaves of the optimizer's state, have stacked layers.

    `layered` says so of the parameters, which the optimizer state's leaves follow.
    """
    owner = match_opt_state_to_params(state.opt_state, state.params, dims=1)
    params = jax.tree.unflatten(jax.tree.structure(state.params), layered)
    return params, jax.tree.map(lambda number: number >= 0 and layered[number], owner)
