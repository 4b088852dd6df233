"""Loops broadcast what they read, instead of reading it whole."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from plurax.jaxpr.interpret import evaluate, flat_equations
from plurax.jaxpr.loop_constants import broadcasts_inside

ROWS, TOKENS = 6, 16


def masked(causal):
    """The gradient of two layers of attention weights, masked for all rows alike."""

    def layer(x, w):
        scores = jnp.einsum("rt,rs->rts", x * w[None], x)
        scores = jnp.where(causal if causal.ndim == 3 else causal[None], scores, -1e30)
        return jnp.einsum("rts,rs->rt", jax.nn.softmax(scores), x), None

    def loss(w, x):
        return jnp.sum(jax.lax.scan(jax.checkpoint(layer, prevent_cse=False), x, w)[0] ** 2)

    return jax.grad(loss)


def flat(fun, *args):
    closed = jax.make_jaxpr(fun)(*args)
    known = dict(zip(closed.jaxpr.invars, args, strict=True))
    known |= zip(closed.jaxpr.constvars, closed.consts, strict=True)
    flat = flat_equations(closed.jaxpr.eqns, closed.jaxpr.outvars, known)
    return flat, known | flat.constants


def largest(eqns):
    """The most numbers in an operand of a loop."""
    return max(v.aval.size for eqn in eqns if eqn.primitive.name == "scan" for v in eqn.invars)


def inputs():
    w = jnp.linspace(0.5, 1.5, 2)[:, None] * jnp.ones((2, TOKENS))
    return w, jax.random.normal(jax.random.key(0), (ROWS, TOKENS))


@pytest.mark.parametrize("by_rows", [False, True], ids=["one mask", "a mask of each row"])
def test_no_mask_of_all_rows_is_an_operand(by_rows):
    causal = jnp.tril(jnp.ones((TOKENS, TOKENS), bool))
    causal = jnp.stack([causal] * ROWS) if by_rows else causal
    program, known = flat(masked(causal), *inputs())
    assert largest(program.eqns) == ROWS * TOKENS * TOKENS
    eqns = program.replaced(broadcasts_inside(program.eqns, program.results))
    # A mask that differs by row is no broadcast, and stays.
    assert largest(eqns) == (ROWS * TOKENS * TOKENS if by_rows else TOKENS * TOKENS)
    loops = [eqn for eqn in eqns if eqn.primitive.name == "scan"]
    assert len(loops) == 2
    assert len(eqns) < len(program.eqns)
    (got,) = evaluate(eqns, known, program.results)
    np.testing.assert_array_equal(got, masked(causal)(*inputs()))


def test_what_something_else_reads_is_broadcast_for_it():
    def fun(x):
        wide = jnp.broadcast_to(x, (ROWS, TOKENS))
        total, _ = jax.lax.scan(lambda sums, _: (sums + wide, None), wide * 0, length=3)
        return total, wide

    program, known = flat(fun, jnp.arange(TOKENS, dtype="f4"))
    eqns = program.replaced(broadcasts_inside(program.eqns, program.results))
    assert [eqn.primitive.name for eqn in eqns] == [e.primitive.name for e in program.eqns]
    got = evaluate(eqns, known, program.results)
    for a, b in zip(got, fun(jnp.arange(TOKENS, dtype="f4")), strict=True):
        np.testing.assert_array_equal(a, b)


def test_equations_with_effects_alone_stay():
    def fun(x):
        jax.debug.callback(lambda: None)
        return jax.lax.scan(lambda c, _: (c + x, None), x, length=2)[0]

    program, _ = flat(fun, jnp.ones(3))
    pairs = broadcasts_inside(program.eqns, program.results)
    assert [new for new, _ in pairs] == program.eqns == [old for _, old in pairs]
