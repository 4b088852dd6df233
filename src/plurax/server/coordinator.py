"""The coordinator: starts workers and servers, hands out examples, and outlives every death.

It runs in the process of `fit`, holds no parameters, and sees no gradient: results go from workers
to servers and back by reference (`plurax.server.transport`). It knows who has which ticket, so a
ticket of a worker that ended goes to another.

What follows from an answer is written after it: each ticket is a coroutine (`_run_ticket`) that
pulls, has the gradient computed, and pushes it. Many run side by side, in one thread. Example, of
`async`, parameters `a` (500, 500) and `b` (300, 500) in float32 on 2 servers, batch 17 of 32 rows:

    call                                    answer, or a reference to it
    server 0, pull                          version 20    Pulled: 1,000,000 bytes of a
    server 1, pull                          version 20    Pulled:   600,000 bytes of b
    worker 1, gradients of 32 rows, with    Header: both versions, sums of weight and loss
        references to both Pulled           1,000,000 bytes for server 0, 600,000 for server 1
    server 0, push, with the Header and     Reply: version 22, staleness 1 (another's push came
        the reference to its 1,000,000          between), the loss
    server 1, push, with its 600,000        Reply: version 22, staleness 1, the loss

    Coordinator      actors, coroutines, deaths, snapshots
      Asynchronous   `bounded`, `async`: hands out tickets as workers become free
      Synchronous    `sync`: hands out the parts of one batch, then updates once
"""

import abc
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax

from plurax import errors
from plurax.server.account import Account
from plurax.server.coroutines import Awaiting, Coroutines, arrival, together
from plurax.server.messages import ON_THE_WAY, Header, Reply, Ticket
from plurax.server.record import Record
from plurax.server.residuals import Leaves, zero_leaves
from plurax.server.run_spec import RunSpec
from plurax.server.shard import first_snapshot, joined_state, make_shard
from plurax.server.shard_layout import to_host
from plurax.server.transport import Actor, ActorGoneError, ResultLostError, Transport
from plurax.server.worker import Worker
from plurax.state import TrainState

POLL_SECONDS = 0.5
"""Between two looks at who still lives."""
SLOW_START = 30.0
"""Seconds after which a line says that a worker or a server has not answered yet."""
MAX_DEATHS = 3
"""Of a worker or a server, one after the other without having answered in between."""

T = TypeVar("T")
Batches = Iterator[list[Ticket]]
"""The parts of each batch."""
Metrics = dict[str, Any]
"""Of the update of one batch: scalars, as `Program.step` returns them."""


class WorkerSlot:
    """A worker as the coordinator knows it.

    **Attributes:** `life`, how often it was started before; `started` and `clock`, how many tickets
    it got and finished; `sequence`, the number of its next push; `assignments`, its tickets that
    are not finished; `deaths`, since it last answered; `ready`, whether it has compiled;
    `idle_since`, when it began to wait for others; `residuals`, what it had left to send when it
    began, or was last asked; they are lost with it.
    """

    actor: Actor

    def __init__(self, index: int, residuals: Leaves | None) -> None:
        self.index, self.residuals = index, residuals
        self.life = self.started = self.clock = self.sequence = self.deaths = 0
        self.assignments: list[WorkerTicket] = []
        self.ready = False
        self.idle_since: float | None = None


class ShardSlot:
    """A server as the coordinator knows it.

    **Attributes:** `version`, of its last answer; `saved`, a reference to the snapshot that it
    would be restarted from, `saved_version` and `saved_number`: its version, and the snapshot's
    number in the record; `incarnation`, how often it was restarted; `deaths`, since it last
    answered.
    """

    actor: Actor

    def __init__(self, index: int, saved: Any, version: int) -> None:
        self.index, self.saved = index, saved
        self.version = self.saved_version = version
        self.saved_number = self.incarnation = self.deaths = 0


class WorkerTicket:
    """A ticket that a worker has.

    **Attributes:** `life` of the worker then, and the `sequence` of the push; `pushed`, whether
    the gradient is on its way to the servers, which no longer needs the worker.
    """

    def __init__(self, ticket: Ticket, worker: WorkerSlot) -> None:
        self.ticket, self.worker = ticket, worker
        self.life, self.sequence, self.pushed = worker.life, worker.sequence, False

    @property
    def push_id(self) -> dict[str, int]:
        """The push as the record names it."""
        return {"worker": self.worker.index, "life": self.life, "sequence": self.sequence}


