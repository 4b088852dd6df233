"""Reshard a tensor from any sharding to any other by the cheapest sequence of collectives.

A tensor that changes its sharding could always be gathered and sliced, but gathering sends, and
holds, the whole tensor. Shardings are the nodes of a graph, and its edges are single collectives
and local slices; the length of an edge is the number of bytes that each device sends. The cheapest
sequence is a shortest path (Dijkstra), so it never costs more than gathering.

    mesh a=2, b=4; a tensor (8, 8), float32, 256 bytes

    from            to              path                               sent by each device
    (b, None)       (None, b)       all-to-all over b                  48 bytes
                                    all-gather over b, slice           192 bytes
    (a, None)       (None, b)       slice dim 1 over b to (4, 2),      0
                                    all-gather dim 0 to (8, 2)         32 bytes
                                    all-gather to (8, 8), slice        128 bytes
    partial={b}     (None, b)       reduce-scatter over b              192 bytes
                                    all-reduce over b, slice           384 bytes

Each step runs over a set of mesh axes inside `jax.shard_map`. Rink et al. 2021 search sequences of
the same collectives, with bounded memory (https://arxiv.org/abs/2112.01075).
"""

import dataclasses
import functools
import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from plurax.sharding.axes import Axes
from plurax.sharding.spec import AxisSizes, TensorSharding


@dataclasses.dataclass(frozen=True)
class ReshardStep:
    """One step from a sharding to the next.

    **Fields:**

    - `kind`: `slice`, `all-gather`, `all-to-all`, `collective-permute`, `reduce-scatter` or
      `all-reduce`.
    - `axes`: the mesh axes it runs over, major to minor.
    - `dim`: the dim that is sliced, gathered or scattered; of an `all-to-all` the one gathered.
    - `to_dim`: of an `all-to-all`, the dim that is split.
    - `result`: the sharding after it.
    - `bytes`: of what it returns on one device, padding included.
    - `bytes_sent`: by each device, in a ring: `(n-1)/n` of the gathered or scattered tensor, twice
      that for an all-reduce.
    """

    kind: str
    axes: tuple[str, ...]
    dim: int | None
    to_dim: int | None
    result: TensorSharding
    bytes: int
    bytes_sent: float


def plan_reshard(
    source: TensorSharding,
    target: TensorSharding,
    shape: Sequence[int],
    itemsize: int,
    axes: Axes,
    avoid: frozenset[str] = frozenset(),
) -> list[ReshardStep]:
    """Return the cheapest sequence of steps from one sharding of a tensor to another.

    **Arguments:** `shape` and `itemsize` (bytes) of the whole tensor; `axes` of the mesh; `avoid`,
    axes over which no step may run.

    A partial sum (`source.partial`) is reduced on the way. A sum that is not partial in `source`
    cannot become partial in `target`; this raises an `AssertionError`.

    >>> axes = Axes({"a": 2, "b": 4})
    >>> there = TensorSharding.of(None, "b")
    >>> [m.kind for m in plan_reshard(TensorSharding.of("b", None), there, (8, 8), 4, axes)]
    ['all-to-all']
    >>> [m.kind for m in plan_reshard(TensorSharding.of("a", None), there, (8, 8), 4, axes)]
    ['slice', 'all-gather']
    """
    return list(_path(source, target, tuple(shape), itemsize, axes, avoid))


def wire_bytes(moves: Sequence[ReshardStep]) -> float:
    """Return the bytes that each device sends in all steps."""
    return sum(move.bytes_sent for move in moves)


