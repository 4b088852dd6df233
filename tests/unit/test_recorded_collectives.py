"""The collectives of a recorded step: on small functions, by hand, and what they are for."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from tests import models

import plurax as px
from plurax.execute.recorder import record_step
from plurax.partition.scopes import reason_scope
from plurax.trace.collectives import collectives_of, every_collective
from plurax.trace.flatten import Flattener
from plurax.trace.liveness import peak_bytes
from plurax.trace.step_trace import Value

SIZES = {"data": 2, "tensor": 4}
ROW = 4 * 8  # bytes


def recorded(local, *shapes):
    """The collectives of a function of one device, as `(kind, axes, bytes, trips)`."""
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    mesh = jax.sharding.AbstractMesh(tuple(SIZES.values()), tuple(SIZES))
    run = jax.shard_map(local, mesh=mesh, in_specs=jax.P(), out_specs=jax.P(), check_vma=False)
    closed = jax.make_jaxpr(run)(*args)
    values = [Value(var.aval) for var in closed.jaxpr.invars]
    found = collectives_of(Flattener(SIZES).block(closed.jaxpr, values), SIZES)
    assert all(one.in_loop == (one.trips != 1) for one in found)
    return [(one.kind, one.axes, one.bytes, one.trips) for one in found]


def summed(x):
    return lax.psum(x, "data")


def joined(x):
    """In one operation, listed one by one; over an axis of one device nothing is sent."""
    return lax.psum([x, 2 * x, x[0]], ("data",))


def gathered(x):
    return lax.all_gather(x, ("data", "tensor"), tiled=True)


def gathered_minor_first(x):
    return lax.all_gather(x, ("tensor", "data"), tiled=True)


def in_a_loop(x):
    return lax.scan(lambda h, _: (lax.psum(h, "data"), None), x, None, length=5)[0]


def in_two(x):
    return lax.scan(lambda h, _: (in_a_loop(h), None), x, None, length=3)[0]


def stacked(x):
    """Nobody reads the second stack, so its sum is not computed."""
    rows = lax.scan(lambda h, row: (h, (summed(row), gathered(row))), x[0], x)[1]
    return rows[0]


def constant(x):
    """The sum of what no iteration changes: XLA computes it before the loop."""
    return lax.scan(lambda h, _: (h + summed(2 * x), None), x, None, length=5)[0]


def until(x):
    """The condition is computed in each iteration, too."""
    return lax.while_loop(lambda h: lax.psum(h[0], "tensor") < 9, summed, x)


def branches(x):
    return lax.cond(x[0] > 0, summed, lambda x: gathered(x)[: x.size], x)


def dead(x):
    summed(x)
    return gathered(x)


CASES = {
    summed: [("all-reduce", ("data",), ROW, 1)],
    joined: [("all-reduce", ("data",), size, 1) for size in (ROW, ROW, 4)],
    gathered: [("all-gather", ("data", "tensor"), 8 * ROW, 1)],
    gathered_minor_first: [("all-gather", ("data", "tensor"), 8 * ROW, 1)],
    in_a_loop: [("all-reduce", ("data",), ROW, 5)],
    in_two: [("all-reduce", ("data",), ROW, 15)],
    constant: [("all-reduce", ("data",), ROW, 1)],
    until: [("all-reduce", ("tensor",), 4, None), ("all-reduce", ("data",), ROW, None)],
    branches: [("all-reduce", ("data",), ROW, 1), ("all-gather", ("data", "tensor"), 8 * ROW, 1)],
    dead: [("all-gather", ("data", "tensor"), 8 * ROW, 1)],
}


@pytest.mark.parametrize("local", CASES, ids=lambda local: local.__name__)
def test_collectives_of_small_functions(local):
    assert sorted(recorded(local, (8,)), key=str) == sorted(CASES[local], key=str)


def test_of_a_stack_that_nobody_reads_nothing_is_sent():
    assert recorded(stacked, (6, 8)) == [("all-reduce", ("data",), ROW, 6)]


def test_a_collective_says_for_which_operation_it_is():
    """Also where the operation is in a function and in a loop, each with scopes of its own."""

    def local(x):
        with jax.named_scope("attention"), jax.named_scope(reason_scope("sort in f", "a/b.py:7")):
            return jax.jit(lambda x: lax.psum(x, "data"))(x)

    mesh = jax.sharding.AbstractMesh(tuple(SIZES.values()), tuple(SIZES))
    run = jax.shard_map(local, mesh=mesh, in_specs=jax.P(), out_specs=jax.P(), check_vma=False)
    closed = jax.make_jaxpr(jax.vmap(run))(jnp.ones((3, 8)))
    (one,) = collectives_of(Flattener(SIZES).block(closed.jaxpr, [None]), SIZES)
    assert (one.operation, one.without_rule) == ("sort in f", ("sort", "a/b.py:7"))


def test_what_a_model_sends_by_hand_is_not_planned():
    """In a loop too, and its gradient; the compiled program has it."""

    def loss(params, batch, keys):
        local = jax.shard_map(
            lambda x, w, v: lax.psum(jnp.tanh(x @ w) @ v, "tensor"),
            in_specs=(jax.P(), jax.P(None, "tensor"), jax.P("tensor", None)),
            out_specs=jax.P(), axis_names={"tensor"},
        )  # fmt: skip

        def layer(h, _):
            return local(h, params["w"], params["v"]), None

        return (lax.scan(layer, batch["x"], None, length=3)[0] ** 2).sum(1)

    task = px.Task(init=lambda key: {"w": jnp.ones((4, 8)), "v": jnp.ones((8, 4))}, loss=loss)
    plan = px.Plan(data=2, tensor=2, shardings={"w": (None, "tensor"), "v": ("tensor", None)})
    batch = {"x": np.ones((8, 4), np.float32)}
    program = px.compile(task, optax.sgd(0.1), plan, batch)
    planned, compiled = program.planned_collectives(), program.collectives()
    assert [one for one in planned if "tensor" in one.axes and one.bytes > 4] == []
    by_hand = [(one.bytes, one.trips) for one in compiled if one.axes == ("tensor",)]
    assert by_hand.count((64, 3)) == 2


def test_of_a_population_the_collectives_of_one_member_are_planned():
    task, batch = models.mlp_task(), models.data(8)
    fields = {"data": 2, "zero": 3}
    one = px.compile(task, models.optimizer(), px.Plan(**fields), batch)
    plan = px.Plan(member=2, chunk=2, **fields)
    two = px.compile(task, models.optimizer(), plan, batch, members=px.Members(4))
    assert two.planned_collectives() == one.planned_collectives() != []


TRACED = {
    "one device": (models.mlp_task, px.Plan(microbatches=2)),
    "data": (models.mlp_task, px.Plan(data=4)),
    "tensor": (models.transformer_task, px.Plan(data=2, tensor=2, shardings=models.megatron())),
    "pipeline": (models.perceptron_stack, px.Plan(data=2, pipeline=2, microbatches=4)),
}


@pytest.mark.parametrize("name", TRACED)
def test_what_was_traced_to_compile_says_what_a_recorded_step_says(name):
    """Nothing is traced again, and of a loop over steps the step in it is read."""
    make, plan = TRACED[name]
    task, batch = make(), models.text(8) if name == "tensor" else models.data(8)
    recorded_step = record_step(task, models.optimizer(), plan, batch, "cpu")
    program = px.compile(task, models.optimizer(), plan, batch)
    rows = px.train.ArrayData(batch, 8)
    order = program.place_epoch(*rows.epoch_order(0))
    loop = program.compile_loop(program.place_data(rows.arrays), order)
    for compiled, looped in ((program.compiled, False), (loop, True)):
        record = program.compile_record(compiled)
        assert (record.looped, record.seconds > 0) == (looped, True)
        found = program.read_traced(record)
        assert found.collectives == every_collective(recorded_step)
        if not looped or name != "one device":  # of which the loop has the data too
            # Of halves that are traced apart, a number or two is written once more.
            assert found.peak == pytest.approx(peak_bytes(recorded_step), abs=8)
        else:
            assert found.peak > peak_bytes(recorded_step)
    assert program.compile_record(jax.jit(jnp.sin).lower(1.0).compile()) is None
