"""Split the tokens of a function over devices, from where they begin to where they end.

Attention says which dims are those of tokens, and in which order devices have them
(`token_order.py`). All dims that are one index with these, forward and backward, are tokens too.
They begin where an operation makes them of something else, and there they are split:

    a language model, tokens (B, 1025), width 512    context=4           in order by
    x = tokens[:, :-1]             (B, 1024)         (B, 256)            a transposition
    p = iota                       (1024,)           (256,)              its places, computed
    h = table[x] + f(p)            (B, 1024, 512)    follows             what it is computed from
    loop over layers: carry h      (B, 1024, 512)    follows
      q, k, v = ...                (B, 1024, 8, 64)  attention reads them
      o = attention                (B, 1024, 8, 64)  attention computes it
    loss = mean(-log q)            (B,)              partial sums over context

Parameters are not split: what meets tokens split over devices is cut there, without communication.
An operation that asks for the places of tokens, such as a convolution or a cumulative sum, gets
them in the order of their places, for which devices exchange shares
(`partition/operators/share_exchange.py`), and the partitioner lets devices exchange edges.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal
from jaxtyping import Array, PyTree

from plurax.jaxpr.annotate import OverContext, over_context
from plurax.jaxpr.compat import (
    ANNOTATIONS,
    REDUCTIONS,
    Scan,
    called_jaxpr,
    inner_jaxprs,
    is_plain_call,
)
from plurax.jaxpr.equal_dims import Place, equal_dims, shape_of
from plurax.jaxpr.interpret import all_equations, bind, constant, equation_context, flat_equations
from plurax.jaxpr.random_blocks import bits_of_block, draws_apart
from plurax.jaxpr.token_order import BY_PLACES, Order, OrderMark

# --- Dims that are one index ----------------------------------------------------------------------

_ALONG = {
    "concatenate": "dimension", "cumlogsumexp": "axis", "cummax": "axis", "cummin": "axis",
    "cumprod": "axis", "cumsum": "axis", "rev": "dimensions", "sort": "dimension",
}  # fmt: skip
"""Operations along some dims, and the parameter that says which; other dims stay as they are."""

_SUMMED = REDUCTIONS - {"argmax", "argmin"}
"""Reductions for which the order does not matter."""


def same_index(eqn: Any, parts: int) -> Iterator[tuple[Place, Place]]:
    """Yield the pairs of dims of operands and results that are one index, in any order of `parts`.

    Result k is the place `len(eqn.invars) + k`. Of an operation without a rule nothing is known.
    """
    name, params, out = eqn.primitive.name, eqn.params, len(eqn.invars)
    shapes = [shape_of(atom) for atom in (*eqn.invars, *eqn.outvars)]
    if name in ANNOTATIONS or name == "optimization_barrier":
        yield from (
            ((place, d), (out + place, d))
            for place in range(out)
            for d in range(len(shapes[place]))
        )
    elif name == "gather":
        yield from _of_gather(eqn, shapes)
    elif name in ("slice", "dynamic_slice", "pad", "split", "top_k") or name in _ALONG:
        along = {int(d) for d in np.atleast_1d(params.get(_ALONG.get(name, ""), ()))}
        moved = {d for d, part in enumerate(params.get("padding_config", ())) if any(part)}
        for place, shape in enumerate(shapes[:out]):
            for to, result in enumerate(shapes[out:], out):
                if len(shape) != len(result):
                    continue  # a scalar, or dims that are gone
                last = {len(shape) - 1} if name == "top_k" else set()
                kept = set(range(len(shape))) - along - moved - last
                yield from (((place, d), (to, d)) for d in kept if shape[d] == result[d] > 1)
    elif name == "conv_general_dilated":
        numbers = params["dimension_numbers"]
        yield (0, numbers.lhs_spec[0]), (out, numbers.out_spec[0])
    else:
        yield from equal_dims(eqn)
    if name == "reshape":
        yield from (((0, d), (1, other)) for d, other in _outer_dims(shapes[0], shapes[1], parts))


def same_pieces(eqn: Any) -> Iterator[tuple[Place, Place]]:
    """Yield the pairs of dims of which a device computes its piece from its own and a little more.

    Places are asked for: of another order the pieces are not these.
    """
    name, params, out = eqn.primitive.name, eqn.params, len(eqn.invars)
    if name.startswith("cum"):
        yield (0, params["axis"]), (out, params["axis"])
    elif name == "conv_general_dilated":
        numbers, result = params["dimension_numbers"], shape_of(eqn.outvars[0])
        for dim, to in zip(numbers.lhs_spec[2:], numbers.out_spec[2:], strict=True):
            if shape_of(eqn.invars[0])[dim] == result[to]:
                yield (0, dim), (out, to)


def _outer_dims(old: Sequence[int], new: Sequence[int], parts: int) -> Iterator[tuple[int, int]]:
    """Yield the pairs of dims of a reshape of which one is the other with dims inside of it.

    Parts of one are then parts of the other: of (B, T, N, H) and (B, T · N · H) the dims 1.
    """
    for dim, size in enumerate(old):
        for other, length in enumerate(new):
            outside = math.prod(old[:dim]) == math.prod(new[:other])
            if outside and size % parts == length % parts == 0 and size != length:
                yield dim, other


def _of_gather(eqn: Any, shapes: Sequence[Sequence[int]]) -> Iterator[tuple[Place, Place]]:
    """Yield the pairs of a gather: dims of indices, and those that are batches or taken whole."""
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    batches = [d for d in range(len(shapes[2])) if d not in numbers.offset_dims]
    yield from (((1, d), (2, batch)) for d, batch in enumerate(batches))
    pairs = zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
    yield from (((0, dim), (1, of_indices)) for dim, of_indices in pairs)
    gone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    kept = [d for d in range(len(shapes[0])) if d not in gone]
    for dim, offset in zip(kept, numbers.offset_dims, strict=True):
        if sizes[dim] == shapes[0][dim]:
            yield (0, dim), (2, offset)


# --- Which dims -----------------------------------------------------------------------------------


class _Bodies:
    """The equations of jaxprs, plain calls inlined: once for all who read them."""

    def __init__(self) -> None:
        self._flat: dict[int, tuple[Any, Any]] = {}

    def of(self, jaxpr: Any) -> Any:
        if id(jaxpr) not in self._flat:
            flat = flat_equations(jaxpr.eqns, jaxpr.outvars, inline=is_plain_call)
            self._flat[id(jaxpr)] = flat, jaxpr  # kept, so that no other gets its `id`
        return self._flat[id(jaxpr)][0]


class _Dims:
    """The dims of variables that are one index with dims of tokens.

    **Arguments:** `jaxpr`, of the whole function; `bodies`; `parts`, into which an order cuts dims;
    `ordered`, whether those that are in order are followed, or all that are split.
    """

    def __init__(self, jaxpr: Any, bodies: _Bodies, parts: int, *, ordered: bool) -> None:
        self._bodies, self._parts, self._ordered = bodies, parts, ordered
        self._apart: set[int] = set()  # calls whose operands are in the order of their places
        while True:
            self._dims: dict[Any, set[int]] = {}
            before = -1
            while before != (before := sum(map(len, self._dims.values()))):
                self._follow(jaxpr)
            failed = self._failed(jaxpr) if ordered else set[int]()
            if not failed:
                return
            self._apart |= failed

    def of(self, atom: Any) -> set[int]:
        """Return the dims of a variable that are those of tokens."""
        return set() if isinstance(atom, Literal) else self._dims.get(atom, set())

    def _add(self, atom: Any, dim: int) -> None:
        if not isinstance(atom, Literal):
            self._dims.setdefault(atom, set()).add(dim)

    def _follow(self, jaxpr: Any) -> None:
        """Add the dims that are one index with those that are known, forward and backward."""
        eqns = self._bodies.of(jaxpr).eqns
        for eqn in (*eqns, *reversed(eqns)):
            for var, dim in self._annotated(eqn):
                self._add(var, dim)
            body = self.opened(eqn)
            if body is not None:
                self._meet(self._through_call(eqn, body))
                self._follow(body)
                self._meet(self._through_call(eqn, body))
                continue
            atoms = (*eqn.invars, *eqn.outvars)
            for (a, dim), (b, other) in self._pairs(eqn):
                if dim in self.of(atoms[a]):
                    self._add(atoms[b], other)
                elif other in self.of(atoms[b]):
                    self._add(atoms[a], dim)

    def _annotated(self, eqn: Any) -> Iterator[tuple[Any, int]]:
        """Yield the dims of tokens that an annotation says, with their variable."""
        tag = eqn.params.get("tag")
        if self._ordered and isinstance(tag, OrderMark):
            yield from ((eqn.outvars[0] if tag.computed else eqn.invars[0], d) for d in tag.dims)
        elif not self._ordered and isinstance(tag, OverContext) and tag.over == "devices":
            yield from ((eqn.outvars[0], dim) for dim in (tag.dim,) if dim is not None)

    def _pairs(self, eqn: Any) -> list[tuple[Place, Place]]:
        """Return what is one index in an equation that is no loop and no call."""
        if inner_jaxprs(eqn) or eqn.effects:
            return []
        is_mark = self._ordered and isinstance(eqn.params.get("tag"), OrderMark)
        if is_mark:
            return []
        pieces = [] if self._ordered else same_pieces(eqn)
        return [*same_index(eqn, self._parts), *pieces]

    def opened(self, eqn: Any) -> Any:
        """Return the body of a loop, of a rematerialized call, or of one with a derivative of its
        own in which nothing asks for places; None of others."""
        name = eqn.primitive.name
        if name == "scan":
            return Scan.of(eqn).body
        if name == "remat2" or (name == "custom_jvp_call" and id(eqn) not in self._apart):
            return called_jaxpr(eqn)[0]
        return None

    def _through_call(self, eqn: Any, body: Any) -> list[tuple[Any, Any, int]]:
        """Return pairs of variables that have the same dims, and by how much the first's shift."""
        results = self._bodies.of(body).results
        if eqn.primitive.name != "scan":
            return [
                *((a, b, 0) for a, b in zip(eqn.invars, body.invars, strict=True)),
                *((a, b, 0) for a, b in zip(eqn.outvars, results, strict=True)),
            ]
        scan = Scan.of(eqn)
        inputs, outputs = len(eqn.invars) - len(scan.split(eqn.invars)[2]), scan.num_carry
        stacked = [1 if n >= inputs else 0 for n in range(len(eqn.invars))]
        returned = [1 if n >= outputs else 0 for n in range(len(eqn.outvars))]
        carried = scan.split(body.invars)[1]
        return [
            *zip(eqn.invars, body.invars, stacked, strict=True),
            *zip(eqn.outvars, results, returned, strict=True),
            *((a, b, 0) for a, b in zip(carried, results[:outputs], strict=True)),
        ]

    def _meet(self, pairs: Sequence[tuple[Any, Any, int]]) -> None:
        """Give both variables of each pair the dims of the other."""
        for outer, inner, shift in pairs:
            for dim in list(self.of(outer)):
                if dim >= shift:
                    self._add(inner, dim - shift)
            for dim in list(self.of(inner)):
                self._add(outer, dim + shift)

    def _failed(self, jaxpr: Any) -> set[int]:
        """Return the calls with a derivative of their own in which an operation asks for places."""
        failed: set[int] = set()
        for eqn in self._bodies.of(jaxpr).eqns:
            body = self.opened(eqn)
            if body is None:
                continue
            failed |= self._failed(body)
            if eqn.primitive.name == "custom_jvp_call" and self._asks(body):
                failed.add(id(eqn))
        return failed

    def _asks(self, jaxpr: Any) -> bool:
        """Whether anything in a jaxpr asks for the places of what is in order, or begins there."""
        for eqn in self._bodies.of(jaxpr).eqns:
            if self.opened(eqn) is not None:
                return True
            if any(self.misplaced(eqn)) or any(self.beginning(eqn)):
                return True
        return False

    def misplaced(self, eqn: Any) -> list[set[int]]:
        """Return of each operand the dims in order that an operation wants by their places."""
        known = {node for pair in self._pairs(eqn) for node in pair}
        if eqn.primitive.name in _SUMMED:
            known |= {(0, dim) for dim in eqn.params["axes"]}
        return [
            {dim for dim in self.of(atom) if (place, dim) not in known}
            for place, atom in enumerate(eqn.invars)
        ]

    def beginning(self, eqn: Any) -> list[set[int]]:
        """Return of each result the dims in order that begin there."""
        known = {node for pair in self._pairs(eqn) for node in pair}
        return [
            {dim for dim in self.of(var) if (place, dim) not in known}
            for place, var in enumerate(eqn.outvars, len(eqn.invars))
        ]


