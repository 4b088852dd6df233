"""A function's share for one device: a transformation of a traced function.

The function is written for whole tensors. `partition` evaluates its equations on shards: each value
knows its `TensorSharding`, each operation has a rule for which shardings it needs and how its
result is sharded, and a value that is sharded otherwise is resharded by the cheapest sequence of
collectives. Apply it after differentiation, so that the backward pass is partitioned by the same
rules, and inside `jax.shard_map`.

What decides where a value goes: the shardings of the arguments; the marks in the function; else the
fewest bytes, parameters staying where they are. A sum over a split dim is left as terms on the
devices until it is needed whole: then it is added up once, in the shards in which it is wanted.

Over the mesh axis `data` each device has its own rows. Values that depend on them are `varying`:
they have the shape of one device's rows. Parameters may be split over `data` all the same (ZeRO):
they are made whole where they meet a varying value, each time they do, after whatever comes before,
and never kept.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import source_info_util
from jax.extend.core import Jaxpr, Literal
from jax.sharding import Mesh
from jaxtyping import Array, PyTree

from plurax import errors
from plurax.jaxpr.barrier import order_after, order_after_cotangent, pick_dependency
from plurax.jaxpr.primitives import INLINED, holds, is_recomputed, open_jaxpr, written
from plurax.mesh import within
from plurax.partition.annotation_resolver import AnnotationResolver, NameRule
from plurax.partition.branches import Branches
from plurax.partition.buckets import Gathers, computed_at, inlined, together
from plurax.partition.loops import Loop, While
from plurax.partition.manual import eval_manual_body
from plurax.partition.operators import RULES, by_default
from plurax.partition.values import (
    DeferredValue,
    ShardedValue,
    ValueVersions,
    is_sharded_value,
    over_data,
)
from plurax.sharding.axes import Axes
from plurax.sharding.reshard import ReshardStep, apply_moves, plan_reshard, wire_bytes
from plurax.sharding.spec import TensorSharding


@dataclasses.dataclass(frozen=True)
class Record:
    """A collective that a divided function contains.

    **Fields:** `kind`, `axes` (of the mesh), `bytes` of its result on one device, `wire` bytes that
    a device sends, `trips`, how often it runs, and `operation`, for which an operand is moved,
    with the function in whose code it stands; "" where it is a result that is brought somewhere.
    `without_rule`, where it gathers for an operation that has no rule, the operation and the place
    in the model's code.
    """

    kind: str
    axes: tuple[str, ...]
    bytes: int
    bytes_sent: float
    trips: int
    operation: str = ""
    without_rule: tuple[str, str] | None = None


FRAMES = 200
"""So many lines of the calls that led to an operation are looked at."""


class Partitioner:
    """Walks the equations of a function on the shards of one device.

    **Arguments:**

    - `axes`: the axes over which it is divided.
    - `named`: from the name of a mark and the shape of what it stands on, how that shall lie, or
      None for as it comes.
    - `mesh`: in which the function may use `jax.shard_map` itself.
    - `joint`: rows are a dim split over `data`, not each device's own: what depends on them is not
      `varying`, and a parameter split over `data` is made whole where it meets anything else.
    - `bucket_bytes`: of tensors that are gathered, or added up to shards, over `data` together.
    - `trips`: how often the function runs, for the records.
    """

    def __init__(
        self,
        axes: Axes,
        named: NameRule | None = None,
        *,
        mesh: Mesh | None = None,
        joint: bool = False,
        bucket_bytes: int = 1,
        trips: int = 1,
    ) -> None:
        self.axes = axes
        self.bucket_bytes = bucket_bytes
        self.mesh = mesh
        self._marks = AnnotationResolver(axes, named or (lambda name, shape: None))
        self.joint = joint
        self.records: list[Record] = []
        self._trips = trips
        self._now: Any = None
        self._calls: list[Any] = []
        self._ready: dict[int, ShardedValue] = {}

    def gathered_for(self, eqn: Any, first: int) -> None:
        """Note that the collectives from the `first` on gather for an operation without a rule."""
        for place, record in enumerate(self.records[first:], first):
            if record.kind in ("all-gather", "all-to-all"):
                because = (eqn.primitive.name, self._line(eqn))
                self.records[place] = dataclasses.replace(record, without_rule=because)

    def _line(self, eqn: Any) -> str:
        """The line of the model in which an operation, or the function that calls it, stands.

        JAX keeps what it has traced: a called function may name the lines of another caller.
        """
        line = ""
        for one in (*self._calls, eqn):
            lines = source_info_util.summarize(one.source_info, FRAMES).splitlines()
            if not line or line in lines:
                line = lines[-1]
        return line

    # --- Moving -------------------------------------------------------------------------------

    def cost(self, cell: ValueVersions, target: TensorSharding) -> float:
        """Bytes that each device sends to have a value in a sharding."""
        if cell.deferred is not None or cell.is_zero:
            return 0.0
        return min(wire_bytes(self.moves(value, target)) for value in _able(cell, target))

    def reshard(self, cell: ValueVersions, target: TensorSharding) -> ShardedValue:
        """A value brought to a sharding, by the cheapest way from where it lies."""
        if cell.deferred is not None:
            made = cell.deferred.make(target)
            cell.values.append(made)
        options = _able(cell, target)
        best = min(options, key=lambda value: wire_bytes(self.moves(value, target)))
        if best.sharding == target:
            return best
        moved = self.zeros(cell.shape, best.array.dtype).make(target) if cell.is_zero else None
        moved = moved or self.move(best, target)
        cell.values.append(moved)
        return moved

    def moves(self, value: ShardedValue, target: TensorSharding) -> list[ReshardStep]:
        """How a value is brought to a sharding."""
        size: int = value.array.dtype.itemsize
        avoid = frozenset({"data"}) if value.data_varying else frozenset()
        return plan_reshard(value.sharding, target, value.shape, size, self.axes, avoid)

    def move(self, value: ShardedValue, target: TensorSharding) -> ShardedValue:
        """A value moved; the collectives are recorded."""
        if value.sharding == target:
            return value
        moves = self.moves(value, target)
        for move in moves:
            if move.kind != "slice":
                axes = self.axes.mesh_axes(move.axes)
                by = _named(self._now) if self._now is not None else ""
                self.records.append(
                    Record(move.kind, axes, move.bytes, move.bytes_sent, self._trips, by)
                )
        array = apply_moves(value.array, value.shape, value.sharding, moves, self.axes)
        return dataclasses.replace(value, array=array, sharding=target)

    def whole(self, value: ShardedValue) -> ShardedValue:
        """A value that every device has whole."""
        return self.move(value, TensorSharding.whole(len(value.shape)))

    def reduced(self, cell: ValueVersions) -> ShardedValue:
        """A value that is no sum still to be added up."""
        for value in cell.values:
            if not value.sharding.partial:
                return value
        return self.reshard(cell, TensorSharding(cell.value.sharding.dims))

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> DeferredValue:
        """Zeros that can lie in any way."""

        def make(sharding: TensorSharding) -> ShardedValue:
            local = sharding.shard_shape(shape, self.axes.sizes)
            return ShardedValue(jnp.zeros(local, dtype), shape, sharding, is_param=True)

        return DeferredValue(shape, make, zero=True)

    def constant(self, value: Any) -> ValueVersions:
        """A constant of a traced function."""
        known = isinstance(value, np.ndarray | np.generic | int | float)
        if known and not np.shape(value) and not value and not isinstance(value, bool):
            return ValueVersions(self.zeros((), jnp.asarray(value).dtype))
        array = jnp.asarray(value)
        return ValueVersions(
            ShardedValue(array, array.shape, TensorSharding.whole(array.ndim), is_param=True)
        )

    def all_reduced(self, array: Array, axes: Sequence[str], op: Callable[..., Array]) -> Array:
        """The maximum or minimum over some axes."""
        owners = [[a] for a in axes] if not self.axes.together(axes) else [list(axes)]
        for one in owners:
            names, groups = self.axes.group(one)
            self.record_all_reduce(one, array)
            array = op(array, names, axis_index_groups=groups)
        return array

    def record_all_reduce(self, axes: Sequence[str], array: Array) -> None:
        """Note an all-reduce that is made elsewhere."""
        n, size = self.axes.size(axes), array.size * array.dtype.itemsize
        bytes_sent, at = 2 * size * (n - 1) / n, self.axes.mesh_axes(axes)
        self.records.append(Record("all-reduce", at, size, bytes_sent, self._trips))

    def record_together(self, moves: Sequence[ReshardStep]) -> None:
        """Note one collective that makes several moves."""
        first, axes = moves[0], self.axes.mesh_axes(moves[0].axes)
        size, bytes_sent = sum(move.bytes for move in moves), sum(move.bytes_sent for move in moves)
        self.records.append(Record(first.kind, axes, size, bytes_sent, self._trips))

    # --- Evaluating ---------------------------------------------------------------------------

    def traced(self, fun: Callable[..., Any], *args: PyTree) -> tuple[Any, PyTree]:
        """A function as a closed jaxpr, and the shapes of its result.

        As outside of `shard_map`: a model may use it over these axes itself.
        """
        outside = within(self.mesh, fun) if self.mesh is not None else fun
        return jax.make_jaxpr(outside, return_shape=True)(*args)

    def evaluate(
        self,
        jaxpr: Jaxpr,
        consts: Sequence[Any],
        args: Sequence[ValueVersions],
        wanted: Sequence[TensorSharding | None] | None = None,
    ) -> list[ValueVersions]:
        """Evaluate equations in order. `wanted`: how results shall lie, where it is known.

        Results wanted over `data` are sums over the devices' rows.
        """
        known = dict(zip(jaxpr.constvars, map(self.constant, consts), strict=True))
        known.update(zip(jaxpr.invars, args, strict=True))
        return self.evaluate_part(jaxpr.eqns, known, jaxpr.outvars, wanted)

    def evaluate_part(
        self,
        eqns: Sequence[Any],
        known: Mapping[Any, ValueVersions],
        results: Sequence[Any],
        wanted: Sequence[TensorSharding | None] | None = None,
    ) -> list[ValueVersions]:
        """Evaluate those of some equations on which `results` depend, from what is `known`."""
        bucketed = self._gathers_parameters(known)
        inside = len(self._calls)
        calls: dict[int, tuple[Any, ...]] = {}
        if bucketed:
            eqns, results, constants, calls = inlined(eqns, results, self.constant)
            known = {**known, **constants}
        eqns, uses = _live(eqns, results, known)
        gathers = Gathers(self, eqns, known) if bucketed else None
        here = dict(known)
        goal = {
            var: target
            for var, target in zip(results, wanted or (), strict=False)
            if target is not None and not isinstance(var, Literal)
        }

        def read(atom: Any) -> ValueVersions:
            return self.constant(atom.val) if isinstance(atom, Literal) else here[atom]

        for var, cell in known.items():
            cell.uses += uses.get(var, 0) - 1
        for place, eqn in enumerate(gathers.eqns if gathers else eqns):
            inputs = [read(atom) for atom in eqn.invars]
            goals = [goal.get(var) for var in eqn.outvars]
            self._calls[inside:] = calls.get(id(eqn), ())
            if gathers is not None:
                meets = self._meets(inputs)
                self._ready = gathers.before(place, here, pick_dependency(meets) if meets else None)
            with written(eqn):
                outputs = self._equation(eqn, inputs, goals)
            for var, cell in zip(eqn.outvars, outputs, strict=True):
                # A mark may hand on the very cell.
                before = cell.uses - 1 if cell in inputs else 0
                cell.uses = before + uses.get(var, 0)
                here[var] = cell
        del self._calls[inside:]
        return [read(atom) for atom in results]

    def _equation(
        self, eqn: Any, inputs: list[ValueVersions], goals: list[TensorSharding | None]
    ) -> list[ValueVersions]:
        name = eqn.primitive.name
        if name in INLINED:
            self._calls.append(eqn)
            results = self.evaluate(*open_jaxpr(eqn.params[INLINED[name]]), inputs, goals)
            self._calls.pop()
            return results
        if name in ("checkpoint", "remat2", "remat"):
            if is_recomputed(eqn):
                inputs = self._barrier(inputs)
            return self.evaluate(*open_jaxpr(eqn.params["jaxpr"]), inputs, goals)
        if name == "scan":
            return self._scan(eqn, inputs, goals)
        if name == "while":
            loop = While(self, eqn, inputs)
            loop.settle()
            return loop.run()
        if name == "cond":
            return Branches(self, eqn, inputs).run()
        if name in ("annotate", "sharding_constraint"):
            target = self._marks.of(eqn, inputs[0])
            return [inputs[0] if target is None else ValueVersions(self.reshard(inputs[0], target))]
        if name == "shard_map":
            return self._by_hand(eqn, self.together(inputs))
        inputs = self.together(inputs)
        rule = RULES.get(name, by_default)
        self._now = eqn
        outputs = rule(self, eqn, inputs)
        self._now = None
        return [ValueVersions(output) for output in outputs]

    def together(self, inputs: list[ValueVersions]) -> list[ValueVersions]:
        """What is split over `data` made whole where it meets a varying value.

        The gather comes after the value it meets: it is neither done before it is needed, nor
        joined with another. Of a value that is also there whole, that one is taken.
        """
        meets = self._meets(inputs)
        if not meets and not any(cell.data_varying for cell in inputs):
            return inputs
        ready = self._ready
        inputs = [ValueVersions(ready[id(cell)]) if id(cell) in ready else cell for cell in inputs]
        cells = [
            cell if self.joint and _rows(cell) else self._without_data(cell) for cell in inputs
        ]
        split = [
            cell
            for cell in cells
            if cell.deferred is None
            and over_data(cell.value.sharding)
            and not (self.joint and _rows(cell))
        ]
        arrays = [cell.value.array for cell in split]
        if split and meets:
            arrays = order_after(arrays, pick_dependency(meets))
        tied = iter(arrays)

        def whole(cell: ValueVersions) -> ValueVersions:
            value = dataclasses.replace(cell.value, array=next(tied))
            return ValueVersions(self.move(value, value.sharding.without(["data"])))

        return [whole(cell) if cell in split else cell for cell in cells]

    def _without_data(self, cell: ValueVersions) -> ValueVersions:
        """A value in those of its shardings that are whole over `data`, if there are any."""
        kept = [value for value in cell.values if not over_data(value.sharding)]
        if len(kept) == len(cell.values):
            return cell
        if cell.is_zero:
            return ValueVersions(self.zeros(cell.shape, cell.value.array.dtype))
        if not kept:
            return cell
        other = ValueVersions(kept[0], cell.uses)
        other.values = kept
        return other

    def of_rows(self, value: ShardedValue) -> bool:
        """Whether a value depends on the batch, and parameters have to be whole where they meet."""
        return value.data_varying or (self.joint and not value.is_param)

    def of_parameters(self, value: ShardedValue) -> bool:
        """Whether a value is split over `data`, and to be made whole where it meets the batch."""
        return "data" in value.sharding.axes and (value.is_param or not self.joint)

    def _meets(self, inputs: list[ValueVersions]) -> list[Array]:
        """Those of some values at which parameters have to be whole."""
        known = (cell.deferred.source if cell.deferred else cell.value for cell in inputs)
        return [value.array for value in known if value is not None and self.of_rows(value)]

    def _gathers_parameters(self, known: Mapping[Any, ValueVersions]) -> bool:
        """Whether several parameters may have to be made whole over `data`."""
        values = [cell.value for cell in known.values() if cell.deferred is None]
        split = [v for v in values if self.of_parameters(v) and not v.data_varying]
        return len(split) > 1 and any(map(self.of_rows, values))

    def _barrier(self, inputs: list[ValueVersions]) -> list[ValueVersions]:
        made = [cell.value for cell in inputs]
        tied = order_after_cotangent([v.array for v in made], [v.is_param for v in made])
        return [
            ValueVersions(dataclasses.replace(value, array=array))
            for value, array in zip(made, tied, strict=True)
        ]

    @contextlib.contextmanager
    def apart(self, data_varying: bool) -> Iterator[None]:
        """Where devices along `data` go different ways: no permutation, in which all take part."""
        axes = self.axes
        if data_varying:
            self.axes = Axes(axes.mesh, axes.parts, permutes=False)
        try:
            yield
        finally:
            self.axes = axes

    # --- Loops, and shard_map by hand ----------------------------------------------------------

    def _scan(
        self, eqn: Any, inputs: list[ValueVersions], goals: list[TensorSharding | None]
    ) -> list[ValueVersions]:
        loop = Loop(self, eqn, inputs, goals)
        loop.settle()
        self._now = eqn
        start = loop.start()
        self._now = None
        trips, self._trips = self._trips, self._trips * loop.length
        outputs = loop.run(start)
        self._trips = trips
        return outputs

    def finish(
        self,
        cells: Sequence[ValueVersions],
        goals: Sequence[TensorSharding | None],
        order: Sequence[int] | None = None,
    ) -> list[ShardedValue]:
        """Results as they are wanted, in buckets, and the others as they lie.

        Over `data`, varying values are terms of a sum. `order`: numbers by which results are known
        one after another.
        """
        values, targets = [], []
        for cell, goal in zip(cells, goals, strict=True):
            values.append(cell.value if goal is None else self._term(cell, goal))
            targets.append(values[-1].sharding if goal is None else goal)
        return together(self, values, targets, order=order)

    def _term(self, cell: ValueVersions, target: TensorSharding) -> ShardedValue:
        late = cell.deferred
        if late is not None:
            cell.values.append(late.make(target.without(["data"])))
        value = cell.value
        if value.data_varying and "data" in target.axes:
            partial = value.sharding.partial | {"data"}
            return dataclasses.replace(
                value, sharding=TensorSharding(value.sharding.dims, partial), data_varying=False
            )
        options = _able(cell, target)
        return min(options, key=lambda value: wire_bytes(self.moves(value, target)))

    def _by_hand(self, eqn: Any, inputs: list[ValueVersions]) -> list[ValueVersions]:
        """A `jax.shard_map` of the user's: its body is already what one device does."""
        params = eqn.params
        data_varying = any(cell.data_varying for cell in inputs)
        arrays = []
        for cell, spec in zip(inputs, params["in_specs"], strict=True):
            target = self._known(spec, len(cell.shape))
            if data_varying and "data" in target.axes:
                raise errors.by_hand_over_data(spec)
            arrays.append(self.reshard(cell, target).array)
        body, consts = open_jaxpr(params["jaxpr"])
        if not self.axes.permutes and holds(body, "ppermute"):
            raise errors.permute_in_stage()
        outputs = eval_manual_body(body, consts, arrays)
        results = []
        for var, array, spec in zip(eqn.outvars, outputs, params["out_specs"], strict=True):
            lies = self._known(spec, len(var.aval.shape))
            if data_varying and "data" in lies.axes:
                raise errors.by_hand_over_data(spec)
            results.append(ValueVersions(ShardedValue(array, var.aval.shape, lies, data_varying)))
        return results

    def _known(self, spec: Any, rank: int) -> TensorSharding:
        """A spec over the axes that have more than one device, in the parts they are used in."""
        given = TensorSharding.from_spec(spec, rank)
        dims = (tuple(a for a in entry if a in self.axes.mesh) for entry in given.dims)
        return self.axes.expanded(TensorSharding(tuple(dims)))


