"""Candidates of a search that wait to be looked at, bounded, computed or estimated."""

import heapq
import itertools
from typing import final

from plurax.planner.candidates import CandidatePlan
from plurax.planner.found import Ranked
from plurax.planner.learned import Computed

Item = tuple[tuple[bool, float, int, int], float, CandidatePlan, Ranked | Computed | None]


@final
class CandidateQueue:
    """Candidates in the order of their seconds, as far as these are known."""

    def __init__(self) -> None:
        self._items: list[Item] = []
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._items)

    def push(
        self,
        seconds: float,
        candidate: CandidatePlan,
        known: Ranked | Computed | None = None,
        risk: float = 1.0,
    ) -> None:
        """Add a candidate; of equal seconds the one with fewer devices comes first.

        `known` is its estimate, or what was computed, or None where `seconds` is only a bound.
        `risk` is the factor with which they count for its place.
        """
        place = False, seconds * risk, candidate.sizes.devices, next(self._numbers)
        heapq.heappush(self._items, (place, seconds, candidate, known))

    def put_off(self, seconds: float, candidate: CandidatePlan) -> None:
        """Add a candidate with its bound, behind all that are not put off."""
        place = True, seconds, candidate.sizes.devices, next(self._numbers)
        heapq.heappush(self._items, (place, seconds, candidate, None))

    def pop(self) -> tuple[float, CandidatePlan, Ranked | Computed | None]:
        """Remove the first candidate, and return its seconds, it, and what is known of it."""
        _, seconds, candidate, known = heapq.heappop(self._items)
        return seconds, candidate, known

    def expected(self) -> list[float]:
        """Return the seconds expected of candidates that were computed and are not estimated."""
        return [seconds for _, seconds, _, known in self._items if isinstance(known, Computed)]

    def estimated(self) -> list[Ranked]:
        """Return the candidates that are estimated, and not ranked yet."""
        return [known for _, _, _, known in sorted(self._items) if isinstance(known, Ranked)]
