"""What every adapter does alike: the user's functions of a model become those of a `Task`.

An adapter says how a model is made of values (`bind`) and which of them are model state. Example,
Haiku with batch norm:

    user's   loss(apply, batch, keys, mask) -> (losses, metrics, state)
    bind     (params, state) -> apply
    task's   loss(params, state, batch, keys, mask) -> (losses, metrics, state)
"""

import dataclasses
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from jaxtyping import Array, Float, Key, PyTree

from plurax import errors
from plurax.task import Task
from plurax.validate import check_takes
from plurax.whole_batch import OverBatch, over_batch

Bind = Callable[..., Any]
"""`bind(params)` or `bind(params, model_state)` returns the model with these values."""


@dataclasses.dataclass(frozen=True)
class ModelFunctions:
    """Functions of a model, and what goes with them; each as the adapter's `task` was given it."""

    loss: Callable[..., Any]
    predict: Callable[[Any, PyTree], PyTree] | None
    evaluate: Callable[[Any, PyTree], Any] | None
    metrics: Callable[[Any, PyTree], dict[str, Any]] | None
    weight: Callable[[PyTree], Float[Array, "B"]] | None
    coupled: bool

    def check(self, library: str, model: str, state: Iterable[str] = ()) -> None:
        """Raise `TaskError` where one takes other arguments than it will be given.

        Before that, where the model has state and the loss is not coupled.

        **Arguments:** `library`; `model`, what the functions call their first argument; `state`,
        the names of the model's state.
        """
        names, over_batch = list(state), isinstance(self.loss, OverBatch)
        if names and over_batch:
            raise errors.TaskError(
                f"the model carries state besides its parameters ({', '.join(names)}), which a "
                "forward pass of all examples writes, and those of plurax.over_batch are of "
                "microbatches. Write a loss(model, batch, keys, mask) with coupled=True in its "
                "place; its microbatches each write the state."
            )
        if names and not self.coupled:
            raise errors.TaskError(
                f"the model carries state besides its parameters ({', '.join(names)}), and a loss "
                "that writes state makes examples depend on each other. Say task(..., "
                "coupled=True): the loss then sees every example of a microbatch across all "
                "devices, and its last argument is the mask, false for rows that only fill up the "
                "batch and must stay out of the state."
            )
        mask = ", mask" if self.coupled else ""
        if isinstance(self.loss, OverBatch):
            self.loss.check(model, stateful=False)
        else:
            check_takes(f"{library}.task(loss=...)", self.loss, f"{model}, batch, keys{mask}")
        for name, rest in (("predict", "inputs"), ("evaluate", "batch"), ("metrics", "batch")):
            if (function := getattr(self, name)) is not None:
                check_takes(f"{library}.task({name}=...)", function, f"{model}, {rest}")

    def task(
        self,
        init: Callable[[Key[Array, ""]], PyTree],
        bind: Bind,
        *,
        inference: Bind | None = None,
        updated: Callable[[Any, Any, PyTree], tuple[Any, Any, PyTree]] | None = None,
    ) -> Task:
        """Return the task.

        **Arguments:**

        - `init(key)`: params, or with model state `(params, state)`.
        - `bind`, and `inference`, the same for all functions but the loss, default `bind`.
        - `updated(model, output, state)`: of a model with state, `(losses, metrics, state)` of what
          the loss returned.
        """

        def stateless(params: PyTree, *args: Any) -> Any:
            return self.loss(bind(params), *args)

        def stateful(params: PyTree, state: PyTree, *args: Any) -> Any:
            assert updated is not None  # else there is no state
            model = bind(params, state)
            return updated(model, self.loss(model, *args), state)

        def outputs(params: PyTree, *args: Any) -> Any:
            assert isinstance(self.loss, OverBatch)
            return self.loss.outputs(bind(params), *args)

        loss: Callable[..., Any] = _stands_for(self.loss, stateful if updated else stateless)
        if isinstance(self.loss, OverBatch):
            loss = over_batch(_stands_for(self.loss.outputs, outputs), self.loss.losses)
        return Task(
            init=init,
            loss=loss,
            predict=_taking_params(self.predict, inference or bind),
            evaluate=_taking_params(self.evaluate, inference or bind),
            metrics=_taking_params(self.metrics, inference or bind),
            weight=self.weight,
            coupled=self.coupled,
            stateful=updated is not None,
        )


def three(output: Any, where: str, expected: str) -> tuple[Any, Any, Any]:
    """Return what a loss of a model with state returned. Raises `TaskError` unless it is three."""
    if not (isinstance(output, tuple) and len(output) == 3):
        raise errors.loss_wrong_structure(where, "something else", expected)
    return output


def _taking_params(function: Callable[..., Any] | None, bind: Bind) -> Callable[..., Any] | None:
    """`function(model, inputs)` as `Task` wants it: of `(params, inputs)`, or with model state."""
    if function is None:
        return None

    def run(params: PyTree, *args: PyTree) -> Any:
        *state, inputs = args
        return function(bind(params, *state), inputs)

    return _stands_for(function, run)


def _stands_for(function: Callable[..., Any], run: Callable[..., Any]) -> Callable[..., Any]:
    """Return `run`, which calls a user's function; errors then show the file and line of that."""
    run.__signature__ = inspect.signature(run)  # type: ignore[attr-defined]  # its own
    run.__wrapped__ = function  # type: ignore[attr-defined]
    return run
