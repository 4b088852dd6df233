"""Repeat a run with parameter servers from its record, in one thread.

Every call of a worker or a server came from the coordinator, and each answered its calls in their
order. So the record's order (`plurax.server.record`) is all there is to a run: the same calls give
the same bits, whatever was fast, slow or dead. Example, `async`, one server, two workers:

    record                        here                                        version
    pull, step 0, worker 0        gradient g0 of worker 0, of version 0       0
    pull, step 1, worker 1        gradient g1 of worker 1, of version 0       0
    push, worker 1                the server updates with g1                  1
    push, worker 0                the server updates with g0                  2

A server that ended is made again from the snapshot that the record names. What it did between that
snapshot and its end is repeated too, and then dropped, as it was.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax

from plurax.server.messages import Header, Pulled, Snapshot, Ticket
from plurax.server.record import Event
from plurax.server.residuals import Leaves, zero_leaves
from plurax.server.run_spec import RunSpec
from plurax.server.shard import Shard, first_snapshot, joined_state, make_shard
from plurax.server.shard_layout import to_host
from plurax.server.worker import Worker
from plurax.state import TrainState

Push = tuple[int, int, int]
"""Worker, life and sequence."""


class Replay:
    """The workers and servers of a recorded run, which follow its record.

    **Arguments:** `spec`; `state`, canonical, with which the run began; `events`, from a `start`
    on, up to the next; `batches`, the parts of each batch of the run, in order; `residuals`, what
    the first workers began with that their compression had left to send.
    """

    def __init__(
        self,
        spec: RunSpec,
        state: TrainState,
        events: Sequence[Event],
        batches: Iterator[list[Ticket]],
        residuals: Sequence[Leaves] = (),
    ) -> None:
        self.spec, self._events, self._batches = spec, events, batches
        self._joint = spec.servers.mode == "sync"
        self._key = to_host(state.key)
        self._next = state.steps_taken
        self._parts: dict[int, list[Ticket]] = {}
        self._last_pull = {e["step"]: i for i, e in enumerate(events) if e["event"] == "pull"}
        self._computed = {_push(e) for e in events if e["event"] in ("push", "late")}
        self._refused = {(e["server"], *_push(e)) for e in events if e["event"] == "refused"}
        # What each server is restarted from, and by number its snapshots that may become that.
        self._saved = [first_snapshot(spec, index, state) for index in range(spec.servers.shards)]
        self._snapshots: list[dict[int, Snapshot]] = [{} for _ in self._saved]
        self.shards: list[Shard] = [
            make_shard(spec, index, 0, saved) for index, saved in enumerate(self._saved)
        ]
        self._workers: dict[int, Worker] = {}
        self._first_residuals = dict(enumerate(residuals))
        self._pulled: dict[Push, tuple[Ticket, list[Pulled]]] = {}
        self._gradients: dict[Push, tuple[Header, Sequence[Any]]] = {}

    def steps(self) -> Iterator[int]:
        """Follow the record; yield the number of batches whenever it is reached.

        Where servers went back, that is when it was reached for the last time; of a fetched state,
        when it was fetched.
        """
        reached = reached_at(self._events)
        if not reached:
            return
        for index, event in enumerate(self._events[: max(reached) + 1]):
            self._follow(index, event)
            if index in reached:
                yield reached[index]

    def state(self, step: int) -> TrainState:
        """Return the state, canonical, as servers have it now, after `step` batches."""
        return joined_state(self.spec, [shard.snapshot()[1] for shard in self.shards], step)

    def residuals(self) -> list[Leaves]:
        """Return what each worker has left to send now; nothing without feedback."""
        if not self.spec.servers.feedback:
            return []
        zeros = zero_leaves(jax.tree.leaves(self.spec.state.params))
        return [
            self._workers[index].residuals()
            if index in self._workers
            else self._first_residuals.get(index, zeros)
            for index in range(self.spec.servers.workers)
        ]

    def _follow(self, index: int, event: Event) -> None:
        match event["event"]:
            case "pull":
                self._pull(index, event)
            case "compute":
                self._compute(event)
            case "push":
                self._push(event)
            case "late":
                self._gradients.pop(_push(event))
            case "commit":
                self._commit(event["parts"])
            case "snapshot":
                for shard, taken in zip(self.shards, self._snapshots, strict=True):
                    taken[event["number"]] = shard.snapshot()[1]
            case "saved":
                server = event["server"]
                self._saved[server] = self._snapshots[server].pop(event["number"])
            case "worker lost":
                # With what it had left to send.
                self._workers.pop(event["worker"], None)
                self._first_residuals.pop(event["worker"], None)
            case "server lost":
                self._restart(event["server"])

    def _pull(self, index: int, event: Event) -> None:
        """Pull for a worker; keep what it is given, if it has computed a gradient of that."""
        worker, _, sequence = push = _push(event)
        ticket = self._ticket(index, event)
        pulled = [shard.pull(worker, sequence)[1] for shard in self.shards]
        if push in self._computed:  # else a server from which it pulled, or itself, had ended
            self._pulled[push] = ticket, pulled

    def _compute(self, event: Event) -> None:
        worker, life, sequence = push = _push(event)
        if push not in self._computed:
            return
        ticket, pulled = self._pulled.pop(push)
        if worker not in self._workers:
            residuals = self._first_residuals.get(worker)
            self._workers[worker] = Worker(self.spec, worker, life, self._key, residuals)
        header, *content = self._workers[worker].gradients(ticket, sequence, *pulled)
        self._gradients[push] = header, content

    def _ticket(self, index: int, event: Event) -> Ticket:
        step = event["step"]
        while self._next <= step:
            self._parts[self._next] = next(self._batches)
            self._next += 1
        ticket = self._parts[step][event["part"]]
        if self._last_pull[step] == index:
            del self._parts[step]
        return ticket

    def _push(self, event: Event) -> None:
        header, content = self._gradients.pop(_push(event))
        for shard, part in zip(self.shards, content, strict=True):
            if (shard.index, *_push(event)) not in self._refused:
                shard.push(header, part)

    def _commit(self, parts: Sequence[int]) -> None:
        shards: list[Any] = self.shards
        known = self.spec.update.exchange(
            lambda crossing, known: [shard.numbers(parts, crossing, known) for shard in shards]
        )
        for shard in shards:
            shard.commit(parts, known)

    def _restart(self, server: int) -> None:
        """Begin a server again from its snapshot; in `sync` all of them."""
        for index in range(len(self.shards)) if self._joint else [server]:
            self._snapshots[index].clear()
            incarnation = self.shards[index].incarnation + 1
            self.shards[index] = make_shard(self.spec, index, incarnation, self._saved[index])


def reached_at(events: Sequence[Event]) -> dict[int, int]:
    """Return for the indices of some events how many batches the run had taken then.

    **Arguments:** `events`, from a `start` on, up to the next.
    """
    step, joint = events[0]["step"], events[0]["servers"]["mode"] == "sync"
    index_of = {step: 0}
    for index, event in enumerate(events):
        if joint and event["event"] == "commit":
            index_of[event["step"] + 1] = index
        elif not joint and event["event"] == "push":
            step += 1
            index_of[step] = index
    index_of |= {e["step"]: i for i, e in enumerate(events) if e["event"] == "fetched"}
    return {index: step for step, index in index_of.items()}


def _push(event: Event) -> Push:
    return event["worker"], event["life"], event["sequence"]
