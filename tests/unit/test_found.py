"""What a search found as a user reads it: in 100 columns, in the terms of the model."""

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
from tests.planning import BytesSent

import plurax as px
from plurax.machine_fields import Level
from plurax.planner.found import Ranked
from plurax.planner.tensor_search import TensorSearch
from plurax.strategies import Strategies
from plurax.trace.clock import Seconds
from plurax.tree import named_leaves

SLOW = px.Machine("slow products", {"float32": 1e9}, 1e9, 1e12, [Level("node", 4, 1e12)])
STACK, TEXT = models.transformer_stack(depth=3), models.text(8)
PINNED = {"tensor": 2, "data": 1, "pipeline": 1, "remat": "none", "microbatches": 1}


def searched(**pinned):
    """The result of a search for the stack, of few plans."""
    return px.search(STACK, optax.sgd(0.1), TEXT, SLOW, pinned=pinned, count=2, evaluations=2)


@pytest.fixture(scope="module")
def found():
    return searched(**PINNED)


def words(text):
    return "".join(text.split())


COUNTS = st.integers(1, 2**40)
SECONDS = st.floats(0, 1e12)
PLANS = st.builds(
    px.Plan,
    data=COUNTS,
    microbatches=COUNTS,
    pipeline=st.just(40),
    layers=st.lists(st.integers(1, 10**6), min_size=40, max_size=40),
    tensor=COUNTS,
) | st.builds(px.Plan, data=COUNTS)
TEXTS = st.text(st.characters(codec="ascii", exclude_categories=["Cc"]), min_size=1, max_size=300)


@pytest.mark.ci
@draws(40)
@given(
    plans=st.lists(PLANS, min_size=1, max_size=3),
    parts=st.lists(SECONDS, min_size=5, max_size=5),
    axes=st.lists(st.sampled_from(["data", "tensor", "data+tensor", "pipeline"]), unique=True),
    memory=st.floats(1, 1e30),
    whys=st.lists(TEXTS, max_size=3),
    name=TEXTS,
)
def test_no_line_has_more_than_100_columns(found, plans, parts, axes, memory, whys, name):
    *parts, sent = parts
    spent = Seconds(*parts[:2], dict.fromkeys(axes, sent), *parts[2:])
    estimate = dataclasses.replace(found.estimate, gradient=spent)
    ranked = [Ranked(plan, plan, estimate, memory) for plan in plans]
    refused = [Ranked(plans[0], plans[0], None, memory, f"a{why}") for why in [*whys, "memory"]]
    machine = dataclasses.replace(found.machine, name=f"m{name}")
    drawn = dataclasses.replace(
        found, machine=machine, ranked=(*ranked,), refused=(*refused,), candidates=10**9
    )
    lines = str(drawn).splitlines()
    assert max(map(len, lines)) <= 100, max(lines, key=len)
    # Nothing is lost, and what a step is spent on is not broken within a part.
    for rank, plan, seconds, bytes_, spent_on in drawn.rows():
        assert words(plan) in words(str(drawn))
        assert any(line.startswith(rank) and seconds in line and bytes_ in line for line in lines)
        assert all(any(part in line for line in lines) for part in spent_on.split(", "))
    for why in whys:
        assert words(f"a{why}") in words(str(drawn))


@pytest.mark.ci
def test_what_is_printed_for_models(found):
    alone = searched(tensor=1, remat="none")
    every = [found, searched(pipeline=2, tensor=1, microbatches=2), alone]
    for one in every:
        lines = str(one).splitlines()
        assert max(map(len, lines)) <= 100
        assert lines[1].split() == ["a", "step", "memory", "plan"]
        assert lines[2].split()[0] == "1"
        assert lines[3].startswith("      "), "what the seconds are spent on"


@pytest.mark.ci
def test_a_parameter_is_explained_by_its_path_and_the_lines_that_read_it(found):
    lines = found.explain("blocks/out").splitlines()
    assert lines[0] == "blocks/out (3, 24, 12) under tensor=2"
    assert re.fullmatch(r"  is (dim \d over tensor|replicated), .* on each of 2 devices", lines[1])
    assert re.fullmatch(
        r"  is read at models\.py:\d+ \(transformer_stack\.<locals>\.block\)", lines[2]
    )
    assert lines[3].startswith("  otherwise a step (")
    assert 1 <= len(lines[4:]) <= 3
    for path in found.shardings.sharded(found.best).shardings:
        text = found.explain(path)
        assert max(map(len, text.splitlines())) <= 100
        assert "scan" not in text
        assert "row" not in text.removeprefix(path)


@pytest.mark.ci
def test_what_is_not_split_is_compared_with_plans_that_split():
    found = searched(data=1, pipeline=1, remat="none", microbatches=1)
    every = (*found.ranked, *found.slower)
    ranked = [next(one for one in every if (one.plan.tensor > 1) == split) for split in (0, 1)]
    alone = dataclasses.replace(found, ranked=tuple(ranked), slower=())
    lines = alone.explain("blocks/out").splitlines()
    assert lines[:2] == [
        "blocks/out (3, 24, 12) under one device",
        "  is not split over `tensor`, of which there is one device",
    ]
    assert lines[2].startswith("  with several a step takes ")
    assert lines[2].endswith(f": {ranked[1].plan.sizes_text()}")
    only = dataclasses.replace(alone, ranked=alone.ranked[:1], slower=())
    assert only.explain("blocks/out").splitlines() == lines[:2]


