"""Cutting a traced model into stages at the marks of `plurax.stage_boundary`.

An equation that depends on parameters and on rows belongs to a stage: that of what it reads, one
further behind each mark. What depends on only one of both is computed wherever it is read. From
stage to stage is handed what an earlier one computes and a later one reads.

A leaf of model state is read and written by one stage, so that it passes from microbatch to
microbatch in that stage's own time. What only model state depends on is computed as early as it can
be; what never changes any stage reads.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import Jaxpr, Literal
from jaxtyping import Array, PyTree

from plurax import errors
from plurax.jaxpr.primitives import INLINED, constant, inner_jaxprs, open_jaxpr, written
from plurax.partition.operators.common import bind
from plurax.partition.partitioner import Partitioner
from plurax.pipeline.stages import Part, StagedNetwork, StageFn
from plurax.sharding.annotations import Boundary


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
        marked = any(map(has_boundaries, inner_jaxprs(eqn)))
        calls = name in ("jit", "pjit", "closed_call", "core_call")
        if marked and not calls:
            raise errors.boundary_in_loop(name)
        with written(eqn):
            if calls and (marked or every):
                outputs = inlined(*open_jaxpr(eqn.params[INLINED[name]]), inputs, every=every)
            else:
                outputs = bind(eqn, inputs)
        known.update(zip(eqn.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def has_boundaries(jaxpr: Any) -> bool:
    """Whether a traced model has marks at which it can be cut."""
    return any(
        _is_boundary(eqn) or any(map(has_boundaries, inner_jaxprs(eqn))) for eqn in jaxpr.eqns
    )


class Cut:
    """A traced function `(params, model_state, rows) -> (y, aux, model_state)` cut into stages.

    The model state of its result is that of the next microbatch, or `()` where it only reads it.

    **Arguments:** `closed` jaxpr with `count` parameters first; `states`, the names of the leaves
    of model state; `outputs`, the structure of `(y, aux)`; `stages`; `divider`, in whose mesh it
    was traced.

    Raises `PlanError` where there are too few marks, one stands in a loop, or a leaf of model state
    belongs to several stages.
    """

    def __init__(
        self,
        closed: Any,
        count: int,
        states: Sequence[str],
        outputs: Any,
        stages: int,
        divider: Partitioner,
    ) -> None:
        body, consts = open_jaxpr(closed)
        avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in body.invars]
        flat, _ = divider.traced(lambda *args: inlined(body, consts, args, every=False), *avals)
        self._jaxpr, self._consts = open_jaxpr(flat)
        self._count, self._outputs = count, outputs
        first = count + len(states)
        self._states, self._rows = self._jaxpr.invars[count:first], self._jaxpr.invars[first:]
        self._results = list(self._jaxpr.outvars[: outputs.num_leaves])
        new = self._jaxpr.outvars[outputs.num_leaves :]
        old = self._states[: len(new)]
        self._new = {n: a for n, a in enumerate(new) if a is not old[n]}
        depths = self._depths()
        pieces = 1 + max(depths.values(), default=0)
        if pieces < stages:
            raise errors.too_few_boundaries(pieces, stages)
        self._stage = {var: depth * stages // pieces for var, depth in depths.items()}
        self.stages = stages
        self._handed = self._handed_on()
        self._writer = self._writers()
        self._check_states(states)

    def network(self) -> StagedNetwork:
        """The network, a stage being one `StageFn`."""
        edges = {stage: self._edge(stage) for stage in range(self.stages)}
        return StagedNetwork(edges, None, self.stages)

    def _depths(self) -> dict[Any, int]:
        """For each variable that belongs to a stage, behind how many marks it is."""
        eqns = self._jaxpr.eqns
        trained = _dependent(eqns, self._jaxpr.invars[: self._count])
        streamed = trained & _dependent(eqns, self._rows)
        marked: dict[int, list[Any]] = {}
        for eqn in filter(_is_boundary, eqns):
            marked.setdefault(id(eqn.params["tag"]), []).extend(_read(eqn))
        depth: dict[Any, int] = {}

        def behind(atoms: Sequence[Any]) -> int:
            return max((depth[atom] for atom in atoms if atom in depth), default=0)

        def deepen(eqns: Sequence[Any]) -> None:
            for eqn in eqns:
                at = behind(_read(eqn))
                if _is_boundary(eqn):
                    # All that one mark stands on is handed on together.
                    at = 1 + behind(marked[id(eqn.params["tag"])])
                depth.update({var: at for var in eqn.outvars if var in streamed})

        deepen(eqns)
        needed = _needed(eqns, self._results, set())
        self._put_off(depth, needed)
        among = set(map(id, needed))
        # What no result depends on but model state follows what it reads.
        deepen([eqn for eqn in eqns if id(eqn) not in among])
        return depth

    def _put_off(self, depth: dict[Any, int], needed: Sequence[Any]) -> None:
        """What no mark precedes is computed where it is first read."""
        first = {a: max(depth.values(), default=0) for a in _variables(self._results)}
        for eqn in reversed(needed):
            ours = [var for var in eqn.outvars if var in depth]
            if not ours:
                continue
            if depth[ours[0]] == 0:
                at = min((first[var] for var in ours if var in first), default=0)
                depth.update(dict.fromkeys(ours, at))
            at = depth[ours[0]] - _is_boundary(eqn)
            for atom in _read(eqn):
                first[atom] = min(first.get(atom, at), at)

    def _handed_on(self) -> list[list[Any]]:
        """For each cut what passes it."""
        last = dict.fromkeys(_variables(self._results), self.stages - 1)
        for eqn in self._jaxpr.eqns:
            at = max((self._stage[v] for v in eqn.outvars if v in self._stage), default=0)
            for atom in _read(eqn):
                last[atom] = max(last.get(atom, 0), at)
        cuts = [
            [v for v, at in self._stage.items() if at <= cut < last.get(v, 0)]
            for cut in range(self.stages - 1)
        ]
        for var in {var for cut in cuts for var in cut}:
            if not jax.numpy.issubdtype(var.aval.dtype, jax.numpy.floating):
                raise errors.boundary_not_floating(str(var.aval.dtype), var.aval.shape)
        return cuts

    def _writers(self) -> dict[int, int]:
        """For each leaf of model state that changes, the stage that computes it.

        What depends on no stage is computed in that which reads it.
        """
        writer = {n: self._stage[a] for n, a in self._new.items() if _in(a, self._stage)}
        while left := [n for n in self._new if n not in writer]:
            read = [self._work(stage, writer)[2] for stage in range(self.stages)]
            found = {
                n: next((at for at, there in enumerate(read) if self._states[n] in there), None)
                for n in left
            }
            known = {n: at for n, at in found.items() if at is not None}
            writer |= known or dict.fromkeys(left, 0)
        return writer

    def _check_states(self, names: Sequence[str]) -> None:
        read = [self._work(stage, self._writer)[2] for stage in range(self.stages)]
        for leaf, writer in self._writer.items():
            readers = {at for at, there in enumerate(read) if self._states[leaf] in there}
            if readers - {writer}:
                raise errors.state_of_several_stages(names[leaf], writer, sorted(readers))

    def _work(self, stage: int, writer: Mapping[int, int]) -> tuple[list[Any], list[Any], set[Any]]:
        """The results of a stage, the equations for them, and what these read."""
        before = set(self._handed[stage - 1]) if stage > 0 else set()
        results = list(self._results if stage == self.stages - 1 else self._handed[stage])
        results += [self._new[leaf] for leaf, at in sorted(writer.items()) if at == stage]
        eqns = _needed(self._jaxpr.eqns, results, before)
        return results, eqns, {*_variables(results), *(a for eqn in eqns for a in _read(eqn))}

    def _edge(self, stage: int) -> StageFn:
        results, eqns, read = self._work(stage, self._writer)
        params = self._jaxpr.invars[: self._count]
        leaves = tuple(place for place, var in enumerate(params) if var in read)
        reads = tuple(place for place, var in enumerate(self._states) if var in read)
        writes = tuple(leaf for leaf, at in sorted(self._writer.items()) if at == stage)
        inputs = [
            *(params[leaf] for leaf in leaves),
            *(self._handed[stage - 1] if stage > 0 else []),
            *self._rows,
            *(self._states[leaf] for leaf in reads),
        ]
        fun = self._part(stage, eqns, inputs, results, len(writes))
        return StageFn(fun, leaves, reads=reads, writes=writes)

    def _part(
        self, stage: int, eqns: list[Any], inputs: list[Any], results: list[Any], states: int
    ) -> Part:
        jaxpr, last = self._jaxpr, stage == self.stages - 1
        count = len(results) - states

        def part(params: Sequence[Array], x: Any, rest: PyTree) -> tuple[Any, Any]:
            known: dict[Any, Any] = dict(zip(jaxpr.constvars, self._consts, strict=True))
            known.update(zip(inputs, [*params, *x, *jax.tree.leaves(rest)], strict=True))

            def read(atom: Any) -> Any:
                return constant(atom) if isinstance(atom, Literal) else known[atom]

            for eqn in eqns:
                with written(eqn):
                    outputs = bind(eqn, [read(atom) for atom in eqn.invars])
                known.update(zip(eqn.outvars, outputs, strict=True))
            found = [read(atom) for atom in results[:count]]
            y, aux = jax.tree.unflatten(self._outputs, found) if last else (found, ())
            return y, (aux, [read(atom) for atom in results[count:]]) if states else aux

        return part


def _needed(equations: Sequence[Any], results: Sequence[Any], known: set[Any]) -> list[Any]:
    """The equations on which results depend, where some variables are known."""
    wanted = set(_variables(results)) - known
    eqns = []
    for eqn in reversed(equations):
        if wanted & set(eqn.outvars):
            eqns.append(eqn)
            wanted |= set(_read(eqn)) - known
    return eqns[::-1]


def _dependent(equations: Sequence[Any], variables: Sequence[Any]) -> set[Any]:
    """All that depends on some variables."""
    found = set(variables)
    for eqn in equations:
        if found & set(_read(eqn)):
            found.update(eqn.outvars)
    return found


def _in(atom: Any, variables: Mapping[Any, Any]) -> bool:
    return not isinstance(atom, Literal) and atom in variables


def _variables(atoms: Sequence[Any]) -> list[Any]:
    return [atom for atom in atoms if not isinstance(atom, Literal)]


def _read(eqn: Any) -> list[Any]:
    return _variables(eqn.invars)


def _is_boundary(eqn: Any) -> bool:
    return isinstance(eqn.params.get("tag"), Boundary)
