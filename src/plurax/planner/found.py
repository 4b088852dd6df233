"""What a search found: ranked plans, why others cannot be, and why a tensor is split as it is."""

import dataclasses
import functools
import textwrap
from collections.abc import Callable

from plurax import errors
from plurax.analysis.estimate import Estimate, human_seconds
from plurax.machine import Machine
from plurax.notebook import html_table
from plurax.plan import Plan
from plurax.planner.tensor_search import TensorSearch
from plurax.tree import human_bytes


@dataclasses.dataclass(frozen=True)
class Ranked:
    """A plan that was looked at.

    **Fields:** `candidate`, the plan without the shardings over `tensor` that were found; `plan`,
    with them; `estimate`, or None if it was not estimated; `memory`, the bytes that a device needs,
    at the least if there is no estimate; `why` it cannot be, or "".
    """

    candidate: Plan
    plan: Plan
    estimate: Estimate | None
    memory: float
    why: str = ""

    @property
    def seconds(self) -> float:
        """The estimated seconds of a step."""
        assert self.estimate is not None
        return self.estimate.seconds

    def place(self) -> tuple[float, int]:
        """Return by what plans that fit are ranked: of equally fast ones, fewer devices first."""
        return self.seconds, self.plan.devices


@dataclasses.dataclass(frozen=True, repr=False)
class Found:
    """The result of `search`.

    **Fields:**

    - `machine`, and `memory`, the bytes that a device may use.
    - `ranked`: the plans that fit, fastest first; `slower`, others that were estimated and fit.
    - `refused`: those that do not fit or cannot be, with the reason; `over`, the number of others
      that need too much memory.
    - `candidates`: the number of plans considered; `least_left`, the least seconds that one which
      was not estimated can take, and `least_expected`, those that one is expected to take.
    - `evaluations`: how many solutions and estimates were made; `stopped`, whether a limit of time
      ended the search; `seconds` that it took.
    - `shardings`: the searches over `tensor`, for `explain`; None for a population.
      `estimated`, a function that estimates a plan.
    """

    machine: Machine
    memory: float
    ranked: tuple[Ranked, ...]
    slower: tuple[Ranked, ...]
    refused: tuple[Ranked, ...]
    over: int
    candidates: int
    least_left: float
    least_expected: float
    evaluations: int
    stopped: bool
    seconds: float
    shardings: TensorSearch | None
    estimated: Callable[[Plan], Estimate] | None

    @functools.cached_property
    def best(self) -> Plan:
        """The fastest plan that fits."""
        return self.plan(1)

    def plan(self, rank: int) -> Plan:
        """Return a plan of the ranking, 1 the fastest, with as few strategies as it needs.

        These are found by what a device sends, touches and computes. Where it starts more kernels,
        or sends more over `data`, the plan has all of them, as it was estimated.
        """
        ranked = self.ranked[rank - 1]
        if self.shardings is None or self.estimated is None:
            return ranked.candidate
        plan = self.shardings.plan(ranked.candidate, fewest=True)
        fewer = plan.strategies != ranked.plan.strategies
        slower = fewer and self.estimated(plan).seconds > ranked.seconds * (1 + 1e-9)
        return ranked.plan if slower else plan

    @property
    def estimate(self) -> Estimate:
        """The estimate of the fastest plan."""
        found = self.ranked[0].estimate
        assert found is not None
        return found

    @property
    def gap(self) -> float:
        """How much faster than the best a plan that was not estimated could be, as a share.

        By its bound: products at the rates of the machine, the traffic of all kernels shared by its
        devices, kernels that start as often as estimates of its remat policy say, and what its
        devices send each other.
        """
        return max(0.0, 1 - self.least_left / self.ranked[0].seconds)

    def explain(self, name: str) -> str:
        """Return why a parameter is split as it is in the best plan, and what others would cost.

        **Arguments:** `name`, the path of a parameter.

        Raises `PlanError` if there is no such parameter, and says which there are.
        """
        if self.shardings is None:
            raise errors.PlanError(
                f"found.explain({name!r}): the search was for a population. Search one network, "
                "without members=, for why its parameters are split as they are."
            )
        text = self.shardings.explain(self.ranked[0].candidate, name)
        split = [one for one in (*self.ranked, *self.slower) if one.plan.tensor > 1]
        if split and self.ranked[0].plan.tensor == 1:
            best = min(split, key=lambda one: one.seconds)
            text += f"\n  with several a step takes {human_seconds(best.seconds)}, and with one "
            text += f"{human_seconds(self.ranked[0].seconds)}: {best.plan.sizes_text()}"
        return "\n".join(line for one in text.splitlines() for line in wrapped(one, 4))

    # --- Text -------------------------------------------------------------------------------------

    def rows(self) -> list[tuple[str, ...]]:
        """Return the ranking as rows of texts: rank, plan, seconds, memory, and the rest."""
        rows: list[tuple[str, ...]] = []
        for rank, ranked in enumerate(self.ranked, 1):
            estimate = ranked.estimate
            assert estimate is not None
            parts = ", ".join(
                f"{name} {human_seconds(part)}"
                for name, part in sorted(estimate.parts().items(), key=lambda part: -part[1])
                if part > 0.005 * estimate.seconds
            )
            memory = f"{human_bytes(ranked.memory)} of {human_bytes(self.memory)}"
            rows.append(
                (str(rank), ranked.plan.sizes_text(), human_seconds(ranked.seconds), memory, parts)
            )
        return rows

    def __str__(self) -> str:
        rows = [("", "plan", "a step", "memory", ""), *self.rows()]
        first, _, second, third, _ = (max(map(len, column)) for column in zip(*rows, strict=True))
        lines = wrapped(f"the fastest of {self.candidates} plans for {self.machine.name}")
        for rank, plan, seconds, memory, parts in rows:
            start = f"{rank:{first}}  {seconds:{second}}  {memory:{third}}  "
            lines += wrapped(start + plan, len(start), whole=True)
            lines += wrapped(parts and f"      {parts}", 6, whole=True)
        lines += [line for note in self._notes() for line in wrapped(note)]
        return "\n".join(lines)

    def _notes(self) -> list[str]:
        """Return what else is to be known of the ranking."""
        proof = (
            f"no plan is more than {self.gap:.0%} faster, by bounds of what was not estimated"
            if self.gap >= 0.005
            else "no plan is faster, by bounds of what was not estimated"
        )
        expected = 1 - self.least_expected / self.ranked[0].seconds
        if expected >= 0.005:
            proof += f"; one is expected to be {expected:.0%} faster: give more evaluations"
        notes = [proof, f"found in {self.seconds:.1f} s by {self.evaluations} evaluations"]
        if self.stopped:
            notes.append(
                "stopped by its limit of time: without `seconds` it looks at more plans, and finds "
                "the same on every computer"
            )
        used = self.ranked[0].plan.devices
        if used < self.machine.devices:
            notes.append(f"the fastest uses {used} of {self.machine.devices} devices")
        over = [one for one in self.refused if one.why == "memory"]
        if over:
            least = min(over, key=lambda one: one.memory)
            limit, count = human_bytes(self.memory), len(over) + self.over
            many = f"{count} plans need" if count > 1 else "1 plan needs"
            notes.append(
                f"{many} more than {limit}, at the least {human_bytes(least.memory)}: "
                f"{least.plan.sizes_text()}"
            )
        reasons = {one.why.splitlines()[0]: one for one in self.refused if one.why != "memory"}
        some = list(reasons.items())[:3]
        return notes + [f"cannot be: {one.plan.sizes_text()}: {why}" for why, one in some]

    def __repr__(self) -> str:
        best = self.ranked[0]
        return f"Found({best.plan.sizes_text()}: {human_seconds(best.seconds)} a step)"

    def _repr_html_(self) -> str:
        title = f"The fastest of {self.candidates} plans for {self.machine.name}"
        return html_table(title, ["", "plan", "a step", "memory", "of which"], self.rows())


_COLUMNS, _NO_BREAK = 100, "\N{NO-BREAK SPACE}"


def wrapped(text: str, indent: int = 2, *, whole: bool = False) -> list[str]:
    """Return a text in lines of at most 100 columns, all but the first with an indent.

    With `whole`, lines break after a comma, where parts are not longer than a line.
    """
    if whole:
        text = text.replace(" ", _NO_BREAK).replace(f",{_NO_BREAK}", ", ")
    lines = textwrap.wrap(
        text, _COLUMNS, subsequent_indent=" " * min(indent, _COLUMNS // 2), break_on_hyphens=False
    )
    return [line.replace(_NO_BREAK, " ").rstrip() for line in lines]
