"""The coordinator: starts workers and servers, hands out examples, and outlives every death.

It runs in the process of `fit`, holds no parameters, and sees no gradient: results go from workers
to servers and back (`plurax.server.transport`). It knows who has which ticket, so a ticket of a
worker that ended goes to another.

    Coordinator      actors, calls that are not answered yet, deaths, snapshots
      Asynchronous   `bounded`, `async`: hands out tickets as workers become free
      Synchronous    `sync`: hands out the parts of one batch, then updates once
"""

import abc
import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from plurax import errors
from plurax.server.account import Account
from plurax.server.messages import ON_THE_WAY, Header, Reply, Snapshot, Ticket
from plurax.server.record import Record
from plurax.server.residuals import Leaves, zero_leaves
from plurax.server.run_spec import RunSpec
from plurax.server.shard import first_snapshot, joined_state, make_shard
from plurax.server.shard_layout import to_host
from plurax.server.transport import Actor, ActorGoneError, ResultLostError, Transport
from plurax.server.worker import Worker
from plurax.state import TrainState

PATIENCE = 0.5
"""Seconds between two looks at who still lives."""
SLOW_START = 30.0
"""Seconds after which a line says that a worker or a server has not answered yet."""
MOST_DEATHS = 3
"""Of a worker or a server, one after the other without having answered in between."""

Batches = Iterator[list[Ticket]]
"""The parts of each batch."""


@dataclasses.dataclass(frozen=True)
class Update:
    """What came of one batch: scalars, as `Program.step` returns them."""

    metrics: dict[str, Any]


class WorkerSlot:
    """A worker as the coordinator knows it.

    **Attributes:** `life`, how often it was started before; `started` and `clock`, how many tickets
    it got and finished; `sequence`, the number of its next push; `flights`, its tickets that are
    not finished; `deaths`, since it last answered; `ready`, whether it has compiled; `idle_since`,
    when it began to wait for others.
    """

    def __init__(self, index: int, actor: Actor) -> None:
        self.index, self.actor = index, actor
        self.life = self.started = self.clock = self.sequence = self.deaths = 0
        self.flights: list[Flight] = []
        self.ready = False
        self.idle_since: float | None = None


class ShardSlot:
    """A server as the coordinator knows it.

    **Attributes:** `version`, of its last answer; `saved`, a reference to the snapshot that it
    would be restarted from, `saved_version` and `saved_number`: its version, and the snapshot's
    number in the record; `incarnation`, how often it was restarted; `deaths`, since it last
    answered.
    """

    def __init__(self, index: int, actor: Actor, saved: Any, version: int) -> None:
        self.index, self.actor, self.saved = index, actor, saved
        self.version = self.saved_version = version
        self.saved_number = self.incarnation = self.deaths = 0


class Flight:
    """A ticket that a worker has.

    **Attributes:** `pulled`, for each server that has answered a reference to its parameters;
    `content`, for each server a reference to what is pushed; `pushed`, whether that is on its way;
    `replies`, of the servers that have answered.
    """

    def __init__(self, ticket: Ticket, slot: WorkerSlot) -> None:
        self.ticket, self.slot, self.life, self.sequence = ticket, slot, slot.life, slot.sequence
        self.pulled: dict[int, Any] = {}
        self.content: list[Any] = []
        self.pushed = False
        self.replies: dict[int, Reply] = {}


