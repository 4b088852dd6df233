"""TensorFlow: a `tf.data.Dataset` of batches is read as NumPy arrays, in its own order.

A data set that shuffles draws a new order in every pass, from its seed and the number of passes
that were begun before. A resumed run so begins as many passes as the run before it had, and takes
nothing from them.
"""

import itertools
from collections.abc import Iterator
from typing import Any

from jaxtyping import PyTree

from plurax import errors
from plurax.sources.source import Reading, Source


def adapt(what: str, data: Any) -> Any:
    """Return a data set of batches as a `Source`; other objects (tensors) as they are.

    Raises `BatchError` for single examples, and for a data set without an end.
    """
    if not (hasattr(data, "as_numpy_iterator") and hasattr(data, "element_spec")):
        return data
    import tensorflow as tf

    specs = tf.nest.flatten(data.element_spec)
    if any(getattr(spec, "shape", None) == () for spec in specs):
        raise errors.BatchError(
            f"{what} is a {type(data).__name__} of single examples, and training takes batches; "
            f"write {what}.batch(batch_size)."
        )
    if int(data.cardinality()) == tf.data.INFINITE_CARDINALITY:
        raise errors.BatchError(
            f"{what} repeats without end, and an epoch is one pass; leave .repeat() out, or write "
            f"{what}.take(batches)."
        )
    return Batches(data)


class Batches(Source):
    """The batches of a `tf.data.Dataset`."""

    by_row = False

    def __init__(self, data: Any) -> None:
        self._data = data
        self._begun = 0  # passes
        # The first pass, of which the first batch was looked at: TensorFlow has filled its buffers.
        self._first: Iterator[PyTree] | None = None

    def example(self) -> PyTree:
        """Return the first batch; the pass goes on with it."""
        iterator = self._pass()
        first = next(iterator, None)
        if self._begun == 1 and first is not None:
            self._first = itertools.chain([first], iterator)
        return first

    def count(self) -> int | None:
        """Return the number of batches, None where TensorFlow does not know it."""
        count = int(self._data.cardinality())
        return count if count >= 0 else None

    def batches(self, how: Reading, epoch: int, start: int, saved: Any = None) -> Iterator[PyTree]:
        """Yield the batches of a pass; those before `start` are read and dropped."""
        first, self._first = self._first, None
        if epoch or first is None:
            for _ in range(self._begun, epoch):
                self._pass()
            first = self._pass()
        yield from itertools.islice(first, start, None)

    def _pass(self) -> Iterator[PyTree]:
        self._begun += 1
        return iter(self._data.as_numpy_iterator())
