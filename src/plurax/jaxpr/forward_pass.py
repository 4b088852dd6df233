"""A forward pass that is traced with what its backward pass reads, for equations with a gradient.

    results, back = jax.vjp(compute, x, w)       `back` holds arrays: of the operands, and others
    ForwardPass.of(...)                          jaxpr: x, w -> results, and those arrays
    gradient([x, w], kept, cotangents)           `back` again, of what was kept

So the passes can be two equations, with what is kept as results of the first one.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Literal

from plurax.jaxpr.interpret import constant


@dataclasses.dataclass(frozen=True, eq=False)
class ForwardPass:
    """A traced function, and how its gradient follows from what it keeps.

    **Fields:** `jaxpr`, whose results are those of the function, and then all that its backward
    function holds; `kept`, by variable the place of what is kept among them, which no operand in
    `read` is; `held` and `structure`, of the backward function.
    """

    jaxpr: Any
    kept: dict[Any, int]
    read: list[Any]
    held: list[Any]
    structure: Any

    @classmethod
    def of(cls, vjp: Callable[..., Any], avals: Sequence[Any], *, anew: int = 0) -> "ForwardPass":
        """Trace `vjp(*avals) -> (results, back)`.

        `anew`: how many of the first leaves of `avals` the backward pass does not read again.
        """
        structure: Any = None

        def keep(*operands: Any) -> Any:
            nonlocal structure
            results, back = vjp(*operands)
            leaves, structure = jax.tree.flatten(back)
            return results, leaves

        jaxpr, (results, _) = jax.make_jaxpr(keep, return_shape=True)(*avals)
        read, held = jaxpr.jaxpr.invars[anew:], jaxpr.jaxpr.outvars[len(results) :]
        kept: dict[Any, int] = {}
        for place, var in enumerate(held, len(results)):
            if not isinstance(var, Literal) and var not in read:
                kept.setdefault(var, place)
        return cls(jaxpr, kept, read, held, structure)

    def gradient(self, operands: Sequence[Any], kept: Sequence[Any], cotangents: Any) -> Any:
        """Return what the backward function does; `operands` are those in `read`."""
        known = dict(zip((*self.read, *self.kept), (*operands, *kept), strict=True))
        arrays = [constant(a) if isinstance(a, Literal) else known[a] for a in self.held]
        return jax.tree.unflatten(self.structure, arrays)(cotangents)
