"""What is sent and held where rows are sent to their experts."""

import re

import optax
import pytest
from tests.parity import test_experts as mixtures
from tests.parity.test_experts_over_data import (
    SPLIT,
    buffers_in_layers,
    in_layers,
    normalized,
    rectified,
    shifted,
)

import plurax as px

pytestmark = pytest.mark.usefixtures("x64")

DEVICES = 4
ROWS = mixtures.B * mixtures.T * mixtures.K // DEVICES
"""Rows of a device."""
SLOTS = 2 * ROWS * mixtures.D * 8
"""Bytes of the slots for rows that a device receives in a turn: it has room for twice its own."""
SIZES = DEVICES * mixtures.E * 4
"""Bytes of the group sizes of all devices."""

OTHERS = (2 * mixtures.D**2 + mixtures.D * mixtures.E + mixtures.E) * 8
"""Bytes of the gradients of what is not split by expert: in, head, router, preferred."""

BIAS = mixtures.E * mixtures.H * 8
"""Bytes of the experts' biases."""

HIDDEN = 2 * ROWS * mixtures.H * 8
"""Bytes of the slots for hidden values."""


def program_of(dispatch, experts=mixtures.E, **fields):
    task, batch = mixtures.task_of(dispatch, experts=experts), mixtures.batch_of()
    plan = px.Plan(data=DEVICES, shardings=SPLIT, **fields)
    return px.compile(task, optax.sgd(0.1), plan, batch)


def sent(collectives, kind, *, known=True):
    """Bytes of collectives whose number of trips is known, or is not."""
    return sorted(c.bytes for c in collectives if c.kind == kind and (c.trips is not None) == known)


def sent_later(collectives):
    """Bytes that are sent in each turn behind the first, of which the batch decides how many."""
    return sent(collectives, "all-to-all", known=False)


@pytest.mark.parametrize(
    ("dispatch", "fields", "times", "later"),
    [
        (mixtures.sorted_rows, {}, 4, 5),
        (mixtures.added_to_tokens, {"zero": 1}, 4, 5),
        # The forward pass is run again in the backward pass.
        (mixtures.sorted_rows, {"remat": "full"}, 6, 7),
        (in_layers, {}, 4, 5),
    ],
)
def test_rows_are_sent_and_no_weights(dispatch, fields, times, later):
    """Forward there and back; backward cotangents there, and gradients back.

    In later turns the backward pass sends the rows once more; there is room for half as many.
    """
    program = program_of(dispatch, **fields)
    for collectives in (program.collectives(), program.planned_collectives()):
        assert sent(collectives, "all-to-all") == [SLOTS] * times
        assert sent_later(collectives) == [SLOTS // 2] * later
        if not fields.get("zero"):
            assert set(sent(collectives, "all-gather")) == {SIZES}
        # Those of `zero=1` are padded; beside them loss, weight, and the gradient's norm.
        own = OTHERS if not fields.get("zero") else 0
        assert sum(sent(collectives, "all-reduce")) == own + 3 * 8


@pytest.mark.parametrize(
    ("dispatch", "fields", "times"),
    [
        (mixtures.one_hot, {}, 4),
        (mixtures.in_buffers, {"zero": 1}, 4),
        (mixtures.of_modules, {}, 4),
        (buffers_in_layers, {}, 4),
        # The forward pass is run again in the backward pass.
        (mixtures.one_hot, {"remat": "full"}, 6),
    ],
)
def test_buffers_are_sent_and_no_weights(dispatch, fields, times):
    """Of each example one for each expert: forward there and back, and backward the same.

    The gradients of biases, which no rule splits, are computed at the experts, and gathered.
    """
    program = program_of(dispatch, **fields)
    slots = mixtures.T if dispatch in (mixtures.of_modules, buffers_in_layers) else (
        mixtures.CAPACITY)  # fmt: skip
    buffers = mixtures.B // DEVICES * mixtures.E * slots * mixtures.D * 8
    gathered = [BIAS] if dispatch is mixtures.of_modules else []
    for collectives in (program.collectives(), program.planned_collectives()):
        assert sent(collectives, "all-to-all") == [buffers] * times
        if not fields.get("zero"):
            assert sent(collectives, "all-gather") == gathered
            assert sum(sent(collectives, "all-reduce")) == OTHERS + 3 * 8
            assert not sent_later(collectives)


def test_products_of_whole_weights_stay():
    """A rule splits another parameter over `data`: experts are on each device, and no row moves."""
    batch = mixtures.batch_of()
    plan = px.Plan(data=DEVICES, shardings={"bias": ("data", None)})
    program = px.compile(mixtures.task_of(mixtures.of_modules), optax.sgd(0.1), plan, batch)
    assert not sent(program.planned_collectives(), "all-to-all")


@pytest.mark.parametrize(
    ("dispatch", "hidden"),
    [
        (normalized, 0),
        (rectified, 0),
        # A bias of each row: forward, and its gradient back.
        (mixtures.normed, 2),
        # The hidden values are a result: back, and their cotangents there.
        (shifted, 2),
    ],
)
def test_operations_between_products_stay_with_the_experts(dispatch, hidden):
    """Their rows are sent as often as those of one product: hidden values are sent nowhere."""
    planned = program_of(dispatch).planned_collectives()
    assert sent(planned, "all-to-all") == [HIDDEN] * hidden + [SLOTS] * 4


@pytest.mark.parametrize("dispatch", [mixtures.sorted_rows, in_layers], ids=mixtures.name_of)
def test_each_device_holds_its_own_experts(dispatch):
    """All experts' weights are in no program, nor are hidden values of more than its slots."""
    text = program_of(dispatch).compiled_step.as_text()
    shapes = {tuple(map(int, one.split(","))) for one in re.findall(r"f64\[([\d,]+)\]", text)}
    held = {tuple(sorted(size for size in shape if size > 1)) for shape in shapes}
    assert tuple(sorted((mixtures.E, mixtures.D, mixtures.H))) not in held
    assert tuple(sorted((mixtures.D, mixtures.H))) in held
    rows = max(shape[0] for shape in shapes if len(shape) == 2 and shape[1] == mixtures.H)
    assert rows <= 2 * ROWS


@pytest.mark.ci
def test_experts_that_devices_do_not_divide_are_gathered_nowhere():
    with pytest.warns(px.errors.ShardingWarning, match="shards do not divide 6"):
        program = program_of(mixtures.sorted_rows, experts=6)
    assert {one.kind for one in program.collectives()} == {"all-reduce"}
