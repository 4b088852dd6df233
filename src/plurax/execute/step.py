"""The two halves of a training step, as pure functions: sum the gradients, apply them."""

import collections
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, PyTree

from plurax import errors, tree
from plurax.execute.rows import StepKey
from plurax.execute.totals import BatchTotals
from plurax.freezing import trained, with_frozen
from plurax.jaxpr.interpret import bind, evaluate
from plurax.state import TrainState
from plurax.user_frames import is_users

Metrics = dict[str, Array]
Step = Callable[[TrainState, PyTree, Int[Array, ""]], tuple[TrainState, Metrics]]


Update = Callable[[PyTree, PyTree, PyTree, Array], tuple[PyTree, PyTree]]


def whole_update(optimizer: optax.GradientTransformation, frozen: Sequence[str] = ()) -> Update:
    """Return `(grads, opt_state, params, loss) -> (params, opt_state)` for unsharded tensors.

    The optimizer sees the parameters without the `frozen` ones, as `grads` is without them.

    The loss is passed to the optimizer as `value` if it accepts it. The function raises `TaskError`
    for an optimizer that requires other arguments, such as a function.
    """
    takes_more = isinstance(optimizer, optax.GradientTransformationExtraArgs)

    def update(
        grads: PyTree, opt_state: PyTree, params: PyTree, loss: Array
    ) -> tuple[PyTree, PyTree]:
        def call(**extra: Array) -> tuple[PyTree, PyTree]:
            some = trained(frozen, params)
            updates, new = optimizer.update(grads, opt_state, some, **extra)
            _check_form(opt_state, new)
            return with_frozen(optax.apply_updates(some, updates), params), new

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
        except (AttributeError, TypeError, ValueError) as error:
            if "no attribute 'fast'" in str(error):
                raise errors.TaskError(
                    "optax.lookahead takes parameters as pairs of fast and slow ones "
                    "(optax.LookaheadParams), and a task has one set. Train with its fast "
                    "optimizer; plurax.callbacks.Ema averages the parameters over the steps."
                ) from error
            if "batch dimension in the 0th axis" in str(error):
                raise errors.TaskError(
                    "the optimizer takes the gradient of each example (optax.contrib.dpsgd), and "
                    "its update receives that of the mean loss. Clip in the loss: return the sum "
                    "of the parameters times jax.lax.stop_gradient of their clipped gradient; "
                    "optax.add_noise adds the noise in the optimizer."
                ) from error
            if wanted := _WANTED.search(str(error)):
                raise errors.TaskError(
                    "the optimizer's update needs arguments that plurax does not pass "
                    f"({wanted[0]}). It passes the gradients, the optimizer's state, the "
                    "parameters and, as `value`, the loss of the batch, but not the loss as a "
                    "function: line searches (optax.lbfgs) and Hessian estimates "
                    "(optax.contrib.sophia) do not run here; optax.contrib.sam runs with "
                    "opaque_mode=False."
                ) from error
            if is_users(error):
                raise
            raise errors.TaskError(
                f"the optimizer's update failed: {type(error).__name__}: {error}\nIts arguments "
                "are numbers or schedules: optax.sgd(0.1), not optax.sgd('0.1'); a schedule takes "
                "the step, schedule(step)."
            ) from None

    return update


def _check_form(old: PyTree, new: PyTree) -> None:
    """Raise `TaskError` where an update returns a state of other arrays than it got."""
    before, after = (
        {path: jnp.shape(leaf) for path, leaf in tree.named_leaves(state).items()}
        for state in (old, new)
    )
    if differing := {*before.items()} ^ {*after.items()}:
        path = min(path for path, _ in differing)
        was, now = (form.get(path, "no array") for form in (before, after))
        raise errors.TaskError(
            f"the optimizer's update returns a state of another form than it gets: at {path!r} "
            f"there is {now}, and was {was}. Steps are compiled once, for one form: its init has "
            "to return what its update returns, with zeros for what is not known yet "
            "(optax.monitor begins without the values that it measures)."
        )


_WANTED = re.compile(
    r"missing \d+ required keyword-only arguments?: .*|(grad_fn|obj_fn|value_fn) must be provided"
)
"""Matches Python's message for a missing argument, and optax's."""


class Gradients(NamedTuple):
    """Sums over a batch, reduced over devices: what a step's update needs.

    **Fields:**

    - `weight`, `loss`, `metrics`: scalars, sums of the rows' weights and weighted sums.
    - `grads`: the gradient of `loss`, in the program's stored form (in shards, under ZeRO). The
      mean gradient is `grads / weight`.
    - `model_state`: after the batch.
    - `examples`: how many rows are real.
    """

    weight: Float[Array, ""]
    loss: Float[Array, ""]
    metrics: Metrics
    grads: PyTree
    model_state: PyTree
    examples: Int[Array, ""]


def gradient_specs(scalar: PartitionSpec, grads: PyTree, model_state: PyTree) -> Any:
    """Return the `PartitionSpec`s of `Gradients` whose sums all have the spec `scalar`."""
    specs: dict[str, Any] = dict.fromkeys(Gradients._fields, scalar)
    return Gradients(**{**specs, "grads": grads, "model_state": model_state})


def step_key(state: TrainState, first: Int[Array, ""] | None) -> StepKey:
    """Return the key of the state's next step, for rows that begin with example `first`."""
    return StepKey(jax.random.fold_in(state.key, state.step), first)


