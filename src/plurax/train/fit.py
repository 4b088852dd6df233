"""`fit`: train, log, evaluate, checkpoint, and stop cleanly."""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from plurax import errors, tree
from plurax.analysis.estimate import Estimate
from plurax.analysis.measured import Measured
from plurax.distributed.environment import attempt
from plurax.distributed.process_group import ProcessGroup, open_group
from plurax.execute.array_data import Position, Ragged
from plurax.execute.check import check_kinds
from plurax.execute.memory_error import out_of_memory_said
from plurax.execute.population import HyperFn
from plurax.execute.program import Program
from plurax.execute.summary import choice_text
from plurax.machine import Machine
from plurax.members import Members
from plurax.notebook import html_table
from plurax.plan import Plan
from plurax.server.account import Account
from plurax.server.coordinator import Coordinator
from plurax.server.servers import Servers
from plurax.sources.adapt import adapt
from plurax.state import TrainState
from plurax.task import Task
from plurax.train.checkpoint import Checkpoints
from plurax.train.data import Data, as_data
from plurax.train.elastic import plan_for_those_left
from plurax.train.epoch_metrics import EpochMetrics, MembersMetrics, NetworkMetrics
from plurax.train.iterate import StepOutput, Turns, train_iter
from plurax.train.log import MetricsLog, Row
from plurax.train.measurements import Measurements, estimate_run
from plurax.train.progress import TrainingProgress
from plurax.train.replica_guard import ReplicaGuard
from plurax.train.restore import (
    make_program,
    members_meta,
    restore,
    saved_tuning,
    with_resampling,
)
from plurax.train.rollback import Rollback, Rollbacks, check_rollback
from plurax.train.run_folder import check_same_run, epoch_length, move_run_aside, save_settings
from plurax.train.saving import Saving, check_room
from plurax.train.serve import check_servers, open_servers, serve_iter
from plurax.train.stop_signals import StopSignals
from plurax.train.watchdog import Watchdog
from plurax.validate import check_seed, local_path, whole_number

SHOWN_ROWS = 10


@dataclasses.dataclass(frozen=True)
class Fit:
    """The result of `fit`.

    **Fields:**

    - `state`: the trained state; of a population every leaf has a leading dim of members.
    - `program`: the compiled program, to predict and evaluate with.
    - `history`: one row per epoch: weighted means of the training metrics, those of the evaluation
      under `eval_...`, `seconds`, `examples_per_second`, `skipped`. Of a population the medians
      over members, `loss_best` and `loss_worst`, and all values in lists under `members`.
    - `interrupted`: the signal that ended training early (`"SIGINT"`, `"SIGTERM"`), or None.
    - `estimate`: of a step on the `machine` that was given, or None.
    - `measured`: what a step took, held and sent beside it, or None.
    - `staleness`: with parameter servers how old gradients were, and all that servers and workers
      did; or None.
    """

    state: TrainState
    program: Program
    history: list[Row]
    interrupted: str | None = None
    estimate: Estimate | None = None
    measured: Measured | None = None
    staleness: Account | None = None

    def __repr__(self) -> str:
        last = self.history[-1] if self.history else {}
        parts = [f"{len(self.history)} epochs"]
        parts += [f"{name}={last[name]:.4g}" for name in ("loss", "eval_loss") if name in last]
        parts += [self.measured.figures()] if self.measured else []
        parts += [f"interrupted={self.interrupted!r}"] if self.interrupted else []
        return f"Fit({', '.join(parts)})"

    def _repr_html_(self) -> str:
        shown = self.history[-SHOWN_ROWS:]
        columns = [name for name, value in (shown or [{}])[-1].items() if isinstance(value, Real)]
        rows = [[row.get(name, "") for name in columns] for row in shown]
        left_out = len(self.history) - len(shown)
        note = f", the last {len(shown)} shown" if left_out else ""
        return html_table(f"{self!r}{note}", columns, rows)


