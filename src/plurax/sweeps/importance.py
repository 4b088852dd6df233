"""How much of a metric a hyperparameter explains, from the rows of a sweep.

The members are put into groups by the hyperparameter: by its values where there are few, else into
groups of equally many. What the groups explain of the metric's ranks, less what groups drawn by
chance explain, is the share. Example, six members:

    learning rate    0.1    0.1    0.2    0.2    0.3    0.3
    rank of loss      0      1      2      3      4      5
    mean of group        0.5           2.5           4.5
    between the groups  2·(2² + 0 + 2²) = 16, of 17.5 in all; within 1.5, over 6 - 3: 0.5
    share  (16 - 2·0.5) / 17.5 = 0.86

Ranks, since a sweep's worst losses are beyond all measure. A share is that of a hyperparameter
alone: two that matter only together have none.

Source: ε² of T. Kelley, "An unbiased correlation ratio measure", PNAS 1935; the main effects of F.
Hutter, H. Hoos, K. Leyton-Brown, "An Efficient Approach for Assessing Hyperparameter Importance",
ICML 2014.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

FEW = 6
"""Distinct values that are groups of their own."""
LARGEST_NUMBER_OF_GROUPS, MEMBERS_OF_A_GROUP = 8, 8


class Importance(NamedTuple):
    """What a hyperparameter explains of a metric.

    **Fields:** `share`, of the variance of the metric's ranks, 0 to 1; `direction`, Spearman's rank
    correlation, above 0 where larger values go with a larger metric, NaN for values that are no
    numbers.
    """

    share: float
    direction: float


def importance(values: Sequence[Any], scores: Sequence[float]) -> Importance:
    """Return how much of the scores a hyperparameter explains; members not finite are left out.

    >>> found = importance([0.1, 0.1, 0.2, 0.2, 0.3, 0.3], [1, 2, 3, 4, 5, 6])
    >>> round(found.share, 2), round(found.direction, 2)
    (0.86, 0.96)
    """
    score = np.asarray(scores, np.float64)
    numbers = all(isinstance(one, int | float | np.number) for one in values)
    column = np.asarray(values, np.float64) if numbers else np.asarray(list(map(str, values)))
    kept = np.isfinite(score) & (np.isfinite(column) if numbers else True)
    column, score = column[kept], score[kept]
    groups = _groups(column)
    count, ranks = len(score), _ranks(score)
    total = float(((ranks - ranks.mean()) ** 2).sum()) if count else 0.0
    used = len(np.unique(groups))
    if used < 2 or count <= used or total == 0.0:
        return Importance(0.0, float("nan"))
    sizes = np.bincount(groups)
    means = np.bincount(groups, ranks) / np.maximum(sizes, 1)
    between = float((sizes * (means - ranks.mean()) ** 2).sum())
    by_chance = (used - 1) * (total - between) / (count - used)
    direction = float(np.corrcoef(_ranks(column), ranks)[0, 1]) if numbers else float("nan")
    return Importance(max(0.0, (between - by_chance) / total), direction)


def _groups(column: np.ndarray) -> Int[np.ndarray, "N"]:
    """Return the number of each member's group."""
    distinct, places = np.unique(column, return_inverse=True)
    if len(distinct) <= FEW or column.dtype.kind == "U":
        return places
    count = int(np.clip(len(column) // MEMBERS_OF_A_GROUP, 2, LARGEST_NUMBER_OF_GROUPS))
    return (_ranks(column) * count / len(column)).astype(np.int64).clip(0, count - 1)


def _ranks(values: np.ndarray) -> Float[np.ndarray, "N"]:
    """Return the rank of each value from 0; equal values share the mean of theirs."""
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts + 1) / 2)[places]