def partition(
    fun: Callable[..., PyTree],
    divider: Partitioner,
    args: tuple[PyTree, ...],
    wanted: Callable[[PyTree], PyTree] | None = None,
    *,
    tight: bool = True,
) -> PyTree:
    """Evaluate `fun`'s share of one device; to be called inside `jax.shard_map`.

    **Arguments:**

    - `fun`: a function of trees of arrays, written for whole tensors.
    - `divider`: the axes and marks.
    - `args`: trees of `ShardedValue`s.
    - `wanted`: from the tree of the result's `jax.ShapeDtypeStruct`s to a like tree of how each
      shall lie, a `TensorSharding`, or None for as it comes.
    - `tight`: whether results are brought there; else it is only where late ones are made.

    **Returns:** the result, a tree of `ShardedValue`s.

    Raises `PlanError` where a mark does not fit what it stands on.
    """
    leaves, structure = jax.tree.flatten(args, is_leaf=is_sharded_value)
    like = [jax.ShapeDtypeStruct(value.shape, value.array.dtype) for value in leaves]
    closed, shapes = divider.traced(fun, *jax.tree.unflatten(structure, like))
    goals: list[Any] = []
    # A None may also be a part of the tree itself: a parameter that is not there.
    given = wanted(shapes) if wanted is not None else jax.tree.map(lambda _: None, shapes)
    jax.tree.map(lambda _, goal: goals.append(goal), shapes, given)
    cells = divider.evaluate(closed.jaxpr, closed.consts, [ValueVersions(v) for v in leaves], goals)
    for cell, goal in zip(cells, goals, strict=True):
        if goal is not None and cell.deferred and not tight:
            cell.values.append(cell.deferred.make(goal))
    if not tight:
        goals = [None] * len(goals)
    out = divider.finish(cells, goals, computed_at(closed.jaxpr))
    return jax.tree.unflatten(jax.tree.structure(shapes), out)