def dims_of_tokens(jaxpr: Any, devices: int) -> list[set[int]]:
    """Return for each argument of a jaxpr the dims that are those of tokens.

    In it what attention reads and returns is annotated; `devices` are those of `context`.
    """
    dims = _Dims(jaxpr, _Bodies(), Order(devices).parts, ordered=False)
    return list(map(dims.of, jaxpr.invars))


# --- A function of tokens -------------------------------------------------------------------------


def over_tokens(
    fun: Callable[..., PyTree], trace: Callable[..., Any], devices: int
) -> Callable[..., PyTree]:
    """Return the same function with tokens split over `context`, and in order where a mark says so.

    **Arguments:** `fun`, a function of trees of arrays, its first argument the parameters; `trace`,
    which returns its jaxpr, in which what attention reads and returns is annotated and marked, all
    in one order, and the shapes of its results; `devices`, those of `context`.
    """

    @functools.wraps(fun)
    def split(*args: PyTree) -> PyTree:
        closed, shapes = trace(*args)
        leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(args)]
        evaluation = _Evaluation(closed.jaxpr, devices)
        out = evaluation(closed, leaves, len(jax.tree.leaves(args[0])))
        return jax.tree.unflatten(jax.tree.structure(shapes), out)

    return split


class _Evaluation:
    """The evaluation of a function on tokens.

    **Arguments:** `jaxpr`, of the whole function; `devices`, over which tokens are split.
    """

    def __init__(self, jaxpr: Any, devices: int) -> None:
        tags = (eqn.params.get("tag") for eqn in all_equations(jaxpr))
        orders = (tag.order for tag in tags if isinstance(tag, OrderMark))
        self._order, self._bodies = next(orders, BY_PLACES), _Bodies()
        self._split = _Dims(jaxpr, self._bodies, Order(devices).parts, ordered=False)
        self._ordered = _Dims(jaxpr, self._bodies, self._order.parts, ordered=True)
        self._whole: dict[Any, Any] = {}  # what begins, before it is split and put in order

    def __call__(self, closed: Any, args: Sequence[Any], parameters: int) -> list[Any]:
        """Evaluate the function, its results in the order of their places.

        **Arguments:** the closed jaxpr, its arguments, and how many of them are parameters.
        """
        inputs = [
            self._begun(
                var, x, self._ordered.of(var), set() if n < parameters else self._split.of(var)
            )
            for n, (var, x) in enumerate(zip(closed.jaxpr.invars, args, strict=True))
        ]
        out = self._evaluate(closed.jaxpr, closed.consts, inputs)
        results = self._bodies.of(closed.jaxpr).results
        return [self._undone(x, self._ordered.of(v)) for v, x in zip(results, out, strict=True)]

    def _begun(self, var: Any, array: Any, ordered: set[int], split: set[int]) -> Any:
        """Return what begins there, in order and split, and keep it for who asks for places."""
        if ordered | split and ordered == self._ordered.of(var):
            self._whole[var] = array
        for dim in sorted(ordered):
            array = self._order.put(array, dim)
        for dim in sorted(split)[:1]:  # of queries by keys the first: an axis splits one dim
            array = over_context(array, dim)
        return array

    def _undone(self, array: Any, dims: set[int]) -> Any:
        """Return an array with dims in the order of their places."""
        for dim in sorted(dims):
            array = self._order.undo(array, dim)
        return array

    def _evaluate(self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        """Evaluate a jaxpr whose arguments and results are in order."""
        flat = self._bodies.of(jaxpr)
        constants = {**dict(zip(jaxpr.constvars, consts, strict=True)), **flat.constants}
        values = {v: self._begun(v, x, self._ordered.of(v), set()) for v, x in constants.items()}
        values.update(zip(jaxpr.invars, args, strict=True))

        def read(atom: Any) -> Any:
            return constant(atom) if isinstance(atom, Literal) else values[atom]

        for eqn in flat.eqns:
            arrays = [read(atom) for atom in eqn.invars]
            with equation_context(eqn):
                values.update(zip(eqn.outvars, self._apply(eqn, arrays), strict=True))
        return [read(atom) for atom in flat.results]

    def _apply(self, eqn: Any, arrays: list[Any]) -> Sequence[Any]:
        """Apply an equation to operands in order, and return its results in order."""
        if isinstance(eqn.params.get("tag"), OrderMark):
            return arrays
        body = self._ordered.opened(eqn)
        if body is not None:
            return self._call(eqn, body, arrays)
        operands = self._operands(eqn, arrays)
        ordered, split = self._ordered.beginning(eqn), self._split.beginning(eqn)
        if self._is_placed(eqn, ordered):
            return [self._placed(eqn, operands, ordered[0], split[0])]
        # What is put in order there is split there, too.
        split = [
            own | (dims & self._split.of(var))
            for var, own, dims in zip(eqn.outvars, split, ordered, strict=True)
        ]
        begin = zip(eqn.outvars, bind(eqn, operands), ordered, split, strict=True)
        return [self._begun(*each) for each in begin]

    def _operands(self, eqn: Any, arrays: Sequence[Any]) -> list[Any]:
        """Return the operands of an equation; where it asks for the places of tokens, by these."""
        operands = []
        misplaced = zip(self._ordered.misplaced(eqn), self._split.misplaced(eqn), strict=True)
        for atom, array, (ordered, split) in zip(eqn.invars, arrays, misplaced, strict=True):
            whole = self._whole.get(atom) if not isinstance(atom, Literal) else None
            if whole is not None and ordered | split and ordered == self._ordered.of(atom):
                operands.append(whole)
            else:
                operands.append(self._undone(array, ordered))
        return operands

    def _is_placed(self, eqn: Any, begin: Sequence[set[int]]) -> bool:
        """Whether a result that begins there in order can be computed from places."""
        if not any(begin) or not draws_apart(eqn):
            return any(begin) and bool(eqn.primitive.name == "iota")
        return min(begin[0]) >= len(shape_of(eqn.invars[0]))

    def _placed(self, eqn: Any, operands: Sequence[Any], ordered: set[int], split: set[int]) -> Any:
        """Return places, or drawn bits, in order: those of a device without all others'."""
        shape = shape_of(eqn.outvars[0])

        def places(index: Array, dim: int) -> Array:
            index = over_context(index, 0) if dim in split else index
            return self._order.places(index, shape[dim]) if dim in ordered else index

        if eqn.primitive.name != "iota":
            return bits_of_block(eqn, operands[0], shape, places)
        dim, dtype = eqn.params["dimension"], eqn.outvars[0].aval.dtype
        index = places(lax.iota(jnp.int32, shape[dim]), dim).astype(dtype)
        return lax.broadcast_in_dim(index, shape, (dim,))

    def _call(self, eqn: Any, body: Any, arrays: list[Any]) -> Sequence[Any]:
        """Apply a loop or a call, its body in order."""
        if eqn.primitive.name == "custom_jvp_call":
            return bind(eqn, arrays)
        if eqn.primitive.name == "remat2":
            _, consts = called_jaxpr(eqn)
            kept = {name: eqn.params[name] for name in ("prevent_cse", "policy")}
            return jax.checkpoint(lambda *args: self._evaluate(body, consts, args), **kept)(*arrays)
        scan = Scan.of(eqn)
        shared, carry, stacks = scan.split(arrays)
        # The rows of a stack are read, and returned, in the order of their places.
        rows = [self._ordered.of(atom) & {0} for atom in scan.split(eqn.invars)[2]]
        stacks = list(map(self._undone, stacks, rows))
        out = scan.apply(
            lambda *args: self._evaluate(scan.body, scan.body_consts, args),
            [*shared, *carry, *stacks],
        )
        carried, stacked = out[: scan.num_carry], out[scan.num_carry :]
        begin = [
            (var, x, self._ordered.of(var) & {0}, self._split.of(var) & {0})
            for var, x in zip(eqn.outvars[scan.num_carry :], stacked, strict=True)
        ]
        return [*carried, *(self._begun(*each) for each in begin)]
