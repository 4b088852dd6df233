"""Find the best plan for a task on a machine, its time and memory known before it runs.

Three steps, each dearer and nearer to the truth than the one before:

    every candidate     bounds by a few additions (`candidates.py`)          microseconds each
    promising ones      from a solution that they share (`tensor_search.py`)  a second a solution
    the best few        traced and estimated (`analysis/estimate.py`)        about a second each

Candidates wait in a queue in the order of the least seconds that they can take. The first one is
looked at more closely and put back; an estimated plan that comes first is ranked, since nothing
left has a lower bound or cost. This is best-first branch and bound.

    queue                                                    then
    data=8 >= 1.24 s, data=4 tensor=2 >= 1.31 s, ...         data=8 is computed: 1.58 s
    data=4 tensor=2 >= 1.31 s, data=8 = 1.58 s, ...          data=4 tensor=2 is computed: 1.44 s
    data=4 tensor=2 = 1.44 s, data=2 tensor=4 >= 1.47 s      and estimated: 1.45 s
    data=4 tensor=2 = 1.45 s, data=2 tensor=4 >= 1.47 s      the best is known

All of them would take too long, so solutions and estimates are counted, and a search ends after as
many as it may make. What it finds depends on its arguments alone, not on how fast or how busy the
computer is. A plan that may not fit comes later than its seconds say, and one of which no plan
alike is estimated a little earlier; an estimate corrects those alike.
"""

import contextlib
import dataclasses
import functools
import heapq
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import optax
from jaxtyping import PyTree

from plurax import errors, tree
from plurax.analysis.estimate import estimate
from plurax.analysis.machine_timings import measure_machine
from plurax.execute.check import check_kinds
from plurax.execute.coupling import may_pad
from plurax.execute.placement import abstract_batch
from plurax.execute.population import HyperFn
from plurax.execute.transformed_task import streamed_task, tokens_of_parameters
from plurax.freezing import trained
from plurax.machine import Machine
from plurax.members import Members
from plurax.mesh import abstract_mesh
from plurax.plan import Plan, Remat
from plurax.planner.attention_in_blocks import search_in_blocks
from plurax.planner.beside import others_beside, plain_near
from plurax.planner.candidate_queue import CandidateQueue
from plurax.planner.candidates import (
    REMATS,
    CandidatePlan,
    Model,
    candidates,
    homes_of,
    model_of,
)
from plurax.planner.costs import TimeCosts, least_together, sends_meanwhile, state_ratios
from plurax.planner.effort import BESIDE, EVALUATIONS, Effort, Step, trying_plans
from plurax.planner.expert_weights import fields_of_rows_sent
from plurax.planner.experts import is_expert, is_plain, machines_of_kinds
from plurax.planner.found import Found, Ranked
from plurax.planner.learned import Computed, Learned
from plurax.planner.nothing_found import nothing_agrees, nothing_fits
from plurax.planner.partly_kept import partly_kept, safe_bytes
from plurax.planner.populations import search_population
from plurax.planner.sizes import Sizes
from plurax.planner.tensor_bound import TensorBound
from plurax.planner.tensor_search import TensorSearch
from plurax.planner.wanted import Wanted, of_one_member, pinned_fields
from plurax.sharding.rules import Rules
from plurax.task import Task
from plurax.validate import bytes_of, check_number, check_whole


