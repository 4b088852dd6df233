"""Attention in blocks of keys under every plan, beside the task as written on one device."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests import models

import plurax as px
from plurax.execute.backends import choose
from plurax.jaxpr.token_order import Order

ROWS = 13  # no multiple of anything


def megatron(sequence=False):
    """The rules of the stack, whose head has the embedding's table."""
    return {name: dims for name, dims in models.megatron(sequence).items() if name != "head"}


TENSOR = {"tensor": 2, "shardings": megatron()}
RING = {"context_strategy": "ring"}
PLANS = {
    "one device": {},
    "microbatches": {"microbatches": 3},
    "data": {"data": 4, "microbatches": 2},
    "uneven": {"data": 2, "microbatches": (3, 1)},
    "zero 2": {"data": 3, "zero": 2, "microbatches": 2},
    "zero 3": {"data": 4, "zero": 3},
    "tensor": TENSOR,
    "sequence": {"tensor": 2, "shardings": megatron(sequence=True)},
    "dots": {"data": 2, "remat": "dots"},
    "full": {"remat": "full"},
    "offload": {"remat": "offload"},
    "minor": {"batch_dim": "minor"},
    "pipeline": {"pipeline": 2, "microbatches": 4},
    "pipeline and tensor": {"pipeline": 2, "microbatches": 2, "schedule": "zb-h1", **TENSOR},
    "pipeline and remat": {"data": 2, "pipeline": 2, "microbatches": 2, "remat": "full"},
    "context": {"context": 3},
    "context by heads": {"context": 2, "context_strategy": "heads"},
    "ring": {"context": 2, **RING},
    "ring of three": {"context": 3, **RING},
    "ring of six": {"context": 6, **RING},
    "ring and data": {"data": 2, "context": 3, "microbatches": 2, **RING},
    "ring and zero 1": {"data": 2, "context": 3, "zero": 1, **RING},
    "ring and zero 3": {"data": 2, "context": 3, "zero": 3, "remat": "full", **RING},
    "ring and tensor": {"context": 2, **RING, **TENSOR},
    "ring and sequence": {"context": 3, **RING, "tensor": 2, "shardings": megatron(sequence=True)},
    "ring and remat": {"context": 3, "remat": "dots", **RING},
    "pipeline and context": {"pipeline": 2, "context": 3, "microbatches": 2},
    "pipeline and ring": {"pipeline": 2, "context": 3, "microbatches": 2, **RING},
    "everything": {"data": 2, "zero": 3, "microbatches": 2, "remat": "full", **TENSOR},
}

pytestmark = pytest.mark.usefixtures("x64")


def trained(plan, members=None, tokens=models.TOKENS):
    task = models.transformer_stack(np.float64, depth=3)
    batch = models.text(ROWS, tokens=tokens)
    program = px.compile(task, optax.adam(1e-2), plan, batch, members=members)
    state = program.init() if members else program.init(seed=3)
    for size in (ROWS, 5):
        state, metrics = program.step(state, models.cut(batch, size))
    outputs = program.predict(state, batch)
    evaluated = program.evaluate(state, batch)
    state = program.to_canonical(state)
    return jax.device_get((state.params, state.opt_state, metrics, evaluated, outputs))


@pytest.fixture(scope="module")
def as_written():
    with jax.enable_x64(True):
        return trained(px.Plan())


@pytest.mark.ci
@pytest.mark.parametrize("name", PLANS)
def test_any_plan_equals_one_device(as_written, name):
    """Blocks of 4 of 6 keys, so that the last one has 2."""
    assert models.max_rel_error(trained(px.Plan(stream=4, **PLANS[name])), as_written) < 1e-10


@pytest.mark.ci
@pytest.mark.parametrize(
    "name", ["one device", "uneven", "zero 3", "full", "minor", "tensor", "pipeline and remat"]
)
def test_any_plan_with_masked_blocks_equals_one_device(as_written, name):
    """Three blocks of 2 keys, each with other queries where tokens are not split."""
    assert models.max_rel_error(trained(px.Plan(stream=2, **PLANS[name])), as_written) < 1e-10


