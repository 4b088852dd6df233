"""Choose how many rows a call of `predict` or `evaluate` takes where nobody said it.

A call of few rows costs more on the host than on the device, one of many holds more, and padding is
computed for nothing. Example, a program for batches of 256, a largest value of 1 KiB per row:

    inputs      rows of a call      calls
    1           1                   1       of 256, 32, 4, 1: few programs for many lengths
    100         256                 1
    100,000     4,096               25      of 4 MiB
"""

from collections.abc import Callable
from typing import Any

import jax

from plurax.execute.placement import check_rows
from plurax.jaxpr.compat import inner_jaxprs

VALUE_BYTES = 4 * 2**20
"""The most bytes on a device of the largest value in a call whose number of rows is chosen here.

A call of few rows costs more on the host than on the device (200,000 rows of 20 numbers, 64 at a
time: 0.89 s; 4,096 or 16,384: 0.05 s; 65,536: 0.07 s, on two cores), and memory stays bounded.
"""

FEWEST_CALLS = 4
"""Calls into which inputs are cut at least: the last one is padded, and copies overlap."""


FEWER = 8
"""By what the rows of a call are divided for inputs of fewer rows: a last batch needs mostly no
program of its own, and one row does not cost a batch."""


def more_rows(rows: int, total: int, row_bytes: Callable[[], float]) -> int:
    """Return the rows of a call, at least `rows`, for `total` rows.

    `row_bytes()` is called where there may be more; see `bytes_per_row`.
    """
    most = total // FEWEST_CALLS
    if 2 * rows > most:
        return rows
    each = row_bytes()
    while 2 * rows <= most and 2 * rows * each <= VALUE_BYTES:
        rows *= 2
    return rows


def fewer_rows(rows: int, total: int) -> int:
    """Return the rows of a call, at most `rows`, that hold `total` rows, or are `rows`."""
    while rows > 1 and (less := -(-rows // FEWER)) >= total:
        rows = less
    return rows


def bounded(chunk: int, total: int) -> int:
    """Return the rows of a call: `chunk`, or where there are fewer rows in `total` less.

    That is a power of two, so that few programs are compiled for inputs of many lengths.
    """
    check_rows(chunk)
    return min(chunk, 1 << (total - 1).bit_length())


def bytes_per_row(trace: Callable[[int], jax.stages.Traced], rows: int) -> float:
    """Return by how many bytes a row enlarges the value that grows most, in a traced function.

    `trace(rows)` traces it for so many rows. Parameters, and what is computed of them alone, do not
    grow.
    """
    few, many = (_value_bytes(trace(n).jaxpr) for n in (rows, 2 * rows))
    if len(few) != len(many):  # it computes other values for more rows, as a loop that is unrolled
        return max(many) / (2 * rows)
    return max([1, *(b - a for a, b in zip(few, many, strict=True))]) / rows


def _value_bytes(jaxpr: Any) -> list[int]:
    """Return the bytes of each value that a jaxpr computes, those of its loops and calls too."""
    sizes = []
    for eqn in jaxpr.eqns:
        sizes += [aval.size * aval.dtype.itemsize for aval in (v.aval for v in eqn.outvars)]
        for inner in inner_jaxprs(eqn):
            sizes += _value_bytes(inner)
    return sizes