@trying_plans()
def search(
    task: Task | HyperFn,
    optimizer: optax.GradientTransformation | HyperFn,
    batch: PyTree,
    machine: Machine | None = None,
    *,
    members: Members | None = None,
    pinned: Plan | Mapping[str, Any] | None = None,
    memory: float | str | None = None,
    count: int = 5,
    evaluations: int = EVALUATIONS,
    seconds: float | None = None,
) -> Found:
    """Search the plan that trains a task fastest on a machine, among those that fit its memory.

    **Arguments:**

    - `task`, `optimizer`, `batch`: as for `compile`. Only shapes and dtypes of `batch` are read,
      and neither devices nor memory are used, however many the machine has.
    - `machine`: where it is to run; by default this machine, measured in about ten seconds. Where
      its devices differ, plans on those of each kind alone are searched too; `found.machine` says
      which devices the best one uses.
    - `members`: of a population, for which it finds how many are on how many devices, in chunks of
      what size, and whether their rows are split (`planner/populations.py`).
    - `pinned`: a plan whose fields and sharding rules hold; what it leaves at the default is
      searched. As a dict, all its fields hold: `{"tensor": 1}` searches without `tensor`.
      `precision` is never searched, because it changes the numbers.
    - `memory`: bytes that a device may use, such as `40e9` or `"40GB"`; by default all that the
      machine has.
    - `count`: of plans to rank.
    - `evaluations`: how many plans it traces at the most, to solve their shardings or to estimate
      them, and again for experts' plans, each kind of devices and attention in blocks. With equal
      arguments the search finds equal plans, however busy the computer is.
    - `seconds`: by default no limit of time. A limit stops the search earlier, once it has found a
      plan, and the result says so: what it finds then depends on the computer, too.

    **Returns:** the ranked plans; where none fits, or one is faster so, with attention in blocks,
    and tokens over devices if faster (`planner/attention_in_blocks.py`). Raises `PlanError` if none
    of these fits, and says what comes nearest, and `TaskError` for a loss that mixes examples and
    does not say so, as `compile`.
    """
    fields = [] if pinned is None else pinned_fields(pinned)
    pinned = Plan(**pinned) if isinstance(pinned, Mapping) else pinned or Plan()
    check_kinds(task, optimizer, pinned, members)
    count = check_whole("plurax.search", "count", count)
    evaluations = check_whole("plurax.search", "evaluations", evaluations)
    if seconds is not None:
        check_number("plurax.search", "seconds", seconds, 0)
    if machine is None:
        machine = measure_machine()
    if not isinstance(machine, Machine):
        raise errors.machine_wrong_type(machine)
    limit, started = None if memory is None else bytes_of(memory), time.perf_counter()
    wanted = Wanted(task, optimizer, abstract_batch(batch), members, pinned, fields, limit, count)
    results: list[Found] = []
    refusal: errors.PlanError | None = None
    # All devices first: of equally fast plans that one is taken which needs no choice of devices.
    all_effort, in_vain = Effort(evaluations, seconds, started), 0
    for some in (machine, *machines_of_kinds(machine)):
        effort = all_effort.again()
        try:
            results.append(_search_on(some, wanted, effort))
        except errors.PlanError as error:
            refusal, in_vain = refusal or error, in_vain + effort.spent

    def again(some: Wanted) -> Found:
        return _search_on(machine, some, all_effort.again())

    for sent in fields_of_rows_sent(wanted, machine):
        with contextlib.suppress(errors.PlanError):
            results += [again(wanted.holding(**sent))]
        if results:
            break
    try:
        results = search_in_blocks(machine, wanted, results, again)
    except errors.PlanError as error:
        refusal = error  # what comes nearest is among these
    if refusal is not None and not results:
        raise refusal
    return dataclasses.replace(
        min(results, key=lambda one: one.ranked[0].seconds),
        candidates=sum(one.candidates for one in results),
        least_left=min(one.least_left for one in results),
        least_expected=min(one.least_expected for one in results),
        evaluations=in_vain + sum(one.evaluations for one in results),
        stopped=any(one.stopped for one in results),
        seconds=time.perf_counter() - started,
    )


