"""Find where a loss that couples examples sorts rows and puts them back, each on its own.

A mixture sorts the tokens of a batch by expert, multiplies each group with its weights, and puts
the results back. What a token gets depends on that token alone, whatever else the loss does with
all tokens, such as to balance the load. On devices with rows of their own such a part can run on
these (`jaxpr/rows_apart.py`), but it has to be found, and with its equations for fewer rows.

These come from a trace of the same loss for a smaller batch: it has the same equations in the same
order, or nothing is done. What differs in shape has rows:

    equation                          16 examples   4 of them   in the part
    balance = sum(onehot(e)) / 16     (8,)          (8,)        no: nothing in it reads it
    order = argsort(e)                (16,)         (4,)        mixes rows, and so what reads it
    rows = x[order]                   (16, 32)      (4, 32)     x is read by rows
    sizes = bincount(e)               (8,)          (8,)        of rows but without: inside
    a = ragged_dot(rows, w, sizes)    (16, 64)      (4, 64)     w is read whole
    y = zeros.at[order].set(a)        (16, 64)      (4, 64)     rows in their places: the result

Whether rows are in their places again is not read but run: on random rows, the part for a few
examples has to be that for the first half of them and that for the others, one behind the other,
also where the two halves differ much, and where all rows are alike, so that one expert gets them
all. A product of rows with the weights of their experts works row by row (`jaxpr/expert_rows.py`):
another function of a row and its group, without weights, stands for it, so that the run is as cheap
for a large model.

What holds of a few examples has to hold of more. So all sizes and numbers of the part have to be
what the few make expect, `a * examples + b`: a capacity of at least eight rows is not. And none may
be compared with a number of rows that only more examples have.

Buffers of experts, (8, 16, 32, 64) for 16 examples, are not sorted. Where devices have experts of
their own, the equations from the first product with a buffer to the last one are a part, too: their
dims say that they leave examples apart.
"""

import dataclasses
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal
from jaxtyping import Array, PyTree

from plurax.jaxpr.at_experts import at_experts, has_experts
from plurax.jaxpr.bodies import Body, Regions
from plurax.jaxpr.compat import REMAT, Scan, called_jaxpr, is_plain_call
from plurax.jaxpr.equal_dims import equal_dims, shape_of
from plurax.jaxpr.expert_rows import ExpertRows, expert_rows
from plurax.jaxpr.few_examples import (
    FAST,
    MOST_DRAWN,
    alike_rows,
    few_examples,
    normal_rows,
    numbers_follow,
    repeated,
    uneven_rows,
)
from plurax.jaxpr.interpret import (
    bind,
    constant,
    dependent,
    equation_context,
    flat_equations,
    holds,
    variables,
)
from plurax.jaxpr.row_by_row import row_of_call
from plurax.jaxpr.rows_apart import rows_apart

Address = tuple[str | int, int]
"""Where a variable of a body is, for any number of examples: an input or a constant, or an equation
by its number, and the place there."""

Path = tuple[int, ...]
"""Which body of a function: the number of its equation in each body around it."""

Known = dict[Hashable, dict[Path, dict[Address, bool]]]
"""Whether parts leave rows apart: by the shapes of a function's arguments and the examples that are
run, by its body, and by the address of a part's result there. Shapes alone: it has no products of
groups."""

MOST_BYTES = 2**32
"""The most bytes that a part computes for a few examples, if it is to be run."""
CLOSE = 64, 1e-3
"""The largest difference between equal rows, relative to the largest entry: so many roundings, and
at most so much."""

_MIXING = frozenset(["sort", "top_k", "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"])
"""What mixes rows along its dim, and a part may contain."""
_PLACING = frozenset(["gather", "scatter", "scatter-add"])
"""What puts rows in their places."""


# --- A body for several numbers of examples -------------------------------------------------------


