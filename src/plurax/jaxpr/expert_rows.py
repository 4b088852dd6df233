"""Find the rows and buffers of experts in a function, so that they can be sent to their experts.

A mixture sorts the rows of its tokens by expert and multiplies each group with the weights of its
expert, by `lax.ragged_dot`. If devices have rows of their own and experts of their own, a row has
to be sent to the device of its expert, and what becomes of it back. What lies between the first
product and the last one works row by row, so all of it is cut out as one function of rows and
weights (`jaxpr/at_experts.py`), and each row is sent once:

    8 experts; x (1024, 64), w (8, 64, 256), v (8, 256, 64), sizes (8,) of a device's own rows

    equation                            here
    a = ragged_dot(x, w, sizes)         rows x; weights w
    h = silu(a) * b                     rows b, (1024, 256)
    y = ragged_dot(h, v, sizes)         weights v; result: rows y
    z = zeros.at[token].add(y)          not here: it mixes rows

Or it puts tokens into a buffer of each expert, by products with zeros and ones or by an index. Then
an expert's buffer is what has one row above: it is sent to the expert of its place.

    x (8, 32, 64), the 32 slots of each expert; w, v as above, and a bias c (8, 256)

    a = einsum("ecd,edf->ecf", x, w)    rows x, of dim 0; weights w
    h = silu(a + c[:, None])            weights c
    y = einsum("ecf,efd->ecd", h, v)    weights v; result: rows y
    z = einsum("nec,ecd->nd", p, y)     not here: it adds up experts

Products of buffers are known by their weights, which a rule of the plan splits by expert: others
have a dim of heads or of blocks.

Source: the groups of rows are those of MegaBlocks (Gale et al. 2022,
https://arxiv.org/abs/2211.15841); experts on devices that have other tokens, and their buffers, are
those of GShard (Lepikhin et al. 2020, https://arxiv.org/abs/2006.16668).
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal, Var
from jaxtyping import Array, Int

from plurax.jaxpr.equal_dims import shape_of
from plurax.jaxpr.interpret import bind, constant, equation_context, variables
from plurax.jaxpr.row_by_row import row_of_call, row_of_operand, row_of_result


@dataclasses.dataclass(frozen=True)
class ExpertProduct:
    """A product of rows with the weights of their experts.

    **Fields:** `rows`, `weights`: which operand is which; `row_dim`, `group_dim`, the dims of rows
    and of experts there; `result_dim`, that of rows in the result.
    """

    rows: int
    weights: int
    row_dim: int
    group_dim: int
    result_dim: int


@dataclasses.dataclass(frozen=True)
class ExpertRows:
    """Equations between products of rows with weights of experts, and what they read.

    **Fields:**

    - `eqns`, in the order of the function; `broadcast`, those before them that repeat a value for
      each row, which is cheaper than to send it.
    - `sizes`: the variable with the rows of each group; None where there is a row of each expert,
      its buffer.
    - `rows`, `weights`: what is read row by row and group by group, each a variable and the dim of
      its rows or groups.
    - `whole`: what is read as it is; `results`, what others read.
    - `dims`: where a variable that the equations compute has its rows.
    - `products`, by the `id` of their equation.
    """

    eqns: list[Any]
    broadcast: list[Any]
    sizes: Any | None
    rows: list[tuple[Any, int]]
    weights: list[tuple[Any, int]]
    whole: list[Any]
    results: list[Any]
    dims: dict[Any, int]
    products: Mapping[int, ExpertProduct]

    def ids(self) -> set[int]:
        """Return the `id`s of the equations that the region replaces."""
        return {id(eqn) for eqn in self.eqns}

    def reads(self) -> list[Any]:
        """Return all variables that the region reads."""
        named = [var for var, _ in (*self.rows, *self.weights)]
        return [*named, *self.whole, *([] if self.sizes is None else [self.sizes])]

    def compute(
        self,
        rows: Sequence[Array],
        weights: Sequence[Array],
        whole: Sequence[Array],
        sizes: Int[Array, "groups"] | None = None,
    ) -> list[Array]:
        """Evaluate the equations, for any number of groups and of `N` times as many rows.

        `rows` and the results have their rows first; `N` is the number of rows of the function. Of
        buffers there are `N`, of the groups of these `weights` in turn.
        """
        count = shape_of(self.rows[0][0])[self.rows[0][1]]
        known: dict[Any, Array] = dict(zip(self.whole, whole, strict=True))
        groups = dict(zip((var for var, _ in self.weights), weights, strict=True))
        # The equations are those of N rows: they are applied to each N of them.
        blocks: dict[Any, Array] = {}
        for (var, dim), array in zip(self.rows, rows, strict=True):
            parts = array.reshape(array.shape[0] // count, count, *array.shape[1:])
            blocks[var] = jnp.moveaxis(parts, 1, dim + 1)
        others = [eqn for eqn in self.eqns if id(eqn) not in self.products]
        read = {var for eqn in others for var in variables(eqn.invars)}
        for var, dim in self.weights:
            if var in read:
                times = count // groups[var].shape[dim]
                blocks[var] = jnp.concatenate([groups[var]] * times, dim)[None]
        for eqn in (*self.broadcast, *self.eqns):
            with equation_context(eqn):
                if product := self.products.get(id(eqn)):
                    x = _merged(blocks[eqn.invars[product.rows]], product.row_dim)
                    w = groups[eqn.invars[product.weights]]
                    y = _of_groups(eqn, product, x, w) if sizes is None else bind(
                        eqn, [x, w, sizes])[0]  # fmt: skip
                    blocks[eqn.outvars[0]] = _parted(y, product.result_dim, count)
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


def _of_groups(eqn: Any, product: ExpertProduct, x: Array, w: Array) -> Array:
    """Return products of buffers, those of the groups of `w` in turn: once for each turn."""

    def once(x: Array) -> Array:
        return bind(eqn, [x, w] if product.rows == 0 else [w, x])[0]

    turns = _parted(x, product.row_dim, w.shape[product.group_dim])
    return _merged(jax.vmap(once)(turns), product.result_dim)


def _merged(array: Array, dim: int) -> Array:
    """Return blocks of rows `(n, ..., N, ...)` as the rows of one array."""
    array = jnp.moveaxis(array, 0, dim)
    return array.reshape(*array.shape[:dim], -1, *array.shape[dim + 2 :])


def _parted(array: Array, dim: int, count: int) -> Array:
    """Return an array with `count` rows in each block, blocks first."""
    parts = array.reshape(*array.shape[:dim], -1, count, *array.shape[dim + 1 :])
    return jnp.moveaxis(parts, dim, 0)


# --- Where they are -------------------------------------------------------------------------------


def expert_rows(
    eqns: Sequence[Any],
    results: Sequence[Any],
    of_rows: set[Any],
    groups: Mapping[Any, int],
    devices: int,
) -> list[ExpertRows]:
    """Return the regions of rows of experts, in the order of their first products.

    `groups`: of values that are split over `devices` by group, the dim of the groups.
    """
    left: dict[int, tuple[Any, ExpertProduct]] = {}
    for eqn in eqns:
        if product := _product(eqn, of_rows, groups, devices):
            left[id(eqn)] = eqn, product
    regions: list[ExpertRows] = []
    while left:
        eqn, product = next(iter(left.values()))
        key = _key(eqn, product)
        alike = {number: p for number, (e, p) in left.items() if _key(e, p) == key}
        sizes = eqn.invars[2] if isinstance(key, Var) else None
        regions.append(_ExpertWalk(eqns, sizes, alike, of_rows).region(results))
        for number in regions[-1].ids():
            left.pop(number, None)
    return regions


def _key(eqn: Any, product: ExpertProduct) -> Any:
    """Return what products of one region share: the sizes of groups, or the number of buffers."""
    if eqn.primitive.name == "ragged_dot_general":
        return eqn.invars[2]
    return shape_of(eqn.invars[product.rows])[product.row_dim]


def _product(
    eqn: Any, of_rows: set[Any], groups: Mapping[Any, int], devices: int
) -> ExpertProduct | None:
    """Return how an equation multiplies rows with the weights of their experts, if it does."""
    name = eqn.primitive.name
    if name not in ("ragged_dot_general", "dot_general") or any(
        isinstance(atom, Literal) for atom in eqn.invars
    ):
        return None
    product = _of_buffers(eqn, groups) if name == "dot_general" else _of_sorted_rows(eqn)
    if product is None:
        return None
    x, w = eqn.invars[product.rows], eqn.invars[product.weights]
    divided = shape_of(w)[product.group_dim] % devices == 0
    return product if x in of_rows and w not in of_rows and divided else None


def _of_sorted_rows(eqn: Any) -> ExpertProduct | None:
    numbers, (x, _, sizes) = eqn.params["ragged_dot_dimension_numbers"], eqn.invars
    (ragged,), groups = numbers.lhs_ragged_dimensions, numbers.rhs_group_dimensions
    (contracted, _), (batch, _) = numbers.dot_dimension_numbers
    if not groups or ragged in (*contracted, *batch) or len(shape_of(sizes)) > 1:
        return None
    if shape_of(x)[ragged] == 0:
        return None
    free = [d for d in range(len(shape_of(x))) if d not in (*contracted, *batch)]
    return ExpertProduct(0, 1, ragged, groups[0], len(batch) + free.index(ragged))


def _of_buffers(eqn: Any, groups: Mapping[Any, int]) -> ExpertProduct | None:
    _, batch = eqn.params["dimension_numbers"]
    for weights in (1, 0):
        dim = groups.get(eqn.invars[weights])
        if dim is not None and dim in batch[weights]:
            place = batch[weights].index(dim)
            return ExpertProduct(1 - weights, weights, batch[1 - weights][place], dim, place)
    return None


class _ExpertWalk:
    """Follows the rows of alike products from one to the next.

    **Attributes:** `dims`, where a variable has its rows, of all that is computed row by row from
    the result of a product; `mixed`, what else depends on these, which no equation of the region
    may read.
    """

    def __init__(
        self,
        eqns: Sequence[Any],
        sizes: Any | None,
        products: Mapping[int, ExpertProduct],
        of_rows: set[Any],
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
        if product := self._products.get(id(eqn)):
            x, w = eqn.invars[product.rows], eqn.invars[product.weights]
            dims = {x: product.row_dim, w: product.group_dim}
            if self.dims.get(x, dims[x]) != dims[x] or not self._reads_rows(dims):
                return None
            return product.result_dim
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
            product = self._products.get(id(eqn))
            for place, atom in enumerate(eqn.invars):
                if isinstance(atom, Literal) or atom in inner or (product and place == 2):
                    continue
                if product and place == product.weights:
                    weights[atom, product.group_dim] = None
                    continue
                row: int | None
                if product:
                    row = product.row_dim
                else:
                    row = row_of_operand(eqn, place, self.dims[eqn.outvars[0]])
                made_by = self._made_by.get(atom)
                if row is None:
                    whole[atom] = None
                elif made_by is not None and self._repeats(made_by, row):
                    broadcast[id(made_by)] = made_by
                    whole.update(dict.fromkeys(variables(made_by.invars)))
                elif self._sizes is None and atom not in self._of_rows:
                    weights[atom, row] = None
                else:
                    rows[atom, row] = None
        return ExpertRows(
            kept, list(broadcast.values()), self._sizes, list(rows), list(weights), list(whole),
            [var for eqn in kept for var in eqn.outvars if var in outside], self.dims,
            self._products,
        )  # fmt: skip

    def _repeats(self, eqn: Any, row: int) -> bool:
        """Whether an equation repeats a value of parameters, or a constant, for each row."""
        if eqn.primitive.name != "broadcast_in_dim" or len(eqn.invars) > 1:
            return False
        given = variables(eqn.invars)
        return row not in eqn.params["broadcast_dimensions"] and self._of_rows.isdisjoint(given)
