"""The names of JAX's primitives that plurax reads, and how versions of JAX differ.

JAX renames primitives and their parameters between versions. Everything that reads an equation
takes its names from here, and a test asserts on the installed JAX that they exist (`ONLY_OLDER`
and `ONLY_NEWER` list those that one version has), so an update of JAX shows what it renamed.

    what                           JAX 0.10                      JAX 0.11, 0.12
    a jaxpr with its constants     `ClosedJaxpr`                 `Jaxpr`; `ClosedJaxpr` is an alias
    a scan's consts and carries    `num_consts`, `num_carry`     the trees `ft_in`, `ft_out`
    `jnp.log2(x)`                  `log`, `div`                  `log2`
    a call of a closed jaxpr       `closed_call`                 `eval_jaxpr`
    `lax.custom_root`              `custom_jvp_call`             `call_hi_primitive`
    equations instead of a call    `jit(inline=True)`            `jit(inline=Inline.JAX_EARLY)`
    `q, k, v = x`, `jnp.stack`     `slice`, `concatenate`, ...   `unstack`, `stack`
"""

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr
from jaxtyping import Array

# fmt: off
ELEMENTWISE = frozenset([
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh",
    "bessel_i0e", "bessel_i1e", "cbrt", "ceil", "clamp", "clz", "complex", "conj",
    "convert_element_type", "copy", "cos", "cosh", "digamma", "div", "eq", "eq_to", "erf",
    "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt", "igamma", "igamma_grad_a",
    "igammac", "imag", "integer_pow", "is_finite", "le", "le_to", "lgamma", "log", "log1p", "log2",
    "logistic", "lt", "lt_to", "max", "min", "mul", "mulhi", "name", "ne", "neg", "nextafter",
    "not", "one_minus_square", "or", "polygamma", "population_count", "pow",
    "real", "reduce_precision", "regularized_incomplete_beta", "rem", "round",
    "rsqrt", "select_n", "shift_left", "shift_right_arithmetic", "shift_right_logical", "sign",
    "sin", "sinh", "sqrt", "square", "stop_gradient", "sub", "tan", "tanh", "xor", "zeta",
])
"""Each entry of the result is computed from one entry of each operand."""

LINEAR = frozenset(["neg", "convert_element_type", "copy", "real", "imag", "conj", "name"])
"""Elementwise operations that are linear in their one operand."""

