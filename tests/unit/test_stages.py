"""What cannot be cut into stages says so, and what would work."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import io_callback
from tests import models

import plurax as px
from plurax.pipeline import packing


def refused(task, plan, match, batch=None, optimizer=None):
    batch = models.data(8) if batch is None else batch
    with pytest.raises(px.errors.PlanError, match=match):
        px.compile(task, optimizer or optax.sgd(0.1), plan, batch)


def marked(boundaries, wrap=lambda f: f):
    """A task whose two layers have so many marks between them, in a wrapper."""

    def loss(params, batch, keys):
        def run(x):
            x = jnp.tanh(x @ params["first"])
            for _ in range(boundaries):
                x = px.pipeline.stage_boundary(x)
            return x @ params["second"]

        return jnp.sum(wrap(run)(batch["x"]) ** 2, 1)

    return px.Task(init=lambda key: {"first": jnp.ones((5, 4)), "second": jnp.ones((4, 3))},
                   loss=loss)  # fmt: skip


def test_a_model_without_marks():
    refused(marked(0), px.Plan(pipeline=2), "Without a change, pipeline=1 works")


def test_too_few_marks():
    refused(
        marked(1),
        px.Plan(pipeline=4),
        "split it into 2, one after another.* pipeline=2 works",
    )


def looped(f):
    return lambda x: jax.lax.scan(lambda c, _: (c, f(c)), x, None, length=1)[1][0]


def test_a_mark_in_a_loop():
    refused(marked(1, looped), px.Plan(pipeline=2), "is inside 'scan'")


@pytest.mark.parametrize("wrap", [jax.jit, lambda f: jax.jit(jax.jit(f))])
def test_a_mark_in_a_jitted_function(wrap):
    program = px.compile(marked(1, wrap), optax.sgd(0.1), px.Plan(pipeline=2), models.data(8))
    assert program.shardings[0].note == "on device 0 of the pipeline"
    assert program.shardings[1].note == "on device 1 of the pipeline"


def branched(params, x):
    """Marks beside each other, on a tree at different depths, and on the rows themselves."""
    x = px.pipeline.stage_boundary(x)
    left = px.pipeline.stage_boundary(jnp.tanh(x @ params["first"]))
    right = px.pipeline.stage_boundary(jnp.tanh(x @ params["first"] + 1))
    left = px.pipeline.stage_boundary(left * 2)
    left, right = px.pipeline.stage_boundary((right, left))
    return (left + right) @ params["second"]


def branched_task(dtype=jnp.float32):
    return px.Task(
        init=lambda key: {"first": jnp.ones((5, 4), dtype), "second": jnp.ones((4, 3), dtype)},
        loss=lambda params, batch, keys: jnp.sum(branched(params, batch["x"]) ** 2, 1),
        evaluate=lambda params, batch: jnp.sum(branched(params, batch["x"]), 1),
        # Without marks: the parameters are gathered for it.
        predict=lambda params, inputs: jnp.tanh(inputs["x"] @ params["first"]) @ params["second"],
    )


@pytest.mark.ci
def test_marks_in_branches_and_on_trees(x64):
    """The longest way has three marks between parameters and loss, so there are four stages."""
    batch = models.data(8, dtype=np.float64)

    def run(plan):
        program = px.compile(branched_task(jnp.float64), optax.adam(0.1), plan, batch)
        state, metrics = program.step(program.init(0), batch)
        found = (program.to_canonical(state).params, metrics, program.evaluate(state, batch))
        return jax.device_get((*found, program.predict(state, batch)))

    for pipeline in (2, 3, 4):
        assert models.max_rel_error(run(px.Plan(pipeline=pipeline)), run(px.Plan())) < 1e-10
    refused(branched_task(), px.Plan(pipeline=5), "pipeline=4 works")


@pytest.mark.ci
def test_predictions_in_stages_keep_their_dtypes():
    """Outputs of the last stage reach the other devices as they are: truths, bytes, bfloat16.

    One has no numbers, which says nothing of its rows.
    """
    marked = models.marked_task()

    def predict(params, inputs):
        logits = marked.predict(params, inputs)
        return {
            "right": logits > 0, "label": jnp.argmax(logits, 1).astype(jnp.int8),
            "half": logits.astype(jnp.bfloat16), "none": logits[:, :0],
        }  # fmt: skip

    task, batch = dataclasses.replace(marked, predict=predict), models.data(6)

    def run(plan):
        program = px.compile(task, models.optimizer(), plan, batch)
        return jax.device_get(program.predict(program.init(0), batch))

    found, expected = run(px.Plan(pipeline=2, microbatches=2)), run(px.Plan())
    for name, array in expected.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        np.testing.assert_array_equal(found[name], array)


@pytest.mark.ci
def test_marks_elsewhere_in_what_is_evaluated_and_predicted(x64):
    """Their stages would want parameters of others: these are gathered, as without marks."""
    batch = models.data(8, dtype=np.float64)

    def layers(params, x, marks):
        for weight, mark in zip(params, marks, strict=True):
            x = jnp.tanh(x @ weight)
            x = px.pipeline.stage_boundary(x) if mark else x
        return x

    def init(key):
        return list(jax.random.normal(key, (4, models.FEATURES, models.FEATURES)))

    task = px.Task(
        init=init,
        loss=lambda params, batch, keys: layers(params, batch["x"], (1, 0, 0, 0)).sum(1),
        evaluate=lambda params, batch: layers(params, batch["x"], (0, 0, 1, 0)).sum(1),
        predict=lambda params, inputs: layers(params, inputs["x"], (1, 1, 1, 1)),
    )

    def run(plan):
        program = px.compile(task, optax.sgd(0.1), plan, batch)
        state = program.init(0)
        return program.evaluate(state, batch), program.predict(state, batch)

    expected = run(px.Plan())
    # Numbers of parts are those of the loss: the prediction has five.
    for parts in (None, (1, 1)):
        assert models.max_rel_error(run(px.Plan(pipeline=2, layers=parts)), expected) < 1e-10


def test_keeping_a_state_compiles_once(caplog):
    task = models.perceptron_stack(depth=3)
    program = px.compile(task, optax.sgd(0.1), px.Plan(pipeline=2), models.data(8))
    state = program.init(0)
    for again in (False, True):
        caplog.clear()
        with jax.log_compiles():
            program.to_canonical(state)
        assert ("Compiling" in caplog.text) == (not again)


@pytest.mark.ci
def test_integers_are_computed_again_where_they_are_read(x64):
    """Labels and masks of one stage that a later one reads: only floating values are sent."""

    def loss(params, batch, keys):
        x = batch["x"] @ params["first"]
        best, inside = jnp.argmax(x, 1), jnp.abs(x) < 1
        x = px.pipeline.stage_boundary(jnp.where(inside, x, jnp.tanh(x)))
        values, places = jax.lax.top_k(x @ params["second"], 2)
        x = px.pipeline.stage_boundary(values)
        x = px.pipeline.stage_boundary(x * params["third"][places])
        picked = jnp.take_along_axis(x, best[:, None] % 2, 1)[:, 0]
        return picked + jnp.where(inside, x[:, :1], 0).sum(1), {"best": best, "top": places[:, 0]}

    def init(key):
        shapes = {"first": (models.FEATURES, 4), "second": (4, 3), "third": (3,)}
        return {n: jax.random.normal(key, s, jnp.float64) for n, s in shapes.items()}

    task, batch = px.Task(init=init, loss=loss), models.data(8, dtype=np.float64)

    def run(plan):
        program = px.compile(task, models.optimizer(), plan, batch)
        state, metrics = program.step(program.init(0), batch)
        return jax.device_get((program.to_canonical(state).params, metrics))

    for pipeline in (2, 3, 4):
        assert models.max_rel_error(run(px.Plan(pipeline=pipeline)), run(px.Plan())) < 1e-10


def integer_of_an_effect(x):
    at = jax.ShapeDtypeStruct(x.shape[:1], jnp.int32)
    return io_callback(lambda x: np.argmax(x, 1).astype(np.int32), at, jax.lax.stop_gradient(x))


@pytest.mark.parametrize(
    ("dtype", "number"), [("complex64", jnp.fft.fft), ("int32", integer_of_an_effect)]
)
def test_what_cannot_cross_a_boundary(dtype, number):
    def loss(params, batch, keys):
        x = px.pipeline.stage_boundary(batch["x"] @ params["w"])
        early = number(x)
        x = px.pipeline.stage_boundary(jnp.tanh(x))
        late = early.reshape(x.shape[0], -1) * x.astype(early.dtype)
        return jnp.sum(x, 1) + jnp.real(late).sum(1).astype(x.dtype)

    task = px.Task(init=lambda key: {"w": jnp.ones((5, 4))}, loss=loss)
    refused(task, px.Plan(pipeline=3), f"dtype {dtype} and shape .* crosses a stage boundary")


def test_too_few_layers():
    refused(models.perceptron_stack(depth=3), px.Plan(pipeline=4), "pipeline=3 works")
    plan = px.Plan(pipeline=2, stages=4, schedule="interleaved", microbatches=2)
    refused(models.perceptron_stack(depth=3), plan, "pipeline=1 works, stages=2")


WRONG_LAYERS = {
    "not a number": ([2, 2.5], "give the number of layers of each stage, at least 1"),
    "a zero": ((4, 0), "give the number of layers of each stage, at least 1"),
    "a number alone": (4, "give the number of layers of each stage, at least 1"),
    "text": ("22", "give the number of layers of each stage, at least 1"),
    "too few": ((4,), "has 1 number of layers, and the plan has 2 stages"),
    "too many": ((1, 1, 2), "has 3 numbers of layers, and the plan has 2 stages"),
}


@pytest.mark.parametrize("case", WRONG_LAYERS)
def test_layers_that_are_not_one_number_for_each_stage(case):
    given, match = WRONG_LAYERS[case]
    with pytest.raises(px.errors.PlanError, match=match):
        px.Plan(pipeline=2, layers=given)


def test_layers_that_do_not_add_up():
    """The stack's depth, or the parts of a model with boundaries."""
    plan = px.Plan(pipeline=2, layers=(3, 2))
    refused(
        models.perceptron_stack(depth=4),
        plan,
        r"adds up to 5 layers.* has 4 layers: layers=\(2, 2\)",
    )
    refused(marked(2), plan, r"adds up to 5 layers.* split it into 3, .*: layers=\(2, 1\) works")
    refused(marked(0), plan, r"adds up to 5 layers.* split it into 1, .*: take fewer stages")


