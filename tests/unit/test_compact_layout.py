"""Gradients of members in the layout of the state; what a TPU makes of it, `tests/absent`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from plurax.execute.compact_layout import compact_order, with_compact_gradients


@pytest.mark.parametrize(
    ("shape", "order"),
    [
        ((), ()),
        ((1000,), (0,)),
        ((1000, 40), (1, 0)),
        ((1000, 40, 40), (1, 2, 0)),
        ((1000, 16, 40), (1, 2, 0)),
        ((1000, 40, 10), (2, 1, 0)),
        ((100, 256, 256), (0, 1, 2)),
        ((100, 3, 3, 64, 128), (0, 1, 2, 3, 4)),
    ],
)
def test_the_order_of_dims_with_the_least_padding(shape, order):
    assert compact_order(shape) == order


def test_numbers_are_the_same_to_the_last_bit():
    """Of each member, one with a gradient that is not finite included; and without members."""
    grads = np.random.default_rng(0).normal(size=(64, 40, 10)).astype(np.float32)
    grads[1, 2, 3], grads[4, 5, 6] = np.nan, np.inf
    plain, compact = optax.adam(1e-3), with_compact_gradients(optax.adam(1e-3))

    def step(optimizer, grads):
        params = jnp.ones_like(grads)
        return optimizer.update(grads, optimizer.init(params), params)

    for fun in (step, jax.vmap(step, in_axes=(None, 0))):
        both = [jax.jit(fun, static_argnums=0)(one, grads) for one in (plain, compact)]
        jax.tree.map(np.testing.assert_array_equal, *both)
    lowered = jax.jit(jax.vmap(step, in_axes=(None, 0)), static_argnums=0).lower(compact, grads)
    assert "LayoutConstraint" in lowered.as_text()
    lowered = jax.jit(step, static_argnums=0).lower(compact, grads)
    assert "LayoutConstraint" not in lowered.as_text()
