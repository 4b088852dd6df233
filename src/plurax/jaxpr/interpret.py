"""Evaluate a traced function equation by equation: the loop of every transformation of jaxprs.

`interpret` is JAX's `eval_jaxpr` with handlers. A handler takes an equation and its inputs and
returns its outputs; an equation whose primitive has no handler is applied as it is. Inputs and
outputs need not be arrays: with booleans the same loop finds what depends on what.

    def negated_sines(fun, *args):
        closed = jax.make_jaxpr(fun)(*args)
        handlers = {"sin": lambda eqn, inputs: [-jnp.sin(inputs[0])]}
        return interpret(closed.jaxpr, closed.consts, args, handlers)

    equation              by                  result
    y = sin x             handlers["sin"]     -sin(x)
    z = jit[f] y          inline(eqn)         the equations of f, with the same handlers
    w = mul z 2.0         default, `bind`     z * 2.0

Each equation is evaluated in its own context (`equation_context`), so that profiles and errors name
the model's code; a value is dropped after its last reader.

Source: "Writing custom Jaxpr interpreters in JAX",
https://docs.jax.dev/en/latest/notebooks/Writing_custom_interpreters_in_Jax.html.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import source_info_util
from jax.extend.core import Literal, Var
from jaxtyping import Array

from plurax.jaxpr.compat import CHEAP, call_operands, called_jaxpr, inner_jaxprs, is_call
from plurax.user_frames import is_users_file

Handler = Callable[[Any, list[Any]], Sequence[Any]]

FRAMES = 200
"""The largest number of frames of a model that are read of an equation."""


def bind(eqn: Any, arrays: Sequence[Array], **changed: Any) -> list[Array]:
    """Apply an equation's primitive to arrays, with some of its parameters changed."""
    # Plans decide shardings; those of the mesh in which `eqn` was traced are dropped.
    meshes = {"sharding", "out_sharding"} & {*eqn.params}
    traced: dict[str, Any] = dict.fromkeys(meshes)
    if eqn.primitive.name == "sharding_constraint":
        traced = {}
    if "result_avals" in eqn.params:  # of a call of the host
        avals = [aval.update(sharding=None) for aval in eqn.params["result_avals"]]
        traced["result_avals"] = tuple(avals)
    params = eqn.primitive.get_bind_params({**eqn.params, **traced, **changed})
    out = eqn.primitive.bind(*arrays, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


def interpret(
    jaxpr: Any,
    consts: Sequence[Any],
    args: Sequence[Any],
    handlers: Mapping[str, Handler] | None = None,
    default: Handler = bind,
    *,
    inline: Callable[[Any], bool] | None = None,
    lift: Callable[[Any], Any] | None = None,
) -> list[Any]:
    """Evaluate a jaxpr and return its results.

    **Arguments:**

    - `jaxpr`, `consts`: the jaxpr and its constants (see `open_jaxpr`).
    - `args`: a value for each of its inputs.
    - `handlers`: from a primitive's name to `handler(eqn, inputs) -> outputs`.
    - `default`: the handler of all other primitives.
    - `inline`: whether a call (`jit`, `checkpoint`) is evaluated in place, with the same handlers.
      None for no call.
    - `lift`: how a constant becomes a value. None where values are arrays.
    """
    lifted = consts if lift is None else map(lift, consts)
    known = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*lifted, *args), strict=True))
    return evaluate(jaxpr.eqns, known, jaxpr.outvars, handlers, default, inline=inline, lift=lift)


def evaluate(
    eqns: Sequence[Any],
    known: Mapping[Any, Any],
    results: Sequence[Any],
    handlers: Mapping[str, Handler] | None = None,
    default: Handler = bind,
    *,
    inline: Callable[[Any], bool] | None = None,
    lift: Callable[[Any], Any] | None = None,
) -> list[Any]:
    """Evaluate equations in order, given the values of `known` variables; return `results`.

    The other arguments are those of `interpret`.
    """
    values = dict(known)

    def read(atom: Any) -> Any:
        if not isinstance(atom, Literal):
            return values[atom]
        return constant(atom) if lift is None else lift(constant(atom))

    last = last_reads(eqns, results)
    for index, eqn in enumerate(eqns):
        inputs = [read(atom) for atom in eqn.invars]
        inlined = inline is not None and inline(eqn)
        with equation_context(eqn, inlined=inlined):
            if inlined:
                body = called_jaxpr(eqn)
                operands = call_operands(eqn, inputs)
                outputs: Sequence[Any] = interpret(
                    *body, operands, handlers, default, inline=inline, lift=lift
                )
            else:
                outputs = (handlers or {}).get(eqn.primitive.name, default)(eqn, inputs)
        values.update(zip(eqn.outvars, outputs, strict=True))
        for atom in variables(eqn.invars):
            if last[atom] == index:
                values.pop(atom, None)
    return [read(atom) for atom in results]


