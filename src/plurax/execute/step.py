"""Build one training step as a pure function: totals, guard against NaN, update."""

import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int, PyTree

from plurax import errors
from plurax.execute.totals import BatchTotals
from plurax.state import TrainState

Metrics = dict[str, Array]
Step = Callable[[TrainState, PyTree, Int[Array, ""]], tuple[TrainState, Metrics]]


Update = Callable[[PyTree, PyTree, PyTree, Array], tuple[PyTree, PyTree]]


def whole_update(optimizer: optax.GradientTransformation) -> Update:
    """Return `(grads, opt_state, params, loss) -> (params, opt_state)` for unsharded tensors.

    The loss is passed to the optimizer as `value` if it accepts it. The function raises `TaskError`
    for an optimizer that requires other arguments, such as a function.
    """
    takes_more = isinstance(optimizer, optax.GradientTransformationExtraArgs)

    def update(
        grads: PyTree, opt_state: PyTree, params: PyTree, loss: Array
    ) -> tuple[PyTree, PyTree]:
        def call(**extra: Array) -> tuple[PyTree, PyTree]:
            updates, new = optimizer.update(grads, opt_state, params, **extra)
            return optax.apply_updates(params, updates), new

        def with_value() -> tuple[PyTree, PyTree]:
            try:
                return call(value=loss)
            except TypeError as error:
                # `optax.chain` accepts every argument, and passes it on to members that may not.
                if "unexpected keyword argument 'value'" in str(error):
                    return call()
                raise

        try:
            return with_value() if takes_more else call()
        except (TypeError, ValueError) as error:
            if wanted := _WANTED.search(str(error)):
                raise errors.optimizer_wants_arguments(wanted[0]) from error
            raise

    return update


_WANTED = re.compile(
    r"missing \d+ required keyword-only arguments?: .*|(grad_fn|obj_fn|value_fn) must be provided"
)
"""Matches Python's message for a missing argument, and optax's."""


def make_step(
    total: BatchTotals,
    update: Update,
    norm: Callable[[PyTree], Array] | None = None,
    *,
    freeze: bool = False,
) -> Step:
    """Return `(state, batch, count) -> (state, metrics)`.

    The first `count` rows of `batch` are real. As a program:

        totals = total(params, batch)      # sums of weight * (loss, metrics, gradient)
        if loss and gradient norm are finite:
            grads = totals.grads / totals.weight
            params, opt_state = update(grads, opt_state, params, loss)

    `norm(grads)` computes the global norm, by default of unsharded tensors. With `freeze`, no
    update follows the first that was left out.

    Metrics are scalars: `loss` and the task's metrics, weighted means over the batch; `grad_norm`,
    the global norm before the optimizer; `weight`, the sum of weights; `examples`; `skipped`, 1
    where the update was left out.
    """
    norm_of = norm or _norm

    def step(state: TrainState, batch: PyTree, count: Int[Array, ""]) -> tuple[TrainState, Metrics]:
        key = jax.random.fold_in(state.key, state.step)
        totals, model_state = total(state.params, state.model_state, batch, key, count)
        # Multiply by one reciprocal: XLA would write the quotient of every gradient to memory.
        scale = 1 / totals.weight
        loss = totals.loss * scale
        norm = norm_of(totals.grads) * scale
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        if freeze:
            finite &= state.skipped == 0
        old = (state.params, state.opt_state, state.model_state)

        def updated() -> PyTree:
            grads = jax.tree.map(
                lambda g, p: (g * scale.astype(g.dtype)).astype(p.dtype),
                totals.grads,
                state.params,
            )
            new = (*update(grads, state.opt_state, state.params, loss), model_state)
            return jax.tree.map(lambda n, o: jnp.asarray(n, o.dtype), new, old)

        # `cond`, not `where`: a select after the update would copy the optimizer state.
        params, opt_state, model_state = jax.lax.cond(finite, updated, lambda: old)
        skipped = 1 - finite.astype(jnp.int32)
        metrics = {
            "loss": loss,
            **{name: value * scale for name, value in totals.metrics.items()},
            "grad_norm": norm,
            "weight": totals.weight,
            "examples": count,
            "skipped": skipped,
        }
        state = TrainState(
            step=state.step + 1,
            params=params,
            opt_state=opt_state,
            model_state=model_state,
            key=state.key,
            skipped=state.skipped + skipped,
        )
        return state, metrics

    return step


def _norm(grads: PyTree) -> Array:
    """Return the global norm, summing rows first.

    XLA's CPU compiler runs the sums of rows on several threads, but a single sum over everything on
    one. The barrier keeps it from merging the two sums.
    """
    rows = [
        jnp.sum(jnp.square(jnp.abs(jnp.atleast_1d(g))), axis=-1) for g in jax.tree.leaves(grads)
    ]
    return jnp.sqrt(sum(jnp.sum(row) for row in jax.lax.optimization_barrier(rows)))
