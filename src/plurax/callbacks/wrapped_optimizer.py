"""Wrap an optimizer so that wrapping the same one again gives an equal one.

`fit` reuses the compiled program of an equal optimizer. A closure equals nothing but itself, and
the program would be compiled again in each `fit` with the same callback.
"""

import dataclasses
from collections.abc import Callable
from typing import Any


def wrapped(wrap: Callable[..., Any], optimizer: Any, *options: Any) -> Any:
    """Return `wrap(optimizer, *options)`; of a function of hyperparameters, one that wraps too."""
    if not hasattr(optimizer, "update"):
        return _OfHyper(wrap, optimizer, options)
    kind = type(wrap(optimizer, *options))  # it says whether `update` takes the loss
    return kind(*(_Part(name, wrap, optimizer, options) for name in ("init", "update")))


@dataclasses.dataclass(frozen=True)
class _Part:
    """`init` or `update` of a wrapped optimizer."""

    name: str
    wrap: Callable[..., Any]
    optimizer: Any
    options: tuple[Any, ...]

    def __call__(self, *args: Any, **extra: Any) -> Any:
        return getattr(self.wrap(self.optimizer, *self.options), self.name)(*args, **extra)


@dataclasses.dataclass(frozen=True)
class _OfHyper:
    """A function `hyper -> wrapped optimizer`."""

    wrap: Callable[..., Any]
    optimizer: Callable[[Any], Any]
    options: tuple[Any, ...]

    def __call__(self, hyper: Any) -> Any:
        return wrapped(self.wrap, self.optimizer(hyper), *self.options)