def make_gradients(total: BatchTotals) -> Callable[..., Gradients]:
    """Return `(state, batch, count, first=None) -> gradients`.

    The first `count` rows of `batch` are real. `first` is the index of the first of them in the
    step's batch, where others compute the rest of it.
    """

    def gradients(
        state: TrainState,
        batch: PyTree,
        count: Int[Array, ""],
        first: Int[Array, ""] | None = None,
    ) -> Gradients:
        key = step_key(state, first)
        totals, model_state = total(state.params, state.model_state, batch, key, count)
        return Gradients(*totals, model_state=model_state, examples=count)

    return gradients


def make_apply(
    update: Update,
    dtypes: PyTree,
    norm: Callable[[PyTree], Array] | None = None,
    *,
    freeze: bool = False,
    select: bool = False,
) -> Callable[[TrainState, Gradients], tuple[TrainState, Metrics]]:
    """Return `(state, gradients) -> (state, metrics)`.

    As a program:

        if loss and gradient norm are finite:
            params, opt_state = update(grads / weight, opt_state, params, loss / weight)

    `dtypes` are those of the parameters, a tree like the gradients. `norm(grads)` computes the
    global norm, by default of unsharded tensors. With `freeze`, for a member, no update follows the
    first that was left out. With `select` the update is computed in any case, and each number is
    the new or the old one.

    Metrics are scalars: `loss` and the task's metrics, weighted means over the batch; `grad_norm`,
    the global norm before the optimizer; `weight`, the sum of weights; `examples`; `skipped`, 1
    where the update was left out.
    """
    norm_of = norm or (optax.tree.norm if select else _norm_by_rows)

    def apply(state: TrainState, sums: Gradients) -> tuple[TrainState, Metrics]:
        # Multiply by one reciprocal: XLA would write the quotient of every gradient to memory.
        scale = 1 / sums.weight
        loss = sums.loss * scale
        norm = norm_of(sums.grads) * scale
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        if freeze:
            finite &= state.skipped == 0
        old = (state.params, state.opt_state, state.model_state)

        def updated() -> PyTree:
            grads = jax.tree.map(
                lambda g, dtype: (g * scale.astype(g.dtype)).astype(dtype), sums.grads, dtypes
            )
            new = (*update(grads, state.opt_state, state.params, loss), sums.model_state)
            return jax.tree.map(lambda n, o: jnp.asarray(n, o.dtype), new, old)

        # On CPU a branch, as a select after the update would copy the optimizer state. Compilers of
        # accelerators fuse the select into the update, in place, and copy all that enters a branch.
        # Of several networks at once a branch would be a select.
        if select:
            chosen = jax.tree.map(lambda n, o: jnp.where(finite, n, o), updated(), old)
        elif freeze:
            chosen = _selected(finite, updated, old)
        else:
            chosen = jax.lax.cond(finite, updated, lambda: old)
        params, opt_state, model_state = chosen
        skipped = 1 - finite.astype(jnp.int32)
        if freeze:
            skipped = jnp.where(sums.weight == 0, 0, skipped)
        metrics = {
            "loss": loss,
            **{name: value * scale for name, value in sums.metrics.items()},
            "grad_norm": norm,
            "weight": sums.weight,
            "examples": sums.examples,
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

    return apply


def _selected(new: Array, fun: Callable[[], PyTree], old: PyTree) -> PyTree:
    """Return `fun()` where a scalar says `new`, else `old`, a tree like it.

    Each number is selected where it is computed, and what is computed of it is computed of the
    selected one. Of Adam:

        mu = where(new, b1 * mu + (1 - b1) * g, mu)
        params = where(new, params - rate * mu / ..., params)

    With a select behind the update, XLA's CPU compiler computes `mu` twice, once for the state and
    once within the update of `params`, and the second time of a copy of the old one.
    """
    closed = jax.make_jaxpr(fun)()
    pairs = list(zip(closed.jaxpr.outvars, jax.tree.leaves(old), strict=True))
    # What is computed there, and is one number of the state. By `id`: a constant has no hash.
    times = collections.Counter(id(var) for var, _ in pairs)
    computed = {id(var) for eqn in closed.jaxpr.eqns for var in eqn.outvars}
    kept = {id(var): leaf for var, leaf in pairs if id(var) in computed and times[id(var)] == 1}

    def bound(eqn: Any, arrays: Sequence[Array]) -> list[Array]:
        results = zip(eqn.outvars, bind(eqn, arrays), strict=True)
        return [jnp.where(new, x, kept[id(var)]) if id(var) in kept else x for var, x in results]

    known = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    values = evaluate(closed.jaxpr.eqns, known, closed.jaxpr.outvars, default=bound)
    leaves = [
        x if id(var) in kept else jnp.where(new, x, leaf)
        for x, (var, leaf) in zip(values, pairs, strict=True)
    ]
    return jax.tree.unflatten(jax.tree.structure(old), leaves)


def _norm_by_rows(grads: PyTree) -> Array:
    """Return the global norm, summing rows first.

    XLA's CPU compiler runs the sums of rows on several threads, but a single sum over everything on
    one. The barrier keeps it from merging the two sums.
    """
    rows = [
        jnp.sum(jnp.square(jnp.abs(jnp.atleast_1d(g))), axis=-1) for g in jax.tree.leaves(grads)
    ]
    return jnp.sqrt(sum(jnp.sum(row) for row in jax.lax.optimization_barrier(rows)))
