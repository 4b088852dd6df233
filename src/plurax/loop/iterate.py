"""Run the training loop as a generator: each item is one call into a compiled program.

A state that is sent back, `steps = calls.send(state)`, takes the place of the one that was yielded.

Over resident data one call runs many steps, because the host's overhead per call is more than a
small step takes. The number of steps per call adapts to a quarter of a second, so that the progress
bar is live and Ctrl-C is prompt; it changes no result. Example, 1 ms per step, 400 steps per
epoch, `checkpoint_every=300`:

    calls    1, 2, 4, 8, 16, 32, 64, 128 steps     doubling; step 255 is reached
             45                                    250 would fit, but step 300 has a checkpoint
             100                                   250 would fit, but the epoch ends at step 400
"""

import contextlib
import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from plurax import errors, tree
from plurax.distributed.global_arrays import fetch, process_count
from plurax.distributed.process_group import ProcessGroup, open_group
from plurax.execute.array_data import ArrayData, Position
from plurax.execute.batch_buffer import Buffers
from plurax.execute.placement import Placed
from plurax.execute.population import MAX_STEPS_PER_CALL
from plurax.execute.program import Program
from plurax.execute.step import Metrics
from plurax.loop.data import Data
from plurax.loop.read_ahead import OneSlot, ReadAhead
from plurax.mesh import memory_budget
from plurax.state import TrainState

SECONDS_PER_CALL = 0.25
"""The target duration of one call, in seconds: short enough for a live bar and Ctrl-C."""

WINDOW = 4096
"""The largest number of steps per call, and so of the metrics that one call copies to the host."""


@dataclasses.dataclass(frozen=True)
class StepOutput:
    """The result of one call of the training loop, of one or more steps.

    **Fields:**

    - `state`: after the steps; the next call donates it. `step`: its number.
    - `metrics`: arrays `(k,)`, one value per step, or scalars for one step; perhaps still being
      computed. Of a population `(members, k)` or `(members,)`.
    - `seconds`: the duration of the call, without compilation; for a streamed batch only until its
      step was dispatched.
    - `position`: in the data, after the steps. `epoch_done`: whether they end an epoch.
    - `compiled`: the compiled program that took the steps, for its memory and its text.
    - `fetched`: whether `state` is that after the steps; parameter servers give it only at the end
      of an epoch and where it is to be saved, else the one before.
    - `columns`: the first and the end of these steps in `metrics`, where they have others too.
    - `positions`: after each of several steps, where it does not follow from the last one.
    - `residuals`: of each worker of parameter servers what its compression has left to send, one
      array like each parameter; where the state is to be saved, and a compression leaves any.
    """

    state: TrainState
    step: int
    metrics: dict[str, Any]
    seconds: float
    position: Position
    epoch_done: bool
    compiled: jax.stages.Compiled | None = None
    fetched: bool = True
    residuals: list[list[np.ndarray]] | None = None
    columns: tuple[int, int] | None = None
    positions: Sequence[Position] | None = None

    @property
    def epoch(self) -> int:
        """The number of the epoch that the last step belongs to, from 1 on."""
        return self.position.epoch + (0 if self.epoch_done else 1)


class Calls(Iterator[StepOutput]):
    """The calls of the training loop, which can start anew from another state and position.

    **Arguments:** `begin`, which returns the iterator from a state and a position.
    """

    def __init__(
        self,
        begin: Callable[[TrainState, Position], Iterator[StepOutput]],
        state: TrainState,
        start: Position,
    ) -> None:
        self._begin, self._calls = begin, begin(state, start)
        self._state: TrainState | None = None

    def __next__(self) -> StepOutput:
        state, self._state = self._state, None
        if state is not None and isinstance(self._calls, Generator):
            return self._calls.send(state)
        return next(self._calls)

    def replace(self, state: TrainState) -> None:
        """Go on from another state than that of the last call."""
        self._state = state

    def restart(self, state: TrainState, start: Position) -> None:
        """End the iterator and begin another."""
        if isinstance(self._calls, Generator):
            self._calls.close()
        self._calls, self._state = self._begin(state, start), None


