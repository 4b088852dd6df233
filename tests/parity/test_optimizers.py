"""Every optimizer of optax under every kind of plan: the same as a step written by hand."""

import dataclasses
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests import models, optimizers

import plurax as px

# A few of each kind: the elementwise, those that flatten, branch on a number or take maxima, those
# that need whole tensors, wrappers. The others in the table's test.
FEW = [
    ("adamw, masked decay", "zero=3"),
    ("partition", "zero=2"),
    ("adafactor, factored", "zero=3"),
    ("sm3", "zero=3"),
    ("contrib.mechanize", "zero=1"),
    ("contrib.prodigy", "zero=3"),
    ("contrib.sam", "data=2"),
    ("contrib.sam", "tensor=2"),
    ("add_noise", "zero=3"),
    ("apply_if_finite", "pipeline=2"),
    ("sm3", "pipeline=2"),
]


@pytest.mark.filterwarnings("ignore::plurax.errors.ShardingWarning")
@pytest.mark.parametrize(("name", "column"), FEW)
def test_optimizers_beside_a_step_by_hand(x64, name, column):
    got, _ = optimizers.planned(name, optimizers.PLANS[column])
    assert optimizers.same(got, optimizers.by_hand(name))


def test_a_loop_over_a_matrix_gathers_it_once(x64):
    """Muon's five turns of Newton and Schulz; the vectors are not gathered at all."""
    assert optimizers.cell("contrib.muon", "zero=1") == "gathers 1.0 P"


@pytest.mark.filterwarnings("ignore::plurax.errors.ShardingWarning")
@pytest.mark.parametrize(
    ("name", "plan", "rounds"),
    [
        ("lamb", optimizers.PLANS["zero=3"], 2),
        ("apply_if_finite", optimizers.PLANS["zero=3"], 1),
        ("lamb", dataclasses.replace(optimizers.PLANS["tensor=2"], data=2, zero=1), 2),
    ],
)
def test_norms_of_all_parameters_share_reductions(x64, name, plan, rounds):
    """LAMB takes two norms of each update, the second of what depends on the first."""
    got, program = optimizers.planned(name, plan)
    assert optimizers.same(got, optimizers.by_hand(name))
    _, plain = optimizers.planned("sgd", plan)
    new = sums(program) - sums(plain)
    # Norms of shards over `data`, over `tensor` and over both.
    assert [*new.values()] == [rounds] * len(new)
    assert len(new) == (1 if plan.tensor == 1 else 3)


def whitened():
    """Multiplies gradients by sums of their products, as preconditioners are made of."""

    def init(params):
        return {k: jnp.zeros((p.shape[1],) * 2) for k, p in params.items() if p.ndim == 2}

    def update(grads, state, params=None):
        state = {k: old + grads[k].T @ grads[k] for k, old in state.items()}
        return {k: -g @ state[k] if k in state else -0.1 * g for k, g in grads.items()}, state

    return optax.GradientTransformation(init, update)


@pytest.mark.filterwarnings("ignore::plurax.errors.ShardingWarning")
@pytest.mark.parametrize("zero", [1, 3])
def test_matrices_that_are_no_parameters_are_in_shards(x64, monkeypatch, zero):
    monkeypatch.setitem(optimizers.OPTIMIZERS, "whitened", whitened)
    got, program = optimizers.planned("whitened", px.Plan(data=2, zero=zero))
    assert optimizers.same(got, optimizers.by_hand("whitened"))
    state = program.init(params=jax.tree.map(jnp.asarray, optimizers.start())).opt_state
    shards = {name: leaf.addressable_shards[0].data.shape for name, leaf in state.items()}
    assert shards == {"first": (8, 4), "second": (6, 3), "out": (7, 7)}  # 2 does not divide 7


def sums(program):
    """How often numbers are added up, by the axes."""
    planned = program.planned_collectives()
    return Counter(one.axes for one in planned if one.kind == "all-reduce")


def test_the_table_names_every_optimizer():
    lines = optimizers.documented().splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:]] == [
        name.replace("contrib.", "`contrib.` ", 1) if name.startswith("contrib.") else name
        for name in optimizers.OPTIMIZERS
    ]
    assert lines[0].count("|") - 2 == len(optimizers.PLANS)


@pytest.mark.slow
@pytest.mark.parametrize("name", optimizers.OPTIMIZERS)
def test_the_table_in_the_docs_is_true(x64, name):
    """Parity with a step by hand under all plans, and what each update gathers."""
    assert optimizers.row(name) in optimizers.documented()


