"""A model of each library trains under any plan, unchanged, and comes back."""

import functools
import importlib
import re
import subprocess
import sys
from types import SimpleNamespace

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from tests.models import CLASSES, FEATURES, cut, max_rel_error, same_bits
from tests.promotion import allowed

import plurax as px
from plurax.adapters import equinox as equinox_adapter
from plurax.adapters import haiku as haiku_adapter
from plurax.adapters import linen as linen_adapter
from plurax.adapters import nnx as nnx_adapter
from plurax.validate import place_of

LIBRARIES = ("nnx", "linen", "equinox", "haiku")
WIDTH = 16


def make_data(count, seed=0):
    """Classes that a linear map of the features decides: something to learn."""
    x = np.random.default_rng(seed).normal(size=(count, FEATURES)).astype(np.float32)
    directions = np.random.default_rng(7).normal(size=(FEATURES, CLASSES))
    return {"x": x, "y": np.argmax(x @ directions, axis=1).astype(np.int32)}


ROWS = make_data(13)
entropy = optax.softmax_cross_entropy_with_integer_labels


def right(logits, y):
    return {"right": px.metrics.accuracy(logits.argmax(1), y)}


# --- One MLP with dropout in each library -----------------------------------------------------


class NnxMlp(nnx.Module):
    """Its dropout draws from streams of its own."""

    def __init__(self, rngs):
        self.layers = nnx.List(
            [nnx.Linear(FEATURES, WIDTH, rngs=rngs), nnx.Linear(WIDTH, CLASSES, rngs=rngs)]
        )
        self.dropout = nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x):
        return self.layers[1](self.dropout(nnx.tanh(self.layers[0](x))))


def nnx_example_loss(model, example, key):
    nnx.reseed(model, default=key)
    return entropy(model(example["x"]), example["y"])


def nnx_mlp():
    task = nnx_adapter.task(
        NnxMlp,
        px.per_example(nnx_example_loss),
        predict=lambda model, inputs: model(inputs["x"]),
        evaluate=lambda model, batch: entropy(model(batch["x"]), batch["y"]),
        metrics=lambda model, batch: right(model(batch["x"]), batch["y"]),
    )
    return task, lambda state: nnx_adapter.model(NnxMlp, state)


class LinenMlp(nn.Module):
    @nn.compact
    def __call__(self, x, *, train):
        x = nn.tanh(nn.Dense(WIDTH)(x))
        x = nn.Dropout(0.2)(x, deterministic=not train)
        return nn.Dense(CLASSES)(x)


def linen_mlp():
    module = LinenMlp()

    def example_loss(apply, example, key):
        return entropy(apply(example["x"], train=True, rngs={"dropout": key}), example["y"])

    task = linen_adapter.task(
        module,
        lambda key: module.init(key, jnp.ones((1, FEATURES)), train=False),
        px.per_example(example_loss),
        predict=lambda apply, inputs: apply(inputs["x"], train=False),
        evaluate=lambda apply, batch: entropy(apply(batch["x"], train=False), batch["y"]),
        metrics=lambda apply, batch: right(apply(batch["x"], train=False), batch["y"]),
    )
    return task, lambda state: functools.partial(
        module.apply, linen_adapter.variables(state), train=False
    )


class EquinoxMlp(eqx.Module):
    first: eqx.nn.Linear
    second: eqx.nn.Linear
    dropout: eqx.nn.Dropout

    def __init__(self, key):
        one, two = jax.random.split(key)
        self.first = eqx.nn.Linear(FEATURES, WIDTH, key=one)
        self.second = eqx.nn.Linear(WIDTH, CLASSES, key=two)
        self.dropout = eqx.nn.Dropout(0.2)

    def __call__(self, x, key=None):
        return self.second(self.dropout(jnp.tanh(self.first(x)), key=key))


def equinox_mlp():
    task = equinox_adapter.task(
        EquinoxMlp,
        px.per_example(lambda model, one, key: entropy(model(one["x"], key), one["y"])),
        predict=lambda model, inputs: jax.vmap(model)(inputs["x"]),
        evaluate=lambda model, batch: entropy(jax.vmap(model)(batch["x"]), batch["y"]),
        metrics=lambda model, batch: right(jax.vmap(model)(batch["x"]), batch["y"]),
    )
    return task, lambda state: jax.vmap(equinox_adapter.model(EquinoxMlp, state))