def train_iter(
    program: Program,
    state: TrainState,
    data: Data,
    *,
    start: Position = Position(),  # noqa: B008  frozen
    epochs: int = 1,
    report_every: int = 1,
    checkpoint_every: int | None = None,
    resident: bool | None = None,
    group: ProcessGroup | None = None,
    stopping: Callable[[], bool] = lambda: False,
    next_stop: Callable[[int], int | None] = lambda step: None,
) -> Generator[StepOutput, TrainState | None, None]:
    """Train, yielding after every call into the compiled program. `fit` is built on this loop.

    **Arguments:** as for `fit`; `start` is the position in the data to begin at; `group`, the
    processes that train together, default all; `stopping()`, whether data that are not there shall
    no longer be waited for; `next_stop(step)`, the first step after `step` at whose end a call has
    to end, or None. A state that is sent back takes the place of the one that was yielded. A call
    never runs past the end of an epoch (for members: an epoch to report) or
    a multiple of `checkpoint_every`.
    """
    if isinstance(data, ArrayData) and program.members is not None:
        data = data.read_by(program.members)
    limit = functools.partial(_limit, checkpoint_every, next_stop)
    with contextlib.ExitStack() as stack:
        group = group or stack.enter_context(contextlib.closing(open_group()))
        if isinstance(data, ArrayData) and stays_resident(program, data, resident):
            yield from _resident(program, state, data, group, start, epochs, report_every, limit)
        elif (buffers := program.buffers) is not None and not data.on_devices:
            yield from _buffered(program, state, data, buffers, stopping, start, epochs, limit)
        else:
            yield from _streamed(program, state, data, group, stopping, start, epochs)


