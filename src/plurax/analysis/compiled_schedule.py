"""Walk along the schedule of a compiled program: how long it takes, and what it hides.

Problem. A compiler for TPUs or GPUs orders the instructions of a program and splits collectives
into a start and a done, between which the device computes. How much of the sending that hides
decides whether a plan is fast, and the machine need not be here to say it.

A device has two resources: it computes one instruction after another, and its link sends one
collective after another. An instruction takes the compiler's own estimate (`estimated_cycles`, on
TPUs) or what a roofline says (GPUs): the longer of its products and of the bytes it moves. A
collective takes what the machine's links say. The walk:

    instruction       computes          the link            waits
    all-gather-start                    0 .. 30 µs
    fusion            0 .. 20 µs
    all-gather-done                                         10 µs: 20 of 30 µs are hidden
    all-reduce                          30 .. 50 µs         20 µs: nothing is hidden

It is an estimate: an order of time, to compare plans and programs, not a measurement. Instructions
without an estimate count nothing, and `Schedule.covered` says how large their share is.

Sources: XLA's latency-hiding scheduler, which assumes the same two resources; `Machine`, for rates
and links.
"""

import dataclasses
from collections.abc import Sequence
from typing import final

from jax.sharding import Mesh

from plurax.collective import Collective
from plurax.hlo.compiled_collectives import Place, Sent, chain_of, collective_of, sent_by
from plurax.hlo.roofline import bytes_moved, products_of
from plurax.hlo.text import Instruction, Module, dtype_of
from plurax.machine import Machine
from plurax.trace.clock import collective_seconds, product_seconds

_FREE = frozenset(
    ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "partition-id", "replica-id",
     "after-all", "opt-barrier", "iota", "reshape")
)  # fmt: skip
"""Instructions that a device does not run, or not as a kernel."""
_NEVER = 10**13
"""Cycles above which an estimate is none: the compiler writes the largest integer."""


@dataclasses.dataclass(frozen=True)
class ScheduledCollective:
    """A collective of a compiled program, and what its schedule hides of it.

    **Fields:** `collective`; `dtype`; `asynchronous`, whether it is split into parts between which
    a device may compute; `seconds` of sending in one step, and of these `hidden`, behind
    instructions that run meanwhile; `operation`, its scopes and primitive in JAX.
    """

    collective: Collective
    dtype: str
    asynchronous: bool
    seconds: float
    hidden: float
    operation: str


@dataclasses.dataclass(frozen=True)
class CompiledSchedule:
    """What a walk along a compiled step found.

    **Fields:** `collectives`; `seconds` of a step; `computing`, the seconds of its instructions;
    `waiting`, those in which a device waits for its link; `covered`, the share of instructions with
    an estimate, counted as often as they run.
    """

    collectives: Sequence[ScheduledCollective]
    seconds: float
    computing: float
    waiting: float
    covered: float

    @property
    def sending(self) -> float:
        """The seconds in which the link sends."""
        return sum(one.seconds for one in self.collectives)

    @property
    def hidden(self) -> float:
        """The share of the sending that runs behind instructions; 1 where nothing is sent."""
        sending = self.sending
        return sum(one.hidden for one in self.collectives) / sending if sending else 1.0


def walk_schedule(
    module: Module, mesh: Mesh, machine: Machine, clock: float | None = None
) -> CompiledSchedule:
    """Walk along the schedule of a compiled program.

    **Arguments:** `module`; the `mesh` of the plan; `machine`, with its rates and links; `clock`,
    cycles per second of the compiler's estimates, None where it makes none.

    A loop whose length is data counts one iteration, of a conditional the longest branch.
    """
    walk = _ScheduleWalk(module, mesh, machine, clock)
    time = walk.computation(module.entry, Place(), 1)
    return CompiledSchedule(
        walk.collectives, time.total, time.computing, time.waiting, walk.known / (walk.run or 1)
    )