class _Trace:
    """The equations of a body for one number of examples.

    **Attributes:** `eqns`; `inputs`; `constants`, values by variable; `results`; `address`, of each
    variable, and `at`, the variable at an address.
    """

    def __init__(
        self, eqns: Sequence[Any], inputs: Any, constants: Mapping[Any, Any], results: Any
    ) -> None:
        self.eqns, self.inputs, self.results = eqns, inputs, results
        self.constants = constants
        self.address: dict[Any, Address] = {}
        self.address.update((var, ("input", n)) for n, var in enumerate(inputs))
        self.address.update((var, ("constant", n)) for n, var in enumerate(constants))
        for number, eqn in enumerate(eqns):
            self.address.update((var, (number, n)) for n, var in enumerate(eqn.outvars))
        self.at = {address: var for var, address in self.address.items()}

    @classmethod
    def of_jaxpr(cls, jaxpr: Any, consts: Sequence[Any]) -> "_Trace":
        """Return the equations of a jaxpr, in which calls are replaced by theirs."""
        flat = flat_equations(jaxpr.eqns, jaxpr.outvars, inline=is_plain_call)
        constants = dict(zip(jaxpr.constvars, consts, strict=True)) | flat.constants
        return cls(flat.eqns, jaxpr.invars, constants, flat.results)

    def made_by(self, var: Any) -> Any:
        """Return the equation that computes a variable, None for inputs and constants."""
        first = self.address[var][0]
        return None if isinstance(first, str) else self.eqns[first]

    def wiring(self) -> Iterator[Any]:
        """Yield what equal code has in common for any number of examples."""
        yield len(self.inputs), len(self.constants)
        for eqn in self.eqns:
            read = [None if isinstance(a, Literal) else self.address[a] for a in eqn.invars]
            yield eqn.primitive.name, read, len(eqn.outvars)

    def evaluate(
        self, wanted: Address, known: Mapping[Address, Any], stand_ins: Sequence[ExpertRows] = ()
    ) -> Array:
        """Return a value, given `known` ones; another function of rows is that of `stand_ins`."""
        values = dict(known)
        regions = {var: region for region in stand_ins for var in region.results}

        def read(atom: Any) -> Any:
            return constant(atom) if isinstance(atom, Literal) else value(self.address[atom])

        def value(address: Address) -> Any:
            if address in values:
                return values[address]
            var = self.at[address]
            if address[0] == "constant":
                return self.constants[var]
            if var in regions:
                rows = [jnp.moveaxis(read(x), dim, 0) for x, dim in regions[var].rows]
                values[address] = _stand_in(var, regions[var], rows, read(regions[var].sizes))
                return values[address]
            eqn = self.made_by(var)
            inputs = [read(atom) for atom in eqn.invars]
            with equation_context(eqn):
                outputs = bind(eqn, inputs)
            values.update(((address[0], n), array) for n, array in enumerate(outputs))
            return values[address]

        result: Array = value(wanted)
        return result


def _stand_in(var: Any, region: ExpertRows, rows: Sequence[Array], sizes: Array) -> Array:
    """Return some function of each row and of the group in which it is, in the shape of `var`."""
    dim, shape = region.dims[var], list(shape_of(var))
    count = shape.pop(dim)
    ends = jnp.cumsum(sizes.astype(jnp.int32))
    group = (jnp.arange(count, dtype=jnp.int32)[:, None] >= ends[None]).sum(1, dtype=jnp.int32)
    dtype = jnp.float64 if var.aval.dtype.itemsize > 4 else jnp.float32
    total = 0.7 * group.astype(dtype) + region.results.index(var)
    for x in rows:
        flat = x.reshape(count, -1).astype(dtype)
        total = total + flat @ jnp.cos(jnp.arange(flat.shape[1], dtype=dtype))
    features = jnp.arange(math.prod(shape), dtype=dtype)
    y = (jnp.sin(total)[:, None] * jnp.cos(features)[None]).reshape(count, *shape)
    return jnp.moveaxis(y, 0, dim).astype(var.aval.dtype)


