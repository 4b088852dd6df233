"""Groups of JAX's primitives, for transformations that walk a traced function."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

# fmt: off
ELEMENTWISE = frozenset([
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh",
    "bessel_i0e", "bessel_i1e", "cbrt", "ceil", "clamp", "clz", "complex", "conj",
    "convert_element_type", "copy", "copy_p", "cos", "cosh", "digamma", "div", "eq", "eq_to", "erf",
    "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt", "igamma", "igamma_grad_a",
    "igammac", "imag", "integer_pow", "is_finite", "le", "le_to", "lgamma", "log", "log1p", "log2",
    "logistic", "lt", "lt_to", "max", "min", "mul", "mulhi", "name", "ne", "neg", "nextafter",
    "not", "one_minus_square", "or", "polygamma", "population_count", "pow",
    "random_gamma_grad", "real", "reduce_precision", "regularized_incomplete_beta", "rem", "round",
    "rsqrt", "select_n", "shift_left", "shift_right_arithmetic", "shift_right_logical", "sign",
    "sin", "sinh", "sqrt", "square", "stop_gradient", "sub", "tan", "tanh", "xor", "zeta",
])
"""One number of the result from one number of each operand."""

CHEAP = frozenset([
    "abs", "add", "add_any", "and", "broadcast_in_dim", "clamp", "convert_element_type", "copy",
    "copy_p", "div", "eq", "expand_dims", "ge", "gt", "integer_pow", "is_finite", "le", "lt", "max",
    "min", "mul", "ne", "neg", "not", "one_minus_square", "or", "reshape", "rsqrt", "select_n",
    "sign", "sqrt", "square", "squeeze", "stop_gradient", "sub", "transpose", "xor",
])
"""Cheaper to recompute than to load."""

REDUCTIONS = frozenset([
    "reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "argmax",
    "argmin",
])
"""Over the dims in the parameter `axes`."""
# fmt: on

INLINED = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "call_jaxpr",
}
"""Calls that can be evaluated in place, and the parameter that holds what they call."""


def open_jaxpr(inner: Any) -> tuple[Any, list[Any]]:
    """The equations of a closed or an open jaxpr, and its constants."""
    if isinstance(inner, ClosedJaxpr):
        return inner.jaxpr, list(inner.consts)
    return inner, []


def constant(literal: Literal) -> Any:
    """A constant of a traced function, without the mesh in which it was traced."""
    aval: Any = literal.aval
    return np.asarray(literal.val, aval.dtype)


@contextlib.contextmanager
def written(equation: Any) -> Iterator[None]:
    """Where an operation of a traced function is evaluated as it was written.

    Under the names in which it stood (`jax.named_scope`, `jit`), with its line in the source, and
    in its context (`compute_on`, metadata for XLA), but in the mesh that is here.
    """
    info = equation.source_info
    names = source_info_util.current_name_stack() + info.name_stack
    called = equation.params.get("name") if equation.primitive.name in INLINED else None
    if isinstance(called, str):
        names = names.extend(f"jit({called})")
    mesh = jax.sharding.get_abstract_mesh()
    with (
        source_info_util.user_context(info.traceback, name_stack=names),
        equation.ctx.manager,
        jax.sharding.use_abstract_mesh(mesh),
    ):
        yield


def inner_jaxprs(equation: Any) -> list[Any]:
    """The jaxprs among an equation's parameters: bodies of loops, branches, called functions."""
    found: list[Any] = []
    for value in equation.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, ClosedJaxpr | Jaxpr):
                found += open_jaxpr(item)[:1]
    return found


def is_recomputed(equation: Any) -> bool:
    """Whether it is what `jax.checkpoint` leaves of a function for the backward pass."""
    params = equation.params
    named = equation.primitive.name in ("checkpoint", "remat2", "remat")
    return named and params["prevent_cse"] and params["differentiated"]


def cheap(equation: Any) -> bool:
    """Whether an operation, or all of those that it calls, are cheap."""
    if equation.primitive.name in INLINED:
        return all(cheap(eqn) for inner in inner_jaxprs(equation)[:1] for eqn in inner.eqns)
    return equation.primitive.name in CHEAP


def holds(jaxpr: Any, name: str) -> bool:
    """Whether an operation stands anywhere in a function."""
    return any(
        eqn.primitive.name == name or any(holds(inner, name) for inner in inner_jaxprs(eqn))
        for eqn in jaxpr.eqns
    )


def scan_sizes(equation: Any) -> tuple[int, int]:
    """Of a `scan`: how many values its turns share, and how many they carry.

    Read from shapes, because the parameters that say it differ between versions of JAX: what is
    stacked has one dim more outside the loop than inside.
    """
    body, _ = open_jaxpr(equation.params["jaxpr"])
    kept, carried = (
        sum(
            len(inner.aval.shape) == len(outer.aval.shape)
            for inner, outer in zip(inside, outside, strict=True)
        )
        for inside, outside in (
            (body.invars, equation.invars),
            (body.outvars, equation.outvars),
        )
    )
    return kept - carried, carried
