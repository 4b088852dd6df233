"""Leave out points of a curve that nobody would see.

Largest-triangle-three-buckets: the first and the last point stay; the points between are divided
into buckets, and of each bucket stays the point that spans the largest triangle with the point kept
before it and the mean of the next bucket. Peaks and dips stay, and with them the look of a curve.
Example, 7 points to 4:

    values     0   1   9   1   1   2   0
    buckets    0 | 1   9 | 1   1   2 | 0       (two buckets between the ends)
    kept       0       9   1           0

Source: S. Steinarsson, "Downsampling Time Series for Visual Representation", 2013.
"""

import numpy as np
from jaxtyping import Float, Int


def thin(x: Float[np.ndarray, "N"], y: Float[np.ndarray, "N"], points: int) -> Int[np.ndarray, "P"]:
    """Return the indices of at most `points` (at least 3) points that keep the look of a curve.

    Points that are not finite are left out. `x` ascends.

    >>> x, y = np.arange(7.0), np.array([0.0, 1, 9, 1, 1, 2, 0])
    >>> thin(x, y, 4)
    array([0, 2, 3, 6])
    """
    finite = np.flatnonzero(np.isfinite(x) & np.isfinite(y))
    if len(finite) <= points:
        return finite
    x, y = x[finite], y[finite]
    # The ends of the buckets between the first and the last point.
    edges = np.linspace(1, len(x) - 1, points - 1).astype(np.int64)
    starts, ends = edges[:-1], edges[1:]
    sizes = np.append(ends - starts, 1)
    whole = np.append(starts, len(x) - 1)
    mean_x, mean_y = (np.add.reduceat(column, whole) / sizes for column in (x, y))
    kept, last = [0], 0
    for bucket, (start, end) in enumerate(zip(starts, ends, strict=True)):
        right, up = mean_x[bucket + 1] - x[last], mean_y[bucket + 1] - y[last]
        area = np.abs(right * (y[start:end] - y[last]) - (x[start:end] - x[last]) * up)
        last = int(start + np.argmax(area))
        kept.append(last)
    return finite[[*kept, len(x) - 1]]
