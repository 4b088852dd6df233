"""From timings to the rates of a `Machine`: least squares, and no clock.

A timing is a known amount of work and the seconds it took. The model of `Machine` is linear in the
inverse of what is looked for, so each fit is two columns of relative least squares that cannot
become negative. Of products,

    seconds − operations · overhead = flops · (1 / peak) + flops / smallest dim · (half_dim / peak)

and of collectives

    seconds = bytes sent · (1 / bandwidth) + messages that wait for another · latency
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class ProductTime:
    """The seconds of `operations` matrix products with `flops` in all, and their smallest dim."""

    dtype: str
    flops: float
    smallest_dim: int
    operations: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class CollectiveTime:
    """The seconds of a collective: bytes that each device sends, messages one after another."""

    bytes_sent: float
    messages: int
    seconds: float


def fit_products(times: Sequence[ProductTime], overhead: float) -> tuple[dict[str, float], float]:
    """Return the peak rate of each dtype, and the smallest dim at which half of it is reached.

    The peaks share one `half_dim`, the mean of those that fit each dtype alone.

    >>> def seconds(dim): return 4e6 * dim / 1e12 * (50 + dim) / dim + 2 * 1e-6
    >>> times = [ProductTime("float32", 4e6 * d, d, 2, seconds(d)) for d in (16, 64, 256)]
    >>> peaks, half_dim = fit_products(times, overhead=1e-6)
    >>> round(peaks["float32"] / 1e12, 6), round(half_dim, 6)
    (1.0, 50.0)
    """
    by_dtype = {one.dtype: [t for t in times if t.dtype == one.dtype] for one in times}
    half_dims = []
    for own in by_dtype.values():
        flops = [one.flops for one in own]
        of_dim = [one.flops / one.smallest_dim for one in own]
        inverse, lost = _non_negative([flops, of_dim], _without_overhead(own, overhead))
        # Where time does not grow with the dim at all, the largest product is no half of a peak.
        half_dims.append(lost / inverse if inverse else max(one.smallest_dim for one in own))
    half_dim = float(np.mean(half_dims))
    peaks = {}
    for dtype, own in by_dtype.items():
        flops = [one.flops * (1 + half_dim / one.smallest_dim) for one in own]
        (inverse,) = _non_negative([flops], _without_overhead(own, overhead))
        peaks[dtype] = 1 / inverse
    return peaks, half_dim


def fit_collectives(times: Sequence[CollectiveTime]) -> tuple[float, float]:
    """Return the bandwidth and the latency of links.

    >>> times = [CollectiveTime(b, 3, b / 1e9 + 3 * 1e-6) for b in (1e3, 1e5, 1e7)]
    >>> bandwidth, latency = fit_collectives(times)
    >>> round(bandwidth / 1e9, 6), round(latency * 1e6, 6)
    (1.0, 1.0)
    """
    columns = [[one.bytes_sent for one in times], [float(one.messages) for one in times]]
    seconds = [one.seconds for one in times]
    inverse, latency = _non_negative(columns, seconds)
    # Latency alone explains the times: no bandwidth is seen beyond the largest that was reached.
    fastest = max(one.bytes_sent / one.seconds for one in times)
    return (1 / inverse if inverse else fastest), latency


def fit_overhead(operations: Sequence[int], seconds: Sequence[float]) -> float:
    """Return the seconds that one more operation takes: the slope of a line, at least 0.

    >>> round(fit_overhead([8, 64], [5e-6 + 8e-6, 5e-6 + 64e-6]) * 1e6, 6)
    1.0
    """
    slope, _ = np.polyfit(operations, seconds, 1)
    return max(float(slope), 0.0)


def messages(kind: str, devices: int) -> int:
    """Return how many messages of a collective wait for another, as `Machine` counts them."""
    return 1 if kind == "collective-permute" else math.ceil(math.log2(devices))


def _without_overhead(times: Sequence[ProductTime], overhead: float) -> list[float]:
    """Return the seconds of products without starting them, of which some always is left."""
    return [max(t.seconds - t.operations * overhead, 0.1 * t.seconds) for t in times]


def _non_negative(columns: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Return the factors of columns that add up to seconds, each error relative to its seconds."""
    from scipy.optimize import nnls

    matrix = np.array(columns).T / np.array(seconds)[:, None]
    scale = np.linalg.norm(matrix, axis=0)  # or one column's unit would be the tolerance's
    factors, _ = nnls(matrix / scale, np.ones(len(seconds)))
    return [float(factor) for factor in factors / scale]
