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

import math
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from plurax.server.coordinator import Batches, Coordinator, Flight, ShardSlot, Update, WorkerSlot
from plurax.server.messages import Header, Ticket

IN_FLIGHT = 2
"""Tickets of a worker that are not finished."""


class Asynchronous(Coordinator):
    """Hands out whole batches; each is one push and one update. See `Coordinator`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._returned: deque[Ticket] = deque()
        self._updates: list[Update] = []
        like = self.spec.update.metrics
        self._last: dict[str, Any] = {name: np.zeros((), like[name].dtype) for name in like}

    def run(self, batches: Batches, stopping: Callable[[], bool]) -> Iterator[list[Update]]:
        """Train on batches; yield what came of them, one item a batch."""
        more = True
        while True:
            while (more or self._returned) and (slot := self._free()) is not None:
                more = more and not stopping()
                ticket = self._next(batches) if more or self._returned else None
                if ticket is None:
                    more = False
                else:
                    self._fly(slot, ticket)
            flying = any(slot.flights for slot in self.workers)  # pushes of the lost included
            if not flying and not more and not self._returned:
                return
            self._wait()
            if self._updates:
                updates, self._updates = self._updates, []
                yield updates

    def _next(self, batches: Batches) -> Ticket | None:
        if self._returned:
            return self._returned.popleft()
        return next((ticket for tickets in batches for ticket in tickets), None)

    def _free(self) -> WorkerSlot | None:
        """Return the worker that has done least of those that may start a step, or None."""
        live = [slot for slot in self.workers if slot.ready]
        if not live:
            return None
        bound = self.spec.servers.staleness
        least = min(slot.clock for slot in live)
        most = math.inf if bound is None else least + bound
        free = []
        for slot in live:
            if len(slot.flights) >= IN_FLIGHT or any(not one.pushed for one in slot.flights):
                continue
            if slot.started <= most:
                free.append(slot)
            elif not slot.flights and slot.idle_since is None:
                slot.idle_since = self.transport.now()
        return min(free, key=lambda slot: (slot.started, slot.index), default=None)

    def _push(self, flight: Flight, header: Header) -> None:
        self._send(flight, header, self._replied)

    def _replied(self, flight: Flight) -> None:
        """Account for a push that all servers have answered."""
        slot = flight.slot
        if flight in slot.flights:
            slot.flights.remove(flight)
            slot.clock += 1
        taken = [reply for reply in flight.replies.values() if reply.reason is None]
        # A batch whose push was refused counts for nothing, and its row has the loss before.
        metrics, staleness = {**self._last, "weight": 0 * self._last["weight"]}, 0.0
        metrics["examples"] = 0 * metrics["examples"]
        if taken:
            self.account.updates += 1
            self.account.staleness[taken[0].staleness] += 1
            metrics, staleness = taken[0].metrics, float(taken[0].staleness)
            self._last = metrics
        self._updates.append(Update({**metrics, "staleness": np.float32(staleness)}))
        if self._is_due():
            for one in self.shards:
                self._save(one)

    def _save(self, slot: ShardSlot) -> None:
        """Ask one server for a snapshot. Those of others are of other moments, which is well."""
        version, saved = self.transport.call(slot.actor, "snapshot", returns=2, lasting=True)
        incarnation, number = slot.incarnation, self._snapshots

        def taken(ref: Any) -> None:
            found = self._answer_of_server(slot, incarnation, ref)
            newer = number > slot.saved_number
            if found is not None and incarnation == slot.incarnation and newer:
                self._keep(slot, saved, found, number)

        self._waiting[version] = taken

    def _return(self, tickets: list[Ticket]) -> None:
        self._returned.extendleft(reversed(tickets))

    def _restarted(self, slot: ShardSlot) -> None:
        lost = slot.version - slot.saved_version
        self.account.lost_updates[slot.index] += lost
        slot.version = slot.saved_version