class Coordinator(abc.ABC):
    """Runs workers and servers. Use as a context manager.

    **Arguments:** `spec`; `transport`; `state`, canonical, to begin with; `account`, which it
    keeps; `record`, to which it writes every event, or None; `note`, which shows a line to the
    user; `residuals`, what the first workers begin with that their compression has left to send.
    """

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
        self._waiting: dict[Any, Callable[[Any], None]] = {}
        self._looked = self._began = self.transport.now()
        self._since_snapshot = 0
        self._starting: dict[str, float] = {}
        self._key = to_host(state.key)
        self._spec = transport.put(spec)
        # Of the workers that have not answered yet.
        self._begun_with = dict(enumerate(residuals))
        self.shards = [self._first_shard(index, state) for index in range(spec.servers.shards)]
        self.workers = [self._first_worker(index) for index in range(spec.servers.workers)]

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

    fate = "lost"
    """Of the updates that a server had made since its last snapshot, when it ends."""

    @abc.abstractmethod
    def run(self, batches: Batches, stopping: Callable[[], bool]) -> Iterator[list[Update]]:
        """Train on batches; yield what came of them, one item a batch.

        All are finished when it returns. Where `stopping()` it takes no further batch.
        """

    def summary(self) -> str:
        """Return a few words on the workers and their pushes."""
        counts = self.account.staleness
        total = sum(counts.values())
        mean = sum(n * count for n, count in counts.items()) / total if total else 0.0
        rate = self.account.updates / max(self.transport.now() - self._began, 1e-9)
        parts = [f"{self.live} of {len(self.workers)} workers", f"{rate:.1f} updates/s"]
        if self.spec.servers.mode != "sync":
            parts.append(f"staleness {mean:.1f}")
        return ", ".join(parts)

    @property
    def live(self) -> int:
        """How many workers have compiled and not ended."""
        return sum(slot.ready for slot in self.workers)

    # --- State --------------------------------------------------------------------------------

    def state(self, step: int) -> tuple[TrainState, list[Leaves] | None]:
        """Return the state, canonical, after `step` batches, and each worker's residuals.

        These are None where nothing is recorded, or the compression leaves nothing. All batches
        must be finished.
        """
        # Without a record nobody saves them.
        wanted = self._record is not None and self.spec.servers.feedback
        left = self._fetch_residuals() if wanted else {}
        found: list[Snapshot | None] = [None]
        while None in found:  # a server that has ended is restarted, and asked again
            found = [answer and answer[1] for answer in self._all("snapshot")]
        self.record("fetched", step=step)
        state = joined_state(self.spec, [one for one in found if one], step)
        return state, self._residuals(left) if wanted else None

    def _first_shard(self, index: int, state: TrainState) -> ShardSlot:
        first = first_snapshot(self.spec, index, state)
        saved = self.transport.put(first)
        return ShardSlot(index, self._start_shard(index, 0, saved), saved, first.version)

    def _start_shard(self, index: int, incarnation: int, saved: Any) -> Actor:
        self._starting[f"server {index}"] = self.transport.now()
        return self.transport.start(
            f"server {index}", make_shard, self._spec, index, incarnation, saved, devices=0
        )

    def _is_due(self) -> bool:
        """Count an update, and return whether it is time for a snapshot to be restarted from."""
        self._since_snapshot += 1
        due = self._since_snapshot >= self.spec.servers.snapshot_every
        if due:
            self._since_snapshot = 0
            self._snapshots += 1
            self.record("snapshot", number=self._snapshots)
        return due

    def _keep(self, slot: ShardSlot, saved: Any, version: int, number: int) -> None:
        """Restart a server from this snapshot from now on."""
        slot.saved, slot.saved_version, slot.saved_number = saved, version, number
        self.record("saved", server=slot.index, number=number)

    # --- Workers ------------------------------------------------------------------------------

    def _first_worker(self, index: int) -> WorkerSlot:
        slot = WorkerSlot(index, self._start_worker(index, 0))
        self._greet(slot)
        return slot

    def _start_worker(self, index: int, life: int) -> Actor:
        residuals = self._begun_with.get(index)
        self._starting[f"worker {index}"] = self.transport.now()
        return self.transport.start(
            f"worker {index}", Worker, self._spec, index, life, self._key,
            None if residuals is None else self.transport.put(residuals),
            devices=self.spec.plan.devices,
        )  # fmt: skip

    def _greet(self, slot: WorkerSlot) -> None:
        """Count a worker once it has compiled: until then nobody waits for it."""
        (ref,) = self.transport.call(slot.actor, "prepare")

        def there(ref: Any, life: int = slot.life) -> None:
            try:
                self.transport.get(ref)
            except ActorGoneError:
                self._lost_worker(slot, life)
                return
            if life == slot.life:
                slot.ready = True
                self._begun_with.pop(slot.index, None)
                self._starting.pop(slot.actor.name, None)
                self.record("worker ready", worker=slot.index, life=life)
                others = [one.clock for one in self.workers if one.ready and one is not slot]
                # It would hold up everybody if it began at zero.
                slot.clock = slot.started = max(slot.clock, min(others, default=0))

        self._waiting[ref] = there

    def _fly(self, slot: WorkerSlot, ticket: Ticket) -> None:
        """Give a ticket to a worker: the parameters are pulled, and it computes."""
        self.record("pull", step=ticket.step, part=ticket.part, worker=slot.index, life=slot.life,
                    sequence=slot.sequence)  # fmt: skip
        began = self.transport.now()
        flight = Flight(ticket, slot)
        slot.flights.append(flight)
        slot.sequence += 1
        slot.started += 1
        if slot.idle_since is not None:
            waited = self.account.waited_seconds
            waited[slot.index] = waited.get(slot.index, 0.0) + began - slot.idle_since
            slot.idle_since = None
        for one in self.shards:
            there, pulled = self.transport.call(
                one.actor, "pull", slot.index, flight.sequence, returns=2
            )

            def came(
                ref: Any, one: ShardSlot = one, n: int = one.incarnation, pulled: Any = pulled
            ) -> None:
                if self._answer_of_server(one, n, ref) is None:
                    self._not_pulled(flight)
                    return
                flight.pulled[one.index] = pulled
                if len(flight.pulled) == len(self.shards) and flight in slot.flights:
                    self.account.pull_seconds.append(self.transport.now() - began)
                    self._compute(flight)

            self._waiting[there] = came

    def _not_pulled(self, flight: Flight) -> None:
        """Hand on a ticket whose parameters will not come; its worker is well."""
        if flight in flight.slot.flights:
            flight.slot.flights.remove(flight)
            flight.slot.started -= 1
            self._reassign([flight])

    def _compute(self, flight: Flight) -> None:
        """Let a worker compute, once the parameters are there.

        Not before: a call whose arguments are missing would hold up the worker's next calls, and
        its signs of life.
        """
        self.record("compute", worker=flight.slot.index, life=flight.life,
                    sequence=flight.sequence)  # fmt: skip
        pulled = [flight.pulled[one.index] for one in self.shards]
        header, *flight.content = self.transport.call(
            flight.slot.actor, "gradients", flight.ticket, flight.sequence, *pulled,
            returns=1 + len(self.shards),
        )  # fmt: skip
        self._waiting[header] = lambda ref: self._computed(flight, ref)

    def _computed(self, flight: Flight, ref: Any) -> None:
        """Send a gradient to the servers, once its worker has it."""
        slot = flight.slot
        try:
            header = self.transport.get(ref)
        except ActorGoneError:
            self._lost_worker(slot, flight.life)
            return
        except ResultLostError:
            self._not_pulled(flight)
            return
        flight.pulled.clear()
        if flight not in slot.flights:
            self.account.rejected["worker restarted"] += 1
            return
        slot.deaths = 0
        self.account.worker_steps[slot.index] += 1
        self.account.pulled_bytes += self.spec.layout.sent_bytes
        self.account.pushed_bytes += header.sent
        self._push(flight, header)

    @abc.abstractmethod
    def _push(self, flight: Flight, header: Header) -> None:
        """Push a gradient, or drop it."""

    def _send(self, flight: Flight, header: Header, replied: Callable[[Flight], None]) -> None:
        """Push a gradient to all servers; call `replied` when all have answered."""
        flight.pushed, began = True, self.transport.now()
        self.record("push", worker=flight.slot.index, life=flight.life, sequence=flight.sequence)
        for slot, content in zip(self.shards, flight.content, strict=True):
            (ref,) = self.transport.call(slot.actor, "push", header, content)

            def answered(ref: Any, slot: ShardSlot = slot, n: int = slot.incarnation) -> None:
                reply = self._answer_of_server(slot, n, ref, Reply("lost on the way", slot.version))
                if reply is None or n != slot.incarnation:
                    # What a server took before it went back is lost, whatever it answered.
                    reply = Reply("server restarted", slot.version)
                else:
                    slot.version, slot.deaths = reply.version, 0
                if reply.reason is not None:
                    self.account.rejected[reply.reason] += 1
                if reply.reason in ON_THE_WAY:
                    self.record("refused", server=slot.index, worker=flight.slot.index,
                                life=flight.life, sequence=flight.sequence,
                                reason=reply.reason)  # fmt: skip
                flight.replies[slot.index] = reply
                if len(flight.replies) == len(self.shards):
                    self.account.push_seconds.append(self.transport.now() - began)
                    replied(flight)

            self._waiting[ref] = answered

    def _lost_worker(self, slot: WorkerSlot, life: int) -> None:
        """Hand on the tickets of a worker that has ended, and start it again."""
        if life != slot.life:
            return  # of a life that was ended already
        lost = [flight for flight in slot.flights if not flight.pushed]
        # What it has pushed is on its way without it.
        slot.flights = [flight for flight in slot.flights if flight.pushed]
        self._reassign(lost)
        slot.life, slot.ready, slot.deaths = slot.life + 1, False, slot.deaths + 1
        self.record("worker lost", worker=slot.index, life=life)
        self._begun_with.pop(slot.index, None)  # lost with the memory of its worker
        with contextlib.suppress(ActorGoneError):
            self.transport.stop(slot.actor)
        if slot.deaths >= MOST_DEATHS:
            if all(one.deaths >= MOST_DEATHS for one in self.workers):
                raise errors.PlanError(
                    f"all {len(self.workers)} workers ended, {MOST_DEATHS} times each without "
                    "having computed a gradient; their processes were killed or found no memory. "
                    "Training stopped; what was saved last can be resumed."
                )
            self._note(f"worker {slot.index} ended {MOST_DEATHS} times, and is given up")
            return
        self.account.restarts.append(f"worker {slot.index}")
        self._note(f"worker {slot.index} ended: others get its examples; it is started again")
        slot.actor = self._start_worker(slot.index, slot.life)
        self._greet(slot)

    def _reassign(self, flights: list[Flight]) -> None:
        self.account.reassigned += len(flights)
        self._return([flight.ticket for flight in flights])

    @abc.abstractmethod
    def _return(self, tickets: list[Ticket]) -> None:
        """Take back tickets, to be given to other workers first."""

    def _fetch_residuals(self) -> dict[int, tuple[int, Leaves]]:
        """Return the life and the residuals of each worker that may have any."""
        # A part that comes after the quorum changes what is left too. Whoever still computes one
        # answers that call first, so its end is in the record before the state is fetched.
        found = {index: (0, leaves) for index, leaves in self._begun_with.items()}

        def ask(slot: WorkerSlot) -> None:
            (ref,) = self.transport.call(slot.actor, "residuals")

            def there(ref: Any, life: int = slot.life) -> None:
                try:
                    found[slot.index] = life, self.transport.get(ref)
                except ActorGoneError:
                    self._lost_worker(slot, life)
                except ResultLostError:
                    ask(slot)

            self._waiting[ref] = there

        asked = [slot for slot in self.workers if slot.ready]
        lives = [slot.life for slot in asked]
        for slot in asked:
            ask(slot)
        while any(
            slot.life == life and slot.index not in found
            for slot, life in zip(asked, lives, strict=True)
        ):
            self._wait()
        return found

    def _residuals(self, found: Mapping[int, tuple[int, Leaves]]) -> list[Leaves]:
        """Return what each worker has left to send; of one that was lost since, zeros."""
        residuals, zeros = [], zero_leaves(jax.tree.leaves(self.spec.state.params))
        for slot in self.workers:
            life, leaves = found.get(slot.index, (-1, []))
            residuals.append(leaves if life == slot.life else zeros)
        return residuals

    # --- Servers ------------------------------------------------------------------------------

    def _answer_of_server(
        self, slot: ShardSlot, incarnation: int, ref: Any, lost: Any = None
    ) -> Any:
        """Return a server's answer, or None where it has ended.

        `lost`, where what it was given is lost; of a call that was given nothing, the answer is
        lost with the server's machine.
        """
        try:
            answer = self.transport.get(ref)
        except ActorGoneError:
            answer = None
        except ResultLostError:
            answer = lost
        if answer is None:
            self._lost_server(slot, incarnation)
        else:
            self._starting.pop(slot.actor.name, None)
        return answer

    def _all(self, method: str, *args: Any) -> list[Any]:
        """Call a method of all servers; return their answers, None of one that has ended."""
        answers: dict[int, Any] = {}
        for slot in self.shards:
            (ref,) = self.transport.call(slot.actor, method, *args)

            def answered(ref: Any, slot: ShardSlot = slot, n: int = slot.incarnation) -> None:
                answers[slot.index] = self._answer_of_server(slot, n, ref)

            self._waiting[ref] = answered
        while len(answers) < len(self.shards):
            self._wait()
        return [answers[slot.index] for slot in self.shards]

    def _lost_server(self, slot: ShardSlot, incarnation: int) -> None:
        """Start a server again that has ended."""
        if incarnation != slot.incarnation:
            return
        slot.deaths += 1
        if slot.deaths >= MOST_DEATHS:
            raise errors.PlanError(
                f"server {slot.index} ended {MOST_DEATHS} times without having answered; its "
                "process was killed or found no memory. Training stopped; what was saved last can "
                "be resumed."
            )
        self.account.restarts.append(f"server {slot.index}")
        self._note(
            f"server {slot.index} ended at version {slot.version}: it is started again from "
            f"version {slot.saved_version}, and the updates between are {self.fate}"
        )
        with contextlib.suppress(ActorGoneError):
            self.transport.stop(slot.actor)
        slot.incarnation += 1
        self.record("server lost", server=slot.index, version=slot.version,
                    restored=slot.saved_version, number=slot.saved_number)  # fmt: skip
        slot.actor = self._start_shard(slot.index, slot.incarnation, slot.saved)
        self._restarted(slot)

    @abc.abstractmethod
    def _restarted(self, slot: ShardSlot) -> None:
        """Account for what a server lost that was started again."""

    # --- Waiting ------------------------------------------------------------------------------

    def _wait(self) -> None:
        """Handle the answers that are there, once there is one."""
        for ref in self.transport.wait(list(self._waiting), PATIENCE):
            handler = self._waiting.pop(ref, None)
            if handler is not None:
                handler(ref)
        now = self.transport.now()
        if now - self._looked >= PATIENCE:
            self._looked = now
            self._look()

    def _look(self) -> None:
        """Give up actors that gave no sign of life for too long; name those that do not start."""
        for name, since in [*self._starting.items()]:
            if self.transport.now() - since > SLOW_START:
                del self._starting[name]
                self._note(
                    f"{name} has not answered since it was started {SLOW_START:.0f} s ago: it "
                    "still compiles, or the cluster has no free processor (or GPUs) for it"
                )
        lease = self.spec.servers.lease
        workers = {one.actor.name: one for one in self.workers if one.deaths < MOST_DEATHS}
        servers = {slot.actor.name: slot for slot in self.shards}
        actors = [one.actor for one in workers.values()] + [one.actor for one in servers.values()]
        for actor in self.transport.silent(actors, lease):
            if (worker := workers.get(actor.name)) is not None:
                self._lost_worker(worker, worker.life)
            elif (server := servers.get(actor.name)) is not None:
                self._lost_server(server, server.incarnation)
