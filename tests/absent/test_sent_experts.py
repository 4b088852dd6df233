"""What the compilers of GPUs and TPUs make of rows and buffers sent to their experts."""

import functools

import jax.numpy as jnp
import optax
import pytest

import plurax as px
from tests.parity import test_experts as mixtures
from tests.parity.test_experts_over_data import SPLIT, STACKED, stack_of_mixtures

pytestmark = pytest.mark.ci

ROWS = mixtures.B * mixtures.T * mixtures.K // 4
"""Rows of a device."""


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("target", ["8xH100", "v5e:2x2", "v5p:2x2x1"])
def test_only_rows_are_sent(target, precision):
    """Ragged exchanges; no weights are gathered and no gradients of experts added up."""
    task = px.Task(init=_init, loss=mixtures.loss_of(mixtures.sorted_rows))
    batch = {name: x.astype("float32") for name, x in mixtures.batch_of().items()}
    plan = px.Plan(data=4, shardings=SPLIT, precision=precision)
    devices = px.topology(target)[:4]
    program = px.compile(task, optax.sgd(0.1), plan, batch, devices=devices)
    compiled, planned = program.collectives(), program.planned_collectives()
    room, rows = (n * mixtures.D * jnp.dtype(precision).itemsize for n in (2 * ROWS, ROWS))
    # There and back; backward cotangents there, in later turns rows too; gradients back.
    # In later turns there is room for as many rows as a device has.
    for known, sent in ((True, [room, rows, room, rows]), (False, [rows] * 5)):
        assert sizes(planned, known) == sorted(sent)
        assert len(sizes(compiled, known)) == len(sent)
    others = [one for one in compiled if one.kind not in ("ragged-all-to-all", "all-reduce")]
    assert {one.kind for one in others} <= {"all-gather"}
    assert all(one.bytes <= 4 * mixtures.E * 4 for one in others)


@pytest.mark.parametrize("target", ["4xH100", "v5p:2x2x1"])
def test_rows_are_sent_where_a_loss_balances_all_tokens(target):
    """Beside numbers by expert and the gradients of what is whole nothing else is sent."""

    def loss(params, batch, keys, mask):
        return mixtures.balanced(params, batch, keys, mask)

    batch = {name: x.astype("float32") for name, x in mixtures.batch_of().items()}
    task, plan = px.Task(init=_init, loss=loss, coupled=True), px.Plan(data=4, shardings=SPLIT)
    program = px.compile(task, optax.sgd(0.1), plan, batch, devices=px.topology(target))
    room, rows = (n * mixtures.D * 4 for n in (2 * ROWS, ROWS))
    assert sizes(program.planned_collectives(), True) == sorted([room, rows, room, rows])
    assert len(sizes(program.collectives(), True)) == 4
    others = [one for one in program.collectives() if one.kind == "all-gather"]
    assert all(one.bytes <= 4 * mixtures.E * 4 for one in others)


@pytest.mark.parametrize("target", ["4xH100", "v5p:2x2x1"])
def test_only_buffers_are_sent(target):
    """There and back, and their cotangents; no weights are gathered.

    A TPU, whose products read bfloat16, sends that of float32.
    """
    task = px.Task(
        init=functools.partial(_init, experts=8), loss=mixtures.loss_of(mixtures.one_hot)
    )
    batch = {name: x.astype("float32") for name, x in mixtures.batch_of().items()}
    plan = px.Plan(data=4, shardings=SPLIT)
    program = px.compile(task, optax.sgd(0.1), plan, batch, devices=px.topology(target))
    buffers = mixtures.B // 4 * 8 * mixtures.CAPACITY * mixtures.D * 4
    compiled = buffers // 2 if "v5p" in target else buffers
    both = (program.planned_collectives(), buffers), (program.collectives(), compiled)
    for collectives, sent in both:
        exchanges = [one.bytes for one in collectives if one.kind == "all-to-all"]
        assert exchanges == [sent] * 4
        assert {one.kind for one in collectives} == {"all-to-all", "all-reduce"}


@pytest.mark.parametrize("target", ["4xH100", "v5p:2x2x1"])
def test_rows_are_sent_in_a_pipeline(target):
    """By the same exchanges as planned, in each stage among its own devices."""
    batch = {name: x.astype("float32") for name, x in mixtures.batch_of().items()}
    plan = px.Plan(data=2, pipeline=2, microbatches=2, shardings=STACKED)
    devices = px.topology(target)
    program = px.compile(stack_of_mixtures(), optax.sgd(0.1), plan, batch, devices=devices)
    for known in (True, False):
        planned, compiled = (
            sizes(some, known) for some in (program.planned_collectives(), program.collectives())
        )
        assert len(planned) == len(compiled) > 0


def sizes(collectives, known):
    """Bytes of ragged exchanges in the first turn, or in one of those behind it."""
    ragged = [one for one in collectives if one.kind == "ragged-all-to-all"]
    return sorted(one.bytes for one in ragged if (one.trips is not None) == known)


def _init(key, experts=mixtures.E):
    return {name: leaf.astype("float32") for name, leaf in mixtures.init(key, experts).items()}
