"""Choose a population's chunk and batch dim from shapes and the device alone.

A chunk that is too large falls out of the cache, one that is too small leaves the cores idle
between operations; narrow matrix products run faster on CPU with the batch in the minor dim. The
choice uses no clock: the same task, plan and device always give the same plan, so that a run
repeats bit for bit. The rule was fitted to measurements (`benchmarks/choosing.py`, decision 0020):

    on a GPU or TPU: chunk = all members; batch_dim = "major", as the task is written
    on a CPU:        chunk = as many members as keep the bytes of a step below `CACHE`, but at least
                     `FEWEST`; batch_dim = "minor" where the arithmetic is in products of two
                     matrices with fewer than `NARROW` columns on average

Example, 100 MLPs `(2, 20, 20, 1)` with batch 64 on a CPU, each step touching 30 kB:

    target = max(16, 786432 // 30000) = 26 members
    even_chunk(100, 26) = 25      divides 100: no remainder to compile
    columns = 20 < 256            -> Plan(chunk=25, batch_dim="minor")

`plurax.ensemble.tune` measures instead.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from jax.extend.core import Jaxpr

from plurax import tree
from plurax.jaxpr.compat import called_jaxpr, is_call
from plurax.plan import BatchDim, Plan

CACHE = 3 * 2**18
"""Bytes of cache per core, roughly: the working set of a chunk stays below it."""
FEWEST = 16
"""The smallest chunk on CPU, however large a member: fewer leave cores idle between operations."""
NARROW = 256
"""Columns of a matrix product from which the batch stays in the major dim."""
NOT_PLAIN = frozenset(["scan", "while", "cond", "conv_general_dilated"])
"""Primitives that may hold most of the arithmetic and have no batch-minor rule."""


@dataclasses.dataclass(frozen=True)
class MemberWork:
    """The size and kind of one member's step, read from its traced gradient.

    **Fields:** `bytes`, of its state, its gradient and the results of its matrix products;
    `columns`, the mean number of columns of those products, weighted by their arithmetic (infinite
    where there are none); `plain`, whether every product is of two matrices, outside any loop, and
    there is no convolution.
    """

    bytes: int
    columns: float
    plain: bool


def work_of(jaxpr: Jaxpr, state: Any, params: Any) -> MemberWork:
    """Return the `MemberWork` of a traced gradient.

    **Arguments:** `state` and `params`, trees of `jax.ShapeDtypeStruct`s of one member.
    """
    columns, arithmetic, products, plain = 0.0, 0, 0, True
    for equation in _equations(jaxpr):
        out = equation.outvars[0].aval
        if equation.primitive.name == "dot_general":
            (summed, _), batched = equation.params["dimension_numbers"]
            plain &= not any(batched)
            terms = math.prod(equation.invars[0].aval.shape[dim] for dim in summed)
            products += tree.byte_count(out)
            arithmetic += math.prod(out.shape) * terms
            columns += math.prod(out.shape) * terms * (out.shape[-1] if out.ndim else 1)
        plain &= equation.primitive.name not in NOT_PLAIN
    touched = tree.byte_count(state) + tree.byte_count(params) + products
    return MemberWork(touched, columns / arithmetic if arithmetic else math.inf, plain)


def _equations(jaxpr: Jaxpr) -> Iterator[Any]:
    """Yield all equations, including those of inlined calls such as `jit`."""
    for equation in jaxpr.eqns:
        if is_call(equation):
            yield from _equations(called_jaxpr(equation)[0])
        else:
            yield equation


def choose_chunk(plan: Plan, members: int, work: MemberWork, platform: str) -> Plan:
    """Return the plan with its open choices made.

    **Arguments:** `members`, on one device; `platform`, of the device: `"cpu"`, `"gpu"`, `"tpu"`.

    >>> from plurax.plan import Plan
    >>> spirals = MemberWork(bytes=30_000, columns=20.0, plain=True)
    >>> plan = choose_chunk(Plan(), 100, spirals, "cpu")
    >>> plan.chunk, plan.batch_dim
    (25, 'minor')
    """
    batch_dim: BatchDim = "major"
    if platform == "cpu" and work.plain and work.columns < NARROW:
        batch_dim = "minor"
    target = max(FEWEST, CACHE // max(work.bytes, 1)) if platform == "cpu" else members
    return dataclasses.replace(
        plan,
        chunk=plan.chunk or even_chunk(members, target),
        batch_dim=plan.batch_dim or batch_dim,
    )


def even_chunk(members: int, target: int) -> int:
    """Return a chunk near `target`, a divisor of `members` if one is within a factor of two.

    A remainder is a second body of the same program and takes as long to compile as the first.

    >>> even_chunk(100, 12), even_chunk(97, 12), even_chunk(5, 12)
    (10, 11, 5)
    """
    if target >= members:
        return members
    near = [size for size in range(1, members + 1)
            if members % size == 0 and target <= 2 * size and size <= 2 * target]  # fmt: skip
    if near:
        return min(near, key=lambda size: abs(math.log(size / target)))
    return -(-members // -(-members // target))
