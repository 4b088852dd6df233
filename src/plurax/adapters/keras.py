"""A `Task` from a Keras 3 model on JAX.

A Keras model keeps its weights in variables. `stateless_call` runs it as a pure function of their
values, in three groups:

    trainable variables        parameters, named by their paths: dense/kernel
    seed generators' states    put in from a random key in each call, and never kept
    other variables            model state: the moving averages of batch norm

Initial weights come from a seed by way of the initializers. While a model is made inside a
`keras.StatelessScope`, its variables have no values and keep their initializers, which are then
called with keys of the seed: Keras on JAX draws from a key where it is given one for a seed.
"""

import copy
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key, PyTree

from plurax import errors
from plurax.adapters.model_functions import ModelFunctions, three
from plurax.state import TrainState
from plurax.task import Task, per_example
from plurax.tree import named_leaves

try:
    import keras
except ImportError as error:
    raise errors.missing_extra("keras", "keras") from error

if keras.config.backend() != "jax":
    raise errors.TaskError(
        f"Keras runs on {keras.config.backend()} in this process, and plurax trains what runs on "
        "JAX. Set the backend before the first import of Keras: KERAS_BACKEND=jax in the "
        'environment, or os.environ["KERAS_BACKEND"] = "jax" at the top of the file.'
    )

Model = Any  # keras.Model
Call = Callable[..., Any]
Values = dict[str, Any]

_SHORT = {"acc": "accuracy", "mse": "mean_squared_error", "mae": "mean_absolute_error"}


def task(
    model: Model | Callable[[], Model],
    loss: Any,
    *,
    predict: Callable[[Call, PyTree], PyTree] | None = None,
    evaluate: Callable[[Call, PyTree], Any] | None = None,
    metrics: Sequence[str | Call] | Callable[[Call, PyTree], dict[str, Any]] | None = None,
    weight: Callable[[PyTree], Float[Array, "B"]] | None = None,
    coupled: bool = False,
) -> Task:
    """A task from a Keras model; its functions take `model` where those of `Task` take params.

    There, `model(x, training=False, key=None, ...)` calls the model with the values under training;
    further arguments, such as `mask`, are the model's own. It is a JAX tree, so that
    `plurax.per_example` lifts a `loss(model, example, key)` written for one example; dropout takes
    that example's key: `model(example["x"][None], training=True, key=key)[0]`. A coupled loss sees
    all rows, and gives `keys[0]`.

    **Arguments:**

    - `model`: a function without arguments that makes the model, whose first weights are then drawn
      from the seed; or a model, whose weights are the first ones whatever the seed, which is right
      for one that was trained before. The model knows the shape of its inputs
      (`keras.Input`, or `model.build`).
    - `loss(model, batch, keys)`: one loss per example, shape `(B,)`, or a pair of that and
      `{name: (B,) metrics}`; `keys`, shape `(B,)`, holds a random key per example. With `coupled`
      it is `loss(model, batch, keys, mask)`. Or a `keras.losses.Loss`, or its name: then batches
      are pairs `(x, y)` as for `model.fit`, `predict` of `x` and `evaluate` are there too, and
      `coupled` is as the model needs it.
    - `predict(model, inputs)`, `evaluate(model, batch)`, `weight`, `coupled`: as for `Task`.
    - `metrics(model, batch)`: as for `Task`. With a loss of Keras, or a list as for
      `model.compile`: `"accuracy"`, names of functions in `keras.metrics`, or functions
      `f(y, outputs)` of one value per example.

    Trainable variables are trained, by their paths. Others, such as the averages of
    `BatchNormalization`, are model state: the task then needs `coupled`, `model(x, training=True)`
    returns `(outputs, state)`, and the loss `(losses, metrics, state)`. Batch norm that gets the
    mask (`mask=mask` for inputs of one dim) is exact over ragged batches; else a batch of another
    size than the full one runs in a program compiled for its size, and a `MaskWarning` says so.
    Freeze weights by `plurax.freeze`, for `layer.trainable = False` makes them model state.

    **Returns:** a `Task`. Its parameters are nested dicts, by the paths of variables.

    Raises `TaskError` where the model has no weights yet, or state and the task is not coupled;
    and, once it is compiled, where it draws random numbers without a key, or has losses of its own
    (regularizers).

    ```python
    task = px.adapters.keras.task(
        lambda: keras.Sequential([keras.Input((8,)), keras.layers.Dense(2)]),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    result = px.fit(task, optax.adam(1e-2), (x, y), batch_size=64, epochs=5)
    ```
    """
    network = _KerasNetwork(model)
    stateful = bool(network.state_names)
    if isinstance(loss, str | keras.losses.Loss):
        named = {} if metrics is None or callable(metrics) else _metrics(metrics)
        metrics = metrics if callable(metrics) else None
        loss, more = _of_keras_loss(loss, network, named)
        predict, evaluate = predict or more["predict"], evaluate or more["evaluate"]
        coupled = coupled or stateful
    functions = ModelFunctions(loss, predict, evaluate, cast(Any, metrics), weight, coupled)
    functions.check("keras", "model", network.state_names)

    def updated(_: Call, output: Any, __: PyTree) -> tuple[Any, Any, PyTree]:
        where = f"the loss of a model with state ({', '.join(network.state_names)})"
        expected = "(losses, metrics, state), where model(..., training=True) gave the state"
        return three(output, where, expected)

    if stateful:
        return functions.task(network.init, network.bind, updated=updated)
    return functions.task(lambda key: network.init(key)[0], network.bind)


