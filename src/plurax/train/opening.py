"""Open what a run needs before its first step: its folder, its state, its log, its bar."""

import contextlib
import functools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxtyping import PyTree

from plurax import errors
from plurax.analysis.estimate import Estimate
from plurax.checkpoint import Checkpoints
from plurax.checkpoint.restore import catch_up, restore
from plurax.distributed.process_group import ProcessGroup
from plurax.execute.array_data import Position
from plurax.execute.program import Program
from plurax.execute.summary import choice_text
from plurax.guards.rollback import Rollbacks
from plurax.guards.watchdog import Watchdog
from plurax.loop.call_hooks import Callbacks
from plurax.loop.data import Data
from plurax.loop.epoch_metrics import EpochMetrics, MembersMetrics, NetworkMetrics
from plurax.loop.log_rows import Row
from plurax.notebook import in_notebook
from plurax.progress.console_progress import ConsoleProgress
from plurax.progress.notebook_progress import NotebookProgress
from plurax.progress.training_progress import TrainingProgress
from plurax.run_folder.folder import check_same_run, move_run_aside, save_settings
from plurax.run_folder.log import MetricsLog
from plurax.run_folder.log_check import damage_row, log_damage
from plurax.state import TrainState
from plurax.user_frames import warn


def open_checkpoints(
    stack: contextlib.ExitStack,
    group: ProcessGroup,
    output: str | Path | None,
    resume: bool,
    restart: bool,
) -> Checkpoints | None:
    """Return the checkpoints of `output`, locked for this process, or None without an output.

    Raises `CheckpointError`, before changing anything, for an output that holds another run.
    """
    if resume and restart:
        raise errors.CheckpointError(
            "resume goes on from the newest checkpoint and restart starts from scratch: pass one "
            "of them."
        )
    if output is None:
        return None
    checkpoints = stack.enter_context(Checkpoints(Path(output) / "checkpoints", group=group))
    if not resume and not restart:
        group.on_primary(lambda: _check_empty(checkpoints))
    checkpoints.lock()
    return checkpoints


def move_aside(group: ProcessGroup, checkpoints: Checkpoints | None) -> None:
    """Move a run that is not wanted any more to another folder; do nothing without one."""
    if checkpoints is not None:
        group.on_primary(lambda: move_run_aside(checkpoints))


def _check_empty(checkpoints: Checkpoints) -> None:
    if checkpoints.steps():
        output = checkpoints.directory.parent
        raise errors.CheckpointError(
            f"{output} already holds a run, saved at step {checkpoints.steps()[-1]}. To continue "
            "it, pass resume=True (--resume on the command line); to start anew, pass restart=True "
            "(--restart), which keeps it as before.1, or choose another output directory."
        )
    if checkpoints.damaged():
        raise errors.checkpoint_all_damaged(str(checkpoints.directory), checkpoints.damaged())


def _new_metrics(program: Program, saved: dict[str, Any] | None = None) -> EpochMetrics:
    if program.members is not None:
        return MembersMetrics(program.members, saved)
    return NetworkMetrics(saved)


def start(
    program: Program,
    checkpoints: Checkpoints | None,
    source: Data,
    seed: int,
    run: dict[str, Any],
    rollbacks: Rollbacks,
    callbacks: Callbacks,
    named: Sequence[str],
    resume: bool,
) -> tuple[TrainState, Position, EpochMetrics]:
    """Return the state to go on from, where in the data, and the sums of its epoch.

    **Arguments:** `named`, arguments of `experiment()` that may differ from those of the run.

    The callbacks get the state that the checkpoint has of them.
    """
    if checkpoints and resume:
        rollbacks.read()
        restored = restore(program, checkpoints, functools.partial(catch_up, program, source))
        if restored is not None:
            state, meta = restored
            check_same_run(str(checkpoints.directory), meta, run, named)
            position, tally = rollbacks.go_on(state.steps_taken, meta)
            callbacks.restore(meta.get("callbacks", {}))
            return state, position, _new_metrics(program, tally)
        rollbacks.forget()
    state = program.init(seed if program.members is None else None)
    return state, Position(), _new_metrics(program)


def open_log(
    stack: contextlib.ExitStack,
    group: ProcessGroup,
    output: str | Path | None,
    program: Program,
    estimated: Estimate | None,
    state: TrainState,
    resume: bool,
    arguments: Mapping[str, Any],
) -> tuple[MetricsLog | None, list[Row]]:
    """Return the log, None in processes that write none, and the epochs it held before."""
    if output is None:
        return None, []
    log: MetricsLog | None = None
    resume_step = state.steps_taken if resume else None

    def opened() -> list[Row]:
        nonlocal log
        damage = log_damage(Path(output), resume_step) if resume_step else None
        log = stack.enter_context(MetricsLog(Path(output), resume_step=resume_step))
        if damage is not None:
            warn(f"{log.path}: {damage[1]}", errors.DamagedLogWarning)
            log.write(damage_row(*damage))
        machine = estimated.machine if estimated else None
        save_settings(program, machine, arguments, state.steps_taken, Path(output))
        return log.epochs

    history = list(group.on_primary(opened))
    return log, history


def evaluated(
    program: Program,
    data: PyTree | Iterable[PyTree] | None,
    watchdog: Watchdog,
    state: TrainState,
) -> dict[str, Any] | None:
    """Return the metrics of a state on evaluation data; None without them."""
    if data is None:
        return None
    with watchdog.work("evaluate"):
        return program.evaluate(state, data)


def saved_text(checkpoints: Checkpoints | None, group: ProcessGroup) -> str:
    """Return a sentence on what was saved, for the error that ends training."""
    if checkpoints is None:
        return "Nothing was saved (no output directory)."
    group.leave()  # the others may have memory left, and not be here
    with contextlib.suppress(errors.CheckpointError, errors.PeerError):
        checkpoints.wait()
    steps = checkpoints.steps()
    if not steps:
        return "No checkpoint was saved yet."
    return f"The checkpoint of step {steps[-1]} is saved; resume under another plan goes on there."


def open_bar(
    stack: contextlib.ExitStack,
    program: Program,
    per_epoch: int | None,
    epochs: int,
    max_steps: int | None,
    state: TrainState,
    progress: bool,
) -> TrainingProgress:
    """Return the bar of a run, begun at its state.

    **Arguments:** `per_epoch`, steps of an epoch, None where unknown.
    """
    steps = per_epoch and min(per_epoch * epochs, max_steps or per_epoch * epochs)
    kind = NotebookProgress if in_notebook() else ConsoleProgress
    bar = kind(epochs, steps, state.steps_taken, show=progress)
    stack.enter_context(bar)
    if program.chose:
        bar.note(choice_text(program.plan))
    if steps and state.steps_taken >= steps:
        bar.note(f"nothing is left to train: the run is at step {state.steps_taken} of {steps}")
    return bar
