"""Compute rows at their experts, in a function that is cut out and differentiated by hand.

`jaxpr/expert_rows.py` finds what lies between products with the weights of experts. Here that is a
function of rows and weights, its backward pass again such a function, and both are one equation,
`at_experts`, which the partitioner evaluates.

Sorted rows are sent in turns (`partition/operators/sent_rows.py`), of which a router that balances
takes one: of the rows that are sent first products are kept where they were computed, and those of
later turns are computed anew. The buffers of experts are as large for any routing, and are sent
once: a buffer, one of each expert, is a row here.

    8 experts on 2 devices      rows sent                  what a device computes with 4 experts
    x (1024, 64) sorted         first 2 x 1024, by size    rows (2048, 64), sizes (4,)
    x (8, 32, 64) buffers       all 8, by place            rows (8, 32, 64), experts in turn

Under `Plan(remat="full")` nothing is kept.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jaxtyping import Array, PyTree

from plurax.jaxpr.block_arrays import filled, floating
from plurax.jaxpr.bodies import Body, Regions, by_jaxpr
from plurax.jaxpr.expert_rows import ExpertRows, expert_rows
from plurax.jaxpr.forward_pass import ForwardPass
from plurax.jaxpr.interpret import holds

AT_EXPERTS = "at_experts"
"""The name of the primitive that computes rows at their experts."""

SLOTS = 2
"""For how many times its own number of rows a device has room, of those that are sent at a time."""


LATER_SLOTS = 1
"""The same of rows that are sent behind the first: so what computes them holds less than that."""


def slots_of(count: int, devices: int, times: int = SLOTS) -> tuple[int, int]:
    """Return a device's room for the rows of each other one, and for all, a multiple of `count`."""
    each = max(1, times * count // devices)
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

    Without sizes there is one row of each expert, its buffer, in the order of experts.

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
        rows, weights, whole, sizes = operands
        own = []
        for w, dim in zip(weights, self._groups, strict=True):
            shape = (*w.shape[:dim], w.shape[dim] // devices, *w.shape[dim + 1 :])
            own.append(jax.ShapeDtypeStruct(shape, w.dtype))
        self._count, self._buffers = rows[0].shape[0], not sizes
        few = [jax.ShapeDtypeStruct((x.shape[0] // devices,), jnp.int32) for x in sizes]
        # The shapes of one device: room for rows, and the groups of its own.
        self._avals = [*map(self._room, rows)], own, list(map(_like, whole)), few
        self._adds_up = any(x is not None for x in _floating(whole))

    def apply(self) -> Callable[..., list[Array]]:
        """Return the function."""
        apply = jax.custom_vjp(lambda *operands: self._forward(operands, None)[0])
        apply.defvjp(self._saved, self._backward)
        return apply

    def _room(self, rows: Any, times: int = SLOTS) -> jax.ShapeDtypeStruct:
        room = self._count if self._buffers else slots_of(self._count, self._devices, times)[1]
        return jax.ShapeDtypeStruct((room, *rows.shape[1:]), rows.dtype)

    def _vjp(self, rows: Any, weights: Any, whole: Any, sizes: Sequence[Any]) -> tuple[Any, Any]:
        """Return the results, and the function of their cotangents, which keeps products."""
        every = [list(rows), list(weights), list(whole)]

        def compute(*chosen: Any) -> tuple[Any, Any]:
            parts = [filled(a, b) for a, b in zip(every, chosen, strict=True)]
            results = self._region.compute(parts[0], parts[1], parts[2], *sizes)
            return _floating(results), results

        kept = jax.checkpoint(compute, policy=_is_product_of_groups, prevent_cse=False)
        _, back, results = jax.vjp(kept, *map(_floating, every), has_aux=True)
        return results, back

    @functools.cached_property
    def _first(self) -> ForwardPass:
        """What is computed of the rows sent first, of which the received ones are kept."""
        return ForwardPass.of(self._vjp, self._avals, anew=len(self._avals[0]))

    def _forward(self, operands: Any, first: FirstRows | None) -> tuple[list[Array], list[Array]]:
        def compute(*own: Any) -> Any:
            return self._region.compute(*own[:-1], *own[-1]), [], []

        rows, weights, whole, sizes = operands
        (out, _, _), kept = self._bound(compute, (rows, weights, whole, [], sizes), first)
        return out, kept

    def _saved(self, *operands: Any) -> Any:
        first = FirstRows(self._first.jaxpr, 0, tuple(self._first.kept.values()))
        out, kept = self._forward(operands, first)
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
            return self._first.gradient([*weights, *whole, *sizes], kept, received)

        _, own, few, size = self._avals
        avals = [*map(self._room, sent)], own, few, list(map(_like, kept)), size
        first = FirstRows(jax.make_jaxpr(of_first)(*avals), len(rows), ())
        parts = [*rows, *sent], weights, whole, kept, sizes
        return *self._bound(gradients, parts, first, len(sent))[0], None

    def _bound(
        self,
        compute: Callable[..., Any],
        operands: Sequence[Sequence[Any]],
        first: FirstRows | None,
        cotangents: int = 0,
    ) -> tuple[Any, list[Array]]:
        """Bind the primitive to `operands`: rows, weights, whole and kept values, and sizes.

        It is traced here for the shapes of one device, in the mesh of the function. Returns what
        `compute` does: lists of rows, of weights in the order of the operands, and of sums; of what
        has no gradient, None. Beside it what is kept.
        """
        times = SLOTS if first is None else LATER_SLOTS
        rows = [self._room(x, times) for x in operands[0]]
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
    return primitive.name in ("ragged_dot_general", "dot_general")


def _floating(arrays: Sequence[Any]) -> list[Any]:
    """Return the arrays that have a derivative, and None for others."""
    return floating(arrays, [True] * len(arrays))


# --- The function ---------------------------------------------------------------------------------


def has_experts(jaxpr: Any) -> bool:
    """Whether there may be products with the weights of experts."""
    return holds(jaxpr, "ragged_dot_general") or holds(jaxpr, "dot_general")


def at_experts(
    fun: Callable[..., PyTree], devices: int, groups: Callable[[PyTree], Sequence[int | None]]
) -> Callable[..., PyTree]:
    """Return the same function with the rows of experts cut out; apply it before differentiation.

    **Arguments:** `fun`, a function of trees of arrays, its first argument the parameters;
    `devices`, which have to divide the experts; `groups(params)`, of each parameter the dim that is
    split over them. Weights that depend on other arguments stay.
    """

    def find(body: Body) -> list[ExpertRows]:
        return expert_rows(body.eqns, body.results, body.of_rows, body.dims, devices)

    def apply(region: ExpertRows, _: Body, values: Mapping[Any, Any]) -> list[Array]:
        rows = [jnp.moveaxis(values[var], dim, 0) for var, dim in region.rows]
        weights = [values[var] for var, _ in region.weights]
        whole = [values[var] for var in region.whole]
        sizes = [] if region.sizes is None else [values[region.sizes]]
        sent = _SentRegion(region, devices, (rows, weights, whole, sizes)).apply()
        out = sent(rows, weights, whole, sizes)
        dims = [region.dims[var] for var in region.results]
        return [jnp.moveaxis(y, 0, dim) for y, dim in zip(out, dims, strict=True)]

    regions = Regions(find, apply, has_experts)

    @functools.wraps(fun)
    def run(params: PyTree, *rest: PyTree) -> PyTree:
        evaluate = functools.partial(regions.evaluate, dims=groups(params))
        return by_jaxpr(fun, evaluate)(params, *rest)

    return run
