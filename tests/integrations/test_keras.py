"""Keras 3 on JAX: models train under any plan as by a step written by hand, and come back."""

import importlib
import os
import sys
from types import SimpleNamespace

os.environ["KERAS_BACKEND"] = "jax"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest

import plurax as px
from plurax.adapters import keras as adapter
from tests.models import CLASSES, FEATURES, cut, max_rel_error
from tests.promotion import promotion
from tests.test_documents import REPOSITORY, run

# Keras's variables do not know NumPy's `copy=`.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

layers = keras.layers
OPTIMIZER = optax.sgd(0.3, momentum=0.9)
CROSS_ENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
ROUNDED = 1e-6
"""Keras takes the square root in batch norm in float32, whatever its policy."""
entropy = optax.softmax_cross_entropy_with_integer_labels


@pytest.fixture(autouse=True)
def as_users_do():
    with promotion():
        yield


@pytest.fixture
def double(x64):
    keras.config.set_floatx("float64")  # else it rounds NumPy's arrays to float32
    keras.config.set_dtype_policy("float64")
    yield
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")


def rows(count=13, dtype=np.float32):
    x = np.random.default_rng(0).normal(size=(count, FEATURES)).astype(dtype)
    directions = np.random.default_rng(7).normal(size=(FEATURES, CLASSES))
    return x, np.argmax(x @ directions, axis=1).astype(np.int32)


def mlp():
    return keras.Sequential(
        [keras.Input((FEATURES,)), layers.Dense(16, "relu"), layers.Dense(CLASSES)]
    )


def with_dropout():
    inputs = keras.Input((FEATURES,))
    hidden = layers.Dropout(0.2)(layers.Dense(16, "relu")(inputs))
    return keras.Model(inputs, layers.Dense(CLASSES)(hidden))


def normed():
    return keras.Sequential(
        [
            keras.Input((FEATURES,)),
            layers.Dense(16, use_bias=False),
            layers.BatchNormalization(momentum=0.8),
            layers.Dense(CLASSES),
        ]
    )


class Convolution(keras.Model):
    """A subclass with its own `call`, whose weights are there once it was called."""

    def __init__(self):
        super().__init__()
        self.image = layers.Reshape((2, 2, 1))
        self.first = layers.Conv2D(4, 2, padding="same", activation="relu")
        self.norm = layers.BatchNormalization(momentum=0.8)
        self.last = layers.Dense(CLASSES)

    def call(self, x, training=False):
        x = self.norm(self.first(self.image(x[:, :4])), training=training)
        return self.last(x.reshape(x.shape[0], -1))


def convolution():
    model = Convolution()
    model(np.zeros((1, FEATURES)))
    return model


def masked(model, batch, keys, mask):
    x, y = batch
    outputs, state = model(x, training=True, mask=mask)
    return entropy(outputs, y), {}, state


def train(task, plan, data, sizes):
    program = px.compile(task, OPTIMIZER, plan, data)
    state = program.init(seed=0)
    for size in sizes:
        state, metrics = program.step(state, cut(data, size))
        assert int(metrics["skipped"]) == 0
    return program, program.to_canonical(state)


def by_hand(build, task, data, sizes, **options):
    """The same training in plain JAX by Keras's `stateless_call`, on whole batches."""
    init_key, _ = jax.random.split(jax.random.key(0))
    first = jax.jit(task.init)(init_key)
    first, state = first if task.stateful else (first, {})
    model = adapter.model(build, SimpleNamespace(params=first, model_state=state))
    trained = [variable.value for variable in model.trainable_variables]
    others = [variable.value for variable in model.non_trainable_variables]
    moments = OPTIMIZER.init(trained)

    def total(trained, others, x, y):
        more = {name: jnp.ones(len(x), bool) for name in options}
        outputs, others = model.stateless_call(trained, others, x, training=True, **more)
        return entropy(outputs, y).mean(), others

    for size in sizes:
        x, y = cut(data, size)
        grads, others = jax.grad(total, has_aux=True)(trained, others, x, y)
        updates, moments = OPTIMIZER.update(grads, moments, trained)
        trained = optax.apply_updates(trained, updates)
    return trained, others