def constant(literal: Literal) -> Any:
    """Return a literal's value, without the mesh in which it was traced.

    One of Python keeps its weak type: JAX leaves out a conversion from a strong type to itself.
    """
    aval: Any = literal.aval
    if aval.weak_type and isinstance(literal.val, int | float | complex):
        return literal.val
    return np.asarray(literal.val, aval.dtype)


@contextlib.contextmanager
def equation_context(eqn: Any, *, inlined: bool = False) -> Iterator[None]:
    """Evaluate an operation in the context of a traced equation.

    The context has the equation's name scopes (`jax.named_scope`, and `jit` of a call that is
    `inlined`), its source line, and its `compute_on` and XLA metadata, but the caller's mesh:
    profiles and errors then name the model's code, while shardings are the partitioner's.
    """
    info = eqn.source_info
    names = source_info_util.current_name_stack() + info.name_stack
    called = eqn.params.get("name") if inlined else None
    if isinstance(called, str):
        names = names.extend(f"jit({called})")
    mesh = jax.sharding.get_abstract_mesh()
    with (
        source_info_util.user_context(info.traceback, name_stack=names),
        eqn.ctx.manager,
        jax.sharding.use_abstract_mesh(mesh),
    ):
        yield


def source_line(eqns: Sequence[Any]) -> str:
    """Return the line of the user's code, or else of a library, that holds the last of `eqns`.

    **Arguments:** `eqns`, an equation after the calls and loops that enclose it, outermost first.

    JAX caches traces, so the frames of a called function may name another call site. An inner frame
    is therefore trusted only if the line found so far is among its outer frames.
    """
    line = ""
    for eqn in eqns:
        lines = source_info_util.summarize(eqn.source_info, FRAMES).splitlines()
        # A rule of differentiation may have no frame of the model.
        if lines and (not line or line in lines):
            users = [one for one in lines if is_users_file(one.split(":")[0])]
            line = (users or lines)[-1]
    return line


# --- Reading equations ----------------------------------------------------------------------------


def variables(atoms: Sequence[Any]) -> list[Any]:
    """Return the atoms that are variables, not literals."""
    return [atom for atom in atoms if not isinstance(atom, Literal)]