# --- Where rows are sorted and put back -----------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ApartRows:
    """A part of a body that leaves rows apart.

    **Fields:** `eqn`, its last equation; `results`, its one result, with its rows at `dim`; `rows`,
    what is read by rows, each a variable and the dim of its rows; `whole`, what is read whole;
    `own`, the body for the examples of one device, `address`, of the result there, and `operands`,
    of what is read: what is whole first.
    """

    eqn: Any
    results: list[Any]
    dim: int
    rows: list[tuple[Any, int]]
    whole: list[Any]
    own: _Trace
    address: Address
    operands: list[Address]

    def ids(self) -> set[int]:
        """Return the `id` of the equation that it replaces; what that alone reads is left out."""
        return {id(self.eqn)}

    def reads(self) -> list[Any]:
        """Return all variables that it reads."""
        return [*self.whole, *(var for var, _ in self.rows)]

    def dims(self) -> list[int | None]:
        """Return where these have their rows."""
        return [*(None for _ in self.whole), *(dim for _, dim in self.rows)]

    def compute(self, whole: Sequence[Array], rows: Sequence[Array]) -> Array:
        """Return the result for the examples of one device."""
        known = zip(self.operands, (*whole, *rows), strict=True)
        return self.own.evaluate(self.address, dict(known))


