"""The run as its hooks see it."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
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


@dataclasses.dataclass(frozen=True)
class Due:
    """What follows upon a call of the loop.

    **Fields:** `report`, the row of an epoch; `evaluate`, a row within an epoch; `save`, a
    checkpoint; `end`, why training ends, or None.
    """

    report: bool = False
    evaluate: bool = False
    save: bool = False
    end: str | None = None

    @property
    def any(self) -> bool:
        """Whether anything is, for which the metrics of all steps have to be there."""
        return self.report or self.evaluate or self.save or self.end is not None


class Run:
    """What a callback is given: the run as it is now.

    **Attributes:**

    - `program`: the compiled program; `program.plan` is its plan.
    - `members`: the population, None for one network.
    - `call`: the last call of the loop, None before the first; `due`: what follows upon it.
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
    - `interrupted`: the signal that ends training, None without one.
    - `rewinding`: whether a hook wants to go on from an earlier checkpoint.
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
        self.call: StepOutput | None = None
        self.due = Due()
        self.stopped: str | None = None
        self.interrupted: str | None = None
        self.failed = self.rewinding = False
        self._evaluate, self._servers, self._settable = evaluate, servers, False
        self.evaluates, self.adds_metrics = evaluates, False

    def see(self, call: StepOutput) -> TrainState:
        """Take what a call of the training loop returned."""
        self.call = call
        self.state, self.step, self.epoch = call.state, call.step, call.position.epoch
        return call.state

    def go_back(self, state: TrainState) -> None:
        """Go back to an earlier state, and forget the rows after it."""
        self.state, self.step, self.rewinding = state, state.steps_taken, False
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
