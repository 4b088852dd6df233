"""`fit`: train, log, evaluate, checkpoint, and stop cleanly."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import optax
from jaxtyping import PyTree

import plurax.train
from plurax.analysis.estimate import Estimate
from plurax.analysis.measured import Measured
from plurax.checkpoint.restore import (
    make_program,
    saved_tuning,
)
from plurax.distributed.environment import attempt
from plurax.distributed.process_group import open_group
from plurax.execute.array_data import Ragged
from plurax.execute.memory_error import out_of_memory_said
from plurax.execute.population import HyperFn
from plurax.execute.program import Program
from plurax.guards.replica_guard import ReplicaGuard
from plurax.guards.rollback import Rollback, Rollbacks, check_rollback
from plurax.guards.stop_signals import StopSignals
from plurax.guards.watchdog import Watchdog
from plurax.loop.call_hooks import Callbacks
from plurax.loop.data import as_data
from plurax.loop.iterate import train_iter
from plurax.loop.log_rows import Row
from plurax.loop.planned_end import PlannedEnd, check_limits
from plurax.loop.run import Run
from plurax.loop.training_loop import TrainingLoop
from plurax.machine import Machine
from plurax.members import Members
from plurax.notebook import html_table
from plurax.plan import Plan
from plurax.run_folder.folder import epoch_length
from plurax.run_folder.run_file import experiment_values
from plurax.server.account import Account
from plurax.server.servers import Servers
from plurax.state import TrainState
from plurax.task import Task
from plurax.train.fit_arguments import (
    check_arguments,
    check_run,
    checked_cadence,
    output_folder,
)
from plurax.train.hook_order import ordered_hooks
from plurax.train.measurements import estimate_run, measure_run
from plurax.train.opening import (
    evaluated,
    move_aside,
    open_bar,
    open_checkpoints,
    open_log,
    saved_text,
    start,
)
from plurax.train.other_names import answers_other_names
from plurax.train.serve import open_servers, serve_iter
from plurax.validate import check_seed

if TYPE_CHECKING:
    import matplotlib.figure

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
    - `stopped`: why training ended before its last epoch as planned: what a callback said, or the
      limit of steps or seconds; or None.
    - `estimate`: of a step on the `machine` that was given, or None.
    - `measured`: what a step took, held and sent beside it, or None.
    - `staleness`: with parameter servers how old gradients were, and all that servers and workers
      did; or None.
    """

    state: TrainState
    program: Program
    history: list[Row]
    interrupted: str | None = None
    stopped: str | None = None
    estimate: Estimate | None = None
    measured: Measured | None = None
    staleness: Account | None = None

    def __repr__(self) -> str:
        last = self.history[-1] if self.history else {}
        parts = [f"{len(self.history)} epochs"]
        parts += [f"{name}={last[name]:.4g}" for name in ("loss", "eval_loss") if name in last]
        parts += [self.measured.figures()] if self.measured else []
        parts += [f"interrupted={self.interrupted!r}"] if self.interrupted else []
        parts += [f"stopped={self.stopped!r}"] if self.stopped else []
        return f"Fit({', '.join(parts)})"

    def plot(self, path: str | Path | None = None) -> "matplotlib.figure.Figure":
        """Draw the curves of training and evaluation; of members the median, in bands of all.

        **Arguments:** `path`, of the picture, if it shall be saved; its ending is the format.

        **Returns:** a Matplotlib figure, which a notebook shows. Raises `MissingPackageError`
        without Matplotlib.
        """
        draw: Any = plurax.train.draw_curves
        return draw(self.history, path)

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
    # What is trained, and on what.
    plan: Plan = Plan(),  # noqa: B008  frozen
    members: Members | None = None,
    servers: Servers | None = None,
    devices: Sequence[jax.Device] | None = None,
    compiler_options: Mapping[str, bool | int | float | str] | None = None,
    # How the data are read.
    batch_size: int | None = None,
    seed: int = 0,
    shuffle: bool = True,
    ragged: Ragged = "pad",
    local_batches: bool = False,
    resident: bool | None = None,
    evaluation: PyTree | Iterable[PyTree] | None = None,
    # How long, and what is done how often.
    epochs: int = 1,
    max_steps: int | None = None,
    max_seconds: float | None = None,
    fast_dev_run: int = 0,
    report_every: int = 1,
    evaluate_every: int | None = None,
    checkpoint_every: int | None = None,
    check_replicas_every: int | None = 200,
    # Where it is written, and how it goes on.
    output: str | Path | None = None,
    resume: bool = False,
    restart: bool = False,
    rollback: Rollback = Rollback(),  # noqa: B008  frozen
    command: Mapping[str, Any] | None = None,
    # Who sees it.
    progress: bool = True,
    machine: Machine | None = None,
    callbacks: Sequence[Any] = (),
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

    What is trained, and on what:

    - `members`: a population to train instead of one network.
    - `servers`: workers that compute gradients, each under the plan, and servers that hold the
      parameters, in place of one program that does both.
    - `devices`: the devices, default all that JAX sees.
    - `compiler_options`: options of XLA's compiler, as for `compile`; workers have them too.

    How the data are read:

    - `batch_size`: examples per step, of fewer data all of them; required where the data have no
      batches, else taken from the first one.
    - `seed`: seed of initialisation, dropout and order; with it training repeats bit for bit. For
      members, each member's seed is used instead.
    - `shuffle`: whether arrays are read in a new order each epoch.
    - `ragged`: a smaller last batch is trained exactly as it is (`"pad"`), left out (`"drop"`) or
      refused (`"error"`).
    - `local_batches`: whether of several processes each gives its own rows of every batch, equally
      many; else all give the same batches. Of arrays each reads only its own rows anyway.
    - `resident`: keep arrays on the devices and run many steps in one compiled loop; the default is
      to do so where they take at most a quarter of the memory budget, and always for members.
      Members whose data are not resident all see the same batches, in the order of `seed`.
    - `evaluation`: data to evaluate on after each epoch, over all examples exactly.

    How long, and what is done how often:

    - `epochs`: passes over the data.
    - `max_steps`: steps after which training ends, within an epoch too.
    - `max_seconds`: seconds after which training ends, once the call under way is done.
    - `fast_dev_run`: try everything: train this many steps (True is one), evaluate on as many
      batches, call the callbacks, and write nothing.
    - `report_every`: epochs between rows of history, evaluations and checkpoints.
    - `evaluate_every`: steps between additional evaluations, within an epoch; each calls
      `on_evaluation` and adds a row of kind `"evaluation"` to the log.
    - `checkpoint_every`: steps between additional checkpoints.
    - `check_replicas_every`: steps between comparisons of what several devices hold alike, bit by
      bit, at the end of the call in which they are due; before every checkpoint, too. None: never.

    Where it is written, and how it goes on:

    - `output`: a directory for `metrics.jsonl`, TensorBoard events, `plan.toml` and checkpoints.
    - `resume`: continue from the newest checkpoint in `output`, bit for bit as if never stopped.
      With more members than it holds, the new ones first catch up.
    - `restart`: start from scratch in an `output` that holds a run, which is moved to a folder
      `before.1` (2, 3, ...) in it.
    - `rollback`: when bad steps in a row roll the run back to a checkpoint that is proven good, and
      their data are skipped; only with `output`, and for one network without servers.
    - `command`: what the command line says of the run, for `run.toml`, which is written to
      `output` before the first step, with all other arguments; `plurax train` gives it, and ends
      by itself after a signal: `fit` returns.

    Who sees it:

    - `progress`: show a bar, or lines where the output is not a terminal.
    - `machine`: estimate a step on this machine before the first one, and show and log what was
      predicted beside what is measured. Of a population, and with servers, nothing is predicted.
    - `callbacks`: objects with any of `on_start`, `on_step`, `on_epoch`, `on_evaluation`, `on_save`
      and `on_stop`, which see what happens, may add to a row and may stop the run; those of
      `plurax.callbacks`, or of your own.

    Ctrl-C and SIGTERM end training after the current call (a step, or about a quarter of a second
    of steps over resident data) and save. After Ctrl-C `fit` returns with `interrupted` set;
    SIGTERM then ends the process, with status 75 under a launcher or as one of several. Where the
    caller has a handler of its own, that is called, and `fit` returns if it does. A second signal
    ends the process at once. Where it ends by `max_steps`, `max_seconds` or a callback, it
    evaluates, reports and saves first, and returns with `stopped` set. A step whose loss or
    gradient is not finite leaves the state unchanged, is counted in `state.skipped` and reported; a
    member with such a step is frozen.

    **Returns:** a `Fit`.

    Raises `PlanError`, `TaskError`, `BatchError`, `MembersError`, `MachineError`,
    `CheckpointError`, and `ReplicaError` for a device with faulty memory or arithmetic, before
    anything of it is saved.
    """
    arguments = dict(locals())
    cadence = checked_cadence(
        epochs, report_every, evaluate_every, checkpoint_every, check_replicas_every
    )
    seed = check_seed(seed)
    plan = check_arguments(task, optimizer, plan, members, servers, devices)
    rule = check_rollback(rollback, members, servers)
    called = Callbacks(callbacks)
    max_steps, few = check_limits(max_steps, max_seconds, fast_dev_run)
    if few:
        cadence, max_steps, output = dataclasses.replace(cadence, epochs=1), few, None
    output = None if output is None else output_folder(output)
    resume, restart = (True, False) if attempt() and output else (resume, restart)  # by a launcher

    # Check everything before compiling, and lock the output before changing anything in it.
    source, like = as_data(data, batch_size=batch_size, seed=seed, shuffle=shuffle, ragged=ragged,
                           local=local_batches, members=members)  # fmt: skip
    optimizer = called.wrap_optimizer(optimizer)
    plan = saved_tuning(plan, output) if members is not None and resume else plan
    with contextlib.ExitStack() as stack:
        group = stack.enter_context(contextlib.closing(open_group()))
        watchdog = stack.enter_context(Watchdog.of_gang(group.count, group.index))
        checkpoints = open_checkpoints(stack, group, output, resume, restart)
        program = make_program(task, optimizer, plan, like, members, source, resident, devices,
                               compiler_options)  # fmt: skip
        machine = None if servers else machine
        estimated = estimate_run(program, optimizer, like, source, resident, machine)
        evaluation = check_run(program, evaluation, output, few, evaluate_every)
        settings = {"seed": seed, "batch_size": program.batch_size, "shuffle": bool(shuffle),
                    "ragged": ragged, "epoch_length": epoch_length(source),
                    **experiment_values(command)}  # fmt: skip
        move_aside(group, checkpoints if restart else None)

        # The state to go on from, and what is written from there on.
        rollbacks = Rollbacks(rule, checkpoints, group)
        begin = functools.partial(start, program, checkpoints, source, seed, settings, rollbacks,
                                  called, (command or {}).get("named", ()))  # fmt: skip
        state, position, metrics = begin(resume)
        log, history = open_log(stack, group, output, program, estimated, state, resume, arguments)
        rollbacks.write(log, state.steps_taken)
        stop = stack.enter_context(StopSignals())
        bar = open_bar(stack, program, source.batches_per_epoch, cadence.epochs, max_steps, state,
                       progress and group.is_primary)  # fmt: skip
        stack.enter_context(out_of_memory_said(program, lambda: saved_text(checkpoints, group)))
        coordinator = open_servers(stack, servers, program, optimizer, state, source, like,
                                   settings, position, checkpoints, bar.note)  # fmt: skip

        calls: Any = functools.partial(train_iter, program, data=source, resident=resident,
                                       group=group)  # fmt: skip
        if coordinator is not None:
            calls = functools.partial(serve_iter, coordinator, program, data=source)
        run = Run(program, state, history, output, group, settings,
                  functools.partial(evaluated, program, evaluation, watchdog),
                  evaluation is not None, servers=servers is not None)  # fmt: skip
        ending = PlannedEnd(max_steps, max_seconds, called, run, lambda: stop.name)
        guard = ReplicaGuard(program, None if servers else check_replicas_every, group)
        measurements = measure_run(estimated, machine, program, bar.note)
        hooks = ordered_hooks(called, watchdog, guard, measurements, coordinator, bar, source, log,
                              rollbacks, checkpoints, group)  # fmt: skip
        stack.enter_context(hooks.running(run))
        loop = TrainingLoop(run, hooks, cadence, ending, calls, functools.partial(begin, True),
                            watchdog.work, local_batches)  # fmt: skip
        loop.train(position, metrics)
        stop.name = ending.agree().signal
        planned = None if stop.name else run.stopped
        run.stopped = stop.name or planned
    account, state = coordinator.account if coordinator else None, program.to_canonical(run.state)
    if command is None:
        stop.deliver(group.count)
    return Fit(state, program, run.history, stop.name, planned, estimated,
               measurements.measured if measurements else None, account)  # fmt: skip


if not TYPE_CHECKING:  # a type checker knows the arguments
    fit = answers_other_names(fit)
