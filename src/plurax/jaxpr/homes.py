"""Assign the equations of an optimizer's update to the places where its tensors are.

The update is one function of all parameters, gradients and optimizer state, and each tensor is in
one place, such as the devices of one stage of a pipeline. An equation that reads tensors of one
place is computed there, its home; the others are computed in all places. Only scalars cross, such
as partial squared norms. So an optimizer with a norm over all parameters needs no code of its own.

Example: `optax.clip_by_global_norm(1.0)` with `w0: f32[8, 4]` in place 0 and `w1: f32[4, 2]` in
place 1:

    round 0   place 0         a = sum(g0 ** 2)                    f32[]
              place 1         b = sum(g1 ** 2)                    f32[]
              between them    a and b cross, 8 bytes
    round 1   all places      scale = 1 / max(sqrt(a + b), 1)     f32[]
              place 0         w0 - rate * scale * g0              f32[8, 4]
              place 1         w1 - rate * scale * g1              f32[4, 2]

A variable's *round* is the number of such crossings that precede it. All scalars that cross after
one round cross together, so the number of crossings is the depth of the dependency chain, not the
number of scalars.

A `lax.cond` whose cases read tensors of several places (an optimizer that skips a step, say) would
be one equation in several places. It becomes all its cases in sequence and one `select_n` per
result, so that each equation of the cases gets a home by itself.

A large tensor may be *cut*: every place has some of its rows. What is computed from it entry by
entry is cut too; a sum over all its entries is a part in each place, and crosses:

    w: f32[8, 4], rows 0 to 3 in place 0, rows 4 to 7 in place 1

    round 0   place 0         a0 = sum(g[:4] ** 2)                f32[], a part of a
              place 1         a1 = sum(g[4:] ** 2)                f32[], a part of a
              between them    a = a0 + a1
    round 1   place 0         w[:4] - rate * a * g[:4]            f32[4, 4]

Every other operation needs the tensor in one place (`NotCutError`).
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import Literal

from plurax.jaxpr.compat import ELEMENTWISE, is_call, open_jaxpr
from plurax.jaxpr.interpret import bind, interpret, variables

MAX_CROSSING = 1
"""Maximal number of elements of a tensor that crosses from one place to all."""

PARTS: dict[str, Callable[[Sequence[Any]], Any]] = {
    "reduce_sum": sum,
    "reduce_max": max,
    "reduce_min": min,
    "reduce_and": all,
    "reduce_or": any,
}
"""Reductions that can be computed in parts, and how the parts are combined."""

Trace = Callable[..., Any]
"""`jax.make_jaxpr`, applied: `(fun, *args) -> closed jaxpr`."""


@dataclasses.dataclass(frozen=True)
class RowSplit:
    """The place of a tensor of which every place has some rows.

    **Fields:** `owner`, a number: tensors of one owner are cut alike.
    """

    owner: int


Place = int | RowSplit | None
"""Where a tensor is; None: in all places."""


class NotCutError(Exception):
    """Tensors that are cut are needed in one place. `owners`: theirs."""

    def __init__(self, owners: set[int]) -> None:
        super().__init__(owners)
        self.owners = owners


class Homes:
    """A traced function whose equations are assigned to places and rounds.

    **Arguments:**

    - `trace`: `(fun, *args)` to a closed jaxpr.
    - `fun`: `fun(*leaves) -> leaves`, of whole tensors; `leaves`, their `jax.ShapeDtypeStruct`s.
    - `inputs`: for each leaf its place, None for all places.
    - `results`: for each result the place that needs it, None for all places.
    - `refused`: the error of an operation, by name, that reads tensors (of more than
      `MAX_CROSSING` elements) of several places, or whose result another place than its own needs.

    **Attributes:** `jaxpr`, `consts`; `home`, the place of each variable that is not computed in
    all places; `crossing`, for each scalar that crosses the round in which it is computed; `parts`,
    for each that every place computes a part of, the name of the reduction.

    Raises `NotCutError` where tensors that `inputs` has cut have to be in one place.
    """

    def __init__(
        self,
        trace: Trace,
        fun: Callable[..., Sequence[Any]],
        leaves: Sequence[jax.ShapeDtypeStruct],
        inputs: Sequence[Place],
        results: Sequence[Place],
        refused: Callable[[str], Exception],
    ) -> None:
        self._inputs, self._refused = inputs, refused
        body, consts = open_jaxpr(trace(lambda *args: list(fun(*args)), *leaves))
        # A call (`jit`) around the update of all parameters would be one equation in all places.
        whole = functools.partial(interpret, body, consts, inline=is_call)
        self.jaxpr, self.consts = open_jaxpr(trace(lambda *args: whole(args), *leaves))
        # A case may contain another `cond`, which appears once the outer one is replaced.
        while several := self._branches_of_several():
            selecting = functools.partial(_selecting, self.jaxpr, self.consts, several)
            self.jaxpr, self.consts = open_jaxpr(trace(selecting, *leaves))
        self.home: dict[Any, int | RowSplit] = {}
        self.crossing: dict[Any, int] = {}
        self.parts: dict[Any, str] = {}
        self._at: dict[int, tuple[Place, int]] = {}
        self._label(results)

    @property
    def rounds(self) -> int:
        """How many rounds there are; scalars cross between them."""
        ends = [*(at for _, at in self._at.values()), *(n + 1 for n in self.crossing.values())]
        return max(ends, default=0) + 1

    def of(self, *places: int | None, round: int | None = None) -> list[Any]:
        """Return the equations of some places, None for those of all; of one round, if given.

        Equations of tensors that are cut are in every place.
        """
        return [
            eqn
            for eqn in self.jaxpr.eqns
            for home, at in [self._at[id(eqn)]]
            if (home in places or isinstance(home, RowSplit)) and round in (None, at)
        ]

    def readers(self) -> dict[Any, str]:
        """Return for each variable of all places that a single one reads the reader's name."""
        return {
            atom: eqn.primitive.name
            for eqn in self.jaxpr.eqns
            if self._at[id(eqn)][0] is not None
            for atom in variables(eqn.invars)
            if atom not in self.home
        }

    def _branches_of_several(self) -> set[int]:
        """Return the `id`s of the `cond` equations that read tensors of several places."""
        homes: dict[Any, frozenset[int | RowSplit]] = {}
        for var, place in zip(self.jaxpr.invars, self._inputs, strict=True):
            if place is not None:
                homes[var] = frozenset([place])
        several = set()
        for eqn in self.jaxpr.eqns:
            read = [a for a in variables(eqn.invars) if a.aval.size != MAX_CROSSING]
            at = frozenset[int | RowSplit]().union(*(homes.get(atom, ()) for atom in read))
            homes.update(dict.fromkeys(eqn.outvars, at))
            cut = any(isinstance(place, RowSplit) for place in at)
            if eqn.primitive.name == "cond" and (len(at) > 1 or cut):
                several.add(id(eqn))
        return several

    def _label(self, results: Sequence[Place]) -> None:
        """Assign each equation a place (or all) and a round, and find the scalars that cross."""
        home, rounds = self.home, dict[Any, int]()
        whole = set[int]()
        for var, place in zip(self.jaxpr.invars, self._inputs, strict=True):
            if place is not None:
                home[var] = place

        def crosses(atom: Any, operation: str) -> int:
            """Let a scalar cross; return the round in which it has."""
            if atom.aval.size > MAX_CROSSING:
                raise self._refused(operation)
            self.crossing[atom] = rounds.get(atom, 0)
            return self.crossing[atom] + 1

        for eqn in self.jaxpr.eqns:
            name, read = eqn.primitive.name, variables(eqn.invars)
            at = max((rounds.get(a, 0) for a in read), default=0)
            # A sum of parts is there once they have crossed.
            at = max((crosses(a, name) for a in read if a in self.parts), default=at)
            own = [a for a in read if a in home and a not in self.parts]
            places = {home[a] for a in own}
            cut = {place for place in places if isinstance(place, RowSplit)}
            if cut and not self._is_cut(eqn, own):
                whole |= {place.owner for place in cut}
                places = set()
            small = all(a.aval.size == MAX_CROSSING for a in own)  # an empty tensor stays
            mixed = len(own) < len(read)
            # An equation on scalars of one place and on a value of all places (`norm + eps`) is
            # computed in all places: its result is then at hand for every later reader, and the
            # scalars cross now or never. A tensor of one place keeps the equation there.
            if not cut and (len(places) > 1 or (places and small and mixed)):
                at = max(at, *(crosses(atom, name) for atom in own))
                places = set()
            place = next(iter(places), None)
            self._at[id(eqn)] = place, at
            rounds.update(dict.fromkeys(eqn.outvars, at))
            if place is not None:
                home.update(dict.fromkeys(eqn.outvars, place))
            if places and cut and name in PARTS:
                self.parts[eqn.outvars[0]] = name
        for atom, wanted in zip(self.jaxpr.outvars, results, strict=True):
            found = None if isinstance(atom, Literal) else home.get(atom)
            if isinstance(wanted, RowSplit) and found != wanted:
                whole.add(wanted.owner)
            elif found not in (None, wanted):
                crosses(atom, "the result")
        if whole:
            raise NotCutError(whole)

    def _is_cut(self, eqn: Any, own: Sequence[Any]) -> bool:
        """Return whether an equation on tensors that are cut can be computed on some rows alone."""
        first, *others = own
        shape, out = first.aval.shape, eqn.outvars[0].aval
        if any((self.home[a], a.aval.shape) != (self.home[first], shape) for a in others):
            return False
        if eqn.primitive.name in ELEMENTWISE:
            alike = all(atom.aval.shape in ((), shape) for atom in eqn.invars)
            return alike and out.shape == shape
        return eqn.primitive.name in PARTS and out.shape == ()


def _selecting(jaxpr: Any, consts: Sequence[Any], several: set[int], *args: Any) -> list[Any]:
    """Evaluate a jaxpr, with the `cond` equations whose `id` is in `several` as selections.

    All cases are evaluated; they are pure, so an unused one costs time only.
    """

    def selected(eqn: Any, inputs: list[Any]) -> list[Any]:
        if id(eqn) not in several:
            return bind(eqn, inputs)
        which, *operands = inputs
        bodies = map(open_jaxpr, eqn.params["branches"])
        cases = [interpret(*body, operands, inline=is_call) for body in bodies]
        return [lax.select_n(which, *values) for values in zip(*cases, strict=True)]

    return interpret(jaxpr, consts, args, {"cond": selected})
