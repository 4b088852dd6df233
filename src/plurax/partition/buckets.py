"""Collectives over `data` for several tensors at a time, in buckets of so many bytes.

ZeRO-3 gathers each parameter where it meets the batch, and adds up each gradient to its shard. For
a network of many small parameters that is a collective of a few kilobytes each, and the time goes
into starting them. As torch's FSDP and DDP do, tensors that are needed one after another travel in
one flat buffer, up to `Plan.bucket_bytes` of whole tensors, and the next buffer is under way while
this one is computed with.

    equations             uses          buckets, 16 bytes      collectives
    h = x @ w0            w0, 8 bytes   0                      gather 0, gather 1
    h = h @ w1            w1, 8 bytes   0
    y = h @ w2            w2, 8 bytes   1                      gather 2
    dh = dy @ w2.T        w2, 8 bytes   2 (w2 again: anew)
    dx = dh @ w1.T        w1, 8 bytes   2

A bucket ends where it is full, or where a parameter comes a second time: what is gathered for the
forward pass is not kept for the backward pass. Each value travels as often as without buckets.

Zhao et al. 2023, "PyTorch FSDP", section 3.3 (https://arxiv.org/abs/2304.11277).
"""

import dataclasses
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.core import Literal, Var
from jaxtyping import Array

from plurax.jaxpr.barrier import order_after
from plurax.jaxpr.primitives import ELEMENTWISE, INLINED, open_jaxpr
from plurax.partition.values import ShardedValue, ValueVersions, over_data
from plurax.sharding.reshard import ReshardStep, filled
from plurax.sharding.spec import TensorSharding

_LOCAL = ELEMENTWISE | {"annotate", "broadcast_in_dim", "reshape", "rev", "squeeze", "transpose"}
"""What leaves a split parameter split."""
_OF_THEIR_OWN = frozenset(
    ["scan", "while", "cond", "checkpoint", "remat2", "remat", "annotate", "sharding_constraint"]
)
"""Equations that are walked, or take what they are given."""
MOST = 8
"""Tensors in a bucket. A compiler makes a loop of its own for each place in a buffer; buffers that
are alike share theirs, so a network of many layers has few loops to compile."""


@dataclasses.dataclass(frozen=True)
class Use:
    """An equation that needs a parameter whole.

    **Fields:** `place` of the equation; `var`, what it reads; `root`, the parameter that this is
    made of; `size` in bytes.
    """

    place: int
    var: Any
    root: Any
    size: int


class Gathers:
    """The buckets in which some equations' parameters are gathered.

    **Arguments:** `divider`; `eqns`, in order; `known`, what is known before them.

    **Attributes:** `eqns`, the same: what is made of parameters alone, such as casts, comes first,
    so that it can travel with others.
    """

    def __init__(
        self, divider: Any, eqns: Sequence[Any], known: Mapping[Any, ValueVersions]
    ) -> None:
        self._divider = divider
        self.eqns, uses = _uses(divider, eqns, known)
        self._buckets = _packed(uses, divider.bucket_bytes)
        self._numbers = {
            (use.place, use.var): number
            for number, bucket in enumerate(self._buckets)
            for use in bucket
        }
        self._at: dict[int, list[Use]] = {}
        for use in uses:
            self._at.setdefault(use.place, []).append(use)
        self._held: dict[tuple[int, Any], ShardedValue] = {}
        self._done = 0

    def before(
        self, place: int, here: Mapping[Any, ValueVersions], by: Array | None
    ) -> dict[int, ShardedValue]:
        """What the equation at a place needs whole, by the `id` of the cell.

        `by`, a value that it meets there: the bucket it opens is gathered after that, and so is the
        next one.
        """
        uses = self._at.get(place, ())
        for use in uses:
            number = self._numbers[place, use.var]
            while by is not None and self._done < min(number + 2, len(self._buckets)):
                self._gather(self._done, here, by)
                self._done += 1
        found = {}
        for use in uses:
            value = self._held.pop((self._numbers[place, use.var], use.var), None)
            if value is not None:
                found[id(here[use.var])] = value
        return found

    def _gather(self, number: int, here: Mapping[Any, ValueVersions], by: Array) -> None:
        uses = [u for u in self._buckets[number] if _needs_gather(self._divider, here[u.var])]
        values = [here[use.var].value for use in uses]
        goals = [value.sharding.without(["data"]) for value in values]
        moved = together(self._divider, values, goals, by=by)
        for use, value in zip(uses, moved, strict=True):
            self._held[number, use.var] = value


