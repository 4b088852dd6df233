"""Why a loss is not finite: the data, the labels, or training that diverges.

It is looked for once, when the first step of a run was left out, so it costs nothing before.
"""

import functools
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from plurax import tree
from plurax.execute.array_data import ArrayData
from plurax.execute.placement import abstract_batch
from plurax.execute.program import Program
from plurax.loop.epoch_metrics import EpochMetrics
from plurax.loop.hook import MetricsHook
from plurax.loop.run import Run
from plurax.task import Task
from plurax.tree import with_rows

LARGE_NORM = 1e3
"""A mean norm of gradients from which training is said to diverge."""

LARGEST_PART = 1 << 28
"""Numbers of an array that are looked at."""


class NotFiniteGuard(MetricsHook):
    """Warns of steps that were left out, and says why, in the first process.

    **Arguments:** `source`, the data of training.
    """

    def __init__(self, source: Any) -> None:
        self._source = source

    def on_metrics(self, run: Run, metrics: EpochMetrics) -> None:
        """Warn of those that were not warned of before."""
        if run.is_primary:
            why = functools.partial(why_not_finite, run.program, self._source)
            metrics.warn_not_finite(run.step, why)


def why_not_finite(program: Program, source: Any, mean_norm: Any) -> str:
    """Return sentences on what the data and the gradients say; "" where they say nothing.

    **Arguments:** `source`, the data of training, looked at where they are arrays; `mean_norm`,
    the mean norm of the gradients of the epoch's finite steps, of members `(members,)`.
    """
    sentences = []
    if isinstance(source, ArrayData):
        sentences = [*_of_values(source.arrays), *_of_labels(program, source.arrays)]
    norms = np.asarray(mean_norm, np.float64)
    largest = float(norms[np.isfinite(norms)].max(initial=0.0))
    if largest > LARGE_NORM:
        sentences.append(
            f"The mean norm of the gradients was {largest:.3g} before: training diverges. A "
            "smaller learning rate or optax.clip_by_global_norm may help."
        )
    return " ".join(sentences)


def _of_values(arrays: PyTree) -> list[str]:
    sentences = []
    for path, leaf in tree.named_leaves(arrays).items():
        part = _part(leaf)
        name = path or "the array"
        if part.dtype == np.uint8 and part.max(initial=0) > 1:
            sentences.append(
                f"{name} is uint8, with values up to {part.max()}: scale it, such as "
                f"{name}.astype(np.float32) / 255."
            )
        if part.dtype.kind in "fc" and not np.isfinite(part).all():
            bad = np.flatnonzero(~np.isfinite(part).reshape(len(part), -1).all(axis=1))
            sentences.append(
                f"{name} has NaN or infinite values in {len(bad)} of {len(part)} rows, the first "
                f"is row {bad[0]}: leave them out or replace them; each comes again in every epoch."
            )
    return sentences


def _of_labels(program: Program, arrays: PyTree) -> list[str]:
    """Compare integers, one a row, with the number of outputs of one network's `predict`."""
    task, like = program.task, with_rows(abstract_batch(arrays), 1)
    if not isinstance(task, Task) or task.predict is None or program.members is not None:
        return []
    state = program.canonical_shapes
    states = (state.model_state,) if task.stateful else ()
    try:
        outputs = jax.tree.leaves(jax.eval_shape(task.predict, state.params, *states, like))
    except Exception:  # it wants other inputs than the batch: nothing is known of its outputs
        return []
    if len(outputs) != 1 or outputs[0].ndim != 2 or outputs[0].shape[1] < 2:
        return []
    count, sentences = outputs[0].shape[1], []
    for path, leaf in tree.named_leaves(arrays).items():
        part = _part(leaf)
        if part.dtype.kind not in "iu" or part.ndim != 1:
            continue
        if part.min() < 0 or part.max() >= count:
            sentences.append(
                f"{path or 'the array'} has values from {part.min()} to {part.max()}, and predict "
                f"has {count} outputs: labels of classes must be from 0 to {count - 1}."
            )
    return sentences


def _part(leaf: Any) -> np.ndarray:
    size = max(1, int(np.prod(leaf.shape[1:])))
    return np.asarray(leaf[: max(1, LARGEST_PART // size)])
