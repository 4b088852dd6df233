"""Call the callbacks of a run: plain objects with any of six hooks.

    on_start(run)              before the first step, after a checkpoint was restored
    on_step(run, row)          for each step, once its metrics are on the host
    on_evaluation(run, row)    after an evaluation, with the row of its epoch, or a row of its own
    on_epoch(run, row)         after an epoch that is reported, before it is logged and saved
    on_save(run, step)         before a checkpoint is begun: write what shall agree with it
    on_stop(run)               at the end, after an error too

Metrics reach the host some calls late, so that it never waits for the step that it has just
dispatched. A callback that has to see the state after a certain step says so by `next_stop`:

    next_stop(step) -> int | None    the first step after `step` where a call of the loop shall end,
                                     with `run.step` and `run.state` those of the last row

What has to happen in every step belongs into the compiled program, as part of the optimizer:

    wrap_optimizer(optimizer)        returns the optimizer to train with
"""

import contextlib
import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from plurax import errors
from plurax.distributed.process_group import ProcessGroup
from plurax.execute.program import Program
from plurax.loop.iterate import StepOutput
from plurax.loop.log_rows import Row
from plurax.state import TrainState
from plurax.validate import check_takes

HOOKS = {
    "on_start": "run",
    "on_step": "run, row",
    "on_evaluation": "run, row",
    "on_epoch": "run, row",
    "on_save": "run, step",
    "on_stop": "run",
}
"""The hooks of a callback, and what they are called with."""


class Run:
    """What a callback is given: the run as it is now.

    **Attributes:**

    - `program`: the compiled program; `program.plan` is its plan.
    - `members`: the population, None for one network.
    - `state`: the state after step `step`, in the program's layout. The next step reuses its
      memory: keep what `params()` returns, or a copy.
    - `step`, `epoch`: steps taken, and whole epochs.
    - `history`: the rows of the epochs so far, the newest last.
    - `output`: the directory of the run, or None.
    - `group`: the processes that train together; every process calls every hook.
    - `evaluates`: whether there are evaluation data.
    - `adds_metrics`: whether a callback that is not of plurax may add metrics to a row.
    - `settings`: what the run was started with: seed, batch size and the like, by name.
    - `stopped`: why training ends, once it is known; `failed`: whether an error ends it.
    """

    def __init__(
        self,
        program: Program,
        state: TrainState,
        history: list[Row],
        output: Path | None,
        group: ProcessGroup,
        settings: Mapping[str, Any],
        evaluate: Callable[[TrainState], dict[str, Any] | None],
        evaluates: bool,
        *,
        servers: bool = False,
    ) -> None:
        self.program, self.members = program, program.members
        self.state, self.step, self.epoch = state, state.steps_taken, 0
        self.history, self.output, self.group = history, output, group
        self.settings = settings
        self.stopped: str | None = None
        self.failed = False
        self._evaluate, self._servers, self._settable = evaluate, servers, False
        self.evaluates, self.adds_metrics = evaluates, False

    def see(self, steps: StepOutput) -> TrainState:
        """Take what a call of the training loop returned."""
        self.state, self.step, self.epoch = steps.state, steps.step, steps.position.epoch
        return steps.state

    def go_back(self, state: TrainState) -> None:
        """Go back to an earlier state, and forget the rows after it."""
        self.state, self.step = state, state.steps_taken
        self.history = [row for row in self.history if row["step"] <= self.step]

    @property
    def is_primary(self) -> bool:
        """Whether this process is the one that writes files; of one process, True."""
        return self.group.is_primary

    def params(self) -> PyTree:
        """Return a copy of the parameters as the task's `init` shapes them.

        Of members each leaf has a leading dim of members.
        """
        return jax.tree.map(jnp.copy, self.program.to_canonical(self.state).params)

    def evaluate(self, state: TrainState) -> dict[str, Any] | None:
        """Return the metrics of another state on the evaluation data; None without such data."""
        return self._evaluate(state)

    @property
    def hyperparams(self) -> dict[str, Any]:
        """What `optax.inject_hyperparams` keeps in the optimizer's state, by name.

        Numbers; of members an array `(members,)` each.
        """
        return self.program.hyperparams.read(self.state)

    def set_hyperparams(self, **values: Any) -> None:
        """Set what the optimizer reads from the next step on, such as `learning_rate=1e-4`.

        The optimizer keeps it in its state by `optax.inject_hyperparams`, so a checkpoint has it,
        and a run that is resumed goes on with it. A hook may set it where the state is that of a
        known step: `on_start`, `on_evaluation` and `on_epoch`.

        **Arguments:** a number for each name, of members also an array `(members,)`.

        Raises `TaskError` for a name that the optimizer's state does not have or that follows a
        schedule, for other values, in other hooks, and with parameter servers.
        """
        if not self._settable:
            when = (
                "set them in on_start, on_evaluation or on_epoch. on_step is called some steps "
                "late, so that a resumed run would set them elsewhere; for a value of each step "
                "give the optimizer a schedule."
            )
            if self._servers:
                when = (
                    "with servers= the optimizer's state is on the servers. Give the optimizer a "
                    "schedule, or train without servers."
                )
            raise errors.TaskError(f"run.set_hyperparams(): {when}")
        self.state = self.program.hyperparams.set(self.state, values)

    @contextlib.contextmanager
    def settable(self) -> Iterator[None]:
        """Let hooks set hyperparameters: the loop takes the state that they leave."""
        self._settable = not self._servers
        try:
            yield
        finally:
            self._settable = False

    def metric_names(self) -> list[str] | None:
        """Return the metrics of an epoch's row, before there is one; None where that is not known.

        A name may be a pattern, such as `eval_auc_*`.
        """
        if self.adds_metrics:
            return None
        own = ("skipped", "seconds", "examples_per_second", "learning_rate")
        return [*self.program.metric_names(evaluated=self.evaluates), *own]

    def stop(self, reason: str) -> None:
        """End training: from `on_epoch` at once, from `on_step` after the call under way."""
        self.stopped = self.stopped or reason


