"""What an operator rule knows beside its operands: the axes, and what resharding costs."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from plurax.jaxpr.compat import ANNOTATIONS
from plurax.jaxpr.interpret import variables
from plurax.partition.values import (
    Decision,
    DeferredValue,
    ShardedValue,
    ValueVersions,
)
from plurax.sharding.annotations import Pinned
from plurax.sharding.axes import Axes
from plurax.sharding.reshard import ReshardStep, plan_reshard, wire_bytes
from plurax.sharding.spec import REPLICAS, TensorSharding


@dataclasses.dataclass(frozen=True)
class RuleContext:
    """The axes of the mesh for operator rules, and the cost of resharding over them.

    **Fields:**

    - `axes`: over which tensors are split.
    - `joint`: whether the batch is one dim split over `data`.
    - `as_given`: whether a rule that can compute from the operands' shardings as they are does so,
      whatever it sends.
    - `readers`: how often the equations of the jaxpr read each variable (`count_readers`); without
      an entry, once.
    - `shrinking`: variables of which, left partial sums, less is reduced later, and how many
      numbers (`partial_sums.py`).
    - `terms`: variables that are read once, as a term of a sum (`terms_of_sums`).
    - `ahead`: a function of a variable and its value, of the shardings in which that is met.

    >>> context = RuleContext(Axes({"tensor": 4}))
    >>> value = context.spec((8, 64), jnp.float32, TensorSharding.of(None, "tensor"))
    >>> value.array.shape
    (8, 16)
    >>> context.cost(ValueVersions(value), TensorSharding.replicated(2))
    1536.0
    """

    axes: Axes
    joint: bool = False
    as_given: bool = False
    readers: Mapping[Any, int] = dataclasses.field(default_factory=dict)
    shrinking: Mapping[Any, int] = dataclasses.field(default_factory=dict)
    terms: Set[Any] = frozenset()
    ahead: Callable[[Any, ShardedValue], list[TensorSharding]] = lambda var, value: []

    def num_readers(self, atom: Any) -> int:
        """Return how often the jaxpr's equations read a variable; 1 for a literal."""
        return 1 if isinstance(atom, Literal) else self.readers.get(atom, 1)

    def spec(
        self,
        shape: tuple[int, ...],
        dtype: Any,
        sharding: TensorSharding,
        data_varying: bool = False,
        is_param: bool = False,
    ) -> ShardedValue:
        """Return a value without an array: in its place, the shape and dtype of a shard."""
        shard = jax.ShapeDtypeStruct(sharding.shard_shape(shape, self.axes.sizes), dtype)
        return ShardedValue(shard, tuple(shape), sharding, data_varying, is_param)

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> DeferredValue:
        """Return zeros whose sharding is chosen by the first reader."""

        def decide(context: RuleContext, _: Any, sharding: TensorSharding) -> Decision:
            spec = context.spec(shape, dtype, sharding, is_param=True)
            return Decision((), (spec,), lambda: [jnp.zeros(spec.array.shape, dtype)])

        return DeferredValue(tuple(shape), dtype, decide, zero=True, is_param=True)

    def first(self, versions: ValueVersions) -> ShardedValue:
        """Return the first version; of a deferred value, the one that would be created."""
        deferred = versions.deferred
        if deferred is None:
            return versions.value
        return deferred.decide(self, deferred.sources, deferred.default_sharding).outputs[0]

    def reduced(self, versions: ValueVersions) -> TensorSharding:
        """Return the sharding of the first version that is no partial sum.

        If there is none, that of the first version, reduced to where it is met split further on.
        """
        for value in versions.values:
            if not value.sharding.partial:
                return value.sharding
        whole = TensorSharding(self.first(versions).sharding.dims)
        options = [whole, *self._scattered(versions)]
        return min(options, key=lambda option: self.cost(versions, option))

    def _scattered(self, versions: ValueVersions) -> list[TensorSharding]:
        """Return the shardings to which a partial sum is reduce-scattered, by what follows on it.

        Over `data` and `context` the rows and tokens of a value are split as they are.
        """
        if versions.deferred is not None:
            return []
        now = versions.value.sharding
        axes = now.partial.difference(REPLICAS)
        options = []
        for sharding in versions.ahead() if axes else ():
            dims = zip(now.dims, sharding.dims, strict=True)
            both = TensorSharding(tuple((*e, *(a for a in to if a in axes)) for e, to in dims))
            if both.axes != now.axes and not both.indivisible_dims(versions.shape, self.axes.sizes):
                options.append(both)
        return options

    def is_filled(self, value: ShardedValue) -> bool:
        """Whether devices do not divide a dim of a value, whose last shards are filled up."""
        return bool(value.sharding.indivisible_dims(value.shape, self.axes.sizes))

    def of_rows(self, value: ShardedValue) -> bool:
        """Whether a value depends on the batch, so that parameters are gathered to meet it."""
        return value.data_varying or (self.joint and not value.is_param)

    def of_spec(self, spec: Any, rank: int) -> TensorSharding:
        """Return a spec's sharding, without axes of one device, with mesh axes split into parts."""
        whole = TensorSharding.from_spec(spec, rank)
        dims = (tuple(a for a in entry if a in self.axes.mesh) for entry in whole.dims)
        return self.axes.expanded(TensorSharding(tuple(dims)))

    def of_parameters(self, value: ShardedValue) -> bool:
        """Whether a value is split as ZeRO does, and must be gathered to meet the batch."""
        by_zero = value.is_param and not set(REPLICAS).isdisjoint(value.sharding.axes)
        return by_zero or ("data" in value.sharding.axes and not self.joint)

    def steps(self, value: ShardedValue, target: TensorSharding) -> list[ReshardStep]:
        """Return the steps that reshard a value."""
        if value.sharding == target:
            return []
        avoid = frozenset({"data"}) if value.data_varying else frozenset()
        size: int = value.dtype.itemsize
        return plan_reshard(value.sharding, target, value.shape, size, self.axes, avoid)

    def cost(self, versions: ValueVersions, target: TensorSharding) -> float:
        """Return the bytes that each device sends to reshard a value."""
        if versions.deferred is not None or versions.is_zero:
            return 0.0
        return wire_bytes(self.steps(self.cheapest(versions, target), target))

    def cheapest(self, versions: ValueVersions, target: TensorSharding) -> ShardedValue:
        """Return the version from which a sharding is reached with the fewest bytes.

        A partial sum cannot be restored: only versions that still are one can be left one.
        """
        able = [one for one in versions.values if target.partial <= one.sharding.partial]
        if len(able) == 1:
            return able[0]
        return min(able, key=lambda one: wire_bytes(self.steps(one, target)))


def count_readers(eqns: Sequence[Any], results: Sequence[Any]) -> dict[Any, int]:
    """Return how often equations read each variable; being a result is one more reader.

    Counted before the first equation is evaluated, so that a rule depends on the jaxpr and not on
    what was evaluated before.
    """
    readers = Counter(variables(results))
    for eqn in eqns:
        readers.update(variables(eqn.invars))
    for eqn in eqns:
        pinned = isinstance(eqn.params.get("tag"), Pinned)
        if eqn.primitive.name in ANNOTATIONS and variables(eqn.invars) and not pinned:
            # Without a constraint the result is its input: the readers of both add up.
            readers[eqn.outvars[0]] += readers[eqn.invars[0]] - 1
    return readers