@pytest.mark.parametrize(("plan", "skip"), [({}, True), ({"data": 2}, True), (TENSOR, False)])
def test_masked_blocks_are_left_out_where_tokens_are_not_split(plan, skip, monkeypatch):
    def streamed(task, block, context, *, skip):
        raise LookupError(skip)

    monkeypatch.setattr(choose, "streamed_task", streamed)
    task, batch = models.transformer_stack(np.float64), models.text(ROWS)
    with pytest.raises(LookupError, match=str(skip)):
        px.compile(task, optax.sgd(0.1), px.Plan(stream=2, **plan), batch)


@pytest.mark.ci
def test_members_equal_those_as_written():
    three = px.Members(3)
    plan = px.Plan(member=2, chunk=1, stream=2)
    assert models.max_rel_error(trained(plan, three), trained(px.Plan(chunk=1), three)) < 1e-10


# --- Tokens in order ------------------------------------------------------------------------------

ORDERED = 24  # tokens, in shares of four ranges on 2 or 3 devices


@pytest.fixture(scope="module")
def ordered_as_written():
    with jax.enable_x64(True):
        return trained(px.Plan(), tokens=ORDERED)


@pytest.fixture
def puts(monkeypatch):
    """The sizes of the dims that are put in order."""
    sizes = []
    put = Order.put

    def spied(self, array, dim):
        sizes.append(array.shape[dim])
        return put(self, array, dim)

    monkeypatch.setattr(Order, "put", spied)
    return sizes


@pytest.mark.ci
@pytest.mark.parametrize(
    ("name", "used"),
    [
        ("context", True),
        ("ring", True),
        ("ring of three", True),
        ("ring and data", True),
        ("ring and zero 1", True),
        ("ring and zero 3", True),
        ("ring and remat", True),
        ("context by heads", False),
        ("ring and tensor", False),
        ("pipeline and ring", False),
    ],
)
def test_any_plan_with_tokens_in_order_equals_one_device(ordered_as_written, puts, name, used):
    """Four loops over blocks of 2 keys, dropout, two sizes of batches, predict and evaluate."""
    outputs = trained(px.Plan(stream=2, **PLANS[name]), tokens=ORDERED)
    assert models.max_rel_error(outputs, ordered_as_written) < 1e-10
    assert (ORDERED in puts) == used


BY_HEADS = {"context": 4, "context_strategy": "heads"}
AND_RING = {"context": 4, "context_strategy": "heads+ring"}
GROUPS = {
    "heads": BY_HEADS,
    "ring": AND_RING,
    "ring of four": AND_RING | {"context": 8},
    "ring and zero 3": {"data": 2, "zero": 3, "remat": "full", **AND_RING},
    "heads, zero 2 and microbatches": {"data": 2, "zero": 2, "microbatches": 2, **BY_HEADS},
    "ring and uneven": {"data": 2, "microbatches": (3, 1), **AND_RING},
    "ring and tensor": {**AND_RING, **TENSOR},
    "pipeline and ring": {"pipeline": 2, "microbatches": 2, **AND_RING},
}


@pytest.mark.ci
@pytest.mark.parametrize("name", GROUPS)
def test_heads_within_groups_equal_one_device(ordered_as_written, name):
    """Six heads among two of four or eight devices; three of them where `tensor` has two parts."""
    outputs = trained(px.Plan(stream=2, **GROUPS[name]), tokens=ORDERED)
    assert models.max_rel_error(outputs, ordered_as_written) < 1e-10


@pytest.mark.ci
def test_members_with_tokens_in_order_equal_those_as_written(puts):
    three = px.Members(3)
    plan = px.Plan(member=3, context=2, stream=2, **RING)
    expected = trained(px.Plan(chunk=1), three, ORDERED)
    assert models.max_rel_error(trained(plan, three, ORDERED), expected) < 1e-10
    assert ORDERED in puts


@pytest.mark.ci
def test_members_that_exchange_heads_within_groups_equal_those_as_written():
    """Two of three members at a time; JAX has no rule for exchanges in groups under `jax.vmap`."""
    three = px.Members(3)
    plan = px.Plan(chunk=2, stream=2, **AND_RING)
    expected = trained(px.Plan(chunk=1), three, ORDERED)
    assert models.max_rel_error(trained(plan, three, ORDERED), expected) < 1e-10


