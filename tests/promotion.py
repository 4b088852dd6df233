"""No dtype or rank is promoted implicitly in tests, but within optax and in code for readers."""

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

from plurax.task import Layer, Stack, Task


def forbid_promotion() -> None:
    """Make JAX raise in this process where a dtype or a rank is promoted implicitly.

    Plurax and the tests' own models keep to it. Processes started by tests, which run what users
    run, do not see it.
    """
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    # optax promotes nearly everywhere: in every Adam `optax.tree.bias_correction` raises a float to
    # the power of an int32 count, and so do its schedules.
    optax.MultiSteps.gradient_transformation = allowed(optax.MultiSteps.gradient_transformation)
    for module in (optax, optax.contrib):
        for name, function in vars(module).items():
            if not name.startswith("_"):
                setattr(module, name, allowed(function))


@contextlib.contextmanager
def promotion() -> Iterator[None]:
    """JAX's own rules: what a user has who sets nothing."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def allowed(code: Any) -> Any:
    """A function, with what it returns, an optimizer or a task, under JAX's own rules."""
    if isinstance(code, optax.GradientTransformation | Layer):
        return type(code)(*map(allowed, code))
    if isinstance(code, Task | Stack):
        return dataclasses.replace(code, **{k: allowed(v) for k, v in vars(code).items()})
    if not (inspect.isroutine(code) or isinstance(code, functools.partial)):
        return code

    @functools.wraps(code)
    def run(*args: Any, **kwargs: Any) -> Any:
        with promotion():
            made = code(*args, **kwargs)
        return allowed(made)

    return run


def row(vector: jax.Array, x: jax.Array) -> jax.Array:
    """A vector along the last dim of `x`, in the rank of `x`: the same equation as promoting it."""
    return jnp.expand_dims(vector, range(x.ndim - 1))
