"""Call the hooks of a run, in one order: the callbacks of the user's, and those of plurax."""

import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from plurax import errors
from plurax.loop.epoch_metrics import EpochMetrics
from plurax.loop.hook import (
    CallHook,
    CallsHook,
    CheckpointHook,
    EndHook,
    EpochHook,
    EvaluationHook,
    FetchedHook,
    MetricsHook,
    NextStopHook,
    OptimizerHook,
    RewindHook,
    RowsHook,
    RunSnapshot,
    SaveHook,
    StartHook,
    StateHook,
    StepHook,
    StopHook,
)
from plurax.loop.iterate import StepOutput
from plurax.loop.log_rows import Row
from plurax.loop.run import Run
from plurax.validate import check_takes

EVENTS: Mapping[str, tuple[Any, str]] = {
    "on_start": (StartHook, "run"),
    "on_step": (StepHook, "run, row"),
    "on_evaluation": (EvaluationHook, "run, row"),
    "on_epoch": (EpochHook, "run, row"),
    "on_save": (SaveHook, "run, step"),
    "on_stop": (StopHook, "run"),
}
"""The events that a callback of the user's may listen to, and what it is called with."""

PARTS: Mapping[str, Any] = {
    "next_stop": NextStopHook,
    "get_state": StateHook,
    "set_state": StateHook,
    "wrap_optimizer": OptimizerHook,
}
"""What a callback may have besides."""


