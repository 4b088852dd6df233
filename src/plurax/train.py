"""`fit`: trains, logs, evaluates, saves, and stops cleanly."""

import contextlib
import dataclasses
import os
import signal
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import optax
from jaxtyping import PyTree

from plurax import errors
from plurax.checkpoint import Checkpoints
from plurax.data import Position, Ragged, as_data
from plurax.execute.program import Program
from plurax.log import MetricsLog, Row
from plurax.loop import Steps, training
from plurax.mesh import make_mesh
from plurax.plan import Plan
from plurax.progress import TrainingProgress
from plurax.state import TrainState
from plurax.tally import Tally
from plurax.task import Task


@dataclasses.dataclass(frozen=True)
class Fit:
    """What `fit` returns.

    **Fields:**

    - `state`: the trained state.
    - `program`: to predict and evaluate with.
    - `history`: one row per epoch: weighted means of the training metrics, those of the evaluation
      under `eval_...`, `seconds`, `examples_per_second`, `skipped`.
    - `interrupted`: the signal that ended training early (`"SIGINT"`, `"SIGTERM"`), or None.
    """

    state: TrainState
    program: Program
    history: list[Row]
    interrupted: str | None = None


def fit(
    task: Task,
    optimizer: optax.GradientTransformation,
    data: PyTree | Iterable[PyTree],
    *,
    plan: Plan = Plan(),  # noqa: B008  frozen
    epochs: int = 1,
    batch_size: int | None = None,
    seed: int = 0,
    evaluation: PyTree | Iterable[PyTree] | None = None,
    shuffle: bool = True,
    ragged: Ragged = "pad",
    output: str | Path | None = None,
    resume: bool = False,
    checkpoint_every: int | None = None,
    resident: bool | None = None,
    progress: bool = True,
    devices: Sequence[jax.Device] | None = None,
) -> Fit:
    """Train a task on data.

    **Arguments:**

    - `task`, `optimizer`, `plan`: what is trained, by which rule, spread how.
    - `data`: arrays in a tree (a dict of arrays with the same leading dim), shuffled anew every
      epoch; or a Grain dataset of batches, or any iterable of batches that can be read again.
    - `epochs`: passes over the data.
    - `batch_size`: examples of a step; needed for arrays, else taken from the first batch.
    - `seed`: of initialisation, dropout and order; with it training repeats bit for bit.
    - `evaluation`: data to evaluate on after each epoch, over all examples exactly.
    - `shuffle`: whether arrays are taken in a new order each epoch.
    - `ragged`: a smaller last batch is `"pad"`: trained exactly as it is; `"drop"`: left out;
      `"error"`: refused.
    - `output`: a directory for `metrics.jsonl`, TensorBoard events, `plan.toml` and checkpoints.
    - `resume`: go on from the newest checkpoint in `output`, bit for bit as if never stopped.
    - `checkpoint_every`: steps between checkpoints, besides those after each epoch.
    - `resident`: keep arrays on the devices and run whole epochs in one compiled loop; by default
      where they take at most a quarter of the memory budget.
    - `progress`: show a bar, or lines where the output is not a terminal.
    - `devices`: which devices, default all that JAX sees.

    Ctrl-C and SIGTERM end training after the current call (a step, or about a quarter of a second
    of steps over resident data), save, and return with `interrupted`
    set; a second signal ends the process at once. A step whose loss or gradient is not finite
    leaves the state unchanged, is counted in `state.skipped` and reported.

    **Returns:** a `Fit`.

    Raises `PlanError`, `TaskError`, `BatchError`, `CheckpointError`.
    """
    if not isinstance(epochs, int) or epochs < 1:
        raise errors.epochs_not_positive(epochs)
    if batch_size is not None and (not isinstance(batch_size, int) or batch_size < 1):
        raise errors.batch_size_not_positive(batch_size)
    if isinstance(evaluation, Iterator):
        raise errors.data_one_shot()
    source, like = as_data(data, batch_size=batch_size, seed=seed, shuffle=shuffle, ragged=ragged)
    program = Program(task, optimizer, plan, like, make_mesh(plan, devices))
    run = {"seed": seed, "batch_size": program.batch_size, "shuffle": shuffle, "ragged": ragged}

    with contextlib.ExitStack() as stack:
        checkpoints = _open_checkpoints(stack, output, resume)
        state, position, tally = _start(program, checkpoints, seed, run, resume)
        log = _open_log(stack, output, plan, int(state.step) if resume else None)
        stop = stack.enter_context(_StopSignals())
        per_epoch = source.batches_per_epoch
        bar = stack.enter_context(
            TrainingProgress(
                epochs, per_epoch and per_epoch * epochs, int(state.step), show=progress
            )
        )
        history = [row for row in log.rows if row["kind"] == "epoch"] if log else []

        for steps in training(
            program,
            state,
            source,
            start=position,
            epochs=epochs,
            checkpoint_every=checkpoint_every,
            resident=resident,
        ):
            # The order matters: count, evaluate, log, save, and only then stop. A stop therefore
            # always leaves a checkpoint of exactly what was logged.
            state = steps.state
            last = steps.epoch_done or stop.name is not None
            for settled in tally.add(steps, settle_all=last):
                if log:
                    _log_steps(log, settled)
            bar.advance(
                steps.step, steps.position.epoch, tally.last_loss, tally.examples_per_second
            )
            tally.warn_not_finite(steps.step)
            if steps.epoch_done:
                row = tally.epoch_row(steps.step, steps.position.epoch)
                if evaluation is not None:
                    means = program.evaluate(state, evaluation)
                    row |= {f"eval_{name}": value for name, value in means.items()}
                history.append(row)
                bar.epoch(row)
                if log:
                    log.write(row)
                    log.flush()
                tally = Tally()
            due = checkpoint_every is not None and steps.step % checkpoint_every == 0
            if checkpoints and (steps.epoch_done or due or stop.name):
                for settled in tally.settle():
                    if log:
                        _log_steps(log, settled)
                meta = {"position": steps.position.to_json(), "tally": tally.to_json()}
                checkpoints.save(state, {**run, **meta})
            if stop.name:
                bar.note(_stopped(stop.name, steps.step, output))
                break
        if checkpoints:
            checkpoints.wait()
    return Fit(state, program, history, stop.name)