def all_equations(jaxpr: Any) -> Iterator[Any]:
    """Yield the equations of a jaxpr and of all jaxprs inside them: calls, loops, branches."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in inner_jaxprs(eqn):
            yield from all_equations(inner)


def holds(jaxpr: Any, name: str) -> bool:
    """Whether a jaxpr, or any jaxpr in its equations, contains a primitive."""
    return any(eqn.primitive.name == name for eqn in all_equations(jaxpr))


def is_cheap(eqn: Any) -> bool:
    """Whether an operation, or every operation of a call, is cheaper to recompute than to load."""
    if is_call(eqn):
        return all(map(is_cheap, called_jaxpr(eqn)[0].eqns))
    return eqn.primitive.name in CHEAP


def last_reads(eqns: Sequence[Any], results: Sequence[Any]) -> dict[Any, int]:
    """Return for each variable the index of the last equation that reads it.

    The index of the variables in `results` is the number of equations.
    """
    last = {atom: index for index, eqn in enumerate(eqns) for atom in variables(eqn.invars)}
    return last | dict.fromkeys(variables(results), len(eqns))


def dependent(eqns: Sequence[Any], given: Iterable[Any]) -> set[Any]:
    """Return all variables that depend on any of the `given` ones, and these."""
    reached = set(given)
    for eqn in eqns:
        if not reached.isdisjoint(variables(eqn.invars)):
            reached.update(eqn.outvars)
    return reached


def needed(
    eqns: Sequence[Any],
    results: Sequence[Any],
    known: Container[Any],
    effects: Container[int] = (),
) -> list[Any]:
    """Return the equations on which `results` depend, given the variables `known`.

    Those whose `id` is in `effects` are needed too: what they do is no result.
    """
    wanted = {atom for atom in variables(results) if atom not in known}
    chosen = []
    for eqn in reversed(eqns):
        if id(eqn) in effects or not wanted.isdisjoint(eqn.outvars):
            chosen.append(eqn)
            wanted.update(atom for atom in variables(eqn.invars) if atom not in known)
    return chosen[::-1]


# --- One list of equations ------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class FlatEquations:
    """Equations with each call (`jit`, `custom_jvp`) replaced by the equations of its body, and
    each operation on the same operands once.

    **Fields:** `eqns`; `results`, the atoms of the results among them; `constants`, the values of
    the calls' constants; `calls`, by the `id` of an equation the calls around it, outermost first.
    """

    eqns: list[Any]
    results: list[Any]
    constants: dict[Any, Any]
    calls: dict[int, tuple[Any, ...]]

    def replaced(self, pairs: Sequence[tuple[Any, Any]]) -> list[Any]:
        """Return the new equations of `(new, old)`; they stand in the calls of the old ones."""
        self.calls.update((id(new), self.calls.get(id(old), ())) for new, old in pairs)
        return [new for new, _ in pairs]


def flat_equations(
    eqns: Sequence[Any],
    results: Sequence[Any],
    known: Container[Any] = (),
    inline: Callable[[Any], bool] = is_call,
) -> FlatEquations:
    """Replace calls by the equations of their bodies; nothing is evaluated, and nothing traced.

    Each call gets variables of its own, because JAX caches traces and two calls may share a body.

    Nested derivatives contain one operation on the same operands many times. XLA computes it once,
    and so does who evaluates the list, loops and branches aside. The variables in `known` keep
    their names. `inline`: which calls are replaced, by default all.
    """
    flat = FlatEquations([], [], {}, {})
    computed: dict[Any, Any] = {}

    def renamed(atom: Any, names: Mapping[Any, Any]) -> Any:
        return atom if isinstance(atom, Literal) else names.get(atom, atom)

    def walk(
        eqns: Sequence[Any], names: dict[Any, Any], calls: tuple[Any, ...], stack: Any
    ) -> None:
        for eqn in eqns:
            info, read = eqn.source_info, [renamed(atom, names) for atom in eqn.invars]
            own = info.name_stack if stack is None else stack + info.name_stack
            if inline(eqn):
                body, values = called_jaxpr(eqn)
                inner = dict(zip(body.invars, call_operands(eqn, read), strict=True))
                inner.update((var, Var(var.aval)) for var in body.constvars)
                flat.constants.update(
                    (inner[v], c) for v, c in zip(body.constvars, values, strict=True)
                )
                name = eqn.params.get("name")
                below = own.extend(f"jit({name})") if isinstance(name, str) else own
                walk(body.eqns, inner, (*calls, eqn), below)
                found = [renamed(atom, inner) for atom in body.outvars]
                names.update(zip(eqn.outvars, found, strict=True))
                continue
            key = _operation(eqn, read)
            if key in computed and not any(var in known for var in eqn.outvars):
                names.update(zip(eqn.outvars, computed[key], strict=True))
                continue
            if calls or read != list(eqn.invars):
                fresh = [Var(var.aval) for var in eqn.outvars] if calls else eqn.outvars
                names.update(zip(eqn.outvars, fresh, strict=True))
                info = info.replace(name_stack=own)
                flat.eqns.append(eqn.replace(invars=read, outvars=fresh, source_info=info))
                flat.calls[id(flat.eqns[-1])] = calls
            else:
                flat.eqns.append(eqn)
            if key is not None:
                computed[key] = flat.eqns[-1].outvars

    names: dict[Any, Any] = {}
    walk(eqns, names, (), None)
    flat.results.extend(renamed(atom, names) for atom in results)
    return flat


def _operation(eqn: Any, read: Sequence[Any]) -> Any:
    """Return what equal operations on the same operands share; None for others.

    Those are loops, branches, barriers, what has an effect or a parameter without a hash.
    """
    if eqn.effects or inner_jaxprs(eqn) or eqn.primitive.name == "optimization_barrier":
        return None
    atoms = tuple((a.val, a.aval) if isinstance(a, Literal) else a for a in read)
    key = eqn.primitive, atoms, tuple(sorted(eqn.params.items(), key=lambda item: item[0]))
    try:
        hash(key)
    except TypeError:
        return None
    return key