class Hooks:
    """The callbacks of a run, called in their order.

    An error in one of them ends training, with a note that names the callback and its hook.
    """

    def __init__(self, callbacks: Sequence[Any]) -> None:
        self._callbacks = dict(zip(_names(callbacks), callbacks, strict=True))
        self._of = {
            hook: [(name, one) for name, one in self._callbacks.items() if hasattr(one, hook)]
            for hook in (*HOOKS, "next_stop", "get_state", "set_state", "wrap_optimizer")
        }

    def call(self, hook: str, *arguments: Any) -> None:
        """Call a hook of all callbacks that have it."""
        for name, _ in self._of[hook]:
            self._call(name, hook, *arguments)

    def save(self, run: Run, step: int) -> None:
        """Call `on_save` of all callbacks; where one raises in a process, raise in all of them."""
        for name, _ in self._of["on_save"]:
            run.group.together(functools.partial(self._call, name, "on_save", run, step))

    def steps(self, run: Run, calls: Iterable[list[Row]]) -> list[Row]:
        """Call `on_step` for each step of some calls of the loop, and return their rows."""
        rows = [row for rows in calls for row in rows]
        for name, one in self._of["on_step"]:
            on_step = one.on_step
            with _named(name, "on_step"):
                for row in rows:
                    on_step(run, row)
        return rows

    def report(self, run: Run, row: Row) -> None:
        """Call `on_evaluation` and, with an epoch's row, `on_epoch`; the history has epochs."""
        with run.settable():
            if run.evaluates:
                self.call("on_evaluation", run, row)
            if row["kind"] == "epoch":
                self.call("on_epoch", run, row)
                run.history.append(row)

    @contextlib.contextmanager
    def running(self, run: Run) -> Iterator[None]:
        """Call `on_start` now and `on_stop` at the end, after an error too."""
        kinds = [type(one).__module__ for one in self._callbacks.values()]
        run.adds_metrics = not all(kind.startswith("plurax.") for kind in kinds)
        with run.settable():
            self.call("on_start", run)
        try:
            yield
        except BaseException as error:
            run.stopped, run.failed = f"{type(error).__name__}: {error}", True
            raise
        finally:
            self.call("on_stop", run)

    def next_stop(self, step: int) -> int | None:
        """Return the first step after `step` that a callback has to see."""
        found = [self._call(name, "next_stop", step) for name, _ in self._of["next_stop"]]
        return min((one for one in found if one is not None), default=None)

    def stops_at(self, step: int) -> bool:
        """Return whether a callback has to see this step."""
        return self.next_stop(step - 1) == step

    def wrap_optimizer(self, optimizer: Any) -> Any:
        """Return the optimizer as the callbacks that follow the parameters want it."""
        for name, _ in self._of["wrap_optimizer"]:
            optimizer = self._call(name, "wrap_optimizer", optimizer)
        return optimizer

    def to_json(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of the callbacks."""
        return {name: self._state(name) for name, _ in self._of["get_state"]}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Give the callbacks what a checkpoint kept of them; a new one starts anew."""
        for name, _ in self._of["set_state"]:
            if name in saved:
                self._call(name, "set_state", saved[name])

    def _state(self, name: str) -> Any:
        state = self._call(name, "get_state")
        try:
            return json.loads(json.dumps(state))
        except (TypeError, ValueError) as error:
            raise errors.TaskError(
                f"the state of the callback {name} cannot be saved: {error}. get_state() returns "
                "numbers, text, None, and lists and dicts of them."
            ) from None

    def _call(self, name: str, hook: str, *arguments: Any) -> Any:
        with _named(name, hook):
            return getattr(self._callbacks[name], hook)(*arguments)


@contextlib.contextmanager
def _named(callback: str, hook: str) -> Iterator[None]:
    """Say in an error which callback raised it."""
    try:
        yield
    except Exception as error:
        error.add_note(f"This was raised by {hook} of the callback {callback}.")
        raise


def check_callbacks(callbacks: Any) -> Sequence[Any]:
    """Return the callbacks. Raises `TaskError` for what is no list of callbacks."""
    if isinstance(callbacks, str | Mapping) or not isinstance(callbacks, Iterable):
        raise errors.TaskError(
            f"the callbacks are a {type(callbacks).__name__}; write a list: "
            "callbacks=[plurax.callbacks.EarlyStopping('eval_loss')]."
        )
    callbacks = list(callbacks)
    for name, one in zip(_names(callbacks), callbacks, strict=True):
        if isinstance(one, type):
            raise errors.TaskError(
                f"the callback {one.__name__} is a class; write an object of it: "
                f"callbacks=[{one.__name__}(...)]."
            )
        hooks = {hook for hook in dir(one) if hook.startswith("on_")}
        unknown = sorted(hooks - set(HOOKS))
        if unknown or not (hooks or hasattr(one, "wrap_optimizer")):
            has = f"has {', '.join(unknown)}, which nothing calls" if unknown else "has no hook"
            known = ", ".join(f"{hook}({arguments})" for hook, arguments in HOOKS.items())
            raise errors.TaskError(
                f"the callback {name} {has}; the hooks of a callback are {known}."
            )
        for hook in hooks:
            check_takes(f"{hook} of the callback {name}", getattr(one, hook), HOOKS[hook])
        if hasattr(one, "get_state") != hasattr(one, "set_state"):
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
