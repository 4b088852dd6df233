"""Find how many layers each stage of a pipeline gets: `Plan(layers=)`.

All devices wait for the slowest stage: with `m` microbatches a step takes `sum + (m - 1) * max` of
the seconds that the stages need for one. So the fastest assignment minimises the slowest stage;
where devices differ in speed, the sum matters besides.

Example: 8 layers of 1 s, a head of 2 s, 4 stages, 16 microbatches:

    layers          seconds of a stage    a step takes
    (2, 2, 2, 2)    2  2  2  4            10 + 15 * 4 = 70
    (2, 2, 3, 1)    2  2  3  3            10 + 15 * 3 = 55

Dynamic programming over stages and layers: the best assignment of the first `j` layers to the first
`s` stages is the best of `j - k` layers to `s - 1` stages, and the next `k` layers to stage `s`.
First the smallest possible `max` is found, then, for each `max` from there on that could pay, the
smallest `sum` with no slower stage. Each takes `stages * depth * k` operations, for the largest `k`
with which a stage is not slower than all of an assignment that is known.

Source: Alpa's stage construction (Zheng et al. 2022, https://arxiv.org/abs/2201.12023), with the
devices of each stage given.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence

import numpy as np

from plurax.pipeline.schedule import live_activations, make_schedule
from plurax.pipeline.stages import even_layers


@dataclasses.dataclass(frozen=True)
class StageLayers:
    """An assignment of layers to stages, and what it costs.

    **Fields:** `layers`, for each stage, as `Plan(layers=)` takes them; `seconds`, of all
    microbatches of a step; `stage_seconds`, of one microbatch in each stage.
    """

    layers: tuple[int, ...]
    seconds: float
    stage_seconds: tuple[float, ...]


def best_layers(
    layer_seconds: Sequence[float],
    pipeline: int,
    microbatches: int,
    *,
    virtual_stages: int = 1,
    schedule: str | Sequence[str] = "1f1b",
    end_seconds: tuple[float, float] = (0.0, 0.0),
    speeds: Sequence[float] | None = None,
) -> StageLayers | None:
    """Return the fastest assignment of layers to stages, or None for fewer layers than stages.

    **Arguments:**

    - `layer_seconds`: for each layer the seconds of one microbatch, forward and backward, on a
      device of speed 1; more than 0. Layers may be the parts of a model with boundaries.
    - `pipeline`, `microbatches`, `virtual_stages`, `schedule`: as the plan's.
    - `end_seconds`: the same of the first stage's embedding and of the last stage's head.
    - `speeds`: the speed of the devices of each place in the pipeline; default 1 for all.

    >>> best_layers([1.0] * 8, pipeline=4, microbatches=16, end_seconds=(0, 2)).layers
    (2, 2, 3, 1)
    """
    depth, stages = len(layer_seconds), pipeline * virtual_stages
    if depth < stages:
        return None
    speed = np.resize(np.ones(pipeline) if speeds is None else np.asarray(speeds, float), stages)
    ends = np.zeros(stages)
    ends[0] += end_seconds[0]
    ends[-1] += end_seconds[1]
    layers = _sums(np.asarray(layer_seconds, float))
    costs = _StageCosts(
        seconds=(layers + ends[:, None, None]) / speed[:, None, None],
        virtual_stages=virtual_stages,
        microbatches=microbatches,
        # Of a stage's first microbatch the next device waits for all, or for F or B alone.
        fill=1 / 3 if schedule == "zb-h1" else 1.0,
    )
    found = costs.of(even_layers(depth, stages))
    return _fastest(costs, costs.seconds, found.seconds) or found


@dataclasses.dataclass(frozen=True)
class _StageCosts:
    """The costs of stages of any layers.

    **Fields:** `seconds`, float `(stages, depth + 1, depth)`, has at `[s, j, k - 1]` those of stage
    `s` with the `k` layers before layer `j`, infinite if there are not as many; `fill`, the
    part of a stage's time for which the next device waits.
    """

    seconds: np.ndarray
    virtual_stages: int
    microbatches: int
    fill: float

    def total(self, slowest: float, together: float) -> float:
        """Return the seconds of a step, by the slowest stage's and those of all together.

        With equal stages of `t` seconds on `p` devices: `(v m + fill (p - 1)) t`.
        """
        return self._busy * slowest + self.fill * together / self.virtual_stages

    def slowest(self, total: float, together: float) -> float:
        """Return the seconds of the slowest stage of a step of `total` seconds, at most."""
        if self._busy == 0:  # one microbatch: only the sum counts
            return math.inf
        return (total - self.fill * together / self.virtual_stages) / self._busy

    @property
    def _busy(self) -> float:
        return self.microbatches * self.virtual_stages - self.fill

    def of(self, layers: Sequence[int]) -> StageLayers:
        """Return what an assignment costs."""
        seconds = self.seconds[np.arange(len(layers)), np.cumsum(layers), np.asarray(layers) - 1]
        return StageLayers(
            tuple(int(count) for count in layers),
            float(self.total(seconds.max(), seconds.sum())),
            tuple(seconds.tolist()),
        )


@functools.cache
def stored_microbatches(
    schedule: str | tuple[str, ...], pipeline: int, microbatches: int, virtual_stages: int
) -> list[int]:
    """Return for each device the most microbatches that it stores, those of all its stages."""
    if isinstance(schedule, str) and schedule != "gpipe":
        # A device stores no more with more microbatches once the pipeline is full.
        full = 2 * pipeline
        microbatches = min(microbatches, full + microbatches % pipeline)
    return live_activations(make_schedule(schedule, pipeline, microbatches, virtual_stages))


def _sums(values: np.ndarray) -> np.ndarray:
    """Return `(depth + 1, depth)`: at `[j, k - 1]` the sum of `k` values before `j`, or infinity.

    Sums are added up in order, so that equal layers have equal sums wherever they begin.
    """
    depth = len(values)
    sums = np.full((depth + 1, depth), np.inf)
    sums[1:, 0] = values
    for k in range(1, depth):
        sums[k + 1 :, k] = sums[k + 1 :, k - 1] + values[: depth - k]
    return sums


def _fastest(costs: _StageCosts, seconds: np.ndarray, bound: float) -> StageLayers | None:
    """Return the fastest assignment of stages that take `seconds`, if it takes less than `bound`.

    Of equally fast ones that with the most equal stages, which may take `bound` itself.
    """
    least = _smallest(seconds, np.add)[0]
    # What is slower than the bound alone needs no look; a little more for rounding.
    most = costs.slowest(bound, least) * (1 + 1e-9)
    seconds = seconds[:, :, : int(np.count_nonzero(seconds.min(axis=(0, 1)) <= most))]
    slowest = _smallest(seconds, np.maximum)[0] if seconds.size else math.inf
    best = None
    while math.isfinite(slowest) and costs.total(slowest, least) <= bound * (1 + 1e-12):
        # Of equal sums the one of the most equal stages.
        even = seconds * (1 + 1e-9 * seconds / slowest)
        _, layers = _smallest(np.where(seconds <= slowest, even, np.inf), np.add)
        found = costs.of(layers)
        if best is None or found.seconds < best.seconds:
            best, bound = found, min(bound, found.seconds * (1 - 1e-12))
        slowest = float(np.min(seconds, where=seconds > slowest, initial=np.inf))
    return best


def _smallest(seconds: np.ndarray, join: np.ufunc) -> tuple[float, list[int]]:
    """Return the smallest cost by `join` of all stages with all layers, and the layers of each.

    If every assignment costs infinitely much, there are none.
    """
    stages, every, width = seconds.shape
    # How many layers the stages before have, by the layers up to here and those of this stage.
    before = np.maximum(np.arange(every)[:, None] - np.arange(1, width + 1), 0)
    best = np.where(np.arange(every) == 0, 0.0, np.inf)
    choices = np.empty((stages, every), int)
    for stage, one in enumerate(seconds):
        costs = join(best[before], one)
        # Of equal ones the most layers here: under 1F1B earlier stages store more of each.
        choices[stage] = width - 1 - costs[:, ::-1].argmin(axis=1)
        best = costs[np.arange(every), choices[stage]]
    layers: list[int] = []
    for choice in choices[::-1] if math.isfinite(best[-1]) else ():
        layers.append(1 + int(choice[every - 1 - sum(layers)]))
    return float(best[-1]), layers[::-1]
