"""Collectives over `data` for several tensors at a time, in buckets of bounded size.

ZeRO-3 gathers each parameter where an equation needs it (`gathers.py`), and reduce-scatters each
gradient. For a network of many small parameters each collective has a few kilobytes, and starting
it takes most of the time. As in torch's FSDP and DDP, tensors that are needed one after another
share one flat buffer, with up to `Plan.bucket_bytes` of whole tensors.

Zhao et al. 2023, "PyTorch FSDP", section 3.3 (https://arxiv.org/abs/2304.11277).
"""

import functools
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.core import Literal
from jaxtyping import Array

from plurax.jaxpr.barrier import order_after
from plurax.partition.resharder import Resharder
from plurax.partition.values import ShardedValue
from plurax.sharding.axes import Axes
from plurax.sharding.in_turn import is_large
from plurax.sharding.reshard import ReshardStep, moved, pad_dim
from plurax.sharding.spec import REPLICAS, TensorSharding

TILE = 1024
"""Numbers in a tile of a TPU's flat buffers. Its compiler gathers whole tiles; shards that end
within one it adds up, each padded with zeros to the size of all, which sends twice the bytes."""
MOST = 8
"""Maximal number of tensors in a bucket. XLA compiles one loop for each tensor of a buffer, but
equal buffers share them: with a small maximum the buckets of a deep network repeat and few loops
are compiled.
"""


def packed(
    likes: Sequence[Hashable],
    sizes: Sequence[int],
    limit: int,
    names: Sequence[Hashable] | None = None,
) -> list[range]:
    """Group consecutive tensors into buckets.

    A bucket ends before it exceeds `limit` bytes or `MOST` tensors, and before a name that it
    already has. If the tensors repeat, as a network's layers do, it ends with a repetition, so that
    the next bucket has the same shapes.

    **Arguments:** for each tensor, `likes`, a description that equal tensors share, such as the
    shape; `sizes`, in bytes; `names`, which default to all different.

    **Returns:** for each bucket the range of its tensors.

    ```python
    >>> from plurax.partition.buckets import packed
    >>> packed(["w", "b"] * 5, [3, 1] * 5, limit=11)
    [range(0, 4), range(4, 8), range(8, 10)]

    ```
    """
    buckets, first = [], 0
    while first < len(likes):
        last, size, again = first + 1, sizes[first], False
        while last < len(likes):
            again = names is not None and names[last] in names[first:last]
            if again or last == first + MOST or size + sizes[last] > limit:
                break
            size += sizes[last]
            last += 1
        # A repeated name starts the backward pass, whose layers come in reverse: nothing repeats.
        if not again:
            last = _repetition(likes, first, last)
        buckets.append(range(first, last))
        first = last
    return buckets


def _repetition(likes: Sequence[Hashable], first: int, last: int) -> int:
    """Return the latest index up to `last` at which the sequence from `first` starts again.

    If fewer tensors are left than the sequence has, only those need to repeat it. Return `last` if
    there is no such index.
    """
    for index in range(last, first, -1):
        again = likes[index : 2 * index - first]
        if list(again) == list(likes[first : first + len(again)]):
            return index
    return last


def together(
    resharder: Resharder,
    values: Sequence[ShardedValue],
    goals: Sequence[TensorSharding],
    *,
    order: Sequence[int] | None = None,
    by: Array | None = None,
    apart: bool = False,
) -> list[ShardedValue]:
    """Reshard values; all-gathers and reduce-scatters over `data` share buckets.

    **Arguments:** `order`, a sort key per value, by default the given order; `by`, an array on
    which the collectives depend; `apart`, whether large values go one after another (see
    `sharding/in_turn.py`).
    """
    results: list[Any] = [None] * len(values)
    groups: dict[Any, list[int]] = {}
    likes: dict[int, Hashable] = {}
    # In the order of computation: a bucket can be sent as soon as its last tensor is known.
    for index in sorted(range(len(values)), key=lambda i: order[i] if order else i):
        value = values[index]
        steps = resharder.context.steps(value, goals[index])
        # A path of several steps, or over other axes, runs on its own.
        alone = len(steps) != 1 or steps[0].kind not in _FLAT or not _is_over_replicas(steps[0])
        large = apart and bool(steps) and is_large(value.array)
        if alone:
            results[index] = resharder.move(_tied(resharder, value, by), goals[index])
        elif large:
            (results[index],) = _flat_move(resharder, [value], [goals[index]], steps[0].kind, by)
        if alone or large:
            by = results[index].array if large else by
            continue
        # One buffer has one dtype and one collective.
        groups.setdefault((steps[0].kind, steps[0].axes, value.dtype), []).append(index)
        likes[index] = value.array.shape, steps[0].dim
    for (kind, _, _), indices in groups.items():
        sizes = [bytes_of(values[index]) for index in indices]
        limit = resharder.bucket_bytes
        if resharder.axes.platform == "tpu" and kind != "all-gather":
            limit = min(limit, SMALL_ON_TPU)
        for bucket in packed([likes[i] for i in indices], sizes, limit):
            pack = [indices[number] for number in bucket]
            some, targets = [values[i] for i in pack], [goals[i] for i in pack]
            if len(pack) == 1 and resharder.axes.platform != "gpu":
                moved = [resharder.move(_tied(resharder, some[0], by), targets[0])]
            else:
                moved = _flat_move(resharder, some, targets, kind, by)
            for index, value in zip(pack, moved, strict=True):
                results[index] = value
    return results


