"""A `Task` from an Equinox module."""

import functools
import gc
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key, PyTree

from plurax import errors
from plurax.adapters.model_functions import ModelFunctions, three
from plurax.state import TrainState
from plurax.task import Task
from plurax.validate import check_takes

try:
    import equinox as eqx
except ImportError as error:
    raise errors.missing_extra("equinox", "equinox") from error

Build = Callable[[Key[Array, ""]], Any]
"""Returns a model, or one with its state, as `eqx.nn.make_with_state` does."""


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

    - `build(key)`: makes the model, always with the same structure. A model with state (batch norm)
      comes with it: `build=eqx.nn.make_with_state(Model)`.
    - `loss(model, batch, keys)`: one loss per example, shape `(B,)`, or a pair of that and
      `{name: (B,) metrics}`; `keys`, shape `(B,)`, holds a random key per example. Equinox models
      take one example, so `jax.vmap` the model here, or write `f(model, example, key)` and pass
      `plurax.per_example(f)`; dropout takes that example's key. With `coupled` it is
      `loss(model, batch, keys, mask)`.
    - `predict(model, inputs)`, `evaluate(model, batch)`, `metrics(model, batch)`: as for `Task`;
      the model is in inference mode (`eqx.nn.inference_mode`).
    - `weight`, `coupled`: as for `Task`.

    With state the task needs `coupled`, and functions take it behind the model: `predict(model,
    state, inputs)`, and `loss(model, state, batch, keys, mask) -> (losses, metrics, state)`, in
    which batch norm is `jax.vmap(model, (0, None), (0, None), axis_name="batch")(batch["x"],
    state)`.

    Floating arrays are trained. Other arrays (indices, say) are constants, those of
    `build(jax.random.key(0))` whatever the seed.

    **Returns:** a `Task`. Its parameters are the model with None for all that is not trained.

    Raises `TaskError` for a model with state that `build` does not return, or whose task is not
    coupled; and, once it is compiled, where its loss returns no state.

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
    skeleton = _Skeleton(build)
    functions = ModelFunctions(loss, predict, evaluate, metrics, weight, coupled)
    if not skeleton.has_state:
        functions.check("equinox", "model")
        return functions.task(
            lambda key: skeleton.parts_of(build(key))[0],
            skeleton.model,
            inference=skeleton.inference_model,
        )
    functions.check("equinox", "model, state", ["eqx.nn.State"])
    loss, predict, evaluate, metrics = map(_of_pair, (loss, predict, evaluate, metrics))
    return ModelFunctions(loss, predict, evaluate, metrics, weight, coupled).task(
        lambda key: skeleton.parts_of(build(key)),
        skeleton.model,
        inference=skeleton.inference_model,
        updated=skeleton.updated,
    )


def model(build: Build, state: TrainState) -> Any:
    """The trained model, in inference mode; of a model with state, the pair of both.

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
    skeleton = _Skeleton(build)
    kept = (state.model_state,) if skeleton.has_state else ()
    return skeleton.inference_model(state.params, *kept)


class _Skeleton:
    """A model without its arrays, to be filled any number of times.

    A function that `build` makes may close over an array (flowjax masks weights so). In a skeleton
    that is a tracer of a trace which has ended, so such a model is built anew in each trace.
    """

    def __init__(self, build: Build) -> None:
        self._build = build
        empty: Any = eqx.filter_eval_shape(lambda: build(jax.random.key(0)))
        self.has_state = _has_state(empty)
        self._state: Any = None
        if self.has_state:
            empty, self._state = empty
        if not self.has_state and any(map(_is_index, jax.tree.leaves(empty, is_leaf=_is_index))):
            raise errors.TaskError(
                "the model has layers with state (eqx.nn.BatchNorm, say), and build(key) returned "
                "no state. Return both: build=eqx.nn.make_with_state(Model), or build=lambda key: "
                "eqx.nn.make_with_state(Model)(..., key=key). Functions then take the state behind "
                "the model, and the loss returns it: loss(model, state, batch, keys, mask) -> "
                "(losses, metrics, state), with coupled=True."
            )
        self._params, rest = eqx.partition(empty, _is_trained)
        self._constants, self._static = eqx.partition(rest, _is_shape)
        self._has_tracer = _refers_to_tracer(self._static)
        # Compiled, so that the parameters, which nobody reads, are never made.
        self._made = jax.jit(lambda: eqx.filter(self._first(), _is_constant))

    def _first(self) -> Any:
        built = self._build(jax.random.key(0))
        return built[0] if self.has_state else built

    def parts_of(self, built: Any) -> tuple[PyTree, PyTree]:
        """The trained arrays, in one structure for good, and the state: builds may be unequal."""
        model, state = built if self.has_state else (built, None)
        params = _fill(self._params, eqx.filter(model, eqx.is_inexact_array))
        return params, jax.tree.leaves(state)

    def model(self, params: PyTree, *state: PyTree) -> Any:
        """The model with these parameters; with state the pair of both."""
        model, like = self._model(params)
        return (model, _fill(like, state)) if self.has_state else model

    def _model(self, params: PyTree) -> tuple[Any, Any]:
        if self._has_tracer:
            built = self._build(jax.random.key(0))
            model, state = built if self.has_state else (built, None)
            like, rest = eqx.partition(model, eqx.is_inexact_array)
            return eqx.combine(_fill(like, params), rest), state
        constants = self._constants
        if jax.tree.leaves(constants):
            constants = _fill(constants, self._made())
        model = eqx.combine(_fill(self._params, params), constants, self._static)
        return model, self._state

    def inference_model(self, params: PyTree, *state: PyTree) -> Any:
        """The same, with dropout off, and batch norm by its running statistics."""
        return eqx.nn.inference_mode(self.model(params, *state))

    def updated(self, _: Any, output: Any, before: PyTree) -> tuple[Any, Any, PyTree]:
        """What a loss returned, `(losses, metrics, state)`, with the arrays of the state alone."""
        where, expected = "the loss of a model with state", "(losses, metrics, state)"
        losses, metrics, state = three(output, where, expected)
        if not isinstance(state, eqx.nn.State) or len(jax.tree.leaves(state)) != len(before):
            raise errors.loss_wrong_structure(where, f"{type(state).__name__} as state", expected)
        return losses, metrics, jax.tree.leaves(state)


def _of_pair(function: Callable[..., Any] | None) -> Any:
    """`function(model, state, ...)`, of the pair of both."""
    if function is None:
        return None
    return functools.wraps(function)(lambda pair, *args: function(*pair, *args))


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


def _has_state(built: Any) -> bool:
    return isinstance(built, tuple) and len(built) == 2 and isinstance(built[1], eqx.nn.State)


def _is_index(leaf: Any) -> bool:
    return isinstance(leaf, eqx.nn.StateIndex)