class _SortWalk:
    """Finds the parts of one body, given its equations for the examples of one device and for few.

    **Arguments:** `counts`, the numbers of examples of all devices, of one device and of both runs;
    `known`, whether parts that were run before leave rows apart, by the address of their result.
    """

    def __init__(
        self,
        body: Body,
        traces: Sequence[_Trace],
        counts: Sequence[int],
        known: dict[Address, bool],
    ) -> None:
        self._body, self._counts, self._known = body, counts, known
        self._devices = counts[0] // counts[1]
        self._all = _Trace(body.eqns, body.inputs, body.constants, body.results)
        self._own, self._few, self._half = traces
        self._of_inputs = dependent(body.eqns, body.inputs)
        self._experts = self._expert_rows(self._all)
        self._replaced = {number for region in self._experts for number in region.ids()}
        read = [(self._all.address[var], dim) for r in self._experts for var, dim in r.rows]
        rows = [shape_of(self._few.at[address])[dim] for address, dim in read]
        self._rows_run = min(rows, default=None)

    def _expert_rows(self, trace: _Trace) -> list[ExpertRows]:
        given = [n for n, var in enumerate(self._body.inputs) if var in self._body.of_rows]
        of_rows = dependent(trace.eqns, [trace.inputs[n] for n in given])
        return expert_rows(trace.eqns, trace.results, of_rows, {}, 1)

    def parts(self) -> list[ApartRows]:
        """Return the parts in order."""
        parts = [*self._sorted(), *self._of_buffers()]
        return sorted(parts, key=lambda part: part.address)

    def _of_buffers(self) -> list[ApartRows]:
        """Return the equations from the first to the last product with buffers of split experts."""
        body, parts = self._body, list[ApartRows | None]()
        for region in expert_rows(body.eqns, body.results, body.of_rows, body.dims, self._devices):
            inside = {var for eqn in region.eqns for var in eqn.outvars}
            if region.sizes is None and all(self._keeps_rows(eqn, inside) for eqn in region.eqns):
                self._replaced.update(map(id, body.eqns))  # nothing is run
                parts += [self._part(self._all.made_by(var), inside) for var in region.results]
        return [part for part in parts if part is not None]

    def _keeps_rows(self, eqn: Any, inside: set[Any]) -> bool:
        """Whether the rows of an equation's result are those of its operands, by their dims.

        These are `inside` the part or read, not computed for the examples of one device.
        """
        if len(eqn.outvars) > 1:
            return False
        dim = self._rows(self._all.address[eqn.outvars[0]])
        if dim is None:
            return False
        same = {place for place, to in equal_dims(eqn) if to == (len(eqn.invars), dim)}
        for place, atom in enumerate(eqn.invars):
            if isinstance(atom, Literal) or not self._scaled(self._all.address[atom]):
                continue
            own = self._rows(self._all.address[atom])
            if atom not in inside and not self._may_be_read(atom):
                return False
            if own is None or ((place, own) not in same and row_of_call(eqn, place, own) != dim):
                return False
        return True

    def _sorted(self) -> list[ApartRows]:
        """Return what sorts rows and puts them back."""
        parts: list[ApartRows] = []
        mixed: set[Any] = set()
        behind = {var for region in self._experts for var in region.results}
        for eqn in self._body.eqns if behind else ():
            read, result = variables(eqn.invars), eqn.outvars[0]
            if self._mixes(eqn) or not mixed.isdisjoint(read):
                mixed.update(eqn.outvars)
            if not behind.isdisjoint(read):
                behind.update(eqn.outvars)
            if eqn.primitive.name in _PLACING and result in mixed and result in behind:
                part = self._part(eqn, mixed)
                if part is not None and self._leaves_apart(part):
                    parts.append(part)
                    mixed.discard(result)
                    behind.discard(result)
        return parts

    def _mixes(self, eqn: Any) -> bool:
        """Whether an equation mixes rows, or computes rows of how many there are of a kind."""
        of_rows = [var for var in variables(eqn.invars) if var in self._body.of_rows]
        dims = [self._scaled(self._all.address[var]) for var in of_rows]
        if eqn.primitive.name in _MIXING:
            return any(eqn.params.get("dimension", eqn.params.get("axis")) in own for own in dims)
        counts = [not own and jnp.issubdtype(var.aval.dtype, jnp.integer)
                  for var, own in zip(of_rows, dims, strict=True)]  # fmt: skip
        return any(counts) and bool(self._scaled(self._all.address[eqn.outvars[0]]))

    def _scaled(self, address: Address) -> list[int]:
        """Return the dims that depend on the number of examples."""
        shapes = shape_of(self._few.at[address]), shape_of(self._half.at[address])
        return [dim for dim, sizes in enumerate(zip(*shapes, strict=True)) if len({*sizes}) > 1]

    def _rows(self, address: Address) -> int | None:
        """Return the one dim that does, if it is proportional to that number."""
        dims = self._scaled(address)
        traces = self._all, self._own, self._few, self._half
        shapes = [list(shape_of(trace.at[address])) for trace in traces]
        if len(dims) != 1:
            return None
        rows = [shape.pop(dims[0]) for shape in shapes]
        alike = all(shape == shapes[0] for shape in shapes)
        pairs = zip(rows, self._counts, strict=True)
        return dims[0] if alike and len({n / count for n, count in pairs}) == 1 else None

    def _part(self, eqn: Any, mixed: set[Any]) -> ApartRows | None:
        """Return what an equation depends on, back to what is not `mixed`; None if it cannot be."""
        result, address = eqn.outvars[0], self._all.address[eqn.outvars[0]]
        rows: dict[Any, int | None] = {}
        whole: dict[Any, None] = {}
        inside: set[Any] = set()
        left, size = [result], 0
        while left:
            var = left.pop()
            if var in rows or var in whole or var in inside:
                continue
            here, made_by = self._all.address[var], self._all.made_by(var)
            if here[0] == "constant":
                inside.add(var)
                if isinstance(self._own.constants[self._own.at[here]], jax.core.Tracer):
                    return None
            elif var not in mixed and self._may_be_read(var):
                if self._scaled(here):
                    rows[var] = self._rows(here)
                else:
                    whole[var] = None
            elif made_by is None or made_by.effects or not self._follows(made_by):
                return None
            else:
                inside.update(made_by.outvars)
                left += variables(made_by.invars)
                if id(made_by) not in self._replaced:
                    run = self._few.made_by(self._few.at[here]).outvars
                    size += sum(math.prod(shape_of(v)) * v.aval.dtype.itemsize for v in run)
        dim = self._rows(address)
        by_rows = [(var, place) for var, place in rows.items() if place is not None]
        if dim is None or size > MOST_BYTES or not by_rows or len(by_rows) < len(rows):
            return None
        operands = [self._all.address[var] for var in (*whole, *rows)]
        return ApartRows(eqn, [result], dim, by_rows, [*whole], self._own, address, operands)

    def _follows(self, eqn: Any) -> bool:
        """Whether an equation for more examples is that for few with more rows."""
        address = self._all.address[eqn.outvars[0]]
        traces = self._all, self._own, self._few, self._half
        alike = [trace.made_by(trace.at[address]) for trace in traces]
        run = id(eqn) not in self._replaced
        return numbers_follow(alike, self._counts, run=run, most=self._rows_run)

    def _may_be_read(self, var: Any) -> bool:
        """Whether a part may read a value that mixes no rows, and need not compute it.

        Integers are followed back to what chooses them, since several may follow from one choice.
        What depends on examples and has no rows is added up: each device does that for its own.
        """
        has_rows, made_by = bool(self._scaled(self._all.address[var])), self._all.made_by(var)
        if var not in self._body.of_rows:
            floats = jnp.issubdtype(var.aval.dtype, jnp.inexact)
            return floats and not has_rows and var in self._of_inputs
        if jnp.issubdtype(var.aval.dtype, jnp.inexact) or made_by is None:
            return has_rows
        return has_rows and any(
            jnp.issubdtype(atom.aval.dtype, jnp.inexact) for atom in made_by.invars
        )

    # --- Running it -----------------------------------------------------------------------------

    def _leaves_apart(self, part: ApartRows) -> bool:
        if part.address not in self._known:
            try:
                with jax.default_device(jax.local_devices(backend="cpu")[0]):
                    self._known[part.address] = self._run(part)
            except Exception:  # it reads keys, or runs on other devices alone
                self._known[part.address] = False
        return self._known[part.address]

    def _run(self, part: ApartRows) -> bool:
        """Whether a part for the few examples is that for half of them, and that for the others."""
        dims = part.dims()

        def of(trace: _Trace) -> Callable[[Sequence[Any]], Array]:
            experts = self._expert_rows(trace)

            def apply(operands: Sequence[Any]) -> Array:
                known = dict(zip(part.operands, operands, strict=True))
                return trace.evaluate(part.address, known, experts)

            return apply

        avals = [self._few.at[address].aval for address in part.operands]
        shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
        jaxpr = jax.make_jaxpr(of(self._few))(shapes).jaxpr
        read = {var for eqn in jaxpr.eqns for var in variables(eqn.invars)}

        def compare(draws: Sequence[Any]) -> tuple[Array, Array]:
            """Return the largest difference, and the largest entry."""
            operands = [
                None if x is None else repeated(x, aval.shape)
                for x, aval in zip(draws, avals, strict=True)
            ]
            halves = [
                [x if dim is None or x is None else jnp.split(x, 2, dim)[half]
                 for x, dim in zip(operands, dims, strict=True)]
                for half in (0, 1)
            ]  # fmt: skip
            whole = of(self._few)(operands)
            both = jnp.concatenate([of(self._half)(half) for half in halves], part.dim)
            if not jnp.issubdtype(whole.dtype, jnp.inexact):
                return (whole != both).any(), jnp.ones(())
            return jnp.abs(whole - both).max(initial=0), jnp.abs(whole).max(initial=0)

        result = jaxpr.outvars[0].aval.dtype
        close = 0.0
        if jnp.issubdtype(result, jnp.inexact):
            eps = float(jnp.finfo(result).eps)  # type: ignore[no-untyped-call]
            close = min(CLOSE[0] * eps, CLOSE[1])
        run = jax.jit(compare, compiler_options=FAST)
        result_size = math.prod(shape_of(self._few.at[part.address]))
        alike = [alike_rows] * (1 if result_size > MOST_DRAWN else 4)
        for seed, draw in enumerate((normal_rows, uneven_rows, *alike)):
            rng = np.random.default_rng(seed)
            draws = [
                draw(aval, dim, rng) if var in read else None  # the weights of experts are not
                for aval, dim, var in zip(avals, dims, jaxpr.invars, strict=True)
            ]
            apart, largest = map(float, run(draws))
            if not apart <= close * (largest or 1.0):  # NaN is not close
                return False
        return True