def values_of(model, state):
    """The values of a trained state in Keras's own order."""
    model = adapter.model(model, state)
    pairs = (model.trainable_variables, model.non_trainable_variables)
    return [[np.asarray(variable.value) for variable in each] for each in pairs]


SPLIT = {"sequential/dense/kernel": (None, "tensor")}
PLANS = [{"data": 2, "microbatches": 3}, {"data": 2, "tensor": 2, "shardings": SPLIT, "zero": 1}]


@pytest.mark.parametrize("axes", PLANS, ids=["data", "tensor"])
def test_a_step_is_that_of_keras(double, axes):
    """With a loss of Keras, in one line, and batches that are padded."""
    data = rows(dtype=np.float64)
    task = adapter.task(mlp, CROSS_ENTROPY)
    sizes = (13, 9, 13)
    expected, _ = by_hand(mlp, task, data, sizes)
    program, state = train(task, px.Plan(**axes), data, sizes)
    assert sorted(state.params["sequential"]) == ["dense", "dense_1"]
    assert max_rel_error(values_of(mlp, state)[0], expected) < 1e-10
    outputs = program.predict(state, data[0])
    assert max_rel_error(outputs, adapter.model(mlp, state)(data[0])) < 1e-10
    loss = entropy(jnp.asarray(outputs), data[1]).mean()
    assert max_rel_error(program.evaluate(state, data)["loss"], loss) < 1e-10


@pytest.mark.parametrize("axes", [{"data": 2}, {"data": 3, "zero": 3}])
def test_batch_norm_is_model_state_and_takes_the_mask(double, axes):
    data = rows(dtype=np.float64)
    task = adapter.task(normed, masked, coupled=True)
    sizes = (13, 9, 13)
    expected = by_hand(normed, task, data, sizes, mask=True)
    _, state = train(task, px.Plan(**axes), data, sizes)
    assert sorted(state.model_state["sequential"]["batch_normalization"]) == [
        "moving_mean", "moving_variance"
    ]  # fmt: skip
    assert max_rel_error(values_of(normed, state), list(expected)) < ROUNDED


METRICS = [
    "accuracy",
    "sparse_top_k_categorical_accuracy",
    keras.metrics.sparse_categorical_accuracy,
]


@pytest.mark.parametrize("build", [mlp, with_dropout, normed])
def test_names_of_losses_and_metrics_mean_what_they_mean_in_compile(build):
    """Beside Keras's own `evaluate`; batch norm couples the task by itself."""
    x, y = rows(12)

    def probabilities():
        return keras.Sequential([build(), layers.Softmax()])

    task = adapter.task(probabilities, "sparse_categorical_crossentropy", metrics=METRICS)
    program, state = train(task, px.Plan(data=2), (x, y), (12, 12))
    found = program.evaluate(state, (x, y))
    model = adapter.model(probabilities, state)
    model.compile(loss="sparse_categorical_crossentropy", metrics=METRICS)
    expected = model.evaluate(x, y, verbose=0, return_dict=True)
    assert sorted(expected) == sorted(found)
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, abs=1e-5), name


@pytest.mark.parametrize(("outputs", "y", "kind"), [
    (np.array([[0.2], [0.7]]), np.array([[0], [0]]), "binary"),
    (np.eye(3), np.array([0, 1, 1]), "sparse_categorical"),
    (np.eye(3), np.array([[0], [1], [1]]), "sparse_categorical"),
    (np.eye(3), np.eye(3)[[0, 1, 1]], "categorical"),
])  # fmt: skip
def test_accuracy_is_chosen_by_the_shapes(outputs, y, kind):
    expected = getattr(keras.metrics, f"{kind}_accuracy")(y, outputs)
    np.testing.assert_array_equal(adapter._accuracy(y, outputs), expected)


def test_metrics_of_a_data_set():
    task = adapter.task(mlp, CROSS_ENTROPY, metrics=lambda model, batch: {
        "confusion": px.metrics.confusion_matrix(model(batch[0]).argmax(1), batch[1], CLASSES)
    })  # fmt: skip
    program, state = train(task, px.Plan(data=2), rows(), (13,))
    assert np.sum(program.evaluate(state, rows())["confusion"]) == 13