def _needs_gather(divider: Any, cell: ValueVersions) -> bool:
    if cell.deferred is not None or cell.is_zero or cell.value.data_varying:
        return False
    if not all(over_data(value.sharding) for value in cell.values):
        return False  # it is there whole already
    return bool(divider.of_parameters(cell.value))


def _uses(
    divider: Any, eqns: Sequence[Any], known: Mapping[Any, ValueVersions]
) -> tuple[list[Any], list[Use]]:
    """The equations in their new order, and where they need split parameters whole."""
    roots = {var: var for var, cell in known.items() if _needs_gather(divider, cell)}
    batch = {
        var
        for var, cell in known.items()
        if cell.data_varying or (cell.deferred is None and divider.of_rows(cell.value))
    }
    early, rest, ready = [], [], set(known)
    for eqn in eqns:
        read = [atom for atom in eqn.invars if not isinstance(atom, Literal)]
        split = [atom for atom in read if atom in roots]
        if any(atom in batch for atom in read):
            batch.update(eqn.outvars)
        elif split and eqn.primitive.name in _LOCAL and all(atom in ready for atom in read):
            roots[eqn.outvars[0]] = roots[split[0]]
            ready.update(eqn.outvars)
            early.append(eqn)
            continue
        rest.append(eqn)
    uses = []
    for place, eqn in enumerate(rest, len(early)):
        read = [atom for atom in eqn.invars if not isinstance(atom, Literal)]
        if eqn.primitive.name in _OF_THEIR_OWN or not any(atom in batch for atom in read):
            continue
        for var in dict.fromkeys(read):
            if var in roots:
                size = math.prod(var.aval.shape) * var.aval.dtype.itemsize
                uses.append(Use(place, var, roots[var], size))
    return early + rest, uses


def _packed(uses: Sequence[Use], limit: int) -> list[list[Use]]:
    """Uses that follow each other in one bucket, none of a parameter twice."""
    likes = [(use.var.aval.shape, use.var.aval.dtype) for use in uses]
    parameters = [use.root for use in uses]
    found = packed(likes, [use.size for use in uses], limit, parameters)
    return [[uses[place] for place in places] for places in found]


def packed(
    likes: Sequence[Hashable],
    sizes: Sequence[int],
    limit: int,
    names: Sequence[Hashable] | None = None,
) -> list[range]:
    """Tensors one after another in buckets.

    A bucket ends before it has more than `limit` bytes or `MOST` tensors, and before a name that it
    has. Where the tensors repeat, as a network's layers do, it ends with a repetition, so that the
    next bucket is like this one.

    **Arguments:** for each tensor what it is `likes`, such as its shape, its bytes in `sizes`, and
    `names`, default all different.

    ```python
    >>> from plurax.partition.buckets import packed
    >>> packed(["w", "b"] * 5, [3, 1] * 5, limit=11)
    [range(0, 4), range(4, 8), range(8, 10)]

    ```
    """
    found, first = [], 0
    while first < len(likes):
        last, size, again = first + 1, sizes[first], False
        while last < len(likes):
            again = names is not None and names[last] in names[first:last]
            if again or last == first + MOST or size + sizes[last] > limit:
                break
            size += sizes[last]
            last += 1
        if not again:  # which is the turn from the forward to the backward pass
            last = _repetition(likes, first, last)
        found.append(range(first, last))
        first = last
    return found


