"""Models of other libraries that an adapter cannot train as they are."""

from collections.abc import Iterable

from plurax.errors.kinds import TaskError


def not_transformed(kind: str) -> TaskError:
    return TaskError(
        f"haiku.task(transformed=...) got a {kind}; give a pair of pure functions: "
        "transformed=hk.transform(f), or hk.transform_with_state(f) for a model with state."
    )


def haiku_wants_key() -> TaskError:
    return TaskError(
        "the Haiku model draws random numbers, and apply(key, ...) got None. Take them from the "
        "example's key: write the loss for one example, f(apply, example, key), call "
        "apply(key, example) in it, and lift it: loss=plurax.per_example(f). In predict and "
        "evaluate call the model such that it draws nothing (is_training=False, say)."
    )


def model_got_keys(library: str, call: str, shape: tuple[int, ...]) -> TaskError:
    return TaskError(
        f"the {library} model got keys of shape {shape}, and takes one. Write the loss for one "
        f"example, f(model, example, key), call {call} in it, and lift it: "
        "loss=plurax.per_example(f)."
    )


def model_state_needs_coupled(names: Iterable[str]) -> TaskError:
    return TaskError(
        f"the model carries state besides its parameters ({', '.join(names)}), and a loss that "
        "writes state makes examples depend on each other. Say task(..., coupled=True): the loss "
        "then sees every example of a microbatch across all devices, and its last argument is the "
        "mask, false for rows that only fill up the batch and must stay out of the state."
    )


def equinox_state_takes_no_mask() -> TaskError:
    return TaskError(
        "the model has layers with state (eqx.nn.BatchNorm, say), which average over all rows of a "
        "batch and take no mask, so that rows that only fill up a batch would enter. Use a layer "
        "without state, such as eqx.nn.GroupNorm or eqx.nn.LayerNorm."
    )


def nnx_stream_not_reseeded(stream: str) -> TaskError:
    return TaskError(
        f"the model draws from its own random stream {stream!r}, which would give the same numbers "
        "in every step. Take them from the example's key: write the loss for one example, lift it "
        f"with plurax.per_example(f), and in f(model, example, key) say nnx.reseed(model, {stream}="
        "key) before calling the model, or pass rngs=nnx.Rngs(key) to the call. Where there is no "
        "key (in predict) or the numbers do not matter (a recurrent layer's zeros), say "
        f"nnx.reseed(model, {stream}=0)."
    )


def keras_backend(backend: str) -> TaskError:
    return TaskError(
        f"Keras runs on {backend} in this process, and plurax trains what runs on JAX. Set the "
        "backend before the first import of Keras: KERAS_BACKEND=jax in the environment, or "
        'os.environ["KERAS_BACKEND"] = "jax" at the top of the file.'
    )


def not_a_keras_model(kind: str) -> TaskError:
    return TaskError(
        f"keras.task(model=...) got a {kind}; give a Keras model, or a function without arguments "
        "that makes one: model=lambda: keras.Sequential([...])."
    )


def keras_metric(name: str) -> TaskError:
    return TaskError(
        f"keras.task(metrics=[...]) got {name!r}, which is no function of one value per example: "
        'plurax averages "accuracy", functions in keras.metrics such as '
        '"sparse_top_k_categorical_accuracy", and f(y, outputs) of your own. For what is no mean '
        'write metrics=lambda model, batch: {"auc": plurax.metrics.auc(...)}.'
    )


def keras_not_built(name: str) -> TaskError:
    return TaskError(
        f"the Keras model {name!r} has no weights yet, because it knows no shape of its inputs. "
        "Begin it with keras.Input(shape=...), or call model.build((None, ...)) first."
    )


def keras_names_twice(path: str) -> TaskError:
    return TaskError(
        f"two weights of the Keras model are called {path!r}, and parameters are told apart by "
        "name. Give the layers that hold them names of their own: name=..."
    )


def keras_wants_key(layers: Iterable[str]) -> TaskError:
    return TaskError(
        f"the Keras model draws random numbers in training ({', '.join(layers)}), and got no key. "
        "Take them from the example's key: write the loss for one example, "
        "f(model, example, key), call model(example[None], training=True, key=key)[0] in it, and "
        "lift it: loss=plurax.per_example(f). A coupled loss, which sees all rows, gives keys[0]."
    )


def keras_losses_left_out(name: str) -> TaskError:
    return TaskError(
        f"the Keras model {name!r} has losses of its own (regularizers of its layers, or "
        "add_loss), which a loss per example does not contain. Leave them out, and write what they "
        "do where it belongs: decay of weights in the optimizer (optax.adamw), other terms in the "
        "loss of each example."
    )
