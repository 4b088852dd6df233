"""Evaluate a function of stacked layers on the rows in which the devices of a pipeline hold them.

An optimizer's update is written for layers in order. Devices hold them in the order of their
stages, and where stages have unequal numbers of layers some rows are padding. What is computed row
by row is computed on these rows, of a sum over layers the padding is left out, and all else is
computed on the layers in order, for which the rows are gathered.

Example: 4 layers on 3 devices, `g: f32[4, 8]` in the rows `[0 1 | 2 - | 3 -]`, each `f32[6, 8]`:

    2.0 * g          2.0 * rows                                   on rows
    mean(g)          sum(where(is_layer, rows, 0)) / 32           on rows; 32 is of `f32[4, 8]`
    median(g)        median(rows[[0, 1, 2, 4]])                   gathered
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from plurax.jaxpr.compat import ELEMENTWISE, REDUCTIONS, is_call_or_remat, open_jaxpr
from plurax.jaxpr.interpret import bind, interpret
from plurax.pipeline.stages import LayerAssignment


@dataclasses.dataclass(frozen=True)
class LayerRows:
    """A value whose leading dim are the rows of all devices."""

    array: Array


def layers_to_rows(leaf: Any, assignment: LayerAssignment) -> Array:
    """Return layers in order as the rows of all devices, with zeros as padding."""
    return _without_padding(leaf[np.maximum(assignment.layers, 0)], assignment)


def rows_to_layers(leaf: Any, assignment: LayerAssignment) -> Array:
    """Return the layers in order from the rows of all devices."""
    return leaf[np.asarray(assignment.order)]


def _without_padding(array: Array, assignment: LayerAssignment) -> Array:
    there = (np.asarray(assignment.layers) >= 0).reshape(-1, *[1] * (array.ndim - 1))
    return jnp.where(there, array, jnp.zeros((), array.dtype))


def on_layer_rows(
    fun: Callable[..., Sequence[Any]],
    assignment: LayerAssignment,
    stacked: Sequence[bool],
    results: Sequence[bool],
) -> Callable[..., list[Any]]:
    """Return `fun(*leaves) -> leaves` for leaves whose layers are in the rows of an assignment.

    `stacked` and `results` say of which leaves, and of which results, the leading dim are layers.
    Rows of padding are zeros in the results.
    """
    depth, count = assignment.depth, len(assignment.layers)

    def is_stacked(value: Any) -> bool:
        return isinstance(value, LayerRows)

    def in_order(value: Any) -> Any:
        return rows_to_layers(value.array, assignment) if is_stacked(value) else value

    def rows(value: Any) -> Array:
        return value.array if is_stacked(value) else layers_to_rows(value, assignment)

    def evaluate(eqn: Any, inputs: list[Any]) -> list[Any]:
        if not any(map(is_stacked, inputs)):
            return bind(eqn, inputs)
        name, params, first = eqn.primitive.name, eqn.params, inputs[0]
        if name in ELEMENTWISE:
            arrays = [rows(one) if is_stacked(one) or np.ndim(one) else one for one in inputs]
            return [*map(LayerRows, bind(eqn, arrays))]
        if name == "reduce_sum" and 0 in params["axes"]:
            return bind(eqn, [_without_padding(first.array, assignment)])
        # In these the leading dim stays as it is.
        stays: dict[str, Callable[[], bool]] = {
            **dict.fromkeys(REDUCTIONS, lambda: 0 not in params["axes"]),
            "broadcast_in_dim": lambda: params["broadcast_dimensions"][0] == 0,
            "reshape": lambda: params["new_sizes"][:1] == (depth,) and params["dimensions"] is None,
            "squeeze": lambda: 0 not in params["dimensions"],
            "transpose": lambda: params["permutation"][0] == 0,
        }
        if name not in stays or not stays[name]():
            return bind(eqn, [*map(in_order, inputs)])
        sizes = {"broadcast_in_dim": "shape", "reshape": "new_sizes"}.get(name)
        changed = {sizes: (count, *params[sizes][1:])} if sizes else {}
        return [*map(LayerRows, bind(eqn, [first.array], **changed))]

    def run(*leaves: Any) -> list[Any]:
        like = [
            jax.ShapeDtypeStruct((depth, *leaf.shape[1:]) if yes else leaf.shape, leaf.dtype)
            for leaf, yes in zip(leaves, stacked, strict=True)
        ]
        jaxpr, consts = open_jaxpr(jax.make_jaxpr(lambda *args: list(fun(*args)))(*like))
        values = [
            LayerRows(leaf) if yes else leaf for leaf, yes in zip(leaves, stacked, strict=True)
        ]
        found = interpret(jaxpr, consts, values, default=evaluate, inline=is_call_or_remat)
        return [
            _without_padding(rows(one), assignment) if yes else in_order(one)
            for one, yes in zip(found, results, strict=True)
        ]

    return run
