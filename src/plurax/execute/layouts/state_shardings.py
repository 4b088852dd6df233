"""How the training state lies where parameters or the optimizer's state are split."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Literal
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, PyTree

from plurax import tree
from plurax.jaxpr.primitives import INLINED, inner_jaxprs, scan_sizes
from plurax.plan import Plan
from plurax.sharding.rules import (
    Rules,
    filled_shape,
    is_sharding,
    match_opt_state_to_params,
    opt_state_shardings,
    parameter_shardings,
    zero_sharding,
)
from plurax.sharding.spec import AxisSizes, TensorSharding
from plurax.state import TrainState


@dataclasses.dataclass(frozen=True)
class ParameterInfo:
    """How a parameter lies on the devices.

    **Fields:** `path`; `shape` and `dtype` of the whole; `sharding`, and `shard`, the shape of what
    one device has; `optimizer`, how what the optimizer keeps for it lies; `bytes` and
    `optimizer_bytes` of one such tensor on one device; `note`, where it does not lie as its rule
    says, and why; `home`, where it lives on one device of a pipeline, which.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    sharding: TensorSharding
    shard: tuple[int, ...]
    optimizer: TensorSharding
    bytes: int
    optimizer_bytes: int
    note: str = ""
    home: int | None = None

    @classmethod
    def of(
        cls,
        path: str,
        leaf: Any,
        lies: TensorSharding,
        kept: TensorSharding,
        axes: AxisSizes,
        note: str = "",
    ) -> "ParameterInfo":
        """From a leaf and its shardings."""
        size = leaf.dtype.itemsize
        return cls(
            path=path,
            shape=tuple(leaf.shape),
            dtype=str(leaf.dtype),
            sharding=lies,
            shard=lies.shard_shape(leaf.shape, axes),
            optimizer=kept,
            bytes=lies.shard_bytes(leaf.shape, size, axes),
            optimizer_bytes=kept.shard_bytes(leaf.shape, size, axes),
            note=note,
        )

    @classmethod
    def whole(cls, path: str, leaf: Any) -> "ParameterInfo":
        """A parameter that every device has whole."""
        lies = TensorSharding.whole(len(leaf.shape))
        return cls.of(path, leaf, lies, lies, {})