@functools.lru_cache(maxsize=65536)
def _path(
    source: TensorSharding,
    target: TensorSharding,
    shape: tuple[int, ...],
    itemsize: int,
    axes: Axes,
    avoid: frozenset[str],
) -> tuple[ReshardStep, ...]:
    """Return the shortest path from `source` to `target`, by Dijkstra's algorithm."""
    if not target.partial <= source.partial:
        raise AssertionError(f"{target} from {source}: a sum cannot be taken apart")
    # `order` breaks ties, so that the path is the same in every process.
    order = itertools.count()
    queue: list[tuple[float, int, int, TensorSharding, tuple[ReshardStep, ...]]] = [
        (0.0, 0, next(order), source, ())
    ]
    done: set[TensorSharding] = set()
    while queue:
        cost, steps, _, here, moves = heapq.heappop(queue)
        if here == target:
            return moves
        if here in done:
            continue
        done.add(here)
        for move in _moves(here, target, shape, itemsize, axes):
            if move.result not in done and not avoid & set(move.axes):
                entry = (
                    # Of as many bytes in fewer steps, also where thirds of them are added up.
                    round(cost + move.bytes_sent, 3),
                    steps + 1,
                    next(order),
                    move.result,
                    (*moves, move),
                )
                heapq.heappush(queue, entry)
    raise AssertionError(f"no way from {source} to {target} of {shape}")


def _moves(
    here: TensorSharding, target: TensorSharding, shape: tuple[int, ...], itemsize: int, axes: Axes
) -> Iterator[ReshardStep]:
    """Yield the steps that are possible from a sharding."""
    sizes = axes.sizes

    def size(sharding: TensorSharding) -> int:
        return sharding.shard_bytes(shape, itemsize, sizes)

    free = [a for a in sizes if a not in here.axes and a not in here.partial]
    own = size(here)
    for dim, entry in enumerate(here.dims):
        goal = target.dims[dim]
        at_once = [goal] if len(goal) > 1 and {*goal} <= {*free} else []
        for added in [*((axis,) for axis in free), *at_once]:
            # Free axes hold copies: a device keeps its part of the shard and sends nothing.
            new = here.with_dim(dim, (*entry, *added))
            if _fits(new, target, shape, dim, sizes, added):
                yield ReshardStep("slice", added, dim, None, new, size(new), 0.0)
        # Only minor axes can go: dropping a major one would leave shards that are not contiguous.
        for cut in range(len(entry)):
            moved = entry[cut:]
            if not axes.together(moved):
                continue
            n = axes.size(moved)
            new = here.with_dim(dim, entry[:cut])
            # Shards are gathered with their padding, which each device cuts off afterwards: not
            # from within a dim, whose shards would begin elsewhere.
            gathered = n * own
            if cut and gathered != size(new):
                continue
            yield ReshardStep("all-gather", moved, dim, None, new, gathered, gathered * (n - 1) / n)
            # Only an all-gather cuts padding off.
            if shape[dim] % here.num_shards(dim, sizes):
                continue
            for other in range(len(shape)):
                if other != dim:
                    there = new.with_dim(other, (*new.dims[other], *moved))
                    if shape[other] % there.num_shards(other, sizes) == 0:
                        held = size(there)
                        sent = held * (n - 1) / n
                        yield ReshardStep("all-to-all", moved, dim, other, there, held, sent)
    yield from _sums(here, target, shape, itemsize, axes)
    # If all shards keep their shape, blocks only change devices: a permute sends each shard once.
    if (
        axes.permutes
        and here.dims != target.dims
        and all(here.num_shards(d, sizes) == target.num_shards(d, sizes) for d in range(len(shape)))
        and not here.indivisible_dims(shape, sizes)
    ):
        # Along the axes of a dim that stays as it is no block changes its device.
        pairs = zip(here.dims, target.dims, strict=True)
        changed = {a for have, want in pairs if have != want for a in (*have, *want)}
        touched = tuple(a for a in sizes if a in changed)
        if not here.partial & set(touched):
            new = TensorSharding(target.dims, here.partial)
            yield ReshardStep(
                "collective-permute", touched, None, None, new, size(new), float(size(new))
            )


