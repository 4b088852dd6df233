"""Follow one dim through the equations of softmax attention, and cut out what reads it.

Attention computes, for each of T queries, a number for each of S keys, and reduces the keys again:

    equation                 shape     the dim of keys     form of the value
    x = q · k                (T, S)    1                   free
    y = where(mask, x, -1e9) (T, S)    1                   free; the mask is an input, or iotas
    m = max(y)               (T,)      is reduced          a statistic
    e = exp(y - m)           (T, S)    1                   weight: free × exp(-m)
    l = sum(e)               (T,)      is reduced          a statistic
    p = e / l                (T, S)    1                   weight: free × exp(-m) / l
    o = p · v                (T, H)    is contracted       a statistic

No pattern of operations is looked for. `follow` starts at a product whose result has a dim of its
own from each operand, follows the dim of one of them through whatever reads it, and ends where it
is summed, contracted, or its maximum is taken. What lies in between is a `Region`, which can be
evaluated on a block of keys at a time (see `plurax.jaxpr.stream`).

Following dims instead of matching patterns is the way of Shardy's sharding rules
(https://openxla.org/shardy); matchers of attention were brittle
(https://github.com/openxla/xla/pull/23389).
"""

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from jax.extend.core import Literal

from plurax.jaxpr.compat import ELEMENTWISE, REDUCTIONS
from plurax.jaxpr.degrees import Degrees
from plurax.jaxpr.equal_dims import equal_dims, is_bitcast, shape_of
from plurax.jaxpr.forms import FREE, KEPT, Form, Forms, NotFollowedError
from plurax.jaxpr.interpret import last_reads, needed, variables
from plurax.jaxpr.joined_dims import JoinedDims, Parts
from plurax.jaxpr.random_blocks import draws_apart


@dataclasses.dataclass(frozen=True)
class Region:
    """The equations between a product and the reductions of one of its dims.

    **Fields:**

    - `eqns`: on a block of the dim, in the order of the function.
    - `dims`: of each variable that they compute, the place of the dim.
    - `inputs`: what they read besides, each a variable and the place of the dim in it, or None.
    - `read`: by the `id` of an equation and the place of an operand, `(variable, dim)` of an input.
    - `stand_ins`: by the same, what a block reads in place of a statistic: "shift", the negative or
      the maximum itself by its sign; 0 or 1.
    - `shifted`: the variable of which the running maximum is taken; None where nothing is shifted.
    - `reductions`: the equations at the dim's end, with the form of what they reduce.
    - `absorbed`: the equations behind them, up to what no longer depends on the maximum.
    - `behind`: reductions, absorbed equations, and those of statistics that factors need, in the
      order of the function; with the form of a reduction, else None.
    - `results`: the statistics that the rest reads.
    - `labels`: of each variable that it computes, and of each statistic, a number for each dim:
      equal numbers are one index.
    - `copied`: the `id`s of those `eqns` that compute on blocks what others may read as well, such
      as a mask of several layers.
    - `size`: of the dim.
    - `queries`, `shared`: the labels of the first product's dims that come from the other operand,
      and from both.
    - `parts`: of each label of a dim that a reshape joins of several, or takes apart, the labels
      and the sizes of these.
    """

    eqns: list[Any]
    dims: dict[Any, int]
    inputs: list[tuple[Any, int | None]]
    read: dict[tuple[int, int], tuple[Any, int | None]]
    stand_ins: dict[tuple[int, int], tuple[str, int]]
    shifted: Any
    reductions: list[tuple[Any, Form]]
    absorbed: list[Any]
    behind: list[tuple[Any, Form | None]]
    results: list[Any]
    labels: dict[Any, tuple[int, ...]]
    copied: frozenset[int]
    size: int
    queries: tuple[int, ...]
    shared: tuple[int, ...]
    parts: dict[int, Parts]

    def ids(self) -> set[int]:
        """Return the `id`s of the equations that the region replaces."""
        reductions = [eqn for eqn, _ in self.reductions]
        return {id(eqn) for eqn in (*self.eqns, *reductions, *self.absorbed)} - self.copied

    def beside(self) -> list[Any]:
        """Return the variables that statistics read and the region does not compute."""
        inner = {var for eqn, _ in self.behind for var in eqn.outvars}
        after = [eqn for eqn, form in self.behind if form is None]
        read = [atom for eqn in after for atom in variables(eqn.invars)]
        return list(dict.fromkeys(atom for atom in read if atom not in inner))

    @functools.cached_property
    def sizes(self) -> dict[int, int]:
        """The sizes of the labels."""
        sizes: dict[int, int] = {}
        for var, labels in self.labels.items():
            for label, size in zip(labels, shape_of(var), strict=True):
                sizes[label] = max(size, sizes.get(label, 1))
        return sizes

    @property
    def tokens(self) -> tuple[int, int]:
        """The label of the queries' tokens, and their number.

        A product's operand may have more dims of its own, such as heads that share keys.
        """
        own = [(label, self.sizes[label]) for label in self.queries]
        equal = [pair for pair in own if pair[1] == self.size]
        return max(equal or own, key=lambda pair: pair[1])

    def reads(self) -> list[Any]:
        """Return all variables that the region reads."""
        return [*(var for var, _ in self.inputs), *self.beside()]


