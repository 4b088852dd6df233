"""Wrap an optimizer so that wrapping the same one again gives an equal one.

`fit` reuses the compiled program of an equal optimizer. A closure equals nothing but itself, and
the program would be compiled again in each `fit` with the same callback.
"""

import dataclasses
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class _Partial:
    """As `functools.partial`, but equal where function and bound arguments are."""

    fun: Callable[..., Any]
    bound: tuple[Any, ...]

    def __call__(self, *args: Any, **extra: Any) -> Any:
        return self.fun(*self.bound, *args, **extra)


def wrapped(wrap: Callable[..., Any], optimizer: Any, *options: Any) -> Any:
    """Return `wrap(optimizer, *options)`; of a function of hyperparameters, one that wraps too."""
    if not hasattr(optimizer, "update"):
        return _Partial(_of_hyper, (wrap, optimizer, options))
    kind = type(wrap(optimizer, *options))  # it says whether `update` takes the loss
    return kind(*(_Partial(_call, (name, wrap, optimizer, options)) for name in ("init", "update")))


def _call(name: str, wrap: Any, optimizer: Any, options: Any, *args: Any, **extra: Any) -> Any:
    return getattr(wrap(optimizer, *options), name)(*args, **extra)


def _of_hyper(wrap: Any, optimizer: Any, options: Any, hyper: Any) -> Any:
    return wrapped(wrap, optimizer(hyper), *options)
