"""`sync`: the gradients of a batch's parts are summed, and update the parameters once.

The parts of a batch stay the same whoever computes them, and servers add them up in their order: so
the update does not depend on which worker is fast, or dead. One step, 2 workers, 2 servers, an
optimizer that clips by the global norm:

    pull, gradients, push     part 0 by one worker, part 1 by the other
    numbers(0)                servers add up the parts; each returns the squared norm of its own
    commit(numbers of both)   servers update; each returns the step's metrics

With a quorum of K the first K parts make the update, as of a batch of their examples alone; the
others are dropped (Chen et al. 2016, "Revisiting Distributed Synchronous SGD").

A server that ended loses the updates since its last snapshot. All servers go back to it, and the
batches since then are computed again: the same updates, since they depend on nothing else.
"""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from plurax.server.coordinator import Batches, Coordinator, Flight, ShardSlot, Update
from plurax.server.messages import Header, Ticket
from plurax.server.residuals import Leaves
from plurax.state import TrainState


class _ServerLostError(Exception):
    """A server ended; all have gone back to their last snapshot."""


class Synchronous(Coordinator):
    """Hands out the parts of one batch, then updates once. See `Coordinator`."""

    fate = "computed again"

    def __init__(self, *args: Any, **options: Any) -> None:
        self._gone_back = False
        super().__init__(*args, **options)
        self._todo: deque[Ticket] = deque()
        self._until: float | None = None
        self._step: int | None = None
        self._arrived: dict[int, Ticket] = {}
        self._history: list[list[Ticket]] = []

    def run(self, batches: Batches, stopping: Callable[[], bool]) -> Iterator[list[Update]]:
        """Train on batches; yield the update of each."""
        while not stopping() and (parts := next(batches, None)) is not None:
            self._history.append(parts)
            yield [self._updated(len(self._history) - 1)]

    def state(self, step: int) -> tuple[TrainState, list[Leaves] | None]:
        """Return the state, canonical, after `step` batches, and each worker's residuals."""
        while True:
            try:
                return super().state(step)
            except _ServerLostError:
                self._again(len(self._history))

    def _updated(self, at: int) -> Update:
        """Take the batches since the last snapshot from `at` on; return the last one's update."""
        while True:
            try:
                for parts in self._history[at:]:
                    update = self._take(parts)
                    at += 1
                # Only between two steps are the versions of all servers the same.
                if self._is_due():
                    self._save()
                self.account.updates += 1
                return update
            except _ServerLostError:
                self.account.repeated += at
                at = 0

    def _again(self, count: int) -> None:
        """Take the batches since the last snapshot again."""
        if count:
            self.account.repeated += count
            self.account.updates -= 1
            self._updated(0)

    def _save(self) -> None:
        """Take a snapshot of all servers, or of none."""
        references = [
            self.transport.call(slot.actor, "snapshot", returns=2, lasting=True)
            for slot in self.shards
        ]
        versions: dict[int, int] = {}
        for slot, (version, _) in zip(self.shards, references, strict=True):

            def taken(ref: Any, slot: ShardSlot = slot, n: int = slot.incarnation) -> None:
                versions[slot.index] = self._answer_of_server(slot, n, ref)

            self._waiting[version] = taken
        while len(versions) < len(self.shards):
            self._wait()
        for slot, (_, saved) in zip(self.shards, references, strict=True):
            self._keep(slot, saved, versions[slot.index], self._snapshots)
        self._history.clear()

    def _take(self, parts: list[Ticket]) -> Update:
        """Take one batch: gather the gradients of its parts, and commit them."""
        enough = min(self.spec.servers.quorum or len(parts), len(parts))
        if self.spec.servers.feedback:
            self._await_workers()
        self._step, self._arrived, self._todo = parts[0].step, {}, deque(parts)
        while len(self._arrived) < enough:
            for slot in self.workers:
                if self._todo and slot.ready and not slot.flights:
                    self._fly(slot, self._todo.popleft())
            self._wait()
        taken = sorted(self._arrived)
        self._step = None
        self.account.dropped_examples += sum(
            ticket.examples for ticket in parts if ticket.part not in taken
        )
        self.record("commit", step=parts[0].step, parts=taken)
        known: dict[int, Any] = {}
        for crossing in range(self.spec.update.crossings):
            numbers = self._all("numbers", taken, crossing, known)
            known = {**known, **self.spec.update.combined(numbers)}
        replies = self._all("commit", taken, known)
        for server, reply in zip(self.shards, replies, strict=True):
            server.version, server.deaths = reply.version, 0
        self.account.staleness[0] += len(taken)
        return Update({**replies[0].metrics, "staleness": np.float32(0)})

    def _await_workers(self) -> None:
        """Wait until all workers have started, at most a lease longer than the first.

        Then each part is computed by the same worker every time, which has its own left to send.
        """
        while any(not slot.ready and slot.life == 0 for slot in self.workers):
            if self._until is None and self.live:
                self._until = self.transport.now() + self.spec.servers.lease
            if self._until is not None and self.transport.now() >= self._until:
                return
            self._wait()

    def _wait(self) -> None:
        super()._wait()
        if self._gone_back:
            self._gone_back = False
            raise _ServerLostError

    def _push(self, flight: Flight, header: Header) -> None:
        if flight.ticket.step == self._step:
            self._send(flight, header, self._replied)
            return
        self._end(flight)
        self.account.rejected["late"] += 1
        # Not pushed, but its compression has changed what the worker has left to send.
        self.record("late", worker=flight.slot.index, life=flight.life, sequence=flight.sequence)

    def _replied(self, flight: Flight) -> None:
        self._end(flight)
        if flight.ticket.step != self._step:
            return
        reasons = {reply.reason for reply in flight.replies.values()}
        if reasons <= {None, "duplicate"}:  # a server may have it from before it was damaged
            self._arrived[flight.ticket.part] = flight.ticket
        elif "server restarted" not in reasons:
            # It was damaged on its way: compute it again.
            self._todo.append(flight.ticket)

    def _end(self, flight: Flight) -> None:
        if flight in flight.slot.flights:
            flight.slot.flights.remove(flight)
            flight.slot.clock += 1
            flight.slot.idle_since = self.transport.now()

    def _return(self, tickets: list[Ticket]) -> None:
        self._todo.extendleft(ticket for ticket in tickets if ticket.step == self._step)

    def _restarted(self, slot: ShardSlot) -> None:
        """Send all servers back to their last snapshot."""
        for one in self.shards:
            one.version = one.saved_version
            if one is not slot:
                one.incarnation += 1
                self.transport.call(one.actor, "restore", one.incarnation, one.saved)
        self._step, self._gone_back = None, True
