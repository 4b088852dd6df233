"""Partition a traced function: compute its result on the shards of one device.

A model is written for whole tensors; a device holds shards of them. `partition` traces the function
and evaluates its equations one by one. The operator's rule, a function in `partition/operators/`
(to add one, list it there in `RULES`; nothing changes here), decides which input shardings the
operation needs and which sharding its result has; an input with another sharding is resharded by
the cheapest sequence of collectives; then the operation is executed on the shards. Call `partition`
inside `jax.shard_map`, after differentiation, so that the same rules partition the backward pass.

Example: mesh data=2, tensor=2; float32; 8 rows in the batch, 4 on each device. Shapes count one
device's rows, but whole features: only `tensor` stands in the shardings.

    equation      shapes              sharding of the result              on one device
    h = x @ w0    (4, 16) @ (16, 32)  w0 (None, tensor): (None, tensor)   (4, 16) @ (16, 16)
    a = tanh(h)   (4, 32)             (None, tensor)                      (4, 16)
    y = a @ w1    (4, 32) @ (32, 16)  w1 (tensor, None): partial={tensor} (4, 16) @ (16, 16)
    r = y + x     (4, 16)             (None, None)                        all-reduce y, 256 bytes

A contraction over a split dim gives a partial sum on each device. It stays partial through linear
operations and is reduced once, directly into the sharding that its reader needs.

The shardings of the arguments, the annotations in the function and the wanted result shardings are
given. All others are chosen to send the fewest bytes, with a preference for not moving parameters.

Values that depend on a device's own rows are `data_varying`. Parameters may be split over `data`
(ZeRO): they are gathered at each use with a data-varying value and dropped afterwards.

`Partitioner._equation` decides what is not an operator: calls, loops (`partition/loops.py`),
branches (`partition/branches.py`), annotations, and the model's own `jax.shard_map`.

Within `Resharder.planning()` it executes nothing, and then needs no `jax.shard_map`: it gives the
shardings of results and what is sent, on a mesh of any size.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import jax
from jax import lax
from jax.extend.core import Jaxpr, Literal
from jax.sharding import Mesh
from jaxtyping import Array, PyTree

from plurax import errors
from plurax.jaxpr.annotate import OverContext
from plurax.jaxpr.at_experts import AT_EXPERTS
from plurax.jaxpr.barrier import order_after_cotangent, pick_dependency
from plurax.jaxpr.compat import ANNOTATIONS, REMAT, called_jaxpr, is_recomputed, open_jaxpr
from plurax.jaxpr.interpret import FlatEquations, flat_equations, holds, needed, source_line
from plurax.jaxpr.loop_constants import broadcasts_inside
from plurax.jaxpr.slices import of_whole
from plurax.mesh import within
from plurax.partition.annotation_resolver import AnnotationResolver, NameRule
from plurax.partition.branches import Branches, cpu_branch
from plurax.partition.buckets import computed_at, together
from plurax.partition.gathers import Gathers, gathers_parameters
from plurax.partition.gradient_sums import SumsFirst
from plurax.partition.grown import Grown
from plurax.partition.lookahead import Lookahead
from plurax.partition.loops import Loop, While
from plurax.partition.manual import eval_manual_body
from plurax.partition.operators import RULES, by_default, by_own_rows
from plurax.partition.partial_sums import SUMS, shrinking
from plurax.partition.resharder import Resharder
from plurax.partition.rule_context import RuleContext, count_readers
from plurax.partition.scopes import BY_HAND
from plurax.partition.shared_sums import counted, in_rounds
from plurax.partition.stacked_results import rows_inside
from plurax.partition.sums_apart import add_apart, terms_of_sums
from plurax.partition.values import (
    DeferredValue,
    Output,
    ShardedValue,
    ValueVersions,
    is_sharded_value,
    split_by_zero,
    zero_axes,
)
from plurax.sharding.annotations import Pinned
from plurax.sharding.axes import Axes
from plurax.sharding.spec import REPLICAS, TensorSharding

_STAYING = frozenset([AT_EXPERTS])
"""Equations whose parameters stay split over `data`: rows are sent to them."""


@final
class Partitioner(Resharder):
    """Evaluates the equations of a function on the shards of one device.

    **Arguments:** as `Resharder`'s, and

    - `named`: a function from the name of an annotation and the shape of its value to the sharding,
      or to None for no constraint.
    - `mesh`: the mesh in which the function may call `jax.shard_map` itself.
    - `sums`: whether data-varying results with a wanted sharding are sums over the devices' rows.
      By default only those are whose wanted sharding names `data`.
    - `shares_sums`: whether equations are reordered so that sums over shards are reduced together
      (`shared_sums.py`), of an update; what is computed of the batch keeps its order.
    """

    def __init__(
        self,
        axes: Axes,
        named: NameRule | None = None,
        *,
        mesh: Mesh | None = None,
        sums: bool = False,
        shares_sums: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(axes, **options)
        self.mesh, self.sums, self.shares_sums = mesh, sums, shares_sums
        self._annotations = AnnotationResolver(
            axes, named or (lambda name, shape: None), self.value
        )
        # The calls (`jit`, `custom_jvp`) that enclose the equation, outermost first.
        self._calls: list[Any] = []
        # Parameters that have met a value of the batch, by both variables.
        self._met: dict[tuple[Any, Any], ShardedValue] = {}
        # Whether what is evaluated is the body of a loop over layers, or a part that is recomputed,
        # and the most bytes of split parameters that a function had.
        self.over_layers, self.recomputes, self.parameter_bytes = False, False, 0
        # Of a part that is recomputed, the parameters that are whole, by its variables.
        self.still_whole: dict[Any, ShardedValue] | None = None

    def line(self, eqn: Any) -> str:
        """Return the line of the model's code that holds an equation or an enclosing call."""
        return source_line((*self._calls, eqn))

    # --- Evaluating ---------------------------------------------------------------------------

    def traced(self, fun: Callable[..., Any], *args: PyTree) -> tuple[Any, PyTree]:
        """Trace a function to a closed jaxpr, and return it with the shapes of the results.

        The trace runs outside of `shard_map`, because the model may call it over the same axes.
        """
        outside = within(self.mesh, fun) if self.mesh is not None else fun
        return jax.make_jaxpr(outside, return_shape=True)(*args)

    def evaluate(
        self,
        jaxpr: Jaxpr,
        consts: Sequence[Any],
        args: Sequence[ValueVersions],
        wanted: Sequence[TensorSharding | None] | None = None,
        *,
        with_sizes: bool = False,
        ahead: Sequence[Callable[[ShardedValue], list[TensorSharding]]] = (),
        later: Sequence[int | None] = (),
    ) -> list[ValueVersions]:
        """Evaluate a jaxpr's equations in order.

        `wanted` gives the shardings of the results, None for no constraint. A data-varying result
        whose wanted sharding names `data` is a sum over the devices' rows; with `sums` all are.
        `with_sizes` says whose rows results have (`OwnRows`) where the sizes are a result, too;
        `ahead` in which shardings each result, a partial sum, is met (`lookahead.py`); `later` how
        many numbers are reduced where it is read, if it may stay one (`partial_sums.py`).
        """
        known = dict(zip(jaxpr.constvars, map(self.constant, consts), strict=True))
        known.update(zip(jaxpr.invars, args, strict=True))
        options: Any = {"with_sizes": with_sizes, "ahead": ahead, "later": later}
        return self.evaluate_part(jaxpr.eqns, known, jaxpr.outvars, wanted, **options)

    def evaluate_part(
        self,
        eqns: Sequence[Any],
        known: Mapping[Any, ValueVersions],
        results: Sequence[Any],
        wanted: Sequence[TensorSharding | None] | None = None,
        *,
        with_sizes: bool = False,
        ahead: Sequence[Callable[[ShardedValue], list[TensorSharding]]] = (),
        later: Sequence[int | None] = (),
    ) -> list[ValueVersions]:
        """Evaluate those of some equations on which `results` depend, given the `known` values."""
        inside, outer, self._met = len(self._calls), self._met, {}
        whole, self.still_whole = self.still_whole, None
        # Readers are counted, and buckets are filled, across calls: all equations in one list.
        flat = flat_equations(eqns, results, known)
        here = {**known, **{var: self.constant(value) for var, value in flat.constants.items()}}
        results, effects = flat.results, {id(eqn) for eqn in flat.eqns if eqn.effects}
        eqns = needed(flat.eqns, results, here, effects)
        goal = {
            var: target
            for var, target in zip(results, wanted or (), strict=False)
            if target is not None and not isinstance(var, Literal)
        }
        eqns = self._rewritten(flat, eqns, results, goal, here)
        split = gathers_parameters(self, known)
        sums = {var: to for var, to in goal.items() if split and self._is_sum(to)}
        first, grown = SumsFirst(self, eqns, results, sums, here), Grown(self, eqns, here)
        gathers = Gathers(self, eqns, here, first.eqns, whole) if split else None
        readers, less = count_readers(eqns, results), shrinking(eqns, results, later)
        pairs, terms = zip(results, ahead, strict=False), terms_of_sums(eqns, readers)
        outside = {var: met for var, met in pairs if not isinstance(var, Literal)}
        lookahead = Lookahead(eqns, here, self._annotations.ahead, outside)
        here.update((var, lookahead.of(var, one)) for var, one in known.items())
        uses = RuleContext(self.axes, self.joint, False, readers, less, terms, lookahead.shardings)

        def read(atom: Any) -> ValueVersions:
            versions = self.constant(atom.val) if isinstance(atom, Literal) else here[atom]
            if not versions.is_zero:
                return versions
            # Each reader creates its own zeros: in the sharding of its other operands they cost
            # nothing, and a partial sum meets them unreduced.
            return ValueVersions(self.zeros(versions.shape, versions.dtype))

        shares_sums = self.shares_sums and not effects
        ordered = in_rounds(eqns, here, readers, self) if shares_sums else eqns
        for index, eqn in enumerate(gathers.eqns if gathers else ordered):
            inputs = grown.inputs(eqn, [read(atom) for atom in eqn.invars])
            inputs = first.added_up(eqn, inputs)
            goals = [goal.get(var) for var in eqn.outvars]
            self._calls[inside:] = flat.calls.get(id(eqn), ())
            gathered = gathers.before(index, here, self._dependency(eqn, inputs)) if gathers else {}
            with self._executor.context(eqn):
                outputs = self._equation(eqn, inputs, goals, uses, gathered)
            for var, versions in zip(eqn.outvars, outputs, strict=True):
                here[var] = lookahead.of(var, versions)
        del self._calls[inside:]
        self._met = outer
        values = [read(atom) for atom in results]
        return [value.returned(values if with_sizes else ()) for value in values]

    def _rewritten(
        self,
        flat: FlatEquations,
        eqns: Sequence[Any],
        results: Sequence[Any],
        goals: Mapping[Any, TensorSharding],
        here: Mapping[Any, ValueVersions],
    ) -> list[Any]:
        """Return equations of the same results that cost less in parts; `goals` by result."""
        eqns = flat.replaced(broadcasts_inside(eqns, results))
        eqns = flat.replaced(of_whole(eqns, results))
        if goals:
            stacks = {var for var, target in goals.items() if self.row_goal(target)}
            whole = {var for var, value in here.items() if not self._is_partial(value)}
            eqns = flat.replaced(rows_inside(eqns, stacks, results, whole))
        return flat.replaced(counted(eqns)) if self.shares_sums else list(eqns)

    def _is_sum(self, goal: TensorSharding) -> bool:
        """Whether a data-varying result with a goal is a sum over the devices' rows."""
        return self.sums or "data" in goal.axes

    def _equation(
        self,
        eqn: Any,
        inputs: list[ValueVersions],
        goals: list[TensorSharding | None],
        uses: RuleContext,
        gathered: Mapping[Any, Output],
    ) -> list[ValueVersions]:
        """Evaluate one equation: a loop, branch, annotation, or an operator by its rule.

        `uses` says how results are read; `gathered` has the parameters that a bucket has gathered
        for it, by their variables.
        """
        name = eqn.primitive.name
        if name in REMAT:
            if is_recomputed(eqn):
                # XLA would merge the recomputation with the forward pass, and keep its values.
                inputs = self._barrier(inputs)
            ahead = [functools.partial(uses.ahead, var) for var in eqn.outvars]
            with self._with(recomputes=True):
                return self.evaluate(*called_jaxpr(eqn), inputs, goals, ahead=ahead)
        ready = [None if isinstance(v, Literal) else gathered.get(v) for v in eqn.invars]
        if name in ("scan", "while"):
            return self._loop(eqn, _with_whole(inputs, ready), goals, uses.shrinking)
        if name == "cond":
            branch = cpu_branch(eqn) if self.axes.on_cpu else None
            if branch is not None:
                return self.evaluate(*open_jaxpr(branch), inputs[1:], goals)
            return Branches(self, eqn, inputs).run()
        if name == "rows_apart":
            return self._own_rows(eqn, inputs)
        if name == "optimization_barrier":
            return self._together_known(inputs)
        if name == "order_after":
            *values, by = map(self.value, inputs)
            return list(map(ValueVersions, self.order_after(values, by.array)))
        if name in ANNOTATIONS:
            target = self._annotations.of(eqn, inputs[0])
            if target is None:
                return [inputs[0]]
            tag, value = eqn.params.get("tag"), self.reshard(inputs[0], target)
            if isinstance(tag, OverContext):
                # Places of tokens, too: what is computed from them is no parameter to be gathered.
                value = dataclasses.replace(value, is_param=False)
            # A reader that finds all its operands pinned takes them as they are given.
            return [ValueVersions(value, pinned=isinstance(tag, Pinned))]
        if name == "shard_map":
            return self._by_hand(eqn, self.together(eqn, inputs, ready))
        as_given = any(versions.pinned for versions in inputs)
        context = dataclasses.replace(uses, axes=self.axes, as_given=as_given)
        if name not in _STAYING:
            inputs = self.together(eqn, inputs, ready)
        if name in SUMS:
            total = add_apart(self, context, eqn, inputs)
            if total is not None:
                return [total]
        return self.by_rule(context, eqn, inputs)

    def by_rule(
        self, context: RuleContext, eqn: Any, inputs: list[ValueVersions]
    ) -> list[ValueVersions]:
        """Evaluate an operator by its rule."""
        rule = RULES.get(eqn.primitive.name, by_default)
        decision = by_own_rows(context, eqn, inputs) or rule(context, eqn, inputs)
        if isinstance(decision, DeferredValue):
            return [ValueVersions(decision)]
        with self.needed_by(eqn, self.line(eqn) if decision.without_rule else None):
            outputs = self.apply(decision)
        return [ValueVersions(output) for output in outputs]

    def together(
        self, eqn: Any, inputs: list[ValueVersions], ready: Sequence[Output | None]
    ) -> list[ValueVersions]:
        """Gather inputs split over `data` that meet a data-varying value in one equation.

        The gather depends on the value it meets. Otherwise XLA could hoist it, or merge it with an
        equal gather of the forward pass, and keep the whole parameter in memory in between. If a
        version exists that is not split over `data`, it is used and nothing is gathered; nor is it
        where the two have met before, since XLA would merge equal gathers after the same value.
        `ready` has the inputs that a bucket has gathered already.
        """
        after = self._dependency(eqn, inputs)
        if after is None and not any(versions.data_varying for versions in inputs):
            return inputs
        results = []
        for atom, versions in zip(eqn.invars, _with_whole(inputs, ready), strict=True):
            versions = versions if self._may_stay_split(versions) else self._without_data(versions)
            stays = self._may_stay_split(versions)
            results.append(versions if stays else self._whole(atom, versions, after))
        return results

    def _whole(
        self, atom: Any, versions: ValueVersions, after: tuple[Any, Array] | None
    ) -> ValueVersions:
        """Return a value that is not split over `data`; of one that is repeated, what is."""
        deferred = versions.deferred
        if deferred is None:
            split = split_by_zero(versions.value)
            return ValueVersions(self._gathered(atom, versions.value, after)) if split else versions
        if not (deferred.repeats and deferred.is_param and deferred.free is not None):
            return versions
        sources = (self._whole(atom, deferred.sources[0], after),)
        free = deferred.free.without(REPLICAS)
        return ValueVersions(dataclasses.replace(deferred, sources=sources, free=free))

    def _gathered(
        self, atom: Any, value: ShardedValue, after: tuple[Any, Array] | None
    ) -> ShardedValue:
        """Return a value that is split over `data`, gathered after a value of the batch."""
        if after is None:
            return self.move(value, value.sharding.without(zero_axes(value)))
        met, by = after
        if (atom, met) not in self._met:
            # The order is on the shard: the gather itself then cannot run earlier.
            (value,) = self.order_after([value], by)
            self._met[atom, met] = self.move(value, value.sharding.without(zero_axes(value)))
        return self._met[atom, met]

    def _may_stay_split(self, versions: ValueVersions) -> bool:
        """Whether a value is no parameter, and may stay split over `data` because rows are."""
        return self.joint and versions.deferred is None and not versions.is_param

    def _without_data(self, versions: ValueVersions) -> ValueVersions:
        """Drop the versions that are split over `data`, if any other version exists."""
        kept = [value for value in versions.values if not split_by_zero(value)]
        if not kept or len(kept) == len(versions.values):
            return versions
        other = ValueVersions(kept[0])
        other.values = kept
        return other

    def _dependency(self, eqn: Any, inputs: list[ValueVersions]) -> tuple[Any, Array] | None:
        """Return what an equation reads that depends on the batch: a variable and its array."""
        meets: list[tuple[Any, Array]] = []
        for atom, one in zip(eqn.invars, inputs, strict=True):
            values = one.deferred.placed if one.deferred else [one.value]
            meets += [(atom, value.array) for value in values if self.context.of_rows(value)]
        if not meets:
            return None
        by = pick_dependency([array for _, array in meets])
        return next((atom, array) for atom, array in meets if array is by)

    def _barrier(self, inputs: list[ValueVersions]) -> list[ValueVersions]:
        """Order the inputs of a recomputed function after its cotangent (see `jaxpr.barrier`)."""
        # What was reduced for a reader outside is not reduced again inside.
        values = list(map(self.stored, inputs))
        free_on_cpu = [value.is_param for value in values]
        tied = self.run(
            lambda *arrays: order_after_cotangent(arrays, free_on_cpu),
            [value.array for value in values],
            values,
        )
        return [ValueVersions(value) for value in tied]

    def _together_known(self, inputs: list[ValueVersions]) -> list[ValueVersions]:
        """Apply an optimization barrier to shards as they are; what is deferred stays so."""
        values = [one.value for one in inputs if one.deferred is None]
        arrays = [value.array for value in values]
        tied = iter(self.run(lambda *each: list(lax.optimization_barrier(each)), arrays, values))
        return [one if one.deferred else ValueVersions(next(tied)) for one in inputs]

    def _own_rows(self, eqn: Any, inputs: list[ValueVersions]) -> list[ValueVersions]:
        """Evaluate a function of rows on this device's own, where rows are a dim over `data`."""
        params = eqn.params
        with self.needed_by(eqn):
            operands = [
                self._own(versions, dim, params["devices"])
                for versions, dim in zip(inputs, params["dims"], strict=True)
            ]
        with self._with(joint=False):
            results = self.evaluate(*open_jaxpr(params["jaxpr"]), operands)
            values = list(map(self.value, results))
        return [
            ValueVersions(self._of_all_rows(value, dim, params["devices"]))
            for value, dim in zip(values, params["result_dims"], strict=True)
        ]

    def _own(self, versions: ValueVersions, dim: int | None, devices: int) -> ValueVersions:
        """Return this device's rows of a value; one without rows is no sum over `data`."""
        if dim is None and versions.is_param:
            return versions.fresh()
        dims, shape = self.context.reduced(versions).without(("data",)).dims, list(versions.shape)
        if dim is None:
            return ValueVersions(self.reshard(versions, TensorSharding(dims)))
        split = TensorSharding(dims).with_dim(dim, ("data", *dims[dim]))
        array = self.reshard(versions, split).array
        shape[dim] //= devices
        return ValueVersions(
            ShardedValue(array, tuple(shape), TensorSharding(dims), data_varying=True)
        )

    def _of_all_rows(self, value: ShardedValue, dim: int | None, devices: int) -> ShardedValue:
        """Return what devices have of their own rows as a value of all: a shard, or a summand."""
        shape = list(value.shape)
        if dim is None:
            over = {"data"} if value.data_varying else set()
            sharding = TensorSharding(value.sharding.dims, value.sharding.partial | over)
        else:
            value = self.move(value, value.sharding.without(("data",)))
            sharding = value.sharding.with_dim(dim, ("data", *value.sharding.dims[dim]))
            shape[dim] *= devices
        return ShardedValue(value.array, tuple(shape), sharding)

    # --- Loops, and the model's own shard_map --------------------------------------------------

    def _loop(
        self,
        eqn: Any,
        inputs: list[ValueVersions],
        goals: list[TensorSharding | None],
        less: Mapping[Any, int],
    ) -> list[ValueVersions]:
        """Evaluate a loop; collectives in the body of a `scan` are recorded `length` times."""
        if eqn.primitive.name == "while":
            turns = While(self, eqn, inputs)
            turns.settle()
            return turns.run()
        loop = Loop(self, eqn, inputs, goals, less)
        loop.settle()
        if loop.mixes_blocks:
            loop = Loop(self, eqn, inputs, goals, less, ring=False)
            loop.settle()
        with self.needed_by(eqn):
            start = loop.carry.start()
        return loop.run(start)

    def finish(
        self,
        results: Sequence[ValueVersions],
        goals: Sequence[TensorSharding | None],
        order: Sequence[int] | None = None,
    ) -> list[ShardedValue]:
        """Reshard results to their goals in buckets; those without a goal stay as they are.

        `order` gives for each result the index of the equation that computes it: results that
        are computed one after another share a bucket.
        """
        values, targets = [], []
        for versions, goal in zip(results, goals, strict=True):
            values.append(self.value(versions) if goal is None else self._term(versions, goal))
            targets.append(values[-1].sharding if goal is None else goal)
        apart = self.sums and self.axes.platform == "gpu"
        sent = list(map(self.rounded_to_send, values, targets))
        sums = together(self, sent, targets, order=order, apart=apart)
        return list(map(self.rounded_sum, sums, sent, values))

    def _term(self, versions: ValueVersions, target: TensorSharding) -> ShardedValue:
        """Return the version to reshard; a data-varying value becomes partial over `data`."""
        if versions.deferred is not None:
            self.create(versions, target.without(REPLICAS))
        value = versions.value
        if value.data_varying and self._is_sum(target):
            # Each device has the gradient of its own rows: together they are a partial sum.
            partial = value.sharding.partial | {"data"}
            return dataclasses.replace(
                value, sharding=TensorSharding(value.sharding.dims, partial), data_varying=False
            )
        return self.context.cheapest(versions, target)

    def row_goal(self, goal: TensorSharding | None) -> TensorSharding | None:
        """Return the goal of a stacked result's rows, if each row can be reduced alone."""
        if goal is None or not (self.sums or set(REPLICAS).intersection(goal.axes)):
            return None
        if not goal.dims or goal.dims[0]:
            return None
        return TensorSharding(goal.dims[1:])

    @staticmethod
    def _is_partial(versions: ValueVersions) -> bool:
        """Whether a value is a partial sum, which a loop would reduce before it reads rows."""
        return versions.deferred is None and bool(versions.value.sharding.partial)

    def _by_hand(self, eqn: Any, inputs: list[ValueVersions]) -> list[ValueVersions]:
        """Evaluate a `jax.shard_map` of the model: its body is already code for one device."""
        params = eqn.params
        data_varying = any(versions.data_varying for versions in inputs)
        arrays = []
        for versions, spec in zip(inputs, params["in_specs"], strict=True):
            target = self.context.of_spec(spec, len(versions.shape))
            if data_varying and "data" in target.axes:
                raise errors.by_hand_over_data(spec)
            arrays.append(self.reshard(versions, target).array)
        body, consts = open_jaxpr(params["jaxpr"])
        if not self.axes.permutes and holds(body, "ppermute"):
            raise errors.PlanError(
                "the model calls jax.lax.ppermute in its own jax.shard_map. All devices take part "
                "in a permute, but in stages, and where devices have other numbers of "
                "microbatches, only some run it, and would wait forever. Use jax.lax.all_gather, "
                "psum or all_to_all, or pipeline=1 and one number of microbatches."
            )
        specs = []
        for var, spec in zip(eqn.outvars, params["out_specs"], strict=True):
            aval, sharding = var.aval, self.context.of_spec(spec, len(var.aval.shape))
            if data_varying and "data" in sharding.axes:
                raise errors.by_hand_over_data(spec)
            specs.append(self.context.spec(aval.shape, aval.dtype, sharding, data_varying))
        with jax.named_scope(BY_HAND):
            results = self.run(
                lambda *shards: eval_manual_body(body, consts, shards), arrays, specs
            )
        return [ValueVersions(value) for value in results]