def _sums(
    here: TensorSharding, target: TensorSharding, shape: tuple[int, ...], itemsize: int, axes: Axes
) -> Iterator[ReshardStep]:
    """Yield the steps that reduce a partial sum: to every device, or to the shards of a dim."""
    sizes = axes.sizes
    # In the order of the mesh, in which a dim is split over several.
    for summed in _subsets([axis for axis in sizes if axis in here.partial - target.partial]):
        # One collective cannot span parts of two mesh axes; a path reduces them one by one.
        if not axes.together(summed):
            continue
        n = axes.size(summed)
        rest = TensorSharding(here.dims, here.partial - set(summed))
        whole = rest.shard_bytes(shape, itemsize, sizes)
        yield ReshardStep("all-reduce", summed, None, None, rest, whole, 2 * whole * (n - 1) / n)
        for dim in range(len(shape)):
            new = rest.with_dim(dim, (*rest.dims[dim], *summed))
            if _fits(new, target, shape, dim, sizes, summed):
                shard = new.shard_bytes(shape, itemsize, sizes)
                bytes_sent = shard * (n - 1)
                yield ReshardStep("reduce-scatter", summed, dim, None, new, shard, bytes_sent)


def _fits(
    sharding: TensorSharding, target: TensorSharding, shape: tuple[int, ...], dim: int,
    sizes: AxisSizes, added: tuple[str, ...],
) -> bool:  # fmt: skip
    """Whether the shards divide a dim, or it may be padded.

    Padding is possible only of a dim as the target splits it, and that is split at once, by
    `added`: shards of shards would have other entries.
    """
    return shape[dim] % sharding.num_shards(dim, sizes) == 0 or (
        sharding.dims[dim] == added == target.dims[dim]
    )


def _subsets(axes: list[str]) -> Iterator[tuple[str, ...]]:
    """Yield all non-empty subsets of some axes."""
    for count in range(1, len(axes) + 1):
        yield from itertools.combinations(axes, count)


# --- Applying the steps, inside shard_map ---------------------------------------------------------


def apply_moves(
    shard: Array,
    shape: Sequence[int],
    source: TensorSharding,
    moves: Sequence[ReshardStep],
    axes: Axes,
) -> Array:
    """Apply the steps of a path to a shard. Call it inside `shard_map` over the axes of the steps.

    **Arguments:** `shard`, this device's shard; `shape`, of the whole tensor; `source`, its
    sharding; `moves`, the path from there; `axes`, of the mesh.

    **Returns:** this device's shard in the last step's sharding.
    """
    here = source
    for move in moves:
        shard = _DO[move.kind](shard, tuple(shape), here, move, axes)
        here = move.result
    return shard


def _slice(shard: Array, shape: Any, here: TensorSharding, move: ReshardStep, axes: Axes) -> Array:
    assert move.dim is not None
    n = axes.size(move.axes)
    # The last shard of a dim that n does not divide ends with zeros.
    padded = pad_dim(shard, move.dim, n)
    size = padded.shape[move.dim] // n
    return lax.dynamic_slice_in_dim(padded, axes.index(move.axes) * size, size, move.dim)


def _all_gather(
    shard: Array, shape: Any, here: TensorSharding, move: ReshardStep, axes: Axes
) -> Array:
    assert move.dim is not None
    names, groups = axes.group(move.axes)
    whole = moved(
        lambda x: lax.all_gather(x, names, axis=move.dim, tiled=True, axis_index_groups=groups),
        shard, axes,
    )  # fmt: skip
    # The gathered dim may end with padding: cut it off.
    size = move.result.shard_shape(shape, axes.sizes)[move.dim]
    return (
        whole if whole.shape[move.dim] == size else lax.slice_in_dim(whole, 0, size, axis=move.dim)
    )