def _repetition(likes: Sequence[Hashable], first: int, last: int) -> int:
    """The latest place up to `last` from which all stands again that stands from `first` to it.

    Or as much of it as there is; `last` where there is no such place.
    """
    for place in range(last, first, -1):
        again = likes[place : 2 * place - first]
        if list(again) == list(likes[first : first + len(again)]):
            return place
    return last


# --- Moving several tensors at a time -------------------------------------------------------------


def together(
    divider: Any,
    values: Sequence[ShardedValue],
    goals: Sequence[TensorSharding],
    *,
    order: Sequence[int] | None = None,
    by: Array | None = None,
) -> list[ShardedValue]:
    """Values moved, gathers over `data` and sums to shards over it in buckets.

    **Arguments:** `order`, numbers by which values stand one after another, default as they come;
    `by`, a value after which they are moved.
    """
    results: list[Any] = [None] * len(values)
    groups: dict[Any, list[int]] = {}
    likes: dict[int, Hashable] = {}
    for place in sorted(range(len(values)), key=lambda p: order[p] if order else p):
        moves = divider.moves(values[place], goals[place])
        if len(moves) != 1 or moves[0].kind not in _FLAT or tuple(moves[0].axes) != ("data",):
            results[place] = divider.move(_tied(values[place], by), goals[place])
            continue
        groups.setdefault((moves[0].kind, values[place].array.dtype), []).append(place)
        likes[place] = values[place].array.shape, moves[0].dim
    for (kind, _), places in groups.items():
        sizes = [_size(values[place]) for place in places]
        for bucket in packed([likes[p] for p in places], sizes, divider.bucket_bytes):
            pack = [places[number] for number in bucket]
            some = [values[place] for place in pack]
            moved = _packed_move(divider, some, [goals[place] for place in pack], kind, by)
            for place, value in zip(pack, moved, strict=True):
                results[place] = value
    return results


def _size(value: ShardedValue) -> int:
    """Bytes of the whole tensor."""
    return math.prod(value.shape) * int(value.array.dtype.itemsize)


def _tied(value: ShardedValue, by: Array | None) -> ShardedValue:
    return (
        value if by is None else dataclasses.replace(value, array=order_after([value.array], by)[0])
    )


def _packed_move(
    divider: Any,
    values: list[ShardedValue],
    goals: list[TensorSharding],
    kind: str,
    by: Array | None,
) -> list[ShardedValue]:
    """Values in one buffer of one dtype."""
    if len(values) == 1:
        return [divider.move(_tied(values[0], by), goals[0])]
    moves = [divider.moves(value, goal)[0] for value, goal in zip(values, goals, strict=True)]
    arrays = _FLAT[kind](divider, values, moves, by)
    divider.record_together(moves)
    return [
        dataclasses.replace(value, array=array, sharding=goal)
        for value, array, goal in zip(values, arrays, goals, strict=True)
    ]


def _all_gather(
    divider: Any, values: list[ShardedValue], moves: list[ReshardStep], by: Array | None
) -> list[Array]:
    """Shards one after another; what each device had becomes a row."""
    n = divider.axes.size(["data"])
    buffer = jnp.concatenate([value.array.reshape(-1) for value in values])
    if by is not None:
        (buffer,) = order_after([buffer], by)
    rows = lax.all_gather(buffer, "data")
    arrays, first = [], 0
    for value, move in zip(values, moves, strict=True):
        shard, dim = value.array.shape, move.dim
        assert dim is not None
        last = first + math.prod(shard)
        parts = rows[:, first:last].reshape(n, *shard)
        whole = jnp.moveaxis(parts, 0, dim).reshape(*shard[:dim], -1, *shard[dim + 1 :])
        size = move.result.shard_shape(value.shape, divider.axes.sizes)[dim]
        arrays.append(lax.slice_in_dim(whole, 0, size, axis=dim))
        first = last
    return arrays


