"""Collectives over `data` for several tensors at a time, in buckets of bounded size.

ZeRO-3 gathers each parameter where an equation needs it, and reduce-scatters each gradient. For a
network of many small parameters each collective has a few kilobytes, and starting it takes most of
the time. As in torch's FSDP and DDP, tensors that are needed one after another share one flat
buffer, with up to `Plan.bucket_bytes` of whole tensors, and the next buffer is gathered while the
equations of this one run.

    equations             parameter       bucket (limit 16 bytes)    collectives emitted here
    h = x @ w0            w0, 8 bytes     0                          gather 0, gather 1
    h = h @ w1            w1, 8 bytes     0
    y = h @ w2            w2, 8 bytes     1                          gather 2
    dh = dy @ w2.T        w2, 8 bytes     2 (w2 a second time)
    dx = dh @ w1.T        w1, 8 bytes     2

A bucket ends when it is full, or before a parameter that it already has: a parameter gathered for
the forward pass is not kept for the backward pass. Within a pass it is kept for its next use if
what is gathered until then fits a bucket with it, as the weights of a recurrence do.

In the body of a loop over layers a parameter is gathered once: an iteration ends before the next
layer's begins, so one layer is whole at a time anyway. With remat the backward pass of a layer uses
its parameters twice, for the activations and for the gradients.

Zhao et al. 2023, "PyTorch FSDP", section 3.3 (https://arxiv.org/abs/2304.11277).
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.core import Literal
from jaxtyping import Array

from plurax.jaxpr.at_experts import AT_EXPERTS
from plurax.jaxpr.barrier import order_after
from plurax.jaxpr.compat import (
    ANNOTATIONS,
    ELEMENTWISE,
    REMAT,
    Scan,
    is_call_or_remat,
    is_transposed,
    open_jaxpr,
)
from plurax.jaxpr.interpret import flat_equations
from plurax.jaxpr.rows_apart import ROWS_APART
from plurax.partition.resharder import Resharder
from plurax.partition.values import Output, ShardedValue, ValueVersions, split_by_zero
from plurax.sharding.axes import Axes
from plurax.sharding.in_turn import is_large
from plurax.sharding.reshard import ReshardStep, moved, pad_dim
from plurax.sharding.spec import REPLICAS, TensorSharding

_MOVED = frozenset(["broadcast_in_dim", "reshape", "squeeze", "transpose"])
_LOCAL = ELEMENTWISE | _MOVED | {"annotate", "rev"}
"""Operations that can run on the shards of a parameter and leave it split."""
OF_THEIR_OWN = frozenset(["scan", "while", "cond", AT_EXPERTS, ROWS_APART, *ANNOTATIONS, *REMAT])
"""Equations whose bodies are evaluated by the partitioner, or that do not gather parameters."""
_RECOMPUTED = "rematted_computation"
"""How JAX names what a backward pass computes again."""
TILE = 1024
"""Numbers in a tile of a TPU's flat buffers. Its compiler gathers whole tiles; shards that end
within one it adds up, each padded with zeros to the size of all, which sends twice the bytes."""
MOST = 8
"""Maximal number of tensors in a bucket. XLA compiles one loop for each tensor of a buffer, but
equal buffers share them: with a small maximum the buckets of a deep network repeat and few loops
are compiled.
"""


@dataclasses.dataclass(frozen=True)
class ParameterUse:
    """An equation that needs a parameter whole.

    **Fields:** `index` of the equation; `var`, the variable that is gathered for it; `root`, the
    parameter from which `var` is computed, such as by a cast; `alike`, the first variable that is
    computed from it in the same way; `size` in bytes; `backward`, whether the equation is of the
    backward pass; `repeats`, the equations by which what is gathered is repeated to what the
    equation reads, none if it reads `var`.
    """

    index: int
    var: Any
    root: Any
    alike: Any
    size: int
    backward: bool = False
    repeats: tuple[Any, ...] = dataclasses.field(default=(), compare=False)

    @property
    def read(self) -> Any:
        """The variable that the equation reads."""
        return self.repeats[-1].outvars[0] if self.repeats else self.var


class Gathers:
    """The buckets in which the parameters of some equations are gathered.

    **Arguments:** `partitioner`; `eqns`, in order; `known`, the variables that have
    values before them; `summed`, by `id` the equations that need no parameter whole though they
    read the batch (`gradient_sums.py`); `once`, whether what is gathered is kept for all equations
    that need it.

    **Attributes:** `eqns`, reordered: those that use parameters alone, such as casts, come first,
    so that their results can share a bucket.
    """

    def __init__(
        self,
        partitioner: Any,
        eqns: Sequence[Any],
        known: Mapping[Any, ValueVersions],
        summed: Set[int],
        *,
        once: bool = False,
    ) -> None:
        self._partitioner = partitioner
        roots = {var: var for var, one in known.items() if needs_gather(partitioner, one)}
        of_rows = partitioner.context.of_rows
        batch = {
            var
            for var, one in known.items()
            if one.data_varying or (one.deferred is None and of_rows(one.value))
        }
        self.eqns, uses = _uses(eqns, roots, batch, known, summed)
        self._gathered_by = _kept(uses, None if once else partitioner.bucket_bytes)
        self._last = {by: use for use, by in self._gathered_by.items()}
        gathered = [use for use in uses if self._gathered_by[use] is use]
        self._buckets = _packed(gathered, partitioner.bucket_bytes)
        self._bucket_of = {
            use: number for number, bucket in enumerate(self._buckets) for use in bucket
        }
        self._at: dict[int, list[ParameterUse]] = {}
        for use in uses:
            self._at.setdefault(use.index, []).append(use)
        self._gathered: dict[tuple[int, Any], ShardedValue] = {}
        # Parameters alone in a bucket, by their variable and that of the value they came after.
        self._after: dict[tuple[Any, Any], ShardedValue] = {}
        self._done = 0

    def before(
        self, index: int, here: Mapping[Any, ValueVersions], after: tuple[Any, Array] | None
    ) -> dict[Any, Output]:
        """Return the parameters that the equation at `index` needs whole, by what it reads.

        `after` is a value of the batch that the equation reads: its variable and array. If the
        equation opens a bucket, that bucket and the next one are gathered after it.
        """
        uses = self._at.get(index, ())
        for use in uses:
            number = self._bucket_of[self._gathered_by[use]]
            while after is not None and self._done <= self._ahead(number):
                self._gather(self._done, here, *after)
                self._done += 1
        whole = dict[Any, Output]()
        for use in uses:
            by = self._gathered_by[use]
            key = self._bucket_of[by], by.var
            value = self._gathered.get(key)
            if use is self._last[by]:
                self._gathered.pop(key, None)
            if value is not None:
                whole[use.read] = self._repeated(use, value)
        return whole

    def _repeated(self, use: ParameterUse, value: ShardedValue) -> Output:
        """Return what an equation reads of a parameter that is gathered."""
        if not use.repeats:
            return value
        known = {use.var: ValueVersions(value)}
        (repeated,) = self._partitioner.evaluate_part(use.repeats, known, [use.read])
        return repeated.deferred or repeated.value

    def _ahead(self, number: int) -> int:
        """Return up to which bucket is gathered when the one of this number is needed.

        That is the next one, whose gather overlaps with the equations of this one; but not if it
        has a parameter again, which would be whole from here on.
        """
        if number + 1 == len(self._buckets):
            return number
        here, ahead = ({use.root for use in self._buckets[number + i]} for i in (0, 1))
        return number + here.isdisjoint(ahead)

    def _gather(self, number: int, here: Mapping[Any, ValueVersions], met: Any, by: Array) -> None:
        """Gather the parameters of one bucket after `by`, the array of the variable `met`."""
        # Since the buckets were planned, an equation may have created a whole version.
        uses = [u for u in self._buckets[number] if needs_gather(self._partitioner, here[u.var])]
        alone = (uses[0].var, met) if len(uses) == 1 else None
        if alone in self._after:  # XLA would merge equal gathers after the same value
            self._gathered[number, uses[0].var] = self._after[alone]
            return
        values = [here[use.var].value for use in uses]
        goals = [value.sharding.without(REPLICAS) for value in values]
        moved = together(self._partitioner, values, goals, by=by)
        for use, value in zip(uses, moved, strict=True):
            self._gathered[number, use.var] = value
        if alone is not None:
            self._after[alone] = moved[0]


def needs_gather(resharder: Resharder, versions: ValueVersions) -> bool:
    """Whether a variable is a parameter of which only shards over `data` exist."""
    if versions.deferred is not None or versions.data_varying:
        return False
    if not all(map(split_by_zero, versions.values)):
        return False  # a whole version exists already
    return resharder.context.of_parameters(versions.value)


def _uses(
    eqns: Sequence[Any],
    roots: dict[Any, Any],
    batch: set[Any],
    known: Mapping[Any, ValueVersions],
    summed: Set[int] = frozenset(),
) -> tuple[list[Any], list[ParameterUse]]:
    """Return the reordered equations, and where they need split parameters whole.

    Both grow: `roots`, variables computed from one split parameter alone, and that parameter;
    `batch`, what depends on the batch.
    """
    # `alike`: for each the first one that is computed in the same way, `firsts` by how that is.
    alike: dict[Any, Any] = {}
    firsts: dict[Any, Any] = {}
    early, rest, ready = [], [], {*known, *roots}
    # What is repeated along the batch, by the equations that do it: gathered before, not after.
    repeats: dict[Any, tuple[Any, ...]] = {}
    for eqn in eqns:
        read = [atom for atom in eqn.invars if not isinstance(atom, Literal)]
        split = [atom for atom in read if atom in roots]
        if id(eqn) in summed:
            pass
        elif any(atom in batch for atom in read):
            batch.update(eqn.outvars)
        elif split and _is_local(eqn, known) and all(atom in ready for atom in read):
            # A cast to bfloat16, for example: gather its result, which is half as large.
            roots[eqn.outvars[0]] = roots[split[0]]
            ready.update(eqn.outvars)
            operands = [
                str(atom) if isinstance(atom, Literal) else id(alike.get(atom, atom))
                for atom in eqn.invars
            ]
            way = str((eqn.primitive, eqn.params, operands))
            alike[eqn.outvars[0]] = firsts.setdefault(way, eqn.outvars[0])
            if eqn.primitive.name == "stop_gradient":  # the parameter itself, for an actor's critic
                alike[eqn.outvars[0]] = alike.get(split[0], split[0])
            early.append(eqn)
            continue
        elif len(read) == 1 and eqn.primitive.name in _MOVED and {*read} & {*roots, *repeats}:
            repeats[eqn.outvars[0]] = (*repeats.get(read[0], ()), eqn)
        rest.append(eqn)
    uses, backward = [], _backward_of(eqns)
    for index, eqn in enumerate(rest, len(early)):
        read = [atom for atom in eqn.invars if not isinstance(atom, Literal)]
        # A parameter is needed whole only where it meets the batch.
        if id(eqn) in summed or not any(atom in batch for atom in read):
            continue
        if eqn.primitive.name in OF_THEIR_OWN:
            read = _read_each_turn(eqn, roots, batch)
        for var in dict.fromkeys(read):
            then = repeats.get(var, ())
            source = then[0].invars[0] if then else var
            if source in roots:
                size = math.prod(source.aval.shape) * source.aval.dtype.itemsize
                like = alike.get(source, source)
                use = ParameterUse(index, source, roots[source], like, size, backward(eqn), then)
                uses.append(use)
    return early + rest, uses


def _backward_of(eqns: Sequence[Any]) -> Callable[[Any], bool]:
    """Return what says whether one of some equations is of the backward pass.

    What is computed again is, too: a recomputed part and its derivatives use the same parameters.
    In the body of such a part names begin anew.
    """
    if any(str(eqn.source_info.name_stack).startswith(_RECOMPUTED) for eqn in eqns):
        return lambda eqn: True
    return lambda eqn: is_transposed(eqn) or _RECOMPUTED in str(eqn.source_info.name_stack)


def _kept(uses: Sequence[ParameterUse], limit: int | None) -> dict[ParameterUse, ParameterUse]:
    """Return for each use the one before which it is gathered: an earlier one if it is still whole.

    It is if the parameters that are gathered between the two, and itself, have up to `limit` bytes
    together: weights of a recurrence that is written out, of a network that runs twice. Not from
    the forward pass to the backward pass, and with no limit always.
    """
    by = dict[ParameterUse, ParameterUse]()
    whole, backward = dict[Any, ParameterUse](), False  # the one used last at the end
    for use in uses:
        if limit is not None and use.backward != backward:
            whole, backward = {}, use.backward
        by[use] = whole.pop(use.alike, use)
        whole[use.alike] = by[use]
        while limit is not None and len(whole) > 1 and sum(u.size for u in whole.values()) > limit:
            del whole[next(iter(whole))]
    return by


def _read_each_turn(eqn: Any, roots: Mapping[Any, Any], batch: Set[Any]) -> list[Any]:
    """Return the parameters that each iteration of a loop needs whole: weights of a recurrence.

    Not stacks of which an iteration reads a part.
    """
    if eqn.primitive.name == "scan":
        scan = Scan.of(eqn)
        body, turns, (consts, carry, _) = scan.body, scan.length, scan.split(scan.body.invars)
        read = eqn.invars
    elif eqn.primitive.name == "while":
        body, turns = open_jaxpr(eqn.params["body_jaxpr"])[0], None
        count, read = eqn.params["body_nconsts"], eqn.invars[eqn.params["cond_nconsts"] :]
        consts, carry = body.invars[:count], body.invars[count:]
    else:
        return []
    if turns == 1:
        return []
    outside = {
        var: atom
        for var, atom in zip(body.invars, read, strict=True)
        if not isinstance(atom, Literal)
    }
    shared = {var: var for var in consts if outside.get(var) in roots}
    # What is carried starts as zeros, or counts iterations.
    varies = {var for var in carry if jnp.issubdtype(var.aval.dtype, jnp.inexact)}
    varies |= {var for var, atom in outside.items() if atom in batch}
    flat = flat_equations(body.eqns, body.outvars, inline=is_call_or_remat)
    whole: dict[Any, dict[Any, int]] = {}
    for use in _uses(flat.eqns, shared, varies, {})[1]:
        whole.setdefault(use.root, {})[use.alike] = math.prod(use.var.aval.shape)
    return [
        outside[var]
        for var, parts in whole.items()
        if sum(parts.values()) >= math.prod(var.aval.shape)
    ]


def _is_local(eqn: Any, known: Mapping[Any, ValueVersions]) -> bool:
    """Whether an equation of split parameters runs on their shards, and leaves them split."""
    if eqn.primitive.name != "slice":
        # What is repeated along the batch is gathered before, not after.
        sizes = [math.prod(v.aval.shape) for v in (*eqn.invars, *eqn.outvars)]
        return eqn.primitive.name in _LOCAL and sizes[-1] <= max(sizes[:-1])
    # A part of a parameter, such as one of three matrices that are stored as one.
    (operand,) = eqn.invars
    if operand not in known or eqn.params["strides"] is not None:
        return False
    dims = known[operand].value.sharding.dims
    cut = zip(dims, operand.aval.shape, eqn.outvars[0].aval.shape, strict=True)
    return all(size == kept or not axes for axes, size, kept in cut)


def _packed(uses: Sequence[ParameterUse], limit: int) -> list[list[ParameterUse]]:
    """Group consecutive uses into buckets, none with the same parameter, or part of it, twice."""
    likes = [(use.var.aval.shape, use.var.aval.dtype) for use in uses]
    parameters = [use.alike for use in uses]
    found = packed(likes, [use.size for use in uses], limit, parameters)
    return [[uses[index] for index in bucket] for bucket in found]


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


# --- Resharding several tensors at a time ---------------------------------------------------------


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
        sizes = [_size(values[index]) for index in indices]
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


def _size(value: ShardedValue) -> int:
    """Return the bytes of the whole tensor."""
    return math.prod(value.shape) * int(value.dtype.itemsize)


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
