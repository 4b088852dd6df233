"""How much a search may do, counted in work and not in time.

A clock would make what is found depend on how fast and how busy the computer is.

    evaluations=16     solutions of shardings over `tensor`    8 at most
                       estimates                               what is left of the 16
                       plans of experts, second solutions      of either kind, 16 more
                       second solutions where nothing hides    4 more
                       a share of the products kept            6 more
                       others beside the best plan             3 more
                       looks at what a solution says           1,600
"""

import contextlib
import gc
import math
import time
import warnings
from collections.abc import Iterator
from typing import Literal, final

from plurax import errors

EVALUATIONS = 16
"""By default."""

_SHARES = 6
"""Estimates of the fastest plans with a share of their products kept (`partly_kept.py`)."""

_SECOND_SOLUTIONS = 4
"""Estimates of the fastest plan of each remat policy without strategies of equations, on devices
that send nothing while they compute."""

_LOOKS = 100
"""Candidates with known solutions looked at for each evaluation: milliseconds each."""

BESIDE = 3
"""Plans that are tried beside the best one."""

Step = Literal["solution", "estimate", "second", "share", "beside", "look"]
"""What is done for a candidate. All are evaluations, for each of which the step is traced, but a
look, which takes what is known of a solution."""


@final
class Effort:
    """What a search may still do: so many evaluations and, where asked, only for some time.

    Half of the evaluations may be solutions: there are hundreds of sizes of `tensor` on large
    machines. Estimates go on until a plan is `found` that fits.

    **Attributes:** `found`; `spent`, the evaluations made; `stopped`, whether time was over.
    """

    def __init__(self, evaluations: int, seconds: float | None, started: float) -> None:
        self._usual = self._experts = self._all = evaluations
        self._solutions = max(1, evaluations // 2)
        # What is counted apart from the others.
        self._apart = {
            "look": _LOOKS * evaluations,
            "second": _SECOND_SOLUTIONS,
            "share": _SHARES,
            "beside": BESIDE,
        }
        self._end = math.inf if seconds is None else started + seconds
        self._longest = 0.0
        self.found, self.spent, self.stopped = False, 0, False

    def again(self) -> "Effort":
        """Return another effort, of as many evaluations, which ends at the same time."""
        other = Effort(self._all, None, 0.0)
        other._end = self._end
        return other

    def allows(self, step: Step, expert: bool) -> bool:
        """Whether a step may be made, for an expert's plan or another one.

        None is begun that may not end in time.
        """
        if self.found and time.perf_counter() + self._longest > self._end:
            self.stopped = True
            return False
        if step in self._apart:
            return self._apart[step] > 0
        if expert and self._experts > 0:
            return True
        if step == "solution" and self._solutions <= 0:
            return False
        return self._usual > 0 or not self.found

    @contextlib.contextmanager
    def spent_on(self, step: Step, expert: bool) -> Iterator[None]:
        """Count a step."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._longest = max(self._longest, time.perf_counter() - began)
            if step in self._apart:
                self._apart[step] -= 1
            elif expert and self._experts > 0:
                self._experts -= 1
            else:
                self._usual -= 1
                self._solutions -= step == "solution"
            self.spent += step != "look"


@contextlib.contextmanager
def trying_plans() -> Iterator[None]:
    """Look for garbage seldom, and leave what is to be said of a plan to those who compile it.

    Traces allocate millions of objects that live on, and to look through all of them, as Python
    does again and again, took a fifth of a search.
    """
    before = gc.get_threshold()
    if often := 0 < before[0] < 10_000:  # not so within another, or where nothing is collected
        gc.set_threshold(10_000, 50, 100)
    try:
        with warnings.catch_warnings(action="ignore", category=errors.ShardingWarning):
            yield
    finally:
        if often:
            gc.set_threshold(*before)