@pytest.mark.filterwarnings("ignore::plurax.errors.MaskWarning")
@pytest.mark.parametrize("axes", [{"data": 2}, {"data": 3, "zero": 1}])
def test_images_and_subclasses(double, axes):
    """Without a mask a smaller batch has a program of its own."""
    data = rows(12, np.float64)
    task = adapter.task(convolution, CROSS_ENTROPY, coupled=True)
    expected = by_hand(convolution, task, data, (12, 9))
    program, state = train(task, px.Plan(**axes), data, (12, 9))
    assert max_rel_error(values_of(convolution, state), list(expected)) < ROUNDED
    outputs = adapter.model(convolution, state)(data[0], training=False)
    assert max_rel_error(program.predict(state, data[0]), outputs) < ROUNDED


def test_dropout_takes_the_examples_key_and_no_plan_changes_it(double):
    data = rows(dtype=np.float64)
    task = adapter.task(with_dropout, CROSS_ENTROPY)
    assert not task.stateful, "seed generators are no state"
    _, alone = train(task, px.Plan(), data, (13, 6))
    _, spread = train(task, px.Plan(data=2, microbatches=2), data, (13, 6))
    assert max_rel_error(spread.params, alone.params) < 1e-10
    params, keys = alone.params, jax.random.split(jax.random.key(1), 13)
    loss = jax.jit(task.loss)
    losses, _ = loss(params, data, keys)
    backwards = jax.tree.map(lambda leaf: leaf[::-1], data)
    np.testing.assert_allclose(loss(params, backwards, keys[::-1])[0][::-1], losses, rtol=1e-10)
    other, _ = loss(params, data, jax.random.split(jax.random.key(2), 13))
    assert np.mean(np.asarray(other) == np.asarray(losses)) < 0.5


def test_fit_evaluates_saves_resumes_and_gives_the_model_back(tmp_path):
    data, held_out = rows(120), rows(50)
    options = {
        "plan": px.Plan(data=2, microbatches=2), "batch_size": 32, "evaluation": held_out,
        "output": tmp_path / "run", "progress": False,
    }  # fmt: skip
    task = adapter.task(with_dropout, CROSS_ENTROPY)
    px.fit(task, optax.adam(0.02), data, epochs=3, **options)
    again = adapter.task(with_dropout, CROSS_ENTROPY)  # Keras has counted on: dense_2, dense_3
    result = px.fit(again, optax.adam(0.02), data, epochs=25, resume=True, **options)
    assert result.history[0]["loss"] > 0.7 > 0.3 > result.history[-1]["eval_loss"]
    model = adapter.model(with_dropout, result.state)
    model.save(tmp_path / "trained.keras")
    outputs = keras.saving.load_model(tmp_path / "trained.keras").predict(held_out[0], verbose=0)
    np.testing.assert_allclose(
        outputs, result.program.predict(result.state, held_out[0]), rtol=1e-4, atol=1e-5
    )


def test_members_start_from_their_own_seeds_as_the_initializers_say():
    task = adapter.task(mlp, CROSS_ENTROPY)
    program = px.compile(task, OPTIMIZER, px.Plan(), rows(), members=px.Members(seeds=range(40)))
    kernels = np.asarray(program.init().params["sequential"]["dense"]["kernel"])
    assert len({kernel.tobytes() for kernel in kernels}) == 40
    limit = np.sqrt(6 / (FEATURES + 16))  # Glorot's, uniform
    assert 0.98 * limit < np.abs(kernels).max() < limit


def test_a_model_that_was_trained_is_the_start_whatever_the_seed():
    model = mlp()
    task = adapter.task(model, CROSS_ENTROPY)
    for seed in (0, 1):
        program = px.compile(task, OPTIMIZER, px.Plan(data=2), rows())
        state = program.init(seed=seed)
        outputs = program.predict(state, rows()[0])
        np.testing.assert_allclose(outputs, model(rows()[0]), rtol=1e-5, atol=1e-6)
    before = model.get_weights()
    state, _ = program.step(state, rows())
    np.testing.assert_array_equal(model.get_weights()[0], before[0])
    assert adapter.model(model, state) is model
    assert not np.array_equal(model.get_weights()[0], before[0])