def model(model: Model | Callable[[], Model], state: TrainState) -> Model:
    """Assign trained values to the Keras model, and return it.

    **Arguments:** `model`, as given to `task`: a function makes a new one; `state`, the trained
    state of one network.
    """
    filled = model if isinstance(model, keras.Model) else model()
    names = _names(filled)
    values = _flat((state.params, state.model_state or {}))
    for variable in filled.variables:
        if not _is_seed(variable):
            variable.assign(values[names[variable.path]])
    return filled


class _KerasNetwork:
    """A Keras model as a pure function of its variables' values."""

    def __init__(self, model: Any) -> None:
        self._initializers: dict[str, Any] = {}
        if isinstance(model, keras.Model):
            self._model = model
        elif isinstance(model, keras.losses.Loss | type) or not callable(model):
            raise errors.not_a_keras_model(getattr(model, "__name__", type(model).__name__))
        else:
            with keras.StatelessScope():
                self._model = model()
                if not isinstance(self._model, keras.Model):
                    raise errors.not_a_keras_model(type(self._model).__name__)
                # Once the scope ends, the variables get values and drop these.
                self._initializers = {v.path: v._initializer for v in self._model.variables}
        if not self._model.built:
            raise errors.TaskError(
                f"the Keras model {self._model.name!r} has no weights yet, because it knows no "
                "shape of its inputs. Begin it with keras.Input(shape=...), or call "
                "model.build((None, ...)) first."
            )
        self._names = _names(self._model)
        self._params = self._model.trainable_variables
        self._others = self._model.non_trainable_variables
        self._seeds = [v for v in self._others if _is_seed(v)]
        self.state_names = [self._names[v.path] for v in self._others if not _is_seed(v)]

    @property
    def draws(self) -> bool:
        """Whether it draws random numbers in training."""
        return bool(self._seeds)

    def init(self, key: Key[Array, ""]) -> tuple[PyTree, PyTree]:
        """The first values of parameters and model state."""
        values = {}
        for index, variable in enumerate([*self._params, *self._others]):
            if not _is_seed(variable):
                values[variable.path] = self._first(variable, jax.random.fold_in(key, index))
        return self._nested(self._params, values), self._nested(self._others, values)

    def bind(self, params: PyTree, state: PyTree = ()) -> Call:
        """The model with these values, to be called as `model(x, training=False, key=None)`."""
        return jax.tree_util.Partial(self._call, params, state or {})

    def _first(self, variable: Any, key: Key[Array, ""]) -> Any:
        initializer = self._initializers.get(variable.path)
        if initializer is None:  # a model that has its weights
            return jnp.asarray(variable.value)
        if hasattr(initializer, "seed"):
            initializer = copy.copy(initializer)
            initializer.seed = key
        return jnp.asarray(initializer(variable.shape, dtype=variable.dtype))

    def _call(
        self,
        params: PyTree,
        state: PyTree,
        *args: Any,
        training: bool = False,
        key: Any = None,
        **options: Any,
    ) -> Any:
        if key is not None and jnp.ndim(key) > 0:
            raise errors.model_got_keys(
                "Keras", "model(example[None], training=True, key=key)", jnp.shape(key)
            )
        if training and self._seeds and key is None:
            every = self._model._flatten_layers()
            drawing = [layer.name for layer in every if hasattr(layer, "seed_generator")]
            layers = drawing or [seed.path for seed in self._seeds]
            raise errors.TaskError(
                f"the Keras model draws random numbers in training ({', '.join(layers)}), and got "
                "no key. Take them from the example's key: write the loss for one example, "
                "f(model, example, key), call model(example[None], training=True, key=key)[0] in "
                "it, and lift it: loss=plurax.per_example(f). A coupled loss, which sees all rows, "
                "gives keys[0]."
            )
        values = _flat((params, state))
        for index, seed in enumerate(self._seeds):
            drawn = jax.random.fold_in(jax.random.key(0) if key is None else key, index)
            values[self._names[seed.path]] = jax.random.bits(drawn, seed.shape, seed.dtype)
        outputs, new, losses = self._model.stateless_call(
            [values[self._names[v.path]] for v in self._params],
            [values[self._names[v.path]] for v in self._others],
            *args,
            training=training,
            return_losses=True,
            **options,
        )
        if training and losses:
            raise errors.TaskError(
                f"the Keras model {self._model.name!r} has losses of its own (regularizers of its "
                "layers, or add_loss), which a loss per example does not contain. Leave them out, "
                "and write what they do where it belongs: decay of weights in the optimizer "
                "(optax.adamw), other terms in the loss of each example."
            )
        if not (training and self.state_names):
            return outputs
        paths = [v.path for v in self._others]
        return outputs, self._nested(self._others, dict(zip(paths, new, strict=True)))

    def _nested(self, variables: Iterable[Any], values: Mapping[str, Any]) -> Values:
        """Values by path as nested dicts: `{"dense": {"kernel": ...}}`, without seeds' states."""
        nested: Values = {}
        for variable in variables:
            if not _is_seed(variable):
                *folders, name = self._names[variable.path].split("/")
                inner = nested
                for folder in folders:
                    inner = inner.setdefault(folder, {})
                inner[name] = values[variable.path]
        return nested


