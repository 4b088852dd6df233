"""Metrics of classes: accuracy, the confusion matrix and what follows from it, AUC."""

from collections.abc import Callable
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from plurax.metrics.averages import mean
from plurax.metrics.metric import Metric, ratio
from plurax.validate import check_whole

MOST_BINS = 2**20
"""Bins of a histogram. A metric has them for each example."""

Average = Literal["binary", "macro", "micro", "none"]


def accuracy(predicted: Array, labels: Array, where: Array | None = None) -> Metric:
    """Return the share of right classes, over all elements.

    **Arguments:** `predicted` and `labels`, whole numbers of the same shape, `(B,)` or `(B, ...)`;
    `where`, of the same shape, true for elements that count.
    """
    right = jnp.equal(predicted.astype(jnp.int32), labels.astype(jnp.int32))
    return mean(right.astype(jnp.float32), where)


def confusion_matrix(
    predicted: Array, labels: Array, classes: int, where: Array | None = None
) -> Metric:
    """Return a matrix `(classes, classes)`: how often the label of its row was predicted as its
    column.

    Arguments as `accuracy`; `classes` is the number of classes, 0 to `classes - 1`.
    """
    return Metric(_confusions(predicted, labels, classes, where), lambda sums: sums)


def precision(
    predicted: Array, labels: Array, classes: int = 2, *, average: Average = "binary",
    where: Array | None = None,
) -> Metric:  # fmt: skip
    """Return the share of right ones among those predicted as a class. Arguments as `f1`."""
    return _of_classes(
        predicted, labels, classes, average, where, lambda right, said, real: ratio(right, said)
    )


def recall(
    predicted: Array, labels: Array, classes: int = 2, *, average: Average = "binary",
    where: Array | None = None,
) -> Metric:  # fmt: skip
    """Return the share of a class that was predicted as such. Arguments as `f1`."""
    return _of_classes(
        predicted, labels, classes, average, where, lambda right, said, real: ratio(right, real)
    )


def f1(
    predicted: Array, labels: Array, classes: int = 2, *, average: Average = "binary",
    where: Array | None = None,
) -> Metric:  # fmt: skip
    """Return the harmonic mean of precision and recall.

    **Arguments:**

    - `predicted`, `labels`, `classes`, `where`: as `confusion_matrix`.
    - `average`: `"binary"`, of class 1; `"macro"`, the mean over classes that occur, in labels or
      predictions; `"micro"`, of all classes' counts together; `"none"`, an array of each class,
      NaN for one that does not occur.
    """
    return _of_classes(
        predicted, labels, classes, average, where,
        lambda right, said, real: ratio(2 * right, said + real),
    )  # fmt: skip


def auc(
    scores: Float[Array, "B"], labels: Array, *, low: float = 0.0, high: float = 1.0,
    bins: int = 1000,
) -> Metric:  # fmt: skip
    """Return the area under the ROC curve, from histograms of the scores of both classes.

    Scores in one bin count as equal. The result differs from that of the scores themselves by at
    most half the share of the pairs (positive, negative) that are in one bin.

    **Arguments:** `scores`, probabilities or any numbers from `low` to `high`, others go into the
    outermost bins; `labels`, `(B,)`, 1 for a positive and 0 for a negative example.
    """
    bins = check_whole("plurax.metrics.auc", "bins", bins, most=MOST_BINS)
    place = jnp.floor((scores.astype(jnp.float32) - low) * (bins / (high - low)))
    place = jnp.clip(place, 0, bins - 1).astype(jnp.int32)
    chosen = _one_hot(place, bins)
    positive = jnp.equal(labels.astype(jnp.int32), 1).astype(jnp.float32)[:, None]
    sums = {"positive": chosen * positive, "negative": chosen * (1 - positive)}

    def finish(sums: dict[str, np.ndarray]) -> np.ndarray:
        positive, negative = sums["positive"], sums["negative"]
        below = np.cumsum(negative) - negative
        return ratio(np.sum(positive * (below + negative / 2)), positive.sum() * negative.sum())

    return Metric(sums, finish)


def _confusions(
    predicted: Array, labels: Array, classes: int, where: Array | None
) -> Float[Array, "B classes classes"]:
    """Return each example's counts of pairs (label, predicted); XLA adds them up without storing
    them."""
    classes = check_whole("plurax.metrics", "classes", classes, most=2**15)
    pairs = labels.astype(jnp.int32) * classes + predicted.astype(jnp.int32)
    counts = _one_hot(pairs.reshape(pairs.shape[0], -1), classes * classes)
    if where is not None:
        counts = counts * where.reshape(where.shape[0], -1, 1).astype(counts.dtype)
    return counts.sum(1).reshape(-1, classes, classes)


def _one_hot(places: Int[Array, "..."], count: int) -> Float[Array, "... count"]:
    numbers = jnp.arange(count, dtype=jnp.int32).reshape((1,) * places.ndim + (count,))
    return jnp.equal(places[..., None], numbers).astype(jnp.float32)


def _of_classes(
    predicted: Array,
    labels: Array,
    classes: int,
    average: Average,
    where: Array | None,
    score: Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray],
) -> Metric:
    """Return a score of counts by class: the right ones, those predicted, those of the labels."""

    def finish(matrix: np.ndarray) -> np.ndarray:
        right, said, real = np.diag(matrix), matrix.sum(0), matrix.sum(1)
        if average == "micro":
            return score(right.sum(), said.sum(), real.sum())
        each = score(right, said, real)
        if average == "binary":
            return each[1]
        if average == "none":
            return each
        occurs = (said + real) > 0
        # As scikit-learn, a class that was never predicted, or is in no label, counts as 0.
        return ratio(np.nan_to_num(each[occurs]).sum(), occurs.sum())

    return Metric(_confusions(predicted, labels, classes, where), finish)