def _live(
    equations: Sequence[Any], results: Sequence[Any], known: Mapping[Any, ValueVersions]
) -> tuple[list[Any], dict[Any, int]]:
    """The equations on which results depend, and how often each variable is read by them."""
    uses: dict[Any, int] = {}

    def read(atoms: Sequence[Any]) -> None:
        for atom in atoms:
            if not isinstance(atom, Literal):
                uses[atom] = uses.get(atom, 0) + 1

    read(results)
    eqns = []
    for eqn in reversed(equations):
        if eqn.effects or any(var in uses and var not in known for var in eqn.outvars):
            eqns.append(eqn)
            read(eqn.invars)
    return eqns[::-1], uses


def _able(cell: ValueVersions, target: TensorSharding) -> list[ShardedValue]:
    """The values that can be brought to a sharding: a sum cannot be taken apart again."""
    return [value for value in cell.values if target.partial <= value.sharding.partial]


def _rows(cell: ValueVersions) -> bool:
    """Whether a value is no parameter: where rows are a dim, it may stay split over `data`."""
    return cell.deferred is None and (cell.is_zero or not cell.value.is_param)


def _named(eqn: Any) -> str:
    """An operation, and the function in whose code it stands."""
    frames = [frame for frame in str(eqn.source_info.name_stack).split("/") if frame]
    return f"{eqn.primitive.name} in {frames[-1]}" if frames else str(eqn.primitive.name)