def haiku_mlp():
    def network(x, is_training):
        x = jnp.tanh(hk.Linear(WIDTH)(x))
        x = hk.dropout(hk.next_rng_key(), 0.2, x) if is_training else x
        return hk.Linear(CLASSES)(x)

    transformed = hk.transform(allowed(network))

    def example_loss(apply, example, key):
        return entropy(apply(key, example["x"], is_training=True), example["y"])

    task = haiku_adapter.task(
        transformed,
        lambda key: transformed.init(key, jnp.ones((1, FEATURES)), is_training=True),
        px.per_example(example_loss),
        predict=lambda apply, inputs: apply(None, inputs["x"], is_training=False),
        evaluate=lambda apply, batch: entropy(
            apply(None, batch["x"], is_training=False), batch["y"]
        ),
        metrics=lambda apply, batch: right(apply(None, batch["x"], is_training=False), batch["y"]),
    )
    return (
        task,
        lambda state: (
            lambda x: transformed.apply(*haiku_adapter.variables(state), None, x, is_training=False)
        ),
    )


MLPS = {"nnx": nnx_mlp, "linen": linen_mlp, "equinox": equinox_mlp, "haiku": haiku_mlp}


OPTIMIZER = optax.sgd(0.3, momentum=0.9)


def train(task, plan, sizes=(13, 13, 6)):
    """The state after a step on each of these many rows."""
    program = px.compile(task, OPTIMIZER, plan, ROWS)
    state = program.init(seed=0)
    for size in sizes:
        state, metrics = program.step(state, cut(ROWS, size))
        assert int(metrics["skipped"]) == 0
    return program, state


@pytest.mark.parametrize("library", LIBRARIES)
def test_trains_evaluates_is_saved_and_comes_back(library, tmp_path):
    task, get_model = MLPS[library]()
    held_out = make_data(50, seed=1)
    plan = px.Plan(data=2, microbatches=2)
    result = px.fit(
        task,
        optax.adam(0.02),
        make_data(120),
        plan=plan,
        epochs=25,
        batch_size=32,  # the last batch of an epoch has 24
        evaluation=held_out,
        progress=False,
    )
    assert result.history[0]["loss"] > 0.7
    assert result.history[-1]["loss"] < 0.3
    assert result.history[-1]["eval_loss"] < 0.3
    outputs = result.program.predict(result.state, held_out)
    again = get_model(result.state)(held_out["x"])
    np.testing.assert_allclose(outputs, again, rtol=1e-5, atol=1e-5)
    loss = entropy(again, held_out["y"]).mean()
    np.testing.assert_allclose(result.history[-1]["eval_loss"], loss, rtol=1e-5)
    share = np.mean(np.asarray(again).argmax(1) == held_out["y"])
    assert result.history[-1]["eval_right"] == pytest.approx(share)
    with px.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(result.state, {})
        restored, _ = checkpoints.restore(result.program.state_shapes)
    assert jax.tree.structure(restored) == jax.tree.structure(result.state)
    assert same_bits(restored.params, result.state.params)


@pytest.mark.ci
@pytest.mark.parametrize("library", LIBRARIES)
def test_dropout_and_ragged_batches_give_the_parameters_of_one_device(library):
    task, _ = MLPS[library]()
    _, alone = train(task, px.Plan())
    _, spread = train(task, px.Plan(data=2, microbatches=2))
    assert max_rel_error(spread.params, alone.params) < 1e-5


@pytest.mark.parametrize("library", LIBRARIES)
def test_dropout_depends_on_the_examples_key_and_nothing_else(library):
    task, _ = MLPS[library]()
    params = jax.jit(task.init)(jax.random.key(0))
    keys = jax.random.split(jax.random.key(1), 13)
    loss = jax.jit(task.loss)
    losses = loss(params, ROWS, keys)
    backwards = jax.tree.map(lambda leaf: leaf[::-1], ROWS)
    np.testing.assert_allclose(loss(params, backwards, keys[::-1])[::-1], losses, rtol=1e-6)
    other = loss(params, ROWS, jax.random.split(jax.random.key(2), 13))
    assert np.mean(np.asarray(other) == np.asarray(losses)) < 0.5


# --- Batch norm -------------------------------------------------------------------------------