class Callbacks:
    """The callbacks of the user's, called in their order.

    An error in one of them ends training, with a note that names the callback and the event.

    Raises `TaskError` for what is no list of callbacks.
    """

    def __init__(self, callbacks: Any) -> None:
        callbacks = _checked(callbacks)
        self._named = dict(zip(_names(callbacks), callbacks, strict=True))
        kinds = {event: kind for event, (kind, _) in EVENTS.items()} | {**PARTS}
        self._methods = {
            event: [
                (name, getattr(callback, event))
                for name, callback in self._named.items()
                if isinstance(callback, kind)
            ]
            for event, kind in kinds.items()
        }

    @property
    def add_metrics(self) -> bool:
        """Whether a callback that is not of plurax may add metrics to a row."""
        kinds = [type(callback).__module__ for callback in self._named.values()]
        return not all(kind.startswith("plurax.") for kind in kinds)

    def _call(self, event: str, *arguments: Any) -> list[Any]:
        """Call a method of all callbacks that have it, and return what they return."""
        results = []
        for name, method in self._methods[event]:
            with _named_in_errors(name, event):
                results.append(method(*arguments))
        return results

    def on_start(self, run: Run) -> None:
        """Call `on_start` of all."""
        self._call("on_start", run)

    def on_evaluation(self, run: Run, row: Row) -> None:
        """Call `on_evaluation` of all."""
        self._call("on_evaluation", run, row)

    def on_epoch(self, run: Run, row: Row) -> None:
        """Call `on_epoch` of all."""
        self._call("on_epoch", run, row)

    def on_stop(self, run: Run) -> None:
        """Call `on_stop` of all."""
        self._call("on_stop", run)

    def next_stop(self, step: int) -> int | None:
        """Return the first step after `step` that a callback has to see."""
        steps = self._call("next_stop", step)
        return min((step for step in steps if step is not None), default=None)

    def on_save(self, run: Run, step: int) -> None:
        """Call `on_save` of all; where one raises in a process, raise in all of them."""
        for name, on_save in self._methods["on_save"]:
            with _named_in_errors(name, "on_save"):
                run.group.together(functools.partial(on_save, run, step))

    def steps(self, run: Run, rows: list[Row]) -> None:
        """Call `on_step` for each row; of small steps there are many."""
        for name, on_step in self._methods["on_step"]:
            with _named_in_errors(name, "on_step"):
                for row in rows:
                    on_step(run, row)

    def wrap_optimizer(self, optimizer: Any) -> Any:
        """Return the optimizer as the callbacks that follow the parameters want it."""
        for name, wrap in self._methods["wrap_optimizer"]:
            with _named_in_errors(name, "wrap_optimizer"):
                optimizer = wrap(optimizer)
        return optimizer

    def to_json(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of the callbacks, by name."""
        states = {}
        for name, get_state in self._methods["get_state"]:
            with _named_in_errors(name, "get_state"):
                state = get_state()
            try:
                states[name] = json.loads(json.dumps(state))
            except (TypeError, ValueError) as error:
                raise errors.TaskError(
                    f"the state of the callback {name} cannot be saved: {error}. get_state() "
                    "returns numbers, text, None, and lists and dicts of them."
                ) from None
        return states

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Give the callbacks what a checkpoint kept of them; a new one starts anew."""
        for name, set_state in self._methods["set_state"]:
            if name in saved:
                with _named_in_errors(name, "set_state"):
                    set_state(saved[name])


class Hooks:
    """All that listens to a run, called at every event in the order in which it is given.

    **Arguments:** `order`, the hooks, and among them the `callbacks` of the user's.

    **Attributes:** `saves`, whether anything saves the run; `call`, `metrics`, `rows`, `rewind` and
    `end`, which call the hooks of one event, with its arguments.
    """

    def __init__(self, order: Sequence[Any], callbacks: Callbacks) -> None:
        def of(kind: Any) -> list[Any]:
            return [hook for hook in order if isinstance(hook, kind)]

        def each(kind: Any, event: str) -> Callable[..., None]:
            methods = [getattr(hook, event) for hook in of(kind)]

            def call(*arguments: Any) -> None:
                for method in methods:
                    method(*arguments)

            return call

        self._callbacks = callbacks
        self._calls: list[CallsHook] = of(CallsHook)
        self.saves = bool(of(CheckpointHook))
        self._start: Callable[[Run], None] = each(StartHook, "on_start")
        self._stop: Callable[[Run], None] = each(StopHook, "on_stop")
        self._fetched: Callable[[Run, list[StepOutput]], None] = each(FetchedHook, "on_fetched")
        self._evaluation: Callable[[Run, Row], None] = each(EvaluationHook, "on_evaluation")
        self._epoch: Callable[[Run, Row], None] = each(EpochHook, "on_epoch")
        self._save: Callable[[Run, int], None] = each(SaveHook, "on_save")
        self._checkpoint: Callable[[Run, RunSnapshot], None] = each(CheckpointHook, "on_checkpoint")
        self.call: Callable[[Run], None] = each(CallHook, "on_call")
        self.metrics: Callable[[Run, EpochMetrics], None] = each(MetricsHook, "on_metrics")
        self.rows: Callable[[Run, list[Row]], None] = each(RowsHook, "on_rows")
        self.rewind: Callable[[Run], None] = each(RewindHook, "on_rewind")
        self.end: Callable[[Run, EpochMetrics | None], None] = each(EndHook, "on_end")

    @contextlib.contextmanager
    def running(self, run: Run) -> Iterator[None]:
        """Start now, and stop at the end, after an error too."""
        run.adds_metrics = self._callbacks.add_metrics
        with run.settable():
            self._start(run)
        try:
            yield
        except BaseException as error:
            run.stopped, run.failed = f"{type(error).__name__}: {error}", True
            raise
        finally:
            self._stop(run)

    def watch(self, run: Run, calls: Iterator[StepOutput]) -> Iterator[StepOutput]:
        """Return the calls as the hooks yield them on, the first of them nearest to the calls."""
        for hook in self._calls:
            calls = hook.on_calls(run, calls)
        return calls

    def stops_at(self, step: int) -> bool:
        """Return whether a callback has to see this step."""
        return self._callbacks.next_stop(step - 1) == step

    def steps(self, run: Run, fetched: list[StepOutput], rows: list[Row]) -> None:
        """Say that the metrics of calls are on the host, with a row for each of their steps."""
        self._callbacks.steps(run, rows)
        self.rows(run, rows)
        self._fetched(run, fetched)

    def report(self, run: Run, row: Row) -> None:
        """Let hooks add to the row of an evaluation or an epoch, then show it and write it."""
        with run.settable():
            if run.evaluates:
                self._evaluation(run, row)
            if row["kind"] == "epoch":
                self._epoch(run, row)
                run.history.append(row)
        self.rows(run, [row])

    def save(self, run: Run, snapshot: RunSnapshot) -> None:
        """Save the run; before its description is asked for, all is written that it names."""

        def meta() -> dict[str, Any]:
            self._save(run, snapshot.step)
            return {**snapshot.meta(), "callbacks": self._callbacks.to_json()}

        self._checkpoint(run, dataclasses.replace(snapshot, meta=meta))


@contextlib.contextmanager
def _named_in_errors(callback: str, hook: str) -> Iterator[None]:
    """Say in an error which callback raised it."""
    try:
        yield
    except Exception as error:
        error.add_note(f"This was raised by {hook} of the callback {callback}.")
        raise


def _checked(callbacks: Any) -> Sequence[Any]:
    """Return the callbacks. Raises `TaskError` for what is no list of callbacks."""
    if isinstance(callbacks, str | Mapping) or not isinstance(callbacks, Iterable):
        raise errors.TaskError(
            f"the callbacks are a {type(callbacks).__name__}; write a list: "
            "callbacks=[plurax.callbacks.EarlyStopping('eval_loss')]."
        )
    callbacks = list(callbacks)
    for name, callback in zip(_names(callbacks), callbacks, strict=True):
        if isinstance(callback, type):
            raise errors.TaskError(
                f"the callback {callback.__name__} is a class; write an object of it: "
                f"callbacks=[{callback.__name__}(...)]."
            )
        hooks = {hook for hook in dir(callback) if hook.startswith("on_")}
        unknown = sorted(hooks - set(EVENTS))
        if unknown or not (hooks or isinstance(callback, OptimizerHook)):
            has = f"has {', '.join(unknown)}, which nothing calls" if unknown else "has no hook"
            known = ", ".join(f"{hook}({arguments})" for hook, (_, arguments) in EVENTS.items())
            raise errors.TaskError(
                f"the callback {name} {has}; the hooks of a callback are {known}."
            )
        for hook in hooks:
            check_takes(f"{hook} of the callback {name}", getattr(callback, hook), EVENTS[hook][1])
        if hasattr(callback, "get_state") != hasattr(callback, "set_state"):
            raise errors.TaskError(
                f"the callback {name} has one of get_state() and set_state(state); a callback "
                "whose state is kept in checkpoints has both."
            )
    return callbacks


def _names(callbacks: Sequence[Any]) -> list[str]:
    """Return the name of each: its type, with a number where there are several of one type."""
    kinds = [type(one).__name__ for one in callbacks]
    return [
        kind if kinds.count(kind) == 1 else f"{kind}.{kinds[:index].count(kind)}"
        for index, kind in enumerate(kinds)
    ]
