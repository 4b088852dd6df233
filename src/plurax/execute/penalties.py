"""Penalties: what a loss adds for its parameters alone, such as the squares of all weights.

A device's gradient is that of its rows, and gradients are added up over rows and devices. The part
of a penalty in it is a number times the penalty's own gradient:

    def loss(params, batch, keys):                   # w (48, 4096, 4096), split over 64 devices
        penalty = 1e-4 * jnp.sum(params["w"] ** 2)   # float32[], of parameters alone
        return errors(params, batch) + penalty       # (B,)

    by      the loss's derivative by the penalty, of a device's rows       float32[]
    part    by * 1e-4 * 2 w, then added up over devices                    w is gathered, 3.2 GB
    same    by, added up over devices, then * 1e-4 * 2 w on their shards   4 bytes are sent

So the derivatives by penalties are added up as the loss is, and multiplied once per step. The
gradient of `w` by the rows is then no term of a sum, and reduced where a loop computes it.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr
from jaxtyping import Array, PyTree

from plurax.freezing import trained, with_frozen
from plurax.jaxpr.compat import is_plain_call
from plurax.jaxpr.interpret import FlatEquations, bind, evaluate, flat_equations, needed, variables

PENALTIES = "plurax.penalties"
"""The name under which `Totals.metrics` has the loss's derivatives by its penalties."""

_SUMS = frozenset(["reduce_sum", "reduce_max", "reduce_min", "dot_general"])


@final
@dataclasses.dataclass(frozen=True)
class PenalizedLoss:
    """A traced loss, and its penalties.

    **Fields:** `flat`, its equations; `known`, the values of constants; `inputs`, its variables;
    `parameters`, how many of them are parameters; `structure`, of its result; `penalties`, the
    variables of the penalties.
    """

    flat: FlatEquations
    known: Mapping[Any, Any]
    inputs: Sequence[Any]
    parameters: int
    structure: Any
    penalties: Sequence[Any]

    @classmethod
    def of(cls, loss: Callable[..., PyTree], params: PyTree, *rest: PyTree) -> "PenalizedLoss":
        """Trace a loss of parameters and others."""
        closed, shapes = jax.make_jaxpr(loss, return_shape=True)(params, *rest)
        jaxpr, parameters = closed.jaxpr, len(jax.tree.leaves(params))
        flat = _flat(jaxpr)
        known = dict(zip(jaxpr.constvars, closed.consts, strict=True)) | flat.constants
        penalties = _penalties(jaxpr, parameters, flat)
        structure = jax.tree.structure(shapes)
        return cls(flat, known, jaxpr.invars, parameters, structure, penalties)

    def offsets(self) -> list[Array]:
        """Return zeros, one for each penalty."""
        return [jnp.zeros(var.aval.shape, var.aval.dtype) for var in self.penalties]

    def with_offsets(self, offsets: Sequence[Array]) -> Callable[..., PyTree]:
        """Return the loss with constants in place of its penalties, plus these offsets: its
        derivative by an offset is that by the penalty."""
        by = dict(zip(self.penalties, offsets, strict=True))

        def offset(eqn: Any, inputs: list[Any]) -> list[Any]:
            pairs = zip(eqn.outvars, bind(eqn, inputs), strict=True)
            return [lax.stop_gradient(out) + by[var] if var in by else out for var, out in pairs]

        def loss(*args: PyTree) -> PyTree:
            inputs = dict(zip(self.inputs, jax.tree.leaves(args), strict=True))
            results = evaluate(
                self.flat.eqns, {**self.known, **inputs}, self.flat.results, default=offset
            )
            return jax.tree.unflatten(self.structure, results)

        return loss

    def values(self, params: PyTree) -> list[Array]:
        """Return the penalties of parameters."""
        leaves = jax.tree.leaves(params)
        known = {**self.known, **dict(zip(self.inputs[: self.parameters], leaves, strict=True))}
        return evaluate(needed(self.flat.eqns, self.penalties, known), known, self.penalties)


def penalized_gradients(
    loss: Callable[..., PyTree], arguments: tuple[PyTree, ...], frozen: Sequence[str]
) -> Callable[[PyTree, PyTree, list[Array]], PyTree]:
    """Return `(params, grads, by) -> grads` with the gradients of a loss's penalties added.

    **Arguments:** `arguments` of the loss, as `jax.ShapeDtypeStruct`s; `by`, its derivatives by the
    penalties, scalars, summed up over all rows.
    """

    def added(params: PyTree, grads: PyTree, by: list[Array]) -> PyTree:
        penalized = PenalizedLoss.of(loss, params, *arguments[1:])
        values, pull_back = jax.vjp(
            lambda some: penalized.values(with_frozen(some, params)), trained(frozen, params)
        )
        cotangents = [a.astype(value.dtype) for a, value in zip(by, values, strict=True)]
        (more,) = pull_back(cotangents)
        return jax.tree.map(lambda a, b: a + b.astype(a.dtype), grads, more)

    return added


def has_penalties(jaxpr: Jaxpr, params: PyTree) -> bool:
    """Whether a loss, of which the first inputs are parameters, has penalties."""
    return bool(_penalties(jaxpr, len(jax.tree.leaves(params)), _flat(jaxpr)))


def _penalties(jaxpr: Jaxpr, parameters: int, flat: FlatEquations) -> list[Any]:
    """Return the variables of penalties: numbers that parameters and constants alone determine,
    summed up from more, where they meet the batch."""
    constants = {*jaxpr.constvars, *flat.constants}
    alone: set[Any] = {*jaxpr.invars[:parameters]}
    sums: dict[Any, None] = {}  # in their order
    rest: set[Any] = set()  # what equations of the batch read
    for eqn in flat.eqns:
        read = {*variables(eqn.invars)}
        if not eqn.effects and read <= constants:
            constants.update(eqn.outvars)
            continue
        small = _size(eqn.outvars) == 1
        repeats = read <= {*sums, *constants} and not small
        if eqn.effects or repeats or not read <= alone | constants:
            rest |= read
            continue
        alone.update(eqn.outvars)
        summed = eqn.primitive.name in _SUMS and _size(read) > 1
        if small and (summed or not read.isdisjoint(sums)):
            sums.update(dict.fromkeys(eqn.outvars))
    return [var for var in sums if var in rest and jnp.issubdtype(var.aval.dtype, jnp.floating)]


def _flat(jaxpr: Jaxpr) -> FlatEquations:
    return flat_equations(jaxpr.eqns, jaxpr.outvars, inline=is_plain_call)


def _size(variables_: Any) -> int:
    return max((math.prod(var.aval.shape) for var in variables_), default=0)