class Coordinator(abc.ABC):
    """Runs workers and servers. Use as a context manager.

    **Arguments:** `spec`; `transport`; `state`, canonical, to begin with; `account`, which it
    keeps; `record`, to which it writes every event, or None; `note`, which shows a line to the
    user; `residuals`, what the first workers begin with that their compression has left to send.
    """

    fate: str
    """Of the updates that a server had made since its last snapshot, when it ends."""

    def __init__(
        self,
        spec: RunSpec,
        transport: Transport,
        state: TrainState,
        account: Account,
        record: Record | None = None,
        note: Callable[[str], None] = lambda text: None,
        residuals: Sequence[Leaves] = (),
    ) -> None:
        self.spec, self.transport, self.account, self._record = spec, transport, account, record
        self._snapshots, self._note = 0, note
        self._coroutines = Coroutines()
        self._last_look = self._began = self.transport.now()
        self._since_snapshot = 0
        self._starting: dict[str, float] = {}
        self._key = to_host(state.key)
        self._spec = transport.put(spec)
        first = [first_snapshot(spec, index, state) for index in range(spec.servers.shards)]
        self.shards = [
            ShardSlot(index, transport.put(snapshot), snapshot.version)
            for index, snapshot in enumerate(first)
        ]
        self.workers = [
            WorkerSlot(index, residuals[index] if index < len(residuals) else None)
            for index in range(spec.servers.workers)
        ]
        for shard in self.shards:
            self._start_shard(shard)
        for worker in self.workers:
            self._start_worker(worker)

    def __enter__(self) -> "Coordinator":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close; an error that ends training is not replaced by one of the record."""
        self.transport.close()
        if self._record is not None:
            with contextlib.suppress(*() if kind is None else (errors.DiskError,)):
                self._record.close()

    def record(self, event: str, **values: Any) -> None:
        """Write an event to the record, with the seconds since the start."""
        if self._record is not None:
            at = {"at": round(self.transport.now() - self._began, 6)}
            # A resumed run finds where it was fetched by the step alone.
            self._record.write({"event": event, **values, **({} if event == "fetched" else at)})

    def flush(self) -> None:
        """Return when the record is on disk. Raises `DiskError`."""
        if self._record is not None:
            self._record.flush()

    @abc.abstractmethod
    def run(self, batches: Batches, stopping: Callable[[], bool]) -> Iterator[list[Metrics]]:
        """Train on batches; yield the metrics of their updates, one item a batch.

        All are finished when it returns. Where `stopping()` it takes no further batch.
        """

    @abc.abstractmethod
    def state(self, step: int) -> tuple[TrainState, list[Leaves] | None]:
        """Return the state, canonical, after `step` batches, and each worker's residuals.

        These are None where nothing is recorded, or the compression leaves nothing. All batches
        must be finished.
        """

    def summary(self) -> str:
        """Return a few words on the workers and their pushes."""
        rate = self.account.updates / max(self.transport.now() - self._began, 1e-9)
        parts = [f"{self.live} of {len(self.workers)} workers", f"{rate:.1f} updates/s"]
        if self.spec.servers.mode != "sync":
            parts.append(f"staleness {self.account.mean_staleness:.1f}")
        return ", ".join(parts)

    @property
    def live(self) -> int:
        """How many workers have compiled and not ended."""
        return sum(worker.ready for worker in self.workers)

    # --- A ticket -----------------------------------------------------------------------------

    def _assign(self, worker: WorkerSlot, ticket: Ticket) -> None:
        """Give a ticket to a worker."""
        assignment = WorkerTicket(ticket, worker)
        self.record("pull", step=ticket.step, part=ticket.part, **assignment.push_id)
        worker.assignments.append(assignment)
        worker.sequence += 1
        worker.started += 1
        if worker.idle_since is not None:
            waited = self.account.waited_seconds
            waited[worker.index] = (
                waited.get(worker.index, 0.0) + self.transport.now() - worker.idle_since
            )
            worker.idle_since = None
        self._coroutines.start(self._run_ticket(assignment))

    async def _run_ticket(self, assignment: WorkerTicket) -> None:
        """Pull the parameters, let the worker compute, and push its gradient."""
        worker = assignment.worker
        pulled = await self._pull(assignment)
        if assignment not in worker.assignments:
            return  # it was given back, or the worker has ended
        # Not before the parameters are there: a call whose arguments are missing would hold up the
        # worker's next calls, and its signs of life.
        self.record("compute", **assignment.push_id)
        reference, *content = self.transport.call(
            worker.actor, "gradients", assignment.ticket, assignment.sequence, *pulled,
            returns=1 + len(self.shards),
        )  # fmt: skip
        del pulled  # so that its memory is used again as soon as the worker has answered
        try:
            header = self.transport.get(await arrival(reference))
        except ActorGoneError:
            self._lost_worker(worker, assignment.life)
            return
        except ResultLostError:
            self._give_back(assignment)
            return
        if assignment not in worker.assignments:
            self.account.rejected["worker restarted"] += 1
            return
        worker.deaths = 0
        self.account.worker_steps[worker.index] += 1
        self.account.pulled_bytes += self.spec.layout.sent_bytes
        self.account.pushed_bytes += header.sent
        if self._is_late(assignment.ticket):
            self.account.rejected["late"] += 1
            # Not pushed, but its compression has changed what the worker has left to send.
            self.record("late", **assignment.push_id)
            replies = []
        else:
            replies = await self._push(assignment, header, content)
        worker.assignments.remove(assignment)
        worker.clock += 1
        self._pushed(assignment, replies)

    async def _pull(self, assignment: WorkerTicket) -> list[Any]:
        """Return a reference to the parameters of each server; one that ended gives none."""
        began = self.transport.now()

        async def pull(shard: ShardSlot) -> Any:
            version, pulled = self.transport.call(
                shard.actor, "pull", assignment.worker.index, assignment.sequence, returns=2
            )
            if await self._answer(shard, version) is None:
                self._give_back(assignment)
            return pulled

        pulled = await together(pull(shard) for shard in self.shards)
        if assignment in assignment.worker.assignments:
            self.account.pull_seconds.append(self.transport.now() - began)
        return pulled

    async def _push(
        self, assignment: WorkerTicket, header: Header, content: Sequence[Any]
    ) -> list[Reply]:
        """Push a gradient to all servers; return their replies."""
        assignment.pushed, began = True, self.transport.now()
        self.record("push", **assignment.push_id)

        async def push(shard: ShardSlot, part: Any) -> Reply:
            incarnation = shard.incarnation
            (reference,) = self.transport.call(shard.actor, "push", header, part)
            reply: Reply | None = await self._answer(
                shard, reference, lambda: Reply("lost on the way", shard.version)
            )
            if reply is None or incarnation != shard.incarnation:
                # What a server took before it went back is lost, whatever it answered.
                reply = Reply("server restarted", shard.version)
            else:
                shard.version, shard.deaths = reply.version, 0
            if reply.reason is not None:
                self.account.rejected[reply.reason] += 1
            if reply.reason in ON_THE_WAY:
                self.record(
                    "refused", server=shard.index, **assignment.push_id, reason=reply.reason
                )
            return reply

        replies = await together(
            push(shard, part) for shard, part in zip(self.shards, content, strict=True)
        )
        self.account.push_seconds.append(self.transport.now() - began)
        return replies

    @abc.abstractmethod
    def _is_late(self, ticket: Ticket) -> bool:
        """Return whether a gradient is dropped that a worker has computed of this ticket."""

    @abc.abstractmethod
    def _pushed(self, assignment: WorkerTicket, replies: Sequence[Reply]) -> None:
        """Account for a push that all servers have answered; without replies, that was late."""

    def _give_back(self, assignment: WorkerTicket) -> None:
        """Take a ticket back whose parameters or gradient will not come; its worker is well."""
        if assignment in assignment.worker.assignments:
            assignment.worker.started -= 1
            self._reassign([assignment])

    def _reassign(self, assignments: Sequence[WorkerTicket]) -> None:
        """Take the tickets of a worker's assignments from it."""
        for assignment in assignments:
            assignment.worker.assignments.remove(assignment)
        self.account.reassigned += len(assignments)
        self._take_back([assignment.ticket for assignment in assignments])

    @abc.abstractmethod
    def _take_back(self, tickets: list[Ticket]) -> None:
        """Give these tickets to other workers, before any others."""

    # --- Workers ------------------------------------------------------------------------------

    def _start_worker(self, worker: WorkerSlot) -> None:
        name, residuals = f"worker {worker.index}", worker.residuals
        self._starting[name] = self.transport.now()
        worker.actor = self.transport.start(
            name, Worker, self._spec, worker.index, worker.life, self._key,
            None if residuals is None else self.transport.put(residuals),
            devices=self.spec.plan.devices,
        )  # fmt: skip
        self._coroutines.start(self._prepare(worker))

    async def _prepare(self, worker: WorkerSlot) -> None:
        """Count a worker once it has compiled: until then nobody waits for it."""
        life = worker.life
        (reference,) = self.transport.call(worker.actor, "prepare")
        try:
            self.transport.get(await arrival(reference))
        except ActorGoneError:
            self._lost_worker(worker, life)
            return
        if life != worker.life:
            return
        worker.ready = True
        self._starting.pop(worker.actor.name, None)
        self.record("worker ready", worker=worker.index, life=life)
        others = [other.clock for other in self.workers if other.ready and other is not worker]
        # It would hold up everybody if it began at zero.
        worker.clock = worker.started = max(worker.clock, min(others, default=0))

    def _lost_worker(self, worker: WorkerSlot, life: int) -> None:
        """Hand on the tickets of a worker that has ended, and start it again."""
        if life != worker.life:
            return  # of a life that was ended already
        # What it has pushed is on its way without it.
        self._reassign([one for one in worker.assignments if not one.pushed])
        worker.life, worker.ready, worker.deaths = worker.life + 1, False, worker.deaths + 1
        self.record("worker lost", worker=worker.index, life=life)
        worker.residuals = None  # lost with its memory
        with contextlib.suppress(ActorGoneError):
            self.transport.stop(worker.actor)
        if worker.deaths >= MAX_DEATHS:
            if all(other.deaths >= MAX_DEATHS for other in self.workers):
                raise errors.PlanError(
                    f"all {len(self.workers)} workers ended, {MAX_DEATHS} times each without "
                    "having computed a gradient; their processes were killed or found no memory. "
                    "Training stopped; what was saved last can be resumed."
                )
            self._note(f"worker {worker.index} ended {MAX_DEATHS} times, and is given up")
            return
        self.account.restarts.append(f"worker {worker.index}")
        self._note(f"worker {worker.index} ended: others get its examples; it is started again")
        self._start_worker(worker)

    # --- Servers ------------------------------------------------------------------------------

    def _start_shard(self, shard: ShardSlot) -> None:
        name = f"server {shard.index}"
        self._starting[name] = self.transport.now()
        shard.actor = self.transport.start(
            name, make_shard, self._spec, shard.index, shard.incarnation, shard.saved, devices=0
        )

    async def _answer(
        self, shard: ShardSlot, reference: Any, lost: Callable[[], Any] = lambda: None
    ) -> Any:
        """Return a server's answer, or None where it has ended.

        `lost()` is the answer where what the call was given is lost; if it was given nothing, the
        answer is lost with the server's machine.
        """
        incarnation = shard.incarnation
        try:
            answer = self.transport.get(await arrival(reference))
        except ActorGoneError:
            answer = None
        except ResultLostError:
            answer = lost()
        if answer is None:
            self._lost_shard(shard, incarnation)
        else:
            self._starting.pop(shard.actor.name, None)
        return answer

    def _ask_all(self, method: str, *args: Any) -> list[Any]:
        """Call a method of all servers; return their answers, None of one that has ended."""

        async def ask(shard: ShardSlot) -> Any:
            (reference,) = self.transport.call(shard.actor, method, *args)
            return await self._answer(shard, reference)

        return self._complete(together(map(ask, self.shards)))

    def _lost_shard(self, shard: ShardSlot, incarnation: int) -> None:
        """Start a server again that has ended."""
        if incarnation != shard.incarnation:
            return
        shard.deaths += 1
        if shard.deaths >= MAX_DEATHS:
            raise errors.PlanError(
                f"server {shard.index} ended {MAX_DEATHS} times without having answered; its "
                "process was killed or found no memory. Training stopped; what was saved last can "
                "be resumed."
            )
        self.account.restarts.append(f"server {shard.index}")
        self._note(
            f"server {shard.index} ended at version {shard.version}: it is started again from "
            f"version {shard.saved_version}, and the updates between are {self.fate}"
        )
        with contextlib.suppress(ActorGoneError):
            self.transport.stop(shard.actor)
        shard.incarnation += 1
        self.record("server lost", server=shard.index, version=shard.version,
                    restored=shard.saved_version, number=shard.saved_number)  # fmt: skip
        self._start_shard(shard)
        self._restarted(shard)

    @abc.abstractmethod
    def _restarted(self, shard: ShardSlot) -> None:
        """Account for what a server lost that was started again."""

    # --- State --------------------------------------------------------------------------------

    def _is_due(self) -> bool:
        """Count an update, and return whether it is time for a snapshot to be restarted from."""
        self._since_snapshot += 1
        due = self._since_snapshot >= self.spec.servers.snapshot_every
        if due:
            self._since_snapshot = 0
            self._snapshots += 1
            self.record("snapshot", number=self._snapshots)
        return due

    async def _snapshot(self, shard: ShardSlot) -> tuple[int | None, Any]:
        """Take a snapshot; return its version, None where the server has ended, and a reference."""
        version, saved = self.transport.call(shard.actor, "snapshot", returns=2, lasting=True)
        return await self._answer(shard, version), saved

    def _keep(self, shard: ShardSlot, saved: Any, version: int, number: int) -> None:
        """Restart a server from this snapshot from now on."""
        shard.saved, shard.saved_version, shard.saved_number = saved, version, number
        self.record("saved", server=shard.index, number=number)

    def _fetch_state(self, step: int) -> tuple[TrainState, list[Leaves] | None]:
        """Return what `state` does, from servers that do not go back meanwhile."""
        # Without a record nobody saves residuals.
        wanted = self._record is not None and self.spec.servers.feedback
        ready = [worker for worker in self.workers if wanted and worker.ready]
        # A part that comes after the quorum changes what is left too. Whoever still computes one
        # answers that call first, so its end is in the record before the state is fetched.
        self._complete(together(map(self._fetch_residuals, ready)))
        answers: list[Any] = [None]
        while None in answers:  # a server that has ended is restarted, and asked again
            answers = self._ask_all("snapshot")
        self.record("fetched", step=step)
        state = joined_state(self.spec, [snapshot for _, snapshot in answers], step)
        if not wanted:
            return state, None
        zeros = zero_leaves(jax.tree.leaves(self.spec.state.params))
        residuals = [
            zeros if left is None else left for left in (w.residuals for w in self.workers)
        ]
        for worker in ready:
            worker.residuals = None  # they change with its next push
        return state, residuals

    async def _fetch_residuals(self, worker: WorkerSlot) -> None:
        """Note what a worker has left to send, unless it ends."""
        life = worker.life
        while life == worker.life:
            (reference,) = self.transport.call(worker.actor, "residuals")
            try:
                worker.residuals = self.transport.get(await arrival(reference))
                return
            except ActorGoneError:
                self._lost_worker(worker, life)
            except ResultLostError:
                pass  # ask again

    # --- Waiting ------------------------------------------------------------------------------

    def _complete(self, coroutine: Awaiting[T]) -> T:
        """Run a coroutine to its end; return what it returns."""
        returned: list[T] = []

        async def run() -> None:
            returned.append(await coroutine)

        self._coroutines.start(run())
        while not returned:
            self._wait()
        return returned[0]

    def _wait(self) -> None:
        """Go on with what awaits the answers that are there, once there is one."""
        self._coroutines.resume(self.transport.wait(self._coroutines.awaited, POLL_SECONDS))
        now = self.transport.now()
        if now - self._last_look >= POLL_SECONDS:
            self._last_look = now
            self._look()
        self._waited()

    @abc.abstractmethod
    def _waited(self) -> None:
        """Raise what ended meanwhile, in the call that waits, and in no coroutine."""

    def _look(self) -> None:
        """Give up actors that gave no sign of life for too long; name those that do not start."""
        for name, since in [*self._starting.items()]:
            if self.transport.now() - since > SLOW_START:
                del self._starting[name]
                self._note(
                    f"{name} has not answered since it was started {SLOW_START:.0f} s ago: it "
                    "still compiles, or the cluster has no free processor (or GPUs) for it"
                )
        workers = {one.actor.name: one for one in self.workers if one.deaths < MAX_DEATHS}
        shards = {shard.actor.name: shard for shard in self.shards}
        actors = [one.actor for one in workers.values()] + [one.actor for one in self.shards]
        for actor in self.transport.silent(actors, self.spec.servers.lease):
            if (worker := workers.get(actor.name)) is not None:
                self._lost_worker(worker, worker.life)
            elif (shard := shards.get(actor.name)) is not None:
                self._lost_shard(shard, shard.incarnation)
