"""Every public function checks its arguments and its result against its annotations, in the tests.

beartype checks types, jaxtyping dtypes and shapes: `Float[np.ndarray, "N C"]` and `Int[np.ndarray,
"N"]` must have the same N. An argument of another type is either refused by the function itself,
with a message of ours, or its annotation is wrong, and the test that passes it fails.
"""

import functools
import inspect
import random
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from beartype import BeartypeConf, FrozenDict, beartype
from beartype._check.code import codemain
from beartype.roar import BeartypeCallHintViolation
from jaxtyping import Int, TypeCheckError, jaxtyped

import plurax as px

# beartype draws which items it checks: from a generator of its own, as Hypothesis watches Python's,
# and to keep and set that one's state at every call takes longer than the check.
codemain.getrandbits = random.Random(0).getrandbits

# Numbers of NumPy and JAX are numbers, and an int is a float.
WHOLE = int | np.integer | Int[np.ndarray | jax.Array, ""]
NUMBERS = {bool: bool | np.bool, int: WHOLE, float: WHOLE | float | np.floating}
TYPECHECKER = beartype(conf=BeartypeConf(hint_overrides=FrozenDict(NUMBERS)))
# JAX puts anything into a tree; the library alone makes steps; an experiment is checked when used.
UNCHECKED = (px.train.TrainState, px.train.StepOutput, px.Experiment)
PACKAGES = (px, px.analysis, px.ensemble, px.pipeline, px.sharding, px.train)


def check_public_names() -> None:
    """Every public function, and the methods of every public class."""
    for package in PACKAGES:
        for name in dir(package):
            value = getattr(package, name)
            if inspect.isfunction(value):
                setattr(package, name, checked(value))
            elif inspect.isclass(value) and value not in UNCHECKED:
                check_methods(value)


def check_methods(cls: type) -> None:
    for name, value in list(vars(cls).items()):
        if name.startswith("_") and name not in ("__init__", "__call__"):
            continue
        if inspect.isfunction(value):
            setattr(cls, name, checked(value))
        elif isinstance(value, classmethod | staticmethod):
            setattr(cls, name, type(value)(checked(value.__func__)))
        elif isinstance(value, property) and value.fget is not None:
            setattr(cls, name, property(checked(value.fget), doc=value.__doc__))


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    # Only shapes need jaxtyping's bookkeeping, which takes far longer than the check itself.
    shapes = any("jaxtyping" in repr(hint) for hint in function.__annotations__.values())
    typed = jaxtyped(function, typechecker=TYPECHECKER) if shapes else TYPECHECKER(function)

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return typed(*args, **kwargs)
        except (TypeCheckError, BeartypeCallHintViolation):
            function(*args, **kwargs)  # a mistake is refused here, in our own words
            raise

    return run
