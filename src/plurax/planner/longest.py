"""The longest sequences whose training step fits a machine, found by estimates of few lengths.

Lengths are those of the batch, doubled while they fit, then eighths between the last that fits and
the first that does not. A plan that was found for one length is estimated for the next, and a
search is made only where it does not fit. Example, 8 sequences of 8,192 tokens on 8 H100:

    8,192      search: data=8, remat=full                       33.5 GiB
    16,384     the same plan                                    54.9 GiB
    32,768     the same plan does not fit; search: tensor=8     39.8 GiB
    65,536     the same plan does not fit; search: stream=512   57.0 GiB
    131,072    search: none fits                                between both are 73,728, 81,920, ...
"""

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import optax
from jax.extend.core import Literal
from jax.lax import GatherScatterMode
from jaxtyping import PyTree

from plurax import errors, tree
from plurax.analysis.estimate import Estimate, estimate, human_seconds
from plurax.analysis.machine_timings import measure_machine
from plurax.execute.check import check_kinds
from plurax.execute.gradient import gradient
from plurax.execute.initial_state import initial
from plurax.execute.placement import abstract_batch
from plurax.execute.rows import abstract_rows
from plurax.jaxpr.interpret import dependent, evaluate, flat_equations, needed, source_line
from plurax.machine import Machine
from plurax.members import Members
from plurax.plan import Plan
from plurax.planner.effort import EVALUATIONS, trying_plans
from plurax.planner.found import Found, wrapped
from plurax.planner.search import search
from plurax.planner.wanted import pinned_fields
from plurax.task import Task
from plurax.tree import human_bytes
from plurax.user_frames import user_frames
from plurax.validate import bytes_of

START, LEAST, MOST = 1024, 8, 2**24
"""Lengths: the first of a batch that is a function of it; the shortest and the longest tried."""


@dataclasses.dataclass(frozen=True)
class TriedLength:
    """A length that was looked at: the `estimate` of its fastest known plan, or None, and `why` it
    does not fit, or ""."""

    length: int
    estimate: Estimate | None
    why: str = ""

    def row(self, memory: float) -> tuple[str, str, str, str]:
        """Return length, seconds, memory and plan as texts."""
        if self.why or self.estimate is None:
            reason = self.why.splitlines()[1:2] or [self.why]
            return f"{self.length:,}", "", "does not fit", reason[0].strip()
        held = f"{human_bytes(self.estimate.peak)} of {human_bytes(memory)}"
        seconds, plan = human_seconds(self.estimate.seconds), self.estimate.plan
        return f"{self.length:,}", seconds, held, plan.sizes_text() or "one device"


@dataclasses.dataclass(frozen=True, repr=False)
class Longest:
    """The longest sequences that fit a machine; `int()` of it is their length.

    **Fields:**

    - `length`; `plan`, the fastest that was found for it, or the one that was asked about;
      `estimate` of it, with `seconds` and `peak` bytes; `found`, the result of its `search`, or
      None.
    - `tried`: the lengths that were looked at, shortest first, with why some do not fit.
    - `machine`, and `memory`, the bytes that a device may use.
    - `seconds` that it took.
    """

    length: int
    plan: Plan
    estimate: Estimate
    found: Found | None
    tried: tuple[TriedLength, ...]
    machine: Machine
    memory: float
    seconds: float

    def __index__(self) -> int:
        return self.length

    def __repr__(self) -> str:
        return f"Longest({self.length:,}: {human_seconds(self.estimate.seconds)} a step)"

    def __str__(self) -> str:
        rows = [("length", "a step", "memory", "plan"), *(t.row(self.memory) for t in self.tried)]
        first, second, third, _ = (max(map(len, column)) for column in zip(*rows, strict=True))
        count, where = self.estimate.batch_size, self.machine.name
        lines = [f"the longest sequences for {where}, {count} in a step: {self.length:,}"]
        for length, seconds, memory, plan in rows:
            start = f"{length:>{first}}  {seconds:{second}}  {memory:{third}}  "
            lines += wrapped(start + plan, len(start), whole=True)
        lines.append(f"found in {self.seconds:.1f} s, by estimates of {len(self.tried)} lengths")
        if self.length == self.tried[-1].length:
            lines.append("longer ones were not tried: does the loss read all of a sequence?")
        return "\n".join(lines)


