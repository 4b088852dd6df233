"""Create the state of one network, and check that a state belongs to a program."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import PyTree

from plurax import errors, tree
from plurax.execute.gradient import check_parameters, check_trained
from plurax.freezing import check_frozen, trained
from plurax.state import TrainState
from plurax.task import Task
from plurax.weights.start import StartInit, replaced


def new_state(
    task: Task,
    optimizer: optax.GradientTransformation,
    key: Any,
    start: Mapping[str, jax.Array] | None = None,
) -> TrainState:
    """Return the state at step 0; `key` is the key of the seed. Raises `TaskError`.

    `start` are the parameters by path that begin otherwise than the task's `init` has them.
    """
    # One key for the parameters, the other for the steps (dropout), folded with the step number.
    init_key, run_key = jax.random.split(key)
    params, model_state = initial(task, init_key)
    params = replaced(params, start or {})
    check_parameters(params)
    check_frozen(task.frozen, params)
    check_trained(trained(task.frozen, params))
    zero = jnp.zeros((), jnp.int32)
    opt_state = optimizer.init(trained(task.frozen, params))
    return _arrays(TrainState(zero, params, opt_state, model_state, run_key, zero))


def _arrays(state: TrainState) -> TrainState:
    """Return a state whose numbers are arrays, as those are that a step returns.

    Without weak types: a weakly typed leaf would change dtype in the first step and recompile.
    Raises `TaskError` for a leaf that is no array and no number.
    """
    for path, leaf in tree.named_leaves(state).items():
        if not isinstance(leaf, jax.Array | np.ndarray | np.generic | int | float | complex):
            raise errors.TaskError(
                f"the state begins with a {type(leaf).__name__} at {path!r}, and a state has "
                "arrays and numbers alone. Keep the rest out of what init returns: close over it."
            )
    strong = [jnp.asarray(leaf) for leaf in jax.tree.leaves(state)]
    strong = [jax.lax.convert_element_type(leaf, leaf.dtype) for leaf in strong]
    return jax.tree.unflatten(jax.tree.structure(state), strong)


def replace_params(
    state: TrainState, task: Task, optimizer: optax.GradientTransformation, params: PyTree
) -> TrainState:
    """Return a fresh state that begins with given parameters.

    The optimizer's state may depend on the parameters, so it is created from the given ones.
    Raises `BatchError` where structure, shapes or dtypes differ.
    """
    check_state(dataclasses.replace(state, params=params), state)
    opt_state = jax.jit(optimizer.init)(trained(task.frozen, params))
    return _arrays(dataclasses.replace(state, params=params, opt_state=opt_state))


def initial(task: Task, key: Any) -> tuple[PyTree, PyTree]:
    """Return parameters and model state, `()` for a task without state. Raises `TaskError`.

    Of a task that starts from weights the parameters are those without them.
    """
    values = (task.init.fresh if isinstance(task.init, StartInit) else task.init)(key)
    if not task.stateful:
        return values, ()
    if not (isinstance(values, tuple) and len(values) == 2):
        raise errors.TaskError(
            "Task(stateful=True): init(key) must return a pair (params, model_state); it returned "
            "something else."
        )
    return values


def same_shapes(state: TrainState, like: TrainState) -> bool:
    """Return whether structure, shapes and dtypes are equal; cheap enough for every step."""
    leaves, structure = jax.tree.flatten(state)
    wanted, expected = jax.tree.flatten(like)
    same: Any = structure
    return bool(same == expected) and all(
        leaf.shape == want.shape and leaf.dtype == want.dtype
        for leaf, want in zip(leaves, wanted, strict=True)
    )


def check_state(state: TrainState, like: TrainState) -> None:
    """Raise `BatchError` where structure, shapes or dtypes differ."""
    expected, described = tree.describe(like), tree.describe(state)
    if expected != described:
        raise errors.BatchError(
            f"the state does not belong to this program.\n  expected:\n{expected}\n  given:"
            f"\n{described}"
        )


def check_stored(state: TrainState, like: TrainState) -> None:
    """Raise `BatchError` where a stored state is not as the program's, or has another sharding."""
    check_state(state, like)
    for leaf, want in zip(jax.tree.leaves(state), jax.tree.leaves(like), strict=True):
        if not leaf.sharding.is_equivalent_to(want.sharding, leaf.ndim):
            raise errors.BatchError(
                f"the state is on other devices than this program needs ({leaf.sharding} instead "
                f"of {want.sharding}). Move it first: state = program.place(state)."
            )
