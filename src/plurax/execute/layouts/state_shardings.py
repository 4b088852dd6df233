"""The shardings of the training state under a plan, and padding where they do not divide.

Each leaf of the state needs a sharding: parameters by the plan's rules, gradients and optimizer
state by the ZeRO stage as well, all others replicated. `NamedSharding` needs dims that the number
of shards divides, so other dims are padded with zeros; `to_canonical` cuts the padding off again.

Example: a parameter `f32[10, 6]` under a rule `(None, "tensor")`, with `data=4, tensor=2`:

    zero    parameter                        gradient, Adam's mu and nu
    0       (None, tensor)    f32[10, 3]     (None, tensor)    f32[10, 3]
    1, 2    (None, tensor)    f32[10, 3]     (data, tensor)    f32[3, 3]
    3       (data, tensor)    f32[3, 3]      (data, tensor)    f32[3, 3]

4 does not divide 10, so what is split over `data` is padded to `f32[12, 6]`, two rows of zeros.

Source: ZeRO (Rajbhandari et al. 2019, https://arxiv.org/abs/1910.02054).
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, PyTree

from plurax import tree
from plurax.execute.initial_state import check_state
from plurax.execute.layouts.state_layout import StateLayout, stored_where_equal
from plurax.freezing import frozen_leaves, trained
from plurax.jaxpr.compat import Scan, is_call_or_remat
from plurax.jaxpr.interpret import interpret
from plurax.partition.stacked_results import BY_ROWS, row_params
from plurax.plan import Plan
from plurax.sharding.parameter_info import ParameterInfo
from plurax.sharding.rules import (
    Rules,
    is_sharding,
    match_opt_state_to_params,
    opt_state_shardings,
    padded_shape,
    parameter_shardings,
    zero_sharding,
)
from plurax.sharding.spec import AxisSizes, TensorSharding
from plurax.state import TrainState


class StateShardings(StateLayout):
    """The sharding of each tensor of the training state, and padding to it.

    **Arguments:**

    - `like`: the state as `jax.ShapeDtypeStruct`s of whole tensors.
    - `plan`, and its `rules`.
    - `axes`: the sizes of the mesh axes.
    - `stacked`: for each parameter whether layers are stacked along its leading dim (see `stacks`).
    - `layered`: for each parameter whether these layers are split over `pipeline`; empty for none.
    - `frozen`: patterns of the parameters without gradient.

    **Attributes:** `like`; `shardings`, a `TrainState` of `TensorSharding`s; `shards`, a tree like
    the parameters with the shardings of the reduced gradients and of the optimizer state; `frozen`.
    """

    def __init__(
        self,
        like: TrainState,
        plan: Plan,
        rules: Rules,
        axes: AxisSizes,
        stacked: Sequence[bool],
        layered: Sequence[bool] = (),
        *,
        frozen: Sequence[str] = (),
    ) -> None:
        self.like, self.frozen = like, frozen
        self._rules, self._axes = rules, axes
        params = parameter_shardings(rules, like.params)
        if any(layered):
            params = jax.tree.map(
                lambda sharding, yes: sharding.with_dim(0, ("pipeline",)) if yes else sharding,
                params,
                jax.tree.unflatten(jax.tree.structure(like.params), layered),
                is_leaf=is_sharding,
            )
        self.shards = params
        if plan.zero:
            self.shards = jax.tree.map(
                lambda leaf, sharding, rows: zero_sharding(
                    leaf.shape, sharding, plan, stacked=rows
                ),
                like.params,
                params,
                jax.tree.unflatten(jax.tree.structure(like.params), stacked),
            )
        whole = jax.tree.map(lambda leaf: TensorSharding.replicated(len(leaf.shape)), like)
        self.shardings = dataclasses.replace(
            whole,
            params=self.shards if plan.zero == 3 else params,
            opt_state=opt_state_shardings(like.opt_state, like.params, self.shards, plan),
        )
        if any(layered):
            # Optimizer state with a leading dim of layers is split like the layers, even if its
            # other dims differ from the parameter's.
            self.shardings = dataclasses.replace(self.shardings, opt_state=self._by_layer(layered))

    def _by_layer(self, layered: Sequence[bool]) -> PyTree:
        """Return the optimizer state's shardings, leaves with layers split over `pipeline`."""

        def split(leaf: Any, sharding: TensorSharding, number: int) -> TensorSharding:
            yes = number >= 0 and layered[number] and not sharding.dims[0]
            return sharding.with_dim(0, ("pipeline",)) if yes else sharding

        stacks = match_opt_state_to_params(self.like.opt_state, self.like.params, dims=1)
        return jax.tree.map(split, self.like.opt_state, self.shardings.opt_state, stacks)

    @property
    def notes(self) -> dict[str, str]:
        """By path, why a tensor's sharding is another than its rule's, or how it is padded."""
        filled = {}
        for path, leaf, sharding in self._pairs(self.like.params, self.shards):
            for dim in sharding.indivisible_dims(leaf.shape, self._axes):
                n = padded_shape(leaf.shape, sharding, self._axes)[dim]
                filled[path] = f"dim {dim} is padded from {leaf.shape[dim]} to {n}"
        names = list(tree.named_leaves(self.like.params))
        is_frozen = frozen_leaves(self.frozen, self.like.params)
        frozen = {name: "frozen" for name, yes in zip(names, is_frozen, strict=True) if yes}
        return {**frozen, **self._rules.notes, **filled}

    def parameters(self) -> list[ParameterInfo]:
        """Return a `ParameterInfo` for each parameter."""
        notes = self.notes
        kept = jax.tree.leaves(self.shards, is_leaf=is_sharding)
        pairs = zip(self._pairs(self.like.params, self.shardings.params), kept, strict=True)
        return [
            ParameterInfo.of(path, leaf, sharding, one, self._axes, notes.get(path, ""))
            for (path, leaf, sharding), one in pairs
        ]

    @staticmethod
    def _pairs(like: PyTree, shardings: PyTree) -> Iterator[tuple[str, Any, TensorSharding]]:
        leaves = tree.named_leaves(like)
        for (path, leaf), one in zip(
            leaves.items(), jax.tree.leaves(shardings, is_leaf=is_sharding), strict=True
        ):
            yield path, leaf, one

    @property
    def specs(self) -> TrainState:
        """The state's `PartitionSpec`s."""
        return jax.tree.map(lambda sharding: sharding.spec, self.shardings, is_leaf=is_sharding)

    @property
    def varying_axes(self) -> TrainState:
        """Of each stored leaf the mesh axes over which it is split."""
        return jax.tree.map(
            lambda sharding: frozenset(sharding.axes), self.shardings, is_leaf=is_sharding
        )

    @property
    def names(self) -> TrainState:
        """The path of each leaf."""
        return jax.tree.map_with_path(lambda path, _: tree.path_name(path), self.like)

    @property
    def gradient_specs(self) -> PyTree:
        """The `PartitionSpec`s of reduced gradients."""
        return jax.tree.map(
            lambda sharding: sharding.spec, self.gradient_shards, is_leaf=is_sharding
        )

    @property
    def gradient_shards(self) -> PyTree:
        """The shardings of reduced gradients, a tree like the parameters that are not frozen."""
        return trained(self.frozen, self.shards)

    @property
    def gradient_like(self) -> PyTree:
        """The parameters that are not frozen, as `jax.ShapeDtypeStruct`s."""
        return trained(self.frozen, self.like.params)

    @property
    def gradient_dtypes(self) -> PyTree:
        """The dtypes of the parameters that are not frozen."""
        return jax.tree.map(lambda leaf: leaf.dtype, self.gradient_like)

    @property
    def canonical(self) -> TrainState:
        """The whole tensors as `jax.ShapeDtypeStruct`s."""
        return self.like

    @functools.cached_property
    def is_canonical(self) -> bool:
        """Whether the shards of every tensor divide it, so that none is padded."""
        leaves = self._pairs(self.like, self.shardings)
        return not any(
            sharding.indivisible_dims(leaf.shape, self._axes) for _, leaf, sharding in leaves
        )

    def abstract(self, mesh: Mesh) -> TrainState:
        """Return the padded state as global `jax.ShapeDtypeStruct`s with shardings on `mesh`."""

        def place(leaf: Any, sharding: TensorSharding) -> jax.ShapeDtypeStruct:
            shape = padded_shape(leaf.shape, sharding, self._axes)
            where = NamedSharding(mesh, sharding.spec)
            return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=where)

        return jax.tree.map(place, self.like, self.shardings)

    def from_canonical(self, state: TrainState) -> TrainState:
        """Pad a state of whole tensors with zeros where shards do not divide a dim."""

        def fill(leaf: Array, sharding: TensorSharding) -> Array:
            shape = padded_shape(leaf.shape, sharding, self._axes)
            if shape == leaf.shape:
                return leaf
            edges = [(0, new - old, 0) for new, old in zip(shape, leaf.shape, strict=True)]
            return lax.pad(leaf, jnp.zeros((), leaf.dtype), edges)

        return jax.tree.map(fill, state, self.shardings)

    def canonical_shardings(self, mesh: Mesh) -> PyTree:
        """Return the stored shardings, replicated where a tensor is padded."""
        return stored_where_equal(self.like, self.abstract(mesh), mesh)

    def check(self, state: TrainState) -> None:
        """Raise `BatchError` where a canonical state has other structure, shapes or dtypes."""
        check_state(state, self.like)

    def to_canonical(self, state: TrainState) -> TrainState:
        """Cut the padding off a state."""

        def crop(leaf: Array, like: Any) -> Array:
            return leaf if leaf.shape == like.shape else leaf[tuple(map(slice, like.shape))]

        return jax.tree.map(crop, state, self.like)