def _search_on(machine: Machine, wanted: Wanted, effort: Effort) -> Found:
    """Search on one machine; the seconds are those of `search`."""
    task, optimizer, like = wanted.task, wanted.optimizer, wanted.batch
    pinned, fields = wanted.pinned, wanted.fields
    limit = machine.memory if wanted.memory is None else wanted.memory
    if wanted.members is not None:
        alone = of_one_member(wanted)
        population = search_population(
            task, optimizer, like, wanted.members, machine, pinned, fields, limit, wanted.count,
            effort, lambda some: _search_on(some, alone, effort.again()),
        )  # fmt: skip
        if not population.ranked:
            raise nothing_fits(limit, population.refused, "fewer members, ")
        return population
    remats = (pinned.remat,) if "remat" in fields else REMATS
    whole, task = task, streamed_task(task, pinned.stream)
    model = model_of(task, optimizer, like, pinned.precision, machine, remats, pinned.rules)
    pads = may_pad(whole, model.like, like, abstract_mesh(Plan()))
    model = dataclasses.replace(model, pads=pads)
    paths = list(tree.named_leaves(model.like.params))
    Rules(pinned.rules, {}).check_used(paths, model.names)
    every = list(candidates(model, machine, machine.devices, pinned, fields, limit))
    if not every:
        raise nothing_agrees(model, machine, pinned, fields)
    ratios = state_ratios(optimizer, trained(task.frozen, model.like.params))
    homes = functools.cache(functools.partial(homes_of, task, model.like.params))
    shardings = TensorSearch(
        task, like, lambda plan: TimeCosts(machine, plan, ratios, homes=homes(plan.pipeline)),
        ratios, machine, limit,
        model.activations, functools.partial(tokens_of_parameters, whole, like, pinned),
    )  # fmt: skip
    run = _Search(whole, optimizer, like, machine, model, limit, shardings, effort)
    run.look(every, wanted.count)
    if not run.ranked:
        raise nothing_fits(limit, run.refused)
    return Found(
        machine=machine,
        memory=limit,
        ranked=tuple(run.ranked[: wanted.count]),
        slower=(*run.ranked[wanted.count :], *run.slower),
        refused=tuple(run.refused),
        over=max(run.over - _NEAREST, 0),
        candidates=len(every),
        least_left=run.least_left,
        least_expected=run.least_expected,
        evaluations=effort.spent,
        stopped=effort.stopped,
        seconds=0.0,
        shardings=shardings,
        estimated=lambda plan: estimate(whole, optimizer, plan, like, machine),
    )


