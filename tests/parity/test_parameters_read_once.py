"""Parameters of stages that are read from their flat buffers once, before the ticks.

Programs for CPUs read them in each tick; here they, too, read them once, as those for GPUs and
TPUs do.
"""

import jax
import jax.numpy as jnp
import optax
import pytest
from tests import models
from tests.parity.test_pipelines import NETWORKS, max_rel_error, plan_of, trained

import plurax as px
from plurax.execute.recorder import record_step
from plurax.pipeline import stage_values
from plurax.pipeline.schedule import SCHEDULES
from plurax.trace.step_trace import is_tick_loop


@pytest.fixture
def once(monkeypatch):
    monkeypatch.setattr(stage_values, "PLATFORMS", frozenset({"cpu"}))


def reads(task, plan, batch, platform, length):
    """The slices out of buffers of a length: before the loop over ticks, and in it."""
    trace = record_step(task, optax.sgd(0.1), plan, batch, platform)
    (loop,) = filter(is_tick_loop, trace.block.ops)

    def count(ops):
        return sum(op.name == "slice" and op.inputs[0].shape == (length,) for op in ops)

    before = trace.block.ops[: trace.block.ops.index(loop)]
    return count(before), count(loop.blocks[0].all_ops())


@pytest.mark.parametrize(
    ("platform", "counts"), [("cpu", (0, 6)), ("gpu", (3, 0)), ("tpu", (3, 0))]
)
def test_a_tick_of_a_stack_reads_no_buffer(platform, counts):
    """One table of the embedding, gain and table of the head."""
    task, plan = models.transformer_stack(depth=4, tied=False), px.Plan(pipeline=2, microbatches=2)
    length = models.WORDS * models.WIDTH + models.WIDTH
    assert reads(task, plan, models.text(8), platform, length) == counts


@pytest.mark.parametrize(("stages", "times"), [(2, "once"), (4, "in each tick")])
def test_stages_of_a_model_are_read_once_if_two_buffers_have_room_for_all(stages, times):
    """Of four stages, with 215, 187, 281 and 81 numbers, each device has its own alone."""
    task = models.marked_task()
    params = jax.eval_shape(task.init, jax.random.key(0))
    sizes = [sum(leaf.size for leaf in jax.tree.leaves(params[f"layer{n}"])) for n in range(8)]
    layers = 8 // stages
    length = max(sum(sizes[first : first + layers]) for first in range(0, 8, layers))
    plan = px.Plan(pipeline=stages, microbatches=2)
    before, inside = reads(task, plan, models.data(8), "tpu", length)
    assert (before, inside > 0) == ((16, False) if times == "once" else (0, True))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_what_layers_store_and_send_keeps_its_shape(schedule):
    """A TPU copies what becomes flat: boundaries, and residuals of layers, embedding and head."""
    task = models.transformer_stack(depth=4, tied=False)
    plan = px.Plan(pipeline=2, microbatches=2, schedule=schedule)
    trace = record_step(task, optax.sgd(0.1), plan, models.text(8))
    (loop,) = filter(is_tick_loop, trace.block.ops)
    ops = list(loop.blocks[0].all_ops())
    boundary = (4, models.TOKENS, models.WIDTH)
    sent = [op.inputs[0].shape for op in ops if op.name == "ppermute"]
    assert sent == [boundary] * 2
    # Gradients of one stage's parameters are flat.
    buffers = {op.outputs[0].shape for op in ops if op.name == "dynamic_update_slice"}
    flat = {shape for shape in buffers if len(shape) == 1}
    assert flat == {(models.WORDS * models.WIDTH + models.WIDTH,)}
    assert {shape[1:] for shape in buffers - flat} >= {boundary, (4, models.TOKENS)}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule(x64, once, schedule):
    """Trained, evaluated and predicted; by name, an embedding and a head, or two marked stages."""
    for name in ("perceptron", "marked"):
        got = trained(name, plan_of(schedule, 2), jnp.float64)
        assert max_rel_error(got, name, jnp.float64) < 1e-10


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore::plurax.errors.ShardingWarning")
@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize(("name", "remat"), [("transformer", "full"), ("perceptron", "dots")])
def test_every_zero_level_with_tensor(x64, once, name, remat, zero):
    plan = px.Plan(
        data=2, pipeline=2, tensor=2, microbatches=3, zero=zero, remat=remat,
        shardings=NETWORKS[name][1],
    )  # fmt: skip
    assert max_rel_error(trained(name, plan, jnp.float64), name, jnp.float64) < 1e-10


@pytest.mark.parametrize(
    "fields",
    [
        {"precision": "bfloat16", "remat": "full"},
        {"schedule": "zb-h1"},
        {"stages": 4, "schedule": "interleaved"},
    ],
    ids=str,
)
def test_untied_tables_with_frozen_ones(monkeypatch, fields):
    """Tables on one stage each, of which the embedding's and the head's gain are not trained."""
    task = px.freeze(models.transformer_stack(depth=4, tied=False), "embed/*", "head/gain")
    batch = models.text(8)

    def run():
        plan = px.Plan(data=2, pipeline=2, microbatches=2, **fields)
        program = px.compile(task, optax.adam(1e-2), plan, batch)
        state, _ = program.step(program.init(0), batch)
        state, metrics = program.step(state, batch)
        return jax.device_get((program.to_canonical(state).params, metrics))

    each_tick = run()
    monkeypatch.setattr(stage_values, "PLATFORMS", frozenset({"cpu"}))
    assert models.max_rel_error(run(), each_tick) < 1e-5