def candidates(eqn: Any, of_rows: set[Any]) -> list[tuple[int, int]]:
    """Return the dims of a product that may be followed, as the place of an operand and a dim.

    Both operands depend on the examples, so that a product with parameters is none, and each has
    a dim of its own. The second operand's come first: they are those of keys as most write it.
    """
    if eqn.primitive.name != "dot_general" or len(eqn.invars) != 2:
        return []
    if not all(atom in of_rows for atom in eqn.invars if not isinstance(atom, Literal)):
        return []
    (left, right), batches = own_dims(eqn), eqn.params["dimension_numbers"][1][0]
    if not (left and right and batches):
        return []
    return [*((1, dim) for dim in right), *((0, dim) for dim in left)]


def own_dims(eqn: Any) -> tuple[list[int], list[int]]:
    """Return the dims of a product's operands that are neither contracted nor shared."""
    sums, batches = eqn.params["dimension_numbers"]
    left, right = (
        [d for d in range(len(shape_of(atom))) if d not in (*gone, *shared)]
        for atom, gone, shared in zip(eqn.invars, sums, batches, strict=True)
    )
    return left, right


def follow(eqns: Sequence[Any], results: Sequence[Any], index: int, place: int, dim: int) -> Region:
    """Follow a dim of an operand of the product `eqns[index]` to where it is reduced.

    **Arguments:** `eqns`, without calls; `results`, what is read of them.

    Raises `NotFollowedError` with the equation at which it cannot be followed.
    """
    walk = _DimWalk(eqns, results, index, place, dim)
    try:
        walk.run()
        return walk.region()
    except NotFollowedError as error:
        error.reductions = len(walk.reductions)
        raise


