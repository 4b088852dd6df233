"""The rules of `row_dependence`: how the levels of an equation's results follow from its operands'.

A rule gets an equation, the levels of its operands, `(*dims, B)` with size 1 for a dim along which
they are equal, and what is known of its operands; it returns the levels of each result. Rules that
move entries move those of known integers alike.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from plurax.jaxpr.attention_kernels import ATTENTION
from plurax.jaxpr.compat import ANNOTATIONS, ELEMENTWISE, REDUCTIONS

Levels = np.ndarray
NONE, MAY, DOES = 0, 1, 2
"""How sure it is that an entry depends on a row."""

MOST_ENTRIES = 2**25
"""The largest number of levels held of one value; of more, all entries count as one."""

# fmt: off
_SAME = frozenset([
    "copy", "device_put", "layout_constraint", "optimization_barrier", "pvary",
    "reshard", "pmax", "pmin", "psum", "psum_invariant", "ppermute",
    "all_gather", "all_gather_invariant", "all_to_all", "reduce_scatter", "order_after",
]) | ANNOTATIONS
"""Each result has the levels of its operand; collectives where the dim they change has none."""
_KEYS = frozenset([
    "bitcast_convert_type", "random_bits", "random_clone", "random_fold_in", "random_gamma",
    "random_seed", "random_split", "random_unwrap", "random_wrap", "threefry2x32",
])
"""The leading dims of operands and result are the same."""
_TRAILING = {"lu_pivots_to_permutation": 1, **dict.fromkeys(ATTENTION, 3), **dict.fromkeys([
    "cholesky", "eig", "eigh", "geqrf", "hessenberg", "householder_product", "lu", "ormqr", "qr",
    "schur", "svd", "symmetric_product", "triangular_solve", "tridiagonal", "tridiagonal_solve",
], 2)}
"""Operators on matrices: the number of trailing dims of which each entry reads all."""
_KNOWN_ELEMENTWISE: dict[str, Callable[..., Any]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "max": np.maximum, "min": np.minimum,
    "neg": np.negative, "convert_element_type": np.asarray, "copy": np.asarray,
}
_KNOWN_COMPARISONS: dict[str, Callable[..., Any]] = {
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "eq": np.equal, "ne": np.not_equal,
}
# fmt: on


def none(rank: int, size: int) -> Levels:
    """Return the levels of a value that depends on no row."""
    return np.zeros((*(1,) * rank, size), np.uint8)


def compressed(levels: Levels) -> Levels:
    """Return the levels with size 1 for each dim along which they are equal."""
    for dim in range(levels.ndim - 1):
        if levels.shape[dim] > 1:
            first = levels.take([0], dim)
            if (levels == first).all():
                levels = first
    return levels


def in_order(levels: Levels) -> bool:
    """Whether rows are in their order along a dim: entry `k` depends on row `(k // n) % B` only.

    `n` is the size of the dims that a reshape merged behind the rows, 1 without. A value that
    depends on no row is in order.
    """
    if not levels.any():
        return True
    size = levels.shape[-1]
    for dim, length in enumerate(levels.shape[:-1]):
        if length % size or length == 1:
            continue
        others = tuple(d for d in range(levels.ndim - 1) if d != dim)
        reads = levels.max(others, initial=NONE) > NONE
        for inner in range(1, length // size + 1):
            if (length // size) % inner == 0:
                own = (np.arange(length) // inner) % size
                if not (reads & (own[:, None] != np.arange(size))).any():
                    return True
    return size == 1


def levels_of(eqn: Any, inputs: Sequence[Any], size: int) -> list[Levels]:
    """Return the levels of each result of an equation that is no call, loop or branch.

    **Arguments:** `inputs`, with `levels` and `known`; `size`, the number of rows.
    """
    name = eqn.primitive.name
    levels = [one.levels for one in inputs]
    known = [one.known for one in inputs]
    if name in ELEMENTWISE or (name in _SAME and len(levels) == len(eqn.outvars) == 1):
        if name == "select_n":
            return [_selected(levels, known[0])]
        if name == "mul":
            levels = [_where_not_zero(*each) for each in zip(levels, known[::-1], strict=True)]
        new = (*_shape(eqn.outvars[0]), size)
        fits = all(
            one.ndim == 1 or all(n in (1, m) for n, m in zip(one.shape, new, strict=True))
            for one in levels
        )
        return [_most(levels)] if fits else unknown(eqn, levels)
    if name in _SAME:
        return levels if len(levels) == len(eqn.outvars) else unknown(eqn, levels)
    if name in _MOVES:
        moved = _MOVES[name](eqn, levels)
        return moved if isinstance(moved, list) else [moved]
    if name in REDUCTIONS or name == "reduce_xor":
        axes = tuple(eqn.params["axes"])
        return [levels[0].max(axes, initial=NONE)]
    if name in _TRAILING:
        return _trailing(eqn, levels, max(one.ndim - 1 for one in levels) - _TRAILING[name])
    if name == "fft":
        return _trailing(eqn, levels, levels[0].ndim - 1 - len(eqn.params["fft_lengths"]))
    if name in _KEYS:
        rank = len(_shape(eqn.outvars[0]))
        return [_leading(levels, rank)] * len(eqn.outvars)
    if name.startswith(("reduce_window", "select_and_")):
        return [_windowed(eqn, levels)] if len(eqn.outvars) == 1 else unknown(eqn, levels)
    if name.startswith("scatter"):
        return [_scatter(eqn, levels, known[1])]
    rule = _RULES.get(name)
    return unknown(eqn, levels) if rule is None else rule(eqn, levels, known)


def unknown(eqn: Any, levels: Sequence[Levels]) -> list[Levels]:
    """Return the levels where nothing is known of a primitive: all may depend on all."""
    flat = [one.reshape(-1, one.shape[-1]).max(0, initial=NONE) for one in levels]
    every = np.minimum(_most(flat), MAY)
    return [every.reshape(*(1,) * len(_shape(var)), -1) for var in eqn.outvars]


def known_of(eqn: Any, known: Sequence[Any], most: int) -> Any:
    """Return the numbers `(*dims, 1)` that an equation results in, or None where none is known.

    **Arguments:** `known`, of the operands; `most`, the largest number that is computed.
    """
    name = eqn.primitive.name
    out = eqn.outvars[0].aval if len(eqn.outvars) == 1 else None
    if out is None or not hasattr(out, "shape") or math.prod(out.shape) > most:
        return None
    if not (is_whole(out.dtype) or jnp.issubdtype(out.dtype, jnp.floating)):
        return None
    if name == "iota":
        counts = np.arange(out.shape[eqn.params["dimension"]], dtype=np.float64)
        dims = [-1 if d == eqn.params["dimension"] else 1 for d in range(len(out.shape))]
        return np.broadcast_to(counts.reshape(*dims, 1), (*out.shape, 1))
    if all(one is None for one in known):
        return None
    operands = [
        np.full((*_shape(atom), 1), np.nan) if one is None else one
        for atom, one in zip(eqn.invars, known, strict=True)
        if one is not None or math.prod(_shape(atom)) <= most
    ]
    if len(operands) < len(known):
        return None
    return _computed(name, eqn, operands, (*out.shape, 1))


def is_whole(dtype: Any) -> bool:
    """Whether a dtype is one of integers or truths."""
    return dtype == jnp.bool_ or jnp.issubdtype(dtype, jnp.integer)


def _computed(name: str, eqn: Any, operands: list[Any], shape: tuple[int, ...]) -> Any:
    """Return the known integers of an equation, NaN where one is not known; None of any other."""
    result: Any = None
    if name in _KNOWN_ELEMENTWISE:
        result = _KNOWN_ELEMENTWISE[name](*operands)
    elif name in _KNOWN_COMPARISONS:
        unsure = np.isnan(operands[0]) | np.isnan(operands[1])
        result = np.where(unsure, np.nan, _KNOWN_COMPARISONS[name](*operands))
    elif name == "select_n":
        which, *cases = operands
        result = np.full(shape, np.nan)
        for index, case in enumerate(cases):
            result = np.where(which == index, case, result)
    elif name in _MOVES:
        moved = _MOVES[name](eqn, operands)
        result = moved[0] if isinstance(moved, list) else moved
    if result is None or np.isnan(result).all():
        return None
    return np.broadcast_to(result, shape)


def _most(levels: Sequence[Levels]) -> Levels:
    """Return the highest level of operands, of equal rank or scalars."""
    return functools.reduce(np.maximum, levels)


def _selected(levels: Sequence[Levels], which: Any) -> Levels:
    """Return the levels of a selection; those of the case that is taken, where that is known."""
    if which is None or np.isnan(which).any():
        return _most(levels)
    result = levels[1]
    for index, case in enumerate(levels[2:], 1):
        result = np.where(which == index, case, result)
    return result


def _where_not_zero(levels: Levels, factor: Any) -> Levels:
    """Return the levels of a product's operand, none where its factor is known to be zero."""
    return levels if factor is None else np.where(factor == 0, NONE, levels).astype(np.uint8)


