"""Find how many members of a population run on how many devices, and whether their rows are split.

Members never communicate, so the axis `member` is free, up to the members that do not divide: 100
members on 8 devices are 13 on each, and every device computes as long as for 104. Left over are
devices where there are fewer members, and memory. Example, 4 members on 8 H100, 64 rows:

    layout               on a device             sent
    member=4, data=2     1 member, 32 rows       its gradients, over data
    member=2, data=4     2 members, 16 rows      theirs
    member=4             1 member, 64 rows       nothing; 4 devices idle
    data=8               4 members, 8 rows       theirs

Layouts are looked at in the order of what a device computes; no layout takes less than its share of
the products, and the kernels of one chunk. Of a layout the chunk is the platform's, all members of
a device on GPUs and TPUs. It is cut to a quarter until the step fits, and further as long as that
is faster, which it is where a chunk then stays in a TPU's fast memory. If one member alone does not
fit, its activations are computed anew, and its rows split into microbatches. On GPUs the fastest
plan is looked at with the batch in the minor dim, too.

Large members are searched as one network on the devices that each of them has, with all that a plan
may split, and then estimated together. 5 perceptrons of 134 million parameters on 8 A100:

    member=5                       50.3 ms    3 devices idle
    data=2, tensor=4, zero=3       35.8 ms    all devices compute each member
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jaxtyping import PyTree

from plurax import errors
from plurax.analysis.estimate import Estimate, estimate
from plurax.execute.placement import leading_dim
from plurax.machine import Machine
from plurax.members import Members
from plurax.plan import Plan
from plurax.planner.effort import Effort
from plurax.planner.experts import part_of
from plurax.planner.found import Found, Ranked


def layouts(
    members: int, devices: int, rows: int, member: int | None = None, data: int | None = None
) -> list[tuple[int, int]]:
    """Return the pairs of `member` and `data` to look at: the least work first, after a plain one.

    Of the sizes of `member` that give the busiest device equally many members, the smallest; or
    those that are given.

    >>> layouts(3, 8, 64)
    [(3, 1), (1, 8), (3, 2), (2, 4), (1, 4), (2, 2), (1, 2), (2, 1), (1, 1)]
    """
    most = min(members, devices)
    sizes = sorted({-(-members // -(-members // size)) for size in range(1, most + 1)})
    pairs = []
    for size in sizes if member is None else [member]:
        parts = data or max(1, min(devices // size, rows))
        while parts >= 1:
            pairs.append((size, parts))
            parts = 0 if data else parts // 2
    # Of equal work first those that send least. A plain one says what starting kernels takes.
    plain = max(pairs, default=None, key=lambda pair: (-pair[1], pair[0]))
    return sorted(pairs, key=lambda pair: (pair != plain, share(members, *pair), pair[1]))


def share(members: int, member: int, devices: int) -> float:
    """Return the batches that a device computes in a step, where so many devices share each of its
    members."""
    return -(-members // member) / devices


def search_population(
    task: Any,
    optimizer: Any,
    batch: PyTree,
    members: Members,
    machine: Machine,
    pinned: Plan,
    fields: Sequence[str],
    memory: float,
    count: int,
    effort: Effort,
    search_one: Callable[[Machine], Found],
) -> Found:
    """Search the plan of a population. See `plurax.search`, which checks the arguments.

    **Arguments:** `search_one`, the search for one network on a machine, which raises `PlanError`
    if there is none.

    **Returns:** the ranked plans, none of them if nothing fits.
    """
    held = [getattr(pinned, axis) if axis in fields else None for axis in ("member", "data")]
    pairs = layouts(members.count, machine.devices, leading_dim(batch), *held)
    run = _Estimates(task, optimizer, batch, members, machine, memory, effort)
    for member, data in pairs if pinned.tensor == pinned.pipeline == 1 else ():
        start = dataclasses.replace(pinned, member=member, data=data)
        if run.state(member) > memory and pinned.zero == 0:
            run.refused.append(Ranked(start, start, None, run.state(member), "memory"))
        elif run.worth(member, data, effort.allows("estimate", False)):
            run.look(start, fields)
    alone: list[Found] = []
    sharing = {member: max(1, machine.devices // member) for member, _ in pairs}
    for member in sorted(sharing, key=lambda size: share(members.count, size, sharing[size])):
        devices = sharing[member]
        if devices > 1 and run.worth(member, devices, len(alone) < _SIZES):
            own = {"member": member, "chunk": pinned.chunk, "batch_dim": pinned.batch_dim}
            for search in run.of_one(search_one, devices, own, fields):
                alone.append(search)
                run.left = min(run.left, run.bound_by(search, member))
    if "batch_dim" not in fields and machine.platform == "gpu":
        run.look_at_minor()
    ranked = sorted(run.ranked, key=lambda plan: (plan.seconds, plan.plan.devices))
    return Found(
        machine=machine,
        memory=memory,
        ranked=tuple(ranked[:count]),
        slower=tuple(ranked[count:]),
        refused=tuple(run.refused),
        over=0,
        candidates=len(pairs),
        least_left=min(run.left, run.best),
        least_expected=run.best,
        evaluations=effort.spent + sum(one.evaluations for one in alone),
        stopped=effort.stopped or any(one.stopped for one in alone),
        seconds=0.0,
        shardings=None,
        estimated=None,
    )


class _Estimates:
    """The estimates of a population's plans so far.

    **Attributes:** `ranked`, the plans that fit, in the order of looking; `refused`, the others;
    `best`, the seconds of the fastest; `left`, the least seconds that what was not looked at can
    take.
    """

    def __init__(
        self, task: Any, optimizer: Any, batch: PyTree, members: Members, machine: Machine,
        limit: float, effort: Effort,
    ) -> None:  # fmt: skip
        self._task, self._optimizer, self._batch, self._members = task, optimizer, batch, members
        self._machine, self._limit, self._effort = machine, limit, effort
        self.ranked: list[Ranked] = []
        self.refused: list[Ranked] = []
        self.best = self.left = math.inf
        # The seconds of products of a member's batch, and of starting the kernels of a chunk; the
        # bytes of a member's state.
        self._products, self._start, self._state = 0.0, 0.0, 0.0

    def bound(self, member: int, devices: int) -> float:
        """Return the least seconds of a step if so many devices share a member, as known so far."""
        return self._start + self._products * share(self._members.count, member, devices)

    def worth(self, member: int, devices: int, allowed: bool) -> bool:
        """Whether to look at members that so many devices share: they may be the fastest."""
        bound = self.bound(member, devices)
        wanted = allowed and bound <= self.best * (1 - _SAME)
        if not wanted:
            self.left = min(self.left, bound)
        return wanted

    def bound_by(self, alone: Found, member: int) -> float:
        """Return the least seconds for all members by the bound of the search for one."""
        rounds = share(self._members.count, member, 1)
        return self._start + rounds * max(0.0, alone.least_left - self._start)

    def state(self, member: int) -> float:
        """Return the bytes of the states of a device's members, 0 before an estimate."""
        return self._state * -(-self._members.count // member)

    def of_one(
        self,
        search_one: Callable[[Machine], Found],
        devices: int,
        own: Mapping[str, Any],
        fields: Sequence[str],
    ) -> list[Found]:
        """Estimate the members under the fastest plans of one on `devices` beside each other, with
        the fields that are their `own`, and return that search, if there is one."""
        machine = self._machine
        if machine.groups:
            return []  # those of each kind are searched alone
        some = part_of(machine.levels, machine, f"{devices} of {machine.name}", devices, devices)
        try:
            alone = search_one(some)
        except errors.PlanError as error:
            plan = Plan(**own)
            self.refused.append(Ranked(plan, plan, None, math.inf, str(error)))
            return []
        for ranked in alone.ranked[:_OF_ONE]:
            self.look(dataclasses.replace(ranked.plan, **own), fields)
        return [alone]

    def look(self, start: Plan, fields: Sequence[str]) -> None:
        """Estimate a layout under ever smaller chunks, until one that fits is not faster."""
        estimated = self._estimated(start)
        if estimated is None:
            return
        chunk, fastest = estimated.plan.chunk, self._seconds_if_fits(estimated)
        if self.state(start.member) > self._limit:
            return
        for plan in _smaller(estimated.plan, fields, leading_dim(self._batch)):
            # What computes anew is slower: only for the memory.
            helps = plan.chunk != chunk or fastest == math.inf
            if not helps or not self._effort.allows("estimate", False):
                return
            estimated = self._estimated(plan)
            seconds = self._seconds_if_fits(estimated)
            if fastest < math.inf and seconds >= fastest:
                return
            chunk, fastest = plan.chunk, min(fastest, seconds)

    def look_at_minor(self) -> None:
        """Estimate the fastest plan with the batch in the minor dim: a GPU starts fewer kernels.

        On TPUs it is no faster: v5e's compiler makes 64 µs of a step of 58.
        """
        best = min(self.ranked, default=None, key=lambda plan: plan.seconds)
        if best and not best.plan.partitioned and self._effort.allows("estimate", True):
            self._estimated(dataclasses.replace(best.plan, batch_dim="minor"))

    def _seconds_if_fits(self, estimated: Estimate | None) -> float:
        if estimated is None or estimated.peak + estimated.margin > self._limit:
            return math.inf
        return estimated.seconds

    def _estimated(self, plan: Plan) -> Estimate | None:
        """Return the estimate of a plan, or None if it cannot be; either is noted."""
        try:
            with self._effort.spent_on("estimate", False):
                estimated = estimate(
                    self._task, self._optimizer, plan, self._batch, self._machine, self._members
                )
        except (errors.PlanError, errors.MachineError) as error:
            self.refused.append(Ranked(plan, plan, None, 0.0, str(error)))
            return None
        self._learn(estimated)
        plan, needed = estimated.plan, estimated.peak + estimated.margin
        if needed > self._limit:
            self.refused.append(Ranked(plan, plan, estimated, needed, "memory"))
        else:
            self.ranked.append(Ranked(plan, plan, estimated, estimated.peak))
            self.best, self._effort.found = min(self.best, estimated.seconds), True
        return estimated

    def _learn(self, estimated: Estimate) -> None:
        """Note the least that products take, and starting the kernels of one chunk.

        With rows split kernels are started for collectives, too, so the plain layout says it.
        """
        plan, seconds, memory = estimated.plan, estimated.gradient, estimated.memory
        held = -(-self._members.count // plan.member)
        state = memory["parameters"] + memory["optimizer"] + memory["model_state"]
        self._state = state / held if plan.zero == 0 else 0.0
        devices = plan.devices // plan.member
        products = seconds.products / share(self._members.count, plan.member, devices)
        self._products = min(self._products or products, products)
        if devices == 1:
            chunks = max(1, held / (plan.chunk or 1))
            self._start = min(self._start or math.inf, seconds.overhead / chunks)


def _smaller(plan: Plan, fields: Sequence[str], rows: int) -> Iterator[Plan]:
    """Yield the plans of a layout that need less memory, each less than the one before."""
    chunk = plan.chunk or 1
    while chunk > 1 and "chunk" not in fields:
        chunk = max(1, chunk // 4)
        plan = dataclasses.replace(plan, chunk=chunk)
        yield plan
    if "remat" not in fields:
        for remat in ("dots", "full"):
            plan = dataclasses.replace(plan, remat=remat)
            yield plan
    microbatches = plan.most_microbatches
    while "microbatches" not in fields and plan.data * microbatches * 2 <= rows:
        microbatches *= 2
        yield dataclasses.replace(plan, microbatches=microbatches)


_OF_ONE = 2
"""How many of the fastest plans of one network are estimated for all members."""

_SIZES = 3
"""For how many sizes of `member`, the most promising, one network is searched."""

_SAME = 0.01
"""By how much a layout has to be faster, by its bound, to be worth an estimate."""
