"""Successive halving: train many candidates briefly, and continue with the best of them.

Problem. Most candidates of a sweep are recognizably bad after a few epochs; training all to the end
wastes the budget. Each rung trains the candidates up to a budget, keeps the best one in `reduction`
and multiplies the budget. States of survivors are gathered into a smaller population, so memory and
compute shrink with them. Example, 27
candidates, `min_epochs=1, epochs=9, reduction=3, slots=12`:

    rung   epochs   candidates   groups of one size, at most 12   kept
    0      0 -> 1   27           3 x 9                            9
    1      1 -> 3    9           1 x 9                            3
    2      3 -> 9    3           1 x 3                            3: the last rung only ranks

    cost: 27*1 + 9*2 + 3*6 = 63 member-epochs instead of 27*9 = 243

Source: K. Jamieson and A. Talwalkar, "Non-stochastic best arm identification and hyperparameter
optimization", AISTATS 2016.
"""

import dataclasses
import fnmatch
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from plurax import errors
from plurax.checkpoint.restore import make_program
from plurax.distributed.global_arrays import fetch, is_primary
from plurax.ensemble.select import join_members, take_members
from plurax.execute.array_data import ArrayData, Position
from plurax.execute.check import check_population
from plurax.execute.population import HyperFn
from plurax.execute.program import Program
from plurax.loop.data import Data, as_data
from plurax.loop.epoch_metrics import MembersMetrics, warn_frozen
from plurax.loop.iterate import train_iter
from plurax.members import Members
from plurax.plan import Plan
from plurax.progress.console_progress import new_console
from plurax.state import TrainState
from plurax.task import Task
from plurax.validate import Mode, sign_of_mode, whole_number


@dataclasses.dataclass(frozen=True)
class Rung:
    """One rung: `members`, their indices in the population, trained to `epochs`; `scores`, one
    for each of them; `seconds` of training, without compilation.
    """

    epochs: int
    members: list[int]
    scores: list[float]
    seconds: float


@dataclasses.dataclass(frozen=True)
class Halving:
    """The result of `successive_halving`.

    **Fields:** `members`, the survivors, best first; `state`, theirs, in that order; `program`, to
    predict and evaluate them with; `rungs`.
    """

    members: Members
    state: TrainState
    program: Program
    rungs: list[Rung]

    def __repr__(self) -> str:
        first = len(self.rungs[0].members) if self.rungs else 0
        return f"Halving({self.members.count} of {first} members, {len(self.rungs)} rungs)"

    def table(self) -> list[dict[str, Any]]:
        """Return one row per candidate: index, seed, hyperparameters, epochs, last score."""
        last: dict[int, tuple[int, float]] = {}
        for rung in self.rungs:
            for member, score in zip(rung.members, rung.scores, strict=True):
                last[member] = (rung.epochs, score)
        everyone = dataclasses.replace(self.members, indices=tuple(sorted(last)))
        return [
            {**row, "epochs": last[row["member"]][0], "score": last[row["member"]][1]}
            for row in everyone.table()
        ]


def successive_halving(
    task: Task | HyperFn,
    optimizer: Any,
    data: PyTree,
    *,
    members: Members,
    batch_size: int,
    epochs: int,
    min_epochs: int = 1,
    reduction: int = 3,
    slots: int | None = None,
    evaluation: PyTree = None,
    metric: str | None = None,
    mode: Mode = "min",
    plan: Plan = Plan(),  # noqa: B008  frozen
    shuffle: bool = True,
    progress: bool = True,
    devices: Sequence[jax.Device] | None = None,
) -> Halving:
    """Train all candidates for a few epochs, the best third three times as long, and so on.

    After K. Jamieson and A. Talwalkar, "Non-stochastic best arm identification and hyperparameter
    optimization", AISTATS 2016:

        for budget in min_epochs, min_epochs * reduction, ..., epochs:
            train the candidates up to the budget
            candidates = the best of them, one in `reduction`

    Survivors continue from their state, gathered into a smaller program, so that the work shrinks
    with them. Where there are more candidates than `slots`, they train in groups, one after
    another, of at most `slots` members.

    **Arguments:** as for `fit`, and

    - `epochs`: of the survivors; `min_epochs`: of every candidate, before the first halving.
    - `reduction`: one candidate in `reduction` continues.
    - `slots`: members trained at a time; default all.
    - `metric`: its name in the rows of `fit`, `eval_...` of the evaluation; the default is
      `eval_loss`, or `loss` without evaluation. Members are ranked by it, ascending, or with
      `mode="max"` descending. Frozen members come last.

    Raises the errors of `fit`, and `MembersError` for invalid budgets, slots, `metric` or `mode`.
    """
    check_population(task, optimizer, plan, members)
    sign = sign_of_mode(mode)
    few = members.take(range(_width(members, min_epochs, epochs, reduction, slots)))
    source, like = as_data(data, batch_size=batch_size, seed=0, shuffle=shuffle, ragged="pad",
                           members=members)  # fmt: skip
    read = _on_devices(source)
    rung_program = make_program(task, optimizer, plan, like, few, read, True, devices)
    metric = _checked_metric(rung_program, metric, evaluation)
    console = new_console(progress and is_primary())
    candidates = list(range(members.count))
    state: TrainState | None = None
    rungs: list[Rung] = []
    frozen: set[int] = set()
    for reached, budget in itertools.pairwise([0, *_budgets(min_epochs, epochs, reduction)]):
        # Groups of one size, so that each rung compiles once.
        size = math.ceil(len(candidates) / math.ceil(len(candidates) / few.count))
        rung_program = rung_program.of(members.take(candidates[:size]))
        rung_program.compile_loop(read.arrays)
        parts, scores, seconds = [], [], []
        for begin in range(0, len(candidates), size):
            now = range(begin, min(begin + size, len(candidates)))
            filled = [now[i % len(now)] for i in range(size)]
            program = rung_program.of(members.take([candidates[i] for i in filled]))
            start = program.init() if state is None else take_members(state, filled)
            trained, score, took = _train(program, start, read, reached, budget, evaluation, metric)
            parts.append(take_members(trained, range(len(now))))
            scores += score[: len(now)]
            seconds.append(took)
        state = join_members(*parts)
        rungs.append(Rung(budget, candidates, scores, sum(seconds)))
        skipped = fetch(state.skipped)
        frozen = _warn_of({candidates[i] for i in np.flatnonzero(skipped)}, frozen, members, budget)
        order = _ranked(scores, skipped, sign)
        keep = order if budget == epochs else order[: math.ceil(len(order) / reduction)]
        best = f"{metric} best {scores[order[0]]:.4f}, {len(keep)} stay"
        console.print(f"{budget} epochs: {len(candidates)} members in {sum(seconds):.2f} s, {best}")
        candidates, state = [candidates[i] for i in keep], take_members(state, keep)
    assert state is not None
    return Halving(stay := members.take(candidates), state, rung_program.of(stay), rungs)