class _DimWalk:
    """One attempt to follow a dim."""

    def __init__(
        self, eqns: Sequence[Any], results: Sequence[Any], index: int, place: int, dim: int
    ) -> None:
        self._eqns, self._results, self._index = eqns, results, index
        self._start = eqns[index]
        self._size = shape_of(self._start.invars[place])[dim]
        self._known = Forms(eqns)
        self._producer = self._known.producer
        self._maximum = Degrees()
        self._last = last_reads(eqns, results)
        self._numbers = itertools.count()
        self._labels: dict[Any, list[int]] = {}
        self._same: dict[int, int] = {}
        self._parts = JoinedDims(self._numbers, self._find)
        self._beside: dict[Any, list[int]] = {}  # of what is computed inside, such as a mask
        self._inside: list[Any] = []
        self._copied: set[int] = set()
        self._dims: dict[Any, int] = {}
        self._read: dict[tuple[int, int], tuple[Any, int | None]] = {}
        self.reductions: list[tuple[Any, Form]] = []
        self._later: list[Any] = []
        self._begin(place, dim)

    # --- Labels ---------------------------------------------------------------------------------

    def _begin(self, place: int, dim: int) -> None:
        """Label the product's result; the followed dim is one, the others' dims are queries."""
        eqn, (out,) = self._start, self._start.outvars
        self._labels[out] = [next(self._numbers) for _ in shape_of(out)]
        to = {pair[0]: pair[1][1] for pair in equal_dims(eqn) if pair[1][0] == len(eqn.invars)}
        self._key = self._labels[out][to[place, dim]]
        other = own_dims(eqn)[1 - place]
        self._queries = {self._labels[out][to[1 - place, d]] for d in other}
        self._inside.append(eqn)
        self._dims[out], self._known.forms[out] = to[place, dim], FREE
        for operand, atom in enumerate(eqn.invars):
            self._enter(eqn, operand, atom, dim if operand == place else None)

    def _find(self, label: int) -> int:
        while label in self._same:
            label = self._same[label]
        return label

    def _labelled(self, eqn: Any) -> dict[tuple[int, int], int]:
        """Return the labels of the dims of an equation's operands, as far as they are known.

        A dim of the result, at place `len(eqn.invars)`, has that of the operands' equal dims.
        """
        known: dict[tuple[int, int], int] = {}
        for place, atom in enumerate(eqn.invars):
            if not isinstance(atom, Literal) and atom in self._labels:
                known.update(((place, d), label) for d, label in enumerate(self._labels[atom]))
        pairs = list(equal_dims(eqn))
        for _ in range(2):  # an operand's label reaches another by way of the result
            for left, right in pairs:
                if left in known and right in known:
                    a, b = self._find(known[left]), self._find(known[right])
                    if a != b:
                        self._same[max(a, b)] = min(a, b)
                elif left in known:
                    known[right] = known[left]
                elif right in known:
                    known[left] = known[right]
        return {where: self._find(label) for where, label in known.items()}

    def _label_result(self, eqn: Any, known: Mapping[tuple[int, int], int]) -> None:
        for index, var in enumerate(eqn.outvars):
            rank = len(shape_of(var))
            labels: Sequence[int | None] = [
                known.get((len(eqn.invars), d)) if index == 0 else None for d in range(rank)
            ]
            if eqn.primitive.name == "reshape" and eqn.invars[0] in self._labels:
                labels = self._parts.reshaped(eqn, self._labels[eqn.invars[0]], labels)
            self._labels[var] = [next(self._numbers) if n is None else n for n in labels]

    # --- The walk -------------------------------------------------------------------------------

    def run(self) -> None:
        """Follow the dim until no later equation reads a value that has it.

        Behind that, follow what depends on the maximum.
        """
        forms, statistics = self._known.forms, self._known.statistics
        degrees = self._maximum.degrees
        end = self._last.get(self._start.outvars[0], 0)
        for index in range(self._index + 1, len(self._eqns)):
            eqn = self._eqns[index]
            read = variables(eqn.invars)
            if any(var in forms for var in read):
                self._step(eqn)
                end = max([end, *(self._last.get(var, 0) for var in eqn.outvars if var in forms)])
            elif any(var in (statistics if index < end else degrees) for var in read):
                self._label_result(eqn, self._labelled(eqn))
                statistics.update(eqn.outvars)
                self._later.append(eqn)
                self._maximum.add(eqn)
        for var in forms:
            if self._last.get(var) == len(self._eqns):
                reason = "nothing reduces the dim of what it computes"
                raise NotFollowedError(self._producer[var], reason)
        if not self.reductions:
            raise NotFollowedError(self._start, "nothing reduces the dim")

    def _step(self, eqn: Any) -> None:
        """Evaluate the form of an equation that reads values with the followed dim."""
        if len(eqn.outvars) != 1 or eqn.effects:
            raise NotFollowedError(eqn, "there is no rule for it")
        known = self._labelled(eqn)
        name, (out,) = eqn.primitive.name, eqn.outvars
        key, to = self._find(self._key), len(eqn.invars)
        places = {p: d for (p, d), label in known.items() if label == key and p < to}
        dim = next((d for (p, d), label in known.items() if label == key and p == to), None)
        if key in map(self._find, self._queries):
            raise NotFollowedError(eqn, "it mixes keys with queries")
        form = self._known.of(eqn, ends=dim is None)
        if dim is None and name not in REDUCTIONS and name != "dot_general":
            raise NotFollowedError(eqn, "it takes the dim apart")
        self._label_result(eqn, known)
        for place, atom in enumerate(eqn.invars):
            if (id(eqn), place) in self._known.stand_ins:
                self._check_statistic(eqn, place, {n for (p, _), n in known.items() if p == place})
            else:
                self._operand(eqn, place, atom, places.get(place), known)
        if dim is None:
            self.reductions.append((eqn, form))
            self._known.statistics.add(out)
            self._maximum.add(eqn, form)
        else:
            self._inside.append(eqn)
            self._dims[out], self._known.forms[out] = dim, form

    def _check_statistic(self, eqn: Any, place: int, labels: set[int]) -> None:
        """Refuse a statistic that has the dim, or a shift that is one for several softmaxes."""
        key = self._find(self._key)
        if key in labels:
            raise NotFollowedError(eqn, "it reads a statistic along the dim of the keys")
        if self._known.stand_ins[id(eqn), place][0] == "shift":
            known = self._labels
            rows = set(map(self._find, self.rows_of(self._known.shifted, known))) - {key}
            if not self._parts.of(rows) <= self._parts.of(labels):
                raise NotFollowedError(eqn, "its maximum is that of several softmaxes")

    # --- Inputs ---------------------------------------------------------------------------------

    def _operand(
        self, eqn: Any, place: int, atom: Any, dim: int | None, known: Mapping[Any, int]
    ) -> None:
        """Take an operand from inside, compute it inside too, or make it an input."""
        if isinstance(atom, Literal) or atom in self._known.forms:
            return
        if atom in self._known.statistics:
            raise NotFollowedError(eqn, "it reads a statistic that is no shift and no factor")
        if dim is not None and shape_of(atom)[dim] != self._size:
            dim = None
        labels = [known.get((place, d)) for d in range(len(shape_of(atom)))]
        self._enter(eqn, place, atom, dim, labels)

    def _enter(
        self,
        eqn: Any,
        place: int,
        atom: Any,
        dim: int | None,
        labels: Sequence[int | None] = (),
    ) -> None:
        """Make an operand an input, or compute it inside where it is queries by keys."""
        queries = {self._find(label) for label in self._queries}
        large = any(
            label is not None and self._find(label) in queries and size > 1
            for label, size in zip(labels, shape_of(atom), strict=False)
        )
        if dim is not None and large and self._compute_inside(atom, dim, labels):
            return
        self._read[id(eqn), place] = (atom, dim)

    def _compute_inside(self, var: Any, dim: int, labels: Sequence[int | None]) -> bool:
        """Compute on blocks what would be an array of queries by keys: a mask of iotas, what is
        broadcast or drawn, a product with positions.

        Return whether there is a rule for it. `dim` is that of the keys in `var`, with its labels.
        """
        if var in self._dims:
            return self._dims[var] == dim
        eqn = self._producer.get(var)
        if eqn is None or eqn.effects or len(eqn.outvars) != 1:
            return False
        name = eqn.primitive.name
        drawn = draws_apart(eqn)
        entrywise = name in ELEMENTWISE or is_bitcast(eqn)
        moves = name in KEPT or name == "dot_general"
        if not (drawn or entrywise or moves or name == "iota"):
            return False
        if drawn and dim < len(shape_of(eqn.invars[0])):
            return False
        out = len(eqn.invars)
        source: dict[tuple[int, int], int] = {}
        for one, other in equal_dims(eqn):
            if other[0] == out:
                source[one] = other[1]
        if name == "reshape" and dim not in source.values():
            return False
        for place, atom in enumerate(eqn.invars):
            if isinstance(atom, Literal):
                continue
            own = {d: source.get((place, d)) for d in range(len(shape_of(atom)))}
            inner = next((d for d, to in own.items() if to == dim), None)
            inside = [None if (to := own[d]) is None else labels[to] for d in own]
            self._enter(eqn, place, atom, inner, inside)
        self._inside.append(eqn)
        self._copied.add(id(eqn))
        self._dims[var] = dim
        known = labels or [None] * len(shape_of(var))
        self._beside[var] = [next(self._numbers) if n is None else n for n in known]
        return True

    # --- The region -----------------------------------------------------------------------------

    def region(self) -> Region:
        """Return what was followed, with the statistics that the rest of the function reads."""
        order = {id(eqn): index for index, eqn in enumerate(self._eqns)}
        inside = sorted(self._inside, key=lambda eqn: order[id(eqn)])
        labels = {v: tuple(map(self._find, one)) for v, one in self._labels.items()}
        reduced = [eqn.outvars[0] for eqn, _ in self.reductions]
        symbols = [
            var for _, form in self.reductions for var, _ in (*form.terms, *form.factors)
        ]  # fmt: skip
        mine = {id(eqn) for eqn in (*inside, *(eqn for eqn, _ in self.reductions))}
        rest = [eqn for eqn in self._eqns if id(eqn) not in mine]
        effects = {id(eqn) for eqn in rest if eqn.effects}
        used = needed(rest, self._results, set(reduced), effects)
        absorbed = self._absorbed(used)
        shared = needed(self._later, symbols, set(reduced))
        chosen = {id(eqn) for eqn in (*absorbed, *shared)}
        after: list[tuple[Any, Form | None]] = [(e, None) for e in self._later if id(e) in chosen]
        behind = sorted([*self.reductions, *after], key=lambda step: order[id(step[0])])
        kept = {id(eqn) for eqn in absorbed}
        read = {a for eqn in used if id(eqn) not in kept for a in variables(eqn.invars)}
        read.update(variables(self._results))
        computed = [*reduced, *(var for eqn in absorbed for var in eqn.outvars)]
        results = [var for var in computed if var in read]
        self._check_factors(labels)
        inputs = [*dict.fromkeys(self._read.values())]
        queries = tuple(map(self._find, self._queries))
        own = {*queries, self._find(self._key)}
        batch = tuple(n for n in labels[self._start.outvars[0]] if n not in own)
        labels |= {v: tuple(map(self._find, one)) for v, one in self._beside.items()}
        return Region(
            inside, self._dims, inputs, self._read, self._known.stand_ins, self._known.shifted,
            self.reductions, absorbed, behind, results, labels, frozenset(self._copied),
            self._size, queries, batch, self._parts.known(),
        )  # fmt: skip

    def _check_factors(self, labels: Mapping[Any, tuple[int, ...]]) -> None:
        """Refuse sums over queries: a factor has an entry for each of them."""
        for eqn, form in self.reductions:
            out = set(labels[eqn.outvars[0]])
            rows = [set(self.rows_of(var, labels)) for var, _ in (*form.terms, *form.factors)]
            if form.terms and self._known.shifted is not None:
                shifted = set(self.rows_of(self._known.shifted, labels))
                rows.append(shifted - {self._find(self._key)})
            if any(not self._parts.of(row) <= self._parts.of(out) for row in rows):
                raise NotFollowedError(eqn, "it sums weights of several softmaxes")

    @staticmethod
    def rows_of(var: Any, labels: Mapping[Any, Sequence[int]]) -> list[int]:
        """Return the labels of a variable's dims of more than one entry."""
        return [n for n, size in zip(labels[var], shape_of(var), strict=True) if size > 1]

    def _absorbed(self, used: Sequence[Any]) -> list[Any]:
        """Return the used equations that depend on the maximum, until what they compute does not.

        Raises `NotFollowedError` where something does to the end.
        """
        degrees, wanted = self._maximum.degrees, {id(eqn) for eqn in used}
        for eqn in self._maximum.improper:
            if id(eqn) in wanted:
                reason = "it reads the maximum otherwise than as a shift"
                raise NotFollowedError(eqn, f"{reason}; write jax.lax.stop_gradient(maximum)")
        for var in variables(self._results):
            if var in degrees:
                raise NotFollowedError(self._producer[var], "the maximum is in a result")
        depend = [eqn for eqn in self._later if any(v in degrees for v in variables(eqn.invars))]
        return [eqn for eqn in depend if id(eqn) in wanted]
