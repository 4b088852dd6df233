"""Loops are followed as often as their shardings need, and run what was traced then."""

import jax
import jax.numpy as jnp
import pytest

from plurax.partition import operators
from plurax.partition.partitioner import Partitioner
from plurax.partition.values import ShardedValue, ValueVersions
from plurax.sharding.axes import Axes
from plurax.sharding.spec import TensorSharding

REPLICATED = TensorSharding(((), ()))


def nested(x, levels):
    """One product in loops of two iterations each."""
    if not levels:
        return jnp.tanh(x @ x)
    return jax.lax.scan(lambda x, _: (nested(x, levels - 1), None), x, None, length=2)[0]


@pytest.fixture
def decided(monkeypatch):
    """One entry for each time that a sharding of a product is decided on."""
    calls = []
    rule = operators.RULES["dot_general"]

    def counted(*args):
        calls.append(args)
        return rule(*args)

    monkeypatch.setitem(operators.RULES, "dot_general", counted)
    return calls


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("emitted", [False, True])
def test_a_product_in_loops_is_followed_once(decided, depth, emitted):
    # As often as 2 ** depth, if each loop were planned before it runs; attention in blocks is a
    # loop in the loop over layers in that over microbatches.
    x = jnp.eye(4) / 2
    closed = jax.make_jaxpr(lambda x: nested(x, depth))(x)

    def run(array):
        partitioner = Partitioner(Axes({"tensor": 2}))
        inputs = [ValueVersions(ShardedValue(array, (4, 4), REPLICATED))]
        if emitted:
            (out,) = partitioner.evaluate(closed.jaxpr, closed.consts, inputs)
        else:
            with partitioner.planning():
                (out,) = partitioner.evaluate(closed.jaxpr, closed.consts, inputs)
        return out.value.array

    if emitted:
        assert jnp.array_equal(jax.jit(run)(x), jax.jit(lambda x: nested(x, depth))(x))
    else:
        assert run(jax.ShapeDtypeStruct(x.shape, x.dtype)).shape == (4, 4)
    assert len(decided) == 1


def test_an_attempt_that_fails_leaves_nothing(decided):
    # The carry is split by the first iteration: the second attempt starts split, and only that is
    # counted, three times for three iterations.
    def fun(x, w):
        return jax.lax.scan(lambda x, _: (x @ w @ w, None), x, None, length=3)[0]

    closed = jax.make_jaxpr(fun)(jnp.ones((8, 16)), jnp.ones((16, 16)))
    partitioner = Partitioner(Axes({"tensor": 2}))
    spec, split = partitioner.context.spec, TensorSharding(((), ("tensor",)))
    inputs = [spec((8, 16), jnp.dtype("float32"), REPLICATED)]
    inputs += [spec((16, 16), jnp.dtype("float32"), split, is_param=True)]
    with partitioner.planning() as records:
        partitioner.evaluate(closed.jaxpr, closed.consts, [*map(ValueVersions, inputs)])
        executor = partitioner.executor
    assert len(decided) > 2  # more than one attempt
    assert {one.trips for one in records if one.in_loop} == {3}
    assert executor.flops == 3 * 2 * (2 * 8 * 16 * 8)