def _with_whole(
    inputs: Sequence[ValueVersions], ready: Sequence[Output | None]
) -> list[ValueVersions]:
    """Return inputs of which some have been gathered."""
    pairs = zip(inputs, ready, strict=True)
    return [one if whole is None else ValueVersions(whole) for one, whole in pairs]


def partition(
    fun: Callable[..., PyTree],
    partitioner: Partitioner,
    args: tuple[PyTree, ...],
    wanted: Callable[[PyTree], PyTree] | None = None,
    *,
    tight: bool = True,
) -> PyTree:
    """Evaluate `fun` on the shards of one device. Call it inside `jax.shard_map`.

    **Arguments:**

    - `fun`: a function of trees of arrays, written for whole tensors.
    - `partitioner`: the `Partitioner`, with the axes and the rule for annotations.
    - `args`: trees of `ShardedValue`s.
    - `wanted`: a function from the tree of the result's `jax.ShapeDtypeStruct`s to a tree of the
      same structure with each result's `TensorSharding`, or None for no constraint.
    - `tight`: whether results are resharded to `wanted`. If not, only deferred values use it.

    **Returns:** the result, a tree of `ShardedValue`s.

    Raises `PlanError` if an annotation does not fit the value it is on.
    """
    leaves, structure = jax.tree.flatten(args, is_leaf=is_sharded_value)
    like = [jax.ShapeDtypeStruct(value.shape, value.dtype) for value in leaves]
    closed, shapes = partitioner.traced(fun, *jax.tree.unflatten(structure, like))
    goals: list[Any] = []
    # A None may also be part of the tree: an absent parameter.
    given = wanted(shapes) if wanted is not None else jax.tree.map(lambda _: None, shapes)
    jax.tree.map(lambda _, goal: goals.append(goal), shapes, given)
    inputs = [ValueVersions(value) for value in leaves]
    results = partitioner.evaluate(closed.jaxpr, closed.consts, inputs, goals)
    for versions, goal in zip(results, goals, strict=True):
        # A deferred value must be created in some sharding, and its goal is the best.
        if goal is not None and versions.deferred and not tight:
            partitioner.create(versions, goal.without(REPLICAS))
    if not tight:
        goals = [None] * len(goals)
    order = computed_at(closed.jaxpr.eqns, closed.jaxpr.outvars)
    out = partitioner.finish(results, goals, order)
    return jax.tree.unflatten(jax.tree.structure(shapes), out)