@pytest.mark.ci
def test_a_state_goes_on_under_another_plan():
    """What is saved is the same under any plan: from a ring to ZeRO, and back to gathered keys."""
    task, batch = models.transformer_stack(np.float64, depth=3), models.text(ROWS, tokens=ORDERED)

    def after(plans):
        canonical = None
        for plan in plans:
            program = px.compile(task, optax.adam(1e-2), plan, batch)
            first = canonical is None
            state = program.init(seed=3) if first else program.from_canonical(canonical)
            state, metrics = program.step(state, batch)
            canonical = jax.device_get(program.to_canonical(state))
        return canonical.params, canonical.opt_state, jax.device_get(metrics)

    ring = px.Plan(data=2, context=3, stream=2, zero=3, **RING)
    moved = after([ring, px.Plan(data=4, zero=1), px.Plan(context=2, stream=2)])
    assert models.max_rel_error(moved, after([px.Plan()] * 3)) < 1e-10


# --- What is held ---------------------------------------------------------------------------------

TOKENS = 97  # a number that no other dim has


def holds_all(text):
    """Whether a program has an array of all queries by all keys, in any order of its dims."""
    shapes = {tuple(map(int, one.split(","))) for one in re.findall(r"\[([\d,]+)\]", text)}
    return any(shape.count(TOKENS) > 1 for shape in shapes)


@pytest.mark.parametrize("remat", ["none", "dots", "full"])
def test_no_array_of_queries_by_keys_is_in_the_compiled_step(remat):
    batch = {"x": jnp.ones((4, TOKENS, 8), "float32")}
    program = px.compile(models.attention_task(8, 2), optax.sgd(0.1), px.Plan(remat=remat), batch)
    assert holds_all(program.compiled_step.as_text())
    plan = px.Plan(remat=remat, stream=16)
    streamed = px.compile(models.attention_task(8, 2), optax.sgd(0.1), plan, batch)
    assert not holds_all(streamed.compiled_step.as_text())
    assert streamed.memory().temporaries < program.memory().temporaries / 2


@pytest.mark.ci
def test_members_hold_no_such_array_and_send_keys_around():
    """Their tasks are made one by one, in the step."""
    batch = {"x": jnp.ones((4, TOKENS, 8), "float32")}
    program, streamed = (
        px.compile(models.attention_task(8, 2), optax.sgd(0.1), plan, batch, members=px.Members(2))
        for plan in (px.Plan(chunk=1), px.Plan(chunk=1, stream=16))
    )
    assert holds_all(program.compiled_step.as_text())
    assert not holds_all(streamed.compiled_step.as_text())
    plan = px.Plan(member=2, context=2, stream=4, **RING)
    batch = {"x": jnp.ones((4, 16, 8), "float32")}
    task = models.attention_task(8, 2)
    program = px.compile(task, optax.sgd(0.1), plan, batch, members=px.Members(2))
    assert "collective-permute" in {one.kind for one in program.collectives()}


@pytest.mark.ci
def test_memory_grows_with_tokens_and_not_with_their_square():
    def temporaries(tokens):
        batch = {"x": jax.ShapeDtypeStruct((1, tokens, 8), jnp.float32)}
        plan = px.Plan(remat="full", stream=32)
        program = px.compile(models.attention_task(8, 2), optax.sgd(0.1), plan, batch)
        return program.memory().temporaries

    assert temporaries(4096) < 4.2 * temporaries(1024)


def test_estimates_know_it():
    """The recorded step has the loops of the blocks, and what they hold."""
    machine = px.Machine.preset("8xA100-40GB")
    batch = {"x": jax.ShapeDtypeStruct((4, 2048, 64), jnp.float32)}
    whole, blocks = (
        px.estimate(models.attention_task(64, 4), optax.sgd(0.1), plan, batch, machine)
        for plan in (px.Plan(), px.Plan(stream=256))
    )
    assert blocks.memory["temporaries"] < whole.memory["temporaries"] / 2