class NnxNormed(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(FEATURES, WIDTH, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, momentum=0.8, rngs=rngs)
        self.out = nnx.Linear(WIDTH, CLASSES, rngs=rngs)

    def __call__(self, x, mask=None):
        real = None if mask is None else mask[:, None]
        return self.out(nnx.relu(self.norm(self.hidden(x), mask=real)))


def nnx_normed():
    def loss(model, batch, keys, mask):
        logits = model(batch["x"], mask)
        return entropy(logits, batch["y"]), {"top": logits.max(-1)}

    task = nnx_adapter.task(
        NnxNormed,
        loss,
        predict=lambda model, inputs: model(inputs["x"]),
        evaluate=lambda model, batch: (
            entropy(model(batch["x"]), batch["y"]),
            {"top": model(batch["x"]).max(-1)},
        ),
        coupled=True,
    )

    def by_hand(params, stats, batch):
        """The losses of some examples, and the statistics after them; nothing is filled up."""
        model = NnxNormed(nnx.Rngs(0))
        nnx.update(model, params, stats)
        losses = entropy(model(batch["x"]), batch["y"])
        return losses, nnx.to_pure_dict(nnx.state(model, nnx.BatchStat))

    return task, by_hand, lambda state: nnx_adapter.model(NnxNormed, state)


class LinenNormed(nn.Module):
    @nn.compact
    def __call__(self, x, *, train, mask=None):
        real = None if mask is None else mask[:, None]
        x = nn.Dense(WIDTH, use_bias=False)(x)
        x = nn.BatchNorm(use_running_average=not train, momentum=0.8)(x, mask=real)
        return nn.Dense(CLASSES)(nn.relu(x))


def linen_normed():
    module = LinenNormed()

    def loss(apply, batch, keys, mask):
        logits, updates = apply(batch["x"], train=True, mask=mask, mutable=["batch_stats"])
        return entropy(logits, batch["y"]), {}, updates

    task = linen_adapter.task(
        module,
        lambda key: module.init(key, jnp.ones((1, FEATURES)), train=True),
        loss,
        predict=lambda apply, inputs: apply(inputs["x"], train=False),
        evaluate=lambda apply, batch: (
            entropy(apply(batch["x"], train=False), batch["y"]),
            {"top": apply(batch["x"], train=False).max(-1)},
        ),
        coupled=True,
    )

    def by_hand(params, stats, batch):
        variables = {"params": params, **stats}
        logits, updates = module.apply(variables, batch["x"], train=True, mutable=["batch_stats"])
        return entropy(logits, batch["y"]), updates

    return (
        task,
        by_hand,
        lambda state: functools.partial(module.apply, linen_adapter.variables(state), train=False),
    )


def haiku_normed():
    def network(x, is_training):
        x = hk.Linear(WIDTH, with_bias=False)(x)
        x = hk.BatchNorm(True, True, decay_rate=0.8)(x, is_training)
        return hk.Linear(CLASSES)(jax.nn.relu(x))

    transformed = hk.transform_with_state(allowed(network))

    def loss(apply, batch, keys, mask):
        logits, state = apply(None, batch["x"], is_training=True)
        return entropy(logits, batch["y"]), {}, state

    def evaluate(apply, batch):
        logits, _ = apply(None, batch["x"], is_training=False)
        return entropy(logits, batch["y"]), {"top": logits.max(-1)}

    task = haiku_adapter.task(
        transformed,
        lambda key: transformed.init(key, jnp.ones((1, FEATURES)), is_training=True),
        loss,
        predict=lambda apply, inputs: apply(None, inputs["x"], is_training=False)[0],
        evaluate=evaluate,
        coupled=True,
    )

    def by_hand(params, stats, batch):
        logits, stats = transformed.apply(params, stats, None, batch["x"], is_training=True)
        return entropy(logits, batch["y"]), stats

    def get_model(state):
        trained = haiku_adapter.variables(state)
        return lambda x: transformed.apply(*trained, None, x, is_training=False)[0]

    return task, by_hand, get_model


NORMED = {"nnx": nnx_normed, "linen": linen_normed}


def train_by_hand(task, by_hand, sizes, microbatches, rows=ROWS):
    """The same training in plain JAX: microbatch `m` is every `microbatches`-th example from m."""
    init_key, _ = jax.random.split(jax.random.key(0))
    params, stats = jax.jit(task.init)(init_key)
    moments = OPTIMIZER.init(params)

    def total(params, stats, batch):
        losses, stats = by_hand(params, stats, batch)
        return losses.sum(), stats

    @jax.jit
    def step(params, moments, stats, batch):
        grads = jax.tree.map(jnp.zeros_like, params)
        for m in range(microbatches):
            part = jax.tree.map(lambda leaf, m=m: leaf[m::microbatches], batch)
            part_grads, stats = jax.grad(total, has_aux=True)(params, stats, part)
            grads = jax.tree.map(jnp.add, grads, part_grads)
        grads = jax.tree.map(lambda g: g / len(batch["y"]), grads)
        updates, moments = OPTIMIZER.update(grads, moments, params)
        return optax.apply_updates(params, updates), moments, stats

    for size in sizes:
        params, moments, stats = step(params, moments, stats, cut(rows, size))
    return params, stats


@pytest.mark.ci
@pytest.mark.parametrize("library", NORMED)
def test_batch_norm_is_exact_on_any_number_of_devices(library):
    task, by_hand, get_model = NORMED[library]()
    sizes = (13, 9, 13)  # 13 rows are filled up to 14, 16 and 18
    expected = train_by_hand(task, by_hand, sizes, microbatches=2)
    for axes in ({}, {"data": 2, "zero": 3}, {"data": 3, "zero": 1, "remat": "full"}):
        program, state = train(task, px.Plan(microbatches=2, **axes), sizes)
        state = program.to_canonical(state)
        assert max_rel_error((state.params, state.model_state), expected) < 1e-5
    outputs = program.predict(state, ROWS)
    again = get_model(state)(ROWS["x"])
    np.testing.assert_allclose(outputs, again, rtol=1e-5, atol=1e-5)
    means = program.evaluate(state, ROWS)
    np.testing.assert_allclose(means["top"], again.max(-1).mean(), rtol=1e-5)


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore::plurax.errors.MaskWarning")
def test_haiku_batch_norm_has_no_mask_and_no_padding(x64):
    """A smaller batch runs in a program of its own size, and a full one has to divide."""
    task, by_hand, get_model = haiku_normed()
    rows = {"x": ROWS["x"][:12].astype(np.float64), "y": ROWS["y"][:12]}
    expected = train_by_hand(task, by_hand, (12, 9), microbatches=2, rows=rows)
    for axes in ({"data": 2}, {"data": 3, "zero": 3}):
        program = px.compile(task, OPTIMIZER, px.Plan(microbatches=2, **axes), rows)
        state = program.init(seed=0)
        for size in (12, 9):
            state, _ = program.step(state, cut(rows, size))
        state = program.to_canonical(state)
        assert max_rel_error((state.params, state.model_state), expected) < 1e-10
    again = get_model(state)(rows["x"])
    np.testing.assert_allclose(program.predict(state, rows), again, rtol=1e-10)
    means = program.evaluate(state, rows)
    np.testing.assert_allclose(means["top"], again.max(-1).mean(), rtol=1e-10)


# --- What is not a parameter ------------------------------------------------------------------


def test_nnx_streams_are_no_state_and_come_back_seeded():
    task, get_model = nnx_mlp()
    assert not task.stateful
    params = task.init(jax.random.key(3))
    assert sorted(params) == ["layers"]
    model = get_model(SimpleNamespace(params=params, model_state=()))
    evaluated = model(ROWS["x"])
    np.testing.assert_array_equal(evaluated, model(ROWS["x"]))
    model.train()
    assert not np.array_equal(model(ROWS["x"]), evaluated)


def test_nnx_constants_stay_and_tied_weights_are_one():
    class Tied(nnx.Module):
        def __init__(self, rngs):
            self.square = nnx.Linear(FEATURES, FEATURES, use_bias=False, rngs=rngs)
            self.same = self.square
            self.offset = jnp.arange(FEATURES, dtype=jnp.float32)

        def __call__(self, x):
            return self.same(self.square(x) + self.offset)

    def example_loss(model, example, key):
        return model(example["x"]).sum()

    task = nnx_adapter.task(Tied, px.per_example(example_loss))
    params = jax.jit(task.init)(jax.random.key(0))
    (kernel,) = jax.tree.leaves(params)
    keys = jax.random.split(jax.random.key(0), 13)

    def by_hand(kernel):
        return ((ROWS["x"] @ kernel + np.arange(FEATURES, dtype=np.float32)[None]) @ kernel).sum()

    grads = jax.jit(jax.grad(lambda params: task.loss(params, ROWS, keys).sum()))(params)
    (grad,) = jax.tree.leaves(grads)
    assert max_rel_error(grad, jax.jit(jax.grad(by_hand))(kernel)) < 1e-5


def test_nnx_layers_can_be_frozen_in_the_loss():
    def loss(model, batch, keys, mask):
        model.norm.eval()
        return entropy(model(batch["x"], mask), batch["y"])

    _, state = train(nnx_adapter.task(NnxNormed, loss, coupled=True), px.Plan(), sizes=(13,))
    np.testing.assert_array_equal(state.model_state["norm"]["mean"], np.zeros(WIDTH))


def test_equinox_constants_are_those_of_the_first_key_for_every_seed():
    class Shuffled(eqx.Module):
        linear: eqx.nn.Linear
        order: jax.Array
        activation: object

        def __init__(self, key):
            self.linear = eqx.nn.Linear(FEATURES, "scalar", key=key)
            self.order = jax.random.permutation(key, FEATURES)
            self.activation = lambda x: x  # another one in every build

        def __call__(self, x):
            return self.activation(self.linear(x[self.order]))

    task = equinox_adapter.task(
        Shuffled,
        lambda model, batch, keys: jax.vmap(model)(batch["x"]) ** 2,
        predict=lambda model, inputs: jax.vmap(model)(inputs["x"]),
    )
    program, state = train(task, px.Plan(data=2))
    assert program.state_shapes.params.order is None
    model = equinox_adapter.model(Shuffled, state)
    np.testing.assert_array_equal(model.order, Shuffled(jax.random.key(0)).order)
    np.testing.assert_allclose(
        program.predict(state, ROWS), jax.vmap(model)(ROWS["x"]), rtol=1e-5, atol=1e-5
    )


class Masked(eqx.Module):
    """A model as flowjax makes them: a function that closes over an array of `__init__`."""

    linear: eqx.nn.Linear
    rest: object

    def __init__(self, key, close, order):
        self.linear = eqx.nn.Linear(FEATURES, CLASSES, key=key)
        self.rest = close(order)

    def __call__(self, x):
        return self.linear(self.rest(x))


class Shuffle:
    def __init__(self, order):
        self.order = order

    def __call__(self, x):
        return x[self.order]


CLOSURES = {
    "function": lambda order: lambda x: x[order],
    "default": lambda order: lambda x, order=order: x[order],
    "nested": lambda order: {"f": lambda x: x[order]}["f"].__call__,
    "partial": lambda order: functools.partial(lambda order, x: x[order], order),
    "object": Shuffle,
    "method": lambda order: Shuffle(order).__call__,
}


@pytest.mark.ci
@pytest.mark.parametrize("close", CLOSURES.values(), ids=CLOSURES)
def test_equinox_functions_may_close_over_arrays(close):
    def make(order):
        return equinox_adapter.task(
            lambda key: Masked(key, close, order()),
            lambda model, batch, keys: entropy(jax.vmap(model)(batch["x"]), batch["y"]),
            predict=lambda model, inputs: jax.vmap(model)(inputs["x"]),
        )

    def inside():
        return jnp.flip(jnp.arange(FEATURES))

    kept = np.arange(FEATURES)[::-1].copy()  # an array that no trace makes
    _, expected = train(make(lambda: kept), px.Plan())
    for plan in px.Plan(), px.Plan(data=2), px.Plan(data=2, microbatches=2, zero=3):
        program, state = train(make(inside), plan)
        got = program.to_canonical(state)
        for one, other in zip(*map(jax.tree.leaves, (got.params, expected.params)), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
        model = equinox_adapter.model(lambda key: Masked(key, close, inside()), got)
        predicted = program.predict(state, ROWS)
        np.testing.assert_allclose(jax.vmap(model)(ROWS["x"]), predicted, rtol=1e-5, atol=1e-5)


def annotated_nnx(axis, wrap=nnx.with_partitioning):
    start = wrap(nnx.initializers.lecun_normal(), (None, axis))
    return nnx_adapter.task(
        lambda rngs: nnx.Linear(FEATURES, CLASSES, kernel_init=start, rngs=rngs),
        lambda model, batch, keys: entropy(model(batch["x"]), batch["y"]),
    )


def annotated_linen(axis, wrap=nn.with_partitioning):
    """`nn.DenseGeneral` reads the annotation before its kernel has the dims that it is for."""
    start = wrap(nn.initializers.lecun_normal(), (None, axis, None))
    module = nn.DenseGeneral((CLASSES, 2), kernel_init=start)
    return linen_adapter.task(
        module,
        lambda key: module.init(key, jnp.ones((1, FEATURES))),
        lambda apply, batch, keys: entropy(apply(batch["x"])[..., 0], batch["y"]),
        predict=lambda apply, inputs: apply(inputs["x"]),
    )


def annotated_logical(axis):
    return annotated_linen(axis, nn.with_logical_partitioning)


@pytest.mark.parametrize("axis", ["model", "data"])
@pytest.mark.parametrize("make", [annotated_nnx, annotated_linen, annotated_logical])
def test_sharding_annotations_for_some_other_mesh_do_no_harm(make, axis):
    _, state = train(make(axis), px.Plan(data=2), sizes=(13,))
    assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(state.params))


@pytest.mark.ci
def test_annotations_of_a_plans_own_axes_leave_plans_as_they_are():
    """Such as those of nanodo, whose `with_partitioning` names `data`."""
    plain = annotated_linen("data", lambda start, names: start)
    _, expected = train(plain, px.Plan(), sizes=(13, 6))
    splits = {"kernel": (None, None, "tensor")}
    for plan in px.Plan(data=2, zero=3), px.Plan(data=2, tensor=2, shardings=splits):
        program, state = train(annotated_linen("data"), plan, sizes=(13, 6))
        program.predict(state, ROWS)
        got = program.to_canonical(state).params
        jax.tree.map(
            lambda *one: np.testing.assert_allclose(*one, 1e-5, 1e-6), got, expected.params
        )


# --- Errors -----------------------------------------------------------------------------------


def test_state_needs_coupled():
    message = (
        r"the model carries state besides its parameters \({}norm/mean, {}norm/var\), and a loss "
        r"that writes state makes examples depend on each other\. Say task\(\.\.\., coupled=True\)"
    )
    with pytest.raises(px.errors.TaskError, match=message.format("", "")):
        nnx_adapter.task(NnxNormed, lambda model, batch, keys: None)
    module = LinenNormed()
    message = message.replace("norm/", "batch_stats/BatchNorm_0/")
    with pytest.raises(px.errors.TaskError, match=message.format("", "")):
        linen_adapter.task(
            module,
            lambda key: module.init(key, jnp.ones((1, FEATURES)), train=True),
            lambda apply, batch, keys: None,
        )
    transformed = hk.transform_with_state(allowed(lambda x: hk.BatchNorm(True, True, 0.8)(x, True)))
    message = message.split(" and a loss")[0].partition(r"\(")[0] + r"\(batch_norm/~/mean_ema/"
    with pytest.raises(px.errors.TaskError, match=message.format("", "")):
        haiku_adapter.task(
            transformed,
            lambda key: transformed.init(key, jnp.ones((1, FEATURES))),
            lambda apply, batch, keys: None,
        )


@pytest.mark.parametrize("lift", [True, False])
def test_nnx_dropout_from_its_own_streams_is_refused(lift):
    def loss(model, batch, key):
        return entropy(model(batch["x"]), batch["y"])

    task = nnx_adapter.task(NnxMlp, px.per_example(loss) if lift else loss)
    with pytest.raises(
        px.errors.TaskError,
        match=r"draws from its own random stream 'default'.*say nnx\.reseed\(model, default=key\)",
    ):
        px.compile(task, optax.sgd(0.1), px.Plan(data=2), ROWS)


@pytest.mark.parametrize("library", LIBRARIES)
def test_messages_show_the_users_own_function(library):
    task, _ = MLPS[library]()
    for function in (task.loss, task.predict, task.evaluate):
        assert re.search(r"test_adapters\.py:\d+", place_of(function))
    averaged = nnx_adapter.task(NnxMlp, lambda model, batch, keys: batch["x"].mean())
    with pytest.raises(
        px.errors.TaskError, match=r"^Task\.loss \(\S*test_adapters\.py:\d+\) returned"
    ):
        px.compile(averaged, OPTIMIZER, px.Plan(), ROWS)


def test_linen_state_needs_updates():
    module = LinenNormed()
    task = linen_adapter.task(
        module,
        lambda key: module.init(key, jnp.ones((1, FEATURES)), train=True),
        lambda apply, batch, keys, mask: apply(batch["x"], train=False)[:, 0],
        coupled=True,
    )
    message = (
        r"the loss of a module with state \(batch_stats\) returned something else.*expected "
        r"\(losses, metrics, updates\), where apply\(\.\.\., mutable=\[\.\.\.\]\) gave the updates"
    )
    with pytest.raises(px.errors.TaskError, match=message):
        px.compile(task, optax.sgd(0.1), px.Plan(), ROWS)


def haiku_linear(loss, **options):
    """A task of one linear layer whose state, if it has any, counts calls."""

    def network(x):
        if options.get("state"):
            count = hk.get_state("count", (), init=jnp.zeros)
            hk.set_state("count", count + 1)
        if options.get("draws"):
            x = hk.dropout(hk.next_rng_key(), 0.5, x)
        return hk.Linear(CLASSES)(x)

    make = hk.transform_with_state if "state" in options else hk.transform
    transformed = make(allowed(network))
    return haiku_adapter.task(
        transformed,
        lambda key: transformed.init(key, jnp.ones((1, FEATURES))),
        loss,
        coupled=bool(options.get("state")),
    )


def test_haiku_state_that_is_empty_needs_nothing():
    def loss(apply, batch, keys):
        logits, state = apply(None, batch["x"])
        assert not jax.tree.leaves(state)
        return entropy(logits, batch["y"])

    task = haiku_linear(loss, state=False)
    assert not task.stateful
    _, state = train(task, px.Plan(data=2))
    assert len(haiku_adapter.variables(state)) == 1


def test_haiku_wants_one_key_where_the_model_draws():
    def none(apply, batch, keys):
        return entropy(apply(None, batch["x"]), batch["y"])

    def all_of_them(apply, batch, keys):
        return entropy(apply(keys, batch["x"]), batch["y"])

    def old(apply, batch, keys):
        return entropy(apply(jax.random.PRNGKey(0), batch["x"]), batch["y"])

    for loss, message in (
        (
            none,
            r"draws random numbers, and apply\(key, \.\.\.\) got None.*plurax\.per_example\(f\)",
        ),
        (
            all_of_them,
            r"the Haiku model got keys of shape \(13,\), and takes one\..*plurax\.per_example\(f\)",
        ),
    ):
        with pytest.raises(px.errors.TaskError, match=message):
            px.compile(haiku_linear(loss, draws=True), OPTIMIZER, px.Plan(), ROWS)
    train(haiku_linear(old, draws=True), px.Plan(), sizes=(13,))


def test_a_mistake_of_the_users_own_in_a_haiku_model_is_shown_as_it_is():
    def loss(apply, batch, keys):
        return entropy(apply(None, batch["x"], "more"), batch["y"])

    with pytest.raises(TypeError, match="takes 1 positional argument"):
        px.compile(haiku_linear(loss), OPTIMIZER, px.Plan(), ROWS)


def test_haiku_state_needs_state():
    task = haiku_linear(
        lambda apply, batch, keys, mask: entropy(apply(None, batch["x"])[0], batch["y"]), state=True
    )
    message = (
        r"the loss of a model with state returned something else.*expected "
        r"\(losses, metrics, state\), where apply\(\.\.\.\) gave the state beside the outputs"
    )
    with pytest.raises(px.errors.TaskError, match=message):
        px.compile(task, OPTIMIZER, px.Plan(), ROWS)


def test_haiku_takes_what_is_transformed():
    with pytest.raises(
        px.errors.TaskError, match=r"got a function; give a pair.*=hk\.transform\(f\)"
    ):
        haiku_adapter.task(lambda x: x, lambda key: {}, lambda apply, batch, keys: None)


def test_equinox_state_comes_with_the_model():
    def build(key):
        return eqx.nn.Sequential([eqx.nn.BatchNorm(FEATURES, "batch", mode="batch")])

    with pytest.raises(px.errors.TaskError, match=r"returned no state.*make_with_state\(Model\)"):
        equinox_adapter.task(build, lambda model, batch, keys: None)
    with pytest.raises(px.errors.TaskError, match=r"state besides.*eqx\.nn\.State.*coupled=True"):
        equinox_adapter.task(eqx.nn.make_with_state(EquinoxNormed), lambda model, batch, keys: None)


class EquinoxNormed(eqx.Module):
    hidden: eqx.nn.SpectralNorm
    norm: eqx.nn.BatchNorm
    out: eqx.nn.Linear

    def __init__(self, key):
        a, b, c = jax.random.split(key, 3)
        linear = eqx.nn.Linear(FEATURES, 8, key=a)
        self.hidden = eqx.nn.SpectralNorm(linear, "weight", key=b)
        self.norm = eqx.nn.BatchNorm(8, "batch", mode="batch")
        self.out = eqx.nn.Linear(8, 3, key=c)

    def __call__(self, x, state):
        x, state = self.hidden(x, state)
        x, state = self.norm(jnp.tanh(x), state)
        return self.out(x), state


@allowed
def over_rows(model, state, x):
    return jax.vmap(model, (0, None), (0, None), axis_name="batch")(x, state)


def equinox_normed(returns=lambda losses, state: (losses, {}, state)):
    def loss(model, state, batch, keys, mask):
        logits, state = over_rows(model, state, batch["x"])
        return returns(entropy(logits, batch["y"]), state)

    return equinox_adapter.task(
        eqx.nn.make_with_state(EquinoxNormed),
        loss,
        predict=lambda model, state, inputs: over_rows(model, state, inputs["x"])[0],
        evaluate=lambda model, state, batch: entropy(
            over_rows(model, state, batch["x"])[0], batch["y"]
        ),
        coupled=True,
    )


@pytest.mark.parametrize(
    "fields", [{"data": 4}, {"data": 2, "zero": 3, "microbatches": 2}], ids=str
)
def test_an_equinox_model_with_state_trains_as_by_hand(fields):
    rows = cut(ROWS, 12)
    program = px.compile(equinox_normed(), OPTIMIZER, px.Plan(**fields), rows)
    state = program.init(seed=0)
    parts = fields.get("microbatches", 1)
    key = jax.random.split(jax.random.key(0))[0]
    model, kept = eqx.nn.make_with_state(EquinoxNormed)(key)
    params, static = eqx.partition(model, eqx.is_inexact_array)
    opt_state = OPTIMIZER.init(params)

    def mean(params, kept):
        total = 0.0
        for part in range(parts):
            mine = jax.tree.map(lambda x, part=part: x[part::parts], rows)
            logits, kept = over_rows(eqx.combine(params, static), kept, mine["x"])
            total = total + entropy(logits, mine["y"]).sum()
        return total / len(rows["x"]), kept

    gradient = eqx.filter_jit(jax.grad(mean, has_aux=True))
    for _ in range(3):
        state, _ = program.step(state, rows)
        grads, kept = gradient(params, kept)
        updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
    got = program.to_canonical(state)
    assert max_rel_error(jax.tree.leaves(got.params), jax.tree.leaves(params)) < 1e-5
    assert max_rel_error(got.model_state, jax.tree.leaves(kept)) < 1e-5

    trained, running = equinox_adapter.model(eqx.nn.make_with_state(EquinoxNormed), got)
    outputs = over_rows(trained, running, rows["x"])[0]
    assert max_rel_error(program.predict(state, {"x": rows["x"]}), outputs) < 1e-5
    assert np.isfinite(program.evaluate(state, rows)["loss"])


def test_a_loss_of_an_equinox_model_with_state_returns_it():
    for returns in (lambda losses, state: losses, lambda losses, state: (losses, {}, {})):
        with pytest.raises(px.errors.TaskError, match=r"expected \(losses, metrics, state\)"):
            px.compile(equinox_normed(returns), OPTIMIZER, px.Plan(), ROWS)


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_missing_library_says_which_extra_brings_it(library, monkeypatch):
    package = {"equinox": "equinox", "haiku": "haiku"}.get(library, "flax")
    name = "dm-haiku" if library == "haiku" else package
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"plurax.adapters.{library}")
    with pytest.raises(ImportError, match=rf"{name} is not installed; .*plurax\[{package}\]"):
        importlib.import_module(f"plurax.adapters.{library}")


def test_plurax_alone_imports_no_library():
    code = (
        "import plurax, sys; "
        "print({'flax', 'equinox', 'haiku', 'keras', 'plurax.adapters'} & set(sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"
