"""TensorFlow: a `tf.data.Dataset` of batches is read as NumPy arrays, in its own order.

A data set that shuffles draws a new order in every pass, from its seed and the number of passes
that were begun before. A resumed run so begins as many passes as the run before it had, and takes
nothing from them.
"""

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
        raise errors.stream_without_batches(what, type(data).__name__)
    if int(data.cardinality()) == tf.data.INFINITE_CARDINALITY:
        raise errors.data_without_end(what)
    return Batches(data)


class Batches(Source):
    """The batches of a `tf.data.Dataset`."""

    by_row = False

    def __init__(self, data: Any) -> None:
        self._data = data
        self._begun = 0  # passes

    def example(self) -> PyTree:
        """Return the first batch."""
        self._begun += 1
        return next(iter(self._data.take(1).as_numpy_iterator()), None)

    def count(self) -> int | None:
        """Return the number of batches, None where TensorFlow does not know it."""
        count = int(self._data.cardinality())
        return count if count >= 0 else None

    def batches(self, how: Reading, epoch: int, start: int) -> Iterator[PyTree]:
        """Yield the batches of a pass; TensorFlow skips those before `start`."""
        for _ in range(self._begun, epoch + 1):  # one more: the first was `example`
            iter(self._data)
        self._begun = max(self._begun, epoch + 1) + 1
        data = self._data.skip(start) if start else self._data
        yield from data.as_numpy_iterator()
