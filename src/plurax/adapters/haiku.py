"""A `Task` from a Haiku transform."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key, PyTree

from plurax import errors
from plurax.adapters.model_functions import ModelFunctions, three
from plurax.state import TrainState
from plurax.task import Task
from plurax.tree import named_leaves
from plurax.validate import check_takes

try:
    import haiku as hk
except ImportError as error:
    raise errors.missing_extra("dm-haiku", "haiku") from error

Apply = Callable[..., Any]


def task(
    transformed: "hk.Transformed | hk.TransformedWithState",
    init: Callable[[Key[Array, ""]], PyTree],
    loss: Callable[..., Any],
    *,
    predict: Callable[[Apply, PyTree], PyTree] | None = None,
    evaluate: Callable[[Apply, PyTree], Any] | None = None,
    metrics: Callable[[Apply, PyTree], dict[str, Any]] | None = None,
    weight: Callable[[PyTree], Float[Array, "B"]] | None = None,
    coupled: bool = False,
) -> Task:
    """A task from a Haiku transform; its functions take `apply` where those of `Task` take params.

    `apply(key, *args, **kwargs)` is `transformed.apply` with params, and state if it has one,
    filled in. Of `hk.transform_with_state` it returns `(outputs, state)`, as Haiku's does. It is a
    JAX tree, so that `plurax.per_example` lifts a `loss(apply, example, key)` written for one
    example; dropout takes that example's key: `apply(key, example["x"])`. A model that draws no
    numbers takes None for the key.

    **Arguments:**

    - `transformed`: what `hk.transform` or `hk.transform_with_state` returned.
    - `init(key)`: its first values, as in `lambda key: transformed.init(key, jnp.ones((1, 8)))`.
    - `loss(apply, batch, keys)`: one loss per example, shape `(B,)`, or a pair of that and
      `{name: (B,) metrics}`; `keys`, shape `(B,)`, holds a random key per example. With `coupled`
      it is `loss(apply, batch, keys, mask)`.
    - `predict(apply, inputs)`, `evaluate(apply, batch)`, `metrics(apply, batch)`, `weight`,
      `coupled`: as for `Task`.

    Parameters are trained. State, such as the averages of `hk.BatchNorm`, is model state: the task
    then needs `coupled`, and the loss returns `(losses, metrics, state)` with the state that
    `apply` gave. `hk.BatchNorm` takes no mask, so batches are not padded: one of another size than
    the full one runs in a program compiled for its size, and a `MaskWarning` says so.

    **Returns:** a `Task`.

    Raises `TaskError` where the model has state and the task is not coupled; and, once it is
    compiled, where the loss of a model with state returns none, or the model wants a random key and
    gets none.

    >>> import haiku as hk, jax, jax.numpy as jnp, optax, plurax as px
    >>> transformed = hk.transform(lambda x: hk.Linear(1)(x))
    >>> task = px.adapters.haiku.task(
    ...     transformed,
    ...     init=lambda key: transformed.init(key, jnp.ones((1, 3))),
    ...     loss=lambda apply, batch, keys: (apply(None, batch["x"])[:, 0] - batch["y"]) ** 2,
    ...     predict=lambda apply, inputs: apply(None, inputs["x"])[:, 0],
    ... )
    >>> batch = {"x": jnp.eye(3), "y": jnp.arange(3.0)}
    >>> program = px.compile(task, optax.adam(0.1), px.Plan(), batch)
    >>> state = program.init(seed=0)
    >>> for _ in range(200):
    ...     state, metrics = program.step(state, batch)
    >>> bool(metrics["loss"] < 1e-3)
    True
    """
    if not isinstance(transformed, hk.Transformed | hk.TransformedWithState):
        kind = transformed.__name__ if isinstance(transformed, type) else type(transformed).__name__
        raise errors.TaskError(
            f"haiku.task(transformed=...) got a {kind}; give a pair of pure functions: "
            "transformed=hk.transform(f), or hk.transform_with_state(f) for a model with state."
        )
    check_takes("haiku.task(init=...)", init, "key")
    functions = ModelFunctions(loss, predict, evaluate, metrics, weight, coupled)
    with_state = isinstance(transformed, hk.TransformedWithState)
    first = jax.eval_shape(lambda: init(jax.random.key(0)))
    kept = list(named_leaves(first[1])) if with_state else []
    functions.check("haiku", "apply", kept)

    def call(variables: tuple[PyTree, ...], key: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_several(key):
            raise errors.model_got_keys("Haiku", "apply(key, example)", jnp.shape(key))
        try:
            return transformed.apply(*variables, key, *args, **kwargs)
        except ValueError as error:
            if key is None and type(error).__name__ == "MissingRNGError":
                raise errors.TaskError(
                    "the Haiku model draws random numbers, and apply(key, ...) got None. Take them "
                    "from the example's key: write the loss for one example, f(apply, example, "
                    "key), call apply(key, example) in it, and lift it: "
                    "loss=plurax.per_example(f). In predict and evaluate call the model such that "
                    "it draws nothing (is_training=False, say)."
                ) from error
            raise

    def bind(params: PyTree, state: PyTree = ()) -> Apply:
        return jax.tree_util.Partial(call, (params, state or {}) if with_state else (params,))

    def updated(_: Apply, output: Any, __: PyTree) -> tuple[Any, Any, PyTree]:
        where = "the loss of a model with state"
        expected = "(losses, metrics, state), where apply(...) gave the state beside the outputs"
        return three(output, where, expected)

    if kept or not with_state:
        return functions.task(init, bind, updated=updated if kept else None)
    return functions.task(lambda key: init(key)[0], bind)


def variables(state: TrainState) -> tuple[PyTree, ...]:
    """The trained values for `transformed.apply`: `(params,)`, or `(params, state)` with state.

    Where `hk.transform_with_state` found no state it is `(params,)` too, for
    `hk.without_state(transformed)`. The arrays are those of `state`; a later step with this state
    uses them up.

    >>> import haiku as hk, jax, jax.numpy as jnp, optax, plurax as px
    >>> transformed = hk.transform(lambda x: hk.Linear(2)(x))
    >>> task = px.adapters.haiku.task(
    ...     transformed,
    ...     init=lambda key: transformed.init(key, jnp.ones((1, 3))),
    ...     loss=lambda apply, batch, keys: apply(None, batch["x"])[:, 0],
    ... )
    >>> program = px.compile(task, optax.sgd(0.1), px.Plan(), {"x": jnp.ones((4, 3))})
    >>> trained = px.adapters.haiku.variables(program.init(seed=0))
    >>> transformed.apply(*trained, None, jnp.ones((5, 3))).shape
    (5, 2)
    """
    return (state.params, state.model_state) if state.model_state else (state.params,)


def _is_several(key: Any) -> bool:
    """Whether these are keys of several examples; an old key has a dim of its own."""
    typed = isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    return key is not None and jnp.ndim(key) > (0 if typed else 1)
