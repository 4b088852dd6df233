"""Cutting a traced model into stages at the marks of `plurax.stage_boundary`.

An equation that depends on parameters and on rows belongs to a stage: that of what it reads, one
further behind each mark. What depends on only one of both is computed wherever it is read. From
stage to stage is handed what an earlier one computes and a later one reads.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Jaxpr, Literal
from jaxtyping import Array, PyTree

from plurax import errors
from plurax.pipeline.network import Edge, Network
from plurax.primitives import INLINED, constant, inner_jaxprs, open_jaxpr
from plurax.sharding.divide import Divider
from plurax.sharding.marks import Boundary
from plurax.sharding.operators.common import bind


def inlined(jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any], *, every: bool) -> list[Any]:
    """The results of a traced function, its calls evaluated in place: every one, or those with
    marks."""
    known: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    known.update(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return constant(atom) if isinstance(atom, Literal) else known[atom]

    for eqn in jaxpr.eqns:
        inputs = [read(atom) for atom in eqn.invars]
        name = eqn.primitive.name
        marked = any(map(_has_mark, inner_jaxprs(eqn)))
        calls = name in ("jit", "pjit", "closed_call", "core_call")
        if marked and not calls:
            raise errors.boundary_in_loop(name)
        if calls and (marked or every):
            outputs = inlined(*open_jaxpr(eqn.params[INLINED[name]]), inputs, every=every)
        else:
            outputs = bind(eqn, inputs)
        known.update(zip(eqn.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _has_mark(jaxpr: Any) -> bool:
    return any(
        isinstance(eqn.params.get("tag"), Boundary) or any(map(_has_mark, inner_jaxprs(eqn)))
        for eqn in jaxpr.eqns
    )


def has_boundaries(jaxpr: Any) -> bool:
    """Whether a traced model has marks at which it can be cut."""
    return _has_mark(jaxpr)


class Cut:
    """A traced function `(params, rows) -> (y, aux)` cut into stages.

    **Arguments:** `closed` jaxpr with `count` parameters first; `outputs`, the structure of
    `(y, aux)`; `stages`; `divider`, in whose mesh it was traced.

    Raises `PlanError` where there are too few marks, or one stands in a loop.
    """

    def __init__(
        self, closed: Any, count: int, outputs: Any, stages: int, divider: Divider
    ) -> None:
        body, consts = open_jaxpr(closed)
        avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in body.invars]
        flat, _ = divider.traced(lambda *args: inlined(body, consts, args, every=False), *avals)
        self._jaxpr, self._consts = open_jaxpr(flat)
        self._count, self._outputs = count, outputs
        marks = {id(e.params["tag"]) for e in self._jaxpr.eqns if _is_boundary(e)}
        if len(marks) + 1 < stages:
            raise errors.too_few_boundaries(len(marks), stages)
        pieces = len(marks) + 1
        self._stage = {var: depth * stages // pieces for var, depth in self._depths().items()}
        self.stages = stages
        self._handed = self._handed_on()

    def network(self) -> Network:
        """The network, a stage being one `Edge`."""
        edges = {stage: self._edge(stage) for stage in range(self.stages)}
        return Network(edges, None, self.stages)

    def _depths(self) -> dict[Any, int]:
        """For each variable that belongs to a stage, behind how many marks it is."""
        params = set(self._jaxpr.invars[: self._count])
        rows = set(self._jaxpr.invars[self._count :])
        tied = {var: (var in params, var in rows) for var in self._jaxpr.invars}
        depth: dict[Any, int] = {}
        seen: dict[int, int] = {}
        for eqn in self._jaxpr.eqns:
            read = [a for a in eqn.invars if not isinstance(a, Literal)]
            both = [tied.get(a, (False, False)) for a in read]
            here = (any(p for p, _ in both), any(r for _, r in both))
            at = max((depth[a] for a in read if a in depth), default=0)
            if _is_boundary(eqn):
                tag = id(eqn.params["tag"])
                at = seen.setdefault(tag, at + 1)
            for var in eqn.outvars:
                tied[var] = here
                if all(here):
                    depth[var] = at
        # What no mark precedes is computed where it is first read.
        first: dict[Any, int] = {}
        ends = max(depth.values(), default=0)
        for var in self._jaxpr.outvars:
            if not isinstance(var, Literal):
                first[var] = ends
        for eqn in reversed(self._jaxpr.eqns):
            ours = [var for var in eqn.outvars if var in depth]
            for var in ours:
                if depth[var] == 0:
                    depth[var] = (
                        min(first.get(v, 0) for v in ours if v in first)
                        if any(v in first for v in ours)
                        else 0
                    )
            if ours:
                at = max(depth[var] for var in ours) - _is_boundary(eqn)
                for atom in eqn.invars:
                    if not isinstance(atom, Literal):
                        first[atom] = min(first.get(atom, at), at)
        return depth

    def _handed_on(self) -> list[list[Any]]:
        """For each cut what passes it."""
        last: dict[Any, int] = {}
        for eqn in self._jaxpr.eqns:
            stages = [self._stage[v] for v in eqn.outvars if v in self._stage]
            for atom in eqn.invars:
                if not isinstance(atom, Literal) and atom in self._stage and stages:
                    last[atom] = max(last.get(atom, 0), *stages)
        for atom in self._jaxpr.outvars:
            if not isinstance(atom, Literal) and atom in self._stage:
                last[atom] = self.stages - 1
        cuts = [
            [v for v, at in self._stage.items() if at <= cut < last.get(v, 0)]
            for cut in range(self.stages - 1)
        ]
        for var in {var for cut in cuts for var in cut}:
            if not jax.numpy.issubdtype(var.aval.dtype, jax.numpy.floating):
                raise errors.boundary_not_floating(str(var.aval.dtype), var.aval.shape)
        return cuts

    def _edge(self, stage: int) -> Edge:
        before = self._handed[stage - 1] if stage > 0 else []
        last = stage == self.stages - 1
        results = list(self._jaxpr.outvars) if last else self._handed[stage]
        eqns = _needed(self._jaxpr.eqns, results, set(before))
        read = {a for eqn in eqns for a in eqn.invars if not isinstance(a, Literal)}
        read |= {a for a in results if not isinstance(a, Literal)}
        params = self._jaxpr.invars[: self._count]
        leaves = tuple(place for place, var in enumerate(params) if var in read)
        fun = self._part(stage, eqns, leaves, before, results)
        return Edge(fun, leaves)

    def _part(
        self, stage: int, eqns: list[Any], leaves: tuple[int, ...], before: list[Any], results: Any
    ) -> Callable[[Sequence[Array], Any, PyTree], tuple[Any, Any]]:
        jaxpr, last = self._jaxpr, stage == self.stages - 1

        def part(params: Sequence[Array], x: Any, rest: PyTree) -> tuple[Any, Any]:
            known: dict[Any, Any] = dict(zip(jaxpr.constvars, self._consts, strict=True))
            known.update(zip((jaxpr.invars[leaf] for leaf in leaves), params, strict=True))
            known.update(zip(jaxpr.invars[self._count :], jax.tree.leaves(rest), strict=True))
            known.update(zip(before, x, strict=True))

            def read(atom: Any) -> Any:
                return constant(atom) if isinstance(atom, Literal) else known[atom]

            for eqn in eqns:
                outputs = bind(eqn, [read(atom) for atom in eqn.invars])
                known.update(zip(eqn.outvars, outputs, strict=True))
            found = [read(atom) for atom in results]
            if last:
                y, aux = jax.tree.unflatten(self._outputs, found)
                return y, aux
            return found, ()

        return part


def _needed(equations: Sequence[Any], results: Sequence[Any], known: set[Any]) -> list[Any]:
    """The equations on which results depend, where some variables are known."""
    wanted = {a for a in results if not isinstance(a, Literal)} - known
    eqns = []
    for eqn in reversed(equations):
        if wanted & set(eqn.outvars):
            eqns.append(eqn)
            wanted |= {a for a in eqn.invars if not isinstance(a, Literal)} - known
    return eqns[::-1]


def _is_boundary(eqn: Any) -> bool:
    return isinstance(eqn.params.get("tag"), Boundary)
