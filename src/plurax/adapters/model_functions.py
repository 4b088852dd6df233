"""A `Task` from a model of another library; each library is imported only by its own module."""

import inspect
from collections.abc import Callable
from typing import Any

from jaxtyping import PyTree

from plurax.validate import check_takes


def taking_params(
    function: Callable[..., Any] | None, bind: Callable[..., Any]
) -> Callable[..., Any] | None:
    """`function(model, inputs)` as `Task` wants it: of `(params, inputs)`, or with model state.

    `bind(params)` or `bind(params, model_state)` makes the model. None stays None.
    """
    if function is None:
        return None

    def run(params: PyTree, *args: PyTree) -> Any:
        *state, inputs = args
        return function(bind(params, *state), inputs)

    return stands_for(function, run)


def stands_for(function: Callable[..., Any], run: Callable[..., Any]) -> Callable[..., Any]:
    """Return `run`, which calls a user's function; errors then show the file and line of that."""
    run.__signature__ = inspect.signature(run)  # type: ignore[attr-defined]  # its own
    run.__wrapped__ = function  # type: ignore[attr-defined]
    return run


def check_model_functions(
    library: str,
    model: str,
    loss: Any,
    predict: Any,
    evaluate: Any,
    metrics: Any,
    *,
    coupled: bool,
) -> None:
    """Raise `TaskError` where a function of a model takes other arguments than it will be given."""
    mask = ", mask" if coupled else ""
    check_takes(f"{library}.task(loss=...)", loss, f"{model}, batch, keys{mask}")
    for name, function, rest in (
        ("predict", predict, "inputs"),
        ("evaluate", evaluate, "batch"),
        ("metrics", metrics, "batch"),
    ):
        if function is not None:
            check_takes(f"{library}.task({name}=...)", function, f"{model}, {rest}")
