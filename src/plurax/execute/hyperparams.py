"""Read and set what an optimizer reads from its own state: the learning rate, say.

`optax.inject_hyperparams` keeps the arguments of an optimizer as arrays in its state, in a dict
`hyperparams`. They are leaves of the stored state under every plan, so a new value replaces one
leaf, in its sharding; nothing is compiled, and no other leaf is touched. Example, Adam under
`Plan(data=2, zero=1)`:

    opt_state/hyperparams/learning_rate    f32[], P()          set to 1e-4: this leaf alone is new
    opt_state/inner_state/0/mu/w           f32[8, 4], P("data")
"""

import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from plurax import errors
from plurax.distributed.global_arrays import fetch
from plurax.execute.layouts.state_layout import StateLayout
from plurax.state import TrainState

KEPT = re.compile(r"opt_state/(?:[^,]*/)?hyperparams/[^,/]+")
"""The path of a hyperparameter that `optax.inject_hyperparams` keeps."""
SCHEDULED = re.compile(r"(opt_state/(?:[^,]*/)?hyperparams)_states(/[^,/]+)/")
"""The path of the state of a schedule, which writes its hyperparameter in every step."""


class Hyperparams:
    """The hyperparameters in the optimizer's state of a program.

    **Arguments:** `layout`, of the program's state; `members`, their number, None for one network.
    """

    def __init__(self, layout: StateLayout, members: int | None) -> None:
        paths = jax.tree.leaves(layout.names)
        self._members = members
        self._leaves = {path: index for index, path in enumerate(paths) if KEPT.fullmatch(path)}
        self._scheduled = {match[1] + match[2] for match in map(SCHEDULED.match, paths) if match}

    def read(self, state: TrainState) -> dict[str, Any]:
        """Return each hyperparameter by its name, of members an array `(members,)`.

        Of several with one name, as under `optax.partition`, each by its path.
        """
        leaves, names = jax.tree.leaves(state), [_name(path) for path in self._leaves]
        values = {
            _name(path) if names.count(_name(path)) == 1 else path: fetch(leaves[index])
            for path, index in self._leaves.items()
        }
        if self._members is None:
            return {name: np.asarray(value).tolist() for name, value in values.items()}
        return {name: np.asarray(value)[: self._members] for name, value in values.items()}

    def set(self, state: TrainState, values: Mapping[str, Any]) -> TrainState:
        """Return the state with other hyperparameters; the state that was given stays valid.

        **Arguments:** `values`, by name or path: a number, of members also one for each.

        Raises `TaskError` for a name that the state does not have, that stands for several, or
        that follows a schedule, and for a value that is no finite number.
        """
        leaves, structure = jax.tree.flatten(state)
        for name, value in values.items():
            index = self._leaves[self._path(name)]
            leaves[index] = self._like(leaves[index], name, value)
        return jax.tree.unflatten(structure, leaves)

    def _path(self, name: str) -> str:
        """Return the path of the only hyperparameter of a name or path."""
        paths = [path for path in self._leaves if name in (path, _name(path))]
        if not paths:
            there = sorted({_name(path) for path in self._leaves})
            way = f"; it keeps {', '.join(there)}."
            if not there:
                way = (
                    f", nor any other. Write optax.inject_hyperparams(optax.adam)({name}=1e-3) for "
                    "optax.adam(1e-3)."
                )
            raise errors.TaskError(f"the optimizer's state keeps no hyperparameter {name!r}{way}")
        if len(paths) > 1:
            raise errors.TaskError(
                f"several hyperparameters of the optimizer are named {name!r}. Give the path of "
                f"one: {', '.join(paths)}."
            )
        if paths[0] in self._scheduled:
            raise errors.TaskError(
                f"the hyperparameter {name!r} follows a schedule, which would replace another "
                "value in the next step. Give optax.inject_hyperparams a number in place of the "
                "schedule."
            )
        return paths[0]

    def _like(self, leaf: jax.Array, name: str, value: Any) -> jax.Array:
        """Return a value as an array of a leaf's shape, dtype and sharding."""
        try:
            array = np.asarray(value, np.float64)
        except (TypeError, ValueError):
            raise errors.hyperparam_not_a_number(name, value, self._members) from None
        if not np.isfinite(array).all() or array.shape not in ((), (self._members,)):
            raise errors.hyperparam_not_a_number(name, value, self._members)
        # Repeated members fill the last slots of a population, as its layout has it.
        whole = np.resize(array, leaf.shape).astype(leaf.dtype)
        return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda at: whole[at])


def _name(path: str) -> str:
    return path.rsplit("/", 1)[-1]
