"""`bounded` and `async`: every gradient updates the parameters when it comes.

A worker may start its step t if `t - 1 - min(clock of live workers) <= staleness`, where a worker's
clock counts its finished steps. Example, `staleness=1`, worker 2 is slow, one line a moment:

    clocks      worker 0         worker 1         worker 2
    0 0 0       starts step 1    starts step 1    starts step 1
    1 0 0       starts step 2
    1 1 0                        starts step 2
    2 1 0       waits: 3 - 1 - 0 > 1
    2 1 1                                         starts step 2
                starts step 3

A worker has up to two tickets, so that it computes while its push is on its way; more would only be
staler. Gradients are applied in the order in which they are computed.

Source: Ho et al. 2013, "More Effective Distributed ML via a Stale Synchronous Parallel Parameter
Server".
"""

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from plurax.server.coordinator import (
    Batches,
    Coordinator,
    Metrics,
    ShardSlot,
    WorkerSlot,
    WorkerTicket,
)
from plurax.server.messages import Reply, Ticket
from plurax.server.residuals import Leaves
from plurax.state import TrainState

MAX_IN_FLIGHT = 2
"""Tickets of a worker that are not finished."""


class Asynchronous(Coordinator):
    """Hands out whole batches; each is one push and one update. See `Coordinator`."""

    fate = "lost"

    def __init__(self, *args: Any, **options: Any) -> None:
        self._returned: deque[Ticket] = deque()
        self._updates: list[Metrics] = []
        super().__init__(*args, **options)
        like = self.spec.update.metrics
        self._last: Metrics = {name: np.zeros((), like[name].dtype) for name in like}

    def run(self, batches: Batches, stopping: Callable[[], bool]) -> Iterator[list[Metrics]]:
        """Train on batches; yield the metrics of their updates as they come."""
        tickets, more = itertools.chain.from_iterable(batches), True
        while True:
            while (more or self._returned) and (worker := self._free()) is not None:
                more = more and not stopping()
                if self._returned:
                    self._assign(worker, self._returned.popleft())
                elif more and (ticket := next(tickets, None)) is not None:
                    self._assign(worker, ticket)
                else:
                    more = False
            # Pushes of workers that have ended are on their way, too.
            busy = any(worker.assignments for worker in self.workers)
            if not busy and not more and not self._returned:
                return
            self._wait()
            if self._updates:
                updates, self._updates = self._updates, []
                yield updates

    def state(self, step: int) -> tuple[TrainState, list[Leaves] | None]:
        """Return the state, canonical, after `step` batches, and each worker's residuals."""
        return self._fetch_state(step)

    def _free(self) -> WorkerSlot | None:
        """Return the worker that has done least of those that may start a step, or None."""
        live = [worker for worker in self.workers if worker.ready]
        if not live:
            return None
        bound = self.spec.servers.staleness
        least = min(worker.clock for worker in live)
        most = math.inf if bound is None else least + bound
        free = []
        for worker in live:
            assigned = worker.assignments
            if len(assigned) >= MAX_IN_FLIGHT or any(not one.pushed for one in assigned):
                continue
            if worker.started <= most:
                free.append(worker)
            elif not assigned and worker.idle_since is None:
                worker.idle_since = self.transport.now()
        return min(free, key=lambda worker: (worker.started, worker.index), default=None)

    def _is_late(self, ticket: Ticket) -> bool:
        return False

    def _pushed(self, assignment: WorkerTicket, replies: Sequence[Reply]) -> None:
        taken = [reply for reply in replies if reply.reason is None]
        # A batch whose push was refused counts for nothing, and its row has the loss before.
        metrics, staleness = {**self._last, "weight": 0 * self._last["weight"]}, 0.0
        metrics["examples"] = 0 * metrics["examples"]
        if taken:
            self.account.updates += 1
            self.account.staleness[taken[0].staleness] += 1
            metrics, staleness = taken[0].metrics, float(taken[0].staleness)
            self._last = metrics
        self._updates.append({**metrics, "staleness": np.float32(staleness)})
        if self._is_due():
            for shard in self.shards:
                self._coroutines.start(self._save(shard))

    async def _save(self, shard: ShardSlot) -> None:
        """Keep one server's snapshot. Those of others are of other moments, which is well."""
        incarnation, number = shard.incarnation, self._snapshots
        version, saved = await self._snapshot(shard)
        newer = number > shard.saved_number
        if version is not None and incarnation == shard.incarnation and newer:
            self._keep(shard, saved, version, number)

    def _take_back(self, tickets: list[Ticket]) -> None:
        self._returned.extendleft(reversed(tickets))

    def _restarted(self, shard: ShardSlot) -> None:
        self.account.lost_updates[shard.index] += shard.version - shard.saved_version
        shard.version = shard.saved_version

    def _waited(self) -> None:
        pass