def stacks(jaxpr: Any, params: PyTree) -> list[bool]:
    """Return for each parameter whether a `scan` in the loss takes it row by row (as `xs`).

    The leading dim of such a parameter counts layers: ZeRO splits another one, because each
    iteration would otherwise gather its row from a single device. `jaxpr` is the loss's, with the
    leaves of `params` as its first inputs; annotations are looked through, and so are casts,
    reshapes and transposes of each row.
    """
    stacked: set[int | None] = set()

    # The value of a variable is the index of the input that it is, or None.
    def scan(eqn: Any, inputs: list[int | None]) -> list[None]:
        stacked.update(Scan.of(eqn).split(inputs)[2])
        return [None] * len(eqn.outvars)

    def same(eqn: Any, inputs: list[int | None]) -> list[int | None]:
        return inputs[:1]

    def by_row(eqn: Any, inputs: list[int | None]) -> list[int | None]:
        return inputs[:1] if row_params(eqn) is not None else [None]

    interpret(
        jaxpr,
        [None] * len(jaxpr.constvars),
        range(len(jaxpr.invars)),
        {"scan": scan, "annotate": same, **dict.fromkeys(BY_ROWS, by_row)},
        default=lambda eqn, inputs: [None] * len(eqn.outvars),
        inline=is_call_or_remat,
        lift=lambda _: None,
    )
    return [index in stacked for index in range(len(jax.tree.leaves(params)))]
