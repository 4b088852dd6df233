"""A `Task` from an Equinox module."""

import gc
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key, PyTree

from plurax import errors
from plurax.adapters.model_functions import ModelFunctions
from plurax.state import TrainState
from plurax.task import Task
from plurax.validate import check_takes

try:
    import equinox as eqx
except ImportError as error:
    raise errors.missing_extra("equinox", "equinox") from error

Build = Callable[[Key[Array, ""]], eqx.Module]


def task(
    build: Build,
    loss: Callable[..., Any],
    *,
    predict: Callable[[Any, PyTree], PyTree] | None = None,
    evaluate: Callable[[Any, PyTree], Any] | None = None,
    metrics: Callable[[Any, PyTree], dict[str, Any]] | None = None,
    weight: Callable[[PyTree], Float[Array, "B"]] | None = None,
    coupled: bool = False,
) -> Task:
    """A task from an Equinox module; its functions take the model where `Task`'s take params.

    **Arguments:**

    - `build(key)`: makes the model, always with the same structure.
    - `loss(model, batch, keys)`: one loss per example, shape `(B,)`, or a pair of that and
      `{name: (B,) metrics}`; `keys`, shape `(B,)`, holds a random key per example. Equinox models
      take one example, so `jax.vmap` the model here, or write `f(model, example, key)` and pass
      `plurax.per_example(f)`; dropout takes that example's key. With `coupled` it is
      `loss(model, batch, keys, mask)`.
    - `predict(model, inputs)`, `evaluate(model, batch)`, `metrics(model, batch)`: as for `Task`;
      the model is in inference mode (`eqx.nn.inference_mode`).
    - `weight`, `coupled`: as for `Task`.

    Floating arrays are trained. Other arrays (indices, say) are constants, those of
    `build(jax.random.key(0))` whatever the seed.

    **Returns:** a `Task`. Its parameters are the model with None for all that is not trained.

    Raises `TaskError` for a model with `eqx.nn.State` (batch norm), which takes no mask.

    >>> import equinox as eqx, jax, jax.numpy as jnp, optax, plurax as px
    >>> task = px.adapters.equinox.task(
    ...     build=lambda key: eqx.nn.Linear(3, "scalar", key=key),
    ...     loss=lambda model, batch, keys: (jax.vmap(model)(batch["x"]) - batch["y"]) ** 2,
    ...     predict=lambda model, inputs: jax.vmap(model)(inputs["x"]),
    ... )
    >>> batch = {"x": jnp.eye(3), "y": jnp.arange(3.0)}
    >>> program = px.compile(task, optax.adam(0.1), px.Plan(), batch)
    >>> state = program.init(seed=0)
    >>> for _ in range(200):
    ...     state, metrics = program.step(state, batch)
    >>> bool(metrics["loss"] < 1e-3)
    True
    """
    if isinstance(build, eqx.Module):
        raise errors.build_is_a_module("equinox", type(build).__name__, "key")
    check_takes("equinox.task(build=...)", build, "key")
    functions = ModelFunctions(loss, predict, evaluate, metrics, weight, coupled)
    functions.check("equinox", "model")
    skeleton = _Skeleton(build)
    return functions.task(
        lambda key: skeleton.params_of(build(key)),
        skeleton.model,
        inference=skeleton.inference_model,
    )


def model(build: Build, state: TrainState) -> Any:
    """The trained model, in inference mode.

    **Arguments:** `build`, as given to `task`; `state`, the trained state, whose arrays the model
    shares (a later step with this state uses them up).

    >>> import equinox as eqx, jax, jax.numpy as jnp, optax, plurax as px
    >>> build = lambda key: eqx.nn.Linear(3, 2, key=key)
    >>> task = px.adapters.equinox.task(
    ...     build, lambda model, batch, keys: jax.vmap(model)(batch["x"])[:, 0]
    ... )
    >>> program = px.compile(task, optax.sgd(0.1), px.Plan(), {"x": jnp.ones((4, 3))})
    >>> px.adapters.equinox.model(build, program.init(seed=0))(jnp.ones(3)).shape
    (2,)
    """
    return _Skeleton(build).inference_model(state.params)


class _Skeleton:
    """A model without its arrays, to be filled any number of times.

    A function that `build` makes may close over an array (flowjax masks weights so). In a skeleton
    that is a tracer of a trace which has ended, so such a model is built anew in each trace.
    """

    def __init__(self, build: Build) -> None:
        self._build = build
        empty = eqx.filter_eval_shape(lambda: build(jax.random.key(0)))
        if any(map(_is_state, jax.tree.leaves(empty, is_leaf=_is_state))):
            raise errors.TaskError(
                "the model has layers with state (eqx.nn.BatchNorm, say), which average over all "
                "rows of a batch and take no mask, so that rows that only fill up a batch would "
                "enter. Use a layer without state, such as eqx.nn.GroupNorm or eqx.nn.LayerNorm."
            )
        self._params, rest = eqx.partition(empty, _is_trained)
        self._constants, self._static = eqx.partition(rest, _is_shape)
        self._has_tracer = _refers_to_tracer(self._static)
        # Compiled, so that the parameters, which nobody reads, are never made.
        self._made = jax.jit(lambda: eqx.filter(build(jax.random.key(0)), _is_constant))

    def params_of(self, model: Any) -> PyTree:
        """The trained arrays, in one structure for good: two builds may not compare equal."""
        return _fill(self._params, eqx.filter(model, eqx.is_inexact_array))

    def model(self, params: PyTree) -> Any:
        """The model with these parameters."""
        if self._has_tracer:
            like, rest = eqx.partition(self._build(jax.random.key(0)), eqx.is_inexact_array)
            return eqx.combine(_fill(like, params), rest)
        constants = self._constants
        if jax.tree.leaves(constants):
            constants = _fill(constants, self._made())
        return eqx.combine(_fill(self._params, params), constants, self._static)

    def inference_model(self, params: PyTree) -> Any:
        """The same, with dropout off."""
        return eqx.nn.inference_mode(self.model(params))


def _fill(like: PyTree, values: PyTree) -> PyTree:
    return jax.tree.unflatten(jax.tree.structure(like), jax.tree.leaves(values))


def _refers_to_tracer(value: Any) -> bool:
    """Whether a tracer is in a value, in what its functions close over, or in what these hold."""
    seen, todo = set[int](), [value]
    while todo:
        value = todo.pop()
        if isinstance(value, jax.core.Tracer):
            return True
        if id(value) in seen or isinstance(value, type | types.ModuleType | jax.Array | np.ndarray):
            continue
        seen.add(id(value))
        if isinstance(value, types.FunctionType):  # its globals are not its own
            todo += [value.__closure__, value.__defaults__, value.__kwdefaults__]
        else:
            todo += gc.get_referents(value)
    return False


def _is_shape(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct)


def _is_trained(leaf: Any) -> bool:
    return _is_shape(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact)


def _is_constant(leaf: Any) -> bool:
    return eqx.is_array(leaf) and not eqx.is_inexact_array(leaf)


def _is_state(leaf: Any) -> bool:
    return isinstance(leaf, eqx.nn.State | eqx.nn.StateIndex)
