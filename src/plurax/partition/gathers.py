"""Where parameters that ZeRO 3 splits are gathered, and how long they stay whole.

An equation in which a parameter meets the batch needs it whole. Uses that follow each other fill a
bucket (`buckets.py`), and the next bucket is gathered while the equations of this one run.

    equations             parameter       bucket (limit 16 bytes)    collectives emitted here
    h = x @ w0            w0, 8 bytes     0                          gather 0, gather 1
    h = h @ w1            w1, 8 bytes     0
    y = h @ w2            w2, 8 bytes     1                          gather 2
    dh = dy @ w2.T        w2, 8 bytes     2 (w2 a second time)
    dx = dh @ w1.T        w1, 8 bytes     2

A bucket ends when it is full, or before a parameter that it already has: a parameter gathered for
the forward pass is not kept for the backward pass. Within a pass it is kept for its next use if
what is gathered until then fits a bucket with it, as the weights of a recurrence do.

Where the backward pass computes a part of the network again, it needs a weight for the activations
and then for the gradients. In the body of a loop over layers a parameter is gathered once for both:
an iteration ends before the next layer's begins, so one layer is whole at a time anyway. Without
loops such a part is about a layer, too: up to a quarter of all parameters stays whole. What fits a
bucket goes on to the next part, as in a loss that differentiates its network and uses all of it in
each part.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Literal
from jaxtyping import Array

from plurax.jaxpr.at_experts import AT_EXPERTS
from plurax.jaxpr.compat import (
    ANNOTATIONS,
    REMAT,
    Scan,
    called_jaxpr,
    is_call_or_remat,
    is_recomputed,
    is_transposed,
    open_jaxpr,
)
from plurax.jaxpr.interpret import flat_equations
from plurax.jaxpr.rows_apart import ROWS_APART
from plurax.partition.buckets import bytes_of, packed, together
from plurax.partition.resharder import Resharder
from plurax.partition.values import Output, ShardedValue, ValueVersions, split_by_zero
from plurax.sharding.spec import REPLICAS

_MOVED = frozenset(["broadcast_in_dim", "reshape", "rev", "squeeze", "transpose"])
"""Operations that keep the numbers. The derivative of a convolution reverses its kernel."""
OF_THEIR_OWN = frozenset(["scan", "while", "cond", AT_EXPERTS, ROWS_APART, *ANNOTATIONS, *REMAT])
"""Equations whose bodies are evaluated by the partitioner, or that do not gather parameters."""
_RECOMPUTED = "rematted_computation"
"""How JAX names what a backward pass computes again."""


@dataclasses.dataclass(frozen=True)
class ParameterUse:
    """An equation that needs a parameter whole.

    **Fields:** `index` of the equation; `var`, the variable that is gathered for it; `root`, the
    parameter from which `var` is computed, such as by a cast; `alike`, the first variable that is
    computed from it in the same way; `size` in bytes; `backward`, whether the equation is of the
    backward pass; `read`, the variable that the equation reads, and `repeats`, the equations that
    compute it from `var`: what is only moved or repeated is gathered before.
    """

    index: int
    var: Any
    root: Any
    alike: Any
    size: int
    backward: bool = False
    read: Any = None
    repeats: tuple[Any, ...] = dataclasses.field(default=(), compare=False)


class Gathers:
    """The buckets in which the parameters of some equations are gathered.

    **Arguments:** `partitioner`; `eqns`, in order; `known`, the variables that have
    values before them; `summed`, by `id` the equations that need no parameter whole though they
    read the batch (`gradient_sums.py`); `whole`, of a part that is recomputed, what is whole of the
    parts before it, by variable, in the order of use.

    **Attributes:** `eqns`, reordered: those that use parameters alone, such as casts, come first,
    so that their results can share a bucket; `whole`, up to a bucket of what was used last.
    """

    def __init__(
        self,
        partitioner: Any,
        eqns: Sequence[Any],
        known: Mapping[Any, ValueVersions],
        summed: Set[int],
        whole: dict[Any, ShardedValue] | None = None,
    ) -> None:
        self._partitioner = partitioner
        roots = {var: var for var, one in known.items() if needs_gather(partitioner, one)}
        of_rows = partitioner.context.of_rows
        batch = {
            var
            for var, one in known.items()
            if one.data_varying or (one.deferred is None and of_rows(one.value))
        }
        in_part, limit = whole is not None, _limit(partitioner, [*roots])
        self.eqns, uses, self._alike = _uses(eqns, roots, batch, known, summed, in_part=in_part)
        self.whole = {} if whole is None else whole
        self._known, self._backward = {*known}, in_part
        # Of the part before, its variables for what is whole, and what it leaves whole.
        self._lent: tuple[dict[Any, Any], dict[Any, ShardedValue]] | None = None
        before = [
            ParameterUse(-1, var, var, var, bytes_of(var.aval))
            for var in self.whole
            if var in roots
        ]
        self._gathered_by = _kept(uses, limit, before)
        self._last = {by: use for use, by in self._gathered_by.items()}
        gathered = [use for use in uses if self._gathered_by[use] is use]
        self._buckets = _packed(gathered, partitioner.bucket_bytes)
        self._bucket_of = {
            use: number for number, bucket in enumerate(self._buckets) for use in bucket
        }
        self._bucket_of |= dict.fromkeys(before, -1)
        self._at: dict[int, list[ParameterUse]] = {}
        for use in uses:
            self._at.setdefault(use.index, []).append(use)
        self._gathered = {(-1, use.var): self.whole[use.var] for use in before}
        # Parameters alone in a bucket, by their variable and that of the value they came after.
        self._after: dict[tuple[Any, Any], ShardedValue] = {}
        self._done = 0

    def before(
        self, index: int, here: Mapping[Any, ValueVersions], after: tuple[Any, Array] | None
    ) -> dict[Any, Output]:
        """Return the parameters that the equation at `index` needs whole, by what it reads.

        `after` is a value of the batch that the equation reads: its variable and array. If the
        equation opens a bucket, that bucket and the next one are gathered after it.
        """
        self._pass_on(self.eqns[index])
        uses = self._at.get(index, ())
        for use in uses:
            number = self._bucket_of[self._gathered_by[use]]
            while after is not None and self._done <= self._ahead(number):
                self._gather(self._done, here, *after)
                self._done += 1
        whole = dict[Any, Output]()
        for use in uses:
            by = self._gathered_by[use]
            key = self._bucket_of[by], by.var
            value = self._gathered.get(key)
            if use is self._last[by]:
                self._gathered.pop(key, None)
            if value is not None:
                whole[use.read] = self._repeated(use, value)
                self._used(use, value)
        return whole

    def _pass_on(self, eqn: Any) -> None:
        """Give what is whole to an equation that recomputes a part; first take what one left."""
        if self._lent is not None:
            atoms, left = self._lent
            for atom in atoms.values():
                self.whole.pop(atom, None)
            # A part inside that one may have left a slice of a parameter, which has no name here.
            self.whole |= {atoms[var]: value for var, value in left.items() if var in atoms}
            self._lent = None
            self._drop()
        if is_recomputed(eqn):
            if not self._backward:
                self.whole.clear()
            atoms = {
                var: self._alike.get(atom, atom)
                for var, atom in zip(called_jaxpr(eqn)[0].invars, eqn.invars, strict=True)
                if not isinstance(atom, Literal)
            }
            inside: dict[Any, list[Any]] = {}
            for var, atom in atoms.items():
                inside.setdefault(atom, []).append(var)
            lent = {var: value for at, value in self.whole.items() for var in inside.get(at, ())}
            self._lent, self._backward = (atoms, lent), True
            self._partitioner.still_whole = lent

    def _used(self, use: ParameterUse, value: ShardedValue) -> None:
        """Note that a parameter is whole from here on, for parts that are recomputed."""
        if use.backward != self._backward:
            self.whole.clear()
            self._backward = use.backward
        if use.alike in self._known:
            self.whole.pop(use.alike, None)
            self.whole[use.alike] = value
        self._drop()

    def _drop(self) -> None:
        """Let go what was used first, down to the bytes of a bucket."""
        while sum(map(bytes_of, self.whole.values())) > self._partitioner.bucket_bytes:
            del self.whole[next(iter(self.whole))]

    def _repeated(self, use: ParameterUse, value: ShardedValue) -> Output:
        """Return what an equation reads of a parameter that is gathered."""
        if not use.repeats:
            return value
        known = {use.var: ValueVersions(value)}
        (repeated,) = self._partitioner.evaluate_part(use.repeats, known, [use.read])
        return repeated.deferred or repeated.value

    def _ahead(self, number: int) -> int:
        """Return up to which bucket is gathered when the one of this number is needed.

        That is the next one, whose gather overlaps with the equations of this one; but not if it
        has a parameter again, which would be whole from here on.
        """
        if number + 1 == len(self._buckets) or number < 0:
            return number
        here, ahead = ({use.root for use in self._buckets[number + i]} for i in (0, 1))
        return number + here.isdisjoint(ahead)

    def _gather(self, number: int, here: Mapping[Any, ValueVersions], met: Any, by: Array) -> None:
        """Gather the parameters of one bucket after `by`, the array of the variable `met`."""
        # Since the buckets were planned, an equation may have created a whole version.
        uses = [u for u in self._buckets[number] if needs_gather(self._partitioner, here[u.var])]
        alone = (uses[0].var, met) if len(uses) == 1 else None
        if alone in self._after:  # XLA would merge equal gathers after the same value
            self._gathered[number, uses[0].var] = self._after[alone]
            return
        values = [here[use.var].value for use in uses]
        goals = [value.sharding.without(REPLICAS) for value in values]
        moved = together(self._partitioner, values, goals, by=by)
        for use, value in zip(uses, moved, strict=True):
            self._gathered[number, use.var] = value
        if alone is not None:
            self._after[alone] = moved[0]


def gathers_parameters(resharder: Resharder, known: Mapping[Any, ValueVersions]) -> bool:
    """Whether parameters may need a gather over `data`, so that buckets pay off."""
    values = [one.value for one in known.values() if one.deferred is None]
    of_parameters, of_rows = resharder.context.of_parameters, resharder.context.of_rows
    split = [v for v in values if of_parameters(v) and not v.data_varying]
    return bool(split) and any(map(of_rows, values))


def needs_gather(resharder: Resharder, versions: ValueVersions) -> bool:
    """Whether a variable is a parameter of which only shards over `data` exist."""
    if versions.deferred is not None or versions.data_varying:
        return False
    if not all(map(split_by_zero, versions.values)):
        return False  # a whole version exists already
    return resharder.context.of_parameters(versions.value)


def _uses(
    eqns: Sequence[Any],
    roots: dict[Any, Any],
    batch: set[Any],
    known: Mapping[Any, ValueVersions],
    summed: Set[int] = frozenset(),
    *,
    in_part: bool = False,
) -> tuple[list[Any], list[ParameterUse], dict[Any, Any]]:
    """Return the reordered equations, where they need split parameters whole, and for what is
    computed of parameters alone the first variable with the same numbers.

    In a part that is recomputed parameters are gathered as other parts may need them. Both grow:
    `roots`, variables computed from one split parameter alone, and that parameter; `batch`, what
    depends on the batch.
    """
    # `firsts`: by how it is computed.
    alike: dict[Any, Any] = {}
    firsts: dict[Any, Any] = {}
    early, rest, ready = [], [], {*known, *roots}
    # What is repeated along the batch, by the equations that do it: gathered before, not after.
    repeats: dict[Any, tuple[Any, ...]] = {}
    # What has the same numbers as another variable, by the equations that move them.
    moves: dict[Any, tuple[Any, ...]] = {}
    for eqn in eqns:
        read = [atom for atom in eqn.invars if not isinstance(atom, Literal)]
        split = [atom for atom in read if atom in roots]
        if id(eqn) in summed:
            pass
        elif any(atom in batch for atom in read):
            batch.update(eqn.outvars)
        elif all(atom in ready for atom in read) and _is_early(eqn, split):
            # A cast to bfloat16, for example: gather its result, which is half as large.
            ready.update(eqn.outvars)
            early.append(eqn)
            if not split:
                continue
            roots[eqn.outvars[0]] = roots[split[0]]
            if len(eqn.invars) == 1 and eqn.primitive.name in _MOVED:
                moves[eqn.outvars[0]] = (*moves.get(read[0], ()), eqn)
            alike[eqn.outvars[0]] = firsts.setdefault(_way(eqn, alike), eqn.outvars[0])
            if eqn.primitive.name == "stop_gradient":  # the parameter itself, for an actor's critic
                alike[eqn.outvars[0]] = alike.get(split[0], split[0])
            continue
        elif len(read) == 1 and eqn.primitive.name in _MOVED and {*read} & {*roots, *repeats}:
            repeats[eqn.outvars[0]] = (*repeats.get(read[0], ()), eqn)
        rest.append(eqn)
    uses, of_backward = list[ParameterUse](), _backward_of(eqns)
    for index, eqn in enumerate(rest, len(early)):
        read = [atom for atom in eqn.invars if not isinstance(atom, Literal)]
        # A parameter is needed whole only where it meets the batch.
        if id(eqn) in summed or not any(atom in batch for atom in read):
            continue
        if eqn.primitive.name in OF_THEIR_OWN:
            read = _read_each_turn(eqn, roots, batch)
        for var in dict.fromkeys(read):
            then = repeats.get(var, ())
            source = then[0].invars[0] if then else var
            if source in roots:
                like, size = alike.get(source, source), bytes_of(source.aval)
                options = size, in_part or of_backward(eqn), var, then
                uses.append(ParameterUse(index, source, roots[source], like, *options))
    return early + rest, _of_one_form(uses, moves, alike, {*known} if in_part else set()), alike


def _way(eqn: Any, alike: Mapping[Any, Any]) -> str:
    """Return how an equation computes its result; equal ones compute the same numbers."""
    atoms = eqn.invars
    operands = [str(a) if isinstance(a, Literal) else id(alike.get(a, a)) for a in atoms]
    return str((eqn.primitive, eqn.params, operands))


def _of_one_form(
    uses: Sequence[ParameterUse],
    moves: Mapping[Any, tuple[Any, ...]],
    alike: Mapping[Any, Any],
    wanted: Set[Any],
) -> list[ParameterUse]:
    """Return uses that share a gather where one needs a matrix and another its transpose.

    `moves` has for a variable the equations that move the numbers of another to it; those that are
    `wanted` are gathered in any case.
    """

    def source(use: ParameterUse) -> Any:
        return moves[use.var][0].invars[0] if use.var in moves else use.var

    forms: dict[Any, set[Any]] = {}
    for use in uses:
        forms.setdefault(source(use), set()).add(use.alike)
    shared = []
    for use in uses:
        var = source(use)
        if var is not use.var and (len(forms[var]) > 1 or var in wanted):
            then = (*moves[use.var], *use.repeats)
            use = dataclasses.replace(use, var=var, alike=alike.get(var, var), repeats=then)
        shared.append(use)
    return shared


def _backward_of(eqns: Sequence[Any]) -> Callable[[Any], bool]:
    """Return what says whether one of some equations is of the backward pass.

    What is computed again is, too: a recomputed part and its derivatives use the same parameters.
    In the body of such a part names begin anew.
    """
    if any(str(eqn.source_info.name_stack).startswith(_RECOMPUTED) for eqn in eqns):
        return lambda eqn: True
    return lambda eqn: is_transposed(eqn) or _RECOMPUTED in str(eqn.source_info.name_stack)


def _kept(
    uses: Sequence[ParameterUse], limit: int | None, before: Sequence[ParameterUse] = ()
) -> dict[ParameterUse, ParameterUse]:
    """Return for each use the one before which it is gathered: an earlier one if it is still whole.

    `before` are uses that come before all.

    It is if the parameters that are gathered between the two, and itself, have up to `limit` bytes
    together: weights of a recurrence that is written out, of a network that runs twice. Not from
    the forward pass to the backward pass, and with no limit always.
    """
    by = dict[ParameterUse, ParameterUse]()
    whole = {use.alike: use for use in before}  # the one used last at the end
    backward = bool(uses) and uses[0].backward
    for use in uses:
        if limit is not None and use.backward != backward:
            whole, backward = {}, use.backward
        by[use] = whole.pop(use.alike, use)
        whole[use.alike] = by[use]
        while limit is not None and len(whole) > 1 and sum(u.size for u in whole.values()) > limit:
            del whole[next(iter(whole))]
    return by


def _limit(partitioner: Any, roots: Sequence[Any]) -> int | None:
    """Return up to how many bytes stay whole for their next use, None for all."""
    total = sum(bytes_of(var.aval) for var in roots)
    partitioner.parameter_bytes = max(partitioner.parameter_bytes, total)
    if partitioner.over_layers:
        return None
    # A part that is recomputed is about a layer.
    share = partitioner.parameter_bytes // 4 if partitioner.recomputes else 0
    return max(int(partitioner.bucket_bytes), int(share))


def _read_each_turn(eqn: Any, roots: Mapping[Any, Any], batch: Set[Any]) -> list[Any]:
    """Return the parameters that each iteration of a loop needs whole: weights of a recurrence.

    Not stacks of which an iteration reads a part.
    """
    if eqn.primitive.name == "scan":
        scan = Scan.of(eqn)
        body, turns, (consts, carry, _) = scan.body, scan.length, scan.split(scan.body.invars)
        read = eqn.invars
    elif eqn.primitive.name == "while":
        body, turns = open_jaxpr(eqn.params["body_jaxpr"])[0], None
        count, read = eqn.params["body_nconsts"], eqn.invars[eqn.params["cond_nconsts"] :]
        consts, carry = body.invars[:count], body.invars[count:]
    else:
        return []
    if turns == 1:
        return []
    outside = {
        var: atom
        for var, atom in zip(body.invars, read, strict=True)
        if not isinstance(atom, Literal)
    }
    shared = {var: var for var in consts if outside.get(var) in roots}
    # What is carried starts as zeros, or counts iterations.
    varies = {var for var in carry if jnp.issubdtype(var.aval.dtype, jnp.inexact)}
    varies |= {var for var, atom in outside.items() if atom in batch}
    flat = flat_equations(body.eqns, body.outvars, inline=is_call_or_remat)
    whole: dict[Any, dict[Any, int]] = {}
    for use in _uses(flat.eqns, shared, varies, {})[1]:
        whole.setdefault(use.root, {})[use.alike] = math.prod(use.var.aval.shape)
    return [
        outside[var]
        for var, parts in whole.items()
        if sum(parts.values()) >= math.prod(var.aval.shape)
    ]


def _is_early(eqn: Any, split: Sequence[Any]) -> bool:
    """Whether an equation of constants and of `split` parameters alone comes before all others.

    What is larger than the parameters stays behind: these are gathered, and it is computed.
    """
    if len(eqn.outvars) > 1 or eqn.effects or eqn.primitive.name in OF_THEIR_OWN - {"annotate"}:
        return False
    sizes = [math.prod(v.aval.shape) for v in (*eqn.invars, *eqn.outvars)]
    return not split or sizes[-1] <= max(sizes[:-1])


def _packed(uses: Sequence[ParameterUse], limit: int) -> list[list[ParameterUse]]:
    """Group consecutive uses into buckets, none with the same parameter, or part of it, twice."""
    likes = [(use.var.aval.shape, use.var.aval.dtype) for use in uses]
    parameters = [use.alike for use in uses]
    found = packed(likes, [use.size for use in uses], limit, parameters)
    return [[uses[index] for index in bucket] for bucket in found]
