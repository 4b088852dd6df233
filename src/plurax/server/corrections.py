"""Correct an update for the staleness of its gradient.

A worker computes a gradient at the parameters of version `v`; when its push arrives, other pushes
have been applied, and the parameters are of version `v + staleness`. A server can apply the
gradient as it is, or correct for that: both corrections are pure functions of a shard's trees.

    correction   what is corrected     to
    scale        the step              old + (updated - old) / max(staleness, 1)
    delay        the gradient          g + strength * g * g * (now - base)

Example, one parameter and `optax.sgd(0.1)`; a push of gradient 2.0, computed at 1.0, arrives when
the parameter is 0.4, three versions later:

    none     0.4 - 0.1 * 2.0                                   = 0.2
    scale    0.4 - 0.1 * 2.0 / 3                               = 0.333
    delay    g = 2.0 + 0.04 * 2.0 * 2.0 * (0.4 - 1.0) = 1.904, 0.4 - 0.1 * 1.904 = 0.2096

    >>> import jax.numpy as jnp
    >>> round(float(scale(jnp.float32(0.4), jnp.float32(0.2), 3)), 3)
    0.333
    >>> round(float(delay(jnp.float32(2.0), jnp.float32(0.4), jnp.float32(1.0))), 3)
    1.904
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree

from plurax.tree import sum_dtype


def scale(old: PyTree, updated: PyTree, staleness: int | Int[Array, ""]) -> PyTree:
    """Return the parameters after a step divided by the staleness of its gradient.

    Scaling the step scales the learning rate, where the optimizer multiplies by it last and keeps
    nothing that depends on it, as SGD with momentum, Adam and AdamW do, weight decay included. The
    optimizer's state is kept as updated.

    **Arguments:** `old`, the parameters; `updated`, the same tree, after the optimizer's update;
    `staleness`, how many updates `old` has had since the version of which the gradient is.

    Source: Zhang, Gupta, Lian and Liu 2016, "Staleness-aware Async-SGD for Distributed Deep
    Learning": the learning rate is divided by the staleness where that is not zero.
    """

    def scaled(old: Array, updated: Array) -> Array:
        if not jnp.issubdtype(updated.dtype, jnp.inexact):
            return updated  # a parameter that no step changes
        dtype = sum_dtype(updated.dtype)
        divisor = jnp.maximum(staleness, 1).astype(dtype)
        step = (updated.astype(dtype) - old.astype(dtype)) / divisor
        shorter = (old.astype(dtype) + step).astype(updated.dtype)
        return jnp.where(divisor > 1, shorter, updated)  # to the bit where nothing is stale

    return jax.tree.map(scaled, old, updated)


def delay(gradient: PyTree, now: PyTree, base: PyTree, strength: float = 0.04) -> PyTree:
    """Return an estimate of the gradient at `now` from the one at `base`.

    It is the gradient's first Taylor polynomial with `strength * g * g` for the diagonal of the
    Hessian, which is the expected square of `g` where the loss is a negative log likelihood.

    **Arguments:** `gradient`, of the mean loss (of a sum, its square would be another estimate);
    `now`, the parameters, and `base`, those at which the gradient was computed, the same trees;
    `strength`, lambda in the paper.

    Source: Zheng et al. 2017, "Asynchronous Stochastic Gradient Descent with Delay Compensation"
    (DC-ASGD), with constant lambda; 0.04 is the default of its implementation in MXNet.
    """

    def compensated(g: Array, now: Array, base: Array) -> Array:
        dtype = sum_dtype(g.dtype)
        wide, moved = g.astype(dtype), now.astype(dtype) - base.astype(dtype)
        return (wide + strength * wide * wide * moved).astype(g.dtype)

    return jax.tree.map(compensated, gradient, now, base)
