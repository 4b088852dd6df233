"""A `Task` from a Flax Linen module."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jaxtyping import Array, Float, Key, PyTree

from plurax import errors
from plurax.adapters.model_functions import ModelFunctions, three
from plurax.state import TrainState
from plurax.task import Task
from plurax.tree import named_leaves
from plurax.validate import check_takes

try:
    from flax import linen as nn
except ImportError as error:
    raise errors.missing_extra("flax", "flax") from error

Apply = Callable[..., Any]


def task(
    module: nn.Module,
    init: Callable[[Key[Array, ""]], PyTree],
    loss: Callable[..., Any],
    *,
    predict: Callable[[Apply, PyTree], PyTree] | None = None,
    evaluate: Callable[[Apply, PyTree], Any] | None = None,
    metrics: Callable[[Apply, PyTree], dict[str, Any]] | None = None,
    weight: Callable[[PyTree], Float[Array, "B"]] | None = None,
    coupled: bool = False,
) -> Task:
    """A task from a Linen module; its functions take `apply` where those of `Task` take params.

    `apply(*args, **kwargs)` is `module.apply(variables, *args, **kwargs)`: `rngs`, `mutable`,
    `method` and the module's own arguments mean what they always do. It is a JAX tree, so that
    `plurax.per_example` lifts a `loss(apply, example, key)` written for one example; dropout takes
    that example's key: `apply(x, train=True, rngs={"dropout": key})`.

    **Arguments:**

    - `module`: the Linen module.
    - `init(key)`: its variables, as in `lambda key: module.init(key, jnp.ones((1, 8)))`.
    - `loss(apply, batch, keys)`: one loss per example, shape `(B,)`, or a pair of that and
      `{name: (B,) metrics}`; `keys`, shape `(B,)`, holds a random key per example. With `coupled`
      it is `loss(apply, batch, keys, mask)`.
    - `predict(apply, inputs)`, `evaluate(apply, batch)`, `metrics(apply, batch)`, `weight`,
      `coupled`: as for `Task`.

    The collection `params` is trained. Every other one, such as `batch_stats`, is model state: the
    task then needs `coupled`, and the loss returns `(losses, metrics, updates)` with the updates
    that `apply(..., mutable=["batch_stats"])` gave. Batch norm is exact over ragged batches if it
    gets the mask, with a dim for each of its input's: `nn.BatchNorm(...)(x, mask=mask[:, None])`.

    **Returns:** a `Task`.

    Raises `TaskError` where the module has state and the task is not coupled; and, once it is
    compiled, where the loss of a module with state returns no updates.

    >>> import jax, jax.numpy as jnp, optax, plurax as px
    >>> from flax import linen as nn
    >>> module = nn.Dense(1)
    >>> task = px.adapters.linen.task(
    ...     module,
    ...     init=lambda key: module.init(key, jnp.ones((1, 3))),
    ...     loss=lambda apply, batch, keys: (apply(batch["x"])[:, 0] - batch["y"]) ** 2,
    ...     predict=lambda apply, inputs: apply(inputs["x"])[:, 0],
    ... )
    >>> batch = {"x": jnp.eye(3), "y": jnp.arange(3.0)}
    >>> program = px.compile(task, optax.adam(0.1), px.Plan(), batch)
    >>> state = program.init(seed=0)
    >>> for _ in range(200):
    ...     state, metrics = program.step(state, batch)
    >>> bool(metrics["loss"] < 1e-3)
    True
    """
    if not isinstance(module, nn.Module):
        kind = module.__name__ if isinstance(module, type) else type(module).__name__
        raise errors.TaskError(
            f"linen.task(module=...) got a {kind}; give an instance of the module: MyModule(...)."
        )
    check_takes("linen.task(init=...)", init, "key")
    functions = ModelFunctions(loss, predict, evaluate, metrics, weight, coupled)
    fresh = jax.eval_shape(lambda: init(jax.random.key(0)))
    _, kept = _cut(fresh)
    functions.check("linen", "apply", named_leaves(kept))
    boxes = jax.tree.leaves(fresh, is_leaf=_is_box)
    apply = _without_mesh(module.apply) if any(map(_is_box, boxes)) else module.apply

    def call(variables: PyTree, *args: Any, **kwargs: Any) -> Any:
        return apply(variables, *args, **kwargs)

    def bind(params: PyTree, state: PyTree = ()) -> Apply:
        return jax.tree_util.Partial(call, _join(params, state))

    def updated(_: Apply, output: Any, state: PyTree) -> tuple[Any, Any, PyTree]:
        where = f"the loss of a module with state ({', '.join(state)})"
        expected = "(losses, metrics, updates), where apply(..., mutable=[...]) gave the updates"
        losses, metrics, updates = three(output, where, expected)
        if not isinstance(updates, Mapping):
            raise errors.loss_wrong_structure(where, "something else", expected)
        return losses, metrics, {name: updates.get(name, state[name]) for name in state}

    init = _without_mesh(init)
    if kept:
        return functions.task(lambda key: _cut(init(key)), bind, updated=updated)
    return functions.task(lambda key: _cut(init(key))[0], bind)


def variables(state: TrainState) -> dict[str, PyTree]:
    """The trained variables, for `module.apply`: `params` and whatever other collections there are.

    The arrays are those of `state`; a later step with this state uses them up.

    >>> import jax, jax.numpy as jnp, optax, plurax as px
    >>> from flax import linen as nn
    >>> module = nn.Dense(2)
    >>> task = px.adapters.linen.task(
    ...     module,
    ...     init=lambda key: module.init(key, jnp.ones((1, 3))),
    ...     loss=lambda apply, batch, keys: apply(batch["x"])[:, 0],
    ... )
    >>> program = px.compile(task, optax.sgd(0.1), px.Plan(), {"x": jnp.ones((4, 3))})
    >>> module.apply(px.adapters.linen.variables(program.init(seed=0)), jnp.ones((5, 3))).shape
    (5, 2)
    """
    return _join(state.params, state.model_state)


def _cut(variables: PyTree) -> tuple[PyTree, dict[str, PyTree]]:
    """The collection `params`, and the others; no partitioning boxes, for the plan decides that."""
    others = dict(nn.unbox(variables))
    return others.pop("params", {}), others


def _is_box(node: Any) -> bool:
    return isinstance(node, nn.meta.AxisMetadata)


def _without_mesh(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Return `fun`, traced outside of any mesh.

    `nn.with_partitioning` names axes of the user's own mesh. Inside a mesh Flax asks JAX for these
    shardings wherever a parameter is read, which fails: the plan's axes are not the user's, and
    `nn.DenseGeneral` does so before it gives the parameter its dims.
    """

    def traced(*args: Any, **kwargs: Any) -> Any:
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
            return fun(*args, **kwargs)

    return traced


def _join(params: PyTree, state: PyTree) -> dict[str, PyTree]:
    return {"params": params, **dict(state)}
