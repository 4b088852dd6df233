"""Pin shard strategies: annotate the operands of single equations of a traced function.

A plan may say how single equations are computed (`plurax.strategies`). `with_strategies` puts
those shardings into the function itself, as annotations that the partitioner obeys like a model's
own; the partitioner needs no other mechanism.

    mesh tensor=4; x (8, 64) is replicated, w (64, 32) is (tensor, None)

    the function             pinned "0 dot_general" to ((None, None), (None, "tensor"))
    h = dot_general x w      a = annotate[(None, None)] x
                             b = annotate[(None, tensor)] w         an all-to-all of w
                             h = dot_general a b                    (None, tensor), nothing reduced

An operand of a loop is annotated before the loop; a carry at the end of the body too, so that it
keeps its sharding; a stacked result at the end of the body.
"""

import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Literal, Var, jaxpr_as_fun
from jax.extend.core.primitives import closed_call_p
from jaxtyping import PyTree

from plurax import errors
from plurax.jaxpr.annotate import annotate_p
from plurax.jaxpr.compat import INLINED, REMAT, Scan, call_operands, called_jaxpr, is_call_or_remat
from plurax.sharding.annotations import Pinned
from plurax.sharding.spec import TensorSharding
from plurax.strategies import Entries, Strategies, Strategy, axes_of


def with_strategies(
    fun: Callable[..., PyTree], strategies: Strategies | None, *, again: bool = False
) -> Callable[..., PyTree]:
    """Return a function in which the operands of some equations are annotated.

    With `again` its equations are evaluated in any case, as JAX keeps those of an earlier trace.
    Raises `PlanError` when it is traced and is not the one the strategies were found for.
    """
    if strategies is None and not again:
        return fun

    def pinned(*args: PyTree) -> PyTree:
        closed, shapes = jax.make_jaxpr(fun, return_shape=True)(*args)
        if strategies is not None:
            check(closed.jaxpr, strategies)
            closed = closed.replace(jaxpr=annotated(closed.jaxpr, strategies.equations))
        out = jaxpr_as_fun(closed)(*jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), out)

    return pinned


def annotated(jaxpr: Any, strategies: Sequence[Strategy]) -> Any:
    """Return a jaxpr with the operands annotated of the equations that have a strategy."""
    return _rewritten(jaxpr, {one.path: one for one in strategies}, "")


