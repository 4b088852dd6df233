"""Evaluate regions of a function in another way, in the bodies of its loops and calls as well.

Some transformations cut regions of equations out of a function before it is differentiated.
`regions_in_order` puts regions among the other equations; an equation that is a loop or a call is
applied to a body that is evaluated alike:

    equations of a layer          with the region {b, d}
    a = x @ w                     a
    b = exp a                     c
    c = sum x                     {b, d}    after all that it reads, before what reads it
    d = b * c                     e
    e = tanh d
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.extend.core import Literal
from jaxtyping import PyTree

from plurax.jaxpr.compat import PLAIN_CALLS, Scan, called_jaxpr, inner_jaxprs, is_plain_call
from plurax.jaxpr.interpret import (
    bind,
    constant,
    dependent,
    equation_context,
    flat_equations,
    interpret,
    needed,
    variables,
)
from plurax.jaxpr.row_by_row import row_of_result


class CutRegion(Protocol):
    """Equations that are evaluated together."""

    @property
    def results(self) -> list[Any]:
        """What others read of them."""

    def ids(self) -> set[int]:
        """Return the `id`s of the equations that the region replaces."""

    def reads(self) -> list[Any]:
        """Return all variables that the region reads."""


@dataclasses.dataclass(frozen=True)
class Body:
    """The equations in which regions are: `inputs` and `constants` of the jaxpr, `results`, and
    `of_rows`, the variables that depend on examples; `dims`, those of variables that are followed.
    """

    jaxpr: Any
    eqns: Sequence[Any]
    inputs: Sequence[Any]
    constants: Mapping[Any, Any]
    results: Sequence[Any]
    of_rows: set[Any]
    dims: Mapping[Any, int]


@dataclasses.dataclass(frozen=True)
class Regions:
    """How regions are found and evaluated.

    **Fields:** `find(body)` returns them; `apply(region, body, values)` its results, given the
    values of variables; `concerns(jaxpr)`, whether there may be any in a jaxpr.
    """

    find: Callable[[Body], Sequence[CutRegion]]
    apply: Callable[[Any, Body, Mapping[Any, Any]], Sequence[Any]]
    concerns: Callable[[Any], bool]

    def evaluate(
        self,
        jaxpr: Any,
        consts: Sequence[Any],
        args: Sequence[Any],
        of_rows: set[Any],
        dims: Sequence[int | None] = (),
    ) -> list[Any]:
        """Evaluate a jaxpr. `of_rows` are the inputs that depend on examples.

        `dims`: a dim of each of the first inputs that is followed through operations and loops.
        """
        flat = flat_equations(jaxpr.eqns, jaxpr.outvars, inline=is_plain_call)
        values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
        values.update(flat.constants)
        constants = {var: values[var] for var in (*jaxpr.constvars, *flat.constants)}
        reached = dependent(flat.eqns, of_rows)
        named = dict(zip(jaxpr.invars, dims, strict=False))
        known = {var: dim for var, dim in named.items() if dim is not None}
        followed = _followed(flat.eqns, known)
        body = Body(jaxpr, flat.eqns, jaxpr.invars, constants, flat.results, reached, followed)
        regions = self.find(body)
        if not regions and not known:  # as it is, but for what loops and calls hold
            inside = functools.partial(self._apply_inside, dependent(jaxpr.eqns, of_rows), {})
            return interpret(jaxpr, consts, args, default=inside)

        def read(atom: Any) -> Any:
            return constant(atom) if isinstance(atom, Literal) else values[atom]

        for step in regions_in_order(flat.eqns, flat.results, regions):
            if not hasattr(step, "invars"):
                values.update(zip(step.results, self.apply(step, body, values), strict=True))
                continue
            inputs = [read(atom) for atom in step.invars]
            with equation_context(step):
                outputs = self._apply_inside(reached, followed, step, inputs)
            values.update(zip(step.outvars, outputs, strict=True))
        return [read(atom) for atom in flat.results]

    def _apply_inside(
        self, of_rows: set[Any], dims: Mapping[Any, int], eqn: Any, inputs: list[Any]
    ) -> Sequence[Any]:
        """Apply an equation; bodies of loops over layers, calls and `jax.checkpoint` by regions."""
        name = eqn.primitive.name
        opened = name in ("scan", "remat2") or name in PLAIN_CALLS
        inner = inner_jaxprs(eqn) if opened else []
        if not any(map(self.concerns, inner)):
            return bind(eqn, inputs)
        flags = [not isinstance(atom, Literal) and atom in of_rows for atom in eqn.invars]
        named = [None if isinstance(atom, Literal) else dims.get(atom) for atom in eqn.invars]
        if name == "scan":
            scan = Scan.of(eqn)
            consts, carry, xs = scan.split(scan.body.invars)
            own = scan.split(flags)
            rows = {v for v, flag in zip((*consts, *xs), (*own[0], *own[2]), strict=True) if flag}
            if any(flags):
                rows.update(carry)

            of_consts, of_carry, of_xs = scan.split(named)
            layer = [dim - 1 if dim else None for dim in of_xs]
            inner_dims = [*of_consts, *(None for _ in of_carry), *layer]

            def body(*args: Any) -> list[Any]:
                return self.evaluate(scan.body, scan.body_consts, args, rows, inner_dims)

            return scan.apply(body, inputs)
        jaxpr, values = called_jaxpr(eqn)
        rows = {var for var, flag in zip(jaxpr.invars, flags, strict=True) if flag}
        if name in PLAIN_CALLS:
            return self.evaluate(jaxpr, values, inputs, rows, named)
        kept = {name: eqn.params[name] for name in ("prevent_cse", "policy")}
        return jax.checkpoint(
            lambda *args: self.evaluate(jaxpr, values, args, rows, named), **kept
        )(*inputs)


def _followed(eqns: Sequence[Any], dims: Mapping[Any, int]) -> dict[Any, int]:
    """Return where the dims of variables are in what is computed of them, apart from others."""
    followed = dict(dims)
    for eqn in eqns if dims else ():
        for place, atom in enumerate(eqn.invars):
            if not isinstance(atom, Literal) and atom in followed:
                dim = row_of_result(eqn, place, followed[atom])
                if dim is not None:
                    followed.update(dict.fromkeys(eqn.outvars, dim))
    return followed


def by_jaxpr(
    fun: Callable[..., PyTree], evaluate: Callable[..., list[Any]]
) -> Callable[..., PyTree]:
    """Return the same function, its jaxpr evaluated by `evaluate(jaxpr, consts, args, of_rows)`.

    Its first argument is the parameters; the others depend on examples.
    """

    @functools.wraps(fun)
    def run(*args: PyTree) -> PyTree:
        closed, shapes = jax.make_jaxpr(fun, return_shape=True)(*args)
        leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(args)]
        of_rows = set(closed.jaxpr.invars[len(jax.tree.leaves(args[0])) :])
        out = evaluate(closed.jaxpr, closed.consts, leaves, of_rows)
        return jax.tree.unflatten(jax.tree.structure(shapes), out)

    return run


def regions_in_order(
    eqns: Sequence[Any], results: Sequence[Any], regions: Sequence[CutRegion]
) -> list[Any]:
    """Return equations and regions, each after what it reads, else in their order.

    What only a region needs is left out.
    """
    inside = {number for region in regions for number in region.ids()}
    known = {var for region in regions for var in region.results}
    read = [*results, *(var for region in regions for var in region.reads())]
    rest = [eqn for eqn in eqns if id(eqn) not in inside]
    used = {id(eqn) for eqn in needed(rest, read, known, {id(e) for e in rest if e.effects})}
    steps: list[Any] = [eqn for eqn in eqns if id(eqn) in used or id(eqn) in inside]
    for region in regions:
        mine = region.ids()
        places = [index for index, step in enumerate(steps) if id(step) in mine]
        start, end = places[0], places[-1] + 1
        others = [step for step in steps[start:end] if id(step) not in mine]
        reached, before, behind = set(region.results), [], []
        for step in others:
            if hasattr(step, "invars"):
                reads, writes = variables(step.invars), step.outvars
            else:
                reads, writes = step.reads(), step.results
            if reached.isdisjoint(reads):
                before.append(step)
            else:
                behind.append(step)
                reached.update(writes)
        steps[start:end] = [*before, region, *behind]
    return steps
