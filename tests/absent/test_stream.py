"""Attention in blocks of keys, as compilers of TPUs and GPUs make it."""

import re

import jax
import optax
import pytest

import plurax as px
from tests import models
from tests.hlo.test_tokens import HEADS, KEY_HEADS, SIZE, WIDTH, moved, task
from tests.parity.test_stream_plans import TOKENS, holds_all

jax.config.update("jax_platforms", "cpu")

pytestmark = pytest.mark.ci


def compiled(plan, tokens, machine):
    batch = {"x": jax.ShapeDtypeStruct((2, tokens, 128), "float32")}
    devices = px.topology(machine)[: plan.devices]
    return px.compile(models.attention_task(128, 2), optax.sgd(0.1), plan, batch, devices=devices)


@pytest.mark.parametrize("machine", ["v5e:2x2", "4xH100"])
@pytest.mark.parametrize("remat", ["dots", "full"])
def test_no_array_of_queries_by_keys_is_compiled(machine, remat):
    whole = compiled(px.Plan(remat=remat), TOKENS, machine)
    assert holds_all(whole.compiled_step.as_text())
    blocks = compiled(px.Plan(remat=remat, stream=16), TOKENS, machine)
    assert not holds_all(blocks.compiled_step.as_text())


@pytest.mark.parametrize("machine", ["v5e:2x2", "4xH100"])
def test_a_step_holds_a_few_arrays_of_queries_by_the_keys_of_a_block(machine):
    """A mask that follows from the numbers of blocks alone is not kept for all blocks."""
    tokens, rows, heads, block = 32768, 2, 2, 256
    program = compiled(px.Plan(remat="full", stream=block), tokens, machine)
    assert program.memory().temporaries < 6 * 4 * rows * heads * tokens * block


COUNT, ROWS, SPLIT = 2, 2, 2048
KEYS = 2 * ROWS * SPLIT * KEY_HEADS * SIZE * 4
SENT = {
    "gather": {"all-gather": KEYS, "reduce-scatter": KEYS // COUNT},
    "ring": {"collective-permute": (2 * (COUNT - 1) + COUNT) * KEYS // COUNT},
    "heads": {"all-to-all": 2 * (HEADS + KEY_HEADS) * KEYS // (KEY_HEADS * COUNT)},
    "heads+ring": {
        "all-to-all": 2 * (HEADS + KEY_HEADS) * KEYS // (KEY_HEADS * 2 * COUNT),
        "collective-permute": (2 * (COUNT - 1) + COUNT) * KEYS // (2 * COUNT),
    },
}


def split(strategy, tokens):
    """Return a step of a causal layer with tokens over devices, compiled for H100."""
    batch = {name: jax.ShapeDtypeStruct((ROWS, tokens, WIDTH), "float32") for name in "xy"}
    count = 2 * COUNT if strategy == "heads+ring" else COUNT  # two heads of keys, two groups
    plan = px.Plan(context=count, context_strategy=strategy, stream=256)
    devices = px.topology("4xH100")[:count]
    return px.compile(task("float32"), optax.sgd(0.1), plan, batch, devices=devices)


@pytest.mark.parametrize("strategy", SENT)
def test_what_is_sent_where_tokens_are_split(strategy):
    """Keys are gathered once, before the loop, which a GPU's compiler does not take out of it."""
    program = split(strategy, SPLIT)
    assert moved(program.collectives()) == SENT[strategy] == moved(program.planned_collectives())


@pytest.mark.parametrize("strategy", ["gather", "ring"])
def test_no_array_of_all_tokens_by_the_keys_of_a_block_is_held(strategy):
    """Places of a mask, which compilers take out of loops, are those of a device's tokens."""
    tokens = 32768
    program = split(strategy, tokens)
    assert program.memory().temporaries < 5 * 4 * ROWS * HEADS * tokens // COUNT * 256
    assert not re.search(rf"\[{tokens},256\]", program.compiled_step.as_text())
