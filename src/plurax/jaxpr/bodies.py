"""Apply what a transformation does to a function to the bodies of its loops and calls as well.

Some transformations cut a region of equations out of a function and evaluate it in another way.
`regions_in_order` puts regions among the other equations; `apply_bodies` evaluates an equation that
is a loop or a call, in whose body there may be regions too:

    equations of a layer          with the region {b, d}
    a = x @ w                     a
    b = exp a                     c
    c = sum x                     {b, d}    after all that it reads, before what reads it
    d = b * c                     e
    e = tanh d
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
from jax.extend.core import Literal

from plurax.jaxpr.compat import PLAIN_CALLS, Scan, called_jaxpr, inner_jaxprs
from plurax.jaxpr.interpret import bind, needed, variables


class CutRegion(Protocol):
    """Equations that are evaluated together."""

    @property
    def results(self) -> list[Any]:
        """What others read of them."""

    def ids(self) -> set[int]:
        """Return the `id`s of the equations that the region replaces."""

    def reads(self) -> list[Any]:
        """Return all variables that the region reads."""


def apply_bodies(
    eqn: Any,
    inputs: list[Any],
    of_rows: set[Any],
    evaluate: Callable[..., list[Any]],
    concerns: Callable[[Any], bool],
) -> Sequence[Any]:
    """Apply an equation; bodies of loops over layers, calls and `jax.checkpoint` by `evaluate`.

    **Arguments:** `of_rows`, the variables that depend on examples; `evaluate(jaxpr, consts, args,
    of_rows)` returns the results of a body, of whose inputs `of_rows` depend on examples;
    `concerns`, whether a body has anything to be evaluated in another way.
    """
    name = eqn.primitive.name
    opened = name in ("scan", "remat2") or name in PLAIN_CALLS
    inner = inner_jaxprs(eqn) if opened else []
    if not any(map(concerns, inner)):
        return bind(eqn, inputs)
    flags = [not isinstance(atom, Literal) and atom in of_rows for atom in eqn.invars]
    if name == "scan":
        scan = Scan.of(eqn)
        consts, carry, xs = scan.split(scan.body.invars)
        own = scan.split(flags)
        rows = {v for v, flag in zip((*consts, *xs), (*own[0], *own[2]), strict=True) if flag}
        if any(flags):
            rows.update(carry)

        def body(*args: Any) -> list[Any]:
            return evaluate(scan.body, scan.body_consts, args, rows)

        return scan.apply(body, inputs)
    jaxpr, values = called_jaxpr(eqn)
    rows = {var for var, flag in zip(jaxpr.invars, flags, strict=True) if flag}
    if name in PLAIN_CALLS:
        return evaluate(jaxpr, values, inputs, rows)
    kept = {name: eqn.params[name] for name in ("prevent_cse", "policy")}
    return jax.checkpoint(lambda *args: evaluate(jaxpr, values, args, rows), **kept)(*inputs)


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
