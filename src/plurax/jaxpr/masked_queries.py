"""Which queries a group of key blocks leaves alone, because a mask hides its keys from them.

Blocks of keys meet all queries (`plurax.jaxpr.key_blocks`), and under a causal mask half of what
they compute is multiplied with zero. The blocks are therefore taken in groups, and the loop over a
group's blocks computes on those queries alone that may see any of its keys:

    T = S = 4096, blocks of 512, causal      the same within a window of 1024
    keys 0…1023      queries 0…4095          keys 0…511       queries 0…1535
    1024…2047        1024…4095               512…1023         512…2047
    2048…3071        2048…4095               ...
    3072…4095        3072…4095               3584…4095        3584…4095
    computed         10/16 of all            21/64 of all

A query is left out where `Intervals` proves that each reduction over the group's keys gets nothing
from it: zeros to a sum, and to a maximum what is no larger than another key's. What follows from
inputs, as segments do, proves nothing, and then all queries are computed in one loop, as before.

A weight exp(y - m) of a finite fill is zero where m is known to be larger, so where the query
keeps a key: key 0, the last, or that of its own place counted from the front or from the back.
-inf needs no such key.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from plurax.jaxpr.equal_dims import equal_dims, shape_of
from plurax.jaxpr.follow_dim import Region
from plurax.jaxpr.interpret import dependent
from plurax.jaxpr.intervals import Bounds, Intervals, Tags
from plurax.jaxpr.token_order import BY_PLACES, RANGES, Order

GROUPS = (4, 8)
"""The number of groups: the larger one where it computes but `MORE` of what the smaller one does.
Each group is a loop of its own to compile, forward and backward. Under a causal mask (1 + 1/G) / 2
of all is computed, 0.63 of 4 groups and 0.56 of 8; under a short window 1/G."""

MORE = 0.75

WORTHWHILE = 0.9
"""The largest share of the work for which more than one loop is compiled."""

TILE = 128
"""Ranges of queries begin and end at multiples of it, as the tiles of TPUs and GPUs do, or of the
block where that is smaller."""

FEW = 2**16
"""The largest constant whose entries are read."""

Range = tuple[int, int]
"""The first query, and the first one behind the last."""

Node = Any
"""A variable that a region computes; or `(id(equation), place)` of an operand that it reads."""


@dataclasses.dataclass(frozen=True)
class Queries:
    """The queries that each part of the keys is computed with.

    **Fields:** `groups`, of whole blocks: the first, the first behind the last, and the queries;
    `rest`, the queries of the keys behind the whole blocks; each None for all. `dims`, the place of
    the dim of queries in what has it. `size`, the number of queries. `order`, in which devices have
    queries and keys.
    """

    groups: list[tuple[int, int, Range | None]]
    rest: Range | None = None
    dims: Mapping[Node, int] = dataclasses.field(default_factory=dict)
    size: int = 0
    order: Order = BY_PLACES

    @property
    def share(self) -> float:
        """The share of all pairs of queries and keys, in whole blocks, that is computed."""
        done = [(b - a) * (1 if seen is None else (seen[1] - seen[0]) / self.size)
                for a, b, seen in self.groups]  # fmt: skip
        return sum(done) / self.groups[-1][1]


def seen_queries(
    region: Region,
    block: int,
    eqns: Sequence[Any],
    inputs: Sequence[Any],
    constants: Mapping[Any, Any],
    order: Order = BY_PLACES,
    worthwhile: float = WORTHWHILE,
) -> Queries:
    """Return the queries that blocks of so many keys are computed with.

    **Arguments:** `eqns`, all those of the function; `inputs`, its inputs; `constants`, the values
    of its constants; `order`, that of the tokens: of several devices, they are cut to its ranges;
    `worthwhile`, the largest share of the work for which that is done.
    """
    whole = region.size // block
    best = Queries([(0, whole, None)])
    var = next(a for eqn, _ in region.reductions for a in eqn.invars if a in region.dims)
    known = {var: np.asarray(x) for var, x in constants.items() if _is_known(x)}
    data = dependent(eqns, (*inputs, *(var for var in constants if var not in known)))
    producer = {v: eqn for eqn in eqns for v in eqn.outvars if v not in data}
    producer.update((v, eqn) for eqn in region.eqns for v in eqn.outvars)
    for dim, size in enumerate(shape_of(var)):
        dims = None if dim == region.dims[var] or size == 1 else query_dims(region, var, dim)
        if dims is None or (order.devices > 1 and region.labels[var][dim] != region.tokens[0]):
            continue
        search = _Ranges(region, dims, size, producer, known)
        if order.devices > 1:
            queries = search.queries(block, RANGES, size // RANGES)
        else:
            few, more = (search.queries(block, count, min(TILE, block)) for count in GROUPS)
            queries = more if more.share <= MORE * few.share else few
        if queries.share <= worthwhile * best.share:
            best = dataclasses.replace(queries, order=order)
    return best


def _is_known(value: Any) -> bool:
    """Whether a constant is a few numbers that are known while the function is traced."""
    known = isinstance(value, jax.Array | np.ndarray | np.generic)
    if not known or isinstance(value, jax.core.Tracer) or not 0 < value.size <= FEW:
        return False
    return value.dtype == jnp.bool_ or jnp.issubdtype(value.dtype, jnp.number)


# --- The dim of the queries -----------------------------------------------------------------------


def query_dims(region: Region, var: Any, dim: int) -> dict[Node, int] | None:
    """Return where else the index of a dim is; None if it cannot be cut everywhere.

    **Arguments:** `var`, a variable that the region computes, and one of its dims.
    """
    eqns = [*region.eqns, *(eqn for eqn, _ in region.reductions)]
    marked: set[tuple[Node, int]] = {(var, dim)}
    pairs = [
        ((_node(region, eqn, p), d), (_node(region, eqn, q), e))
        for eqn in eqns
        for (p, d), (q, e) in equal_dims(eqn)
    ]
    before = 0
    while len(marked) > before:
        before = len(marked)
        for one, other in pairs:
            if one in marked or other in marked:
                marked |= {one, other}
    dims = dict(marked)
    if len(dims) < len(marked) or any(not _cuts(region, eqn, dims) for eqn in eqns):
        return None
    of_inputs: dict[Any, set[int | None]] = {}
    for read, source in region.read.items():
        of_inputs.setdefault(source, set()).add(dims.get(read))
    return dims if all(len(places) == 1 for places in of_inputs.values()) else None


def _node(region: Region, eqn: Any, place: int) -> Node:
    """Return what an operand, or the result, of an equation is; None for a literal."""
    if place == len(eqn.invars):
        return eqn.outvars[0]
    if isinstance(eqn.invars[place], Literal):
        return None
    read = (id(eqn), place)
    return read if read in region.stand_ins or read in region.read else eqn.invars[place]


def _cuts(region: Region, eqn: Any, dims: Mapping[Node, int]) -> bool:
    """Whether an equation on a part of the queries has that part of its result."""
    places = [p for p in range(len(eqn.invars)) if _node(region, eqn, p) in dims]
    dim = dims.get(eqn.outvars[0])
    if dim is None or dim == region.dims.get(eqn.outvars[0]):
        return not places and dim is None
    if eqn.primitive.name == "random_bits":
        return dim >= len(shape_of(eqn.invars[0]))
    return bool(places) or eqn.primitive.name != "reshape"


# --- The ranges -----------------------------------------------------------------------------------


class _Ranges:
    """The search for the queries of groups of keys, along one dim of queries."""

    def __init__(
        self,
        region: Region,
        dims: Mapping[Node, int],
        size: int,
        producer: Mapping[Any, Any],
        constants: Mapping[Any, Any],
    ) -> None:
        self._region, self._dims, self._size = region, dims, size
        self._producer, self._constants = producer, constants
        self._floors: dict[Any, float] = {}

    def queries(self, block: int, count: int, tile: int) -> Queries:
        """Return the queries of each of `count` groups of blocks, and of the keys behind them, in
        whole tiles."""
        whole = self._region.size // block
        count = min(count, whole)
        firsts = [whole * index // count for index in range(count + 1)]
        starts = np.array([*firsts[:-1], whole]) * block
        ends = np.array([first * block for first in firsts[1:]] + [self._region.size]) - 1
        rest = self._region.size > whole * block
        if not rest:
            starts, ends = starts[:-1], ends[:-1]
        before, after = self._hidden(starts, ends, True), self._hidden(starts, ends, False)
        ranges: list[Range | None] = []
        for low, high in zip(before.tolist(), (self._size - after).tolist(), strict=True):
            rows = low // tile * tile, min(-(-high // tile) * tile, self._size)
            rows = (0, 0) if low >= high else rows
            ranges.append(None if rows == (0, self._size) else rows)
        groups: list[tuple[int, int, Range | None]] = []
        for first, last, chosen in zip(firsts, firsts[1:], ranges, strict=False):
            if groups and groups[-1][2] == chosen:
                first = groups.pop()[0]
            groups.append((first, last, chosen))
        return Queries(groups, ranges[-1] if rest else None, self._dims, self._size)

    def _hidden(self, starts: Any, ends: Any, first: bool) -> Any:
        """Return how many of the first queries, or of the last, get nothing from keys.

        **Arguments:** the first and the last key, of each group. By bisection, of all at once.
        """
        low, high = np.zeros(len(starts), int), np.full(len(starts), self._size)
        while (low < high).any():
            unsure, middle = low < high, np.maximum((low + high + 1) // 2, 1)
            from_query = 0 * middle if first else self._size - middle
            nothing = self._nothing((from_query, from_query + middle - 1), (starts, ends))
            low = np.where(unsure & nothing, middle, low)
            high = np.where(unsure & ~nothing, middle - 1, high)
        return low

    def _nothing(self, rows: Any, keys: Any) -> Any:
        """Return of each box whether its queries get nothing from its keys."""
        nothing: Any = True
        plain = self._intervals(rows, keys)
        shifted = self._region.shifted
        if shifted is not None:
            # The maximum that is subtracted is at least `floor`, if that is another key's.
            least = self._floor(shifted)
            floor = np.where(plain.of(shifted, self._tags(shifted))[1] <= least, least, -np.inf)
            plain = self._intervals(rows, keys, (floor, np.inf))
        for eqn, _ in self._region.reductions:
            nothing = nothing & self._adds_nothing(eqn, plain)
        return np.broadcast_to(nothing, np.shape(rows[0]))

    def _adds_nothing(self, eqn: Any, intervals: Intervals) -> Any:
        """Return of each box whether a reduction gets nothing from it."""
        nothing: Any = False
        for place, atom in enumerate(eqn.invars):
            if atom not in self._region.dims:
                continue
            lo, hi = intervals.of_operand(eqn, place, self._tags(atom))
            if eqn.primitive.name == "reduce_max":
                return hi <= self._floor(atom)
            nothing = nothing | ((lo == 0) & (hi == 0))
        summed = eqn.primitive.name in ("dot_general", "reduce_sum", "reduce_or")
        return nothing & summed

    def _floor(self, var: Any) -> float:
        """Return what a value reaches, for each query at some key; -inf if that is not known."""
        if var not in self._floors:
            rows, last = np.arange(self._size), self._region.size - 1
            least = np.full(self._size, -np.inf)
            for key in (0 * rows, rows, rows + last + 1 - self._size, 0 * rows + last):
                place = np.clip(key, 0, last)
                intervals = self._intervals((rows, rows), (place, place))
                least = np.maximum(least, intervals.of(var, self._tags(var))[0])
            self._floors[var] = float(least.min())
        return self._floors[var]

    def _intervals(self, rows: Any, keys: Any, shift: Bounds = (-np.inf, np.inf)) -> Intervals:
        """Return the bounds on boxes of queries by keys. `shift`: those of the maximum."""
        ranges = {
            name: (np.asarray(pair[0], float), np.asarray(pair[1], float))
            for name, pair in (("queries", rows), ("keys", keys))
        }
        stand_ins: dict[tuple[int, int], Bounds] = {}
        for read, (kind, number) in self._region.stand_ins.items():
            if kind == "constant":
                stand_ins[read] = (float(number), float(number))
            else:
                stand_ins[read] = shift if number < 0 else (-shift[1], -shift[0])
        return Intervals(self._producer, self._constants, self._region.dims, ranges, stand_ins)

    def _tags(self, var: Any) -> Tags:
        """Return the tags of the dims of a variable that the region computes."""
        tags: list[str | None] = [None] * len(shape_of(var))
        if var in self._dims:
            tags[self._dims[var]] = "queries"
        tags[self._region.dims[var]] = "keys"
        return tuple(tags)


def is_empty(seen: Range | None) -> bool:
    """Whether no query is seen."""
    return seen is not None and seen[0] == seen[1]