def _over(levels: Levels, dims: Sequence[int]) -> Levels:
    """Return the highest level along some dims, which get size 1."""
    return levels.max(tuple(dims), keepdims=True, initial=NONE) if dims else levels


def _expanded(levels: Levels, dim: int, size: int) -> Levels:
    """Return the levels with a dim of size 1 repeated to `size`."""
    if levels.shape[dim] == size:
        return levels
    return np.repeat(levels, size, dim)


def _leading(levels: Sequence[Levels], rank: int) -> Levels:
    """Return the levels of a result of `rank` dims whose leading dims are those of its operands."""
    aligned = []
    for one in levels:
        have = one.ndim - 1
        one = one.max(tuple(range(rank, have)), initial=NONE)
        aligned.append(one.reshape(*one.shape[:-1], *(1,) * (rank - one.ndim + 1), one.shape[-1]))
    return _most(aligned)


def _trailing(eqn: Any, levels: Sequence[Levels], lead: int) -> list[Levels]:
    """Return the levels where each entry reads all of the dims from `lead` on."""
    reduced = [_over(one, range(lead, one.ndim - 1)) for one in levels]
    reduced = [one.reshape(*one.shape[:lead], one.shape[-1]) for one in reduced]
    return [_leading(reduced, len(_shape(var))) for var in eqn.outvars]