def test_what_the_update_gathers_is_said():
    """With its operation and bytes; the state stays in shards."""

    def update(grads, state, params=None):
        return jax.tree.map(lambda g: -g @ g.T @ g if g.ndim == 2 else -g, grads), state

    optimizer = optax.GradientTransformation(lambda params: (), update)
    plan = px.Plan(data=2, zero=1)
    with pytest.warns(
        px.errors.ShardingWarning, match=r"gathers them.*\n  dot_general: [\d,]+ bytes"
    ):
        px.compile(models.mlp_task(), optimizer, plan, models.data(8))


def curved(grads, state, params=None, *, curvature):
    return jax.tree.map(jnp.multiply, grads, curvature), state


CURVED = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), curved)
WANTING = {
    "another argument": (CURVED, r"missing 1 required keyword-only argument: 'curvature'"),
    "another argument, in a chain": (
        optax.chain(optax.clip(1.0), CURVED), r"missing 1 required keyword-only argument: 'curv"),
    "line search": (optax.lbfgs(), r"needs arguments that plurax does not pass "
                    r"\(missing 2 required keyword-only arguments: 'grad' and 'value_fn'"),
    "opaque sam": (
        optax.contrib.sam(optax.adam(1e-2), optax.sgd(0.05), opaque_mode=True, reset_state=False),
        r"grad_fn must be provided.*opaque_mode=False",
    ),
    "sophia": (optax.contrib.sophia(1e-2), "obj_fn must be provided.*Hessian"),
    "gradients of examples": (
        optax.contrib.differentially_private_aggregate(1.0, 1.0, key=0),
        r"takes the gradient of each example.*Clip in the loss: .*optax.add_noise"),
    "two sets of parameters": (
        optax.lookahead(optax.sgd(0.1), 5, 0.5), "optax.lookahead takes parameters as pairs.*Ema"),
    "a state of another form": (
        optax.chain(optax.monitor({"norm": lambda updates, **_: optax.tree.norm(updates)})),
        r"at '0/measurements/norm' there is \(\), and was no array.*init has to return"),
}  # fmt: skip


@pytest.mark.parametrize("plan", [px.Plan(), px.Plan(data=2, zero=1)])
@pytest.mark.parametrize("name", WANTING)
def test_an_optimizer_that_cannot_run_says_so(name, plan):
    optimizer, message = WANTING[name]
    with pytest.raises(px.errors.TaskError, match=message):
        px.compile(models.mlp_task(), optimizer, plan, models.data(8))


def halving(begin):
    """Counts from a Python number on, and halves a rate that is one."""

    def update(grads, state, params=None):
        new = {"count": state["count"] + 1, "rate": 0.5 * state["rate"]}
        return jax.tree.map(lambda g: -state["rate"] * g, grads), {**state, **new}

    return optax.GradientTransformation(lambda params: begin, update)


@pytest.mark.parametrize("members", [None, px.Members(2)], ids=["alone", "members"])
@pytest.mark.parametrize("begins", ["init", "params"])
def test_a_state_may_begin_with_numbers(members, begins):
    batch = models.data(8)
    plan = px.Plan() if members else px.Plan(data=2, zero=1)
    begin = {"count": 0, "rate": 0.25, "row": np.zeros(2, np.float32)}
    program = px.compile(models.mlp_task(), halving(begin), plan, batch, members=members)
    state = program.init()
    if begins == "params" and not members:
        state = program.init(params=program.to_canonical(state).params)
    for _ in range(2):
        state, _ = program.step(state, batch)
    assert jnp.all(state.opt_state["count"] == 2)
    assert jnp.all(state.opt_state["rate"] == 0.0625)
    assert state.opt_state["count"].dtype == jnp.int32


def test_a_state_that_is_no_array_says_so():
    message = r"a str at 'opt_state/mode'.*arrays and numbers alone.*close over it"
    with pytest.raises(px.errors.TaskError, match=message):
        px.compile(
            models.mlp_task(), halving({"count": 0, "rate": 1.0, "mode": "fast"}), px.Plan(),
            models.data(8),
        )  # fmt: skip


def test_a_chain_around_one_that_takes_no_value():
    """optax's chain takes every argument, and would hand it on."""
    optimizer = optax.chain(
        optax.clip_by_global_norm(0.5), optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.05))
    )
    program = px.compile(models.mlp_task(), optimizer, px.Plan(), models.data(8))
    _, metrics = program.step(program.init(), models.data(8))
    assert jnp.isfinite(metrics["loss"])
