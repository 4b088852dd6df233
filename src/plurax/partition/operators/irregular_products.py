"""Products of groups of rows (`lax.ragged_dot`) and of sparse matrices (`BCOO`).

They are split as dense products are: over batch and free dims without sending anything, and over a
contracted dim as partial sums. Over groups they are split by the groups of a device, as partial
sums, too. The dims that indices point into are replicated.

    mesh tensor=2

    operation                       split                     on one device           result
    ragged_dot (8, 4) (3, 4, 6)     w (None, None, tensor)    (8, 4) (3, 4, 3)        (None, tensor)
    sizes [1, 5, 2]                 x (tensor, None)          (4, 4) (3, 4, 6)        (tensor, None)
                                                              sizes [1, 3, 0], [0, 2, 2]
    ragged_dot (8, 4) (4, 4, 6)     w (tensor, None, None)    (8, 4) (2, 4, 6)        a partial sum:
    sizes [1, 3, 2, 2]                                        sizes [1, 3], [2, 2]    rows 0-3, 4-7
    BCOO (8, 8) @ (8, 6)            dense (None, tensor)      (8, 8) @ (8, 3)         (None, tensor)
    of 20 entries                   entries (tensor)          10 entries @ (8, 6)     a partial sum
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from plurax.jaxpr.interpret import bind
from plurax.partition.operators.common import by_default, decided
from plurax.partition.operators.own_rows import only_own, own_groups, owner, turned
from plurax.partition.operators.products import match_operands
from plurax.partition.rule_context import RuleContext
from plurax.partition.values import Decision, Operand, OwnRows, ValueVersions
from plurax.sharding.axes import Axes
from plurax.sharding.spec import TensorSharding

Labels = dict[int, Any]
Split = dict[Any, tuple[str, ...]]
GROUPS = ("sum", "groups")
"""The label of groups: each row is in one, so that devices with other groups have terms of it."""


def ragged_dot(context: RuleContext, eqn: Any, inputs: list[ValueVersions]) -> Decision:
    """Multiply groups of rows; a device that has some of the rows has parts of the groups.

    One that has the weights of some groups computes their rows, and the gradient of these weights
    from them (`own_rows.py`).
    """
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (ragged,), groups = numbers.lhs_ragged_dimensions, numbers.rhs_group_dimensions
    sums, batch = numbers.dot_dimension_numbers
    # Groups of examples, and other groups in each example, are not split.
    if ragged in batch[0] or len(inputs[2].shape) > 1:
        return by_default(context, eqn, inputs)
    left = _labels("left", len(inputs[0].shape), sums[0], batch[0])
    right = _labels("right", len(inputs[1].shape), sums[1], batch[1])
    right |= dict.fromkeys(groups, GROUPS)
    operands, split = match_operands(context, eqn, inputs, [left, right, {0: None}])
    out = _result_labels(left, right)
    rows = [ragged] if groups else [ragged, sums[1][sums[0].index(ragged)]]
    if not groups:
        # Where the rows are contracted, the result has a matrix for each group, first.
        out = [GROUPS, *out]
        split = {**split, GROUPS: _axes_of_rows(context, inputs, rows, split)}
    over, rows_over = split.get(GROUPS, ()), split.get(left[ragged], ())
    for place, dim in enumerate(rows):
        if over and owner(inputs[place]) == OwnRows(dim, over, inputs[2]):
            have = inputs[place].value.sharding
            if have.dims == operands[place].sharding.dims:
                operands[place] = Operand(inputs[place], (have,))
    decision = decided(context, eqn, inputs, operands, _sharding(out, split))
    to = out.index(left[ragged]) if groups else None
    if over and to is not None:
        own = OwnRows(to, over, inputs[2])
        decision = dataclasses.replace(
            decision, outputs=(dataclasses.replace(decision.outputs[0], rows=own),)
        )
    if not (over or rows_over):
        return decision
    execute = functools.partial(_own_product, context.axes, eqn, over, rows_over, rows, to)
    return dataclasses.replace(decision, execute=execute)


def _axes_of_rows(
    context: RuleContext, inputs: list[ValueVersions], dims: Sequence[int], split: Split
) -> tuple[str, ...]:
    """Return the axes over which an operand has its rows, if they can split the result's groups."""
    used = {axis for entry in split.values() for axis in entry}
    for versions, dim in zip(inputs, dims, strict=False):
        own = owner(versions)
        if own and own == OwnRows(dim, own.axes, inputs[2]) and not used & set(own.axes):
            return own.axes
    return ()