def _reduce_scatter(
    divider: Any, values: list[ShardedValue], moves: list[ReshardStep], by: Array | None
) -> list[Array]:
    """Each device's shards become a row of its own; the rows are added up."""
    n = divider.axes.size(["data"])
    rows, shapes = [], []
    for value, move in zip(values, moves, strict=True):
        dim = move.dim
        assert dim is not None
        whole = filled(value.array, dim, n)
        shape = (*whole.shape[:dim], n, whole.shape[dim] // n, *whole.shape[dim + 1 :])
        rows.append(jnp.moveaxis(whole.reshape(shape), dim, 0).reshape(n, -1))
        shapes.append((*shape[:dim], *shape[dim + 1 :]))
    buffer = jnp.concatenate(rows, axis=1)
    if by is not None:
        (buffer,) = order_after([buffer], by)
    flat = lax.psum_scatter(buffer, "data", scatter_dimension=0)
    arrays, first = [], 0
    for shape in shapes:
        last = first + math.prod(shape)
        arrays.append(flat[first:last].reshape(shape))
        first = last
    return arrays


_FLAT: dict[str, Callable[..., list[Array]]] = {
    "all-gather": _all_gather,
    "reduce-scatter": _reduce_scatter,
}


# --- One list of equations ------------------------------------------------------------------------


def inlined(
    eqns: Sequence[Any], results: Sequence[Any], constant: Callable[[Any], ValueVersions]
) -> tuple[list[Any], list[Any], dict[Any, ValueVersions], dict[int, tuple[Any, ...]]]:
    """Equations with the bodies of calls in their places, and their results.

    Also the calls' constants, and by the `id` of an equation the calls in which it stood.
    """
    flat: list[Any] = []
    constants: dict[Any, ValueVersions] = {}
    calls: dict[int, tuple[Any, ...]] = {}

    def walk(
        eqns: Sequence[Any], names: dict[Any, Any], stack: Any, within: tuple[Any, ...]
    ) -> None:
        for eqn in eqns:
            read = [_named(atom, names) for atom in eqn.invars]
            own = (
                eqn.source_info.name_stack if stack is None else stack + eqn.source_info.name_stack
            )
            if eqn.primitive.name in INLINED:
                body, values = open_jaxpr(eqn.params[INLINED[eqn.primitive.name]])
                inner = dict(zip(body.invars, read, strict=True))
                for var, value in zip(body.constvars, values, strict=True):
                    inner[var] = Var(var.aval)
                    constants[inner[var]] = constant(value)
                called = eqn.params.get("name")
                below = own.extend(f"jit({called})") if isinstance(called, str) else own
                walk(body.eqns, inner, below, (*within, eqn))
                names.update(
                    (var, _named(atom, inner))
                    for var, atom in zip(eqn.outvars, body.outvars, strict=True)
                )
                continue
            made = eqn.outvars if stack is None else [Var(var.aval) for var in eqn.outvars]
            names.update(zip(eqn.outvars, made, strict=True))
            info = eqn.source_info.replace(name_stack=own)
            flat.append(eqn.replace(invars=read, outvars=made, source_info=info))
            calls[id(flat[-1])] = within

    names: dict[Any, Any] = {}
    walk(eqns, names, None, ())
    return flat, [_named(atom, names) for atom in results], constants, calls


def computed_at(jaxpr: Any) -> list[int]:
    """For each result the number of the equation that computes it, -1 where none does."""
    places = {var: place for place, eqn in enumerate(jaxpr.eqns) for var in eqn.outvars}
    return [-1 if isinstance(atom, Literal) else places.get(atom, -1) for atom in jaxpr.outvars]


def _named(atom: Any, names: Mapping[Any, Any]) -> Any:
    return atom if isinstance(atom, Literal) else names.get(atom, atom)
