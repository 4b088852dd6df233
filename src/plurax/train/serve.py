"""Run the training loop with parameter servers, as a generator like `train_iter`.

Batches are those of any other plan, in the same order. In `sync` each is divided into as many parts
as there are workers; else a worker takes a whole batch. Example, 5 examples, batches of 4, 2
workers, `sync`:

    batch 0    rows [4 2 0 3]    part 0: rows 4 2, first 0    part 1: rows 0 3, first 2
    batch 1    rows [1]          part 0: row 1                nothing is left for worker 1

The state is with the servers. It is fetched where it is needed: at the end of an epoch that is
reported, every `checkpoint_every` batches, where `next_stop` says, and when training is to stop;
until then all workers go on, and what is yielded is not `fetched`.
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any

import jax
import numpy as np
import optax
from jaxtyping import PyTree

from plurax import errors
from plurax.checkpoint import Checkpoints
from plurax.distributed.global_arrays import check_alone
from plurax.execute.array_data import ArrayData, Position
from plurax.execute.compiler_options import checked_options
from plurax.execute.placement import abstract_batch, leading_dim
from plurax.execute.program import Program
from plurax.loop.data import Data
from plurax.loop.hook import EpochHook, SaveHook
from plurax.loop.iterate import StepOutput
from plurax.loop.log_rows import Row
from plurax.loop.run import Run
from plurax.plan import Plan
from plurax.server.coordinator import Coordinator, Metrics
from plurax.server.messages import Ticket
from plurax.server.open import open_coordinator
from plurax.server.record import Record
from plurax.server.residuals import redistribute, zero_leaves
from plurax.server.run_spec import RunSpec
from plurax.server.servers import Servers
from plurax.sources.source import in_memory
from plurax.state import TrainState
from plurax.task import Task
from plurax.tree import with_rows


def serve_iter(
    coordinator: Coordinator,
    program: Program,
    state: TrainState,
    data: Data,
    *,
    stopping: Callable[[], bool] = lambda: False,
    start: Position = Position(),  # noqa: B008  frozen
    epochs: int = 1,
    report_every: int = 1,
    checkpoint_every: int | None = None,
    next_stop: Callable[[int], int | None] = lambda step: None,
) -> Iterator[StepOutput]:
    """Train with workers and servers, yielding after every few updates.

    **Arguments:** as for `train_iter`, and the `coordinator`; `program` is where the state
    is placed. Where `stopping()`, no further batch is handed out, and the last item is fetched.
    """
    step = state.steps_taken
    for epoch in range(start.epoch, epochs):
        begin = start if epoch == start.epoch else Position(epoch)
        batches = _TicketBatches(data, begin, step, coordinator.spec.servers.parts)
        with contextlib.closing(batches):
            while not batches.ended():
                save = None
                if checkpoint_every is not None:
                    save = step + checkpoint_every - step % checkpoint_every
                wanted = min(filter(None, (save, next_stop(step))), default=None)
                limit = wanted and wanted - step
                began, updates = time.monotonic(), list[Metrics]()
                for more in coordinator.run(batches.take(limit), stopping):
                    # Held back by one, so that the last of them can be fetched.
                    if updates:
                        step += len(updates)
                        yield _output(updates, state, step, batches.position, began)
                        began = time.monotonic()
                    updates = more
                done = batches.ended()
                step += len(updates)
                at_epoch = epoch + 1
                report = done and (at_epoch % report_every == 0 or at_epoch == epochs)
                fetched = report or step == wanted or stopping()
                residuals = None
                if fetched:
                    canonical, residuals = coordinator.state(step)
                    state = program.place(canonical)
                position = Position(at_epoch) if done else batches.position
                if updates:
                    last = _output(updates, state, step, position, began)
                    yield dataclasses.replace(
                        last, epoch_done=done, fetched=fetched, residuals=residuals
                    )
                if stopping():
                    return


class ServersHook(EpochHook, SaveHook):
    """Adds to the row of an epoch what servers and workers did, and keeps their record on disk."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    def on_epoch(self, run: Run, row: Row) -> None:
        """Add the account."""
        row["servers"] = self._coordinator.account.to_json()

    def on_save(self, run: Run, step: int) -> None:
        """Write the record, which no checkpoint is ahead of."""
        self._coordinator.flush()


class _TicketBatches:
    """The batches of an epoch as tickets, in runs of at most so many."""

    def __init__(self, data: Data, start: Position, step: int, parts: int) -> None:
        self.position = start
        self._step, self._parts = step, parts
        self._items = numbered_batches(data, start)
        self._next = next(self._items, None)
        if self._next is None:
            if start.batch == 0:
                raise errors.data_has_no_batches(
                    f"epoch {start.epoch + 1} of the iterable is empty"
                )
            raise errors.data_shorter(start.epoch + 1, start.batch)

    def take(self, count: int | None) -> Iterator[list[Ticket]]:
        """Yield the parts of at most `count` batches."""
        taken = 0
        while self._next is not None and (count is None or taken < count):
            (batch, rows, self.position), self._next = self._next, next(self._items, None)
            taken += 1
            self._step += 1
            yield parts_of(self._step - 1, self._parts, batch, rows)

    def ended(self) -> bool:
        """Return whether there are no more."""
        return self._next is None

    def close(self) -> None:
        self._items.close()


def numbered_batches(data: Data, start: Position) -> Generator[Any]:
    """Yield for each batch its examples or its rows, and the position after it."""
    if isinstance(data, ArrayData):
        rows, counts = data.epoch_order(start.epoch)
        for index in range(start.batch, len(counts)):
            yield None, rows[index, : counts[index]], Position(start.epoch, index + 1)
    else:
        for batch, position in data.batches(start):
            yield jax.tree.map(np.asarray, batch), None, position


