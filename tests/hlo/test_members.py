"""What a population's program holds: nothing over members, nothing of members times data."""

import math
import re

import jax
import numpy as np
import optax
import pytest
from tests import models

import plurax as px
from plurax.execute.reads import ORDERED

ROWS = models.data(1000)
MANY = models.data(8000)  # more than stand in one block of steps


def program(plan, members, rows=ROWS, batch=16):
    plan = px.Plan(**{**vars(plan), "chunk": plan.chunk or 2, "batch_dim": "major"})
    data = px.train.ArrayData(rows, batch)
    return px.compile(models.mlp_task(), models.optimizer(), plan, models.cut(rows, batch),
                      members=members, data=data)  # fmt: skip


def largest(hlo):
    """Elements of the largest array in the text of a program."""
    return max(
        math.prod(int(n) for n in dims.split(","))
        for dims in re.findall(r"(?:f32|s32|u32|pred|f64)\[([\d,]+)\]", hlo)
    )


@pytest.mark.ci
@pytest.mark.parametrize(
    "plan",
    [px.Plan(member=4), pytest.param(px.Plan(member=8, chunk=1), marks=pytest.mark.slow)],
    ids=str,
)
def test_members_never_communicate(plan):
    made = program(plan, px.Members(8, resample=px.ensemble.bootstrap()))
    assert made.collectives() == []
    step = px.compile(models.mlp_task(), models.optimizer(), made.plan, models.cut(ROWS, 16),
                      members=px.Members(8))  # fmt: skip
    assert step.collectives() == []


@pytest.mark.ci
def test_with_data_each_step_reduces_once_over_data_alone():
    made = program(px.Plan(member=4, data=2, microbatches=2, chunk=1), px.Members(4))
    reductions = [found for found in made.collectives() if found.kind == "all-reduce"]
    assert {found.axes for found in made.collectives()} == {("data",)}
    gradients = sum(leaf.nbytes for leaf in jax.tree.leaves(models.init(jax.random.key(0))))
    # The gradient, and loss, weight and accuracy.
    assert sum(found.bytes for found in reductions) == gradients + 12


def test_nothing_has_members_times_rows():
    made = program(
        px.Plan(member=2, chunk=50), px.Members(100, resample=px.ensemble.bootstrap()), MANY
    )
    # The order of a block of steps for a chunk, and the data themselves, are allowed.
    assert largest(made.hlo()) <= max(ORDERED * 50, 8000 * models.FEATURES)


@pytest.mark.ci
def test_data_memory_does_not_depend_on_the_members():
    """Twice the rows cost the same memory whatever the number of members."""

    def arguments(members, count):
        rows = jax.tree.map(lambda x: np.concatenate([x] * count), MANY)
        memory = program(
            px.Plan(chunk=4), px.Members(members, resample=px.ensemble.bootstrap()), rows
        )
        return memory.memory()

    few, few_more = arguments(4, 1), arguments(4, 2)
    many, many_more = arguments(64, 1), arguments(64, 2)
    bytes_of_rows = sum(leaf.nbytes for leaf in jax.tree.leaves(MANY))
    assert few_more.arguments - few.arguments == bytes_of_rows
    assert many_more.arguments - many.arguments == bytes_of_rows
    # An order is worked out for blocks of steps; what remains is how the compiler rounds up.
    assert abs(many_more.temporaries - many.temporaries) < bytes_of_rows / 40
    assert abs(few_more.temporaries - few.temporaries) < bytes_of_rows / 40


@pytest.mark.ci
def test_memory_of_a_chunk_does_not_grow_with_the_members():
    """Beyond the states and metrics, which are arguments and outputs, a member costs nothing."""
    few, many = (program(px.Plan(chunk=4), px.Members(count)) for count in (16, 64))
    one = sum(
        np.prod(leaf.shape[1:]) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(few.state_shapes)
        if jax.numpy.issubdtype(leaf.dtype, jax.numpy.floating)
    )
    growth = (many.memory().temporaries - few.memory().temporaries) / 48
    assert growth < 0.1 * one


@pytest.mark.parametrize("chunk", [1, 2, 6])
def test_no_copy_of_the_state_of_all_members(chunk):
    """Not in a loop over chunks, and not where all members are computed at once."""
    plan = px.Plan(chunk=chunk, batch_dim="major")
    program = px.compile(models.mlp_task(), optax.adam(1e-3), plan, models.cut(ROWS, 16),
                         members=px.Members(6))  # fmt: skip
    moments = jax.tree.leaves(program.init().opt_state[0].mu)
    shapes = {",".join(map(str, leaf.shape)) for leaf in moments if leaf.size > 200}
    # As the program is given it, and as a loop carries it.
    source = r"%(?:state_opt_state|get-tuple-element)"
    copied = re.findall(rf"= f32\[([\d,]+)\]\S* copy\({source}", program.hlo())
    assert shapes
    assert not shapes.intersection(copied)
