"""Models of other libraries that an adapter cannot train as they are."""

from plurax.errors.kinds import TaskError


def model_got_keys(library: str, call: str, shape: tuple[int, ...]) -> TaskError:
    return TaskError(
        f"the {library} model got keys of shape {shape}, and takes one. Write the loss for one "
        f"example, f(model, example, key), call {call} in it, and lift it: "
        "loss=plurax.per_example(f)."
    )


def not_a_keras_model(kind: str) -> TaskError:
    return TaskError(
        f"keras.task(model=...) got a {kind}; give a Keras model, or a function without arguments "
        "that makes one: model=lambda: keras.Sequential([...])."
    )
