"""Frozen parameters: under every plan the steps are those by hand that know nothing of them."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests import models

import plurax as px
from plurax import tree
from plurax.freezing import trained

ROWS = models.data(32, dtype=np.float64)
SIZES = (16, 11)


def rule():
    return optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2, eps=1e-4))


TASKS = {
    "mlp": (lambda: models.mlp_task(dtype=np.float64), ("hidden",)),
    "stack": (lambda: models.perceptron_stack(np.float64, depth=5), ("embed",)),
    "layers": (lambda: models.perceptron_stack(np.float64, depth=5), ("blocks/*",)),
    "head": (lambda: models.transformer_stack(np.float64, depth=3), ("embed/*", "*/out")),
    "marked": (lambda: models.marked_task(np.float64), ("scale", "layer[026]/*", "layer3/b")),
}
"""A network, and patterns of what is frozen in it."""

PLANS = {
    "one device": {},
    "data": {"data": 4, "microbatches": 2},
    "zero 1": {"data": 4, "zero": 1},
    "zero 2": {"data": 2, "zero": 2, "microbatches": 2},
    "zero 3": {"data": 4, "zero": 3},
    "tensor": {"data": 2, "tensor": 2, "shardings": {"*hidden": (..., "tensor")}},
    "1f1b": {"pipeline": 2, "microbatches": 4},
    "zb-h1": {"data": 2, "pipeline": 2, "microbatches": 4, "schedule": "zb-h1", "zero": 1},
    "zero 2 in stages": {"data": 2, "pipeline": 2, "microbatches": 2, "zero": 2},
    "members": {"member": 2, "chunk": 1, "batch_dim": "major"},
    "members, minor": {"member": 2, "batch_dim": "minor", "remat": "full"},
    "members and zero": {"member": 2, "data": 2, "zero": 2, "chunk": 1, "batch_dim": "major"},
}
PAIRS = [
    ("mlp", "one device"), ("mlp", "data"), ("mlp", "zero 1"), ("mlp", "zero 2"),
    ("mlp", "zero 3"), ("mlp", "tensor"), ("mlp", "members"), ("mlp", "members, minor"),
    ("mlp", "members and zero"),
    ("stack", "1f1b"), ("layers", "zb-h1"), ("head", "1f1b"), ("marked", "zero 2 in stages"),
]  # fmt: skip
"""Each network and each plan; stages of the first and the last frozen, of all layers, of some."""

MORE_PAIRS = [
    ("stack", "zb-h1"), ("layers", "1f1b"), ("layers", "zero 2 in stages"), ("marked", "1f1b"),
    ("marked", "zb-h1"),
]  # fmt: skip


def rows(name, count):
    if name == "head":
        return models.text(count)
    return models.cut(ROWS, count)


def by_hand(task, name, seed):
    """Steps that close over what is frozen and give the optimizer the rest, by path."""
    key, run_key = jax.random.split(jax.random.key(seed))
    params = task.init(key)
    patterns = TASKS[name][1]
    leaves = tree.named_leaves(params)
    regular = [re.compile(one.replace("*", ".*")) for one in patterns]
    own = {k: v for k, v in leaves.items() if not any(one.fullmatch(k) for one in regular)}
    assert 0 < len(own) < len(leaves)
    structure = jax.tree.structure(params)
    optimizer = rule()
    state = optimizer.init(own)

    def whole(own):
        return jax.tree.unflatten(structure, [own.get(k, v) for k, v in leaves.items()])

    for step, size in enumerate(SIZES):
        batch = rows(name, size)
        keys = jax.vmap(jax.random.fold_in, (None, 0))(
            jax.random.fold_in(run_key, step), jnp.arange(size)
        )

        def mean(own, batch=batch, keys=keys):
            out = task.loss(whole(own), batch, keys)
            losses = out[0] if isinstance(out, tuple) else out
            weight = jnp.ones(losses.shape) if task.weight is None else task.weight(batch)
            return jnp.sum(weight * losses) / jnp.sum(weight)

        @jax.jit
        def stepped(own, state, mean=mean):
            updates, state = optimizer.update(jax.grad(mean)(own), state, own)
            return optax.apply_updates(own, updates), state

        own, state = stepped(own, state)
    return whole(own), jax.tree.leaves(state)


def compiled(name, planned):
    make, patterns = TASKS[name]
    members = px.Members(2) if "members" in planned else None
    plan = px.Plan(**PLANS[planned])
    task = px.freeze(make(), *patterns)
    return px.compile(task, rule(), plan, rows(name, SIZES[0]), members=members)


@pytest.mark.parametrize(
    ("name", "planned"),
    [*PAIRS, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in MORE_PAIRS)],
)
def test_as_by_hand(x64, name, planned):
    program = compiled(name, planned)
    seeds = range(2) if program.members else [3]
    state = program.init() if program.members else program.init(seed=3)
    for size in SIZES:
        state, metrics = program.step(state, rows(name, size))
    state = jax.device_get(program.to_canonical(state))
    assert np.all(metrics["skipped"] == 0)
    for seed in seeds:
        params, opt_state = by_hand(TASKS[name][0](), name, seed)
        got = (state.params, jax.tree.leaves(state.opt_state))
        if program.members:
            got = jax.tree.map(lambda leaf, seed=seed: leaf[seed], got)
        assert models.max_rel_error(got, (params, opt_state)) < 1e-10


def test_frozen_parameters_keep_their_bits(x64):
    program = compiled("mlp", "zero 1")
    state = program.init(seed=3)
    before = jax.device_get(state.params["hidden"])
    state, _ = program.step(state, rows("mlp", 16))
    np.testing.assert_array_equal(before, state.params["hidden"])


def sums(program):
    """Bytes of the sums over devices in the compiled step."""
    kinds = ("all-reduce", "reduce-scatter")
    return sum(one.bytes for one in program.collectives() if one.kind in kinds)


@pytest.mark.parametrize(("name", "planned"), [("mlp", "data"), ("mlp", "zero 1")])
def test_nothing_is_reduced_or_stored(name, planned):
    """Bytes of sums and of optimizer state are those of the parameters that are trained."""
    make, plan = lambda: models.mlp_task(), px.Plan(**PLANS[planned])
    batch = models.data(16)
    whole = px.compile(make(), rule(), plan, batch)
    some = px.compile(px.freeze(make(), "hidden"), rule(), plan, batch)
    frozen = 4 * models.FEATURES * models.HIDDEN
    shards = plan.data if planned == "zero 1" else 1
    assert sums(whole) - sums(some) in (frozen, frozen // shards)
    held = [tree.byte_count(one.canonical_shapes.opt_state) for one in (whole, some)]
    assert held[0] - held[1] == 2 * frozen


@pytest.mark.ci
@pytest.mark.parametrize("name", ["stack", "layers", "marked"])
def test_stages_sum_no_gradient_of_frozen_parameters(name):
    task = {
        "stack": models.perceptron_stack, "layers": models.perceptron_stack,
        "marked": models.marked_task,
    }[name]()  # fmt: skip
    plan = px.Plan(data=2, pipeline=2, microbatches=2)
    program = px.compile(px.freeze(task, *TASKS[name][1]), rule(), plan, models.data(8))
    gradients = program.gradients(program.init(seed=0), models.data(8))
    whole = px.compile(task, rule(), plan, models.data(8))
    full = whole.gradients(whole.init(seed=0), models.data(8))
    assert tree.byte_count(gradients.grads) < tree.byte_count(full.grads)
    np.testing.assert_allclose(gradients.loss, full.loss, rtol=1e-5)


def test_patterns_add_up_and_are_checked():
    task = px.freeze(px.freeze(models.mlp_task(), "hid*"), "bias")
    assert task.frozen == ("hid*", "bias")
    batch = models.data(8)
    params = jax.eval_shape(models.init, jax.random.key(0))
    assert list(tree.named_leaves(trained(task.frozen, params))) == ["out"]
    for patterns, said in (
        (("hidde",), "frozen='hidde' matches no parameter; their paths are bias, hidden, out"),
        (("*",), "the patterns '*' freeze every parameter, and none is left to train"),
    ):
        with pytest.raises(px.errors.TaskError, match=re.escape(said)):
            px.compile(px.freeze(models.mlp_task(), *patterns), rule(), px.Plan(), batch)
    with pytest.raises(px.errors.PlanError, match="cannot leave out frozen ones"):
        px.fit(task, rule(), batch, batch_size=4, servers=px.Servers(), progress=False)


@pytest.mark.ci
def test_from_given_parameters_and_resumed(tmp_path):
    """`init(params=...)`, `fit` and a resumed run have the same optimizer state."""
    task = px.freeze(models.mlp_task(), "hidden")
    program = px.compile(task, rule(), px.Plan(data=2), models.data(8))
    params = models.init(jax.random.key(7))
    state = program.init(params=params)
    assert "hidden" not in str(jax.tree.leaves_with_path(state.opt_state))
    options = {"batch_size": 8, "progress": False, "plan": px.Plan(data=2)}
    whole = px.fit(task, rule(), models.data(24), epochs=2, **options)
    px.fit(task, rule(), models.data(24), epochs=1, output=tmp_path, **options)
    again = px.fit(task, rule(), models.data(24), epochs=2, output=tmp_path, resume=True, **options)
    assert models.same_bits(whole.state.params, again.state.params)


@pytest.mark.ci
def test_search_and_verify_take_frozen_parameters():
    task = px.freeze(models.mlp_task(), "hidden")
    assert px.verify(task, rule(), px.Plan(data=2, zero=1), models.data(8)).ok
    found = px.search(task, rule(), models.data(8), px.Machine.preset("2xA100-80GB"))
    assert found.best.devices <= 2


def test_a_task_is_frozen_in_a_function_of_hyperparameters(x64):
    """As are tasks of one network."""
    task = models.mlp_task(dtype=np.float64)

    def make(hyper):
        return px.freeze(task, "hidden")

    members = px.Members(2, {"rate": [0.1, 0.2]})
    program = px.compile(
        make, lambda hyper: optax.sgd(hyper["rate"]), px.Plan(), rows("mlp", 16), members=members
    )
    state = program.init()
    before = np.asarray(state.params["hidden"])
    state, _ = program.step(state, rows("mlp", 16))
    np.testing.assert_array_equal(before, state.params["hidden"])
    assert dataclasses.is_dataclass(state)