def test_an_unknown_parameter_is_told_which_there_are(found):
    paths = named_leaves(jax.eval_shape(STACK.init, jax.random.key(0)))
    with pytest.raises(px.errors.PlanError) as it:
        found.explain("nope")
    assert all(path in str(it.value) for path in paths)
    with pytest.raises(px.errors.PlanError, match="Did you mean 'blocks/hidden'") as it:
        found.explain("blocks/hiden")
    assert "The parameters are blocks/hidden, " in str(it.value), "the nearest first"


# --- Pins that contradict -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pinned", "said"),
    [
        ({"tensor": 3}, r"Plan\(tensor=3\): .*the 4 devices.* tensor can be 1, 2, 4\."),
        ({"data": 4, "tensor": 2}, r"Plan\(data=4, tensor=2\): .*data can be 1, 2, or tensor can "
                                   r"be 1\."),
        ({"data": 3, "zero": 0}, r"Plan\(data=3\): .*the 4 devices, .* data can be 1, 2, 4\."),
        ({"pipeline": 4}, r"Plan\(pipeline=4\): .*at most 3, .* pipeline can be 1, 2\."),
        ({"pipeline": 2, "stages": 6}, r"Plan\(stages=6\): .* leave stages out\."),
        ({"pipeline": 2, "layers": (3, 2)}, r"adds up to 5 layers, and the stack has 3 layers"),
    ],
    ids=str,
)  # fmt: skip
def test_what_no_plan_has_is_named_with_what_it_can_be(pinned, said):
    with pytest.raises(px.errors.PlanError, match=said) as it:
        searched(**pinned)
    assert str(it.value).count("adds up to") <= 1, "one reason, once"


@pytest.fixture(scope="module")
def strategies():
    plan = px.Plan(tensor=2)
    task = dataclasses.replace(STACK)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), TEXT)
    return TensorSearch(task, like, lambda plan: BytesSent()).plan(plan).strategies


def pinned_to(strategies, *equations):
    return searched(**PINNED, strategies=Strategies(strategies.traced, equations))


def test_what_a_loop_reads_is_called_as_the_model_calls_it(strategies):
    of_loops = [one for one in strategies.equations if "/row" in one.path]
    names = {one.where for one in of_loops}
    assert {f"each row of blocks/{name}" for name in ("qkv", "hidden", "out")} <= names
    assert any("models.py:" in name for name in names), "what the backward pass reads"
    assert str(next(one for one in of_loops if one.where == "each row of blocks/out")).startswith(
        "each row of blocks/out: "
    )


def test_a_strategy_that_cannot_be_says_from_what_it_can(strategies):
    row = next(one for one in strategies.equations if one.where == "each row of blocks/out")
    wrong = dataclasses.replace(row, inputs=(("data", "tensor"),))
    with pytest.raises(px.errors.PlanError) as it:
        pinned_to(strategies, wrong)
    text = str(it.value)
    assert f"the plan pins {row.path!r}, each row of blocks/out, to the inputs " in text
    assert '[["data", "tensor"]], from which it cannot be computed' in text
    assert text.index('[["replicated", "tensor"]]') < text.index('[["tensor", "replicated"]]')


def test_strategies_that_contradict_each_other_are_the_ones_named():
    """Of all that are pinned: a sum cannot be partial again where it was reduced."""

    def loss(params, batch, keys):
        return jnp.sum((batch["x"] @ params["w"]) @ params["v"], axis=1)

    weights = {"w": jnp.zeros((16, 16)), "v": jnp.zeros((16, 16))}
    task = px.Task(init=lambda key: weights, loss=loss)
    batch = {"x": jax.ShapeDtypeStruct((32, 16), jnp.float32)}
    plan = px.Plan(tensor=2, remat="none")
    every = TensorSearch(task, batch, lambda plan: BytesSent()).plan(plan).strategies
    first, second = [one for one in every.equations if one.operator == "dot_general"][:2]
    whole = dataclasses.replace(first, inputs=((None, None), (None, None)))
    reduced = next(one for one in every.equations if one.operator == "reduce_sum")
    partial = dataclasses.replace(reduced, inputs=((None, None, "partial:tensor"),))
    second = dataclasses.replace(second, inputs=((None, None), (None, None)))
    pins = Strategies(every.traced, (whole, second, partial))
    with pytest.raises(px.errors.PlanError) as it:
        px.search(task, optax.sgd(0.1), batch, SLOW, pinned={**PINNED, "strategies": pins})
    text = str(it.value)
    assert "2 of the pinned strategies contradict each other: a sum that is not partial" in text
    assert repr(second.equation) in text
    assert repr(reduced.equation) in text
    assert repr(whole.equation) not in text
    assert f"reduce_sum at test_found.py:{loss.__code__.co_firstlineno + 1} (" in text