@trying_plans()
def longest(
    task: Task | Callable[[int], Task],
    optimizer: optax.GradientTransformation,
    batch: PyTree | Callable[[int], PyTree],
    machine: Machine | None = None,
    *,
    plan: Plan | None = None,
    pinned: Plan | Mapping[str, Any] | None = None,
    memory: float | str | None = None,
    evaluations: int = EVALUATIONS,
    seconds: float | None = None,
    progress: Callable[[TriedLength], None] | None = None,
) -> Longest:
    """Return the longest sequences that can be trained on a machine, and the plan that does it.

    Nothing is compiled or run, and no array is created: each length is estimated.

    **Arguments:**

    - `task`, `optimizer`: as for `compile`. A model with parameters for each position is a function
      of the length that returns the task.
    - `batch`: arrays or `jax.ShapeDtypeStruct`s whose dim 1 is the sequence, in each that has one.
      An array that is one longer, of tokens that a loss shifts, stays one longer; so does one whose
      length is one more than a multiple of eight. Other dims of that size, as of a mask `(B, T,
      T)`, follow where the loss needs it. The number of examples stays. Or a function of the length
      that returns the batch, such as one whose examples get fewer.
    - `machine`: as for `search`, by default this one, measured.
    - `plan`: by which all lengths are trained. By default each is searched, with what is `pinned`.
    - `memory`: bytes that a device may use, such as `40e9` or `"40GB"`; by default all.
    - `evaluations`, `seconds`: of each search.
    - `progress`: called with each length once it is looked at.

    **Returns:** lengths are doubled, or halved, then the eighths between are tried. Raises
    `PlanError` where the shortest does not fit, and `TaskError` for a loss that is written for one
    length.
    """
    if plan is not None and pinned is not None:
        raise errors.ArgumentError(
            "plurax.longest(plan=..., pinned=...): with plan= no plan is searched, and pinned= "
            "says what a search must keep. Leave one of them out."
        )
    check_kinds(task, optimizer, plan or Plan(), Members(1) if callable(task) else None)
    pinned_fields(pinned or {})  # raises for names of no fields
    if machine is None:
        machine = measure_machine()
    if not isinstance(machine, Machine):
        raise errors.machine_wrong_type(machine)
    limit = machine.memory if memory is None else bytes_of(memory)
    started = time.perf_counter()
    options = {"pinned": pinned, "memory": memory, "evaluations": evaluations, "seconds": seconds}
    task_of = (lambda length: task) if isinstance(task, Task) else task
    run = _Lengths(task_of, optimizer, _OfLength.of(batch), machine, limit, plan, options, progress)
    length = run.longest()
    best, searched = run.tried[length].estimate, run.found.get(length)
    assert best is not None
    return Longest(
        length=length,
        plan=best.plan if searched is None else searched.best,
        estimate=best,
        found=searched,
        tried=tuple(run.tried[each] for each in sorted(run.tried)),
        machine=machine,
        memory=limit,
        seconds=time.perf_counter() - started,
    )


@dataclasses.dataclass(frozen=True)
class _OfLength:
    """A batch of any length: `start`, that of the given one; `ways` to make one of a length."""

    start: int
    ways: list[Callable[[int], PyTree]]

    @classmethod
    def of(cls, batch: Any) -> "_OfLength":
        """Read which dims of a batch are the sequence. Raises `BatchError` where none is."""
        if callable(batch):
            return cls(START, [lambda length: abstract_batch(batch(length))])
        batch = abstract_batch(batch)
        shapes = {path: leaf.shape for path, leaf in tree.named_leaves(batch).items()}
        own = {shape[1] for shape in shapes.values() if len(shape) > 1 and shape[1] > 1}
        if not own or max(own) - min(own) > 1:
            listed = ", ".join(f"{path} {list(shape)}" for path, shape in shapes.items())
            raise errors.BatchError(
                "plurax.longest: dim 1 of the arrays of a batch is the length of its sequences, "
                f"and these do not share one: {listed}. Give the batch as a function of the length "
                "that returns its shapes: lambda length: {'tokens': jax.ShapeDtypeStruct((8, "
                "length), jnp.int32)}."
            )
        start = min(own)
        start -= len(own) == 1 and start % 8 == 1 and start > 8

        def resized(length: int, dims: int | None) -> PyTree:
            def leaf(leaf: Any) -> Any:
                tail = [
                    size + length - start if size in own and place < (dims or leaf.ndim) else size
                    for place, size in enumerate(leaf.shape[1:])
                ]
                return jax.ShapeDtypeStruct((leaf.shape[0], *tail), leaf.dtype)

            return jax.tree.map(leaf, batch)

        more = any(own & {*shape[2:]} for shape in shapes.values())
        first, every = (lambda length, dims=dims: resized(length, dims) for dims in (1, None))
        return cls(start, [first, every] if more else [first])


