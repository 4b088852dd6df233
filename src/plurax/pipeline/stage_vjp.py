"""A part of a network between two cuts: its forward pass, and its backward pass in one part or two.

The part is a function `(params, x, rest) -> (y, aux)`: `x` is what the part before handed on, `y`
what it hands on itself, `rest` what is not trained (rows, keys, the number of a layer). It is
differentiated once, as a traced function, and its equations are dealt out:

    forward           y, aux, and what the backward pass needs of it: what is *kept*
    backward          gradients of params and x, from what is kept and the cotangent of y
    or, in two:
    input gradient    that of x, and what the rest needs of it: what is *left*
    weight gradient   those of params, from what is kept and left

Of what the backward pass needs, parameters and rows are not kept, nor what follows from parameters
alone (a cast, a mask), nor what a cheap operation makes of what is kept (a product, a comparison):
they are there still, or computed again.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import Literal
from jaxtyping import PyTree

from plurax.jaxpr.primitives import cheap, open_jaxpr
from plurax.partition.partitioner import Partitioner
from plurax.partition.values import ShardedValue, ValueVersions
from plurax.sharding.spec import TensorSharding

Values = list[ShardedValue]


class Inputs(NamedTuple):
    """The inputs of a piece, flat: `params`, `x` and `rest`, lists of `ShardedValue`s."""

    params: Values
    x: Values
    rest: Values


class StageVjp:
    """One part of a network, on the shards of one device.

    **Arguments:** `fun(params, x, rest) -> (y, aux)`; its arguments as trees of
    `jax.ShapeDtypeStruct`s of whole tensors; `divider`, which walks it. `y` must be floating. The
    last `reads` leaves of `rest` and the last `writes` of `aux` are model state: by the time of the
    backward pass it has changed, so that what is needed of it is kept.

    **Attributes:** `y` and `aux`, trees of `jax.ShapeDtypeStruct`s.
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
        """Of what the backward pass needs: what is kept, and what is computed again."""
        trained, handed, rest = self._groups()
        depends: dict[Any, bool] = dict.fromkeys(handed + rest, True)
        for eqn in self._forward.eqns:
            some = any(depends.get(a, False) for a in eqn.invars if not isinstance(a, Literal))
            depends.update(dict.fromkeys(eqn.outvars, some))
        there = {*trained, *rest[: len(rest) - self._reads], *self._forward.constvars}
        needed = [a for a in self._needed if not isinstance(a, Literal) and a not in there]
        kept = {atom: None for atom in needed if depends.get(atom, False)}
        again = [atom for atom in dict.fromkeys(needed) if atom not in kept]
        # What one cheap operation makes of what is kept anyway is made again.
        for eqn in reversed(self._forward.eqns):
            if len(eqn.outvars) == 1 and eqn.outvars[0] in kept and cheap(eqn):
                read = [a for a in eqn.invars if not isinstance(a, Literal)]
                if all(a in kept or a in there or not depends.get(a, False) for a in read):
                    del kept[eqn.outvars[0]]
                    again.append(eqn.outvars[0])
        return kept, again

    def _groups(self) -> tuple[list[Any], list[Any], list[Any]]:
        """The variables of params, x and rest."""
        first, second, _ = self.sizes
        inputs = list(self._forward.invars)
        return inputs[:first], inputs[first : first + second], inputs[first + second :]

    def _cut(self) -> None:
        """Which equations of the backward pass belong to the input's gradient."""
        params = self.sizes[0]
        outputs = self._backward.outvars
        self._weights, self._inputs = outputs[:params], outputs[params:]
        needed = {a for a in self._inputs if not isinstance(a, Literal)}
        self._first, self._second = [], []
        for eqn in reversed(self._backward.eqns):
            if needed & set(eqn.outvars):
                needed.update(a for a in eqn.invars if not isinstance(a, Literal))
                self._first.append(eqn)
            else:
                self._second.append(eqn)
        self._first.reverse()
        self._second.reverse()
        read = [a for eqn in self._second for a in eqn.invars] + list(self._weights)
        made = {var for eqn in self._first for var in eqn.outvars}
        made |= set(self._backward.invars[len(self._needed) :])
        variables = (a for a in read if not isinstance(a, Literal))
        self._left = [var for var in dict.fromkeys(variables) if var in made]

    # --- Evaluating ---------------------------------------------------------------------------

    def forward(
        self, inputs: Inputs, wanted: Sequence[TensorSharding] | None = (), *, keep: bool = True
    ) -> tuple[Values, Values, Values]:
        """`y`, `aux` and what is kept.

        `y` lies as `wanted`, or, where that is empty, as it comes; None leaves it out. Model state
        is whole.
        """
        size = len(jax.tree.leaves(self.y))
        handed = [] if wanted is None else self._forward.outvars[:size]
        aux = self._forward.outvars[size : self._count]
        results = [*handed, *aux, *(self._kept if keep else ())]
        cells = self.divider.evaluate_part(self._forward.eqns, self._known(inputs), results)
        front, behind = cells[: len(handed)], cells[len(handed) :]
        rest = [cell.value for cell in behind]
        for place in range(len(aux) - self._writes, len(aux)):
            rest[place] = self.divider.reshard(
                behind[place], TensorSharding.whole(len(behind[place].shape))
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
        lies: Sequence[TensorSharding],
        goals: Sequence[TensorSharding | None],
    ) -> tuple[Values, Values]:
        """Gradients of params and x: x's as it `lies`, params' as their `goals` or as they come."""
        known = self._back_known(inputs, kept, cotangent)
        results = [*self._weights, *self._inputs]
        wanted = [*goals, *[None] * len(self._inputs)]
        cells = self.divider.evaluate_part(self._backward.eqns, known, results, wanted)
        count = len(self._weights)
        return self.divider.finish(cells[:count], goals), self._handed(cells[count:], lies)

    def input_gradient(
        self, inputs: Inputs, kept: Values, cotangent: Values, lies: Sequence[TensorSharding]
    ) -> tuple[Values, Values]:
        """The gradient of x, and what is left for that of params."""
        known = self._back_known(inputs, kept, cotangent)
        results = [*self._inputs, *self._left]
        cells = self.divider.evaluate_part(self._first, known, results)
        count = len(self._inputs)
        return self._handed(cells[:count], lies), [cell.value for cell in cells[count:]]

    def weight_gradient(
        self, inputs: Inputs, kept: Values, left: Values, goals: Sequence[TensorSharding | None]
    ) -> Values:
        """The gradients of params, as their `goals` or as they come."""
        known = self._back_known(inputs, kept, [])
        known.update(zip(self._left, map(ValueVersions, left), strict=True))
        cells = self.divider.evaluate_part(self._second, known, list(self._weights), goals)
        return self.divider.finish(cells, goals)

    def _known(self, inputs: Inputs) -> dict[Any, ValueVersions]:
        known = dict(
            zip(self._forward.constvars, map(self.divider.constant, self._constants), strict=True)
        )
        for variables, values in zip(self._groups(), inputs, strict=True):
            # Of a backward pass neither x nor model state are given: what it needs was kept.
            known.update(zip(variables, map(ValueVersions, values), strict=False))
        return known

    def _back_known(
        self, inputs: Inputs, kept: Values, cotangent: Values
    ) -> dict[Any, ValueVersions]:
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

    def _handed(self, cells: Sequence[ValueVersions], lies: Sequence[TensorSharding]) -> Values:
        return [self.divider.reshard(cell, one) for cell, one in zip(cells, lies, strict=True)]