def _resident(
    program: Program,
    state: TrainState,
    data: ArrayData,
    group: ProcessGroup,
    start: Position,
    epochs: int,
    report_every: int,
    limit: Callable[[int], int],
) -> Generator[StepOutput, TrainState | None, None]:
    """Yield calls over resident data, each of about `SECONDS_PER_CALL`.

    One network is given the order of an epoch, so its calls end with the epoch; members compute
    their own orders, so theirs end with the epoch to report.
    """
    alone = program.members is None
    placed = program.place_data(data.arrays, spread=not fits(program, data.arrays))
    per_epoch = data.batches_per_epoch
    span = per_epoch if alone else per_epoch * report_every
    first, end = start.epoch * per_epoch + start.batch, epochs * per_epoch
    at, taken = first, state.steps_taken - first
    order: tuple[Any, ...] = ()
    per_call, began = 1, time.monotonic()
    while at < end:
        epoch = at // per_epoch
        if alone and (at == first or at % per_epoch == 0):
            order = program.place_epoch(*data.epoch_order(epoch))
        if at == first:
            compiled = program.compile_loop(placed, order)
            began = time.monotonic()
        stop = min(at + per_call, (at // span + 1) * span, end, limit(at + taken) - taken)
        offset = epoch * per_epoch if alone else 0
        state, metrics = program.loop(state, placed, order, at - offset, stop - offset)
        host = _to_host(program, metrics, at - offset, stop - offset)
        seconds = time.monotonic() - began
        most = WINDOW if alone else MAX_STEPS_PER_CALL
        per_call = _next_length(per_call, stop - at, seconds, most)
        per_call, *_ = group.all_gather(per_call)  # each process has its own clock
        at = stop
        position = Position(*divmod(at, per_epoch))
        done = position.batch == 0
        state = (
            yield StepOutput(state, at + taken, host, seconds, position, done, compiled)
        ) or state
        began = time.monotonic()


def _limit(checkpoint_every: int | None, next_stop: Callable[[int], int | None], step: int) -> int:
    """Return the step at which a call that begins after `step` has to end at the latest."""
    wanted = next_stop(step)
    limit = sys.maxsize if wanted is None else wanted
    if checkpoint_every:
        limit = min(limit, step + checkpoint_every - step % checkpoint_every)
    return limit


def _to_host(program: Program, metrics: Metrics, first: int, stop: int) -> dict[str, np.ndarray]:
    """Copy the metrics of a call's steps `first` to `stop` to the host."""
    if program.members is None:
        return _rows_to_host(metrics, first, stop)
    count = program.members.count
    found = fetch(metrics)
    return {name: value[:count, : stop - first] for name, value in found.items()}


def _rows_to_host(metrics: Metrics, first: int, stop: int) -> dict[str, np.ndarray]:
    """Copy the metrics of steps `first` to `stop` of an epoch to the host.

    Of an epoch longer than `WINDOW` steps only a window around them is copied.
    """
    steps = metrics["loss"].shape[0]
    begin = 0
    if steps > WINDOW:
        begin = min(first, steps - WINDOW)
        metrics = _window(metrics, begin, WINDOW)
    return {name: value[first - begin : stop - begin] for name, value in fetch(metrics).items()}


@functools.partial(jax.jit, static_argnums=2)
def _window(metrics: Metrics, begin: int, size: int) -> Metrics:
    return {
        name: jax.lax.dynamic_slice_in_dim(value, begin, size) for name, value in metrics.items()
    }


def _buffered(
    program: Program,
    state: TrainState,
    data: Data,
    buffers: Buffers,
    stopping: Callable[[], bool],
    start: Position,
    epochs: int,
    limit: Callable[[int], int],
) -> Generator[StepOutput, TrainState | None, None]:
    """Yield calls over small batches, which are read ahead into buffers of several.

    `limit(step)` is the step at which a call that begins after `step` has to end.
    """
    step, per_call = state.steps_taken, 1
    # The call before: one computes while the next is prepared.
    in_flight: Metrics | None = None
    its_steps, ended = 1, time.monotonic()

    def most() -> int:
        return min(per_call, limit(step) - step)

    for epoch in range(start.epoch, epochs):
        begin = start if epoch == start.epoch else Position(epoch)
        began, done = time.monotonic(), False
        with ReadAhead(data.batches(begin), buffers.new, stopping) as ahead:
            for part in ahead.parts(most):
                if part.first == 0:
                    placed, order = buffers.place(part.buffer)
                if in_flight is None:
                    compiled = program.compile_loop(placed, order)
                    began = ended = time.monotonic()
                state, metrics = program.loop(state, placed, order, part.first, part.stop)
                jax.block_until_ready(in_flight)
                now = time.monotonic()
                per_call = _next_length(per_call, its_steps, now - ended, buffers.slots)
                its_steps, ended, in_flight = part.stop - part.first, now, metrics["loss"]
                step, done = step + its_steps, part.is_last
                position = Position(epoch + 1) if done else part.positions[-1]
                state = (yield StepOutput(
                    state, step, metrics, now - began, position, done, compiled,
                    columns=(part.first, part.stop), positions=part.positions,
                )) or state  # fmt: skip
                began = time.monotonic()
            if ahead.is_empty and not stopping():
                raise _no_batches(begin)
            if not done:  # training is to stop, and the next batch is not there yet
                return


def _next_length(per_call: int, steps: int, seconds: float, most: int) -> int:
    """Return the steps of the next call, to take `SECONDS_PER_CALL`, after one of `steps`.

    They change how often the host looks, nothing else.
    """
    fitting = round(SECONDS_PER_CALL * steps / max(seconds, 1e-9))
    return max(1, min(2 * per_call, fitting, most))


def _no_batches(begin: Position) -> errors.BatchError:
    """Return the error of an epoch in which no batch was read from a position on."""
    if begin.batch == 0:
        return errors.data_has_no_batches(f"epoch {begin.epoch + 1} of the iterable is empty")
    return errors.data_shorter(begin.epoch + 1, begin.batch)  # the data have shrunk


def _streamed(
    program: Program,
    state: TrainState,
    data: Data,
    group: ProcessGroup,
    stopping: Callable[[], bool],
    start: Position,
    epochs: int,
) -> Generator[StepOutput, TrainState | None, None]:
    def load(item: tuple[PyTree, Position]) -> tuple[Placed, Position]:
        batch, position = item
        return program.place_batch(batch, local=data.local), position

    step = state.steps_taken
    compiled = program.compiled_step  # before the clock starts
    all_ended = functools.partial(_all_ended, group, local=data.local)
    for epoch in range(start.epoch, epochs):
        begin = start if epoch == start.epoch else Position(epoch)
        began, done = time.monotonic(), False
        with ReadAhead(map(load, data.batches(begin)), OneSlot, stopping) as ahead:
            # One that is to stop and has no batch yet must not leave the others alone in a step.
            if group.count > 1 and None in group.all_gather(ahead.has_more()):
                return
            for part in ahead.parts(is_end=all_ended):
                state, metrics = program.step_placed(state, part.buffer.batch)
                step, done = step + 1, part.is_last
                position = Position(epoch + 1) if done else part.positions[0]
                seconds = time.monotonic() - began
                state = (
                    yield StepOutput(state, step, metrics, seconds, position, done, compiled)
                ) or state
                began = time.monotonic()
            if ahead.is_empty and not stopping():
                raise _no_batches(begin)
            if not done:  # training is to stop, and the next batch is not there yet
                return


def _all_ended(group: ProcessGroup, more: bool | None, *, local: bool) -> bool:
    """Return whether the epoch ends after the batch that was taken, in all processes alike.

    Where one is to stop and does not wait for its data (`more` is None), it does not end. Where
    each process has its own rows, it ends with the first that has no more. Raises `BatchError`
    where all were to give the same batches.
    """
    every = group.all_gather(more)
    if None in every:
        return False
    if not all(every) and any(every) and not local:
        raise errors.BatchError(
            f"the data of process {every.index(False)} ended, and process {every.index(True)} has "
            "another batch. Every process must give the same batches, or with local_batches=True "
            "its own rows of them."
        )
    return not all(every)


def stays_resident(program: Program, data: ArrayData, wanted: bool | None) -> bool:
    """Return whether arrays stay on devices: as compiled for members, as asked, or where they fit.

    Those of several processes may be spread over their devices, where they do not fit on each.
    """
    if program.members is not None:
        return program.data is not None
    if wanted is not None:
        return wanted
    spread = process_count() > 1 and fits(program, data.arrays, program.mesh.shape["data"])
    return spread or fits(program, data.arrays)


def fits(program: Program, arrays: PyTree, parts: int = 1) -> bool:
    """Return whether arrays in so many parts take at most a quarter of the memory budget."""
    return tree.byte_count(arrays) // parts <= memory_budget(program.mesh) // 4
