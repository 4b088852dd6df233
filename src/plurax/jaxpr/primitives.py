"""Groups of JAX's primitives, and helpers to read equations, for transformations of jaxprs."""

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
"""Each entry of the result is computed from one entry of each operand."""

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
"""Reductions over the dims in the parameter `axes`."""
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
"""Calls that can be evaluated in place, and the parameter that holds the called jaxpr."""


def open_jaxpr(inner: Any) -> tuple[Any, list[Any]]:
    """Return the jaxpr and the constants of a closed or an open jaxpr."""
    if isinstance(inner, ClosedJaxpr):
        return inner.jaxpr, list(inner.consts)
    return inner, []


def constant(literal: Literal) -> Any:
    """Return a literal's value, without the mesh in which it was traced."""
    aval: Any = literal.aval
    return np.asarray(literal.val, aval.dtype)


@contextlib.contextmanager
def written(equation: Any) -> Iterator[None]:
    """Evaluate an operation in the context of a traced equation.

    The context has the equation's name scopes (`jax.named_scope`, `jit`), its source line, and its
    `compute_on` and XLA metadata, but the caller's mesh: profiles and errors then name the model's
    code, while shardings are the partitioner's.
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
    """Return the jaxprs among an equation's parameters: loop bodies, branches, called functions."""
    found: list[Any] = []
    for value in equation.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, ClosedJaxpr | Jaxpr):
                found += open_jaxpr(item)[:1]
    return found


def is_recomputed(equation: Any) -> bool:
    """Whether an equation is the part of a `jax.checkpoint` that the backward pass recomputes."""
    params = equation.params
    named = equation.primitive.name in ("checkpoint", "remat2", "remat")
    return named and params["prevent_cse"] and params["differentiated"]


def cheap(equation: Any) -> bool:
    """Whether an operation, or every operation of a call, is cheap."""
    if equation.primitive.name in INLINED:
        return all(cheap(eqn) for inner in inner_jaxprs(equation)[:1] for eqn in inner.eqns)
    return equation.primitive.name in CHEAP


def holds(jaxpr: Any, name: str) -> bool:
    """Whether a jaxpr, or any jaxpr in its equations, contains an operation."""
    return any(
        eqn.primitive.name == name or any(holds(inner, name) for inner in inner_jaxprs(eqn))
        for eqn in jaxpr.eqns
    )


def scan_sizes(equation: Any) -> tuple[int, int]:
    """Return a scan's number of consts and of carries.

    They are read from shapes, because the parameters that give them differ between versions of JAX:
    stacked inputs and outputs have one dim more outside of the body than inside.

        scan over (100, 8): body (w (8, 8), h (8,), x (8,)) -> (h (8,), y (8,))
        w and h have their rank in both, x has not: 2 consts and carries
        of the outputs h has, y has not: 1 carry, so 1 const
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