# --- The function ---------------------------------------------------------------------------------


class _SizedBodies:
    """The bodies of a function, each for the examples of one device and for few.

    **Arguments:** `counts`, numbers of examples, and `traced`, the closed jaxpr for each.
    """

    def __init__(self, counts: Sequence[int], traced: Sequence[Any]) -> None:
        self._counts = counts
        # By the `id` of a jaxpr: where it is, the jaxpr, which is kept, and its traces.
        self._traces: dict[int, tuple[Path, Any, list[_Trace]]] = {}
        self._add([(each.jaxpr, each.consts) for each in traced], ())

    def _add(self, jaxprs: Sequence[tuple[Any, Sequence[Any]]], path: Path) -> None:
        """Add a body and those in it, but none whose equations differ."""
        first, *others = (_Trace.of_jaxpr(*each) for each in jaxprs)
        wiring = list(first.wiring())
        if any(list(trace.wiring()) != wiring for trace in others):
            return
        self._traces[id(jaxprs[0][0])] = path, jaxprs[0][0], others
        for number, eqns in enumerate(zip(*(t.eqns for t in (first, *others)), strict=True)):
            if eqns[0].primitive.name == "scan":
                scans = map(Scan.of, eqns)
                self._add([(scan.body, scan.body_consts) for scan in scans], (*path, number))
            elif eqns[0].primitive.name in REMAT:
                self._add([*map(called_jaxpr, eqns)], (*path, number))

    def parts(self, body: Body, known: dict[Path, dict[Address, bool]]) -> list[ApartRows]:
        """Return the parts of a body; `known`, which of them leave rows apart, by its place."""
        if id(body.jaxpr) not in self._traces:
            return []
        path, _, traces = self._traces[id(body.jaxpr)]
        of_body = known.setdefault(path, {})
        with jax.ensure_compile_time_eval():
            return _SortWalk(body, traces, self._counts, of_body).parts()


