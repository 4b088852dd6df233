"""How much a search may do, counted in work and not in time.

A clock would make what is found depend on how fast and how busy the computer is.

    evaluations=12     solutions of shardings over `tensor`    6 at most
                       estimates                               what is left of the 12
                       plans of experts                        of either kind, 12 more
                       looks at what a solution says           1,200
"""

import contextlib
import math
import time
from collections.abc import Iterator
from typing import Literal, final

EVALUATIONS = 12
"""By default."""

EXPERTS = 1
"""The evaluations of plans that experts know, beside the usual ones, by their number."""

LOOKS = 100
"""Candidates with known solutions looked at for each evaluation: milliseconds each."""

Step = Literal["solution", "estimate", "look"]
"""What is done for a candidate. Solutions of shardings over `tensor` and estimates are evaluations,
for each of which the step is traced; a look takes what is known of a solution."""


@final
class Effort:
    """What a search may still do: so many evaluations and, where asked, only for some time.

    Half of the evaluations may be solutions: there are hundreds of sizes of `tensor` on large
    machines. Estimates go on until a plan is `found` that fits.

    **Attributes:** `found`; `stopped`, whether time was over.
    """

    def __init__(self, evaluations: int, seconds: float | None, started: float) -> None:
        self._evaluations = evaluations
        self._end = math.inf if seconds is None else started + seconds
        self._longest = 0.0
        self._steps: dict[Step, int] = dict.fromkeys(("solution", "estimate", "look"), 0)
        self._experts = 0
        self.found, self.stopped = False, False

    @property
    def spent(self) -> int:
        """The evaluations made."""
        return self._steps["solution"] + self._steps["estimate"] + self._experts

    def allows(self, step: Step, must: bool) -> bool:
        """Whether a step may be made; one that `must` be is a plan that experts know.

        None is begun that may not end in time.
        """
        limits = {"solution": self._evaluations // 2, "look": LOOKS * self._evaluations}
        more = must and self._experts < EXPERTS * self._evaluations
        if not more and self._steps[step] >= max(1, limits.get(step, math.inf)):
            return False
        if not self.found:
            return True
        if time.perf_counter() + self._longest > self._end:
            self.stopped = True
            return False
        if step == "look" or more:
            return True
        return self._steps["solution"] + self._steps["estimate"] < self._evaluations

    @contextlib.contextmanager
    def spent_on(self, step: Step, must: bool) -> Iterator[None]:
        """Count a step."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._longest = max(self._longest, time.perf_counter() - began)
            if must and step != "look" and self._experts < EXPERTS * self._evaluations:
                self._experts += 1
            else:
                self._steps[step] += 1
