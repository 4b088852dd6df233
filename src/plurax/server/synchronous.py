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
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from plurax.server.coordinator import Batches, Coordinator, Metrics, ShardSlot, WorkerTicket
from plurax.server.coroutines import together
from plurax.server.messages import Reply, Ticket
from plurax.server.residuals import Leaves
from plurax.state import TrainState


class _ServerLostError(Exception):
    """A server ended; all have gone back to their last snapshot."""


class Synchronous(Coordinator):
    """Hands out the parts of one batch, then updates once. See `Coordinator`."""

    fate = "computed again"

    def __init__(self, *args: Any, **options: Any) -> None:
        self._gone_back = False
        self._todo: deque[Ticket] = deque()
        self._until: float | None = None
        self._step: int | None = None
        self._arrived: set[int] = set()
        self._history: list[list[Ticket]] = []
        super().__init__(*args, **options)

    def run(self, batches: Batches, stopping: Callable[[], bool]) -> Iterator[list[Metrics]]:
        """Train on batches; yield the metrics of the update of each."""
        while not stopping() and (parts := next(batches, None)) is not None:
            self._history.append(parts)
            yield [self._updated(len(self._history) - 1)]

    def state(self, step: int) -> tuple[TrainState, list[Leaves] | None]:
        """Return the state, canonical, after `step` batches, and each worker's residuals."""
        while True:
            try:
                return self._fetch_state(step)
            except _ServerLostError:
                self._repeat(len(self._history))

    def _updated(self, at: int) -> Metrics:
        """Take the batches since the last snapshot from `at` on; return the last one's metrics."""
        while True:
            try:
                for parts in self._history[at:]:
                    metrics = self._take(parts)
                    at += 1
                # Only between two steps are the versions of all servers the same.
                if self._is_due():
                    self._save()
                self.account.updates += 1
                return metrics
            except _ServerLostError:
                self.account.repeated += at
                at = 0

    def _repeat(self, count: int) -> None:
        """Take the batches since the last snapshot again."""
        if count:
            self.account.repeated += count
            self.account.updates -= 1
            self._updated(0)

    def _save(self) -> None:
        """Keep a snapshot of all servers, or of none."""
        snapshots = self._complete(together(map(self._snapshot, self.shards)))
        for shard, (version, saved) in zip(self.shards, snapshots, strict=True):
            assert version is not None
            self._keep(shard, saved, version, self._snapshots)
        self._history.clear()

    def _take(self, parts: list[Ticket]) -> Metrics:
        """Take one batch: gather the gradients of its parts, and commit them."""
        enough = min(self.spec.servers.quorum or len(parts), len(parts))
        if self.spec.servers.feedback:
            self._await_workers()
        self._step, self._arrived, self._todo = parts[0].step, set(), deque(parts)
        while len(self._arrived) < enough:
            for worker in self.workers:
                if self._todo and worker.ready and not worker.assignments:
                    self._assign(worker, self._todo.popleft())
            self._wait()
        taken = sorted(self._arrived)
        self._step = None
        self.account.dropped_examples += sum(
            ticket.examples for ticket in parts if ticket.part not in taken
        )
        self.record("commit", step=parts[0].step, parts=taken)
        known = self.spec.update.exchange(
            lambda crossing, known: self._ask_all("numbers", taken, crossing, known)
        )
        replies = self._ask_all("commit", taken, known)
        for shard, reply in zip(self.shards, replies, strict=True):
            shard.version, shard.deaths = reply.version, 0
        self.account.staleness[0] += len(taken)
        return {**replies[0].metrics, "staleness": np.float32(0)}

    def _await_workers(self) -> None:
        """Wait until all workers have started, at most a lease longer than the first.

        Then each part is computed by the same worker every time, which has its own left to send.
        """
        while any(not worker.ready and worker.life == 0 for worker in self.workers):
            if self._until is None and self.live:
                self._until = self.transport.now() + self.spec.servers.lease
            if self._until is not None and self.transport.now() >= self._until:
                return
            self._wait()

    def _is_late(self, ticket: Ticket) -> bool:
        return ticket.step != self._step

    def _pushed(self, assignment: WorkerTicket, replies: Sequence[Reply]) -> None:
        assignment.worker.idle_since = self.transport.now()
        ticket, reasons = assignment.ticket, {reply.reason for reply in replies}
        if self._is_late(ticket) or "server restarted" in reasons:
            return
        if reasons <= {None, "duplicate"}:  # a server may have it from before it was damaged
            self._arrived.add(ticket.part)
        else:  # it was damaged on its way: compute it again
            self._todo.append(ticket)

    def _take_back(self, tickets: list[Ticket]) -> None:
        self._todo.extendleft(ticket for ticket in tickets if ticket.step == self._step)

    def _restarted(self, shard: ShardSlot) -> None:
        """Send all servers back to their last snapshot."""
        for other in self.shards:
            other.version = other.saved_version
            if other is not shard:
                other.incarnation += 1
                self.transport.call(other.actor, "restore", other.incarnation, other.saved)
        self._step, self._gone_back = None, True

    def _waited(self) -> None:
        if self._gone_back:
            self._gone_back = False
            raise _ServerLostError
