"""Cut a traced model into stages at its `plurax.pipeline.stage_boundary` annotations.

A user annotates the tensors at which a model may be cut; a pipeline needs one function per stage.
`Cut` assigns each equation that depends on both parameters and rows to a stage, by the number of
boundaries on the way to it. Equations that depend only on parameters, or only on rows, are
duplicated into each stage that reads them, so they never cross between devices.

Example, with two stages and microbatches of 4 rows:

    def loss(params, batch, keys):
        x = jnp.tanh(batch["x"] @ params["a"])      # stage 0    f32[4, 16]
        x = px.pipeline.stage_boundary(x)                    # x crosses from stage 0 to stage 1
        scale = jnp.exp(params["s"])                # parameters only: in each stage that reads it
        logits = scale * (x @ params["b"])          # stage 1    f32[4, 10]
        return cross_entropy(logits, batch["y"])    # stage 1; rows are on every device

    stage 0: leaves (a,),     x = [],              y = [f32[4, 16]]
    stage 1: leaves (b, s),   x = [f32[4, 16]],    y, aux = the loss's results

A variable that stage 0 computes and stage 2 reads crosses both cuts, through stage 1; an integer or
boolean does not cross, but is computed again in stage 2. With more boundaries than cuts,
neighbouring parts are merged: 4 parts on 2 stages become 2 and 2.

Effects (`jax.debug.print`): an equation with an effect is in one stage, that of its operands. If
those depend on no parameter or on no row, it is in the stage that reads most of the same inputs.

Model state: one stage reads and writes each leaf that changes, so the leaf's updates follow that
stage's microbatches. Equations that only the new model state depends on are in the stage of what
they read, the earliest possible one. A leaf that never changes may be read by any stage.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, Literal
from jaxtyping import Array, PyTree

from plurax import errors
from plurax.jaxpr.compat import PLAIN_CALLS, inner_jaxprs, open_jaxpr
from plurax.jaxpr.interpret import (
    all_equations,
    bind,
    dependent,
    evaluate,
    interpret,
    needed,
    variables,
)
from plurax.partition.partitioner import Partitioner
from plurax.pipeline.stages import Part, StagedNetwork, StageFn
from plurax.sharding.annotations import Boundary


def inlined(jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any], *, every: bool) -> list[Any]:
    """Evaluate a jaxpr with its plain calls, such as `jit`, inlined; return its results.

    Inlines every call, or with `every=False` only those that contain stage boundaries. Raises
    `PlanError` where a boundary is inside another primitive, such as a `scan` or a `cond`.
    """

    def inline(eqn: Any) -> bool:
        return eqn.primitive.name in PLAIN_CALLS and (
            every or any(map(has_boundaries, inner_jaxprs(eqn)))
        )

    def checked(eqn: Any, inputs: list[Any]) -> list[Any]:
        if any(map(has_boundaries, inner_jaxprs(eqn))):
            raise errors.PlanError(
                f"a plurax.pipeline.stage_boundary is inside {eqn.primitive.name!r}, where a model "
                "cannot be split into stages: put it outside of loops, branches and jax.checkpoint "
                "(Plan(remat=...) rematerializes stages). To split layers that a loop repeats, "
                "build the task with plurax.stack."
            )
        return bind(eqn, inputs)

    return interpret(jaxpr, consts, args, default=checked, inline=inline)


def has_boundaries(jaxpr: Any) -> bool:
    """Return whether a jaxpr, or one inside it, contains a stage boundary."""
    return any(map(_is_boundary, all_equations(jaxpr)))


class Cut:
    """A traced function `(params, model_state, rows) -> (y, aux, model_state)` cut into stages.

    The model state in the result is that of the next microbatch, or `()` if the function only reads
    model state.

    **Arguments:**

    - `closed`: the function's closed jaxpr.
    - `count`: the number of leaves of `params`, its first inputs.
    - `states`: the names of the leaves of `model_state`, its next inputs.
    - `outputs`: the tree structure of `(y, aux)`.
    - `assign`: `assign(parts)` returns the number of parts of each stage, for a function that
      boundaries split into `parts`, one after another.
    - `partitioner`: a `Partitioner` with the mesh in which the function was traced.

    Raises `PlanError` as `assign`, and where a boundary is in a loop or a branch, a complex tensor
    crosses, or several stages use a leaf of model state that changes.
    """

    def __init__(
        self,
        closed: Any,
        count: int,
        states: Sequence[str],
        outputs: Any,
        assign: Callable[[int], Sequence[int]],
        partitioner: Partitioner,
    ) -> None:
        body, consts = open_jaxpr(closed)
        avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in body.invars]
        flat, _ = partitioner.traced(lambda *args: inlined(body, consts, args, every=False), *avals)
        self._jaxpr, self._consts = open_jaxpr(flat)
        self._count, self._outputs = count, outputs
        first = count + len(states)
        self._states, self._rows = self._jaxpr.invars[count:first], self._jaxpr.invars[first:]
        self._results = list(self._jaxpr.outvars[: outputs.num_leaves])
        new = self._jaxpr.outvars[outputs.num_leaves :]
        old = self._states[: len(new)]
        # A leaf that the function returns as it came is not written.
        self._new = {n: a for n, a in enumerate(new) if a is not old[n]}
        depths = self._depths()
        counts = assign(1 + max(depths.values(), default=0))
        stages = [stage for stage, count in enumerate(counts) for _ in range(count)]
        self._stage = {var: stages[depth] for var, depth in depths.items()}
        self.stages = len(counts)
        self._effects = self._effects_on_stages()
        self._boundaries = self._crossing()
        self._writer = self._writers()
        self._effects |= self._other_effects()
        self._check_states(states)

    def network(self) -> StagedNetwork:
        """Return the network: one `StageFn` per stage, no layers."""
        stage_fns = {stage: self._stage_fn(stage) for stage in range(self.stages)}
        return StagedNetwork(stage_fns, None, self.stages)

    def _depths(self) -> dict[Any, int]:
        """Return the number of boundaries before each variable that belongs to a stage.

        Those are the variables that depend on a parameter and on a row, or on the result of an
        effect, which must happen once; others have no entry.
        """
        eqns = self._jaxpr.eqns
        trained = dependent(eqns, self._jaxpr.invars[: self._count])
        effects = [var for eqn in eqns if eqn.effects for var in eqn.outvars]
        streamed = trained & dependent(eqns, self._rows) | dependent(eqns, effects)
        marked: dict[int, list[Any]] = {}
        for eqn in filter(_is_boundary, eqns):
            marked.setdefault(id(eqn.params["tag"]), []).extend(variables(eqn.invars))
        depth: dict[Any, int] = {}

        def behind(atoms: Sequence[Any]) -> int:
            return max((depth[atom] for atom in atoms if atom in depth), default=0)

        def deepen(eqns: Sequence[Any]) -> None:
            for eqn in eqns:
                at = behind(variables(eqn.invars))
                if _is_boundary(eqn):
                    # One `stage_boundary` call on a tree gives one equation per leaf, with one tag:
                    # the leaves cross together, behind the deepest of them.
                    at = 1 + behind(marked[id(eqn.params["tag"])])
                depth.update({var: at for var in eqn.outvars if var in streamed})

        deepen(eqns)
        # Not the equations for the new model state alone.
        results = needed(eqns, self._results, set())
        self._move_to_readers(depth, results)
        among = set(map(id, results))
        # Those for the new model state alone may read variables that
        # `_move_to_readers` has moved.
        deepen([eqn for eqn in eqns if id(eqn) not in among])
        return depth

    def _move_to_readers(self, depth: dict[Any, int], eqns: Sequence[Any]) -> None:
        """Move variables before the first boundary to the stage that first reads them.

        The second input of a decoder, say, depends on an embedding and on rows and is behind no
        boundary: computed at depth 0 it would cross every cut up to its reader.
        """
        first = {a: max(depth.values(), default=0) for a in variables(self._results)}
        for eqn in reversed(eqns):
            ours = [var for var in eqn.outvars if var in depth]
            if not ours:
                continue
            if depth[ours[0]] == 0:
                at = min((first[var] for var in ours if var in first), default=0)
                depth.update(dict.fromkeys(ours, at))
            # A boundary's operand is computed on the sending side.
            at = depth[ours[0]] - _is_boundary(eqn)
            for atom in variables(eqn.invars):
                first[atom] = min(first.get(atom, at), at)

    def _crossing(self) -> list[list[Any]]:
        """Return for each cut the variables that cross it: computed before, read behind.

        Integers and booleans do not cross, as they have no cotangent to send back. They lose their
        stage: each stage that reads one computes it again, from floating values that do cross.
        Raises `PlanError` where a complex value crosses, or an integer that an effect returns.
        """
        effects = {var for eqn in self._jaxpr.eqns if eqn.effects for var in eqn.outvars}
        while True:
            cuts = self._cuts()
            crossing = {var for cut in cuts for var in cut}
            repeated = {v for v in crossing if not jnp.issubdtype(v.aval.dtype, jnp.floating)}
            if not repeated:
                return cuts
            for var in repeated:
                if var in effects or jnp.issubdtype(var.aval.dtype, jnp.complexfloating):
                    raise errors.PlanError(
                        f"a value of dtype {var.aval.dtype} and shape {var.aval.shape} crosses a "
                        "stage boundary, and only floating-point values can: compute it in the "
                        "stage that uses it, or cast it."
                    )
            self._stage = {var: at for var, at in self._stage.items() if var not in repeated}

    def _cuts(self) -> list[list[Any]]:
        """Return for each cut the variables of stages before it that stages behind it read."""
        last = dict.fromkeys(variables(self._results), self.stages - 1)
        for eqn in reversed(self._jaxpr.eqns):
            # A variable without a stage is computed in each stage that reads it.
            at = max((self._stage.get(v, last.get(v, 0)) for v in eqn.outvars), default=0)
            at = self._effects.get(id(eqn), at)
            for atom in variables(eqn.invars):
                last[atom] = max(last.get(atom, 0), at)
        return [
            [v for v, at in self._stage.items() if at <= cut < last.get(v, 0)]
            for cut in range(self.stages - 1)
        ]

    def _effects_on_stages(self) -> dict[int, int]:
        """Return, by `id`, the stage of each equation with an effect on variables of stages."""
        stage_of = {}
        for eqn in self._jaxpr.eqns:
            at = [
                self._stage[a] for a in variables([*eqn.invars, *eqn.outvars]) if a in self._stage
            ]
            if eqn.effects and at:
                stage_of[id(eqn)] = max(at)
        return stage_of

    def _other_effects(self) -> dict[int, int]:
        """Return the stages of the other effects: where most of what they read is read anyway.

        A parameter that two stages read would be stored on both of their devices.
        """
        others = [e for e in self._jaxpr.eqns if e.effects and id(e) not in self._effects]
        return {id(eqn): self._nearest(eqn.invars, self._writer) for eqn in others}

    def _nearest(self, atoms: Sequence[Any], writer: Mapping[int, int]) -> int:
        """Return the stage that writes or reads most of what some variables are computed from."""
        before = needed(self._jaxpr.eqns, atoms, ())
        read = set(variables([*atoms, *(atom for eqn in before for atom in eqn.invars)]))
        owners = [at for leaf, at in writer.items() if self._states[leaf] in read]
        inputs = [self._stage_eqns(stage, writer)[2] for stage in range(self.stages)]
        return max(range(self.stages), key=lambda at: (owners.count(at), len(read & inputs[at])))

    def _writers(self) -> dict[int, int]:
        """Return for each leaf of model state that changes the stage that writes it.

        A new value that belongs to no stage (a step counter's) is computed in the stage that reads
        the old one; if none does (the norm that spectral norm keeps), in that `_nearest` to it.
        """
        writer = {n: self._stage[a] for n, a in self._new.items() if _in(a, self._stage)}
        # To compute a leaf in a stage may make that stage read others: repeat until all are found.
        while unassigned := [n for n in self._new if n not in writer]:
            read = [self._stage_eqns(stage, writer)[2] for stage in range(self.stages)]
            stage_of = {
                n: next((at for at, there in enumerate(read) if self._states[n] in there), None)
                for n in unassigned
            }
            known = {n: at for n, at in stage_of.items() if at is not None}
            writer |= known or {n: self._nearest([self._new[n]], writer) for n in unassigned[:1]}
        return writer

    def _check_states(self, names: Sequence[str]) -> None:
        """Raise `PlanError` where another stage than its writer reads a leaf that changes."""
        read = [self._stage_eqns(stage, self._writer)[2] for stage in range(self.stages)]
        for leaf, writer in self._writer.items():
            readers = {at for at, there in enumerate(read) if self._states[leaf] in there}
            if readers - {writer}:
                stages = " and ".join(map(str, sorted(readers)))
                raise errors.PlanError(
                    f"the model state {names[leaf]!r} is written by stage {writer} and read by "
                    f"stage{'s' if len(readers) > 1 else ''} {stages}. Stages work on several "
                    "microbatches at a time, so each has model state of its own: keep one such "
                    "leaf for each stage that reads it, move the plurax.pipeline.stage_boundary so "
                    "that one stage does both, or use pipeline=1."
                )

    def _stage_eqns(
        self, stage: int, writer: Mapping[int, int]
    ) -> tuple[list[Any], list[Any], set[Any]]:
        """Return a stage's results, the equations that compute them, and all variables read."""
        before = set(self._boundaries[stage - 1]) if stage > 0 else set()
        results = list(self._results if stage == self.stages - 1 else self._boundaries[stage])
        results += [self._new[leaf] for leaf, at in sorted(writer.items()) if at == stage]
        effects = {eqn for eqn, at in self._effects.items() if at == stage}
        eqns = needed(self._jaxpr.eqns, results, before, effects)
        read = [atom for eqn in eqns for atom in eqn.invars]
        return results, eqns, set(variables([*results, *read]))

    def _unread(self) -> set[int]:
        """Return the indices of the parameters that no stage reads."""
        reads = [self._stage_eqns(stage, self._writer)[2] for stage in range(self.stages)]
        params = self._jaxpr.invars[: self._count]
        return {index for index, var in enumerate(params) if not any(var in one for one in reads)}

    def _stage_fn(self, stage: int) -> StageFn:
        results, eqns, read = self._stage_eqns(stage, self._writer)
        params = self._jaxpr.invars[: self._count]
        # The first stage has the parameters that no stage reads: their gradients are zeros.
        unread = self._unread() if stage == 0 else set()
        leaves = tuple(i for i, var in enumerate(params) if var in read or i in unread)
        reads = tuple(index for index, var in enumerate(self._states) if var in read)
        writes = tuple(leaf for leaf, at in sorted(self._writer.items()) if at == stage)
        inputs = [
            *(params[leaf] for leaf in leaves),
            *(self._boundaries[stage - 1] if stage > 0 else []),
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
            found = evaluate(eqns, known, results)
            outputs, new_states = found[:count], found[count:]
            y, aux = jax.tree.unflatten(self._outputs, outputs) if last else (outputs, ())
            return y, (aux, new_states) if states else aux

        return part


def _in(atom: Any, known: Mapping[Any, Any]) -> bool:
    return not isinstance(atom, Literal) and atom in known


def _is_boundary(eqn: Any) -> bool:
    return isinstance(eqn.params.get("tag"), Boundary)