SMALL_ON_TPU = 2**20
"""The bytes that share a reduction on TPUs: their compiler reduces a flat buffer whole, where it
reduces a single tensor to shards."""


def _is_over_replicas(step: ReshardStep) -> bool:
    """Whether a step runs over the axes of ZeRO, in the order of the mesh."""
    return step.axes == tuple(axis for axis in REPLICAS if axis in step.axes)


def bytes_of(tensor: Any) -> int:
    """Return the bytes of a whole tensor."""
    return math.prod(tensor.shape) * int(tensor.dtype.itemsize)


def _tied(resharder: Resharder, value: ShardedValue, by: Array | None) -> ShardedValue:
    """Return the value with a data dependency on `by`."""
    if by is None:
        return value
    return resharder.order_after([value], by)[0]


def _flat_move(
    resharder: Resharder,
    values: list[ShardedValue],
    goals: list[TensorSharding],
    kind: str,
    by: Array | None,
) -> list[ShardedValue]:
    """Reshard values of one dtype by one collective over a flat buffer.

    Of a single one too, on GPUs: their collectives need the split dim to be the major one in
    memory. The compiler would lay out the parameter or gradient like that, and copy the state.
    """
    context = resharder.context
    steps = [context.steps(value, goal)[0] for value, goal in zip(values, goals, strict=True)]
    specs = [
        context.spec(value.shape, value.dtype, goal, value.data_varying, value.is_param)
        for value, goal in zip(values, goals, strict=True)
    ]
    move = functools.partial(_FLAT[kind], specs, steps, context.axes, by)
    moved = resharder.run(move, [value.array for value in values], specs)
    resharder.record_together(steps)
    return moved


def _all_gather(
    specs: list[ShardedValue],
    steps: list[ReshardStep],
    axes: Axes,
    by: Array | None,
    *shards: Array,
) -> list[Array]:
    """Gather shards in one flat buffer; row i of the result is the buffer of device i.

    Shards (2, 3) and (5,) on 4 devices: a buffer (11,), gathered to (4, 11), is cut into (4, 2, 3)
    and (4, 5); moving the device dim next to the split dim gives (8, 3) and (20,).
    """
    buffer = jnp.concatenate([shard.reshape(-1) for shard in shards])
    if axes.platform == "tpu":
        buffer = jnp.pad(buffer, (0, -buffer.size % TILE))
    if by is not None:
        (buffer,) = order_after([buffer], by)
    over, groups = axes.group(steps[0].axes)
    gather = functools.partial(lax.all_gather, axis_name=over, axis_index_groups=groups)
    rows = moved(gather, buffer, axes)
    devices, arrays, first = axes.size(steps[0].axes), [], 0
    for shard, spec, step in zip(shards, specs, steps, strict=True):
        shape, dim = shard.shape, step.dim
        assert dim is not None
        last = first + math.prod(shape)
        parts = rows[:, first:last].reshape(devices, *shape)
        whole = jnp.moveaxis(parts, 0, dim).reshape(
            *shape[:dim], devices * shape[dim], *shape[dim + 1 :]
        )
        # A dim that the devices do not divide was padded: drop the padding.
        arrays.append(lax.slice_in_dim(whole, 0, spec.array.shape[dim], axis=dim))
        first = last
    return arrays


def _reduce_scatter(
    specs: list[ShardedValue],
    steps: list[ReshardStep],
    axes: Axes,
    by: Array | None,
    *shards: Array,
) -> list[Array]:
    """Reduce-scatter tensors in one flat buffer; row i of the buffer has the shards for device i.

    Tensors (8, 3) and (20,) on 4 devices: rows (4, 6) and (4, 5), a buffer (4, 11), scattered to
    (11,), cut into the shards (2, 3) and (5,).
    """
    over, groups = axes.group(steps[0].axes)
    devices, rows = axes.size(steps[0].axes), []
    for shard, step in zip(shards, steps, strict=True):
        dim = step.dim
        assert dim is not None
        whole = pad_dim(shard, dim, devices)
        size = whole.shape[dim] // devices
        shape = (*whole.shape[:dim], devices, size, *whole.shape[dim + 1 :])
        rows.append(jnp.moveaxis(whole.reshape(shape), dim, 0).reshape(devices, -1))
    buffer = jnp.concatenate(rows, axis=1)
    if by is not None:
        (buffer,) = order_after([buffer], by)
    flat = lax.psum_scatter(buffer, over, scatter_dimension=0, axis_index_groups=groups)
    arrays, first = [], 0
    for spec in specs:
        last = first + spec.array.size
        arrays.append(flat[first:last].reshape(spec.array.shape))
        first = last
    return arrays


_FLAT: dict[str, Callable[..., list[Array]]] = {
    "all-gather": _all_gather,
    "reduce-scatter": _reduce_scatter,
}


def computed_at(eqns: Sequence[Any], results: Sequence[Any]) -> list[int]:
    """Return for each result the index of the equation that computes it, or -1 if none does."""
    index_of = {var: index for index, eqn in enumerate(eqns) for var in eqn.outvars}
    return [-1 if isinstance(atom, Literal) else index_of.get(atom, -1) for atom in results]
