"""Cut the rows of experts out of a function, so that they can be sent to the experts' devices.

A mixture sorts the rows of its tokens by expert and multiplies each group with the weights of its
expert, by `lax.ragged_dot`. If devices have rows of their own and experts of their own, a row has
to be sent to the device of its expert, and what becomes of it back. What lies between the first
product and the last one works row by row, so all of it is cut out as one function of rows and
weights, and each row is sent once:

    8 experts; x (1024, 64), w (8, 64, 256), v (8, 256, 64), sizes (8,) of a device's own rows

    equation                            here
    a = ragged_dot(x, w, sizes)         rows x; weights w
    h = silu(a) * b                     rows b, (1024, 256)
    y = ragged_dot(h, v, sizes)         weights v; result: rows y
    z = zeros.at[token].add(y)          not here: it mixes rows

The function is differentiated by hand: its backward pass is again a function of rows and weights.
Rows are sent in turns (`partition/operators/sent_rows.py`), of which a router that balances takes
one: of the rows that are sent first products are kept where they were computed, `a` and `b` above
beside the rows `x`, and those of later turns are computed anew. Both passes stay one equation,
`at_experts`, which the partitioner evaluates. Under `Plan(remat="full")` nothing is kept.

Source: the groups of rows are those of MegaBlocks (Gale et al. 2022,
https://arxiv.org/abs/2211.15841); experts on devices that have other tokens are those of GShard
(Lepikhin et al. 2020, https://arxiv.org/abs/2006.16668).
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal, Primitive
from jaxtyping import Array, Int, PyTree

from plurax.jaxpr.block_arrays import filled, floating
from plurax.jaxpr.bodies import Body, Regions, by_jaxpr
from plurax.jaxpr.equal_dims import shape_of
from plurax.jaxpr.interpret import bind, constant, equation_context, holds, variables
from plurax.jaxpr.row_by_row import row_of_call, row_of_operand, row_of_result

AT_EXPERTS = "at_experts"
"""The name of the primitive that computes rows at their experts."""


@dataclasses.dataclass(frozen=True)
class ExpertRows:
    """Equations between products of groups of rows, and what they read.

    **Fields:**

    - `eqns`, in the order of the function; `broadcast`, those before them that repeat a value for
      each row, which is cheaper than to send it.
    - `sizes`: the variable with the rows of each group.
    - `rows`, `weights`: what is read row by row and group by group, each a variable and the dim of
      its rows or groups.
    - `whole`: what is read as it is; `results`, what others read.
    - `dims`: where a variable that the equations compute has its rows.
    """

    eqns: list[Any]
    broadcast: list[Any]
    sizes: Any
    rows: list[tuple[Any, int]]
    weights: list[tuple[Any, int]]
    whole: list[Any]
    results: list[Any]
    dims: dict[Any, int]

    def ids(self) -> set[int]:
        """Return the `id`s of the equations that the region replaces."""
        return {id(eqn) for eqn in self.eqns}

    def reads(self) -> list[Any]:
        """Return all variables that the region reads."""
        named = [var for var, _ in (*self.rows, *self.weights)]
        return [*named, *self.whole, self.sizes]

    def compute(
        self,
        rows: Sequence[Array],
        weights: Sequence[Array],
        whole: Sequence[Array],
        sizes: Int[Array, "groups"],
    ) -> list[Array]:
        """Evaluate the equations, for any number of groups and of `N` times as many rows.

        `rows` and the results have their rows first; `N` is the number of rows of the function.
        """
        count = shape_of(self.rows[0][0])[self.rows[0][1]]
        known: dict[Any, Array] = dict(zip(self.whole, whole, strict=True))
        groups = dict(zip((var for var, _ in self.weights), weights, strict=True))
        # The equations are those of N rows: they are applied to each N of them.
        blocks: dict[Any, Array] = {}
        for (var, dim), array in zip(self.rows, rows, strict=True):
            parts = array.reshape(array.shape[0] // count, count, *array.shape[1:])
            blocks[var] = jnp.moveaxis(parts, 1, dim + 1)
        for eqn in (*self.broadcast, *self.eqns):
            with equation_context(eqn):
                if eqn.primitive.name == "ragged_dot_general":
                    (x, w, _), to = eqn.invars, self.dims[eqn.outvars[0]]
                    (ragged,) = _numbers(eqn).lhs_ragged_dimensions
                    (y,) = bind(eqn, [_merged(blocks[x], ragged), groups[w], sizes])
                    blocks[eqn.outvars[0]] = _parted(y, to, count)
                    continue
                self._apply(eqn, blocks, known)
        return [jnp.moveaxis(_merged(blocks[v], self.dims[v]), self.dims[v], 0)
                for v in self.results]  # fmt: skip

    @staticmethod
    def _apply(eqn: Any, blocks: dict[Any, Array], known: dict[Any, Array]) -> None:
        """Apply an operation to each block of rows, and add what it computes to the values."""
        inputs: list[Any] = []
        for atom in eqn.invars:
            literal = isinstance(atom, Literal)
            inputs.append(constant(atom) if literal else blocks.get(atom, known.get(atom)))
        mapped = [0 if not isinstance(a, Literal) and a in blocks else None for a in eqn.invars]
        if not any(place == 0 for place in mapped):
            known.update(zip(eqn.outvars, bind(eqn, inputs), strict=True))
            return

        def once(*arrays: Array) -> list[Array]:
            return bind(eqn, arrays)

        apply: Callable[..., list[Array]] = jax.vmap(once, in_axes=tuple(mapped))
        blocks.update(zip(eqn.outvars, apply(*inputs), strict=True))


def _merged(array: Array, dim: int) -> Array:
    """Return blocks of rows `(n, ..., N, ...)` as the rows of one array."""
    array = jnp.moveaxis(array, 0, dim)
    return array.reshape(*array.shape[:dim], -1, *array.shape[dim + 2 :])


def _parted(array: Array, dim: int, count: int) -> Array:
    """Return an array with `count` rows in each block, blocks first."""
    parts = array.reshape(*array.shape[:dim], -1, count, *array.shape[dim + 1 :])
    return jnp.moveaxis(parts, dim, 0)


def _numbers(eqn: Any) -> Any:
    return eqn.params["ragged_dot_dimension_numbers"]


# --- The equation ---------------------------------------------------------------------------------


SLOTS = 2
"""For how many times its own number of rows a device has room, of those that are sent at a time."""


def slots_of(count: int, devices: int) -> tuple[int, int]:
    """Return a device's room for the rows of each other one, and for all, a multiple of `count`."""
    each = max(1, SLOTS * count // devices)
    return each, -(-each * devices // count) * count


@dataclasses.dataclass(frozen=True, eq=False)
class FirstRows:
    """What is computed of the rows that are sent first, which are all where routing is balanced.

    **Fields:** `jaxpr`, of rows, weights, whole values, values that were kept, and sizes; `unsent`,
    how many of the function's rows it does not read, as they were kept; `kept`, the places of the
    results that stay on their device for the backward pass.
    """

    jaxpr: Any
    unsent: int
    kept: tuple[int, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class RowFunction:
    """A function of rows and weights, of which a device can compute any rows.

    **Fields:**

    - `jaxpr`, of rows, weights, whole values and sizes, for the groups of one device and the rows
      for which it has room; its results are rows, weights, and sums over all rows given.
    - `operands`, how many operands are rows, weights, whole values and kept ones, and `results`,
      how many results are rows, weights, and sums.
    - `groups` and `result_groups`, the dims of the groups of weights.
    - `cotangents`, how many of the rows, the last ones, are zeros where there is no row, so that it
      adds nothing.
    - `adds_up`, whether its gradient adds up all rows of a device.
    - `devices`; `first`, of the rows that are sent first; None: they are computed as all others.
    """

    jaxpr: Any
    operands: tuple[int, ...]
    results: tuple[int, ...]
    groups: tuple[int, ...]
    result_groups: tuple[int, ...]
    cotangents: int
    adds_up: bool
    devices: int
    first: FirstRows | None


at_experts_p = Primitive(AT_EXPERTS)
at_experts_p.multiple_results = True


def _abstract(*operands: Any, function: RowFunction) -> list[Any]:
    """Return the avals of all rows and groups, where the jaxpr has those of a device."""
    count = operands[0].shape[0]
    rows, groups, sums = split([var.aval for var in function.jaxpr.jaxpr.outvars], function.results)
    shapes = [(count, *aval.shape[1:]) for aval in rows]
    for aval, dim in zip(groups, function.result_groups, strict=True):
        own = aval.shape[dim] * function.devices
        shapes.append((*aval.shape[:dim], own, *aval.shape[dim + 1 :]))
    shapes += [aval.shape for aval in sums]
    avals = [
        aval.update(shape=shape)
        for aval, shape in zip((*rows, *groups, *sums), shapes, strict=True)
    ]
    return [*avals, *kept_avals(function)]


at_experts_p.def_abstract_eval(_abstract)


def kept_avals(function: RowFunction) -> list[Any]:
    """Return what a device keeps of the first rows, in the shapes that it has there."""
    first = function.first
    return [] if first is None else [first.jaxpr.out_avals[place] for place in first.kept]


def split(arrays: Sequence[Any], counts: Sequence[int]) -> list[list[Any]]:
    """Cut a list into lists of these lengths."""
    rest = iter(arrays)
    return [[next(rest) for _ in range(count)] for count in counts]


class _SentRegion:
    """A region as a function of rows, weights, whole values and sizes, with a gradient.

    The forward pass keeps products of the rows that are sent first, and what was received for them;
    of rows that are sent later the backward pass computes them anew, since how many there are is
    not known.
    """

    def __init__(self, region: ExpertRows, devices: int, operands: Sequence[Sequence[Any]]) -> None:
        self._region, self._devices = region, devices
        self._groups = tuple(dim for _, dim in region.weights)
        rows, weights, whole, (sizes,) = operands
        own = []
        for w, dim in zip(weights, self._groups, strict=True):
            shape = (*w.shape[:dim], w.shape[dim] // devices, *w.shape[dim + 1 :])
            own.append(jax.ShapeDtypeStruct(shape, w.dtype))
        self._count = rows[0].shape[0]
        few = jax.ShapeDtypeStruct((sizes.shape[0] // devices,), jnp.int32)
        # The shapes of one device: room for rows, and the groups of its own.
        self._avals = [*map(self._room, rows)], own, list(map(_like, whole)), few
        self._adds_up = any(x is not None for x in _floating(whole))

    def apply(self) -> Callable[..., list[Array]]:
        """Return the function."""
        apply = jax.custom_vjp(lambda *operands: self._forward(operands, None)[0])
        apply.defvjp(self._saved, self._backward)
        return apply

    def _room(self, rows: Any) -> jax.ShapeDtypeStruct:
        room = slots_of(self._count, self._devices)[1]
        return jax.ShapeDtypeStruct((room, *rows.shape[1:]), rows.dtype)

    def _vjp(self, rows: Any, weights: Any, whole: Any, sizes: Any) -> tuple[Any, Any]:
        """Return the results, and the function of their cotangents, which keeps products."""
        every = [list(rows), list(weights), list(whole)]

        def compute(*chosen: Any) -> tuple[Any, Any]:
            parts = [filled(a, b) for a, b in zip(every, chosen, strict=True)]
            results = self._region.compute(parts[0], parts[1], parts[2], sizes)
            return _floating(results), results

        kept = jax.checkpoint(compute, policy=_is_product_of_groups, prevent_cse=False)
        _, back, results = jax.vjp(kept, *map(_floating, every), has_aux=True)
        return results, back

    @functools.cached_property
    def _first(self) -> tuple[FirstRows, Callable[..., Any]]:
        """What the forward pass computes of the rows sent first, and how their gradient follows."""
        structure: Any = None

        def keep(*operands: Any) -> Any:
            nonlocal structure
            results, back = self._vjp(*operands)
            leaves, structure = jax.tree.flatten(back)
            return results, leaves

        jaxpr, (results, _) = jax.make_jaxpr(keep, return_shape=True)(*self._avals)
        rows = len(self._avals[0])
        read = jaxpr.jaxpr.invars[rows:]
        leaves = jaxpr.jaxpr.outvars[len(results) :]
        kept: dict[Any, int] = {}
        for place, leaf in enumerate(leaves, len(results)):
            if not isinstance(leaf, Literal) and leaf not in read:
                kept.setdefault(leaf, place)

        def gradient(operands: Sequence[Any], values: Sequence[Any], cotangents: Any) -> Any:
            known = dict(zip((*read, *kept), (*operands, *values), strict=True))
            arrays = [constant(a) if isinstance(a, Literal) else known[a] for a in leaves]
            return jax.tree.unflatten(structure, arrays)(cotangents)

        return FirstRows(jaxpr, 0, tuple(kept.values())), gradient

    def _forward(self, operands: Any, first: FirstRows | None) -> tuple[list[Array], list[Array]]:
        def compute(*own: Any) -> Any:
            return self._region.compute(*own), [], []

        rows, weights, whole, sizes = operands
        (out, _, _), kept = self._bound(compute, (rows, weights, whole, [], [sizes]), first)
        return out, kept

    def _saved(self, *operands: Any) -> Any:
        out, kept = self._forward(operands, self._first[0])
        return out, (operands, kept)

    def _backward(self, saved: Any, cotangents: Any) -> Any:
        (rows, weights, whole, sizes), kept = saved
        received = [None if g.dtype == jax.dtypes.float0 else g for g in cotangents]
        sent, structure = jax.tree.flatten(received)

        def gradients(own: Any, weights: Any, whole: Any, sizes: Any) -> Any:
            back = self._vjp(own[: len(rows)], weights, whole, sizes)[1]
            return back(jax.tree.unflatten(structure, own[len(rows) :]))

        def of_first(own: Any, weights: Any, whole: Any, kept: Any, sizes: Any) -> Any:
            received = jax.tree.unflatten(structure, own)
            return self._first[1]([*weights, *whole, sizes], kept, received)

        _, own, few, size = self._avals
        avals = [*map(self._room, sent)], own, few, list(map(_like, kept)), size
        first = FirstRows(jax.make_jaxpr(of_first)(*avals), len(rows), ())
        parts = [*rows, *sent], weights, whole, kept, [sizes]
        return *self._bound(gradients, parts, first, len(sent))[0], None

    def _bound(
        self,
        compute: Callable[..., Any],
        operands: Sequence[Sequence[Any]],
        first: FirstRows | None,
        cotangents: int = 0,
    ) -> tuple[Any, list[Array]]:
        """Bind the primitive to `operands`: rows, weights, whole and kept values, a list of sizes.

        It is traced here for the shapes of one device, in the mesh of the function. Returns what
        `compute` does: lists of rows, of weights in the order of the operands, and of sums; of what
        has no gradient, None. Beside it what is kept.
        """
        rows = [*map(self._room, operands[0])]
        traced = jax.make_jaxpr(compute, return_shape=True)
        jaxpr, shapes = traced(rows, *self._avals[1:])
        by_group = zip(self._groups, shapes[1], strict=False)  # the forward pass returns none
        counts = tuple(len(jax.tree.leaves(part)) for part in shapes)
        function = RowFunction(
            jaxpr,
            tuple(map(len, operands[:-1])),
            counts,
            self._groups,
            tuple(dim for dim, leaf in by_group if leaf is not None),
            cotangents,
            self._adds_up,
            self._devices,
            first,
        )
        flat = at_experts_p.bind(*(a for part in operands for a in part), function=function)
        structure = jax.tree.structure(shapes)
        return jax.tree.unflatten(structure, flat[: sum(counts)]), flat[sum(counts) :]


def _like(array: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def _is_product_of_groups(primitive: Any, *_: Any, **params: Any) -> bool:
    """Whether a result is kept for the backward pass: others are computed from these."""
    return primitive.name == "ragged_dot_general"


def _floating(arrays: Sequence[Any]) -> list[Any]:
    """Return the arrays that have a derivative, and None for others."""
    return floating(arrays, [True] * len(arrays))


# --- The function ---------------------------------------------------------------------------------


def at_experts(fun: Callable[..., PyTree], devices: int) -> Callable[..., PyTree]:
    """Return the same function with the rows of experts cut out; apply it before differentiation.

    **Arguments:** `fun`, a function of trees of arrays, its first argument the parameters;
    `devices`, which have to divide the experts. Weights that depend on other arguments stay.
    """

    def find(body: Body) -> list[ExpertRows]:
        return expert_rows(body.eqns, body.results, body.of_rows, devices)

    def apply(region: ExpertRows, _: Body, values: Mapping[Any, Any]) -> list[Array]:
        rows = [jnp.moveaxis(values[var], dim, 0) for var, dim in region.rows]
        weights = [values[var] for var, _ in region.weights]
        whole, sizes = [values[var] for var in region.whole], values[region.sizes]
        sent = _SentRegion(region, devices, (rows, weights, whole, [sizes])).apply()
        out = sent(rows, weights, whole, sizes)
        dims = [region.dims[var] for var in region.results]
        return [jnp.moveaxis(y, 0, dim) for y, dim in zip(out, dims, strict=True)]

    def has_experts(jaxpr: Any) -> bool:
        return holds(jaxpr, "ragged_dot_general")

    return by_jaxpr(fun, Regions(find, apply, has_experts).evaluate)


# --- Where rows of experts are --------------------------------------------------------------------


def expert_rows(
    eqns: Sequence[Any], results: Sequence[Any], of_rows: set[Any], devices: int
) -> list[ExpertRows]:
    """Return the regions of rows of experts, in the order of their first products."""
    left = [eqn for eqn in eqns if _is_product(eqn, of_rows, devices)]
    regions: list[ExpertRows] = []
    while left:
        walk = _ExpertWalk(eqns, left[0].invars[2], {id(eqn) for eqn in left}, of_rows)
        regions.append(walk.region(results))
        taken = regions[-1].ids()
        left = [eqn for eqn in left if id(eqn) not in taken]
    return regions


def _is_product(eqn: Any, of_rows: set[Any], devices: int) -> bool:
    """Whether an equation multiplies groups of rows with the groups' own weights."""
    if eqn.primitive.name != "ragged_dot_general":
        return False
    numbers, (x, w, sizes) = _numbers(eqn), eqn.invars
    (ragged,), groups = numbers.lhs_ragged_dimensions, numbers.rhs_group_dimensions
    (contracted, _), (batch, _) = numbers.dot_dimension_numbers
    if not groups or ragged in (*contracted, *batch) or len(shape_of(sizes)) > 1:
        return False
    if any(isinstance(atom, Literal) for atom in eqn.invars) or shape_of(x)[ragged] == 0:
        return False
    return x in of_rows and w not in of_rows and shape_of(sizes)[0] % devices == 0


class _ExpertWalk:
    """Follows the rows of products with equal `sizes` from one to the next.

    **Attributes:** `dims`, where a variable has its rows, of all that is computed row by row from
    the result of a product; `mixed`, what else depends on these, which no equation of the region
    may read.
    """

    def __init__(
        self, eqns: Sequence[Any], sizes: Any, products: set[int], of_rows: set[Any]
    ) -> None:
        self._eqns, self._sizes, self._products, self._of_rows = eqns, sizes, products, of_rows
        self._made_by = {var: eqn for eqn in eqns for var in eqn.outvars}
        self._read: dict[Any, int] = {}
        self.dims: dict[Any, int] = {}
        self.mixed: set[Any] = set()
        self._chosen: list[Any] = []
        for eqn in eqns:
            dim = self._rows(eqn)
            if dim is not None:
                self._chosen.append(eqn)
                self.dims.update(dict.fromkeys(eqn.outvars, dim))
            elif any(var in self.dims or var in self.mixed for var in variables(eqn.invars)):
                self.mixed.update(eqn.outvars)

    def _rows(self, eqn: Any) -> int | None:
        """Return where the result of an equation of the region has its rows; None of others."""
        read = variables(eqn.invars)
        if not self.mixed.isdisjoint(read):
            return None
        if id(eqn) in self._products and eqn.invars[2] is self._sizes:
            numbers, x = _numbers(eqn), eqn.invars[0]
            (ragged,) = numbers.lhs_ragged_dimensions
            (contracted, _), (batch, _) = numbers.dot_dimension_numbers
            if self.dims.get(x, ragged) != ragged or not self._reads_rows({x: ragged}):
                return None
            free = [d for d in range(len(shape_of(x))) if d not in (*contracted, *batch)]
            return len(batch) + free.index(ragged)
        inside = [place for place, atom in enumerate(eqn.invars)
                  if not isinstance(atom, Literal) and atom in self.dims]  # fmt: skip
        if not inside:
            return None
        follow = row_of_call if eqn.primitive.name.startswith("custom_") else row_of_result
        found = {follow(eqn, place, self.dims[eqn.invars[place]]) for place in inside}
        dim = found.pop() if len(found) == 1 else None
        if dim is None:
            return None
        read_rows: dict[Any, int] = {}
        for place, atom in enumerate(eqn.invars):
            if isinstance(atom, Literal) or place in inside:
                continue
            row = row_of_operand(eqn, place, dim)
            # What differs between devices and not between rows would be another device's.
            if row is None and atom in self._of_rows:
                return None
            if row is not None and read_rows.setdefault(atom, row) != row:
                return None
        return dim if self._reads_rows(read_rows) else None

    def _reads_rows(self, dims: dict[Any, int]) -> bool:
        """Whether values can be read with their rows at these dims: each has them at one."""
        if any(self._read.get(var, dim) != dim for var, dim in dims.items()):
            return False
        self._read.update(dims)
        return True

    def region(self, results: Sequence[Any]) -> ExpertRows:
        """Return the equations on which a product depends, and what they read."""
        kept: list[Any] = []
        wanted: set[Any] = set()
        for eqn in reversed(self._chosen):
            if id(eqn) in self._products or not wanted.isdisjoint(eqn.outvars):
                kept.insert(0, eqn)
                wanted.update(var for var in variables(eqn.invars) if var in self.dims)
        inner = {var for eqn in kept for var in eqn.outvars}
        ids = {id(eqn) for eqn in kept}
        outside = {v for eqn in self._eqns if id(eqn) not in ids for v in variables(eqn.invars)}
        outside.update(variables(results))
        rows: dict[tuple[Any, int], None] = {}
        weights: dict[tuple[Any, int], None] = {}
        whole: dict[Any, None] = {}
        broadcast: dict[int, Any] = {}
        for eqn in kept:
            product = eqn.primitive.name == "ragged_dot_general"
            for place, atom in enumerate(eqn.invars):
                if isinstance(atom, Literal) or atom in inner or (product and place == 2):
                    continue
                if product and place == 1:
                    weights[atom, _numbers(eqn).rhs_group_dimensions[0]] = None
                    continue
                row: int | None
                if product:
                    row = _numbers(eqn).lhs_ragged_dimensions[0]
                else:
                    row = row_of_operand(eqn, place, self.dims[eqn.outvars[0]])
                made_by = self._made_by.get(atom)
                if row is None:
                    whole[atom] = None
                elif made_by is not None and self._repeats(made_by, row):
                    broadcast[id(made_by)] = made_by
                    whole.update(dict.fromkeys(variables(made_by.invars)))
                else:
                    rows[atom, row] = None
        return ExpertRows(
            kept, list(broadcast.values()), self._sizes, list(rows), list(weights), list(whole),
            [var for eqn in kept for var in eqn.outvars if var in outside], self.dims,
        )  # fmt: skip

    def _repeats(self, eqn: Any, row: int) -> bool:
        """Whether an equation repeats a value of parameters, or a constant, for each row."""
        if eqn.primitive.name != "broadcast_in_dim" or len(eqn.invars) > 1:
            return False
        given = variables(eqn.invars)
        return row not in eqn.params["broadcast_dimensions"] and self._of_rows.isdisjoint(given)