# --- Entries that move ----------------------------------------------------------------------------


def _reshape(eqn: Any, levels: Sequence[Levels]) -> Levels:
    """Reshape; only the groups of dims that hold rows are expanded to their sizes."""
    (base, *_), old, new = levels, _shape(eqn.invars[0]), _shape(eqn.outvars[0])
    if (order := eqn.params.get("dimensions")) is not None:
        base, old = base.transpose(*order, len(old)), tuple(old[dim] for dim in order)
    if math.prod(old) == 0:
        return unknown(eqn, levels)[0]
    expanded: list[int] = []
    shape: list[int] = []
    for dims, others in _dim_groups(old, new):
        uniform = all(base.shape[d] == 1 for d in dims)
        expanded += [1 if uniform else old[d] for d in dims]
        shape += [1 if uniform else new[d] for d in others]
    if math.prod(expanded) * base.shape[-1] > MOST_ENTRIES:
        return unknown(eqn, levels)[0]
    return np.broadcast_to(base, (*expanded, base.shape[-1])).reshape(*shape, base.shape[-1])


def _dim_groups(old: Sequence[int], new: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Return the smallest groups of dims of equal product, in order.

    >>> _dim_groups((4, 6, 5), (4, 2, 3, 5))
    [([0], [0]), ([1], [1, 2]), ([2], [3])]
    """
    groups, a, b = [], 0, 0
    while a < len(old) or b < len(new):
        dims, others = [], []
        sizes = [1, 1]
        if a < len(old):
            dims, sizes[0], a = [a], old[a], a + 1
        if (b < len(new) and sizes[0] > 1) or not dims:
            others, sizes[1], b = [b], new[b], b + 1
        while sizes[0] != sizes[1]:
            if sizes[0] < sizes[1]:
                dims.append(a)
                sizes[0], a = sizes[0] * old[a], a + 1
            else:
                others.append(b)
                sizes[1], b = sizes[1] * new[b], b + 1
        groups.append((dims, others))
    return groups


def _broadcast_in_dim(eqn: Any, levels: Sequence[Levels]) -> Levels:
    one, shape = levels[0], [1] * len(_shape(eqn.outvars[0]))
    for size, dim in zip(one.shape, eqn.params["broadcast_dimensions"], strict=False):
        shape[dim] = size
    return one.reshape(*shape, one.shape[-1])


def _transpose(eqn: Any, levels: Sequence[Levels]) -> Levels:
    return levels[0].transpose(*eqn.params["permutation"], levels[0].ndim - 1)


def _squeeze(eqn: Any, levels: Sequence[Levels]) -> Levels:
    return levels[0].squeeze(tuple(eqn.params["dimensions"]))


def _slice(eqn: Any, levels: Sequence[Levels]) -> Levels:
    params, base = eqn.params, levels[0]
    strides = params["strides"] or (1,) * (base.ndim - 1)
    ranges = zip(params["start_indices"], params["limit_indices"], strides, strict=True)
    wanted = [slice(*each) for each in ranges]
    return base[
        tuple(s if n > 1 else slice(None) for s, n in zip(wanted, base.shape, strict=False))
    ]


def _rev(eqn: Any, levels: Sequence[Levels]) -> Levels:
    return np.flip(levels[0], eqn.params["dimensions"])


def _concatenate(eqn: Any, levels: Sequence[Levels]) -> Levels:
    dim = eqn.params["dimension"]
    sizes = [_shape(atom)[dim] for atom in eqn.invars]
    shape = list(np.broadcast_shapes(*(_over(one, [dim]).shape for one in levels)))
    parts = []
    for one, size in zip(levels, sizes, strict=True):
        shape[dim] = size
        parts.append(np.broadcast_to(one, shape))
    return np.concatenate(parts, dim)


def _split(eqn: Any, levels: Sequence[Levels]) -> list[Levels]:
    (one, *_), axis = levels, eqn.params["axis"]
    if one.shape[axis] == 1:
        return [one] * len(eqn.outvars)
    return np.split(one, np.cumsum(eqn.params["sizes"])[:-1], axis)


def _pad(eqn: Any, levels: Sequence[Levels]) -> Levels:
    base, value = levels
    for dim, (low, high, inner) in enumerate(eqn.params["padding_config"]):
        if (low, high, inner) == (0, 0, 0):
            continue
        size, old = _shape(eqn.outvars[0])[dim], _shape(eqn.invars[0])[dim]
        shape = list(base.shape)
        shape[dim] = size
        padded = np.broadcast_to(value, shape).copy()
        places = low + np.arange(old) * (inner + 1)
        inside = (places >= 0) & (places < size)
        target: list[Any] = [slice(None)] * base.ndim
        target[dim] = places[inside]
        padded[tuple(target)] = np.compress(inside, _expanded(base, dim, old), dim)
        base = padded
    return base


_MOVES: dict[str, Callable[[Any, Sequence[Any]], Any]] = {
    "reshape": _reshape,
    "broadcast_in_dim": _broadcast_in_dim,
    "transpose": _transpose,
    "squeeze": _squeeze,
    "slice": _slice,
    "rev": _rev,
    "concatenate": _concatenate,
    "split": _split,
    "pad": _pad,
}


# --- Sums, orders, windows ------------------------------------------------------------------------


def _dot_general(eqn: Any, levels: Sequence[Levels], known: Any) -> list[Levels]:
    sums, batches = eqn.params["dimension_numbers"]
    free = []
    for base, gone, batch in zip(levels, sums, batches, strict=True):
        base = _over(base, gone)
        rest = [d for d in range(base.ndim - 1) if d not in (*gone, *batch)]
        base = base.transpose(*batch, *rest, *gone, base.ndim - 1)
        free.append(base.reshape(*base.shape[: len(batch) + len(rest)], base.shape[-1]))
    (left, right), shared = free, len(batches[0])
    left = left.reshape(*left.shape[:-1], *(1,) * (right.ndim - 1 - shared), left.shape[-1])
    gap = (1,) * (left.ndim - right.ndim)
    right = right.reshape(*right.shape[:shared], *gap, *right.shape[shared:])
    return [np.maximum(left, right)]


def _convolution(eqn: Any, levels: Sequence[Levels], known: Any) -> list[Levels]:
    params, (left, right) = eqn.params, levels
    numbers = params["dimension_numbers"]
    lhs, rhs, out = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    groups = params["feature_group_count"]
    if params["batch_group_count"] != 1:
        return unknown(eqn, levels)
    left = _over(left, lhs[2:]).transpose(lhs[0], lhs[1], *lhs[2:], left.ndim - 1)
    left = left.reshape(*left.shape[:2], left.shape[-1])
    if left.shape[1] > 1:  # the features of a group are summed
        per_group = left.reshape(left.shape[0], groups, -1, left.shape[-1]).max(2)
        left = np.repeat(per_group, _shape(eqn.outvars[0])[out[1]] // groups, 1)
    right = _over(right, rhs[1:]).transpose(rhs[0], *rhs[1:], right.ndim - 1)
    both = np.maximum(left, right.reshape(1, right.shape[0], -1))
    both = both.reshape(*both.shape[:2], *(1,) * (len(out) - 2), both.shape[-1])
    return [both.transpose(*np.argsort(out), both.ndim - 1)]


def _cumulative(eqn: Any, levels: Sequence[Levels], known: Any) -> list[Levels]:
    axis, back = eqn.params["axis"], eqn.params["reverse"]
    one = np.flip(levels[0], axis) if back else levels[0]
    one = np.maximum.accumulate(one, axis)
    return [np.flip(one, axis) if back else one]


def _sort(eqn: Any, levels: Sequence[Levels], known: Any) -> list[Levels]:
    dim, keys = eqn.params["dimension"], levels[: eqn.params["num_keys"]]
    order = np.minimum(_over(_most(keys), [dim]), MAY)
    return [np.maximum(order, _over(one, [dim])) for one in levels]


def _top_k(eqn: Any, levels: Sequence[Levels], known: Any) -> list[Levels]:
    axis = eqn.params.get("axis", eqn.params.get("reduction_dimension", -1))
    rank = levels[0].ndim - 1
    return [_over(levels[0], [axis % rank])] * len(eqn.outvars)


def _windowed(eqn: Any, levels: Sequence[Levels]) -> Levels:
    """Return the levels of sums over windows: a dim is kept where windows have size 1."""
    rank = len(_shape(eqn.outvars[0]))
    sizes = eqn.params["window_dimensions"]
    same = [
        n == 1 and old == new
        for n, old, new in zip(sizes, _shape(eqn.invars[0]), _shape(eqn.outvars[0]), strict=True)
    ]
    mixed = [dim for dim in range(rank) if not same[dim]]
    return _most([_over(one, mixed) if one.ndim - 1 == rank else one for one in levels])


# --- Gathers and scatters -------------------------------------------------------------------------


def _dynamic_slice(eqn: Any, levels: Sequence[Levels], known: Any) -> list[Levels]:
    base, *starts = levels
    for dim, size in enumerate(eqn.params["slice_sizes"]):
        old = _shape(eqn.invars[0])[dim]
        if base.shape[dim] == 1 or size == old:
            continue
        start = known[1 + dim]
        if start is None or np.isnan(start).any():
            base = _over(base, [dim])
        else:
            first = int(np.clip(start.item(), 0, old - size))
            base = base.take(range(first, first + size), dim)
    return [_most([base, *starts])]


def _dynamic_update_slice(eqn: Any, levels: Sequence[Levels], known: Any) -> list[Levels]:
    base, new, *starts = levels
    new = _most([new, *starts])
    placed: list[Any] = [slice(None)] * base.ndim
    for dim, size in enumerate(_shape(eqn.invars[1])):
        old, start = _shape(eqn.invars[0])[dim], known[2 + dim]
        if size == old:
            continue
        if start is None or np.isnan(start).any():
            base, new = _most([base, _over(new, [dim])]), _over(new, [dim])
        else:
            first = int(np.clip(start.item(), 0, old - size))
            base = _expanded(base, dim, old)
            placed[dim] = slice(first, first + size)
    shape = np.broadcast_shapes(base[tuple(placed)].shape, new.shape)
    full = [n if isinstance(s, slice) and s == slice(None) else old
            for s, n, old in zip(placed, shape, base.shape, strict=True)]  # fmt: skip
    base = np.broadcast_to(base, full).copy()
    exact = any(s != slice(None) for s in placed)
    base[tuple(placed)] = new if exact else np.maximum(base, new)
    return [base]


def _dim_of_index(numbers: Any, known: Any) -> dict[int, Any]:
    """Return for each operand dim whose index is known its indices, `(*index dims,)`."""
    if known is None:
        return {}
    indices = {d: known[..., place, 0] for place, d in enumerate(numbers)}
    return {d: one.astype(np.int64) for d, one in indices.items() if not np.isnan(one).any()}


def _gather(eqn: Any, levels: Sequence[Levels], known: Any) -> list[Levels]:
    """Return the levels of a gather.

    Of an operand dim with rows the entries are known where it goes along with a dim of the
    indices, is taken whole, or its indices are known; else each entry may be of any row.
    """
    (base, index), numbers = levels, eqn.params["dimension_numbers"]
    old, rank = _shape(eqn.invars[0]), len(_shape(eqn.outvars[0]))
    sizes = eqn.params["slice_sizes"]
    along = dict(
        zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
    )
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    windows = [d for d in range(len(old)) if d not in gone]
    index_rank = index.ndim - 2
    indices = _dim_of_index(numbers.start_index_map, known[1])
    picks: list[Any] = []
    for dim, size in enumerate(old):
        at: Any = np.zeros((1,) * index_rank, np.int64)
        if base.shape[dim] == 1:
            pass
        elif dim in along:
            at = np.arange(size).reshape([-1 if d == along[dim] else 1 for d in range(index_rank)])
        elif dim in gone and dim in indices:
            at = np.clip(indices[dim], 0, size - 1)
        elif dim in gone or sizes[dim] != size:
            base = _over(base, [dim])
        picks.append(at)
    fixed = [d for d in range(len(old)) if d in gone]
    moved = base.transpose(*fixed, *windows, base.ndim - 1)
    # The indices' dims come first, then the windows'.
    taken = (
        moved[tuple(picks[d] for d in fixed)]
        if fixed
        else moved.reshape(*(1,) * index_rank, *moved.shape)
    )
    reads = index.max(-2, initial=NONE)
    reads = reads.reshape(*reads.shape[:-1], *(1,) * len(windows), reads.shape[-1])
    both = np.maximum(taken, reads)
    rest = [d for d in range(rank) if d not in numbers.offset_dims]
    return [both.transpose(*np.argsort([*rest, *numbers.offset_dims]), both.ndim - 1)]


def _scatter(eqn: Any, levels: Sequence[Levels], known: Any) -> Levels:
    """Return the levels of a scatter: those of the operand, and where known those of updates."""
    (base, index, new), numbers = levels, eqn.params["dimension_numbers"]
    old, update = _shape(eqn.invars[0]), _shape(eqn.invars[2])
    along = dict(
        zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True)
    )
    gone = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    windows = [d for d in range(len(old)) if d not in gone]
    index_rank = index.ndim - 2
    rest = [d for d in range(len(update)) if d not in numbers.update_window_dims]
    reads = index.max(-2, initial=NONE)
    reads = reads.reshape(*reads.shape[:-1], *(1,) * len(windows), reads.shape[-1])
    new = new.transpose(*rest, *numbers.update_window_dims, new.ndim - 1)
    new = np.maximum(new, reads)
    indices = _dim_of_index(numbers.scatter_dims_to_operand_dims, known)
    fixed = [d for d in range(len(old)) if d in gone]
    for place, dim in enumerate(windows, index_rank):
        if update[numbers.update_window_dims[place - index_rank]] != old[dim]:
            new = _over(new, [place])
    picks, shape = [], []
    for dim in fixed:
        at: Any = np.zeros((1,) * index_rank, np.int64)
        if dim in along:
            at = np.arange(old[dim]).reshape(
                [-1 if d == along[dim] else 1 for d in range(index_rank)]
            )
        elif dim in indices:
            at = indices[dim]
        sized = dim in along or dim in indices
        picks.append(np.clip(at, 0, old[dim] - 1) if sized else at)
        shape.append(old[dim] if sized else 1)
    placed = np.zeros((*shape, *new.shape[index_rank:]), np.uint8)
    if fixed:
        places = np.broadcast_shapes(*(at.shape for at in picks), new.shape[:index_rank])
        where = tuple(np.broadcast_to(at, places) for at in picks)
        np.maximum.at(placed, where, np.broadcast_to(new, (*places, *new.shape[index_rank:])))
    else:
        placed = new.max(tuple(range(index_rank)), initial=NONE)
    return np.maximum(base, placed.transpose(*np.argsort([*fixed, *windows]), placed.ndim - 1))


_RULES: dict[str, Callable[[Any, Sequence[Levels], Any], list[Levels]]] = {
    "dot_general": _dot_general,
    "conv_general_dilated": _convolution,
    "sort": _sort,
    **dict.fromkeys(["top_k", "approx_top_k"], _top_k),
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "gather": _gather,
    **dict.fromkeys(["cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"], _cumulative),
}


def _shape(var: Any) -> tuple[int, ...]:
    return tuple(var.aval.shape)