CHEAP = frozenset([
    "abs", "add", "add_any", "and", "broadcast_in_dim", "clamp", "convert_element_type", "copy",
    "div", "eq", "ge", "gt", "integer_pow", "is_finite", "le", "lt", "max",
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

AS_EQUATIONS: Any = jax.Inline.JAX_EARLY if hasattr(jax, "Inline") else True
"""`jax.jit(fun, inline=AS_EQUATIONS)` leaves no call in what is traced, but the equations of `fun`;
since JAX 0.11 `inline=True` leaves the call until it is lowered."""

ANNOTATIONS = frozenset(["annotate", "sharding_constraint"])
"""Equations that may give their operand a sharding; its entries stay as they are."""

HOST_CALLS = frozenset(["debug_callback", "debug_print", "io_callback", "pure_callback"])
"""Calls of a Python function on the host."""

CUSTOM_PARTITIONED = frozenset(
    f"dot_product_attention_{which}_wrapper" for which in ("fwd", "bwd", "fp8_fwd", "fp8_bwd")
) | {"custom_partitioning", "scaled_matmul_wrapper"}
"""Operations that bring a partitioner of their own."""

_SPELLED_OUT: dict[str, Callable[..., Any]] = {
    "stack": lambda *arrays, axis: lax.concatenate(
        [lax.expand_dims(x, [axis]) for x in arrays], axis
    ),
    "unstack": lambda x, *, axis: [
        lax.squeeze(lax.slice_in_dim(x, i, i + 1, axis=axis), [axis]) for i in range(x.shape[axis])
    ],
    "tile": lambda x, *, reps: lax.reshape(
        lax.broadcast_in_dim(
            x,
            [size for pair in zip(reps, x.shape, strict=True) for size in pair],
            range(1, 2 * x.ndim, 2),
        ),
        [count * size for count, size in zip(reps, x.shape, strict=True)],
    ),
}
"""Operations that stand for a few others: who reads a jaxpr reads these in their place."""

_OVER_DIMS: dict[str, Callable[..., Any]] = {
    "psum": lambda x, *, axes, axis_index_groups=None: lax.reduce_sum(x, axes),
    "pmax": lambda x, *, axes, axis_index_groups=None: lax.reduce_max(x, axes),
    "pmin": lambda x, *, axes, axis_index_groups=None: lax.reduce_min(x, axes),
}
"""The same of collectives over dims alone: `vmap` leaves those over its `axis_name` so."""

INLINED = {
    **dict.fromkeys(_SPELLED_OUT, ""),
    "jit": "jaxpr",
    "closed_call": "call_jaxpr",
    "eval_jaxpr": "call_jaxpr",
    "call_hi_primitive": "_prim",
    "custom_linear_solve": "jaxprs",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vmap_call": "call",
}
"""Calls that can be evaluated in place, and the parameter that holds the called jaxpr, if any."""

PLAIN_CALLS = frozenset(["jit", "closed_call", "eval_jaxpr", *_SPELLED_OUT])
"""Those without a derivative or a rule of their own."""

REMAT = {"remat2": "jaxpr"}
"""Calls that the backward pass may recompute (`jax.checkpoint`), and the same parameter."""

ONLY_OLDER = frozenset(["closed_call"])
"""Primitives of JAX 0.10 that JAX 0.11 does not have."""

ONLY_NEWER = frozenset(["log2", "one_minus_square"])
"""Primitives of JAX 0.11 that JAX 0.10 does not have."""


def derivative_of(eqn: Any) -> tuple[Callable[..., Any], list[Any]] | None:
    """Return the backward function of a `custom_vjp_call`, as its library wrote it, and the
    arguments that are constant for it (`nondiff_argnums`), which come first.

    None where JAX keeps them in another way. That of a function under `jax.vmap` is in a closure.
    """
    wrapped = eqn.params["bwd"]
    while hasattr(wrapped, "f"):
        outside = inspect.getclosurevars(wrapped.f).nonlocals
        if "bwd" not in outside:
            steps = {by.__name__: args for by, args in wrapped.transforms}
            constants = steps.get("_prepend_static_args", [[]])[0]
            return wrapped.f, [one.val for one in constants]
        wrapped = outside["bwd"]
    return None


def open_jaxpr(inner: Any) -> tuple[Any, list[Any]]:
    """Return the jaxpr and the constants of a closed or an open jaxpr."""
    if isinstance(inner, ClosedJaxpr):
        return inner.jaxpr, list(inner.consts)
    return inner, []


def called_jaxpr(eqn: Any) -> tuple[Any, list[Any]]:
    """Return the jaxpr and the constants that a call (in `INLINED` or `REMAT`) evaluates."""
    name, params = eqn.primitive.name, eqn.params
    if name == "custom_linear_solve":
        return open_jaxpr(params["jaxprs"].solve)
    if name == "call_hi_primitive":
        # The parameter holds an object of a private class: its function is traced only now, in the
        # mesh of the equation.
        expand = functools.partial(eqn.primitive.to_lojax, **params)
        return _traced(expand, [atom.aval for atom in eqn.invars])
    if name in _SPELLED_OUT or _is_over_dims(eqn):
        return _spelled_out(name, tuple(a.aval for a in eqn.invars), tuple(params.items()))
    return open_jaxpr(params[(INLINED | REMAT)[name]])


@functools.lru_cache(maxsize=1024)
def _spelled_out(
    name: str, avals: tuple[Any, ...], params: tuple[tuple[str, Any], ...]
) -> tuple[Any, list[Any]]:
    return _traced(functools.partial((_SPELLED_OUT | _OVER_DIMS)[name], **dict(params)), avals)


def _traced(fun: Callable[..., Any], avals: Sequence[Any]) -> tuple[Any, list[Any]]:
    """Return the jaxpr of a function, traced in the mesh of its operands, and the constants."""
    with jax.sharding.use_abstract_mesh(avals[0].sharding.mesh):
        return open_jaxpr(jax.make_jaxpr(fun)(*avals))


def call_operands(eqn: Any, operands: Sequence[Any]) -> list[Any]:
    """Return those operands of a call that its jaxpr (see `called_jaxpr`) reads.

    The first ones of a `custom_linear_solve` are the constants of four functions, of which only
    `solve` is called; the others are for its derivative.
    """
    if eqn.primitive.name != "custom_linear_solve":
        return list(operands)
    counts = eqn.params["const_lengths"]
    start = counts.matvec + counts.vecmat
    end = start + counts.solve
    return [*operands[start:end], *operands[end + counts.transpose_solve :]]


def inner_jaxprs(eqn: Any) -> list[Any]:
    """Return the jaxprs among an equation's parameters: loop bodies, branches, called functions."""
    if eqn.primitive.name == "call_hi_primitive":
        return [called_jaxpr(eqn)[0]]
    jaxprs: list[Any] = []
    for value in eqn.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, ClosedJaxpr | Jaxpr):
                jaxprs += open_jaxpr(item)[:1]
    return jaxprs


def is_call(eqn: Any) -> bool:
    """Whether an equation is a call that can be evaluated in place."""
    return eqn.primitive.name in INLINED or _is_over_dims(eqn)


def is_plain_call(eqn: Any) -> bool:
    """Whether an equation is a call without a derivative or a rule of its own."""
    return eqn.primitive.name in PLAIN_CALLS or _is_over_dims(eqn)


def is_call_or_remat(eqn: Any) -> bool:
    """Whether an equation is a call that can be evaluated in place where nothing is recomputed."""
    return is_call(eqn) or eqn.primitive.name in REMAT


def _is_over_dims(eqn: Any) -> bool:
    # Over none it is its operand: so is the derivative of one over dims.
    axes = eqn.params["axes"] if eqn.primitive.name in _OVER_DIMS else (None,)
    return all(isinstance(axis, int) for axis in axes)


def is_linear(eqn: Any) -> bool:
    """Whether an equation is elementwise and linear in its one operand.

    `jax.checkpoint` rounds each value that its policy keeps to the precision that it has.
    """
    if eqn.primitive.name != "reduce_precision":
        return eqn.primitive.name in LINEAR
    has: Any = jnp.finfo(eqn.invars[0].aval.dtype)  # type: ignore[no-untyped-call]
    return bool(
        eqn.params["exponent_bits"] >= has.nexp and eqn.params["mantissa_bits"] >= has.nmant
    )


def is_recomputed(eqn: Any) -> bool:
    """Whether an equation is the part of a `jax.checkpoint` that the backward pass recomputes."""
    params = eqn.params
    return eqn.primitive.name in REMAT and params["prevent_cse"] and params["differentiated"]


_TRANSFORM = re.compile(r"(\w+)\(")


def is_transposed(eqn: Any) -> bool:
    """Whether an equation is of the backward pass, which the names of its transforms say.

    The outermost counts, but for `vmap`: a loss that differentiates something itself, as those of
    differential equations do, has transposed equations in its forward pass, `jvp(transpose(jvp))`.
    """
    names = _TRANSFORM.findall(str(eqn.source_info.name_stack))
    return next((name for name in names if name != "vmap"), None) == "transpose"


@dataclasses.dataclass(frozen=True)
class Scan:
    """A `scan` equation taken apart.

    Its operands are the consts, which every iteration reads; the carry; and the xs, of which each
    iteration reads one row. Its results are the carry and the stacked ys.

    **Fields:**

    - `body`, `body_consts`: the jaxpr of an iteration `(*consts, *carry, *row) -> (*carry, *ys)`.
    - `num_consts`, `num_carry`: the number of consts and of carries.
    - `length`, `reverse`, `unroll`: as in `jax.lax.scan`.
    """

    body: Any
    body_consts: list[Any]
    num_consts: int
    num_carry: int
    length: int
    reverse: bool
    unroll: int

    @classmethod
    def of(cls, eqn: Any) -> "Scan":
        """Take a `scan` equation apart.

        The numbers of consts and carries are read from shapes, because the parameters that give
        them differ between versions of JAX: xs and ys have one dim more outside of the body.

            scan over (100, 8): body (w (8, 8), h (8,), x (8,)) -> (h (8,), y (8,))
            w and h have their rank in both, x has not: 2 consts and carries
            of the outputs h has, y has not: 1 carry, so 1 const
        """
        body, body_consts = open_jaxpr(eqn.params["jaxpr"])

        def unstacked(inside: Sequence[Any], outside: Sequence[Any]) -> int:
            pairs = zip(inside, outside, strict=True)
            return sum(len(one.aval.shape) == len(other.aval.shape) for one, other in pairs)

        carried = unstacked(body.outvars, eqn.outvars)
        shared = unstacked(body.invars, eqn.invars) - carried
        options = (eqn.params[name] for name in ("length", "reverse", "unroll"))
        return cls(body, body_consts, shared, carried, *options)

    def split(self, operands: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """Split the operands (or the body's inputs) into consts, carry and xs."""
        carry = self.num_consts + self.num_carry
        return (
            list(operands[: self.num_consts]),
            list(operands[self.num_consts : carry]),
            list(operands[carry:]),
        )

    def apply(self, body: Callable[..., Sequence[Any]], operands: Sequence[Any]) -> list[Array]:
        """Run the loop on its operands with `body(*consts, *carry, *row) -> [*carry, *ys]`."""
        consts, carry, xs = self.split(operands)
        return self.run(lambda carry, row: body(*consts, *carry, *row), carry, xs)

    def run(
        self, body: Callable[..., Sequence[Any]], carry: Sequence[Array], xs: Sequence[Array]
    ) -> list[Array]:
        """Run the loop with `body(carry, row) -> [*carry, *ys]`; return the carry and the ys."""

        def iteration(carry: list[Array], row: list[Array]) -> tuple[list[Array], list[Array]]:
            out = list(body(carry, row))
            return out[: self.num_carry], out[self.num_carry :]

        last, stacked = lax.scan(
            iteration, list(carry), list(xs), self.length, self.reverse, self.unroll
        )
        return [*last, *stacked]
