"""The update of a state whose tensors are on several servers.

`program.apply` is one function of parameters, optimizer state and the sums of a batch. Each shard
computes the part of it whose tensors it holds; numbers that need the tensors of several shards,
such as the gradient's norm, cross between rounds (see `plurax.jaxpr.homes`). So the shards together
compute what one device does, for any optimizer whose update needs no tensor of two shards.

Example, `optax.clip_by_global_norm` and `optax.adam` on 2 shards, `w0` on shard 0, `w1` on shard 1:

    shard 0                                 shard 1
    numbers(0) -> sum(g0 ** 2)              numbers(0) -> sum(g1 ** 2)
    both get both numbers, 8 bytes
    update -> w0, its moments               update -> w1, its moments
              step, metrics                           step, metrics, the same

Of a tensor that is cut each shard has some rows, and such a number is the sum of what the shards
compute (`exchange`). A worker that has the whole gradient can compute such numbers alone
(`worker_numbers`) and send them along, unless they need tensors of the servers.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import Literal
from jaxtyping import Array, PyTree

from plurax import errors
from plurax.execute.step import Gradients, Metrics, make_apply, whole_update
from plurax.jaxpr.homes import PARTS, Homes, NotCutError, Place, RowSplit
from plurax.jaxpr.interpret import bind, evaluate, needed, variables
from plurax.server.shard_layout import ShardLayout
from plurax.sharding.rules import match_opt_state_to_params
from plurax.state import TrainState

Leaves = Mapping[int, Array]
"""Some leaves of `(state, sums)`, by their index in `jax.tree.leaves`."""
Numbers = Mapping[int, Array]
"""Scalars that cross between shards, by their index among all that cross."""


class ShardedUpdate:
    """`apply(state, sums) -> (state, metrics)`, computed by several shards.

    **Arguments:** `optimizer`; `state` and `sums`, with `jax.ShapeDtypeStruct`s or arrays for
    leaves; `layout`, which shard holds which parameter; `alone`, whether a worker computes the
    numbers, which must then not depend on tensors of the state that are cut.

    **Attributes:** `layout`; `crossings`, how often numbers cross between the shards; `metrics`,
    those of an update, abstract; `params`, `grads`, `model_state` and `scalars`: which leaves of
    `(state, sums)` they are (`scalars`: all of the sums but the gradients).

    Raises `PlanError` where the optimizer needs tensors of several shards at once, and
    `NotCutError` where it needs those in one place that `layout` has cut.
    """

    def __init__(
        self,
        optimizer: optax.GradientTransformation,
        state: TrainState,
        sums: Gradients,
        layout: ShardLayout,
        alone: bool = False,
    ) -> None:
        self.layout = layout
        self._number(state, sums, layout.homes)
        leaves, self._inputs_tree = jax.tree.flatten((state, sums))
        # XLA sums rows of all gradients together (`_norm` of a step), which no shard could.
        dtypes = jax.tree.map(lambda leaf: leaf.dtype, state.params)
        apply = make_apply(whole_update(optimizer), dtypes, _norm)
        shapes = jax.eval_shape(apply, state, sums)
        results, self._results_tree = jax.tree.flatten(shapes)
        self.metrics = {name: shapes[1][name] for name in sorted(shapes[1])}
        places = [*self._places[: self.state_leaves], *[None] * len(self.metrics)]
        assert len(results) == len(places)

        def fun(*leaves: Array) -> list[Array]:
            return jax.tree.leaves(apply(*jax.tree.unflatten(self._inputs_tree, leaves)))

        self._homes = Homes(
            lambda fun, *args: jax.make_jaxpr(fun)(*args),
            fun,
            [jax.ShapeDtypeStruct(jnp.shape(leaf), leaf.dtype) for leaf in leaves],
            self._places,
            places,
            errors.optimizer_needs_shards,
        )
        self._crossing = list(self._homes.crossing)
        self._rounds = sorted({*self._homes.crossing.values()})
        self.crossings = len(self._rounds)
        if alone and (owners := self._parts_of_state()):
            raise NotCutError(owners)

    def _parts_of_state(self) -> set[int]:
        """Return whose numbers are sums of parts and depend on tensors of the state."""
        jaxpr, owners = self._homes.jaxpr, set()
        state = {*jaxpr.invars[: self.state_leaves]}
        for var in self._homes.parts:
            place = self._homes.home[var]
            eqns = needed(jaxpr.eqns, [var], {*jaxpr.invars, *jaxpr.constvars})
            read = {atom for eqn in eqns for atom in variables(eqn.invars)}
            if isinstance(place, RowSplit) and read & state:
                owners.add(place.owner)
        return owners

    def _number(self, state: TrainState, sums: Gradients, homes: Sequence[Place]) -> None:
        """Give each leaf of `(state, sums)` its place, in the order of the fields of both."""
        of_param = dict(enumerate(homes))
        # By path alone: a factored second moment has not the shape of its parameter.
        match = match_opt_state_to_params(state.opt_state, state.params, 0)
        opt_state = [
            self._place(of_param.get(index), jnp.shape(leaf), state)
            for index, leaf in zip(
                jax.tree.leaves(match), jax.tree.leaves(state.opt_state), strict=True
            )
        ]
        model_state: list[Place] = [None] * len(jax.tree.leaves(state.model_state))
        totals: list[Place] = [None] * len(jax.tree.leaves((sums.weight, sums.loss, sums.metrics)))
        # step; params; opt_state; model_state; key, skipped
        of_state = [None, *homes, *opt_state, *model_state, None, None]
        self.state_leaves = stop = len(of_state)
        # weight, loss, metrics; grads; model_state; examples
        self._places: list[Place] = [*of_state, *totals, *homes, *model_state, None]
        self.params = range(1, 1 + len(homes))
        self.model_state = range(stop - 2 - len(model_state), stop - 2)
        start = stop + len(totals)
        self.grads = range(start, start + len(homes))
        self.scalars = [*range(stop, start), *range(self.grads.stop, len(self._places))]

    def _place(self, place: Place, shape: tuple[int, ...], state: TrainState) -> Place:
        """Return the place of a leaf of the optimizer's state, of a parameter with a place."""
        if (
            not isinstance(place, RowSplit)
            or shape == jax.tree.leaves(state.params)[place.owner].shape
        ):
            return place
        if math.prod(shape) > 1:
            raise NotCutError({place.owner})
        return None

    def inputs(self, shard: int) -> list[int]:
        """Return which leaves of `(state, sums)` a shard needs: its own, and those of all."""
        return [
            index
            for index, home in enumerate(self._places)
            if home in (None, shard) or isinstance(home, RowSplit)
        ]

    def piece(self, index: int, shard: int, leaf: Any) -> Any:
        """Return what a shard has of a leaf of `(state, sums)`."""
        place = self._places[index]
        return self.layout.piece(place.owner, shard, leaf) if isinstance(place, RowSplit) else leaf

    def held(self, shard: int) -> list[int]:
        """Return which leaves of the state a shard holds."""
        return [index for index in self.inputs(shard) if index < self.state_leaves]

    def numbers(self, shard: int, crossing: int, leaves: Leaves, known: Numbers) -> Numbers:
        """Return the numbers of one crossing that a shard computes, or parts of them.

        **Arguments:** `leaves`, those of `inputs(shard)`; `known`, the numbers of earlier
        crossings.
        """
        wanted = [
            index
            for index, var in enumerate(self._crossing)
            if self._homes.crossing[var] == self._rounds[crossing]
            and (self._homes.home[var] == shard or var in self._homes.parts)
        ]
        atoms = [self._crossing[i] for i in wanted]
        values = self._evaluated((None, shard), atoms, leaves, known, shard)
        return dict(zip(wanted, values, strict=True))

    def exchange(
        self, numbers_of_shards: Callable[[int, Numbers], Sequence[Mapping[int, Any]]]
    ) -> dict[int, np.ndarray]:
        """Return the numbers of all crossings.

        **Arguments:** `numbers_of_shards`, called with each crossing and the numbers of those
        before it; returns what `numbers` gives for each shard.
        """
        known: dict[int, Any] = {}
        for crossing in range(self.crossings):
            parts: dict[int, list[Any]] = {}
            for numbers in numbers_of_shards(crossing, known):
                for index, number in numbers.items():
                    parts.setdefault(index, []).append(number)
            known = known | {index: self._combined(index, part) for index, part in parts.items()}
        return known

    def _combined(self, index: int, parts: Sequence[Any]) -> np.ndarray:
        """Return a number from its parts, one of each shard that computes any."""
        reduction = self._homes.parts.get(self._crossing[index])
        value = parts[0] if reduction is None else PARTS[reduction](parts)
        return np.asarray(value, parts[0].dtype)

    def worker_numbers(self, leaves: Leaves) -> Numbers:
        """Return all numbers, from the leaves of the sums of one batch.

        Raises `PlanError` where one depends on tensors of the state that are on several shards.
        """
        places = (None, *range(self.layout.shards))
        return dict(enumerate(self._evaluated(places, self._crossing, leaves, {})))

    def update(
        self, shard: int, leaves: Leaves, known: Numbers
    ) -> tuple[dict[int, Array], Metrics]:
        """Return the leaves of the state that a shard holds, and the metrics, once updated."""
        wanted = self.held(shard)
        outvars = self._homes.jaxpr.outvars
        atoms = [*(outvars[index] for index in wanted), *outvars[self.state_leaves :]]
        values = self._evaluated((None, shard), atoms, leaves, known, shard)
        state = dict(zip(wanted, values, strict=False))
        return state, dict(zip(self.metrics, values[len(wanted) :], strict=True))

    def joined(self, parts: Sequence[Mapping[int, Any]], first: int = 0) -> TrainState:
        """Return the state of which each shard holds a part; what all have is of the `first`."""
        leaves = {i: leaf for part in (*parts, parts[first]) for i, leaf in part.items()}
        for index, place in enumerate(self._places[: self.state_leaves]):
            if isinstance(place, RowSplit):
                leaves[index] = jnp.asarray(
                    self.layout.joined(place.owner, [part[index] for part in parts])
                )
        state, _ = jax.tree.unflatten(
            self._results_tree,
            [leaves.get(index) for index in range(self.state_leaves + len(self.metrics))],
        )
        assert isinstance(state, TrainState)
        return state

    def _evaluated(
        self,
        places: Sequence[int | None],
        atoms: Sequence[Any],
        leaves: Leaves,
        numbers: Numbers,
        shard: int | None = None,
    ) -> list[Array]:
        """Compute atoms from leaves, and from numbers, by the equations of some places.

        Of tensors that are cut, leaves and atoms are the rows of a `shard`; or whole, without one.
        """
        jaxpr = self._homes.jaxpr
        known = dict(zip(jaxpr.constvars, self._homes.consts, strict=True))
        known |= {jaxpr.invars[index]: leaf for index, leaf in leaves.items()}
        known |= {self._crossing[index]: number for index, number in numbers.items()}
        eqns = needed(self._homes.of(*places), atoms, known)
        absent = {*jaxpr.invars} - known.keys()
        for eqn in eqns:
            if not absent.isdisjoint(variables(eqn.invars)):
                raise errors.PlanError(
                    f"the optimizer's {eqn.primitive.name!r} needs a number of tensors that are on "
                    "several parameter servers (of parameters or of the optimizer's state, not of "
                    "gradients alone). In mode='sync' the servers exchange it; in 'bounded' and "
                    "'async' a worker sends such numbers along, and cannot know this one. Use "
                    "mode='sync' or shards=1."
                )
        return evaluate(eqns, known, atoms, default=functools.partial(self._on_rows, shard))

    def _on_rows(self, shard: int | None, eqn: Any, inputs: list[Any]) -> list[Any]:
        """Apply an equation; where it computes rows of a shard, to these rows of every operand."""
        home = self._homes.home
        places = [None if isinstance(a, Literal) else home.get(a) for a in eqn.invars]
        own = next((place for place in places if isinstance(place, RowSplit)), None)
        if own is not None and shard is not None:
            inputs = [
                self.layout.piece(own.owner, shard, x) if place is None and x.ndim else x
                for place, x in zip(places, inputs, strict=True)
            ]
        return bind(eqn, inputs)


def _norm(grads: PyTree) -> Array:
    """Return the global norm: one number of each gradient, then one of all."""
    squares = [jnp.sum(jnp.square(jnp.abs(leaf))) for leaf in jax.tree.leaves(grads)]
    return jnp.sqrt(functools.reduce(jnp.add, squares))
