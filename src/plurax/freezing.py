"""Freeze parameters: they have no gradient, no optimizer state, and nothing is reduced for them.

A task names its frozen parameters by patterns of their paths. Gradients and optimizer state are
trees like the parameters with an `optax.MaskedNode`, which has no leaves, in place of each frozen
one, as `optax.masked` has it. Example, `frozen=("embed/*",)`:

    parameters         {"embed": {"w": f32[100, 8]}, "head": {"w": f32[8, 10]}}
    differentiated     {"embed": {"w": MaskedNode()}, "head": {"w": f32[8, 10]}}
    Adam's mu, nu      the same
"""

import dataclasses
import fnmatch
from collections.abc import Sequence
from typing import Any

import jax
import optax
from jaxtyping import PyTree

from plurax import errors, tree
from plurax.task import Task


def freeze(task: Task, *patterns: str) -> Task:
    """Return a task whose parameters with matching paths are not trained.

    Frozen parameters have no gradient and no optimizer state, and no device sends anything for
    them; they are split, packed and saved as others. Freezing more parameters adds to those that
    are frozen already.

    **Arguments:** `patterns`, of paths as `jax.tree_util.keystr(path, simple=True, separator="/")`
    writes them, with the wildcards of `fnmatch`: `"embed/*"` is all of `embed`, at any depth.

    Raises `TaskError`, once the parameters are known, for a pattern that matches none, and where
    none are left to train.

    >>> import jax, jax.numpy as jnp
    >>> task = Task(
    ...     init=lambda key: {"base": jnp.ones(3), "head": jnp.zeros(3)},
    ...     loss=lambda params, batch, keys: batch["x"] @ (params["base"] * params["head"]),
    ... )
    >>> freeze(task, "base").frozen
    ('base',)
    """
    if not isinstance(task, Task):
        raise errors.needs_a_task("plurax.freeze", type(task).__name__)
    return dataclasses.replace(task, frozen=(*task.frozen, *patterns))


def frozen_leaves(frozen: Sequence[str], params: PyTree) -> list[bool]:
    """Return for each parameter whether a pattern matches its path."""
    names = tree.named_leaves(params)
    return [any(fnmatch.fnmatchcase(name, one) for one in frozen) for name in names]


def check_frozen(frozen: Sequence[str], params: PyTree) -> None:
    """Raise `TaskError` for a pattern that matches no parameter, and where none is left."""
    names = list(tree.named_leaves(params))
    for pattern in frozen:
        if not fnmatch.filter(names, pattern):
            raise errors.TaskError(
                f"frozen={pattern!r} matches no parameter; their paths are {', '.join(names)}. A "
                "pattern matches a whole path: 'embed/*' is all of `embed`, at any depth."
            )
    if frozen and all(frozen_leaves(frozen, params)):
        raise errors.TaskError(
            f"the patterns {', '.join(map(repr, frozen))} freeze every parameter, and none is left "
            "to train."
        )


def trained(frozen: Sequence[str], params: PyTree) -> PyTree:
    """Return a tree like the parameters without its frozen leaves.

    `params` may be any tree of the parameters' structure, of shardings, say.
    """
    if not frozen:
        return params
    leaves, structure = jax.tree.flatten(params)
    pairs = zip(leaves, frozen_leaves(frozen, params), strict=True)
    return jax.tree.unflatten(structure, [optax.MaskedNode() if no else x for x, no in pairs])


def with_frozen(some: PyTree, params: PyTree) -> PyTree:
    """Return the parameters with those leaves replaced that are in `some`, as `trained` gave it."""
    return jax.tree.map(
        lambda new, old: old if _is_masked(new) else new, some, params, is_leaf=_is_masked
    )


def _is_masked(node: Any) -> bool:
    return isinstance(node, optax.MaskedNode)