@dataclasses.dataclass(frozen=True)
class _Lengths:
    """The lengths that were looked at: `tried`, and what searches `found`; `plan` is that of all
    lengths, or None."""

    task: Callable[[int], Task]
    optimizer: optax.GradientTransformation
    batches: _OfLength
    machine: Machine
    limit: float
    plan: Plan | None
    options: Mapping[str, Any]
    progress: Callable[[TriedLength], None] | None
    tried: dict[int, TriedLength] = dataclasses.field(default_factory=dict)
    found: dict[int, Found] = dataclasses.field(default_factory=dict)

    def longest(self) -> int:
        """Return the longest length that fits. Raises `PlanError` where none does."""
        self._trace(self.batches.start)  # what a model raises for its own length is as it is
        self._choose_way()
        low = high = 0
        if self._fits(0):
            while self._length(high := low + 8) <= MOST and self._fits(high):
                low = high
        else:
            while self._length(low - 8) >= LEAST:
                low -= 8
            if not self._fits(low):
                least = self.tried[self._length(low)]
                raise errors.PlanError(f"no length fits, not even {least.length:,}: {least.why}")
        while high - low > 1 and self._length(high) <= MOST:
            middle = (low + high) // 2
            low, high = (middle, high) if self._fits(middle) else (low, middle)
        length = self._length(low)
        if self.plan is None and length not in self.found:
            # The plan of a shorter one fits, and a search may find a faster one.
            searched = self._searched(length)
            self.tried[length] = self.tried[length] if searched.why else searched
        return length

    def _length(self, index: int) -> int:
        """Return a length: eight steps double it."""
        doublings, eighths = divmod(index, 8)
        return int(self.batches.start * 2.0**doublings) * (8 + eighths) // 8

    def _fits(self, index: int) -> bool:
        length = self._length(index)
        if length not in self.tried:
            self._check(length)
            self.tried[length] = self._tried(length)
            if self.progress is not None:
                self.progress(self.tried[length])
        return not self.tried[length].why

    def _tried(self, length: int) -> TriedLength:
        """Estimate the plan that is known and, if it does not fit, search another one."""
        why, plan, machine = "", self.plan, self.machine
        if self.found:
            last = self.found[max(self.found)]
            plan, machine = last.ranked[0].plan, last.machine
        if plan is not None:
            task, batch = self.task(length), self._batch(length)
            try:
                known = estimate(task, self.optimizer, plan, batch, machine)
            except errors.PlanError as error:
                why = str(error)
            else:
                needed = known.peak + known.margin
                if needed <= self.limit:
                    return TriedLength(length, known)
                why = f"a device needs {human_bytes(needed)}"
        return self._searched(length) if self.plan is None else TriedLength(length, None, why)

    def _searched(self, length: int) -> TriedLength:
        task, batch = self.task(length), self._batch(length)
        try:
            self.found[length] = search(task, self.optimizer, batch, self.machine, **self.options)
        except errors.PlanError as error:
            return TriedLength(length, None, str(error))
        return TriedLength(length, self.found[length].estimate)

    def _batch(self, length: int) -> PyTree:
        return self.batches.ways[0](length)

    def _choose_way(self) -> None:
        """Leave the first way to resize the batch with which the loss can be traced, or the last.

        `(B, T, D)` and a mask `(B, T, T)` look alike where `D = T`.
        """
        while len(self.batches.ways) > 1:
            try:
                self._trace(2 * self.batches.start)
            except Exception:
                self.batches.ways.pop(0)
            else:
                return

    def _check(self, length: int) -> None:
        """Raise `TaskError` for a loss that cannot have sequences of a length."""
        try:
            traced = self._trace(length)
        except errors.PluraxError:
            raise
        except Exception as error:
            at = "".join(f"{f.filename}:{f.lineno}" for f in user_frames(error)[-1:])
            said = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            raise self._written_for_one(length, at, said) from error
        if at := _beyond_its_end(traced):
            raise self._written_for_one(length, at, "an array is read beyond its end")

    def _written_for_one(self, length: int, at: str, said: str) -> errors.TaskError:
        return errors.TaskError(
            f"the loss is written for sequences of {self.batches.start:,}, and fails for "
            f"{length:,}{at and f' at {at}'}: {said}\n"
            "Let it take the length from the shapes of the batch, not from a constant, and "
            "positions from a formula, such as rotary ones. Where parameters depend on the "
            "length, give task and batch as functions of it: "
            "plurax.longest(lambda length: make_task(length), optimizer, make_batch)."
        )

    def _trace(self, length: int) -> Any:
        """Return the traced gradient for a length; raises what the model raises."""
        task, pinned = self.task(length), self.plan or self.options["pinned"] or Plan()
        check_kinds(task, self.optimizer, Plan(), None)
        fields = pinned if isinstance(pinned, Mapping) else vars(pinned)
        states = jax.eval_shape(lambda: initial(task, jax.random.key(0)))
        fun = gradient(task, fields.get("precision", Plan.precision))
        return jax.make_jaxpr(fun)(*states, abstract_rows(self._batch(length)))


def _beyond_its_end(closed: Any) -> str:
    """Return the line that reads an array at places beyond its end, or "".

    JAX returns NaN or the last entry there, and raises nothing. Places that depend on arguments are
    not known: those of positions, `arange`, do not.
    """
    jaxpr = closed.jaxpr
    flat = flat_equations(jaxpr.eqns, jaxpr.outvars)
    arguments = dependent(flat.eqns, jaxpr.invars)
    known = {**flat.constants, **dict(zip(jaxpr.constvars, closed.consts, strict=True))}
    for eqn in flat.eqns:
        if eqn.primitive.name != "gather" or eqn.params["mode"] == GatherScatterMode.CLIP:
            continue
        array, places = eqn.invars
        computed = not isinstance(places, Literal) and places not in arguments
        if array in arguments and computed:
            (read,) = evaluate(needed(flat.eqns, [places], known), known, [places])
            dims = eqn.params["dimension_numbers"].start_index_map
            last = [array.aval.shape[dim] - eqn.params["slice_sizes"][dim] for dim in dims]
            if (np.asarray(read) > np.asarray(last)).any():
                return source_line([*flat.calls.get(id(eqn), ()), eqn])
    return ""