def _all_to_all(
    shard: Array, shape: Any, here: TensorSharding, move: ReshardStep, axes: Axes
) -> Array:
    assert move.dim is not None
    assert move.to_dim is not None
    names, groups = axes.group(move.axes)
    there, back = move.to_dim, move.dim

    def exchange(x: Array, first: int = 0) -> Array:
        """Exchange shards, of dims behind the `first` ones."""
        own = functools.partial(
            lax.all_to_all, axis_name=names, split_axis=there + first, concat_axis=back + first,
            tiled=True, axis_index_groups=groups,
        )  # fmt: skip
        if groups is None:
            return own(x)
        # JAX has no rule for groups under `jax.vmap`, as members of a chunk are.
        in_groups = jax.custom_batching.custom_vmap(own)
        in_groups.def_vmap(lambda size, batched, x: (exchange(x, first + 1), True))
        return in_groups(x)

    return moved(exchange, shard, axes)


def _reduce_scatter(
    shard: Array, shape: Any, here: TensorSharding, move: ReshardStep, axes: Axes
) -> Array:
    assert move.dim is not None
    names, groups = axes.group(move.axes)
    padded = pad_dim(_addable(shard), move.dim, axes.size(move.axes))
    return lax.psum_scatter(
        padded, names, scatter_dimension=move.dim, tiled=True, axis_index_groups=groups
    ).astype(shard.dtype)


def _all_reduce(
    shard: Array, shape: Any, here: TensorSharding, move: ReshardStep, axes: Axes
) -> Array:
    names, groups = axes.group(move.axes)
    return lax.psum(_addable(shard), names, axis_index_groups=groups).astype(shard.dtype)


def _addable(shard: Array) -> Array:
    """Return booleans as bytes: the rows of a table that one device has, and others' zeros."""
    return shard.astype(jnp.uint8) if shard.dtype == jnp.bool_ else shard


def _permute(
    shard: Array, shape: Any, here: TensorSharding, move: ReshardStep, axes: Axes
) -> Array:
    names, pairs = axes.permute_pairs(_blocks(here, axes), _blocks(move.result, axes), move.axes)
    return moved(lambda x: lax.ppermute(x, names, pairs), shard, axes)


_DO: dict[str, Callable[..., Array]] = {
    "slice": _slice,
    "all-gather": _all_gather,
    "all-to-all": _all_to_all,
    "reduce-scatter": _reduce_scatter,
    "all-reduce": _all_reduce,
    "collective-permute": _permute,
}


def moved(move: Callable[[Array], Array], shard: Array, axes: Axes) -> Array:
    """Apply a collective that moves numbers and computes nothing.

    XLA's CPU compiler knows no bfloat16 there and would send float32, twice the bytes: on CPU the
    bits of narrow floats are moved as integers.
    """
    if not (axes.on_cpu and jnp.issubdtype(shard.dtype, jnp.floating) and shard.itemsize < 4):
        return move(shard)
    bits = lax.bitcast_convert_type(shard, jnp.dtype(f"uint{8 * shard.itemsize}"))
    return lax.bitcast_convert_type(move(bits), shard.dtype)


def pad_dim(shard: Array, dim: int, n: int) -> Array:
    """Pad a dim with zeros at its end to a multiple of `n`."""
    missing = -shard.shape[dim] % n
    if not missing:
        return shard
    edges = [(0, missing if d == dim else 0, 0) for d in range(shard.ndim)]
    return lax.pad(shard, jnp.zeros((), shard.dtype), edges)


def _blocks(sharding: TensorSharding, axes: Axes) -> Callable[[dict[str, int]], tuple[int, ...]]:
    """Return a function from a device's mesh coordinates to the index of the block it holds, among
    devices that differ along these axes alone."""

    def block(coordinate: dict[str, int]) -> tuple[int, ...]:
        indices = []
        for dim in sharding.dims:
            index = 0
            for axis in dim:
                index = index * axes.sizes[axis] + coordinate.get(axis, 0)
            indices.append(index)
        return tuple(indices)

    return block