# --- What fit keeps beside the loop -----------------------------------------------------------


class _StopSignals:
    """Ctrl-C and SIGTERM set `name`; a second one has its usual effect."""

    def __init__(self) -> None:
        self.name: str | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "_StopSignals":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _note(self, number: int, _frame: object) -> None:
        self.name = signal.Signals(number).name
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}


def _open_checkpoints(
    stack: contextlib.ExitStack, output: str | Path | None, resume: bool
) -> Checkpoints | None:
    if output is None:
        return None
    checkpoints = stack.enter_context(Checkpoints(Path(output) / "checkpoints"))
    if checkpoints.steps() and not resume:
        raise errors.output_has_run(str(output), checkpoints.steps()[-1])
    return checkpoints


def _start(
    program: Program,
    checkpoints: Checkpoints | None,
    seed: int,
    run: dict[str, Any],
    resume: bool,
) -> tuple[TrainState, Position, Tally]:
    if checkpoints and resume:
        restored = checkpoints.restore(program.state_shapes)
        if restored is not None:
            state, meta = restored
            for field, now in run.items():
                if meta[field] != now:
                    raise errors.checkpoint_other_run(
                        str(checkpoints.directory), field, meta[field], now
                    )
            return state, Position.from_json(meta["position"]), Tally(meta["tally"])
    return program.init(seed), Position(), Tally()


def _open_log(
    stack: contextlib.ExitStack, output: str | Path | None, plan: Plan, resume_step: int | None
) -> MetricsLog | None:
    if output is None:
        return None
    log = MetricsLog(Path(output), resume_step=resume_step)
    stack.callback(log.close)
    plan.save(Path(output) / "plan.toml")
    return log


def _log_steps(log: MetricsLog, steps: Steps) -> None:
    count = len(steps.metrics["loss"])
    epoch = steps.position.epoch + (0 if steps.epoch_done else 1)
    for index in range(count):
        values = {name: value[index].item() for name, value in steps.metrics.items()}
        step = steps.step - count + index + 1
        log.write({"kind": "step", "step": step, "epoch": epoch, **values})


def _stopped(name: str, step: int, output: str | Path | None) -> str:
    if output is None:
        return f"{name}: stopped after step {step}; nothing was saved (no output directory)."
    return f"{name}: stopped after step {step} and saved in {os.fspath(output)}; resume continues."