def _own_product(
    axes: Axes,
    eqn: Any,
    over: tuple[str, ...],
    rows_over: tuple[str, ...],
    dims: Sequence[int],
    to: int | None,
    x: Array,
    w: Array,
    sizes: Array,
) -> list[Array]:
    """Multiply this device's rows of its groups.

    **Arguments:** `over`, the axes that split the groups; `rows_over`, those that split the rows;
    `dims`, where the operands have rows; `to`, where the result has them.
    """
    rows = x.shape[dims[0]]
    own, start = own_groups(axes, over, rows_over, rows, sizes)
    if not over:
        return bind(eqn, [x, w, own])
    # The rows of the first group come first, those of no group last: these are not computed.
    shards = [turned(array, dim, start) for array, dim in zip((x, w), dims, strict=False)]
    (array,) = bind(eqn, [*shards, *(x, w)[len(shards) :], own])
    if to is None:
        return [array]
    array = only_own(array, to, jnp.zeros_like(start), own.sum(dtype=start.dtype))
    return [turned(array, to, jnp.asarray(rows, start.dtype) - start)]


def sparse_dot(context: RuleContext, eqn: Any, inputs: list[ValueVersions]) -> Decision:
    """Multiply a sparse by a dense tensor; split entries make a partial sum."""
    data, indices, dense = inputs
    sums, batch = eqn.params["dimension_numbers"]
    info = eqn.params["lhs_spinfo"]
    num_batch, num_sparse = len(indices.shape) - 2, indices.shape[-1]
    left = _labels("left", len(info.shape), sums[0], batch[0])
    right = _labels("right", len(dense.shape), sums[1], batch[1])
    # Of the sparse tensor only batch dims and entries can be split.
    left |= dict.fromkeys(range(num_batch, num_batch + num_sparse))
    left |= dict.fromkeys(range(num_batch + num_sparse, len(info.shape)))
    for dim in range(num_batch):
        if dim in sums[0] or not data.shape[dim] == indices.shape[dim] == info.shape[dim]:
            left[dim] = None
    known = set(left.values())
    right = {d: label if label in known or label[0] == "right" else None
             for d, label in right.items()}  # fmt: skip
    entries: Labels = {dim: left[dim] for dim in range(num_batch)} | {num_batch: ("sum", "entries")}
    labels = [
        dict.fromkeys(range(len(data.shape))) | entries,
        right,
        {**entries, num_batch + 1: None},
    ]
    ordered = eqn.replace(invars=[eqn.invars[0], eqn.invars[2], eqn.invars[1]])
    found, split = match_operands(context, ordered, [data, dense, indices], labels)
    operands = [found[0], found[2], found[1]]
    free = [d for d in range(len(info.shape)) if d not in (*sums[0], *batch[0])]
    out = [left[d] for d in batch[0]] + [left[d] for d in free]
    out += [right[d] for d in range(len(dense.shape)) if d not in (*sums[1], *batch[1])]
    sharding = _sharding(out, split)
    sizes = context.axes.size
    shape = tuple(n // sizes(split.get(left[d], ())) for d, n in enumerate(info.shape))
    return decided(context, eqn, inputs, operands, sharding, lhs_spinfo=info._replace(shape=shape))


def sampled_dot(context: RuleContext, eqn: Any, inputs: list[ValueVersions]) -> Decision:
    """Compute entries of a dense product: the gradient of a sparse tensor's entries."""
    sums, batch = eqn.params["dimension_numbers"]
    labels = []
    for side in (0, 1):
        labels.append(_labels("", len(inputs[side].shape), sums[side], batch[side]))
        # Indices point into free dims.
        labels[side] = {d: label if label[0] else None for d, label in labels[side].items()}
    rank, num_batch = len(inputs[2].shape), len(batch[0])
    labels.append(
        dict.fromkeys(range(rank)) | {i: ("batch", i) for i in range(min(num_batch, rank - 2))}
    )
    operands, split = match_operands(context, eqn, inputs, labels)
    return decided(
        context, eqn, inputs, operands, _sharding([labels[2][d] for d in range(rank - 1)], split)
    )


def _labels(free: str, rank: int, sums: Sequence[int], batch: Sequence[int]) -> Labels:
    """Return the label of each dim of an operand: equal labels are one index of the product."""
    labels: Labels = {dim: (free, dim) for dim in range(rank)}
    labels |= {dim: ("sum", i) for i, dim in enumerate(sums)}
    return labels | {dim: ("batch", i) for i, dim in enumerate(batch)}


def _result_labels(left: Labels, right: Labels) -> list[Any]:
    """Return the labels of a product's dims: batch, free dims of the left, of the right."""
    batch = sorted(label for label in left.values() if label[0] == "batch")
    frees = [[label for _, label in sorted(one.items()) if label and label[0] == side]
             for one, side in ((left, "left"), (right, "right"))]  # fmt: skip
    return [*batch, *frees[0], *frees[1]]


def _sharding(labels: Sequence[Any], split: Split) -> TensorSharding:
    """Return a result's sharding: the axes of labels that it has not, make it a partial sum."""
    summed = [
        axis
        for label, entry in split.items()
        if label[0] == "sum" and label not in labels
        for axis in entry
    ]
    dims = tuple(() if label is None else split.get(label, ()) for label in labels)
    return TensorSharding(dims, frozenset(summed))