class StateShardings:
    """How each tensor of the training state lies, and what goes with it.

    **Arguments:** `like`, the state as `jax.ShapeDtypeStruct`s of whole tensors; `plan` and its
    `rules`; `axes`, sizes of the mesh axes; `stacked`, for each parameter whether layers are
    stacked in it; `layered`, whether these are dealt out to the stages of a pipeline.

    **Attributes:** `like`; `lies`, a `TrainState` of `TensorSharding`s; `shards`, for each
    parameter how its gradient is added up and what the optimizer keeps for it.
    """

    def __init__(
        self,
        like: TrainState,
        plan: Plan,
        rules: Rules,
        axes: AxisSizes,
        stacked: Sequence[bool],
        layered: Sequence[bool] = (),
    ) -> None:
        self.like = like
        self._rules, self._axes = rules, axes
        given = parameter_shardings(rules, like.params)
        if any(layered):
            given = jax.tree.map(
                lambda lies, yes: lies.with_dim(0, ("pipeline",)) if yes else lies,
                given,
                jax.tree.unflatten(jax.tree.structure(like.params), layered),
                is_leaf=is_sharding,
            )
        self.shards = given
        if plan.zero:
            self.shards = jax.tree.map(
                lambda leaf, lies, rows: zero_sharding(leaf.shape, lies, plan, stacked=rows),
                like.params,
                given,
                jax.tree.unflatten(jax.tree.structure(like.params), stacked),
            )
        whole = jax.tree.map(lambda leaf: TensorSharding.whole(len(leaf.shape)), like)
        self.lies = dataclasses.replace(
            whole,
            params=self.shards if plan.zero == 3 else given,
            opt_state=opt_state_shardings(like.opt_state, like.params, self.shards),
        )
        if any(layered):
            # What is kept for each layer lies where the layer is, whatever its other dims.
            self.lies = dataclasses.replace(self.lies, opt_state=self._by_layer(layered))

    def _by_layer(self, layered: Sequence[bool]) -> PyTree:
        def lie(leaf: Any, lies: TensorSharding, number: int) -> TensorSharding:
            yes = number >= 0 and layered[number] and not lies.dims[0]
            return lies.with_dim(0, ("pipeline",)) if yes else lies

        stacks = match_opt_state_to_params(self.like.opt_state, self.like.params, dims=1)
        return jax.tree.map(lie, self.like.opt_state, self.lies.opt_state, stacks)

    @property
    def notes(self) -> dict[str, str]:
        """For each tensor that does not lie as its rule says, why and how it lies."""
        filled = {}
        for path, leaf, lies in self._pairs(self.like.params, self.shards):
            for dim in lies.indivisible_dims(leaf.shape, self._axes):
                n = filled_shape(leaf.shape, lies, self._axes)[dim]
                filled[path] = f"dim {dim} is filled up from {leaf.shape[dim]} to {n}"
        return {**self._rules.notes, **filled}

    def parameters(self) -> list[ParameterInfo]:
        """How each parameter lies."""
        notes = self.notes
        kept = jax.tree.leaves(self.shards, is_leaf=is_sharding)
        pairs = zip(self._pairs(self.like.params, self.lies.params), kept, strict=True)
        return [
            ParameterInfo.of(path, leaf, lies, one, self._axes, notes.get(path, ""))
            for (path, leaf, lies), one in pairs
        ]

    @staticmethod
    def _pairs(like: PyTree, lies: PyTree) -> Iterator[tuple[str, Any, TensorSharding]]:
        leaves = tree.named_leaves(like)
        for (path, leaf), one in zip(
            leaves.items(), jax.tree.leaves(lies, is_leaf=is_sharding), strict=True
        ):
            yield path, leaf, one

    @property
    def specs(self) -> TrainState:
        """The state's `PartitionSpec`s."""
        return jax.tree.map(lambda lies: lies.spec, self.lies, is_leaf=is_sharding)

    @functools.cached_property
    def is_padded(self) -> bool:
        """Whether any tensor is filled up, so that shards divide it."""
        leaves = self._pairs(self.like, self.lies)
        return any(lies.indivisible_dims(leaf.shape, self._axes) for _, leaf, lies in leaves)

    def abstract_state(self, mesh: Mesh) -> TrainState:
        """The state as `jax.ShapeDtypeStruct`s on a mesh, filled up where shards do not divide."""

        def place(leaf: Any, lies: TensorSharding) -> jax.ShapeDtypeStruct:
            shape = filled_shape(leaf.shape, lies, self._axes)
            where = NamedSharding(mesh, lies.spec)
            return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=where)

        return jax.tree.map(place, self.like, self.lies)

    tree_like = abstract_state

    def pad(self, state: TrainState) -> TrainState:
        """A state of whole tensors, filled up with zeros where shards do not divide."""

        def fill(leaf: Array, lies: TensorSharding) -> Array:
            shape = filled_shape(leaf.shape, lies, self._axes)
            if shape == leaf.shape:
                return leaf
            edges = [(0, new - old, 0) for new, old in zip(shape, leaf.shape, strict=True)]
            return lax.pad(leaf, jnp.zeros((), leaf.dtype), edges)

        return jax.tree.map(fill, state, self.lies)

    def unpad(self, state: TrainState) -> TrainState:
        """A state without what was filled up."""

        def crop(leaf: Array, like: Any) -> Array:
            return leaf if leaf.shape == like.shape else leaf[tuple(map(slice, like.shape))]

        return jax.tree.map(crop, state, self.like)


def stacks(jaxpr: Any, params: PyTree) -> list[bool]:
    """Which parameters a loop takes row by row."""
    stacked: set[Any] = set()

    def walk(inner: Any, outer: dict[Any, Any]) -> None:
        for eqn in inner.eqns:
            name = eqn.primitive.name
            same = [outer.get(a) for a in eqn.invars if not isinstance(a, Literal)]
            if name == "scan":
                shared, carried = scan_sizes(eqn)
                rows = eqn.invars[shared + carried :]
                stacked.update(outer.get(a) for a in rows if not isinstance(a, Literal))
            elif name in INLINED or name == "checkpoint":
                body = inner_jaxprs(eqn)[0]
                pairs = zip(body.invars, eqn.invars, strict=True)
                walk(body, {v: outer.get(a) for v, a in pairs if not isinstance(a, Literal)})
            elif name in ("convert_element_type", "annotate") and same:
                outer[eqn.outvars[0]] = same[0]

    count = len(jax.tree.leaves(params))
    walk(jaxpr, {var: place for place, var in enumerate(jaxpr.invars)})
    return [place in stacked for place in range(count)]
