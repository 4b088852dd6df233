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

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.extend.core import Literal

from plurax.jaxpr.compat import ANNOTATIONS, ELEMENTWISE
from plurax.jaxpr.interpret import variables
from plurax.partition.values import ShardedValue, ValueVersions
from plurax.sharding.spec import TensorSharding


class Lookahead:
    """The shardings in which partial sums will be met.

    **Arguments:** the `eqns` of a function; the values `known` so far, by variable, which grow as
    equations are evaluated; `annotated`, the sharding of a value behind an annotation, or None.
    """

    def __init__(
        self,
        eqns: Sequence[Any],
        known: Mapping[Any, ValueVersions],
        annotated: Callable[[Any, ShardedValue], TensorSharding | None],
    ) -> None:
        self._eqns, self._values, self._annotated = eqns, known, annotated
        self._readers: dict[Any, list[Any]] | None = None

    def of(self, var: Any, versions: ValueVersions) -> ValueVersions:
        """Return a value that knows in which shardings it is met, if it is a partial sum."""
        if versions.deferred is None and versions.value.sharding.partial:
            versions.ahead = functools.partial(self._shardings, var, versions.value)
        return versions

    def _shardings(self, var: Any, value: ShardedValue) -> list[TensorSharding]:
        """Return in which shardings values meet `var`, or what is computed of it by entries."""
        if self._readers is None:
            self._readers = {}
            for reader in self._eqns:
                for read in variables(reader.invars):
                    self._readers.setdefault(read, []).append(reader)
        shardings, seen, left = [], set[Any](), [var]
        while left:
            for reader in self._readers.get(left.pop(), ()):
                if reader.primitive.name in ANNOTATIONS:
                    target = self._annotated(reader, value)
                    met = [target] if target is not None else []
                elif reader.primitive.name in ELEMENTWISE:
                    met = [to for atom in reader.invars for to in self._known(atom, value.shape)]
                else:
                    continue
                shardings += met
                (after,) = reader.outvars
                # What a value meets there decides how the result is sharded.
                if not met and after not in seen and after.aval.shape == value.shape:
                    seen.add(after)
                    left.append(after)
        return shardings

    def _known(self, atom: Any, shape: tuple[int, ...]) -> list[TensorSharding]:
        """Return the shardings of a value of this shape that is known, and no parameter."""
        versions = None if isinstance(atom, Literal) else self._values.get(atom)
        if versions is None or versions.deferred is not None or versions.is_param:
            return []
        shardings = [value.sharding for value in versions.values if value.shape == shape]
        return [sharding for sharding in shardings if not sharding.partial]