def equations(jaxpr: Any, inside: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path and the equation of each equation, those inside calls and scans included."""
    for index, eqn in enumerate(jaxpr.eqns):
        yield f"{inside}{index}", eqn
        if (body := _body(eqn)) is not None:
            yield from equations(body, f"{inside}{index}/")


def enclosing(path: str) -> list[str]:
    """Return the paths of the calls and loops around an equation, and its own.

    >>> enclosing("14/3/2")
    ['14', '14/3', '14/3/2']
    """
    parts = path.split("/")
    return ["/".join(parts[: count + 1]) for count in range(len(parts))]


def traced_as(jaxpr: Any) -> str:
    """Return 16 hex digits that identify a traced function.

    They are a hash of the operators and the ranks of their operands, in order: neither another
    number of rows nor another width changes them, another layer or precision does.
    """
    text = hashlib.sha256()
    for path, eqn in equations(jaxpr):
        ranks = [
            (len(var.aval.shape), str(var.aval.dtype))
            for var in (*eqn.invars, *eqn.outvars)
            if hasattr(var.aval, "shape")
        ]
        text.update(f"{path} {eqn.primitive.name} {ranks}\n".encode())
    return text.hexdigest()[:16]


def check(jaxpr: Any, strategies: Strategies) -> None:
    """Raise `PlanError` if the strategies were found for another function."""
    traced = dict(equations(jaxpr))
    for strategy in strategies.equations:
        eqn = traced.get(_equation(strategy.path))
        if eqn is None or eqn.primitive.name != strategy.operator:
            name = None if eqn is None else eqn.primitive.name
            at = f" at {strategy.where}" if strategy.where else ""
            there = "has no such equation" if name is None else f"has a {name} there"
            raise errors.PlanError(
                f"the plan has a strategy for equation {strategy.equation}{at}, and the "
                f"differentiated loss {there}: the strategies were found for another model, "
                "another precision or remat, or by another version of JAX. Search again, or remove "
                "[strategies]."
            )
        slots = _operands(eqn, strategy)
        if len(slots) != len(strategy.inputs) or any(
            entries and len(axes_of(entries)[0]) != len(atom.aval.shape)
            for atom, entries in zip(slots, strategy.inputs, strict=False)
        ):
            shapes = [tuple(atom.aval.shape) for atom in slots]
            raise errors.PlanError(
                f"the plan's strategy of equation {strategy.equation} has the inputs "
                f"{strategy.inputs!r}, and the operands have the shapes {shapes}: give one list "
                "for each operand with one entry for each dim."
            )
    if traced_as(jaxpr) != strategies.traced:
        raise errors.PlanError(
            f"the plan's strategies were found for a differentiated loss {strategies.traced}, and "
            f"this one is {traced_as(jaxpr)}: another model, another precision or remat, or "
            "another version of JAX. Search again, or remove [strategies]."
        )


def _body(eqn: Any) -> Any:
    """Return the jaxpr of a call or a scan, or None."""
    if is_call_or_remat(eqn):
        return called_jaxpr(eqn)[0]
    return Scan.of(eqn).body if eqn.primitive.name == "scan" else None


def _equation(path: str) -> str:
    """Return the path of an equation, without the operand of a loop."""
    head, _, last = path.rpartition("/")
    return path if last.isdigit() else head


def _operands(eqn: Any, one: Strategy) -> list[Any]:
    """Return the atoms, of an equation or in the body of its loop, that a strategy speaks of."""
    kind = one.path.rpartition("/")[2]
    if kind.isdigit():
        return list(eqn.invars)
    if eqn.primitive.name != "scan":
        return []
    scan = Scan.of(eqn)
    groups = dict(zip(("const", "carry", "row"), scan.split(scan.body.invars), strict=True))
    groups["stack"] = list(scan.body.outvars[scan.num_carry :])
    name = kind.rstrip("0123456789")
    return groups[name][int(kind[len(name) :]) :][:1]


def _rewritten(jaxpr: Any, pinned: Mapping[str, Strategy], inside: str) -> Any:
    """Return the jaxpr with annotations before the equations that `pinned` names."""
    eqns: list[Any] = []
    for index, eqn in enumerate(jaxpr.eqns):
        path = f"{inside}{index}"
        body = _body(eqn)
        if body is not None and any(one.startswith(f"{path}/") for one in pinned):
            eqn = _with_body(eqn, _rewritten(body, pinned, f"{path}/"))
        if eqn.primitive.name == "scan":
            eqn = _loop(eqns, eqn, pinned, path)
        elif path in pinned:
            atoms = [
                _annotated(eqns, eqn, atom, entries)
                for atom, entries in zip(eqn.invars, pinned[path].inputs, strict=True)
            ]
            eqn = eqn.replace(invars=atoms)
        eqns.append(eqn)
    return jaxpr.replace(eqns=eqns)


def _loop(before: list[Any], eqn: Any, strategies: Mapping[str, Strategy], path: str) -> Any:
    """Return a scan with its operands and results annotated."""
    scan = Scan.of(eqn)
    pinned = {
        kind: [
            strategies[f"{path}/{kind}{index}"].inputs[0]
            if f"{path}/{kind}{index}" in strategies
            else ()
            for index in range(count)
        ]
        for kind, count in (
            ("const", scan.num_consts),
            ("carry", scan.num_carry),
            ("row", len(eqn.invars) - scan.num_consts - scan.num_carry),
            ("stack", len(eqn.outvars) - scan.num_carry),
        )
    }
    # Only zeros start as a partial sum, and they start as any sharding that the body returns.
    starts = [() if axes_of(one)[1] else one for one in pinned["carry"]]
    rows = [(None, *one) if one else () for one in pinned["row"]]
    operands = [
        _annotated(before, eqn, atom, entries)
        for atom, entries in zip(eqn.invars, (*pinned["const"], *starts, *rows), strict=True)
    ]
    ends: list[Any] = []
    results = [
        _annotated(ends, eqn, atom, entries)
        for atom, entries in zip(
            scan.body.outvars, (*pinned["carry"], *pinned["stack"]), strict=True
        )
    ]
    body = scan.body.replace(eqns=[*scan.body.eqns, *ends], outvars=results)
    return _with_body(eqn.replace(invars=operands), body)


def _with_body(eqn: Any, body: Any) -> Any:
    """Return a call or a scan that evaluates another jaxpr."""
    name = eqn.primitive.name
    key = {**INLINED, **REMAT, "scan": "jaxpr"}.get(name, "")
    if name in ("custom_linear_solve", "call_hi_primitive") or key not in eqn.params:
        # Their other functions are for a derivative, which has been taken. What stands for a few
        # others (`stack`, `tile`) has no jaxpr among its parameters.
        call = {"call_jaxpr": ClosedJaxpr(body, called_jaxpr(eqn)[1])}
        operands = call_operands(eqn, eqn.invars)
        return eqn.replace(primitive=closed_call_p, invars=operands, params=call)
    old = eqn.params[key]
    # An open jaxpr stays open: `checkpoint` takes one.
    new = old.replace(jaxpr=body) if isinstance(old, ClosedJaxpr) else body
    return eqn.replace(params={**eqn.params, key: new})


def _annotated(eqns: list[Any], eqn: Any, atom: Any, entries: Entries) -> Any:
    """Append the annotation of a variable to `eqns`, and return the annotated variable."""
    if not entries or isinstance(atom, Literal):
        return atom
    out, params = Var(atom.aval), dict(_annotation().params)
    params["tag"] = Pinned(TensorSharding(*axes_of(entries)))
    eqns.append(
        _annotation().replace(
            invars=[atom],
            outvars=[out],
            params=params,
            source_info=eqn.source_info,
            ctx=eqn.ctx,
        )
    )
    return out


@functools.cache
def _annotation() -> Any:
    """Return an equation that annotates a value, as a pattern for others."""
    tag = Pinned(TensorSharding(()))
    traced = jax.make_jaxpr(lambda x: annotate_p.bind(x, tag=tag, batch=(), transposed=False))
    return traced(jax.ShapeDtypeStruct((), "bool")).jaxpr.eqns[0]
