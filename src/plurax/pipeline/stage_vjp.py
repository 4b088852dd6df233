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

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import Literal
from jaxtyping import PyTree

from plurax.jaxpr.compat import open_jaxpr
from plurax.jaxpr.interpret import dependent, is_cheap, needed, variables
from plurax.partition.partitioner import Partitioner
from plurax.partition.values import ShardedValue, ValueVersions
from plurax.sharding.spec import TensorSharding

Values = list[ShardedValue]


class Inputs(NamedTuple):
    """The inputs of a `StageVjp`, flat: `params`, `x` and `rest`, lists of `ShardedValue`s."""

    params: Values
    x: Values
    rest: Values


class StageVjp:
    """The forward and backward of one stage function, on the shards of one device.

    **Arguments:**

    - `fun`: `fun(params, x, rest) -> (y, aux)`, of whole tensors; `y` must be floating.
    - `params`, `x`, `rest`: its arguments as trees of `jax.ShapeDtypeStruct`s of whole tensors.
    - `divider`: the `Partitioner` that evaluates its equations on this device's shards.
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
        divider: Partitioner,
        *,
        reads: int = 0,
        writes: int = 0,
    ) -> None:
        self.divider, self._reads, self._writes = divider, reads, writes
        self.sizes = tuple(len(jax.tree.leaves(part)) for part in (params, x, rest))
        structure: Any = None

        def forward(params: PyTree, x: PyTree, rest: PyTree) -> Any:
            nonlocal structure
            y, back, aux = jax.vjp(lambda p, x: fun(p, x, rest), params, x, has_aux=True)
            needed, structure = jax.tree.flatten(back)
            return y, aux, needed

        def backward(needed: Sequence[Any], cotangent: PyTree) -> Any:
            return jax.tree.unflatten(structure, needed)(cotangent)

        closed, (self.y, self.aux, needed) = divider.traced(forward, params, x, rest)
        back, _ = divider.traced(backward, needed, self.y)
        self._forward, self._constants = open_jaxpr(closed)
        self._backward, self._back_constants = open_jaxpr(back)
        self._count = len(jax.tree.leaves((self.y, self.aux)))
        self._needed = self._forward.outvars[self._count :]
        kept, self._again = self._sorted()
        self._kept = list(kept)
        self._cut()

    def _sorted(self) -> tuple[dict[Any, None], list[Any]]:
        """Split what the backward pass needs into residuals and variables to recompute.

        Returns the residuals as the keys of a dict (it keeps their order), and the others.
        """
        trained, handed, rest = self._groups()
        depends = dependent(self._forward.eqns, handed + rest)
        there = {*trained, *rest[: len(rest) - self._reads], *self._forward.constvars}
        stored = [atom for atom in variables(self._needed) if atom not in there]
        kept = {atom: None for atom in stored if atom in depends}
        again = [atom for atom in dict.fromkeys(stored) if atom not in kept]
        # Recompute the result of a cheap operation whose operands are residuals or at hand: that
        # costs less than to store and load it. Backwards, so that an operand is still a residual
        # when its reader is looked at.
        for eqn in reversed(self._forward.eqns):
            if len(eqn.outvars) == 1 and eqn.outvars[0] in kept and is_cheap(eqn):
                read = variables(eqn.invars)
                if all(a in kept or a in there or a not in depends for a in read):
                    del kept[eqn.outvars[0]]
                    again.append(eqn.outvars[0])
        return kept, again

    def _groups(self) -> tuple[list[Any], list[Any], list[Any]]:
        """Return the forward jaxpr's variables of params, x and rest."""
        first, second, _ = self.sizes
        inputs = list(self._forward.invars)
        return inputs[:first], inputs[first : first + second], inputs[first + second :]

    def _cut(self) -> None:
        """Split the backward equations: those that the input's gradient needs, and the others.

        Sets `_first` and `_second`, and `_left`, the weight residuals: the variables that the
        second part reads and the first part (or the cotangent) provides.
        """
        params = self.sizes[0]
        outputs = self._backward.outvars
        self._weights, self._inputs = outputs[:params], outputs[params:]
        self._first = needed(self._backward.eqns, self._inputs, set())
        first = set(map(id, self._first))
        self._second = [eqn for eqn in self._backward.eqns if id(eqn) not in first]
        read = [a for eqn in self._second for a in eqn.invars] + list(self._weights)
        made = {var for eqn in self._first for var in eqn.outvars}
        made |= set(self._backward.invars[len(self._needed) :])
        self._left = [var for var in dict.fromkeys(variables(read)) if var in made]

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
        handed = [] if wanted is None else self._forward.outvars[:size]
        aux = self._forward.outvars[size : self._count]
        results = [*handed, *aux, *(self._kept if keep else ())]
        cells = self.divider.evaluate_part(self._forward.eqns, self._known(inputs), results)
        front, behind = cells[: len(handed)], cells[len(handed) :]
        rest = [self.divider.value(cell) for cell in behind]
        for place in range(len(aux) - self._writes, len(aux)):
            rest[place] = self.divider.reshard(
                behind[place], TensorSharding.replicated(len(behind[place].shape))
            )
        if wanted:
            made = [
                self.divider.reshard(cell, one) for cell, one in zip(front, wanted, strict=True)
            ]
        else:
            made = [self.divider.reduced(cell) for cell in front]
        return made, rest[: len(aux)], rest[len(aux) :]

    def backward(
        self,
        inputs: Inputs,
        kept: Values,
        cotangent: Values,
        shardings: Sequence[TensorSharding],
        goals: Sequence[TensorSharding | None],
    ) -> tuple[Values, Values]:
        """Evaluate the whole backward pass; return the gradients of params and of x.

        `shardings` are those of the gradients of x; `goals` those of the params, None for the
        sharding in which a gradient is computed, possibly a partial sum. `inputs.x` is not read.
        """
        known = self._back_known(inputs, kept, cotangent)
        results = [*self._weights, *self._inputs]
        wanted = [*goals, *[None] * len(self._inputs)]
        cells = self.divider.evaluate_part(self._backward.eqns, known, results, wanted)
        count = len(self._weights)
        return self.divider.finish(cells[:count], goals), self._handed(cells[count:], shardings)

    def input_gradient(
        self, inputs: Inputs, kept: Values, cotangent: Values, shardings: Sequence[TensorSharding]
    ) -> tuple[Values, Values]:
        """Evaluate B of a split backward; return the gradients of x and the weight residuals."""
        known = self._back_known(inputs, kept, cotangent)
        results = [*self._inputs, *self._left]
        cells = self.divider.evaluate_part(self._first, known, results)
        count = len(self._inputs)
        return self._handed(cells[:count], shardings), [
            self.divider.value(cell) for cell in cells[count:]
        ]

    def weight_gradient(
        self, inputs: Inputs, kept: Values, left: Values, goals: Sequence[TensorSharding | None]
    ) -> Values:
        """Evaluate W of a split backward; return the gradients of params, sharded as `goals`.

        A goal None keeps the sharding in which the gradient is computed. `left` are the weight
        residuals that `input_gradient` returned.
        """
        known = self._back_known(inputs, kept, [])
        known.update(zip(self._left, map(ValueVersions, left), strict=True))
        cells = self.divider.evaluate_part(self._second, known, list(self._weights), goals)
        return self.divider.finish(cells, goals)

    def _known(self, inputs: Inputs) -> dict[Any, ValueVersions]:
        """Return the values of the forward jaxpr's constants and inputs."""
        known = dict(
            zip(self._forward.constvars, map(self.divider.constant, self._constants), strict=True)
        )
        for group, values in zip(self._groups(), inputs, strict=True):
            # Not strict: a backward pass gets neither x nor model state, only residuals of them.
            known.update(zip(group, map(ValueVersions, values), strict=False))
        return known

    def _back_known(
        self, inputs: Inputs, kept: Values, cotangent: Values
    ) -> dict[Any, ValueVersions]:
        """Return the values of the backward jaxpr's inputs; recompute those that are no residuals.

        The cotangent may be empty: W gets weight residuals instead.
        """
        there = self._known(inputs._replace(x=[]))
        there.update(zip(self._kept, map(ValueVersions, kept), strict=True))
        if self._again:
            again = self.divider.evaluate_part(self._forward.eqns, there, self._again)
            there.update(zip(self._again, again, strict=True))
        known = dict(
            zip(
                self._backward.constvars,
                map(self.divider.constant, self._back_constants),
                strict=True,
            )
        )
        count = len(self._needed)
        for var, atom in zip(self._backward.invars[:count], self._needed, strict=True):
            is_constant = isinstance(atom, Literal)
            known[var] = self.divider.constant(atom.val) if is_constant else there[atom]
        known.update(
            zip(self._backward.invars[count:], map(ValueVersions, cotangent), strict=False)
        )
        return known

    def _handed(
        self, cells: Sequence[ValueVersions], shardings: Sequence[TensorSharding]
    ) -> Values:
        """Reshard the gradients of x to the shardings in which they are sent back."""
        return [self.divider.reshard(cell, one) for cell, one in zip(cells, shardings, strict=True)]