def test_an_optimizer_that_needs_several_stages():
    def update(grads, state, params=None):
        total = grads["embed"].sum(0)[:3] + grads["head"].sum(0)
        return jax.tree.map(lambda g: -g * total.sum(), grads), state

    optimizer = optax.GradientTransformation(lambda params: (), update)
    task = models.perceptron_stack(depth=4)
    refused(task, px.Plan(pipeline=2), "'add' reads tensors of several stages", None, optimizer)


def test_what_stages_keep_stays_on_the_device():
    with pytest.raises(px.errors.PlanError, match="Use remat='full', which stores least"):
        px.Plan(pipeline=2, remat="offload")


def test_a_model_that_permutes_itself():
    def by_hand(x):
        def local(x):
            return jax.lax.ppermute(x, "tensor", [(0, 1), (1, 0)])

        return jax.shard_map(local, in_specs=jax.P(), out_specs=jax.P(), axis_names={"tensor"},
                             check_vma=False)(x)  # fmt: skip

    task = px.stack(
        embed=layer(lambda w, batch, keys: batch["x"] @ w),
        block=layer(lambda w, x, batch, keys: by_hand(x @ w)),
        head=layer(lambda w, x, batch, keys: (x @ w).sum(1)),
        depth=2,
    )
    refused(task, px.Plan(pipeline=2, tensor=2), "in stages, and where devices have other numbers")
    refused(
        task, px.Plan(data=2, tensor=2, microbatches=(3, 1)), "only some run it, and would wait"
    )


