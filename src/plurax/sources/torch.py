"""PyTorch: tensors are arrays, a map-style Dataset is read in our order, a DataLoader in its own.

Tensors on the CPU become NumPy arrays that share their memory. The examples of a `Dataset` may be
computed, so they are read in every epoch, in the order in which arrays are. A `DataLoader` that
shuffles draws the order of a pass from its generator, or from PyTorch's global one, and so from
whatever ran before it: a resumed run would see another order. Each pass therefore begins with a
seed of its own, the generator's first seed (or the run's) plus the number of the pass.
"""

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
from jaxtyping import PyTree

from plurax import errors
from plurax.sources.source import Examples, Reading, Source


def adapt(what: str, data: Any) -> Any:
    """Return tensors as arrays, data sets and loaders as a `Source`; other objects as they are.

    Raises `BatchError` for an `IterableDataset`, which has no batches.
    """
    import torch
    from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

    if isinstance(data, torch.Tensor):
        return to_array(data)
    if isinstance(data, DataLoader):
        return Loader(what, data)
    if isinstance(data, TensorDataset):
        return tuple(to_array(tensor) for tensor in data.tensors)
    if not isinstance(data, Dataset):
        return data
    count = None if isinstance(data, IterableDataset) else _sized(data)
    if count is None:
        raise errors.BatchError(
            f"{what} is a {type(data).__name__}, which gives examples one by one; write "
            f"torch.utils.data.DataLoader({what}, batch_size=...)."
        )
    if not count:
        raise errors.batch_is_empty()
    return Examples(count, lambda rows: _collated(what, data, rows.tolist()))


def to_array(tensor: Any) -> np.ndarray:
    """Return a tensor as a NumPy array; on the CPU it shares the tensor's memory."""
    import torch

    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:  # NumPy has it from JAX's dtypes, PyTorch does not know
        import jax.numpy as jnp

        return tensor.contiguous().view(torch.int16).numpy().view(jnp.bfloat16)
    return tensor.numpy()


class Loader(Source):
    """The batches of a `DataLoader`; a resumed run reads those before its position again."""

    by_row = False

    def __init__(self, what: str, loader: Any) -> None:
        # A copy with a generator of its own: the user's loader stays as it is.
        self._what, self._loader = what, copy.copy(loader)
        self._sampler = _drawing(loader)
        given = getattr(self._sampler, "generator", None) or loader.generator
        self._seed = given.initial_seed() if given is not None else None
        if hasattr(self._sampler, "generator"):
            self._sampler = copy.copy(self._sampler)
            _replace_sampler(self._loader, loader, self._sampler)

    def example(self) -> PyTree:
        """Return the first batch."""
        return next(self.batches(Reading(1), 0, 0), None)

    def count(self) -> int | None:
        """Return the number of batches, or None where the loader has no length."""
        return _sized(self._loader)

    def batches(self, how: Reading, epoch: int, start: int, saved: Any = None) -> Iterator[PyTree]:
        """Yield the batches of a pass; those before `start` are read and dropped."""
        import torch

        seed = how.seed if self._seed is None else self._seed
        self._loader.generator = torch.Generator().manual_seed((seed + epoch) % 2**63)
        if hasattr(self._sampler, "generator"):
            self._sampler.generator = self._loader.generator
        if hasattr(self._sampler, "set_epoch"):  # a DistributedSampler
            self._sampler.set_epoch(epoch)
        for batch in itertools.islice(self._loader, start, None):
            yield _arrays(self._what, batch)


def _drawing(loader: Any) -> Any:
    """Return the sampler that draws the order of a loader: inside its batch sampler, or itself."""
    return getattr(loader.batch_sampler, "sampler", None) or loader.sampler


def _replace_sampler(loader: Any, original: Any, sampler: Any) -> None:
    """Let a copy of a loader draw its order by another sampler."""
    parts = {"sampler": sampler}
    if hasattr(original.batch_sampler, "sampler"):
        parts["batch_sampler"] = copy.copy(original.batch_sampler)
        parts["batch_sampler"].sampler = sampler
    vars(loader).update(parts)  # a DataLoader refuses to set them


def _sized(data: Any) -> int | None:
    """Return the length of a data set or a loader, None where it has none."""
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        return None


def _collated(what: str, data: Any, rows: list[int]) -> PyTree:
    """Return the examples at some rows as a batch, put together as a DataLoader does."""
    from torch.utils.data import default_collate

    read = getattr(data, "__getitems__", None)
    examples = read(rows) if read else [data[row] for row in rows]
    try:
        return _arrays(what, default_collate(examples))
    except (RuntimeError, TypeError, KeyError) as error:
        raise errors.examples_not_understood(what, str(error)) from error


def _arrays(what: str, batch: Any) -> PyTree:
    """Return a batch with arrays for tensors, and tuples for lists."""
    import torch

    if isinstance(batch, torch.Tensor):
        return to_array(batch)
    if isinstance(batch, dict):
        return {name: _arrays(what, value) for name, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_arrays(what, value) for value in batch))
    if isinstance(batch, list | tuple):
        return tuple(_arrays(what, value) for value in batch)
    if not hasattr(batch, "shape"):
        raise errors.examples_not_understood(what, f"one holds {type(batch).__name__} values")
    return batch
