"""What mixtures of experts send and hold whose weights are split over devices."""

import re

import optax
import pytest
from tests.hlo.test_planned_bytes import counted
from tests.parity import test_experts as mixtures

import plurax as px

pytestmark = pytest.mark.usefixtures("x64")

TOKENS = mixtures.B * mixtures.T * mixtures.D * 8
"""Bytes of the tokens of a batch."""
CHOICES = mixtures.B * mixtures.T * mixtures.K * 8
"""Bytes of their weights."""
BIAS = mixtures.E * mixtures.H * 8
"""Bytes of the hidden bias of all experts."""


def program_of(dispatch, **fields):
    named = dispatch is mixtures.named_one_hot
    rules = mixtures.NAMED if named else mixtures.SPLIT
    plan = px.Plan(tensor=4, shardings=rules, **fields)
    task, batch = mixtures.task_of(dispatch), mixtures.batch_of()
    return px.compile(task, optax.sgd(0.1), plan, batch)


@pytest.mark.ci
@pytest.mark.parametrize(
    "dispatch", [*mixtures.EVERY, mixtures.named_one_hot], ids=mixtures.name_of
)
def test_only_tokens_are_added_up(dispatch):
    """Forward the values of all experts, backward the gradients of tokens and of their weights.

    No weights are gathered, and no buffers, only the gradients of a whole bias that stand by
    expert; the loss is a number.
    """
    program = program_of(dispatch)
    sent = counted(program.collectives())
    assert sent == counted(program.planned_collectives())
    gathered = sum(sent[key] for key in sent if key[0] == "all-gather")
    assert {kind for kind, *_ in sent} <= {"all-reduce", "all-gather"}
    assert gathered == (BIAS if dispatch is mixtures.of_modules else 0)
    assert sum(sent.values()) - gathered == SENT.get(dispatch, 2 * TOKENS + CHOICES) + 8


SENT = {
    # Of two layers: what is kept for the backward pass stays a partial sum.
    mixtures.in_a_loop: 2 * (2 * TOKENS + CHOICES),
    # The gradient of a bias that is not split.
    mixtures.normed: 2 * TOKENS + CHOICES + BIAS,
    # The hidden values, forward and twice backward: the rows of a product with other groups.
    mixtures.counted_twice: 2 * TOKENS + CHOICES + 3 * mixtures.H * CHOICES,
}


@pytest.mark.parametrize("fields", [{"data": 2, "zero": 3}, {"microbatches": 2, "remat": "full"}])
def test_what_is_planned_is_what_is_compiled(fields):
    program = program_of(mixtures.sorted_rows, **fields)
    assert counted(program.collectives()) == counted(program.planned_collectives())


@pytest.mark.parametrize("name", mixtures.LAYERS)
def test_what_is_kept_of_a_layer_is_not_added_up(name):
    """In a loop over layers, and in stages: the values of all experts stay with their devices, also
    between forward and backward."""
    program = mixtures.layers_program(mixtures.sorted_rows, name)
    over = [one for one in program.planned_collectives() if "tensor" in one.axes]
    sent = sum(one.bytes * one.trips for one in over if one.bytes > 8)  # no number of a loss
    layers = mixtures.DEPTH // mixtures.LAYERS[name].get("pipeline", 1)
    assert sent == layers * (2 * TOKENS + CHOICES)


OWN = [mixtures.named_one_hot, mixtures.added_to_buffers, mixtures.sorted_rows]


@pytest.mark.parametrize("dispatch", OWN, ids=mixtures.name_of)
def test_each_device_holds_its_own_experts(dispatch):
    """All experts' weights, hidden values and buffers are in no program."""
    e, d, h = mixtures.E, mixtures.D, mixtures.H
    text = program_of(dispatch).compiled_step.as_text()
    shapes = {tuple(map(int, one.split(","))) for one in re.findall(r"f64\[([\d,]+)\]", text)}
    held = {tuple(sorted(size for size in shape if size > 1)) for shape in shapes}
    for sizes in ((d, h), *((b, c, w) for b, c in SLOTS for w in (d, h))):
        assert tuple(sorted(size for size in (e, *sizes) if size > 1)) not in held
    assert tuple(sorted((d, h))) in held


SLOTS = ((mixtures.B, mixtures.CAPACITY), (mixtures.B * mixtures.CAPACITY, 1))
"""How the slots of an expert for all examples may stand in an array."""


@pytest.mark.ci
def test_experts_that_devices_do_not_divide_are_whole():
    plan = px.Plan(tensor=4, shardings=mixtures.SPLIT)
    task, batch = mixtures.task_of(mixtures.sorted_rows, experts=6), mixtures.batch_of()
    with pytest.warns(px.errors.ShardingWarning) as said:
        program = px.compile(task, optax.sgd(0.1), plan, batch)
    assert "shards do not divide 6" in str(said[0].message)
    assert not program.collectives()
