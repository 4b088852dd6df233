"""Repeat a run with parameter servers from its record and its data, bit for bit."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import optax
from jaxtyping import PyTree

from plurax import errors
from plurax.checkpoint.restore import make_program
from plurax.execute.array_data import Position
from plurax.loop.data import Data, as_data
from plurax.plan import Plan
from plurax.run_folder.folder import epoch_length
from plurax.server.messages import Ticket
from plurax.server.record import FILE, Event, read_events
from plurax.server.replay import Replay, reached_at
from plurax.server.residuals import Leaves, redistribute
from plurax.server.servers import Servers
from plurax.state import TrainState
from plurax.task import Task
from plurax.train.serve import numbered_batches, parts_of, run_spec
from plurax.validate import local_path, whole_number


def replay(
    task: Task,
    optimizer: optax.GradientTransformation,
    data: PyTree | Iterable[PyTree],
    output: str | Path,
    *,
    plan: Plan | None = None,
    step: int | None = None,
    devices: Sequence[jax.Device] | None = None,
) -> TrainState:
    """Repeat a run of `fit(servers=..., output=output)` from its record, in this process.

    Workers and servers are called in the order in which they were called then, one after the
    other, so that the state is the same bit for bit: also of `async`, and whoever ended meanwhile.
    It needs the same versions of JAX and plurax, and the same kind of devices.

    **Arguments:**

    - `task`, `optimizer`, `data`: those of the run.
    - `output`: its directory; nothing is written there.
    - `plan`: of a worker; by default that of the run. Under another one sums are rounded
      differently.
    - `step`: return the state after so many batches, as servers had it then; by default the last
      state that was saved or reported.
    - `devices`: by default all that JAX sees.

    **Returns:** the state, as in `Fit.state`.

    Raises `CheckpointError` for a folder without a record, a record of other data, and a step
    beyond the record.
    """
    runs = recorded_runs(output)
    ends = [reached for run in runs for reached in reached_at(run).values()]
    if step is None:
        step = fetched_steps(runs)[-1]
    number = whole_number(step, 0)
    if number is None or number not in ends:
        raise errors.CheckpointError(
            f"step {step} of the run in {output} cannot be replayed: its record ends at step "
            f"{max(ends)}."
        )
    *_, (_, state) = replayed(task, optimizer, data, output, runs, {number}, plan, devices)
    return state


def recorded_runs(output: str | Path) -> list[list[Event]]:
    """Return the events of a record, from each `start` on: one list a run, the first from step 0.

    Raises `CheckpointError` where there is none.
    """
    path = local_path(output) / FILE
    events = read_events(path) if path.is_file() else []
    runs: list[list[Event]] = []
    for event in events:
        if event["event"] == "start":
            runs.append([])
        runs[-1].append(event)
    if not runs:
        raise errors.CheckpointError(
            f"{output} holds no servers.jsonl, the record that a run with parameter servers "
            "writes: fit(servers=..., output=...) or plurax train --servers. ... Give the folder "
            "of such a run."
        )
    if runs[0][0]["step"]:
        raise errors.CheckpointError(
            f"the record in {output} begins at step {runs[0][0]['step']}, where training without "
            "servers, or a run without its record, was resumed. What came before cannot be "
            "replayed."
        )
    return runs


def fetched_steps(runs: Sequence[Sequence[Event]]) -> list[int]:
    """Return the steps after which nothing was on its way, ascending; if none, the last one."""
    fetched = {e["step"] for run in runs for e in run if e["event"] == "fetched"}
    return sorted(fetched) or [max(reached_at(runs[-1]).values())]


def replayed(
    task: Any,
    optimizer: optax.GradientTransformation,
    data: Any,
    output: str | Path,
    runs: Sequence[Sequence[Event]],
    wanted: set[int],
    plan: Plan | None = None,
    devices: Sequence[jax.Device] | None = None,
) -> Iterator[tuple[int, TrainState]]:
    """Yield the states after these numbers of batches, with the numbers. See `replay`."""
    left, state, residuals = set(wanted), None, list[Leaves]()
    for run in runs:
        start = run[0]
        own = plan or Plan.from_toml(start["plan"])
        source, like = _source(data, start, str(output))
        program = make_program(task, optimizer, own, like, None, source, None, devices)
        if state is None:
            state = program.to_canonical(program.init(start["seed"]))
        # Here all share this process's memory, wherever they were.
        servers = Servers(**{**start["servers"], "transport": "threads", "address": None})
        spec = run_spec(servers, program, optimizer, source, like)
        if not start.get("residuals"):  # nothing was saved with the checkpoint
            residuals = []
        follow = Replay(spec, state, run, _batches(source, start, spec.servers.parts),
                        redistribute(residuals, servers.workers))  # fmt: skip
        last = start["step"]
        for last in follow.steps():
            if last in left:
                left.remove(last)
                yield last, follow.state(last)
            if not left:
                return
        state, residuals = follow.state(last), follow.residuals()


def _source(data: Any, start: Event, output: str) -> tuple[Data, PyTree]:
    """Return the data as the run had them, and the shapes of a full batch."""
    settings = {name: start[name] for name in ("batch_size", "seed", "shuffle", "ragged")}
    source, like = as_data(data, **settings)
    now = epoch_length(source)
    if now != start["epoch_length"]:
        raise errors.CheckpointError(
            f"an epoch of the run recorded in {output} has {start['epoch_length']} examples (of an "
            f"iterable: batches) and the data now have {now}. Replay it with the data it was "
            "trained on."
        )
    return source, like


def _batches(data: Data, start: Event, parts: int) -> Iterator[list[Ticket]]:
    """Yield the parts of each batch from the start of a run on."""
    position, step = Position.from_json(start["position"]), start["step"]
    while True:
        before = step
        for batch, rows, _ in numbered_batches(data, position):
            yield parts_of(step, parts, batch, rows)
            step += 1
        if step == before:
            raise errors.data_shorter(position.epoch + 1, position.batch)
        position = Position(position.epoch + 1)