def test_names_begin_anew_in_each_model_and_given_names_stay():
    def build():
        return keras.Sequential(
            [keras.Input((FEATURES,)), layers.Dense(3, name="block_7"), layers.Dense(3)]
        )

    for _ in range(2):
        params = adapter.task(build, CROSS_ENTROPY).init(jax.random.key(0))
        assert sorted(params["sequential"]) == ["block_7", "dense"]


def compiled(model, loss, **options):
    px.compile(adapter.task(model, loss, **options), OPTIMIZER, px.Plan(), rows())


def regularized():
    decay = keras.regularizers.L2(0.1)
    return keras.Sequential(
        [keras.Input((FEATURES,)), layers.Dense(CLASSES, kernel_regularizer=decay)]
    )


class Twins(layers.Layer):
    def __init__(self):
        super().__init__(name="twins")
        self.one, self.two = layers.Dense(4, name="a"), layers.Dense(CLASSES, name="a")

    def call(self, x):
        return self.two(self.one(x))


def same_names():
    return keras.Sequential([keras.Input((FEATURES,)), Twins()])


def no_key(model, batch, keys):
    return entropy(model(batch[0], training=True), batch[1])


def all_keys(model, batch, keys):
    return entropy(model(batch[0], training=True, key=keys), batch[1])


REFUSED = {
    "several keys": (with_dropout, all_keys, {}, r"the Keras model got keys of shape \(13,\)"),
    "no key": (with_dropout, no_key, {},
               r"draws random numbers in training \(dropout.*plurax\.per_example"),
    "regularizers": (regularized, CROSS_ENTROPY, {}, "has losses of its own.*optax.adamw"),
    "not built": (lambda: keras.Sequential([layers.Dense(3)]), CROSS_ENTROPY, {},
                  "has no weights yet.*keras.Input"),
    "a class": (keras.Sequential, CROSS_ENTROPY, {}, "got a Sequential; give a Keras model"),
    "a function of others": (lambda: 3, CROSS_ENTROPY, {}, "got a int; give a Keras model"),
    "a number": (3, CROSS_ENTROPY, {}, "got a int; give a Keras model"),
    "a metric of a data set": (mlp, CROSS_ENTROPY, {"metrics": ["AUC"]},
                               r"got 'AUC', which is no function of one value per example"),
    "a metric without a name": (mlp, "mse", {"metrics": ["accuracy", 3]}, "got 'int', which is no"),
    "state": (normed, masked, {}, "moving_variance.*Say task.*coupled=True"),
    "state not given": (normed, lambda model, batch, keys, mask: entropy(
        model(batch[0], training=True)[0], batch[1]), {"coupled": True},
        r"expected \(losses, metrics, state\), where model\(\.\.\., training=True\)"),
    "names": (same_names, CROSS_ENTROPY, {},
              "two weights of the Keras model are called '.*a/kernel'"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_trained_is_refused_with_what_to_write(name):
    model, loss, options, message = REFUSED[name]
    with pytest.raises(px.errors.TaskError, match=message):
        compiled(model, loss, **options)


def test_a_model_given_to_fit_is_shown_the_adapter():
    with pytest.raises(
        px.errors.TaskError, match=r"is a Sequential.*plurax\.adapters\.keras\.task\(model"
    ):
        px.fit(mlp(), OPTIMIZER, rows(), batch_size=4)


def test_another_backend_is_refused(monkeypatch):
    monkeypatch.setattr(keras.config, "backend", lambda: "tensorflow")
    monkeypatch.delitem(sys.modules, "plurax.adapters.keras")
    with pytest.raises(px.errors.TaskError, match=r"Keras runs on tensorflow.*KERAS_BACKEND=jax"):
        importlib.import_module("plurax.adapters.keras")


@pytest.mark.parametrize("folder", ["guides", "coming-from"])
def test_the_page_runs(tmp_path, monkeypatch, folder):
    monkeypatch.chdir(tmp_path)
    run(REPOSITORY / "docs" / folder / "keras.md")