@final
class _Time:
    """Seconds of one pass through a computation: in `total`, `computing`, `waiting`."""

    def __init__(self) -> None:
        self.total = self.computing = self.waiting = 0.0
        self._waits: list[tuple[float, float]] = []

    def add(self, other: "_Time", times: float = 1) -> None:
        """Let another computation run, so many times."""
        self.total += times * other.total
        self.computing += times * other.computing
        self.waiting += times * other.waiting

    def compute(self, seconds: float) -> None:
        """Let an instruction run."""
        self.total += seconds
        self.computing += seconds

    def wait(self, until: float) -> None:
        """Wait for the link."""
        if until > self.total:
            self._waits.append((self.total, until))
            self.waiting, self.total = self.waiting + until - self.total, until

    def waited(self, sent: "_Pending") -> float:
        """Return how long the device waited while it was sent, for it or for another."""
        begin = sent.end - sent.seconds
        return sum(max(0, min(sent.end, to) - max(begin, since)) for since, to in self._waits)


@dataclasses.dataclass(frozen=True)
class _Pending:
    """A collective under way: when it ends, how long it sends, how often it runs, its record."""

    end: float
    seconds: float
    times: float
    index: int


@final
class _ScheduleWalk:
    """One walk.

    **Attributes:** `collectives`, so far; `run`, the instructions run so far, and of these `known`,
    those with an estimate.
    """

    def __init__(self, module: Module, mesh: Mesh, machine: Machine, clock: float | None) -> None:
        self._module, self._mesh, self._machine, self._clock = module, mesh, machine, clock
        self.collectives: list[ScheduledCollective] = []
        self.run = self.known = 0.0
        # Where each collective that is spread over fusions starts: a loop may go on with it.
        self._starts: dict[str, str] = {}

    def computation(self, name: str, place: Place, times: float) -> _Time:
        """Walk through a computation, which runs so many `times` in a step."""
        instructions = self._module.computations.get(name, ())
        place = place.of(instructions)
        chains = {
            chain.id: index
            for index, instruction in enumerate(instructions)
            if (chain := chain_of(instruction, self._module))
        }
        time, link, pending = _Time(), 0.0, dict[str, _Pending]()
        for index, instruction in enumerate(instructions):
            here = place.at(instruction)
            chain = chain_of(instruction, self._module)
            if instruction.opcode == "while":
                trips = self._module.trips(instruction)
                body = instruction.attribute(r"body=%?([\w.\-]+)") or ""
                inner = here.inside(instruction, trips, 1)
                count = 1 if trips is None else trips
                time.add(self.computation(body, inner, times * count), count)
            elif instruction.opcode == "conditional":
                branches = [self.computation(b, here.branch(), times) for b in instruction.called()]
                time.add(max(branches, key=lambda branch: branch.total, default=_Time()))
            elif instruction.opcode == "call":
                for called in instruction.called():
                    time.add(self.computation(called, here, times))
            elif chain is not None:
                if self._starts.setdefault(chain.id, name) == name and chain.id not in pending:
                    link = self._start(
                        chain.part, instruction, (), here, times, time, link, pending
                    )
                    pending[chain.id] = pending.pop(instruction.name)
                time.compute(self._seconds(instruction, instructions, times))
                if chains[chain.id] == index and chain.id in pending:
                    self._finish(pending.pop(chain.id), time)
            elif (start := self._started(instruction)) is not None:
                link = self._start(
                    start, instruction, instructions, here, times, time, link, pending
                )
                if not self._asynchronous(instruction) and instruction.name in pending:
                    self._finish(pending.pop(instruction.name), time)
            elif instruction.opcode.endswith("-done"):
                # A start may be passed on by updates.
                source = next((name for name in instruction.operands if name in pending), None)
                if source is not None:
                    self._finish(pending.pop(source), time)
            elif instruction.opcode.endswith("-update"):
                for name in instruction.operands:
                    if name in pending:
                        pending[instruction.name] = pending.pop(name)
            elif instruction.opcode not in _FREE:
                time.compute(self._seconds(instruction, instructions, times))
        for left in pending.values():
            self._finish(left, time)
        return time

    # --- Collectives ------------------------------------------------------------------------------

    def _started(self, instruction: Instruction) -> Instruction | None:
        """Return the collective that an instruction is or starts."""
        # The second on a SparseCore; a fusion reduces, and keeps this device's slice.
        if instruction.opcode in ("async-start", "call-start", "fusion"):
            return next((other for other in self._inside(instruction) if self._sends(other)), None)
        return instruction if self._sends(instruction) else None

    def _inside(self, instruction: Instruction) -> Sequence[Instruction]:
        return self._module.computations.get(next(instruction.called(), ""), ())

    def _sends(self, one: Instruction) -> bool:
        return sent_by(one, (), self._module, self._mesh) is not None

    @staticmethod
    def _asynchronous(one: Instruction) -> bool:
        return one.opcode.endswith("-start")

    def _start(
        self,
        collective: Instruction,
        by: Instruction,
        computation: Sequence[Instruction],
        place: Place,
        times: float,
        time: _Time,
        link: float,
        pending: dict[str, _Pending],
    ) -> float:
        """Start a collective, and return when the link is free again."""
        fused = by.opcode == "fusion" and chain_of(by, self._module) is None
        computation = self._inside(by) if fused else computation
        sent = sent_by(collective, computation, self._module, self._mesh)
        if sent is None:
            return link
        seconds = self._sending(sent)
        end = max(time.total, link) + seconds
        pending[by.name] = _Pending(end, seconds, times, len(self.collectives))
        split = self._asynchronous(by) or (collective is not by and not fused)
        self.collectives.append(
            ScheduledCollective(
                collective_of(sent, place), dtype_of(collective.type), split, seconds * times, 0.0,
                collective.op_name,
            )
        )  # fmt: skip
        return end

    def _finish(self, pending: _Pending, time: _Time) -> None:
        """Wait for a collective, and note what of it was hidden."""
        time.wait(pending.end)
        hidden = max(0.0, pending.seconds - time.waited(pending)) * pending.times
        record = self.collectives[pending.index]
        if record.asynchronous:
            self.collectives[pending.index] = dataclasses.replace(record, hidden=hidden)

    def _sending(self, sent: Sent) -> float:
        kind = sent.equivalent or sent.kind
        return collective_seconds(
            self._machine, kind, sent.bytes_sent, sent.axes, self._mesh.shape, self._mesh.size
        )

    # --- Instructions -----------------------------------------------------------------------------

    def _seconds(self, one: Instruction, computation: Sequence[Instruction], times: float) -> float:
        """Return the seconds of an instruction, 0 where nothing says them."""
        self.run += times
        seconds = self._by_cycles(one) if self._clock else self._by_roofline(one, computation)
        self.known += 0 if seconds is None else times
        return seconds or 0.0

    def _by_cycles(self, one: Instruction) -> float | None:
        cycles = int(one.attribute(r'estimated_cycles":"(\d+)"') or _NEVER)
        return cycles / self._clock if self._clock and cycles < _NEVER else None

    def _by_roofline(
        self, instruction: Instruction, computation: Sequence[Instruction]
    ) -> float | None:
        types = {other.name: other for other in computation}
        operands = [types[name] for name in instruction.operands if name in types]
        inside = [
            other
            for called in instruction.called()
            for other in self._module.computations.get(called, ())
        ]
        products = sum(
            product_seconds(self._machine, dims, dtype, 0)
            for dims, dtype in products_of(instruction, operands, inside)
        )
        moved = self._machine.traffic_seconds(bytes_moved(instruction, operands, inside))
        return max(products, moved) + self._machine.start_seconds
