"""The VJP of one stage as separate programs: forward, and backward whole or split in two.

A pipeline runs a stage's forward and backward in different ticks, so the residuals between them
have to be stored explicitly; and schedules such as ZB-H1 run the input's gradient first and the
weights' gradient later. `jax.vjp` gives one function for both. `StageVjp` therefore traces the VJP
once and partitions its equations:

    forward          (params, x, rest)          -> y, aux, residuals
    backward         (residuals, cotangent)     -> gradients of params and of x
    or, split:
    input gradient   (residuals, cotangent)     -> gradient of x, weight residuals
    weight gradient  (residuals, weight res.)   -> gradients of params

`x` is the boundary activation that the stage receives, `y` the one it sends; `rest` is not
differentiated (rows, keys, a layer's number).

Example: `h = x @ w.astype(f32); y = h * tanh(h)` with `x: f32[4, 8]`, `w: bf16[8, 16]`. JAX traces

    forward   v = convert w;  h = dot x v;  t = tanh h;  u = sub 1 t;  y = mul h t
    backward  needs (x, v, t, u, h);  dh = f(dy, t, u, h);  dw = dot dh x;  dx = dot dh v

    residuals         x: f32[4, 8];  t, h: f32[4, 16]
    recomputed        v: f32[8, 16], because it depends on parameters only
                      u: f32[4, 16], because it is one cheap operation on a residual
    weight residuals  dh: f32[4, 16], computed for dx and read for dw as well

Parameters and rows are never residuals: the device still has them when the backward pass runs.

Sources: the split of the backward pass is Qi et al. 2023, https://arxiv.org/abs/2401.10241.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Literal
from jaxtyping import PyTree

from plurax.jaxpr.compat import open_jaxpr
from plurax.jaxpr.interpret import dependent, is_cheap, needed, variables
from plurax.partition.partial_sums import behind_readers
from plurax.partition.partitioner import Partitioner
from plurax.partition.values import OwnRows, ShardedValue, ValueVersions
from plurax.sharding.spec import TensorSharding

Values = list[ShardedValue]


class Inputs(NamedTuple):
    """The inputs of a `StageVjp`, flat: `params`, `x` and `rest`, lists of `ShardedValue`s."""

    params: Values
    x: Values
    rest: Values


class _Own(NamedTuple):
    """Whose rows a stored value has, as `OwnRows`, with the place of the sizes."""

    dim: int
    axes: tuple[str, ...]
    sizes: int


def _with_rows(
    values: Values, sizes: Sequence[ValueVersions] | None, own: Mapping[int, _Own]
) -> list[ValueVersions]:
    """Return stored values that know whose rows they have; `sizes` are by default among them."""
    cells = [ValueVersions(value) for value in values]
    for place, (dim, axes, index) in own.items():
        rows = OwnRows(dim, axes, (cells if sizes is None else sizes)[index])
        cells[place] = ValueVersions(dataclasses.replace(values[place], rows=rows))
    return cells


def _is_integer(var: Any) -> bool:
    """Whether a variable may be the sizes of groups of rows."""
    return jnp.issubdtype(var.aval.dtype, jnp.integer)


class StageVjp:
    """The forward and backward of one stage function, on the shards of one device.

    **Arguments:**

    - `fun`: `fun(params, x, rest) -> (y, aux)`, of whole tensors; `y` must be floating.
    - `params`, `x`, `rest`: its arguments as trees of `jax.ShapeDtypeStruct`s of whole tensors.
    - `partitioner`: the `Partitioner` that evaluates its equations on this device's shards.
    - `frozen`: indices of the params that are not differentiated; `params` is then a list.
    - `reads`, `writes`: the last `reads` leaves of `rest` and the last `writes` leaves of `aux` are
      model state. By the time of the backward pass the state has changed, so the residuals include
      what the backward pass needs of it.

    **Attributes:** `y` and `aux`, trees of `jax.ShapeDtypeStruct`s of whole tensors.
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        params: PyTree,
        x: PyTree,
        rest: PyTree,
        partitioner: Partitioner,
        *,
        frozen: Collection[int] = (),
        reads: int = 0,
        writes: int = 0,
    ) -> None:
        self.partitioner, self._reads, self._writes = partitioner, reads, writes
        self.sizes = tuple(len(jax.tree.leaves(part)) for part in (params, x, rest))
        self._num_grads = self.sizes[0] - len(frozen)
        structure: Any = None

        def forward(params: PyTree, x: PyTree, rest: PyTree) -> Any:
            nonlocal structure

            def of_some(some: PyTree, x: PyTree) -> Any:
                if not frozen:
                    return fun(some, x, rest)
                left = iter(some)
                all_ = [old if i in frozen else next(left) for i, old in enumerate(params)]
                return fun(all_, x, rest)

            some = [p for i, p in enumerate(params) if i not in frozen] if frozen else params
            y, back, aux = jax.vjp(of_some, some, x, has_aux=True)
            # `jax.vjp`'s function is a pytree: its leaves are all that the backward pass needs.
            leaves, structure = jax.tree.flatten(back)
            return y, aux, leaves

        def backward(leaves: Sequence[Any], cotangent: PyTree) -> Any:
            return jax.tree.unflatten(structure, leaves)(cotangent)

        closed, (self.y, self.aux, leaves) = partitioner.traced(forward, params, x, rest)
        backward_jaxpr, _ = partitioner.traced(backward, leaves, self.y)
        self._forward, self._constants = open_jaxpr(closed)
        self._backward, self._back_constants = open_jaxpr(backward_jaxpr)
        self._count = len(jax.tree.leaves((self.y, self.aux)))
        self._needed = self._forward.outvars[self._count :]
        residuals, self._recomputed = self._choose_residuals()
        self._residuals = list(residuals)
        # By the place of a residual, and of a weight residual: whose rows it has.
        self._own: dict[int, _Own] = {}
        self._weight_own: dict[int, _Own] = {}
        self._later = self._read_later()
        self._split_backward()

    def _choose_residuals(self) -> tuple[dict[Any, None], list[Any]]:
        """Split what the backward pass needs into residuals and variables to recompute.

        Returns the residuals as the keys of a dict (it keeps their order), and the others.
        """
        params, x, rest = self._groups()
        # An effect must not happen again in the backward pass.
        effects = [var for eqn in self._forward.eqns if eqn.effects for var in eqn.outvars]
        depends = dependent(self._forward.eqns, [*x, *rest, *effects])
        # The device still has these when the backward pass runs; model state has changed by then.
        available = {*params, *rest[: len(rest) - self._reads], *self._forward.constvars}
        missing = [atom for atom in variables(self._needed) if atom not in available]
        residuals = {atom: None for atom in missing if atom in depends}
        recomputed = [atom for atom in dict.fromkeys(missing) if atom not in residuals]
        # Recompute the result of a cheap operation whose operands are residuals or available: that
        # costs less than to store and load it. Backwards, so that an operand is still a residual
        # when its reader is looked at.
        for eqn in reversed(self._forward.eqns):
            if len(eqn.outvars) == 1 and eqn.outvars[0] in residuals and is_cheap(eqn):
                read = variables(eqn.invars)
                if all(a in residuals or a in available or a not in depends for a in read):
                    del residuals[eqn.outvars[0]]
                    recomputed.append(eqn.outvars[0])
        return residuals, recomputed

    def _read_later(self) -> list[int | None]:
        """Return for each residual how many numbers the backward pass reduces if it is a partial
        sum there; None if it is reduced before."""
        behind, whole = behind_readers(self._backward.eqns, self._backward.outvars, {})
        every = zip(self._needed, self._backward.invars, strict=False)
        pairs = [(atom, var) for atom, var in every if not isinstance(atom, Literal)]
        reduced = {atom for atom, var in pairs if var in whole}
        sums = {atom: behind.get(var, 0) for atom, var in pairs if atom not in reduced}
        eqns = needed(self._forward.eqns, self._recomputed, {*self._residuals})
        behind, _ = behind_readers(eqns, list(reduced), sums)
        return [behind.get(atom) for atom in self._residuals]

    def _groups(self) -> tuple[list[Any], list[Any], list[Any]]:
        """Return the forward jaxpr's variables of params, x and rest."""
        first, second, _ = self.sizes
        inputs = list(self._forward.invars)
        return inputs[:first], inputs[first : first + second], inputs[first + second :]

    def _split_backward(self) -> None:
        """Split the backward equations: those that the input's gradient needs, and the others.

        Sets `_input_eqns`, `_weight_eqns`, `_sizes`, the integers that both may read, and
        `_weight_residuals`: the variables that the second part reads and the first part (or the
        cotangent) provides.
        """
        outputs = self._backward.outvars
        self._sizes = list(filter(_is_integer, self._backward.invars[: len(self._needed)]))
        self._param_grads = outputs[: self._num_grads]
        self._input_grads = outputs[self._num_grads :]
        self._input_eqns = needed(self._backward.eqns, self._input_grads, set())
        first = set(map(id, self._input_eqns))
        self._weight_eqns = [eqn for eqn in self._backward.eqns if id(eqn) not in first]
        read = [a for eqn in self._weight_eqns for a in eqn.invars] + list(self._param_grads)
        given = {var for eqn in self._input_eqns for var in eqn.outvars}
        given |= set(self._backward.invars[len(self._needed) :])
        self._weight_residuals = [var for var in dict.fromkeys(variables(read)) if var in given]

    # --- Evaluating ---------------------------------------------------------------------------

    def forward(
        self, inputs: Inputs, wanted: Sequence[TensorSharding] | None = (), *, keep: bool = True
    ) -> tuple[Values, Values, Values]:
        """Evaluate the forward pass; return `y`, `aux` and the residuals.

        `wanted` are the shardings of `y`: empty for those in which it is computed (partial sums
        reduced), None to leave `y` out. Without `keep` there are no residuals. The model state in
        `aux` is replicated.
        """
        size = len(jax.tree.leaves(self.y))
        y = [] if wanted is None else self._forward.outvars[:size]
        aux = self._forward.outvars[size : self._count]
        count = len(y) + len(aux)
        results = [*y, *aux, *(self._residuals if keep else ())]
        later = [*[None] * count, *self._later]
        cells = self.partitioner.evaluate_part(
            self._forward.eqns, self._known(inputs), results, with_sizes=True, later=later
        )
        y_cells, others, kept = cells[: len(y)], cells[len(y) : count], cells[count:]
        residuals = self._stored(kept, kept, self._own)
        rest = [self.partitioner.value(cell) for cell in others]
        for index in range(len(aux) - self._writes, len(aux)):
            rest[index] = self.partitioner.reshard(
                others[index], TensorSharding.replicated(len(others[index].shape))
            )
        if wanted:
            y_values = self._reshard(y_cells, wanted)
        else:
            y_values = [self.partitioner.reduced(cell) for cell in y_cells]
        return y_values, rest, residuals

    def backward(
        self,
        inputs: Inputs,
        residuals: Values,
        cotangent: Values,
        shardings: Sequence[TensorSharding],
        goals: Sequence[TensorSharding | None],
    ) -> tuple[Values, Values]:
        """Evaluate the whole backward pass; return the gradients of params and of x.

        `shardings` are those of the gradients of x; `goals` those of the params, None for the
        sharding in which a gradient is computed, possibly a partial sum. `inputs.x` is not read.
        """
        known = self._back_known(inputs, residuals, cotangent)
        results = [*self._param_grads, *self._input_grads]
        wanted = [*goals, *[None] * len(self._input_grads)]
        cells = self.partitioner.evaluate_part(self._backward.eqns, known, results, wanted)
        count = len(self._param_grads)
        grads = self.partitioner.finish(cells[:count], goals)
        return grads, self._reshard(cells[count:], shardings)

    def input_gradient(
        self,
        inputs: Inputs,
        residuals: Values,
        cotangent: Values,
        shardings: Sequence[TensorSharding],
    ) -> tuple[Values, Values]:
        """Evaluate B of a split backward; return the gradients of x and the weight residuals."""
        known = self._back_known(inputs, residuals, cotangent)
        results = [*self._input_grads, *self._weight_residuals]
        cells = self.partitioner.evaluate_part(
            self._input_eqns, known, [*results, *self._sizes], with_sizes=True
        )
        count, weight = len(self._input_grads), cells[len(self._input_grads) : len(results)]
        weight_residuals = self._stored(weight, cells[len(results) :], self._weight_own)
        return self._reshard(cells[:count], shardings), weight_residuals

    def weight_gradient(
        self,
        inputs: Inputs,
        residuals: Values,
        weight_residuals: Values,
        goals: Sequence[TensorSharding | None],
    ) -> Values:
        """Evaluate W of a split backward; return the gradients of params, sharded as `goals`.

        A goal None keeps the sharding in which the gradient is computed. `weight_residuals` are
        those that `input_gradient` returned.
        """
        known = self._back_known(inputs, residuals, [])
        sizes = [known[var] for var in self._sizes]
        stored = _with_rows(weight_residuals, sizes, self._weight_own)
        known.update(zip(self._weight_residuals, stored, strict=True))
        results = list(self._param_grads)
        cells = self.partitioner.evaluate_part(self._weight_eqns, known, results, goals)
        return self.partitioner.finish(cells, goals)

    def _known(self, inputs: Inputs) -> dict[Any, ValueVersions]:
        """Return the values of the forward jaxpr's constants and inputs."""
        constants = map(self.partitioner.constant, self._constants)
        known = dict(zip(self._forward.constvars, constants, strict=True))
        for group, values in zip(self._groups(), inputs, strict=True):
            # Not strict: a backward pass gets neither x nor model state, only residuals of them.
            known.update(zip(group, map(ValueVersions, values), strict=False))
        return known

    def _back_known(
        self, inputs: Inputs, residuals: Values, cotangent: Values
    ) -> dict[Any, ValueVersions]:
        """Return the values of the backward jaxpr's inputs; recompute those that are no residuals.

        The cotangent may be empty: W gets weight residuals instead.
        """
        forward = self._known(inputs._replace(x=[]))
        stored = _with_rows(residuals, None, self._own)
        forward.update(zip(self._residuals, stored, strict=True))
        if self._recomputed:
            results = self._recomputed
            eqns = needed(self._forward.eqns, results, forward)
            sizes = list(filter(_is_integer, self._residuals))
            recomputed = self.partitioner.evaluate_part(
                eqns, forward, [*results, *sizes], with_sizes=True
            )
            forward.update(zip(results, recomputed, strict=False))
        constants = map(self.partitioner.constant, self._back_constants)
        known = dict(zip(self._backward.constvars, constants, strict=True))
        count = len(self._needed)
        for var, atom in zip(self._backward.invars[:count], self._needed, strict=True):
            is_constant = isinstance(atom, Literal)
            known[var] = self.partitioner.constant(atom.val) if is_constant else forward[atom]
        known.update(
            zip(self._backward.invars[count:], map(ValueVersions, cotangent), strict=False)
        )
        return known

    def _stored(
        self,
        cells: Sequence[ValueVersions],
        sizes: Sequence[ValueVersions],
        own: dict[int, _Own],
    ) -> Values:
        """Return values to store; whose rows they have goes to `own`, by their place.

        `sizes` are values of which some are the sizes of groups of rows.
        """
        values = list(map(self.partitioner.stored, cells))
        for place, value in enumerate(values):
            rows = value.own_rows
            if rows is not None and rows.sizes in sizes:
                own[place] = _Own(rows.dim, rows.axes, sizes.index(rows.sizes))
        return [dataclasses.replace(value, rows=None) for value in values]

    def _reshard(
        self, cells: Sequence[ValueVersions], shardings: Sequence[TensorSharding]
    ) -> Values:
        pairs = zip(cells, shardings, strict=True)
        return [self.partitioner.reshard(cell, sharding) for cell, sharding in pairs]
