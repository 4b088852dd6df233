"""The same work written by hand in JAX and Optax, as plainly and as well as one can.

No keys, no weights, no guard against non-finite values, no gradient norm, no ragged batches.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, PyTree

Losses = Callable[[PyTree, PyTree], Float[Array, "B"]]
State = tuple[PyTree, optax.OptState]
Step = Callable[[State, PyTree], tuple[State, Array]]


def make_mesh(devices: int) -> Mesh:
    """One axis, `data`, over the first devices."""
    return jax.make_mesh(
        (devices,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices]
    )


def make_step(
    losses: Losses, optimizer: optax.GradientTransformation, mesh: Mesh, *, members: bool = False
) -> Step:
    """`((params, opt_state), batch) -> ((params, opt_state), loss)`, jitted, the state donated.

    With `members` of a state of many networks, which take the same batch, on one device.
    """

    def step(state: State, batch: PyTree) -> tuple[State, Array]:
        params, opt_state = state
        loss, grads = jax.value_and_grad(lambda p: losses(p, batch).mean())(params)
        if mesh.size > 1:
            loss, grads = jax.lax.pmean((loss, grads), "data")
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    if mesh.size > 1:
        step = jax.shard_map(
            step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False
        )
    return jax.jit(jax.vmap(step, in_axes=(0, None)) if members else step, donate_argnums=0)


def make_state(
    params: PyTree,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    *,
    members: bool = False,
) -> State:
    """A state of its own, whole on every device; with `members` of the parameters of many."""
    params = jax.tree.map(jnp.copy, params)
    init = jax.vmap(optimizer.init) if members else optimizer.init
    return jax.device_put((params, init(params)), NamedSharding(mesh, P()))


def place_batch(batch: PyTree, mesh: Mesh) -> PyTree:
    """A batch split over the mesh."""
    return jax.device_put(batch, NamedSharding(mesh, P("data")))


def accumulated_step(step: Step, state: State, microbatches: Sequence[PyTree]) -> State:
    """One update with `optax.MultiSteps`, whose step is called once for each microbatch."""
    for batch in microbatches:
        state, _ = step(state, batch)
    return state


def make_training(
    losses: Losses, optimizer: optax.GradientTransformation, steps: int
) -> Callable[[State, PyTree, Int[Array, "steps B"] | None], tuple[State, Array]]:
    """`((params, opt_state), data, rows) -> ((params, opt_state), loss of each step)`.

    A scan over the rows of the data that each step reads; with None each reads all. For `jit`, or
    for `jit` of `vmap`.
    """

    def train(
        state: State, data: PyTree, rows: Int[Array, "steps B"] | None
    ) -> tuple[State, Array]:
        def step(state: State, at: Int[Array, "B"] | None) -> tuple[State, Array]:
            params, opt_state = state
            batch = data if at is None else jax.tree.map(lambda leaf: leaf[at], data)
            loss, grads = jax.value_and_grad(lambda p: losses(p, batch).mean())(params)
            updates, opt_state = optimizer.update(grads, opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), loss

        return jax.lax.scan(step, state, rows, length=steps)

    return train


def predict_all(
    predict: Callable[[PyTree, PyTree], Array], params: PyTree, inputs: np.ndarray, chunk: int
) -> np.ndarray:
    """A jitted `predict` over all rows, chunk by chunk, the last one filled up with zeros."""
    outputs: list[Any] = []
    for start in range(0, len(inputs), chunk):
        piece = inputs[start : start + chunk]
        if len(piece) < chunk:
            filler = np.zeros((chunk - len(piece), *piece.shape[1:]), piece.dtype)
            piece = np.concatenate([piece, filler])
        outputs.append(np.asarray(predict(params, piece)))
    return np.concatenate(outputs)[: len(inputs)]