def with_rows_apart(
    fun: Callable[..., PyTree],
    states: int,
    devices: int,
    groups: Callable[[PyTree], Sequence[int | None]] | None,
    known: Known,
) -> Callable[..., PyTree]:
    """Return the same function, with what sorts rows and puts them back done on each device's own.

    Apply it before differentiation.

    **Arguments:** `fun`, a function of `states` trees, the first one parameters, and of trees of
    examples; `devices`, which have rows of their own; `groups(params)`, of each parameter the dim
    that is split over them, to which rows are then sent (`at_experts`); `known`, what was run of
    the same function, for any number of devices, to which more is added.
    """

    def apply(part: ApartRows, body: Body, values: Mapping[Any, Any]) -> list[Array]:
        compute, number = part.compute, len(part.whole)
        if groups is not None:
            split = [body.dims.get(var) for var in part.whole]
            compute = at_experts(compute, devices, lambda _: split)
        return rows_apart(
            lambda *own: [compute(own[:number], own[number:])],
            [values[var] for var in part.reads()], part.dims(), [part.dim], devices,
        )  # fmt: skip

    def run(*args: PyTree) -> PyTree:
        count, key = jax.tree.leaves(args[states])[0].shape[0], _shapes(args)
        if count % devices or (groups is None and key in known):
            return fun(*args)
        closed, shapes = jax.make_jaxpr(fun, return_shape=True)(*args)
        if groups is None and not holds(closed.jaxpr, "ragged_dot_general"):
            known[key] = {}
            return fun(*args)
        leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(args)]
        few = few_examples(closed.jaxpr, count, count // devices)
        counts = (count, count // devices, *few)
        try:
            fewer = [
                jax.make_jaxpr(fun)(*args[:states], *_examples(args[states:], n))
                for n in counts[1:]
            ]
        except Exception:  # a model that needs all its examples
            return fun(*args)
        bodies = _SizedBodies(counts, [closed, *fewer])
        shapes_of = _shapes(args[:states], _examples(args[states:], 1))
        of_shapes = known.setdefault((shapes_of, few), {})
        regions = Regions(lambda body: bodies.parts(body, of_shapes), apply, has_experts)
        of_examples = set(closed.jaxpr.invars[len(jax.tree.leaves(args[:states])) :])
        split = () if groups is None else groups(args[0])
        out = regions.evaluate(closed.jaxpr, closed.consts, leaves, of_examples, split)
        return jax.tree.unflatten(jax.tree.structure(shapes), out)

    return run


def _shapes(*args: PyTree) -> Hashable:
    """Return what decides the equations of a function of `args`, for any number of examples."""
    leaves, structure = jax.tree.flatten(args)
    return structure, tuple((tuple(leaf.shape), str(leaf.dtype)) for leaf in leaves)


def _examples(trees: Sequence[PyTree], count: int) -> PyTree:
    """Return the shapes of trees of so many examples."""

    def few(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((count, *x.shape[1:]), x.dtype)

    return jax.tree.map(few, tuple(trees))
