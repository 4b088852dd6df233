"""The training step of one network on one device, written by hand; nothing of plurax is used.

What a plan must compute, from what the guides promise: the weighted mean of the losses over exactly
the examples of the batch, its gradient, the optimizer's update, and keys that depend on the seed,
the step and the example's number in its batch.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax


@dataclasses.dataclass(frozen=True)
class Model:
    """A network of the zoo.

    **Fields:** `init(key) -> params`, or `(params, model_state)` of a stateful one;
    `loss(mark, params, [model_state,] batch, keys, [mask])`, where `mark(x) -> x` stands between
    parts of the network; it returns `(losses, metrics)`, a stateful one its state too;
    `data(rng, count) -> batch`; `rules`, how parameters are split over `tensor`; `weight(batch)`.
    """

    init: Callable[..., Any]
    loss: Callable[..., Any]
    data: Callable[[np.random.Generator, int], Any]
    rules: Mapping[str, tuple[Any, ...]]
    weight: Callable[[Any], Any] | None = None
    coupled: bool = False
    stateful: bool = False

    def batches(self, sizes):
        """One batch of each size, all different."""
        rng = np.random.default_rng(0)
        return [self.data(rng, size) for size in sizes]


def scale_by_loss():
    """An optimizer that reads the loss; given the sum for the mean, it would take other steps."""

    def update(updates, state, params=None, *, value, **extra):
        return jax.tree.map(lambda u: u / (1 + jnp.abs(value)).astype(u.dtype), updates), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def optimizer():
    """Reads the gradient's norm and the loss; its `eps` bears gradients that are nearly zero."""
    return optax.chain(
        optax.clip_by_global_norm(0.5),
        optax.scale_by_adam(eps=1e-2),
        optax.add_decayed_weights(1e-2),
        scale_by_loss(),
        optax.scale(-0.05),
    )


def trainer(model, microbatches=1):
    """A function `(sizes, seed) -> (state, metrics of each step)`: a step on a batch of each size.

    `microbatches` counts for a coupled model alone, whose examples see each other in microbatches:
    number `m` holds the examples `m, m + microbatches, ...`.
    """
    rule = optimizer()
    model_init, rule_init = jax.jit(model.init), jax.jit(rule.init)

    def part(params, model_state, batch, keys):
        """Weighted sums over some examples, `(loss, (metrics, weight, model_state))`."""
        states = (model_state,) if model.stateful else ()
        mask = (jnp.ones(keys.shape, bool),) if model.coupled else ()
        out = model.loss(lambda x: x, params, *states, batch, keys, *mask)
        losses, metrics, *new = out
        weight = jnp.ones(losses.shape) if model.weight is None else model.weight(batch)
        metrics = {name: jnp.sum(weight * value) for name, value in metrics.items()}
        return jnp.sum(weight * losses), (metrics, jnp.sum(weight), new[0] if new else ())

    def mean(params, model_state, batch, keys):
        count = microbatches if model.coupled else 1
        loss, metrics, weight = 0.0, {}, 0.0
        for m in range(count):
            mine = jax.tree.map(lambda x, m=m: x[m::count], batch)
            if keys[m::count].shape[0] == 0:
                continue
            one, (more, heavy, model_state) = part(params, model_state, mine, keys[m::count])
            metrics = {name: metrics.get(name, 0.0) + value for name, value in more.items()}
            loss, weight = loss + one, weight + heavy
        metrics = {name: value / weight for name, value in metrics.items()}
        return loss / weight, (metrics, weight, model_state)

    @jax.jit
    def step(run_key, number, params, opt_state, model_state, batch):
        size = jax.tree.leaves(batch)[0].shape[0]
        key = jax.random.fold_in(run_key, number)
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(size))
        (loss, (metrics, weight, model_state)), grads = jax.value_and_grad(mean, has_aux=True)(
            params, model_state, batch, keys
        )
        squares = [jnp.sum(jnp.abs(g) ** 2) for g in jax.tree.leaves(grads)]
        updates, opt_state = rule.update(grads, opt_state, params, value=loss)
        params = optax.apply_updates(params, updates)
        row = {"loss": loss, "grad_norm": jnp.sqrt(sum(squares)), "weight": weight, **metrics}
        return params, opt_state, model_state, row

    def train(sizes, seed):
        init_key, run_key = jax.random.split(jax.random.key(seed))
        made = model_init(init_key)
        params, model_state = made if model.stateful else (made, ())
        state, rows = (params, rule_init(params), model_state), []
        for number, batch in enumerate(model.batches(sizes)):
            *state, row = step(run_key, number, *state, batch)
            size = jax.tree.leaves(batch)[0].shape[0]
            rows.append({**jax.device_get(row), "examples": size, "skipped": 0})
        return jax.device_get(tuple(state)), rows

    return train


def matrix(key, *shape, scale=0.5):
    """Normal numbers in float64."""
    return jax.random.normal(key, shape, jnp.float64) * scale


def complex_matrix(key, *shape, scale=0.5):
    """Normal numbers in complex128."""
    return jax.lax.complex(*(matrix(k, *shape, scale=scale) for k in jax.random.split(key)))


def entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)