def fit(
    task: Task | HyperFn,
    optimizer: optax.GradientTransformation | HyperFn,
    data: PyTree | Iterable[PyTree],
    *,
    plan: Plan = Plan(),  # noqa: B008  frozen
    members: Members | None = None,
    epochs: int = 1,
    batch_size: int | None = None,
    seed: int = 0,
    evaluation: PyTree | Iterable[PyTree] | None = None,
    shuffle: bool = True,
    ragged: Ragged = "pad",
    local_batches: bool = False,
    output: str | Path | None = None,
    resume: bool = False,
    restart: bool = False,
    report_every: int = 1,
    checkpoint_every: int | None = None,
    check_replicas_every: int | None = 200,
    resident: bool | None = None,
    progress: bool = True,
    machine: Machine | None = None,
    servers: Servers | None = None,
    rollback: Rollback = Rollback(),  # noqa: B008  frozen
    devices: Sequence[jax.Device] | None = None,
    command: Mapping[str, Any] | None = None,
) -> Fit:
    """Train a task on data.

    **Arguments:**

    - `task`, `optimizer`, `plan`: the task, the optimizer and the plan. With members, task and
      optimizer may be functions of a member's hyperparameters: `hyper -> Task`, `hyper -> optax
      transformation`.
    - `data`: arrays in a tree (a dict of arrays with the same leading dim), or what becomes one (a
      table of pandas, polars or Arrow, a Hugging Face data set, tensors, a file), shuffled anew
      every epoch; or a Grain dataset of batches, a PyTorch Dataset or DataLoader, a
      `tf.data.Dataset`, or any iterable of batches that can be read again.
    - `members`: a population to train instead of one network.
    - `epochs`: passes over the data.
    - `batch_size`: examples per step; required where the data have no batches, else taken from
      the first one.
    - `seed`: seed of initialisation, dropout and order; with it training repeats bit for bit. For
      members, each member's seed is used instead.
    - `evaluation`: data to evaluate on after each epoch, over all examples exactly.
    - `shuffle`: whether arrays are read in a new order each epoch.
    - `ragged`: a smaller last batch is trained exactly as it is (`"pad"`), left out (`"drop"`) or
      refused (`"error"`).
    - `local_batches`: whether of several processes each gives its own rows of every batch, equally
      many; else all give the same batches. Of arrays each reads only its own rows anyway.
    - `output`: a directory for `metrics.jsonl`, TensorBoard events, `plan.toml` and checkpoints.
    - `resume`: continue from the newest checkpoint in `output`, bit for bit as if never stopped.
      With more members than it holds, the new ones first catch up.
    - `restart`: start from scratch in an `output` that holds a run, which is moved to a folder
      `before.1` (2, 3, ...) in it.
    - `report_every`: epochs between rows of history, evaluations and checkpoints.
    - `checkpoint_every`: steps between additional checkpoints.
    - `check_replicas_every`: steps between comparisons of what several devices hold alike, bit by
      bit, at the end of the call in which they are due; before every checkpoint, too. None: never.
    - `resident`: keep arrays on the devices and run many steps in one compiled loop; the default is
      to do so where they take at most a quarter of the memory budget, and always for members.
      Members whose data are not resident all see the same batches, in the order of `seed`.
    - `progress`: show a bar, or lines where the output is not a terminal.
    - `machine`: estimate a step on this machine before the first one, and show and log what was
      predicted beside what is measured. Of a population, and with servers, nothing is predicted.
    - `servers`: workers that compute gradients, each under the plan, and servers that hold the
      parameters, in place of one program that does both.
    - `rollback`: when bad steps in a row roll the run back to a checkpoint that is proven good, and
      their data are skipped; only with `output`, and for one network without servers.
    - `devices`: the devices, default all that JAX sees.
    - `command`: how the run is started, written to `command.json` in `output` before the first
      step; `plurax train` gives it, and `plurax replay` reads it.

    Ctrl-C and SIGTERM end training after the current call (a step, or about a quarter of a second
    of steps over resident data), save, and return with `interrupted` set; a second signal ends the
    process at once. A step whose loss or gradient is not finite leaves the state unchanged, is
    counted in `state.skipped` and reported; a member with such a step is frozen.

    **Returns:** a `Fit`.

    Raises `PlanError`, `TaskError`, `BatchError`, `MembersError`, `MachineError`,
    `CheckpointError`, and `ReplicaError` for a device with faulty memory or arithmetic, before
    anything of it is saved.
    """
    numbers = (epochs, seed, report_every, checkpoint_every)
    epochs, seed, report_every, checkpoint_every = _whole_numbers(*numbers, check_replicas_every)
    plan = _check_arguments(task, optimizer, plan, members, servers)
    rule = check_rollback(rollback, members, servers)
    output = None if output is None else _output(output)
    resume, restart = (True, False) if attempt() else (resume, restart)  # by a launcher
    # Check everything before compiling, and lock the output before changing anything in it.
    source, like = as_data(data, batch_size=batch_size, seed=seed, shuffle=shuffle, ragged=ragged,
                           local=local_batches)  # fmt: skip
    if members is not None:
        source = with_resampling(members, source)
        plan = saved_tuning(plan, output) if resume else plan
    with contextlib.ExitStack() as stack:
        group = stack.enter_context(contextlib.closing(open_group()))
        dog = stack.enter_context(Watchdog.of_gang(group.count, group.index))
        checkpoints = _open_checkpoints(stack, group, output, resume, restart)
        program = make_program(task, optimizer, plan, like, members, source, resident, devices)
        machine = None if servers else machine
        estimated = estimate_run(program, optimizer, like, source, resident, machine)
        evaluation = _check_run(program, evaluation, output)
        run = {"seed": seed, "batch_size": program.batch_size, "shuffle": bool(shuffle),
               "ragged": ragged, "epoch_length": epoch_length(source)}  # fmt: skip
        _move_aside(group, checkpoints if restart else None)
        rollbacks = Rollbacks(rule, checkpoints, group)
        begin = functools.partial(_start, program, checkpoints, source, seed, run, rollbacks)
        state, position, metrics = begin(resume)
        log, history = _open_log(stack, group, output, program, estimated, state, resume, command)
        rollbacks.write(log, state.steps_taken)
        stop = stack.enter_context(StopSignals())
        bar = _open_bar(stack, program, source, epochs, state, progress and group.is_primary)
        saving = Saving(checkpoints, log, bar.note, group)
        measurements = Measurements(estimated, machine, program, bar.note)
        stack.enter_context(out_of_memory_said(program, lambda: _saved(checkpoints, group)))
        coordinator = open_servers(stack, servers, program, optimizer, state, source, like, run,
                                   position, checkpoints, bar.note)  # fmt: skip
        when = (epochs, report_every, checkpoint_every)
        guard = ReplicaGuard(program, None if servers else check_replicas_every, group)
        loop = functools.partial(_turns, program, coordinator, source, resident, stop, when, group)
        turns = Turns(loop, state, position)
        for steps in bar.compiled(dog.watch(turns, lambda: saving.newest), _described(program)):
            # The order matters: count, evaluate, log, save, and only then stop. A stop therefore
            # always leaves a checkpoint of exactly what was logged.
            state = steps.state
            stopping = stop.agree(group, steps.fetched)  # read once; later ones come next
            at_epoch = steps.position.epoch
            report = steps.epoch_done and (at_epoch % report_every == 0 or at_epoch == epochs)
            due = checkpoint_every is not None and steps.step % checkpoint_every == 0
            save = checkpoints is not None and (report or due or stopping is not None)
            last = stopping is not None or (report and at_epoch == epochs)
            saving.check(steps.step)
            guard.check(steps.step, state, now=save)
            fetched = metrics.add(steps, fetch_all=report or save or bool(stopping))
            _write(log, [row for each in fetched for row in metrics.step_rows(each)])
            if rollbacks.due(fetched, source.batches_per_epoch, saving):
                state, metrics, history = _go_back(dog, begin, turns, log, history, rollbacks)
                continue
            bar.advance(steps.step, at_epoch, *_summary(metrics, coordinator))
            if group.is_primary:
                metrics.warn_not_finite(steps.step)
            if report:
                means = _evaluated(program, state, evaluation, dog)
                row = metrics.epoch_row(steps.step, at_epoch, means)
                row |= measurements.add(steps, metrics) | _account_row(coordinator)
                _report(row, history, bar, measurements, log)
                metrics = metrics.fresh()
            if save:
                meta = _meta(run, steps, metrics, program, rollbacks, group, local_batches)
                canonical = functools.partial(program.to_canonical, state)
                with dog.work("save"):
                    saving.save(steps.step, canonical, meta, steps.residuals, last=last)
            if stopping:
                measurements.add(steps, metrics, reported=report)
                bar.note(_stopped(stopping, steps.step, output))
                break
            stop.name = stop.name or ("SIGPIPE" if bar.closed else None)
            if report:
                metrics.start()
        guard.wait()
        measurements.show(at_end=True)
        stop.name = stop.agree(group, ready=True)
    account, state = coordinator.account if coordinator else None, program.to_canonical(state)
    return Fit(state, program, history, stop.name, estimated, measurements.measured, account)