def parts_of(step: int, parts: int, batch: PyTree, rows: np.ndarray | None) -> list[Ticket]:
    """Return the parts of a batch that have examples, as equal as can be."""
    count = len(rows) if rows is not None else leading_dim(batch)
    size = -(-count // parts)
    tickets = []
    for part, first in enumerate(range(0, count, size)):
        cut = slice(first, first + size)
        tickets.append(
            Ticket(
                step=step,
                part=part,
                parts=parts,
                first=first,
                rows=None if rows is None else rows[cut],
                batch=None if rows is not None else jax.tree.map(lambda x, c=cut: x[c], batch),
            )
        )
    return tickets


def _output(
    updates: list[Metrics],
    state: TrainState,
    step: int,
    position: Position,
    began: float,
) -> StepOutput:
    metrics = {
        name: np.stack([np.asarray(update[name]) for update in updates]) for name in updates[0]
    }
    seconds = time.monotonic() - began
    return StepOutput(state, step, metrics, seconds, position, epoch_done=False, fetched=False)


def check_servers(servers: Servers | None, task: Any, plan: Plan, members: Any) -> None:
    """Raise `PlanError` where servers cannot train this task under this plan."""
    if servers is None:
        return
    if not isinstance(servers, Servers):
        raise errors.PlanError(
            f"fit(servers={servers!r}): servers is a plurax.Servers, such as Servers(shards=2, "
            "workers=4, mode='bounded', staleness=3), or None."
        )
    if members is not None or not isinstance(task, Task):
        raise errors.PlanError(
            "parameter servers train one network: leave out members= or servers=. Members never "
            "communicate, so they need no servers; Plan(member=...) distributes them."
        )
    if task.frozen:
        raise errors.PlanError(
            "servers hold every parameter with its optimizer state, and cannot leave out frozen "
            "ones (Task.frozen). Train without servers=, or give frozen parameters updates of "
            "zero: optax.partition({..., 'frozen': optax.set_to_zero()}, labels)."
        )
    check_alone("servers=", "Workers and servers are processes of their own: start fit once.")
    if task.coupled and servers.parts > 1:
        raise errors.PlanError(
            f"Servers(mode='sync', workers={servers.workers}) divides a batch among workers, and "
            "this task's loss couples the examples of a batch (Task.coupled). Use mode='bounded' "
            "or 'async', in which a worker has a whole batch, or workers=1."
        )
    if plan.reduce_dtype is not None:
        raise errors.PlanError(
            f"a worker's plan has reduce_dtype={plan.reduce_dtype!r}: gradients are added up on "
            "the servers, and what workers push is rounded by Servers(compression='bfloat16'). Say "
            "that instead, and leave out reduce_dtype."
        )
    if plan.pipeline > 1 and plan.zero:
        raise errors.PlanError(
            f"a worker's plan has pipeline > 1 and zero={plan.zero}: the optimizer's state is on "
            "the servers, so ZeRO would divide nothing but gradients that are pushed whole. Say "
            "zero=0."
        )


def open_servers(
    stack: contextlib.ExitStack,
    servers: Servers | None,
    program: Program,
    optimizer: optax.GradientTransformation,
    state: TrainState,
    source: Data,
    batch: PyTree,
    run: dict[str, Any],
    position: Position,
    checkpoints: Checkpoints | None,
    note: Callable[[str], None],
) -> Coordinator | None:
    """Return the coordinator of a run, its workers and servers started; None without servers.

    **Arguments:** `stack`, which ends them; `state`, to begin with; `batch`, the shapes of the
    largest; `run` and `position`, the settings of the run and where in the data it begins, for its
    record; `checkpoints`, beside which that is written, and which have what the workers of the run
    before had left to send; `note`, which shows a line to the user.

    Raises `PlanError` for an optimizer that servers cannot compute, before any of them is started.
    """
    if servers is None:
        return None
    spec = run_spec(servers, program, optimizer, source, batch)
    spec.check()
    canonical = program.to_canonical(state)
    record, saved, step = None, None, state.steps_taken
    if checkpoints is not None:
        if servers.feedback:
            saved = checkpoints.residuals(step, zero_leaves(jax.tree.leaves(canonical.params)))
        record = Record(checkpoints.directory.parent, step)
        record.write({"event": "start", "step": step, **run, "position": position.to_json(),
                      "plan": program.plan.to_toml(), "servers": dataclasses.asdict(servers),
                      "residuals": saved is not None})  # fmt: skip
    note(f"{servers.workers} workers and {servers.shards} servers, mode {servers.mode}")
    residuals = redistribute(saved or [], servers.workers)
    return stack.enter_context(open_coordinator(spec, canonical, record, note, residuals))


def run_spec(
    servers: Servers,
    program: Program,
    optimizer: optax.GradientTransformation,
    source: Data,
    batch: PyTree,
) -> RunSpec:
    """Return what workers and servers need to know of a run. `batch`: shapes of the largest."""
    assert isinstance(program.task, Task)
    size = -(-program.batch_size // servers.parts)
    like = with_rows(abstract_batch(batch), size)
    # Workers may be other processes, which have no file of the user's open.
    arrays = in_memory(source.arrays) if isinstance(source, ArrayData) else None
    options = checked_options(program.compiler_options)
    return RunSpec(program.task, optimizer, servers, program.plan, like, arrays, options)