def _width(members: Members, min_epochs: Any, epochs: Any, reduction: Any, slots: Any) -> int:
    """Return how many members train at a time. Raises `MembersError` for invalid numbers."""
    given = whole_number(min_epochs), whole_number(epochs), whole_number(reduction, 2)
    if None in given or min_epochs > epochs:
        raise errors.MembersError(
            f"successive_halving(min_epochs={min_epochs!r}, epochs={epochs!r}, "
            f"reduction={reduction!r}): needs 1 <= min_epochs <= epochs and a reduction of at "
            "least 2, whole numbers."
        )
    width = members.count if slots is None else whole_number(slots)
    if width is None:
        raise errors.MembersError(
            f"successive_halving(slots={slots!r}): give how many members train at a time, a whole "
            "number of at least 1; leave it out to train all at once."
        )
    return min(width, members.count)


def _on_devices(read: Data) -> ArrayData:
    """Return the data. Raises `MembersError` for those of a stream."""
    if not isinstance(read, ArrayData):
        raise errors.MembersError(
            "successive_halving needs data that stay on the devices; give arrays, not an iterable "
            "of batches."
        )
    return read


def _checked_metric(program: Program, metric: str | None, evaluation: PyTree) -> str:
    """Return the metric to rank by. Raises the errors of evaluating, and `MembersError`."""
    if evaluation is not None:
        program.check_evaluation(evaluation)
    metric = metric or ("loss" if evaluation is None else "eval_loss")
    names = program.metric_names(evaluated=evaluation is not None)
    if not any(fnmatch.fnmatchcase(metric, name) for name in names):
        raise errors.sweep_no_metric(metric, names)
    return metric


def _warn_of(now: set[int], before: set[int], members: Members, budget: int) -> set[int]:
    """Warn of newly frozen members; return all that are frozen."""
    if new := sorted(now - before):
        warn_frozen(members, new, f"within {budget} epochs")
    return now | before


def _budgets(start: int, epochs: int, reduction: int) -> list[int]:
    """Return start, start * reduction, ..., and at last epochs.

    >>> _budgets(1, 20, 3)
    [1, 3, 9, 20]
    """
    budgets = [start]
    while budgets[-1] < epochs:
        budgets.append(min(budgets[-1] * reduction, epochs))
    return budgets


def _train(
    program: Program,
    state: TrainState,
    source: ArrayData,
    reached: int,
    budget: int,
    evaluation: PyTree,
    metric: str,
) -> tuple[TrainState, list[float], float]:
    """Train from epoch `reached` to epoch `budget`; return the state, scores and seconds."""
    members = program.members
    assert members is not None
    state, seconds = program.place(state), []
    metrics = MembersMetrics(members)
    for output in train_iter(program, state, source, start=Position(reached), epochs=budget):
        state = output.state
        metrics.add(output, fetch_all=True)
        seconds.append(output.seconds)
        if output.epoch_done and output.position.epoch < budget:
            metrics = MembersMetrics(members)
    means = metrics.means()
    if metric.startswith("eval_"):
        means = {f"eval_{k}": v for k, v in program.evaluate(state, evaluation).items()}
    if metric not in means:
        raise errors.sweep_no_metric(metric, means)
    return program.to_canonical(state), np.asarray(means[metric]).tolist(), sum(seconds)


def _ranked(scores: list[float], skipped: np.ndarray, sign: int) -> list[int]:
    """Return indices from the best to the worst; frozen members and NaN last."""
    values = np.asarray(scores) * sign
    values = np.where((skipped > 0) | ~np.isfinite(values), np.inf, values)
    return [int(index) for index in np.argsort(values, kind="stable")]
