"""Say of which few examples a function tells what it does with more of them.

Where a function was run with a few examples, its equations for more of them have to be the same but
for the number of rows:

    numbers and sizes, of           16    4    6    3 examples    follow from the last two
    x[i + n], of negative i         16    4    6    3             yes
    capacity n // 2 + 1             9     3    4    2             no: 4 examples expect 2.67
    capacity max(8, n // 2)         8     8    8    8             no: a comparison with 8, of 6 rows
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal
from jaxtyping import Array

from plurax.jaxpr.compat import inner_jaxprs
from plurax.jaxpr.equal_dims import shape_of
from plurax.jaxpr.interpret import all_equations

FEW_ROWS = 1024
"""The number of rows for which the few examples have to be enough."""
FAST = {"xla_backend_optimization_level": 0}
"""How XLA compiles what runs a few times: six times as fast."""
MOST_DRAWN = 2**20
"""The most random entries of an array that are drawn, and then repeated."""
_PRIMES = 1, 3, 7, 13, 31, 61, 127, 251, 509
_COMPARING = frozenset(["lt", "le", "gt", "ge", "min", "max", "clamp", "sub", "broadcast_in_dim"])
"""What may compare the place of a row with a number."""
_INFINITE = 2**31 - 1
"""A number of rows that stands for infinity."""


def few_examples(jaxpr: Any, count: int, own: int) -> tuple[int, int]:
    """Return the numbers of examples with which parts are run, the second half of the first.

    What of a loss repeats itself after some examples, groups of two, say, seems apart to a multiple
    of them: so half of the few is even only where a device has an even number, and else a prime.
    """
    products = [e for e in all_equations(jaxpr) if e.primitive.name == "ragged_dot_general"]
    shapes = [shape_of(eqn.invars[0]) for eqn in products]
    # Without products of groups nothing is run.
    most = max((math.prod(shape[:-1]) for shape in shapes), default=count * FEW_ROWS)
    rows = max(most // count, 1)
    unit, primes = 2 - own % 2, _PRIMES[1:] if own % 2 and own > 1 else _PRIMES
    enough = (prime for prime in primes if 2 * unit * prime * rows >= FEW_ROWS)
    half = unit * next(enough, primes[-1])
    return 2 * half, half


def numbers_follow(
    alike: Sequence[Any], counts: Sequence[int], *, run: bool, most: int | None
) -> bool:
    """Whether numbers and sizes of an equation are `a * examples + b`, as the last two have them.

    **Arguments:** `alike`, the equation for `counts` examples each, the last two of which are run;
    `run`, whether the equation is: else its numbers may not differ; `most`, the rows that are run,
    None if they do not matter: a number as large may not be compared with.
    """
    inner = [list(_with_inner(eqn)) for eqn in alike]
    if len({len(eqns) for eqns in inner}) > 1:
        return False
    for eqns in zip(*inner, strict=True):
        numbers = [_numbers(eqn) for eqn in eqns]
        sizes = [np.array([n for v in eqn.outvars for n in shape_of(v)], float) for eqn in eqns]
        same = all(np.array_equal(x, numbers[0], equal_nan=True) for x in numbers)
        if not same and not (run and _is_line(numbers, counts)):
            return False
        if most is not None and eqns[0].primitive.name in _COMPARING:
            whole = numbers[0] == np.round(numbers[0])
            size = np.abs(numbers[0])
            if same and (whole & (size >= most) & (size < _INFINITE)).any():
                return False
        if not _is_line(sizes, counts):
            return False
    return True


def _is_line(values: Sequence[np.ndarray], counts: Sequence[int]) -> bool:
    if len({len(each) for each in values}) > 1:
        return False
    *_, few, half = counts
    slope = (values[-2] - values[-1]) / (few - half)
    expected = [values[-1] + slope * (count - half) for count in counts]
    return all(map(np.allclose, values, expected))


def _with_inner(eqn: Any) -> Iterator[Any]:
    yield eqn
    for jaxpr in inner_jaxprs(eqn):
        yield from all_equations(jaxpr)


def _numbers(eqn: Any) -> np.ndarray:
    """Return the numbers in an equation, apart from sizes."""
    literals = [atom.val for atom in eqn.invars if isinstance(atom, Literal)]
    params = [x for x in eqn.params.values() if isinstance(x, int | float)]
    return np.array([float(x) for x in (*literals, *params) if np.ndim(x) == 0])


# --- Random examples ------------------------------------------------------------------------------


def normal_rows(aval: Any, dim: int | None, rng: np.random.Generator) -> np.ndarray:
    """Return random entries; integers are 0 or 1, as any number of experts has.

    Of many entries those of the last dims are fewer than in the shape.
    """
    shape = list(aval.shape)
    for place in reversed(range(len(shape))):
        if place != dim:
            others = math.prod(shape) // max(shape[place], 1)
            shape[place] = min(shape[place], max(8, MOST_DRAWN // max(others, 1)))
    floats = jnp.issubdtype(aval.dtype, jnp.inexact)
    x = rng.normal(size=shape) if floats else rng.integers(2, size=shape)
    return np.asarray(x.astype(aval.dtype))


def uneven_rows(aval: Any, dim: int | None, rng: np.random.Generator) -> np.ndarray:
    """Return the same, but larger in the second half of the rows, whose integers are 1, not 0."""
    x = normal_rows(aval, dim, rng)
    if dim is None:
        return x
    first, second = np.split(x, 2, dim)
    floats = jnp.issubdtype(aval.dtype, jnp.inexact)
    changed = [first - 2, second + 2] if floats else [0 * first, 0 * second + 1]
    return np.concatenate(changed, dim).astype(aval.dtype)


def alike_rows(aval: Any, dim: int | None, rng: np.random.Generator) -> np.ndarray:
    """Return the same, with all rows equal."""
    x = normal_rows(aval, dim, rng)
    return x if dim is None else np.repeat(x.take([0], dim), x.shape[dim], dim)


def repeated(x: Array, shape: Sequence[int]) -> Array:
    """Return an array of a shape in which `x` is repeated along each dim."""
    times = [-(-size // have) for size, have in zip(shape, x.shape, strict=True)]
    return jnp.tile(x, times)[tuple(slice(size) for size in shape)]
