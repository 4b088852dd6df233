"""Where a partial sum is split by what follows: reduce it to that.

An equation that is not linear needs a partial sum reduced, and its other operands may not say how.
What follows often does: equations that work entry by entry, then a value that is split.

    mesh tensor=4; float32; x (8, 64) is split as (tensor, None), the plan's tokens; the bias b is
    whole; y (8, 64) is a partial sum, the result of a row-parallel layer

    equation       by its operands alone          by what follows
    h = y + b      y all-reduced, 3072 bytes      y reduce-scattered to (tensor, None), 1536 bytes
    r = h + x      a slice of h                   as they are

Never more is sent: what else reads the result gathers what an all-reduce would have gathered.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.extend.core import Literal

from plurax.jaxpr.compat import ANNOTATIONS, ELEMENTWISE, REMAT, called_jaxpr
from plurax.jaxpr.interpret import flat_equations, variables
from plurax.partition.values import ShardedValue, ValueVersions
from plurax.sharding.spec import TensorSharding

_BY_ENTRY = ELEMENTWISE | ANNOTATIONS


class Lookahead:
    """The shardings in which partial sums will be met.

    **Arguments:** the `eqns` of a function; the values `known` so far, by variable, which grow as
    equations are evaluated; `annotated`, the sharding of a value behind an annotation, or None;
    `outside`, by result of the function, in which shardings it is met outside of it.
    """

    def __init__(
        self,
        eqns: Sequence[Any],
        known: Mapping[Any, ValueVersions],
        annotated: Callable[[Any, ShardedValue], TensorSharding | None],
        outside: Mapping[Any, Callable[[ShardedValue], list[TensorSharding]]],
    ) -> None:
        self._eqns, self._values, self._annotated = eqns, known, annotated
        self._outside = outside
        self._readers: dict[Any, list[Any]] = {}
        self._makers: dict[Any, Any] = {}

    def of(self, var: Any, versions: ValueVersions) -> ValueVersions:
        """Return a value that knows in which shardings it is met, if it is a partial sum."""
        if versions.deferred is None and versions.value.sharding.partial:
            # An argument of a recomputed part is met outside of it, too.
            outside, value = versions.ahead, versions.value
            versions.ahead = lambda: [*self.shardings(var, value), *outside()]
        return versions

    def shardings(self, var: Any, value: ShardedValue) -> list[TensorSharding]:
        """Return in which shardings values meet `var`, or what is computed of it by entries."""
        if not self._readers:
            for eqn in self._eqns:
                self._makers.update(dict.fromkeys(eqn.outvars, eqn))
                for read in variables(eqn.invars):
                    self._readers.setdefault(read, []).append(eqn)
        shardings, seen, left = [], {var}, [var]
        while left:
            read = left.pop()
            if read in self._outside:
                shardings += self._outside[read](value)
            for reader in self._readers.get(read, ()):
                if reader.primitive.name in REMAT:
                    shardings += self._inside(reader, read, value)
                met = self._behind(reader, value, seen)
                shardings += met
                if reader.primitive.name in _BY_ENTRY and not met:
                    # What a value meets there decides how the result is sharded.
                    (after,) = reader.outvars
                    if after not in seen and after.aval.shape == value.shape:
                        seen.add(after)
                        left.append(after)
        return shardings

    def _inside(self, eqn: Any, var: Any, value: ShardedValue) -> list[TensorSharding]:
        """Return in which shardings a recomputed part that reads a variable meets it."""
        body, _ = called_jaxpr(eqn)
        pairs = [*zip(body.invars, eqn.invars, strict=True)]
        known = {
            own: self._values[atom]
            for own, atom in pairs
            if not isinstance(atom, Literal) and atom in self._values
        }
        eqns = flat_equations(body.eqns, body.outvars).eqns
        inside = Lookahead(eqns, known, self._annotated, {})
        return [to for own, atom in pairs if atom is var for to in inside.shardings(own, value)]

    def _behind(self, eqn: Any, value: ShardedValue, seen: set[Any]) -> list[TensorSharding]:
        """Return how the result of an equation is split by what else it reads, or annotates."""
        if eqn.primitive.name in ANNOTATIONS:
            target = self._annotated(eqn, value)
            if target is not None:
                return [target]
        if eqn.primitive.name not in _BY_ENTRY:
            return []
        return [to for atom in variables(eqn.invars) for to in self._of(atom, value, seen)]

    def _of(self, var: Any, value: ShardedValue, seen: set[Any]) -> list[TensorSharding]:
        """Return how a variable of the value's shape is, or will be, split; not of a parameter.

        A whole value says nothing of what follows: each device slices it for free.
        """
        versions = self._values.get(var)
        if versions is None and var in self._makers and var not in seen:
            # A cotangent is computed after what it meets in a recomputed part.
            seen.add(var)
            return self._behind(self._makers[var], value, seen)
        if versions is None or versions.deferred is not None or versions.is_param:
            return []
        shardings = [one.sharding for one in versions.values if one.shape == value.shape]
        return [one for one in shardings if one.axes and not one.partial]
