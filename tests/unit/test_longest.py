"""The longest sequences that fit: the answer fits by its estimate, and the next length does not."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests import models
from tests.draws import draws

import plurax as px
from plurax.planner.longest import MOST

WIDTH, WINDOW = 16, 4
SGD = optax.sgd(0.1)
MACHINE = px.Machine("two", {"float32": 1e11}, 1e9, 1e10, [px.analysis.Level("node", 2, 1e9)])


def vectors(tokens, rows=2, **more):
    return {"x": jax.ShapeDtypeStruct((rows, tokens, WIDTH), "float32"), **more}


def layer(scores_of):
    """A task of one layer, which mixes the tokens of `x` by `scores_of(params, x, batch)`."""

    def init(key):
        return {"in": jax.random.normal(key, (WIDTH, WIDTH)), "table": jnp.ones((64, WIDTH))}

    def loss(params, batch, keys):
        mixed = scores_of(params, batch["x"] @ params["in"], batch)
        return jnp.mean(mixed**2, tuple(range(1, mixed.ndim)))

    return px.Task(init=init, loss=loss)


def attention(params, x, batch):
    return jax.nn.softmax(jnp.einsum("btd,bsd->bts", x, x)) @ x


def masked(params, x, batch):
    scores = jnp.where(batch["mask"], jnp.einsum("btd,bsd->bts", x, x), -1e30)
    return jax.nn.softmax(scores) @ x


def buckets(params, x, batch):
    """Distances between positions, the far ones in one bucket."""
    place = jnp.arange(x.shape[1])
    far = jnp.minimum(jnp.abs(place[:, None] - place[None]), 31)
    bias = params["table"][far].sum(2)
    return jax.nn.softmax(jnp.einsum("btd,bsd->bts", x, x) + bias[None]) @ x


def recurrent(params, x, batch):
    def step(carry, x_BD):
        carry = jnp.tanh(carry @ params["in"] + x_BD)
        return carry, carry

    return jax.lax.scan(step, jnp.zeros_like(x[:, 0]), x.swapaxes(0, 1))[1].swapaxes(0, 1)


def convolution(params, x, batch):
    windows = [x[:, i : x.shape[1] - WINDOW + i] for i in range(WINDOW)]
    return sum(windows)


def shifted(params, x, batch):
    return jnp.cumsum(x, 1) - batch["next"][:, 1:].astype(x.dtype)[..., None]


def on_tokens(params, x, batch):
    """An image beside the sequence, whose dims stay."""
    return jnp.cumsum(x, 1) + batch["image"].mean((1, 2))[:, None]


MASK = jax.ShapeDtypeStruct((2, 64, 64), "bool")
IMAGE = jax.ShapeDtypeStruct((2, 1, 64, WIDTH), "float32")
CASES = {
    "attention": (attention, {}),
    "buckets of distances": (buckets, {}),
    "recurrent": (recurrent, {}),
    "convolution": (convolution, {}),
    "mask": (masked, {"mask": MASK}),
    "one mask for all heads": (
        lambda params, x, batch: masked(params, x, {"mask": batch["mask"][:, 0]}),
        {"mask": jax.ShapeDtypeStruct((2, 1, 64, 64), "bool")},
    ),
    "one more": (shifted, {"next": jax.ShapeDtypeStruct((2, 65), "int32")}),
    "numbers of examples": (attention, {"label": jax.ShapeDtypeStruct((2,), "int32")}),
    "image": (on_tokens, {"image": IMAGE}),
}


@pytest.mark.parametrize("name", CASES)
def test_the_answer_fits_and_the_next_length_does_not(name):
    scores_of, more = CASES[name]
    task, plan, memory = layer(scores_of), px.Plan(data=2), 400_000
    found = px.longest(task, SGD, vectors(64, **more), MACHINE, plan=plan, memory=memory)
    after = next(one for one in found.tried if one.length > found.length)
    assert found.length < after.length <= found.length * 9 // 8
    for length, fits in ((found.length, True), (after.length, False)):
        batch = {
            key: jax.ShapeDtypeStruct(
                tuple(s + length - 64 if s >= 64 and key != "image" else s for s in leaf.shape),
                leaf.dtype,
            )
            for key, leaf in vectors(64, **more).items()
        }
        estimate = px.estimate(task, SGD, plan, batch, MACHINE)
        assert (estimate.peak + estimate.margin <= memory) == fits
        if fits:
            assert found.estimate == estimate
    assert (int(found), found.plan, found.found) == (found.length, plan, None)


def test_dims_of_equal_size_stay_where_the_loss_wants_it():
    """`(B, T, D)` with T = D: only T grows."""
    batch = {"x": jax.ShapeDtypeStruct((2, WIDTH, WIDTH), "float32")}
    found = px.longest(layer(attention), SGD, batch, MACHINE, plan=px.Plan(), memory="1MB")
    like = px.estimate(layer(attention), SGD, px.Plan(), vectors(found.length), MACHINE)
    assert found.estimate == like


@pytest.mark.ci
def test_a_search_takes_blocks_of_keys_for_longer_sequences():
    task = models.attention_task(64, 4)
    batch = {"x": jax.ShapeDtypeStruct((1, 1024, 64), "float32")}
    pinned = {"data": 1, "tensor": 1, "pipeline": 1, "context": 1, "remat": "full"}
    seen = []
    found = px.longest(
        task, SGD, batch, MACHINE, pinned=pinned, memory="100MB", progress=seen.append
    )
    assert found.plan.stream == 512
    assert found.estimate.peak <= 100e6
    assert sorted(seen, key=lambda one: one.length) == [*found.tried]
    whole = px.longest(task, SGD, batch, MACHINE, pinned=pinned | {"stream": None}, memory="100MB")
    assert whole.length < found.length
    after = next(one for one in found.tried if one.length > found.length)
    assert after.why.startswith("no plan fits in 100,000,000 bytes per device. The nearest:\n")
    assert "stream=512" in after.why
    longer = {"x": jax.ShapeDtypeStruct((1, after.length, 64), "float32")}
    with pytest.raises(px.errors.PlanError, match="no plan fits in 100,000,000 bytes"):
        px.search(task, SGD, longer, MACHINE, pinned=pinned, memory="100MB")
    again = px.search(task, SGD, {"x": jax.ShapeDtypeStruct((1, found.length, 64), "float32")},
                      MACHINE, pinned=pinned, memory="100MB")  # fmt: skip
    assert (again.best, again.estimate) == (found.plan, found.estimate)


def test_a_length_that_the_plan_of_another_fits_is_searched_at_the_end():
    pinned = {"data": 1, "tensor": 1, "pipeline": 1, "remat": "none"}
    batch = vectors(64, rows=1)
    found = px.longest(layer(convolution), SGD, batch, MACHINE, pinned=pinned, memory=400_000)
    assert len(found.tried) > 4
    assert found.found.estimate == found.estimate
    assert found.found.best == found.plan


@pytest.mark.ci
@draws(6)
@given(st.lists(st.integers(40_000, 4_000_000), min_size=2, max_size=3, unique=True))
def test_more_memory_is_never_shorter(budgets):
    lengths = []
    for memory in sorted(budgets):
        try:
            found = px.longest(
                layer(attention), SGD, vectors(64), MACHINE, plan=px.Plan(), memory=memory
            )
        except px.errors.PlanError:
            assert not lengths
            continue
        assert found.estimate.peak <= memory
        lengths.append(found.length)
    assert lengths == sorted(lengths)


def test_sequences_that_do_not_fit_get_shorter():
    shorter = px.longest(
        layer(attention), SGD, vectors(4096), MACHINE, plan=px.Plan(), memory=400_000
    )
    longer = px.longest(layer(attention), SGD, vectors(64), MACHINE, plan=px.Plan(), memory=400_000)
    assert shorter.length == longer.length < 4096
    assert len(shorter.tried) < 10


def table(params, x, batch):
    return x + params["table"][None, : x.shape[1]]


def positions(params, x, batch):
    return x + params["table"][jnp.arange(x.shape[1])][None]


def taken(params, x, batch):
    return x + jnp.take(params["table"], jnp.arange(x.shape[1]), axis=0)[None]


def constant(params, x, batch):
    return x * jnp.tril(jnp.ones((64, 64)))[None, :, :WIDTH]


@pytest.mark.parametrize("scores_of", [table, constant])
def test_a_loss_for_one_length_is_named_with_its_line(scores_of):
    line = scores_of.__code__.co_firstlineno + 1
    with pytest.raises(px.errors.TaskError) as caught:
        px.longest(layer(scores_of), SGD, vectors(64), MACHINE, plan=px.Plan())
    assert str(caught.value) == (
        f"the loss is written for sequences of 64, and fails for 128 at {__file__}:{line}: "
        "TypeError: add got incompatible shapes for broadcasting: (2, 128, 16), (1, 64, 16).\n"
        "Let it take the length from the shapes of the batch, not from a constant, and positions "
        "from a formula, such as rotary ones. Where parameters depend on the length, give task and "
        "batch as functions of it: "
        "plurax.longest(lambda length: make_task(length), optimizer, make_batch)."
    ).replace("add got", "add got" if scores_of is table else "mul got")


@pytest.mark.parametrize("scores_of", [positions, taken])
def test_a_table_that_is_read_beyond_its_end_is_named_with_its_line(scores_of):
    """JAX raises nothing there."""
    line = scores_of.__code__.co_firstlineno + 1
    said = f"sequences of 32, and fails for 128 at {__file__}:{line}.*: an array is read beyond its"
    with pytest.raises(px.errors.TaskError, match=said):
        px.longest(layer(scores_of), SGD, vectors(32), MACHINE, plan=px.Plan())


def test_task_and_batch_may_be_functions_of_the_length():
    """A table of positions as long as the sequences, and as many tokens in every batch."""

    def task_of(length):
        task = layer(table)
        return dataclasses.replace(
            task,
            init=lambda key: {"in": jnp.ones((WIDTH, WIDTH)), "table": jnp.ones((length, WIDTH))},
        )

    def batch_of(length):
        return vectors(length, rows=max(1, 4096 // length))

    found = px.longest(task_of, SGD, batch_of, MACHINE, plan=px.Plan(), memory="4MB")
    assert found.estimate.batch_size == max(1, 4096 // found.length)
    like = px.estimate(task_of(found.length), SGD, px.Plan(), batch_of(found.length), MACHINE)
    assert found.estimate == like


def test_a_loss_that_reads_the_start_alone_is_asked_about():
    task = px.Task(
        init=lambda key: jnp.ones(()), loss=lambda params, batch, keys: params * batch["x"][:, 0]
    )
    batch = {"x": jax.ShapeDtypeStruct((2, 64), "float32")}
    found = px.longest(task, SGD, batch, MACHINE, plan=px.Plan())
    assert found.length == MOST
    assert str(found).endswith(
        "\nlonger ones were not tried: does the loss read all of a sequence?"
    )


@pytest.mark.parametrize(
    ("arguments", "kind", "said"),
    [
        (
            {"batch": vectors(64, label=jax.ShapeDtypeStruct((2, 3), "int32"))},
            px.errors.BatchError,
            r"do not share one: label \[2, 3\], x \[2, 64, 16\]. Give the batch as",
        ),
        ({"batch": {"x": jnp.ones(3)}}, px.errors.BatchError, r"do not share one: x \[3\]"),
        (
            {"memory": 5_000},
            px.errors.PlanError,
            "no length fits, not even 8: a device needs 14.5",
        ),
        ({"pinned": {"tensor": 1}}, px.errors.ArgumentError, "with plan= no plan is searched"),
        (
            {"plan": None, "pinned": {"dta": 2}},
            px.errors.PlanError,
            r"^pinned: 'dta' is not a field of a plan. Did you mean 'data'\?",
        ),
        ({"task": lambda length: None}, px.errors.TaskError, "NoneType"),
        ({"machine": 3}, px.errors.MachineError, "3"),
    ],
)
def test_mistakes(arguments, kind, said):
    usual = {"task": layer(attention), "optimizer": SGD, "batch": vectors(64), "machine": MACHINE}
    with pytest.raises(kind, match=said):
        px.longest(**{**usual, "plan": px.Plan(), **arguments})


def test_its_text_has_a_row_for_each_length():
    found = px.longest(layer(attention), SGD, vectors(64), MACHINE, plan=px.Plan(), memory=400_000)
    lines = str(found).splitlines()
    assert lines[0] == f"the longest sequences for two, 2 in a step: {found.length}"
    assert lines[1].split() == ["length", "a", "step", "memory", "plan"]
    assert [int(line.split()[0]) for line in lines[2:-1]] == [one.length for one in found.tried]
    assert lines[-1].startswith("found in ")
    assert re.search("does not fit +a device needs ", lines[-2])
    own = next(line for line in lines if line.split()[0] == str(found.length))
    assert repr(found) == f"Longest({found.length}: {own.strip().split('  ')[1].strip()} a step)"


def test_lengths_that_are_tried_warn_of_nothing():
    """A warning would be an error here. Who compiles the plan is warned."""

    def whitened(grads, state, params=None):
        return jax.tree.map(lambda g: -g @ g.T @ g, grads), state

    args = layer(attention), optax.GradientTransformation(lambda params: (), whitened)
    plan = px.Plan(data=2, zero=1)
    assert px.longest(*args, vectors(8), MACHINE, plan=plan, memory="1MB").plan == plan
    with pytest.warns(px.errors.ShardingWarning, match="update needs whole tensors"):
        px.compile(*args, plan, vectors(8))
