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