class _Search:
    """One search.

    **Attributes:** `ranked`, the plans estimated so far that fit, fastest first; `slower`, those of
    them beyond the number asked for; `refused`, those that do not fit, or cannot be, of those whose
    bounds say so the nearest; `over`, how many these are; `least_left`, the least seconds that a
    candidate which was not estimated can take, and `least_expected`, those it is expected to.
    """

    def __init__(
        self,
        task: Task,
        optimizer: optax.GradientTransformation,
        batch: PyTree,
        machine: Machine,
        model: Model,
        limit: float,
        shardings: TensorSearch,
        effort: Effort,
    ) -> None:
        self._task, self._optimizer, self._batch = task, optimizer, batch
        self._machine, self._model, self._limit = machine, model, limit
        wide = 0.5 if model.precision == "bfloat16" else 1.0  # gradients, by their parameters
        self._tensor_bound = TensorBound(machine, wide * model.parameters)
        self._shardings, self._effort = shardings, effort
        start = machine.start_seconds
        self._learned = Learned({name: start * t.products for name, t in model.totals.items()})
        self._experts: set[Sizes] = set()
        self._most = 1.0  # of the risks of all candidates
        self.ranked: list[Ranked] = []
        self.slower: list[Ranked] = []
        self.refused: list[Ranked] = []
        self.over = 0
        self.least_left = self.least_expected = math.inf
        self._best, self._fitting = math.inf, 0  # seconds of the fastest estimate; those that fit
        self._bounds: list[tuple[float, int, CandidatePlan]] = []  # a heap; bounds may have grown
        self._sizes: set[tuple[Any, ...]] = set()  # mesh axes and microbatches of all candidates
        self._known: set[Sizes] = set()  # of candidates that were estimated, or cannot be
        self._put_off: set[Sizes] = set()  # of candidates that wait for all others
        self._best_sizes: Sizes | None = None
        self._left = False  # whether there was no effort for some candidate

    def look(self, every: Sequence[CandidatePlan], count: int) -> None:
        """Look at candidates, the most promising first, until `count` are known to be the best.

        Those are left out for which there is no effort left, but not before one is found that fits.
        Once no bound is below the best estimate, as many that are estimated are enough.
        """
        fitting = [one for one in every if one.memory <= self._limit]
        over = [one for one in every if one.memory > self._limit]
        self.over = len(over)
        self._sizes = {one.sizes[:4] for one in every}
        for candidate in heapq.nsmallest(_NEAREST, over, key=lambda one: one.memory):
            self._refuse(candidate, "memory")
        self._most = max((self._risk(one.memory) for one in fitting), default=1.0)
        batch_size = self._model.batch_size
        self._experts = {
            one.sizes for one in fitting if is_expert(one.sizes, self._machine, batch_size)
        }
        self._look_at_smallest_tensor(fitting)
        queue = self._queued(fitting)
        self._bounds = [(one.seconds, index, one) for index, one in enumerate(fitting)]
        heapq.heapify(self._bounds)
        most = max(count, _FEWEST)
        while len(queue) and len(self.ranked) < most:
            if self._fitting >= most and self._is_proven():
                self.ranked += queue.estimated()
                break
            least, candidate, known = queue.pop()
            if isinstance(known, Ranked):
                self.ranked.append(known)
            elif known is None and (bound := self._least(candidate)) > least:
                # What has been found since says that it takes longer.
                queue.push(bound, candidate, risk=self._risk(candidate.memory))
            elif known is None and self._is_put_off(candidate):
                queue.put_off(least, candidate)
            elif not self._effort.allows(self._step(candidate, known), self._must(candidate)):
                self._left = True
                if known is not None:  # not a bound
                    self.least_expected = min(self.least_expected, least)
            elif (result := known or self._computed(candidate)) is not None:
                now = max(self._learned.seconds(candidate.plan, result), self._least(candidate))
                memory = self._learned.memory(candidate.plan, result)
                if memory > self._limit:
                    self._refuse(dataclasses.replace(candidate, memory=memory), "memory")
                elif known is None or now > least * _SAME:
                    queue.push(now, candidate, result, self._doubt(candidate, memory))
                elif (ranked := self._estimated(candidate, result)) is not None:
                    # Only after all that could be faster, however sure it is that they fit.
                    queue.push(ranked.seconds, candidate, ranked, risk=_NEAR * self._most)
        else:
            self.slower = queue.estimated()
        self.least_expected = min([self.least_expected, *queue.expected()])
        left = self._left_out(fitting)
        if self._look_beside(left, fitting):
            left = self._left_out(fitting)
        self._improve()  # what was computed before an estimate may have been more than it
        self.least_left = min((least for least, _ in left), default=self._best)

    def _left_out(self, fitting: Sequence[CandidatePlan]) -> list[tuple[float, CandidatePlan]]:
        """Return the candidates that could be faster than the best, with their least seconds."""
        most = {policy: self._best / self._learned.share(policy) for policy in self._model.totals}
        some = (one for one in fitting if one.seconds < most[one.sizes.remat])
        left = ((self._least(one), one) for one in some if one.sizes not in self._known)
        return [(least, one) for least, one in left if least < self._best]

    def _look_beside(
        self, left: Sequence[tuple[float, CandidatePlan]], fitting: Sequence[CandidatePlan]
    ) -> bool:
        """Estimate some of the candidates that were left out, and return whether any was."""
        if self._best_sizes is None:
            return False
        before = self._effort.spent
        plain = plain_near(fitting, self._known, _SECOND * self._best)
        others = others_beside(left, self._known, self._best_sizes, zeros=self._left)
        for least, candidate in [*plain, *others[:BESIDE]]:
            if self._effort.allows("beside", False) and self._may_be_faster(least, candidate):
                result = self._computed(candidate)
                ranked = result and self._estimated(candidate, result, "beside")
                self.ranked += [ranked] if ranked else []
        return self._effort.spent > before

    def _may_be_faster(self, least: float, candidate: CandidatePlan) -> bool:
        """Whether a candidate may be faster than the best, by its bound or what is expected, which
        of data parallelism alone may be too much."""
        plain = is_plain(candidate.sizes) and self._least(candidate) < self._best
        if plain or least < _WORTH * self._best or self._step(candidate, None) != "look":
            return plain or least < _WORTH * self._best
        result = self._computed(candidate)
        return result is not None and self._learned.seconds(candidate.plan, result) < self._best

    def _is_put_off(self, candidate: CandidatePlan) -> bool:
        """Whether a candidate waits for all others.

        So does what is far behind the best by its bound, and what is no faster and a further
        `tensor` has to be solved for. Others may be nearer, whatever their bounds: of GPT of 1.7
        billion parameters plans that keep all take 3.8 s by their bounds where one that keeps
        products takes 2.8 s, by a bound of 4.7. Of a policy that is not known none is put off: a
        share of its products may be faster. Nor where there is a fast memory: bounds say little.
        """
        if self._machine.fast_memory or candidate.sizes in self._put_off:
            return False
        behind = self._least(candidate) / self._best
        if behind < _WORTH or all(sizes.remat != candidate.sizes.remat for sizes in self._known):
            return False
        if behind < _SECOND and self._step(candidate, None) != "solution":
            return False
        self._put_off.add(candidate.sizes)
        return True

    def _is_proven(self) -> bool:
        """Whether no plan that was not estimated can be faster than the best."""
        while self._bounds:
            bound, index, candidate = self._bounds[0]
            if candidate.sizes in self._known:
                heapq.heappop(self._bounds)
            elif (now := self._least(candidate)) > bound:
                heapq.heapreplace(self._bounds, (now, index, candidate))
            else:
                return bound >= self._best
        return True

    def _queued(self, fitting: Sequence[CandidatePlan]) -> CandidateQueue:
        """Return candidates by their bounds, but of each remat policy one that is estimated.

        It says by how much what is computed is off: what a policy computes anew is mostly fused,
        and what it does not keep is not written. Of GPT of 1.7 billion parameters `full` is 12 %
        faster than `none`, and computed 28 % slower.
        """
        queue, sampled = CandidateQueue(), set()
        for policy in self._model.totals:
            alone = [
                one for one in fitting
                if one.sizes.remat == policy and one.sizes.tensor == one.sizes.pipeline == 1
            ]  # fmt: skip
            if alone and self._effort.allows("estimate", True):
                first = min(alone, key=lambda one: one.seconds * self._risk(one.memory))
                sampled.add(first.sizes)
                if (result := self._computed(first)) and (fits := self._estimated(first, result)):
                    queue.push(fits.seconds, first, fits, risk=_NEAR * self._most)
        for candidate in fitting:
            if candidate.sizes not in sampled:
                queue.push(candidate.seconds, candidate, risk=self._risk(candidate.memory))
        return queue

    def _doubt(self, candidate: CandidatePlan, memory: float) -> float:
        """Return the factor with which the seconds expected of a candidate count for its place."""
        must = self._must(candidate)
        if must and is_plain(candidate.sizes):
            return _PLAIN
        if self._learned.knows(candidate.plan):
            return _SURE if must else 1.0
        return _UNSURE * min(self._risk(memory), self._most)

    def _risk(self, memory: float) -> float:
        """Return by what the seconds of a plan count more, the less sure it is that it fits.

        What bounds and computed bytes leave out may be as much again.
        """
        return 1 + max(0.0, memory / self._limit - 0.5)

    def _bound(self, candidate: CandidatePlan) -> float:
        sizes, batch_size = candidate.sizes, self._model.batch_size
        rows = batch_size / sizes.data / sizes.pipeline  # of a step, in layers of one stage
        sent = rows * self._tensor_bound.of_row(sizes.tensor, batch_size / sizes.parts)
        return least_together(self._machine, candidate.seconds, sent)

    def _least(self, candidate: CandidatePlan) -> float:
        """Return the least seconds that a candidate can take, by what is known so far."""
        return self._learned.least(candidate.sizes, self._bound(candidate))

    def _must(self, candidate: CandidatePlan) -> bool:
        """Whether a candidate is an expert's, to be looked at until the fastest plan is known."""
        return not self.ranked and candidate.sizes in self._experts

    def _step(self, candidate: CandidatePlan, known: "Computed | None") -> Step:
        """Return what is to be done for a candidate."""
        if known is not None:
            return "estimate"
        sizes = candidate.sizes
        try:
            # To make a plan takes longer than all else, and there may be a hundred thousand.
            solver = self._shardings
            if solver.has_solved(sizes.tensor, sizes.remat) and solver.is_solved(candidate.plan):
                return "look"
        except errors.PlanError:
            return "look"  # which refuses it
        return "solution" if sizes.tensor > 1 else "estimate"

    def _computed(self, candidate: CandidatePlan) -> "Computed | None":
        """Return what a candidate takes on the solved graph, or None if it cannot be."""
        try:
            with self._effort.spent_on(self._step(candidate, None), self._must(candidate)):
                if not self._shardings.splits(candidate.plan):
                    return None
            seconds = self._shardings.seconds(candidate.plan)
        except (errors.PlanError, errors.MachineError) as error:
            self._refuse(candidate, str(error))
            return None
        self._learn(candidate)
        own, kept = self._shardings.memory(candidate.plan)
        return Computed(seconds, own, max(kept, candidate.memory - own))

    def _look_at_smallest_tensor(self, fitting: Sequence[CandidatePlan]) -> None:
        """Solve the smallest `tensor`, which says at the least what larger ones send."""
        split = [one for one in fitting if one.sizes.tensor > 1]
        if split:
            first = min(split, key=lambda one: (one.sizes.tensor, one.seconds))
            try:
                with self._effort.spent_on("solution", False):
                    self._learn(first)
            except errors.PlanError as error:
                self._refuse(first, str(error))

    def _learn(self, candidate: CandidatePlan) -> None:
        """Note what the devices of `tensor` send for a row."""
        if candidate.plan.tensor > 1:
            plan, sent = candidate.plan, self._shardings.sent_for_a_row(candidate.plan)
            self._tensor_bound.add(plan.tensor, plan.remat, *sent)

    def _estimated(
        self, candidate: CandidatePlan, computed: "Computed", step: Step = "estimate"
    ) -> Ranked | None:
        """Return a candidate with its shardings and its estimate, or None if it cannot be."""
        try:
            with self._effort.spent_on(step, self._must(candidate)):
                plan = self._shardings.plan(candidate.plan)
                estimated = estimate(self._task, self._optimizer, plan, self._batch, self._machine)
        except (errors.PlanError, errors.MachineError) as error:
            self._refuse(candidate, str(error))
            return None
        self._known.add(candidate.sizes)
        self._learned.add(
            candidate.plan, candidate.sizes, computed, estimated, self._bound(candidate)
        )
        safe = estimated.peak + estimated.margin
        if safe > self._limit:
            self.refused.append(Ranked(candidate.plan, plan, estimated, safe, "memory"))
            return None
        self._effort.found = True
        self._fitting += 1
        if estimated.seconds < self._best:
            self._best, self._best_sizes = estimated.seconds, candidate.sizes
        return Ranked(candidate.plan, plan, estimated, estimated.peak)

    def _improve(self) -> None:
        """Give the fastest plan of each remat policy, and of each `tensor` nearly as fast, the
        faster of two solutions, the fastest that recomputes a share of products to keep, and rank
        again: none that would stay behind the best."""
        ranked = sorted([*self.ranked, *self.slower], key=Ranked.place)
        kinds: set[tuple[Remat, int]] = set()
        for index, plan in enumerate(ranked):
            kind = plan.plan.remat, plan.plan.tensor
            most = _NEAR if kind[0] in {remat for remat, _ in kinds} else _SECOND
            if plan.seconds < most * ranked[0].seconds and kind not in kinds:
                ranked[index] = self._improved(plan)
            kinds.add(kind)
        ranked.sort(key=Ranked.place)
        if len(self._model.totals) > 1 and ranked:  # or a policy is pinned
            seconds = _SECOND * ranked[0].seconds
            share = partly_kept(ranked, seconds, self._limit, self._with_share)
            ranked = sorted([*ranked, *([share] if share else [])], key=Ranked.place)
        count = len(self.ranked)
        self.ranked, self.slower = ranked[:count], ranked[count:]

    def _improved(self, best: Ranked) -> Ranked:
        """Return a plan with the first of its other solutions that is faster by its estimate."""
        candidate, shardings = best.candidate, self._shardings
        step: Step = "estimate" if sends_meanwhile(self._machine) else "second"
        for other in shardings.others(candidate):
            if not self._effort.allows(step, True):
                break
            before = shardings.exactly(candidate)
            shardings.prefer(candidate, other)
            now = self._again(candidate, step)
            if now and now.seconds < best.seconds and safe_bytes(now) <= self._limit:
                return now
            shardings.prefer(candidate, before)
        return best

    def _with_share(self, best: Ranked, share: float, microbatches: float) -> Ranked | None:
        """Return a plan that keeps a share of its products, with so many times as many
        microbatches, or None if it cannot be."""
        plan = best.candidate
        count = plan.most_microbatches * microbatches
        if microbatches != 1 and (plan.data, plan.pipeline, plan.tensor, count) not in self._sizes:
            return None
        candidate = dataclasses.replace(plan, remat=share)
        if microbatches != 1:
            candidate = dataclasses.replace(candidate, microbatches=int(count))
        if not self._effort.allows("share", True):
            return None
        self._shardings.take_rules(candidate, best.candidate)
        return self._again(candidate, "share")

    def _again(self, candidate: Plan, step: Step) -> Ranked | None:
        """Return a candidate with the solution that is preferred for it, or None if it cannot be.

        It may not fit.
        """
        with contextlib.suppress(errors.PlanError, errors.MachineError):
            with self._effort.spent_on(step, True):
                plan = self._shardings.plan(candidate)
                now = estimate(self._task, self._optimizer, plan, self._batch, self._machine)
            return Ranked(candidate, plan, now, now.peak)
        return None

    def _refuse(self, candidate: CandidatePlan, why: str) -> None:
        self._known.add(candidate.sizes)
        self.refused.append(Ranked(candidate.plan, candidate.plan, None, candidate.memory, why))


_FEWEST = 5
"""Plans that are ranked at the least: the best must not depend on how many are asked for."""

_NEAREST = 3
"""Of the plans that need too much memory by their bounds, how many are named."""

_UNSURE, _SURE, _PLAIN = 0.95, 0.99, 0.5
"""What an estimate may be by what is expected: of a plan to which none alike is estimated; of an
expert's to which one is; of the plainest ones, which are few, so that they are seldom left out."""

_NEAR = 1.05
"""Plans expected to be slower than an estimated one by less than this are estimated before it is
ranked: what was computed is as near as that, once a plan alike is estimated."""

_SECOND = 1.15
"""How much slower than the best a plan with a second solution may be: none gained an eighth."""

_WORTH = 0.98
"""What the bound of a plan is at most by the best, if it is the first with its size of `tensor`."""

_SAME = 1.001
"""Seconds that differ by less are not worth another look."""