def layer(apply):
    return (lambda key: jnp.ones((5, 5)), apply)


def never(*args):
    raise AssertionError("refused before anything is applied")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"depth": 0}, "depth must be a whole number"),
        ({"block": layer(lambda w, x, batch, keys: x[:, :2])}, "layer must return the shapes"),
        ({"tied": ["table"]}, "parameters are tied by name"),
        (
            {"tied": ["table"], "embed": (lambda key: {"a": jnp.ones(1)}, never),
             "head": (lambda key: {}, never)},
            "the parameters of `embed` are 'a'",
        ),
    ],
)  # fmt: skip
def test_stacks_that_cannot_be(change, match):
    given = {
        "embed": layer(lambda w, batch, keys: batch["x"] @ w),
        "block": layer(lambda w, x, batch, keys: x @ w),
        "head": layer(lambda w, x, batch, keys: (x @ w).sum(1)),
        "depth": 2,
    }

    def use():
        task = px.stack(**given | change)
        task.loss(task.init(jax.random.key(0)), models.data(4), None)

    with pytest.raises(px.errors.TaskError, match=match):
        use()


HEARD = []


def hear(name, value):
    jax.debug.callback(lambda v: HEARD.append((name, round(float(v), 3))), value.sum())


def answer(value):
    HEARD.append(("answered", float(value)))
    return np.float32(2)


def heard(task, plan, optimizer=None):
    """Return what the callbacks of one step were given, and the program."""
    batch = models.data(8)
    program = px.compile(task, optimizer or optax.sgd(0.0), plan, batch)
    HEARD.clear()
    jax.block_until_ready(program.step(program.init(0), batch))
    jax.effects_barrier()
    return sorted(HEARD), program


def square(key):
    return jnp.eye(5)


def heard_embed(params, batch, keys):
    hear("embed", batch["x"])
    return batch["x"] @ params


def heard_block(params, x, batch, keys):
    hear("block", x)
    return x @ params


def heard_head(params, x, batch, keys):
    losses = jnp.tanh(x @ params).sum(1)
    hear("losses", losses)
    return losses


