"""Evaluate a function that leaves rows apart on the rows of each device.

The loss of a mixture may couple examples, by the balance of its load, and sort their tokens by
expert all the same: then the sort is one of the tokens of all devices, though what comes out for a
token depends on that token alone. `jaxpr/sorted_rows.py` finds such a part of a loss, with its
equations for fewer rows. Here it becomes one equation, whose jaxpr has the rows of one device:

    data=4; tokens x (64, 16), 16 on each device; weights w (8, 16, 32)

    equation                              on one device
    y = rows_apart(x, which, w)           x (16, 16) and which (16,) of its own; w as it is
        order = argsort(which)            (16,)
        a = ragged_dot(x[order], w, ...)  (16, 32)
        y = a[argsort(order)]             (16, 32), its rows of y (64, 32)

Its backward pass is one, too. What it adds up for whole operands is of the rows of a device, and so
a partial sum over `data`; what is kept for it stays on its device.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jaxtyping import Array

from plurax.jaxpr.block_arrays import filled, floating
from plurax.jaxpr.forward_pass import ForwardPass
from plurax.jaxpr.interpret import interpret

ROWS_APART = "rows_apart"
"""The name of the primitive that computes on each device's own rows."""


rows_apart_p = Primitive(ROWS_APART)
"""Parameters: `jaxpr`, for the rows of one device; `dims`, of each operand that of its rows, None
where it is whole; `result_dims`, of each result, None for a sum over a device's own rows;
`devices`."""
rows_apart_p.multiple_results = True


def _abstract(
    *_: Any, jaxpr: Any, dims: Any, result_dims: Sequence[int | None], devices: int
) -> list[Any]:
    avals = []
    for aval, dim in zip(jaxpr.out_avals, result_dims, strict=True):
        shape = list(aval.shape)
        if dim is not None:
            shape[dim] *= devices
        avals.append(aval.update(shape=tuple(shape)))
    return avals


rows_apart_p.def_abstract_eval(_abstract)


def rows_apart(
    compute: Callable[..., list[Array]],
    operands: Sequence[Any],
    dims: Sequence[int | None],
    result_dims: Sequence[int],
    devices: int,
) -> list[Array]:
    """Return `compute(*operands)`, each device's own rows, with a gradient.

    **Arguments:** `compute`, for the rows of one device; `operands`, of all devices, with their
    rows at `dims`, None where each device reads all; `result_dims`, of the results; `devices`,
    which divide the rows.
    """
    part = _RowPart(compute, operands, tuple(dims), tuple(result_dims), devices)
    apply = jax.custom_vjp(part.results)
    apply.defvjp(part.saved, part.gradients)
    return apply(*operands)


class _RowPart:
    """A function of rows, and its backward pass, each as one equation."""

    def __init__(
        self,
        compute: Callable[..., list[Array]],
        operands: Sequence[Any],
        dims: tuple[int | None, ...],
        result_dims: tuple[int, ...],
        devices: int,
    ) -> None:
        self._compute, self._dims, self._devices = compute, dims, devices
        self._result_dims = result_dims
        self._few = [self._own(x, dim) for x, dim in zip(operands, dims, strict=True)]

    def _own(self, array: Any, dim: int | None) -> jax.ShapeDtypeStruct:
        """Return the shape of what one device has of an array."""
        shape = list(array.shape)
        if dim is not None:
            shape[dim] //= self._devices
        return jax.ShapeDtypeStruct(tuple(shape), array.dtype)

    @functools.cached_property
    def _pass(self) -> ForwardPass:
        def vjp(*own: Any) -> tuple[Any, Any]:
            def computed(chosen: Any) -> tuple[Any, Any]:
                results = self._compute(*filled(own, chosen))
                return _floating(results), results

            _, back, results = jax.vjp(computed, _floating(own), has_aux=True)
            return results, back

        return ForwardPass.of(vjp, self._few)

    def results(self, *operands: Any) -> list[Array]:
        """Return the results, from which nothing is kept."""
        return self._bound(self._compute, operands, self._dims, self._result_dims)

    def saved(self, *operands: Any) -> Any:
        """Return the results, and what the backward pass reads."""
        forward, count = self._pass, len(self._result_dims)

        def first(*own: Any) -> list[Any]:
            values = interpret(forward.jaxpr.jaxpr, forward.jaxpr.consts, own)
            # A number gets a dim, along which the numbers of all devices are put.
            stay = [jnp.atleast_1d(values[place]) for place in forward.kept.values()]
            return [*values[:count], *stay]

        result_dims = (*self._result_dims, *(0 for _ in forward.kept))
        out = self._bound(first, operands, self._dims, result_dims)
        return out[:count], (operands, out[count:])

    def gradients(self, saved: Any, cotangents: Any) -> Any:
        """Return the gradients of the operands; those of whole ones are sums over own rows."""
        (operands, stay), forward = saved, self._pass
        received = [None if g.dtype == jax.dtypes.float0 else g for g in cotangents]
        sent, structure = jax.tree.flatten(received)
        moved = [x is not None for x in _floating(self._few)]

        def gradients(*own: Any) -> list[Any]:
            first, after = own[: len(operands)], own[len(operands) :]
            kept = [x.reshape(var.aval.shape) for x, var in zip(after, forward.kept, strict=False)]
            cotangents = jax.tree.unflatten(structure, after[len(stay) :])
            (grads,) = forward.gradient(first, kept, cotangents)
            return [g for g, has_one in zip(grads, moved, strict=True) if has_one]

        own_dims = [d for d, g in zip(self._result_dims, received, strict=True) if g is not None]
        dims = (*self._dims, *(0 for _ in stay), *own_dims)
        result_dims = tuple(d for d, has_one in zip(self._dims, moved, strict=True) if has_one)
        out = iter(self._bound(gradients, [*operands, *stay, *sent], dims, result_dims))
        return tuple(next(out) if has_one else None for has_one in moved)

    def _bound(
        self,
        compute: Callable[..., list[Any]],
        operands: Sequence[Any],
        dims: tuple[int | None, ...],
        result_dims: tuple[int | None, ...],
    ) -> list[Any]:
        """Bind the primitive, traced for the rows of one device in the mesh of the function."""
        few = [self._own(x, dim) for x, dim in zip(operands, dims, strict=True)]
        bound: list[Any] = rows_apart_p.bind(
            *operands, jaxpr=jax.make_jaxpr(compute)(*few), dims=dims, result_dims=result_dims,
            devices=self._devices,
        )  # fmt: skip
        return bound


def _floating(arrays: Sequence[Any]) -> list[Any]:
    """Return the arrays that have a derivative, and None for others."""
    return floating(arrays, [True] * len(arrays))