def _of_keras_loss(
    loss: Any, network: _KerasNetwork, metrics: Mapping[str, Call]
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return functions of batches `(x, y)` for a loss of Keras, without its mean over the batch."""
    function = keras.losses.get(loss) if isinstance(loss, str) else loss
    function = function.call if isinstance(function, keras.losses.Loss) else function

    def values(outputs: Any, y: Any) -> tuple[Float[Array, "B"], dict[str, Float[Array, "B"]]]:
        found = {name: _of_rows(metric(y, outputs)) for name, metric in metrics.items()}
        return _of_rows(function(y, outputs)), found

    def of_example(model: Call, example: PyTree, key: Key[Array, ""]) -> Any:
        x, y = jax.tree.map(lambda leaf: leaf[None], example)
        return jax.tree.map(lambda leaf: leaf[0], values(model(x, training=True, key=key), y))

    def of_batch(model: Call, batch: PyTree, keys: Any) -> Any:
        x, y = batch
        return values(model(x, training=True), y)

    def with_state(model: Call, batch: PyTree, keys: Any, mask: Any) -> Any:
        x, y = batch
        outputs, state = model(x, training=True, key=keys[0])
        return *values(outputs, y), state

    def evaluate(model: Call, batch: PyTree) -> Any:
        x, y = batch
        return values(model(x), y)

    more = {"evaluate": evaluate, "predict": lambda model, inputs: model(inputs)}
    if network.state_names:
        return with_state, more
    return per_example(of_example) if network.draws else of_batch, more


def _of_rows(values: Any) -> Float[Array, "B"]:
    """One value per example: the mean over all other dims."""
    values = jnp.asarray(values)
    values = values if jnp.issubdtype(values.dtype, jnp.floating) else values.astype(float)
    return jnp.mean(values, axis=tuple(range(1, jnp.ndim(values))))


def _metrics(metrics: Sequence[str | Call]) -> dict[str, Call]:
    """The functions of metrics as `model.compile` takes them, by name.

    Raises `TaskError` for one that is no mean of a value per example.
    """
    functions: dict[str, Call] = {}
    for metric in [metrics] if isinstance(metrics, str) else metrics:
        function: Any = metric
        if isinstance(metric, str):
            name = _SHORT.get(metric, metric)
            function = _accuracy if name == "accuracy" else getattr(keras.metrics, name, None)
        if isinstance(function, type) or not inspect.isroutine(function):
            shown = metric if isinstance(metric, str) else type(metric).__name__
            raise errors.TaskError(
                f"keras.task(metrics=[...]) got {shown!r}, which is no function of one value "
                'per example: plurax averages "accuracy", functions in keras.metrics such as '
                '"sparse_top_k_categorical_accuracy", and f(y, outputs) of your own. For what is '
                'no mean write metrics=lambda model, batch: {"auc": plurax.metrics.auc(...)}.'
            )
        functions[metric if isinstance(metric, str) else function.__name__] = function
    return functions


def _accuracy(y: Any, outputs: Any) -> Any:
    """Keras's `"accuracy"`, which is chosen by the shapes."""
    if outputs.shape[-1] == 1:
        return keras.metrics.binary_accuracy(y, outputs)
    if jnp.ndim(y) < jnp.ndim(outputs) or y.shape[-1] == 1:
        return keras.metrics.sparse_categorical_accuracy(y, outputs)
    return keras.metrics.categorical_accuracy(y, outputs)


def _names(model: Any) -> dict[str, str]:
    """A name for each variable's path, the same for every model that one function makes.

    Keras numbers layers without names over the whole process: in a second model the first layer may
    be `dense_2`. Here numbers begin anew in each model: `dense`, `dense_1`.
    """
    renamed: dict[str, str] = {}
    counts: dict[str, int] = {}
    for layer in model._flatten_layers(include_self=True, recursive=True):
        kind = _snake_case(type(layer).__name__)
        if layer.name not in renamed and re.fullmatch(rf"{kind}(_\d+)?", layer.name):
            number = counts.get(kind, 0)
            counts[kind] = number + 1
            renamed[layer.name] = f"{kind}_{number}" if number else kind
    names: dict[str, str] = {}
    for variable in model.variables:
        parts = [renamed.get(part, part) for part in variable.path.split("/")]
        name = "/".join(parts)
        if variable.path in names or name in names.values():
            raise errors.TaskError(
                f"two weights of the Keras model are called {variable.path!r}, and parameters are "
                "told apart by name. Give the layers that hold them names of their own: name=..."
            )
        names[variable.path] = name
    return names


def _snake_case(name: str) -> str:
    """A class's name as Keras writes it for a layer without one: `Conv2D`, `conv2d`."""
    name = re.sub(r"(.)([A-Z][a-z]+)", r"\1_\2", re.sub(r"\W+", "", name))
    return re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower()


def _is_seed(variable: Any) -> bool:
    """Whether this is the state of a `keras.random.SeedGenerator`."""
    return variable.name == "seed_generator_state"


def _flat(trees: PyTree) -> dict[str, Any]:
    """The values of several trees of nested dicts, by their paths."""
    return {name: value for tree in trees for name, value in named_leaves(tree).items()}