def heard_loss(params, batch, keys):
    shape = jax.ShapeDtypeStruct((), jnp.float32)
    answered = io_callback(answer, shape, jax.lax.stop_gradient(jnp.sum(params["a"])))
    x = heard_block(params["a"], heard_embed(params["a"], batch, keys), batch, keys)
    x = px.pipeline.stage_boundary(x * answered)
    hear("rows", batch["x"])
    hear("parameters", params["b"])
    hear("constant", jnp.ones(()))
    return heard_head(params["b"], x * answered, batch, keys)


EFFECTS = {
    "stack": px.stack(
        embed=(square, heard_embed), block=(square, heard_block), head=(square, heard_head), depth=2
    ),
    "marked": px.Task(init=lambda key: {"a": square(key), "b": square(key)}, loss=heard_loss),
}


@pytest.mark.parametrize(
    ("name", "count", "schedule"),
    [
        ("stack", 4, "zb-h1"),
        ("marked", 7, "1f1b"),
        pytest.param("stack", 4, "1f1b", marks=pytest.mark.slow),
        pytest.param("marked", 7, "zb-h1", marks=pytest.mark.slow),
    ],
)
def test_what_a_stage_prints_is_printed_once(name, count, schedule):
    """Once per microbatch, as on one device: not in the backward pass, not by each stage."""
    expected, _ = heard(EFFECTS[name], px.Plan(microbatches=4))
    plan = px.Plan(pipeline=2, microbatches=4, schedule=schedule)
    found, program = heard(EFFECTS[name], plan)
    assert len(found) == 4 * count
    assert found == expected
    # To print a parameter moves it to no other device.
    notes = {one.path: one.note for one in program.shardings}
    assert notes.get("b", "on device 1 of the pipeline") == "on device 1 of the pipeline"


def test_what_an_optimizer_prints():
    """The device of a stage prints that stage's tensors; each device prints what all have."""

    def update(grads, count, params=None):
        hear("count", count)
        hear("leaf", grads["second"])
        hear("norm", optax.tree.norm(grads))
        return grads, count + 1

    optimizer = optax.GradientTransformation(lambda params: jnp.zeros((), jnp.int32), update)
    (count, leaf, norm), _ = heard(marked(1), px.Plan(), optimizer)
    found, _ = heard(marked(1), px.Plan(pipeline=2), optimizer)
    assert found == [count, count, leaf, norm, norm]


def test_more_elements_than_an_index_counts_are_in_several_buffers():
    """Nothing is allocated: shapes are followed."""
    leaves = [jax.ShapeDtypeStruct(shape, "float32") for shape in [(2**30,)] * 3 + [(2**31, 2)]]
    found = packing.Packing([*leaves, jax.ShapeDtypeStruct((3,), "int32")])
    assert found.lengths == {
        "float32": 2**30, "float32/1": 2**30, "float32/2": 2**30, "float32/3": 2**32, "int32": 3,
    }  # fmt: skip
    flat, rows = (jax.eval_shape(lambda r=r: packing.zeros(found.shapes, r)) for r in (None, 2))
    for read, write, buffers, at in (
        (found.read, found.write, flat, ()),
        (found.read_row, found.write_row, rows, (1,)),
    ):
        written = jax.eval_shape(write, buffers, *at, found.leaves)
        assert jax.eval_shape(read, written, *at) == found.leaves


def test_tensors_apart_keep_their_shapes():
    leaves = [jnp.arange(6.0).reshape(2, 3), jnp.int32(3), jax.random.key(1), jnp.ones((0, 2))]
    found = packing.Packing(leaves, apart=True)
    assert found.shapes == {
        "float32": (2, 3), "int32": (), "uint32": (2,), "float32/1": (0, 2),
    }  # fmt: skip
    written = found.write(packing.zeros(found.shapes), leaves)
    rows = found.write_row(packing.zeros(found.shapes, 3), 1, leaves)
    for read in (found.read(written), found.read_row(rows, 1)):
        assert jax.random.key_data(read[2]).tolist() == jax.random.key_data(leaves[2]).tolist()
        assert models.same_bits(read[:2], leaves[:2])


@pytest.mark.ci
def test_a_pipeline_with_several_buffers_computes_the_same(monkeypatch):
    task, batch = models.perceptron_stack(depth=3), models.data(8)

    def trained():
        program = px.compile(task, models.optimizer(), px.Plan(pipeline=2, microbatches=2), batch)
        state, _ = program.step(program.init(seed=0), batch)
        whole = program.to_canonical(state)
        return jax.device_get((whole.params, whole.opt_state)), state.opt_state.stage_buffers

    wanted, buffers = trained()
    monkeypatch.setattr(packing, "MAX_OFFSET", 1)
    got, several = trained()
    assert models.max_rel_error(got, wanted) == 0
    assert set(several) > set(buffers)
