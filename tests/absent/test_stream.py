"""Attention in blocks of keys, as compilers of TPUs and GPUs make it."""

import jax
import optax
import pytest

import plurax as px
from tests import models
from tests.hlo.test_tokens import GATHERED, KEY_HEADS, SIZE, WIDTH, moved, task
from tests.parity.test_stream_plans import TOKENS, holds_all

jax.config.update("jax_platforms", "cpu")


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


def test_keys_of_split_tokens_are_gathered_once_before_the_loop():
    """Not for each block of keys, which a GPU's compiler does not take out of the loop."""
    rows, tokens, count = 2, 2048, 4
    batch = {name: jax.ShapeDtypeStruct((rows, tokens, WIDTH), "float32") for name in "xy"}
    plan = px.Plan(tensor=count, stream=256, shardings=GATHERED)
    devices = px.topology("4xH100")[:count]
    program = px.compile(task("float32"), optax.sgd(0.1), plan, batch, devices=devices)
    keys = 2 * rows * tokens * KEY_HEADS * SIZE * 4
    assert moved(program) == {"all-gather": keys, "reduce-scatter": keys // count}
