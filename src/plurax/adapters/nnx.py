"""A `Task` from a Flax NNX module.

Random numbers need one rule. A model that draws them from streams of its own (`nnx.Dropout` built
with `rngs`) would draw the same ones in every step. They have to come from the example's key, so
write the loss for one example and lift it, and either pass the key on or reseed the streams:

    def loss(model, example, key):
        y = model(example["x"], rngs=nnx.Rngs(dropout=key))  # a model that hands rngs on, or
        nnx.reseed(model, default=key)                       # one with streams of its own
        y = model(example["x"])
        ...

    task = plurax.adapters.nnx.task(build, px.per_example(loss))

A loss that draws from streams it has not reseeded raises `TaskError`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array, Float, Key, PyTree

from plurax import errors
from plurax.adapters.model_functions import ModelFunctions
from plurax.state import TrainState
from plurax.task import Task
from plurax.tree import named_leaves
from plurax.validate import check_takes

try:
    from flax import nnx
except ImportError as error:
    raise errors.missing_extra("flax", "flax") from error

Build = Callable[[nnx.Rngs], nnx.Module]


def task(
    build: Build,
    loss: Callable[..., Any],
    *,
    predict: Callable[[nnx.Module, PyTree], PyTree] | None = None,
    evaluate: Callable[[nnx.Module, PyTree], Any] | None = None,
    metrics: Callable[[nnx.Module, PyTree], dict[str, Any]] | None = None,
    weight: Callable[[PyTree], Float[Array, "B"]] | None = None,
    coupled: bool = False,
) -> Task:
    """A task from an NNX module; its functions take the module where those of `Task` take params.

    **Arguments:**

    - `build(rngs)`: makes the module, always with the same structure.
    - `loss(model, batch, keys)`: one loss per example, shape `(B,)`, or a pair of that and
      `{name: (B,) metrics}`; `keys`, shape `(B,)`, holds a random key per example. With `coupled`
      it is `loss(model, batch, keys, mask)`. The model is in training mode (`model.train()`).
    - `predict(model, inputs)`, `evaluate(model, batch)`, `metrics(model, batch)`: as for `Task`;
      the model is in evaluation mode (`model.eval()`).
    - `weight`, `coupled`: as for `Task`.

    `nnx.Param`s are trained. Every other variable, such as an `nnx.BatchStat`, is model state: what
    the loss leaves in it is kept, and the task needs `coupled`. Batch norm is exact over ragged
    batches if it gets the mask, with a dim for each of its input's: `norm(x, mask=mask[:, None])`.
    Arrays that are no variables are constants, those of `build(nnx.Rngs(0))` whatever the seed.

    **Returns:** a `Task`. Its parameters are nested dicts named like the module's attributes.

    Raises `TaskError` where the model has state and the task is not coupled; and, once it is
    compiled, where a function draws from the model's own random streams (see above).

    >>> import jax.numpy as jnp, optax, plurax as px
    >>> from flax import nnx
    >>> task = px.adapters.nnx.task(
    ...     build=lambda rngs: nnx.Linear(3, 1, rngs=rngs),
    ...     loss=lambda model, batch, keys: (model(batch["x"])[:, 0] - batch["y"]) ** 2,
    ...     predict=lambda model, inputs: model(inputs["x"])[:, 0],
    ... )
    >>> batch = {"x": jnp.eye(3), "y": jnp.arange(3.0)}
    >>> program = px.compile(task, optax.adam(0.1), px.Plan(), batch)
    >>> state = program.init(seed=0)
    >>> for _ in range(200):
    ...     state, metrics = program.step(state, batch)
    >>> bool(metrics["loss"] < 1e-3)
    True
    """

    if isinstance(build, nnx.Module):
        raise errors.build_is_a_module("nnx", type(build).__name__, "rngs")
    check_takes("nnx.task(build=...)", build, "rngs")
    functions = ModelFunctions(loss, predict, evaluate, metrics, weight, coupled)
    kept = jax.eval_shape(lambda: nnx.to_pure_dict(_split(_built(build, 0))[1]))
    functions.check("nnx", "model", named_leaves(kept))

    def init(key: Key[Array, ""]) -> PyTree:
        params, state = map(nnx.to_pure_dict, _split(_built(build, key)))
        return (params, state) if kept else params

    def updated(model: nnx.Module, output: Any, state: PyTree) -> tuple[Any, Any, PyTree]:
        losses, metrics = output if isinstance(output, tuple) and len(output) == 2 else (output, {})
        found = dict(nnx.to_flat_state(_split(model)[1]))
        # What the call has added to the module is not kept.
        known = dict(nnx.to_flat_state(nnx.State(state)))
        new = nnx.from_flat_state({path: found[path] for path in known})
        return losses, metrics, nnx.to_pure_dict(new)

    return functions.task(
        init,
        functools.partial(_filled, build, training=True),
        inference=functools.partial(_filled, build),
        updated=updated if kept else None,
    )


def model(build: Build, state: TrainState) -> nnx.Module:
    """The trained module, in evaluation mode.

    **Arguments:** `build`, as given to `task`; `state`, the trained state, whose arrays the module
    shares (a later step with this state uses them up). Random streams are those of
    `build(nnx.Rngs(0))`.

    >>> import jax.numpy as jnp, optax, plurax as px
    >>> from flax import nnx
    >>> build = lambda rngs: nnx.Linear(3, 2, rngs=rngs)
    >>> task = px.adapters.nnx.task(build, lambda model, batch, keys: model(batch["x"])[:, 0])
    >>> program = px.compile(task, optax.sgd(0.1), px.Plan(), {"x": jnp.ones((4, 3))})
    >>> px.adapters.nnx.model(build, program.init(seed=0))(jnp.ones((5, 3))).shape
    (5, 2)
    """
    return _filled(build, state.params, state.model_state, seeded=True)


def _built(build: Build, seed: Key[Array, ""] | int) -> nnx.Module:
    # Off: annotations name the axes of some other mesh, and here the plan decides.
    with nnx.use_eager_sharding(False):
        return build(nnx.Rngs(seed))


def _filled(
    build: Build,
    params: PyTree,
    state: PyTree = (),
    *,
    training: bool = False,
    seeded: bool = False,
) -> nnx.Module:
    """A new module with these values. Unless `seeded`, drawing from its streams raises.

    Compiled, what `build` first puts in their place is never computed.
    """
    model = _built(build, 0)
    nnx.update(model, params, state or {})
    for _, variable in nnx.iter_graph(model):
        if isinstance(variable, nnx.RngKey) and not seeded:
            variable.set_value(_Unseeded(variable.tag, variable.shape))
    if training:
        model.train()
    else:
        model.eval()
    return model


def _split(model: nnx.Module) -> tuple[nnx.State, nnx.State]:
    """The variables that are parameters, and those that are model state."""
    params, _, state = nnx.state(model, nnx.Param, nnx.RngState, nnx.Variable)
    return params, state


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Unseeded:
    """Stands where a random stream keeps its key, until it is reseeded; drawing from it raises."""

    stream: str
    shape: tuple[int, ...]

    def __getitem__(self, index: Any) -> Any:
        raise errors.TaskError(
            f"the model draws from its own random stream {self.stream!r}, which would give the "
            "same numbers in every step. Take them from the example's key: write the loss for one "
            "example, lift it with plurax.per_example(f), and in f(model, example, key) say "
            f"nnx.reseed(model, {self.stream}=key) before calling the model, or pass "
            "rngs=nnx.Rngs(key) to the call. Where there is no key (in predict) or the numbers do "
            f"not matter (a recurrent layer's zeros), say nnx.reseed(model, {self.stream}=0)."
        )
