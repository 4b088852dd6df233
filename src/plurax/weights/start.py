"""Start training from given weights.

The weights stay on the host until the program creates its state. Each device is then given its own
shards, so that no weight is whole on a device that does not need it whole, and no program holds
weights as constants.
"""

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from plurax import errors, tree
from plurax.task import Task
from plurax.weights.read import load

Rename = Callable[[str], str | None] | Mapping[str, str]


@dataclasses.dataclass(frozen=True, eq=False)
class StartInit:
    """`Task.init` of a task that starts from weights.

    **Fields:** `fresh`, the task's own `init`; `weights`, by path those that replace its
    parameters; `stateful`, whether `init` returns model state too.
    """

    fresh: Callable[[Any], Any]
    weights: Mapping[str, np.ndarray]
    stateful: bool

    def __call__(self, key: Any) -> Any:
        """Return the parameters, those of the weights from there."""
        made = self.fresh(key)
        if not self.stateful:
            return replaced(made, self.weights)
        params, model_state = made
        return replaced(params, self.weights), model_state


def start_from(
    task: Task,
    weights: str | os.PathLike[str] | PyTree,
    *,
    rename: Rename | None = None,
    strict: bool = True,
) -> Task:
    """Return a task whose training starts from weights instead of `task.init`'s parameters.

    The weights are put on the devices in their sharding, under every plan; of a population every
    member starts from them.

    **Arguments:**

    - `weights`: a file or folder, as `plurax.weights.load` reads it, or a tree of arrays like the
      parameters, or a dict of them by path (`"encoder/0/kernel"` or `"encoder.0.kernel"`).
    - `rename`: a function from a name in `weights` to the path of a parameter, None to leave it
      out; or a dict of the beginnings of names: `{"model/layers": "blocks"}`.
    - `strict`: whether every parameter must be in the weights, and every weight be a parameter's.
      Otherwise the others start as `task.init` has them, and other weights are left out.

    Weights are converted to the dtypes of the parameters. Raises `CheckpointError` that shows the
    parameters that are missing, left over or of another shape, and no others.

    >>> import jax.numpy as jnp, numpy as np
    >>> task = Task(init=lambda key: {"w": jnp.zeros(3)}, loss=lambda params, batch, keys: batch)
    >>> start_from(task, {"w": np.ones(3, np.float32)}).init(None)["w"]
    Array([1., 1., 1.], dtype=float32)
    """
    if not isinstance(task, Task):
        raise errors.needs_a_task("plurax.start_from", type(task).__name__)
    given = load(weights) if isinstance(weights, str | os.PathLike) else tree.named_leaves(weights)
    named = _renamed({name.replace(".", "/"): leaf for name, leaf in given.items()}, rename)
    fresh = task.init.fresh if isinstance(task.init, StartInit) else task.init
    made = jax.eval_shape(fresh, jax.random.key(0))
    wanted = tree.named_leaves(made[0] if task.stateful else made)
    kept = task.init.weights if isinstance(task.init, StartInit) else {}
    known = {**kept, **{name: leaf for name, leaf in named.items() if name in wanted}}
    # A checkpoint has no arrays without elements.
    missing = [name for name, leaf in wanted.items() if name not in known and 0 not in leaf.shape]
    unused = [name for name in named if name not in wanted]
    shapes = {
        name: (wanted[name].shape, np.shape(leaf))
        for name, leaf in known.items()
        if wanted[name].shape != np.shape(leaf)
    }
    if shapes or not known or (strict and (missing or unused)):
        raise errors.weights_differ(missing, unused, shapes, strict)
    host = {name: np.asarray(leaf, wanted[name].dtype) for name, leaf in known.items()}
    return dataclasses.replace(task, init=StartInit(fresh, host, task.stateful))


def replaced(params: PyTree, weights: Mapping[str, Any]) -> PyTree:
    """Return the parameters with those of `weights` in place of them, by path."""
    if not weights:
        return params
    return jax.tree.map_with_path(
        lambda path, leaf: jnp.asarray(weights.get(tree.path_name(path), leaf)), params
    )


def _renamed(named: dict[str, Any], rename: Rename | None) -> dict[str, Any]:
    if rename is None:
        return named
    change = rename if callable(rename) else _by_beginning(rename)
    pairs = ((change(name), leaf) for name, leaf in named.items())
    return {new: leaf for new, leaf in pairs if new is not None}


def _by_beginning(beginnings: Mapping[str, str]) -> Callable[[str], str]:
    """Return a function that replaces the longest matching beginning of a path, at a slash."""
    known = {old.replace(".", "/").strip("/"): new for old, new in beginnings.items()}

    def change(name: str) -> str:
        for old in sorted(known, key=len, reverse=True):
            if name == old or name.startswith(f"{old}/"):
                return f"{known[old].strip('/')}{name[len(old) :]}".strip("/")
        return name

    return change
