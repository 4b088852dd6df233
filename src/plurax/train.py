"""The training loop: a generator that trains, and `fit`, which logs, evaluates, saves and stops."""

import contextlib
import dataclasses
import math
import os
import signal
import threading
import time
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jaxtyping import PyTree

from plurax import errors, tree
from plurax.checkpoint import Checkpoints
from plurax.data import ArrayData, Data, Position, Ragged, as_data, prefetch
from plurax.execute.placement import Placed
from plurax.execute.program import Program
from plurax.log import MetricsLog, Row
from plurax.mesh import make_mesh, memory_budget
from plurax.plan import Plan
from plurax.progress import TrainingProgress
from plurax.state import TrainState
from plurax.task import Task

SECONDS_PER_CALL = 0.25
"""How long one call of a compiled loop aims to take: short enough for a live bar and Ctrl-C."""


class NonFiniteWarning(UserWarning):
    """A loss or gradient was not finite; the update was left out."""


@dataclasses.dataclass(frozen=True)
class Steps:
    """What one turn of the training loop did: one or more steps.

    **Fields:**

    - `state`: after them; it is used up by the next turn. `step`: its number.
    - `metrics`: arrays `(k,)`, one value per step, or scalars for one step; perhaps still being
      computed.
    - `seconds`: since the turn before, compilation left out.
    - `position`: in the data, after them. `epoch_done`: whether they end an epoch.
    """

    state: TrainState
    step: int
    metrics: dict[str, Any]
    seconds: float
    position: Position
    epoch_done: bool


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

    Ctrl-C and SIGTERM end training after the current step, save, and return with `interrupted`
    set; a second signal ends the process at once. A step whose loss or gradient is not finite
    leaves the state unchanged, is counted in `state.skipped` and reported.

    **Returns:** a `Fit`.

    Raises `PlanError`, `TaskError`, `BatchError`, `CheckpointError`.
    """
    if not isinstance(epochs, int) or epochs < 1:
        raise errors.epochs_not_positive(epochs)
    if batch_size is not None and (not isinstance(batch_size, int) or batch_size < 1):
        raise errors.batch_size_not_positive(batch_size)
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


def training(
    program: Program,
    state: TrainState,
    data: Data,
    *,
    start: Position = Position(),  # noqa: B008  frozen
    epochs: int = 1,
    checkpoint_every: int | None = None,
    resident: bool | None = None,
) -> Iterator[Steps]:
    """Train, yielding after every call into the compiled program. The loop under `fit`.

    **Arguments:** as for `fit`; `start` is where in the data to begin. A turn never runs past the
    end of an epoch or a multiple of `checkpoint_every`.
    """
    if isinstance(data, ArrayData) and _stays_resident(program, data, resident):
        yield from _resident(program, state, data, start, epochs, checkpoint_every)
    else:
        yield from _streamed(program, state, data, start, epochs)


def _resident(
    program: Program,
    state: TrainState,
    data: ArrayData,
    start: Position,
    epochs: int,
    checkpoint_every: int | None,
) -> Iterator[Steps]:
    placed = program.place_data(data.arrays)
    per_epoch = data.batches_per_epoch
    per_call = 1
    step = int(state.step)
    for epoch in range(start.epoch, epochs):
        order = program.place_epoch(*data.epoch_order(epoch))
        program.compile_loop(placed, order)
        first = start.batch if epoch == start.epoch else 0
        began = time.monotonic()
        while first < per_epoch:
            last = min(first + per_call, per_epoch)
            if checkpoint_every:
                last = min(last, first + checkpoint_every - step % checkpoint_every)
            state, metrics = program.loop(state, placed, order, first, last)
            host = {name: np.asarray(value)[first:last] for name, value in metrics.items()}
            seconds = time.monotonic() - began
            # How many steps a call makes changes nothing but how often we look.
            fitting = round(SECONDS_PER_CALL * (last - first) / max(seconds, 1e-9))
            per_call = max(1, min(2 * per_call, fitting))
            step += last - first
            first = last
            done = first == per_epoch
            position = Position(epoch + 1) if done else Position(epoch, first)
            yield Steps(state, step, host, seconds, position, done)
            began = time.monotonic()


def _streamed(
    program: Program, state: TrainState, data: Data, start: Position, epochs: int
) -> Iterator[Steps]:
    def load(item: tuple[PyTree, Position]) -> tuple[Placed, Position]:
        batch, position = item
        return program.place_batch(batch), position

    step = int(state.step)
    program.compiled_step  # noqa: B018  compiled before the clock starts
    for epoch in range(start.epoch, epochs):
        begin = start if epoch == start.epoch else Position(epoch)
        began = time.monotonic()
        # One batch is held back, to know which is the epoch's last.
        with contextlib.closing(prefetch(data.batches(begin), load)) as batches:
            held = next(batches, None)
            if held is None and begin.batch == 0:
                raise errors.data_has_no_batches(f"epoch {epoch + 1} of the iterable is empty")
            while held is not None:
                (placed, position), held = held, next(batches, None)
                state, metrics = program.step_placed(state, placed)
                step += 1
                done = held is None
                after = Position(epoch + 1) if done else position
                yield Steps(state, step, metrics, time.monotonic() - began, after, done)
                began = time.monotonic()


def _stays_resident(program: Program, data: ArrayData, wanted: bool | None) -> bool:
    if wanted is not None:
        return wanted
    return tree.byte_count(data.arrays) <= memory_budget(program.mesh) // 4


# --- What fit keeps beside the loop -----------------------------------------------------------


SETTLE_AFTER = 2
"""Turns whose metrics may still be computing while the next is started."""


class Tally:
    """Sums over an epoch's steps; a skipped step counts only as skipped.

    Metrics are fetched from the device some turns late, so that the host never waits for the step
    it has just started.
    """

    def __init__(self, saved: dict[str, Any] | None = None) -> None:
        saved = saved or {}
        self.sums: dict[str, float] = saved.get("sums", {})
        self.weight: float = saved.get("weight", 0.0)
        self.examples: int = saved.get("examples", 0)
        self.skipped: int = saved.get("skipped", 0)
        self.seconds: float = saved.get("seconds", 0.0)
        self.last_loss = math.nan
        self._warned = self.skipped > 0
        self._waiting: deque[Steps] = deque()

    def to_json(self) -> dict[str, Any]:
        """What a checkpoint keeps, so that a resumed epoch is reported whole."""
        names = ("sums", "weight", "examples", "skipped", "seconds")
        return {name: getattr(self, name) for name in names}

    def add(self, steps: Steps, *, settle_all: bool) -> list[Steps]:
        """Take a turn; return those whose metrics have arrived, metrics on the host."""
        self._waiting.append(steps)
        return self.settle(0 if settle_all else SETTLE_AFTER)

    def settle(self, waiting: int = 0) -> list[Steps]:
        """Count the turns up to the last `waiting` ones, and return them."""
        settled = []
        while len(self._waiting) > waiting:
            steps = self._waiting.popleft()
            host = jax.tree.map(np.atleast_1d, jax.device_get(steps.metrics))
            steps = dataclasses.replace(steps, metrics=host)
            self._count(steps)
            settled.append(steps)
        return settled

    def _count(self, steps: Steps) -> None:
        metrics = steps.metrics
        ok = metrics["skipped"] == 0
        weight = np.where(ok, metrics["weight"], 0.0).astype(np.float64)
        self.weight += float(weight.sum())
        self.examples += int(metrics["examples"].sum())
        self.skipped += int((~ok).sum())
        self.seconds += steps.seconds
        self.last_loss = float(metrics["loss"][-1])
        for name, values in metrics.items():
            if name not in ("weight", "examples", "skipped"):
                kept = np.where(ok, values, 0.0).astype(np.float64)
                self.sums[name] = self.sums.get(name, 0.0) + float((weight * kept).sum())

    @property
    def examples_per_second(self) -> float:
        """Throughput of the epoch so far, waiting for data included, compilation left out."""
        return self.examples / max(self.seconds, 1e-9)

    def warn_not_finite(self, step: int) -> None:
        """Say so at the first skipped update of an epoch; the epoch's row has the count."""
        if self.skipped and not self._warned:
            self._warned = True
            warnings.warn(
                f"at or before step {step} the loss or its gradient was not finite: the update was "
                "left out on all devices and the parameters are unchanged. A smaller learning "
                "rate or optax.clip_by_global_norm may help; a NaN in the data will come again.",
                NonFiniteWarning,
                stacklevel=3,
            )

    def epoch_row(self, step: int, epoch: int) -> Row:
        """What is reported of a whole epoch: weighted means, the loss first."""
        names = ["loss", *sorted(set(self.sums) - {"loss"})]
        means = {name: self.sums.get(name, 0.0) / self.weight if self.weight else math.nan
                 for name in names}  # fmt: skip
        return {
            "kind": "epoch",
            "epoch": epoch,
            "step": step,
            **means,
            "examples": self.examples,
            "skipped": self.skipped,
            "seconds": self.seconds,
            "examples_per_second": self.examples_per_second,
        }


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
