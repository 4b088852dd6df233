"""Iterables of batches, Grain's among them, as a `Source`; one pass over them is an epoch."""

import itertools
from collections.abc import Iterable, Iterator, Sized
from typing import Any

from jaxtyping import PyTree

from plurax import errors
from plurax.sources.source import Reading, Source


def as_source(data: "Iterable[PyTree] | Source") -> Source:
    """Return data that come in batches as a `Source`."""
    return data if isinstance(data, Source) else Iterables(data)


class Iterables(Source):
    """The batches of an iterable.

    A Grain iterator has a state, so a resumed run goes on at once; any other iterable is read again
    up to the batch.
    """

    by_row = False
    kind = "iterable"

    def __init__(self, data: Iterable[PyTree]) -> None:
        self._data: Any = data

    def example(self) -> PyTree:
        """Return the first batch, None where there is none.

        A Grain dataset that is read by index reads hundreds of batches ahead once it is iterated.
        """
        by_index = any(kind.__module__.startswith("grain.") for kind in type(self._data).__mro__)
        if by_index and hasattr(self._data, "__getitem__") and len(self._data):
            first = self._data[0]
            if first is not None:  # None: filtered out
                return first
        return next(iter(self._data), None)

    def count(self) -> int | None:
        """Return the number of batches, None where the iterable has no length."""
        return len(self._data) if isinstance(self._data, Sized) else None

    def batches(self, how: Reading, epoch: int, start: int, saved: Any = None) -> Iterator[PyTree]:
        """Return an iterator of a pass; those before `start` are read, unless it has a state.

        Raises `BatchError` where the iterator rejects its saved state.
        """
        iterator = iter(self._data)
        if saved is None or not _is_stateful(iterator):
            next(itertools.islice(iterator, start, start), None)  # takes `start` batches
            return iterator
        try:
            iterator.set_state(saved)
        except (ValueError, TypeError, KeyError, IndexError) as error:
            raise errors.BatchError(
                f"the data cannot be restored to their saved position: {error}\nGive the data that "
                "the run was trained on, or train anew in another directory."
            ) from error
        return iterator


def state_of(iterator: Any) -> Any:
    """Return the state of an iterator that has one, as Grain's do, else None."""
    return iterator.get_state() if _is_stateful(iterator) else None


def _is_stateful(iterator: Any) -> bool:
    return hasattr(iterator, "get_state") and hasattr(iterator, "set_state")
