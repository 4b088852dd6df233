"""Labels of parameters by their paths, for optimizers that treat some otherwise than others."""

import fnmatch
from collections.abc import Callable, Mapping

import jax
from jaxtyping import PyTree

from plurax import errors, tree


def labels(patterns: Mapping[str, str], default: str | None = None) -> Callable[[PyTree], PyTree]:
    """Return a function from parameters to a tree of labels, for `optax.partition`.

    **Arguments:**

    - `patterns`: a label for each pattern of paths, with the wildcards of `fnmatch`; the first that
      matches counts.
    - `default`: the label of parameters that no pattern matches.

    The function raises `TaskError` for a pattern that matches nothing, and without a default for a
    parameter that has no label.

    >>> import optax
    >>> head_first = optax.partition(
    ...     {"head": optax.adam(1e-2), "rest": optax.adam(1e-4)},
    ...     labels({"head/*": "head"}, default="rest"),
    ... )
    """

    def label(params: PyTree) -> PyTree:
        names = list(tree.named_leaves(params))
        for pattern in patterns:
            if not fnmatch.filter(names, pattern):
                raise errors.TaskError(
                    f"labels: the pattern {pattern!r} matches no parameter; their paths are "
                    f"{', '.join(names)}."
                )
        found_labels = []
        for name in names:
            matching = (one for text, one in patterns.items() if fnmatch.fnmatchcase(name, text))
            own = next(matching, default)
            if own is None:
                raise errors.TaskError(
                    f"labels: no pattern matches the parameter {name!r}; add one, or give "
                    "labels(default=...)."
                )
            found_labels.append(own)
        return jax.tree.unflatten(jax.tree.structure(params), found_labels)

    return label
