"""Choose a population's chunk and the place of its batch dim, from shapes and the device alone.

No clock: the same task, plan and device give the same choice, at once, so that a run repeats bit
for bit. The rule was learnt from measurements (`benchmarks/choosing.py`, decision 0020):

    on a GPU or TPU: all members at a time, the batch where the task has it
    on a CPU:        as many members as keep what a step touches within `CACHE` bytes, but at least
                     `FEWEST`; the batch in the minor dim where the work is in matrix products of
                     fewer than `NARROW` columns

`plurax.tune` measures instead.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from jax.extend.core import Jaxpr

from plurax import tree
from plurax.jaxpr.primitives import INLINED, open_jaxpr
from plurax.plan import BatchDim, Plan

CACHE = 3 * 2**18
"""Bytes that one core has close by, roughly: a chunk's working set stays below."""
FEWEST = 16
"""Members at a time, however large: fewer leave the cores idle between operations."""
NARROW = 256
"""Columns of a matrix product from which the batch stays where it is."""
NOT_PLAIN = frozenset(["scan", "while", "cond", "conv_general_dilated"])
"""Operations that hold the arithmetic of a step and have no rule with the batch last."""


@dataclasses.dataclass(frozen=True)
class MemberWork:
    """What one step of one member is, read from its traced gradient.

    **Fields:** `bytes`, of its state, its gradient and the results of its products; `columns`, the
    mean number of columns of its matrix products, weighted by their arithmetic (infinite where
    there are none); `plain`, whether all of them are products of two matrices, in no loop, and
    there is no convolution.
    """

    bytes: int
    columns: float
    plain: bool


def work_of(jaxpr: Jaxpr, state: Any, params: Any) -> MemberWork:
    """The `MemberWork` of a traced gradient.

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
    """All equations, those of functions called in place included."""
    for equation in jaxpr.eqns:
        if equation.primitive.name in INLINED:
            inner, _ = open_jaxpr(equation.params[INLINED[equation.primitive.name]])
            yield from _equations(inner)
        else:
            yield equation


def choose_chunk(plan: Plan, members: int, work: MemberWork, platform: str) -> Plan:
    """The plan with its open choices made: a pure function.

    **Arguments:** `members`, on one device; `platform`, of the device: `"cpu"`, `"gpu"`, `"tpu"`.

    >>> from plurax.plan import Plan
    >>> spirals = Work(bytes=30_000, columns=20.0, plain=True)
    >>> plan = choose(Plan(), 100, spirals, "cpu")
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
    """A chunk near `target`; one that divides the members where one is near.

    What is left over is a second program inside the first, and costs as much to compile.

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