# --- Checkpoints and the log -------------------------------------------------------------------


def _open_checkpoints(
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
        raise errors.resume_and_restart()
    if output is None:
        return None
    checkpoints = stack.enter_context(Checkpoints(Path(output) / "checkpoints", group=group))
    if not resume and not restart:
        group.on_primary(lambda: _check_empty(checkpoints))
    checkpoints.lock()
    return checkpoints


def _move_aside(group: ProcessGroup, checkpoints: Checkpoints | None) -> None:
    """Move a run that is not wanted any more to another folder; do nothing without one."""
    if checkpoints is not None:
        group.on_primary(lambda: move_run_aside(checkpoints))


def _check_empty(checkpoints: Checkpoints) -> None:
    if checkpoints.steps():
        output = checkpoints.directory.parent
        raise errors.output_has_run(str(output), checkpoints.steps()[-1])
    if checkpoints.damaged():
        raise errors.checkpoint_all_damaged(str(checkpoints.directory), checkpoints.damaged())


def _whole_numbers(
    epochs: int, seed: int, report_every: int, checkpoint_every: int | None, compare_every: Any
) -> tuple[int, int, int, int | None]:
    """Return `fit`'s numbers as Python integers, which JSON can encode. Raises for others."""

    def positive(given: Any, refused: Callable[[Any], Exception]) -> int:
        number = whole_number(given)
        if number is None:
            raise refused(given)
        return number

    if compare_every is not None:
        positive(compare_every, errors.check_replicas_every_not_positive)
    every = checkpoint_every
    if every is not None:
        every = positive(every, errors.checkpoint_every_not_positive)
    return (
        positive(epochs, errors.epochs_not_positive),
        check_seed(seed),
        positive(report_every, errors.report_every_not_positive),
        every,
    )


def _output(given: str | Path) -> Path:
    """Return the output directory, if it can be one. Raises `CheckpointError`."""
    directory = local_path(given)
    there = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    if not there.is_dir():
        raise errors.output_is_a_file(str(directory), str(there))
    if not os.access(there, os.W_OK | os.X_OK):
        raise errors.checkpoint_not_written(str(directory), f"no permission to write in {there}")
    return directory


def _check_arguments(
    task: Any, optimizer: Any, plan: Plan, members: Members | None, servers: Servers | None
) -> Plan:
    """Raise for arguments of wrong kinds; return the plan, for the devices that are left."""
    check_kinds(task, optimizer, plan, members)
    check_servers(servers, task, plan, members)
    return plan_for_those_left(plan, task)


def _check_run(
    program: Program, evaluation: PyTree | Iterable[PyTree] | None, output: Path | None
) -> PyTree | Iterable[PyTree] | None:
    """Raise before the first step what the evaluation and the checkpoints would raise after it.

    Return the evaluation as it is read, so that a table is converted once.
    """
    if evaluation is not None:
        evaluation = adapt("evaluation", evaluation)
        program.check_evaluation(evaluation)
    _check_saveable(program.canonical_shapes, output)
    return evaluation


def _check_saveable(state: TrainState, output: Path | None) -> None:
    """Raise `CheckpointError` before the first step for a leaf that no checkpoint can hold.

    And for a disk that has no room for one.
    """
    if output is None:
        return
    parts = {"params": state.params, "opt_state": state.opt_state, "model": state.model_state}
    for path, leaf in tree.named_leaves(parts).items():
        if jnp.issubdtype(leaf.dtype, jax.dtypes.extended) or 0 in leaf.shape:
            raise errors.leaf_not_saveable(path, f"{leaf.dtype}{list(leaf.shape)}")
    check_room(output, state)


def _new_metrics(program: Program, saved: dict[str, Any] | None = None) -> EpochMetrics:
    if program.members is not None:
        return MembersMetrics(program.members, saved)
    return NetworkMetrics(saved)


def _start(
    program: Program,
    checkpoints: Checkpoints | None,
    source: Data,
    seed: int,
    run: dict[str, Any],
    rollbacks: Rollbacks,
    resume: bool,
) -> tuple[TrainState, Position, EpochMetrics]:
    """Return the state to go on from, where in the data, and the sums of its epoch."""
    if checkpoints and resume:
        rollbacks.read()
        restored = restore(program, checkpoints, source)
        if restored is not None:
            state, meta = restored
            check_same_run(str(checkpoints.directory), meta, run)
            position, tally = rollbacks.go_on(state.steps_taken, meta)
            return state, position, _new_metrics(program, tally)
        rollbacks.forget()
    state = program.init(seed if program.members is None else None)
    return state, Position(), _new_metrics(program)


def _open_log(
    stack: contextlib.ExitStack,
    group: ProcessGroup,
    output: str | Path | None,
    program: Program,
    estimated: Estimate | None,
    state: TrainState,
    resume: bool,
    command: Mapping[str, Any] | None,
) -> tuple[MetricsLog | None, list[Row]]:
    """Return the log, None in processes that write none, and the epochs it held before."""
    if output is None:
        return None, []
    log: MetricsLog | None = None
    resume_step = state.steps_taken if resume else None

    def opened() -> list[Row]:
        nonlocal log
        log = stack.enter_context(MetricsLog(Path(output), resume_step=resume_step))
        machine = estimated.machine if estimated else None
        save_settings(program.plan, machine, command, Path(output))
        return log.epochs

    history = list(group.on_primary(opened))
    return log, history


def _open_bar(
    stack: contextlib.ExitStack,
    program: Program,
    source: Data,
    epochs: int,
    state: TrainState,
    progress: bool,
) -> TrainingProgress:
    per_epoch = source.batches_per_epoch
    steps = per_epoch and per_epoch * epochs
    bar = TrainingProgress(epochs, steps, state.steps_taken, show=progress)
    stack.enter_context(bar)
    if program.chose:
        bar.note(choice_text(program.plan))
    return bar


def _write(log: MetricsLog | None, rows: Iterable[Row]) -> None:
    for row in rows:
        if log:
            log.write(row)


def _evaluated(
    program: Program, state: TrainState, data: PyTree | Iterable[PyTree] | None, dog: Watchdog
) -> dict[str, Any] | None:
    if data is None:
        return None
    with dog.work("evaluate"):
        return program.evaluate(state, data)


def _turns(
    program: Program,
    coordinator: Coordinator | None,
    source: Data,
    resident: bool | None,
    stop: StopSignals,
    when: tuple[int, int, int | None],
    group: ProcessGroup,
    state: TrainState,
    start: Position,
) -> Iterator[StepOutput]:
    """Return the iterator of the training loop: of one program, or of workers and servers."""
    schedule: Any = dict(zip(("epochs", "report_every", "checkpoint_every"), when, strict=True))
    schedule["start"] = start
    if coordinator is None:
        schedule |= {"resident": resident, "group": group, "stopping": stop.called}
        return train_iter(program, state, source, **schedule)
    return serve_iter(coordinator, program, state, source, stop.called, **schedule)


def _report(
    row: Row,
    history: list[Row],
    bar: TrainingProgress,
    measurements: Measurements,
    log: MetricsLog | None,
) -> None:
    """Add the row of an epoch to the history and the log, and show it."""
    history.append(row)
    bar.epoch(row)
    measurements.show()
    _write(log, [row])


def _go_back(
    dog: Watchdog,
    begin: Callable[[bool], tuple[TrainState, Position, EpochMetrics]],
    turns: Turns,
    log: MetricsLog | None,
    history: list[Row],
    rollbacks: Rollbacks,
) -> tuple[TrainState, EpochMetrics, list[Row]]:
    """Let the loop go on from the newest checkpoint; drop what was logged after it."""
    with dog.work("save"):
        state, position, metrics = begin(True)
        step = state.steps_taken
        if log:
            log.cut(step)
        rollbacks.write(log, step)
        turns.restart(state, position)
    return state, metrics, [row for row in history if row["step"] <= step]


def _meta(
    run: dict[str, Any],
    steps: StepOutput,
    metrics: EpochMetrics,
    program: Program,
    rollbacks: Rollbacks,
    group: ProcessGroup,
    local: bool,
) -> dict[str, Any]:
    """Return what a checkpoint says of the run beside its state.

    Where each process has its own rows (`local`), the state of the iterators of all.
    """
    position = steps.position.to_json()
    if local:
        position["iterator"] = group.all_gather(position["iterator"])
    now = {"position": position, "tally": metrics.to_json()}
    return {**run, **now, **members_meta(program), "rollbacks": rollbacks.to_json()}


def _described(program: Program) -> str:
    return f"{program.plan.sizes_text()}, batches of {program.batch_size}"


def _summary(metrics: EpochMetrics, coordinator: Coordinator | None) -> tuple[str, float]:
    text = metrics.summary() + (f"  {coordinator.summary()}" if coordinator else "")
    return text, metrics.examples_per_second


def _account_row(coordinator: Coordinator | None) -> Row:
    return {} if coordinator is None else {"servers": coordinator.account.to_json()}


def _saved(checkpoints: Checkpoints | None, group: ProcessGroup) -> str:
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


def _stopped(name: str, step: int, output: str | Path | None) -> str:
    if output is None:
        return f"{name}: stopped after step {step}; nothing was saved (no output directory)."
    return f"{name}: stopped after step {step} and saved in {os.fspath(output)}; resume continues."
