"""A metric over a data set: what each example contributes to sums, and what follows from them.

A mean of an AUC over batches is not the AUC of the data. What can be added up is counts. So a
metric has two halves: on the devices one contribution per example, which the library adds up as it
adds up losses, and on the host a function of the sums. Example, recall of 3 examples padded to 4
rows:

    contributions    found (4,)   [ 1.  0.  0.  1. ]     padding repeats example 0
                     real  (4,)   [ 1.  1.  0.  1. ]
    mask             (4,)         [ T   T   T   F  ]
    sums             found 1, real 2       over microbatches, devices, processes, batches
    finish           found / real = 0.5    in float64, once
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float, PyTree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Metric:
    """A metric over a data set; `Task.metrics` and `Task.evaluate` return some by name.

    **Fields:**

    - `contributions`: a tree of arrays with leading dim `B`, one contribution per example. Weights
      of examples (`Task.weight`) multiply it. Counts stay exact: they are added up in float32 or
      wider on the devices, exact up to 2²⁴ a batch, and in float64 over batches.
    - `finish(sums)`: a function on the host from the tree's sums, NumPy arrays without the leading
      dim, to a number, an array, or a dict of them.

    >>> import jax.numpy as jnp
    >>> def rmse(predicted, wanted):
    ...     contributions = {"square": (predicted - wanted) ** 2, "count": jnp.ones(len(wanted))}
    ...     return Metric(contributions, lambda sums: (sums["square"] / sums["count"]) ** 0.5)
    """

    contributions: PyTree
    finish: Callable[[PyTree], Any] = dataclasses.field(metadata={"static": True})


def sum_positions(values: Array, where: Array | None) -> Float[Array, "B"]:
    """Return the sum over all dims but the first, of the positions that count, in float32 or wider.

    `where`, of the shape of `values` or None for all.
    """
    kept = values if where is None else jax.numpy.where(where, values, jax.numpy.zeros_like(values))
    return kept.reshape(kept.shape[0], -1).sum(1)


def ratio(part: Any, whole: Any) -> np.ndarray:
    """Return `part / whole` on the host, NaN where `whole` is 0."""
    part, whole = np.broadcast_arrays(np.asarray(part, float), np.asarray(whole, float))
    return np.divide(part, whole, out=np.full(whole.shape, np.nan), where=whole != 0)
