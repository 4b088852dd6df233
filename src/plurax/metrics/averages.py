"""Metrics of values: the mean, perplexity, the coefficient of determination."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from plurax.metrics.metric import Metric, ratio, sum_positions
from plurax.tree import sum_dtype
from plurax.validate import check_number


def mean(values: Array, where: Array | None = None) -> Metric:
    """Return the mean of `values`, `(B,)` or `(B, ...)`, over all their elements.

    `where`, of the same shape, chooses the elements that count.
    """
    values = values.astype(sum_dtype(values.dtype))
    count = sum_positions(jnp.ones_like(values), where)
    sums = {"sum": sum_positions(values, where), "count": count}
    return Metric(sums, lambda sums: ratio(sums["sum"], sums["count"]))


def perplexity(losses: Array, where: Array | None = None) -> Metric:
    """Return the exponential of the mean loss of a token.

    **Arguments:** `losses`, negative log likelihoods in nats, `(B, T)` of tokens or `(B,)`;
    `where`, of the same shape, true for tokens that count (not padding).
    """
    averaged = mean(losses, where)
    return Metric(averaged.contributions, lambda sums: np.exp(averaged.finish(sums)))


def r2(predicted: Array, targets: Array, *, center: float = 0.0) -> Metric:
    """Return the coefficient of determination R², 1 for perfect predictions.

    Of targets with more dims than `(B,)` it is the mean of the R² of each of their elements.

    **Arguments:** `predicted` and `targets`, of the same shape `(B, ...)`; `center`, a number near
    the mean of the targets: where their mean is much larger than their spread, sums of squares
    without it lose digits.

    Source: Draper and Smith, Applied Regression Analysis, 1998.
    """
    check_number("plurax.metrics.r2", "center", center)
    dtype = sum_dtype(targets.dtype)
    wanted = targets.astype(dtype) - jnp.asarray(center, dtype)
    errors = targets.astype(dtype) - predicted.astype(dtype)
    sums = {
        "count": jnp.ones(targets.shape[:1], dtype),
        "sum": wanted,
        "squares": wanted * wanted,
        "errors": errors * errors,
    }

    def finish(sums: dict[str, np.ndarray]) -> np.ndarray:
        spread = sums["squares"] - ratio(sums["sum"] ** 2, sums["count"])
        return np.mean(1 - ratio(sums["errors"], spread))

    return Metric(sums, finish)
