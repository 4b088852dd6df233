"""Seconds and bytes of a pipeline whose devices go through the ticks of a schedule in lockstep.

The executor runs one tick after another, and devices exchange activations between them: a tick
takes as long as its slowest device (`plurax.pipeline.simulation.lockstep_seconds`). Here that clock
is asked thousands of times, so ticks in which every device does the same are counted together:

    2 devices, 3 microbatches     ticks     what the devices do     how often
    1f1b   F0 F1 -  B0 F2 B1 -  B2          F and idle              1
           -  F0 B0 F1 B1 F2 B2 -           F and F                 1
                                            idle and B              2
                                            B and F, F and B        1 + 1
                                            ...

With more microbatches the same ticks are repeated, so the counts of few say those of many. A
backward takes about twice as long as a forward, so what counts besides is in how many ticks there
are only forwards: GPipe has `m + p - 1` of these where 1F1B has `p`. It takes less time in
lockstep, and stores all microbatches.
"""

import dataclasses
import functools
import heapq
import itertools
from collections import Counter
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

from plurax.pipeline.schedule import (
    KINDS,
    Action,
    live_activations,
    make_schedule,
    named,
    splits_backward,
)
from plurax.pipeline.stages import even_layers
from plurax.planner.problem import Ticks
from plurax.planner.profile import Share


def tick_counts(
    schedule: str | Sequence[str], pipeline: int, microbatches: int, virtual_stages: int = 1
) -> tuple[int, int]:
    """Return the number of ticks in which devices run forwards only, and that of all others.

    Not of a schedule that pairs them.

    >>> tick_counts("gpipe", 2, 3), tick_counts("1f1b", 2, 3)
    ((4, 4), (2, 6))
    """
    sizes = pipeline, microbatches, virtual_stages
    known = named(schedule)
    if known is not None and known.ticks is not None:
        return known.ticks(*sizes)
    columns = make_schedule(schedule, *sizes).ticks
    only = sum(all(a.kind == "F" for actions in column for a in actions) for column in columns)
    return only, len(columns) - only


def ticks_of_step(
    schedule: str | tuple[str, ...], pipeline: int, microbatches: int, virtual_stages: int
) -> int:
    """Return the number of ticks of a step.

    >>> ticks_of_step("1f1b", 2, 3, 1), ticks_of_step("eager-1f1b", 2, 3, 1)
    (8, 5)
    """
    if _pairs(schedule):
        return microbatches + 2 * (pipeline - 1)
    return sum(tick_counts(schedule, pipeline, microbatches, virtual_stages))


def stage_times(
    schedule: str | tuple[str, ...],
    pipeline: int,
    microbatches: int,
    virtual_stages: int,
    forward: float,
) -> float:
    """Return the seconds of a step by those of one stage for one microbatch, stages being equal.

    `forward` is the share of the forward in a stage's seconds.
    """
    if _pairs(schedule):
        # A device runs a forward and a backward in each tick, but for as many ticks at both ends.
        return microbatches + pipeline - 1
    only, others = tick_counts(schedule, pipeline, microbatches, virtual_stages)
    # The gradients of inputs and those of weights are taken to be as long.
    back = (1 - forward) / (2 if splits_backward(schedule) else 1)
    return only * forward + others * max(forward, back)


def _pairs(schedule: str | Sequence[str]) -> bool:
    known = named(schedule)
    return known is not None and known.pairs


# --- Ticks, counted by what the devices do --------------------------------------------------------

_Ticks = Counter[tuple[tuple[int, ...], ...]]


def _ticks_of(
    schedule: str | tuple[str, ...], pipeline: int, microbatches: int, virtual_stages: int
) -> _Ticks:
    """Return how often devices do what: for each two numbers, of its actions' kinds and chunks."""

    def numbers(actions: Sequence[Action]) -> tuple[int, ...]:
        what = [1 + KINDS.index(a.kind) * virtual_stages + a.chunk for a in actions]
        return (*what, 0, 0)[:2]

    columns = make_schedule(schedule, pipeline, microbatches, virtual_stages).ticks
    return Counter(tuple(map(numbers, column)) for column in columns)


@functools.lru_cache(maxsize=1024)
def _steady_ticks(
    schedule: str, pipeline: int, microbatches: int, virtual_stages: int
) -> tuple[_Ticks, _Ticks]:
    """Return the ticks of some microbatches, and those that `pipeline` more add.

    A pipeline is full with as many microbatches as it has stages, and repeats its ticks after so
    many more at the latest, as one does that takes microbatches in groups.
    """
    ticks = _ticks_of(schedule, pipeline, microbatches, virtual_stages)
    return ticks, _ticks_of(schedule, pipeline, microbatches + pipeline, virtual_stages) - ticks


@functools.lru_cache(maxsize=4096)
def tick_table(
    schedule: str | tuple[str, ...], pipeline: int, microbatches: int, virtual_stages: int
) -> tuple[Int[np.ndarray, "K devices 2"], Int[np.ndarray, " K"]]:
    """Return the kinds of ticks of a schedule: what each device does, and how many there are.

    An action is `1 + virtual_stages * KINDS.index(kind) + chunk`, and 0 is none; a schedule that
    pairs actions has two for a device.
    """
    p, m, v = pipeline, microbatches, virtual_stages
    full = 2 * p
    if isinstance(schedule, str) and m > full + p:
        few = full + (m - full) % p
        ticks, added = _steady_ticks(schedule, p, few, v)
        repeated = (m - few) // p
        ticks = ticks + Counter({tick: count * repeated for tick, count in added.items()})
    else:
        ticks = _ticks_of(schedule, p, m, v)
    return np.array(list(ticks)), np.array(list(ticks.values()))


def stored_microbatches(
    schedule: str | tuple[str, ...], pipeline: int, microbatches: int, virtual_stages: int
) -> list[int]:
    """Return for each device the most microbatches that it stores, those of all its stages."""
    known = named(schedule)
    if known is not None and not known.stores_all:
        # A device stores no more with more microbatches once the pipeline is full.
        microbatches = min(microbatches, 2 * pipeline + microbatches % pipeline)
    return _stored(schedule, pipeline, microbatches, virtual_stages)


@functools.cache
def _stored(
    schedule: str | tuple[str, ...], pipeline: int, microbatches: int, virtual_stages: int
) -> list[int]:
    return live_activations(make_schedule(schedule, pipeline, microbatches, virtual_stages))


# --- Layers of stages -----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Stages:
    """The stages of a pipeline: `layers` of each; `seconds` of a step; `kept`, the bytes that a
    device stores of microbatches; `most`, the layers that the device with the most has, of parts
    that differ by their updates."""

    layers: tuple[int, ...]
    seconds: float
    kept: float
    most: float


@dataclasses.dataclass(frozen=True)
class StagedModel:
    """A model of `depth` layers under a schedule, and what its parts take.

    **Fields:** `schedule`, `pipeline`, `microbatches`, `virtual_stages`, as the plan's; `depth`;
    `layers`, all together, `embedding` and `head`, of one microbatch; `speeds` of the devices at
    each place of the pipeline, by which seconds are divided, by default 1; `parts`, each layer, by
    default equal ones.
    """

    schedule: str | tuple[str, ...]
    pipeline: int
    microbatches: int
    virtual_stages: int
    depth: int
    layers: Share
    embedding: Share
    head: Share
    speeds: tuple[float, ...] | None = None
    parts: tuple[Share, ...] = ()

    def stages(self, layers: Sequence[int]) -> Stages:
        """Return the stages with these layers."""
        forward, backward = self._times(layers, "forward"), self._times(layers, "backward")
        split = splits_backward(self.schedule)
        halves = (backward / 2, backward / 2) if split else (backward, 0 * backward)
        # Of each device: none, then the actions of each kind and chunk.
        takes = np.concatenate([np.zeros((self.pipeline, 1)), forward, *halves], axis=1)
        what, counts = tick_table(
            self.schedule, self.pipeline, self.microbatches, self.virtual_stages
        )
        slowest = takes[np.arange(self.pipeline)[:, None], what].sum(axis=2).max(axis=1)
        seconds = float(slowest @ counts) + self._update(layers)
        return Stages(tuple(layers), seconds, self._kept(layers), self._most(layers))

    def ticks(self, layers: Sequence[int], nodes: Sequence[tuple[int, str]]) -> Ticks:
        """Return how the seconds of a step follow from those of nodes, each of a part and of
        `forward`, `backward` or `update`, with these parts on each stage."""
        stage_of = [stage for stage, count in enumerate(layers) for _ in range(count)]
        kinds = {"forward": 0, "backward": 1, "update": 2}
        accounts = [stage_of[part] + len(layers) * kinds[kind] for part, kind in nodes]
        what, counts = tick_table(
            self.schedule, self.pipeline, self.microbatches, self.virtual_stages
        )
        halves = 2 if splits_backward(self.schedule) else 1

        def does(device: int, action: int) -> tuple[int, float]:
            kind, chunk = divmod(action - 1, self.virtual_stages)
            stage = chunk * self.pipeline + device
            share = 1 / self.microbatches / self._speed(stage) / (halves if kind else 1)
            return stage + len(layers) * min(kind, 1), share

        every: list[tuple[float, list[tuple[tuple[int, float], ...]]]] = [
            (
                float(count),
                [
                    tuple(does(device, action) for action in map(int, actions) if action)
                    for device, actions in enumerate(devices)
                    if any(actions)
                ],
            )
            for devices, count in zip(what, counts, strict=True)
        ]
        updates = [((stage + 2 * len(layers), 1.0),) for stage in range(len(layers))]
        return Ticks(accounts, [*every, (1.0, updates)])

    def balanced_stages(self) -> Stages:
        """Return stages whose slowest is fastest, with the seconds that follow from it alone.

        No table of ticks is drawn up, which takes seconds for a hundred devices. Where stages
        differ the seconds are more than those of `stages`: every tick counts as the slowest stage.
        """
        ends = max(self.embedding.seconds, self.head.seconds)
        even = self.speeds is None and not ends and not self.parts
        stages = self.pipeline * self.virtual_stages
        layers = even_layers(self.depth, stages) if even else self.balanced()
        forward = float(self._times(layers, "forward").max())
        backward = float(self._times(layers, "backward").max())
        share = forward / ((forward + backward) or 1.0)
        times = stage_times(
            self.schedule, self.pipeline, self.microbatches, self.virtual_stages, share
        )
        seconds = times * (forward + backward) + self._update(layers)
        return Stages(tuple(layers), seconds, self._kept(layers), self._most(layers))

    def _kept(self, layers: Sequence[int]) -> float:
        """Return the bytes that a device stores of microbatches; arrays are as large on all."""
        stored = stored_microbatches(
            self.schedule, self.pipeline, self.microbatches, self.virtual_stages
        )
        kept = self._of_stages(layers, "kept")
        most = max(size * stored[stage % self.pipeline] for stage, size in enumerate(kept))
        ends = max(stored[0] * self.embedding.kept, stored[-1] * self.head.kept)
        return float(most + ends)

    def _most(self, layers: Sequence[int]) -> float:
        updates = self._of_stages(layers, "update").reshape(self.virtual_stages, -1).sum(axis=0)
        if self.parts and updates.any():
            return float(self.depth * updates.max() / updates.sum())
        return max(layers) * self.virtual_stages

    def _times(self, given: Sequence[int], way: str) -> Float[np.ndarray, "devices virtual_stages"]:
        """Return the seconds of each stage for one microbatch, `forward` or `backward`."""
        seconds = self._of_stages(given, way)
        seconds[0] += getattr(self.embedding, way)
        seconds[-1] += getattr(self.head, way)
        of_devices = seconds.reshape(self.virtual_stages, self.pipeline).T
        return of_devices / np.array(self.speeds or [1.0] * self.pipeline)[:, None]

    def _update(self, layers: Sequence[int]) -> float:
        """Return the seconds of the update of the stage that takes longest."""
        return float(self._of_stages(layers, "update").max())

    def _of_stages(self, layers: Sequence[int], field: str) -> Float[np.ndarray, " stages"]:
        """Return a field of the layers of each stage, added up."""
        if not self.parts:
            return np.array(layers) * (getattr(self.layers, field) / self.depth)
        sums = np.cumsum([0.0, *(getattr(part, field) for part in self.parts)])
        ends = np.cumsum([0, *layers])
        return sums[ends[1:]] - sums[ends[:-1]]

    def balanced(self) -> tuple[int, ...]:
        """Return the layers of each stage with which the slowest stage is fastest.

        Equal layers may each go to the stage that is fastest with one more.
        """
        if self.parts:
            return self._balanced_parts()
        stages = self.pipeline * self.virtual_stages
        counts = [1] * stages
        queue = [(self.stage_seconds(stage, 2), stage) for stage in range(stages)]
        heapq.heapify(queue)
        for _ in range(self.depth - stages):
            _, stage = heapq.heappop(queue)
            counts[stage] += 1
            heapq.heappush(queue, (self.stage_seconds(stage, counts[stage] + 1), stage))
        return tuple(counts)

    def _balanced_parts(self) -> tuple[int, ...]:
        """Return the layers of each stage, of which the slowest is fastest, by dynamic programming.

        `slowest[end]` is that of the first stages if these have the layers before `end`.
        """
        sums = np.cumsum([0.0, *(part.seconds for part in self.parts)])
        slowest, starts = np.where(np.arange(self.depth + 1) == 0, 0.0, np.inf), []
        for stage in range(self.pipeline * self.virtual_stages):
            own = (sums[None] - sums[:, None]) / self._speed(stage)
            own[np.tril_indices(self.depth + 1)] = np.inf  # a stage has a layer at least
            longest = np.maximum(slowest[:, None], own)
            starts.append(longest.argmin(axis=0))
            slowest = longest.min(axis=0)
        ends = [self.depth]
        for start in reversed(starts):
            ends.append(int(start[ends[-1]]))
        return tuple(end - start for start, end in itertools.pairwise(reversed(ends)))

    def towards_the_fast(self, slowest: float) -> tuple[int, ...] | None:
        """Return the layers with as many as can be on fast devices, no stage being slower.

        With few microbatches a step takes the seconds of all stages rather than of the slowest.
        None if there are more layers than that.
        """
        stages = self.pipeline * self.virtual_stages
        counts, left = [1] * stages, self.depth - stages
        speeds = self.speeds or (1.0,) * self.pipeline
        for stage in sorted(range(stages), key=lambda stage: -speeds[stage % self.pipeline]):
            while left and self.stage_seconds(stage, counts[stage] + 1) <= slowest:
                counts[stage] += 1
                left -= 1
        return None if left else tuple(counts)

    def stage_seconds(self, stage: int, count: int) -> float:
        """Return the seconds of one stage with some layers, forward and backward."""
        last = self.pipeline * self.virtual_stages - 1
        ends = self.embedding.seconds * (stage == 0) + self.head.seconds * (stage == last)
        return (count * self.layers.seconds / self.depth + ends) / self._speed(stage)

    def _speed(self, stage: int) -> float:
        return self.speeds[stage % self.pipeline] if self.speeds else 1.0

    def seconds_of(self, layers: Sequence[int]) -> list[float]:
        """Return the seconds of each stage, forward and backward."""
        every = self._times(layers, "forward") + self._times(layers, "backward")
        return [float(seconds) for seconds in every.T.reshape(-1)]


@functools.lru_cache(maxsize=4096)
def fastest_stages(model: StagedModel) -> Stages:
    """Return the stages of a model: of equal layers, or the fastest if these are faster by 2 %,
    which is as much as the seconds can be relied on."""
    even = model.stages(even_layers(model.depth, model.pipeline * model.virtual_stages))
    choices = [even, model.stages(model.balanced())]
    if model.speeds is not None and not model.parts:
        # As many layers as can be on fast devices, while no stage takes longer than one of these.
        limits = {
            model.stage_seconds(stage, count)
            for stage in range(model.pipeline * model.virtual_stages)
            for count in range(1, model.depth + 1)
        }
        some = sorted(limits)[:: 1 + len(limits) // _LIMITS]
        choices += [model.stages(n) for n in map(model.towards_the_fast, some) if n is not None]
    fastest = _climbed(model, min(choices, key=lambda stages: stages.seconds))
    return fastest if fastest.seconds < 0.98 * even.seconds else even


def _climbed(model: StagedModel, best: Stages) -> Stages:
    """Return stages after moving single layers to other stages as long as that is faster.

    Under 1F1B neighbors run a forward and a backward in the same tick, so the slowest stage alone
    does not say how long a step takes: of 5 layers on 3 devices (2, 1, 2) can be faster than
    (2, 2, 1).
    """
    stages = len(best.layers)
    for _ in range(model.depth):
        seconds = model.seconds_of(best.layers)
        busy = sorted(range(stages), key=lambda stage: -seconds[stage])
        moved = best
        for source, target in itertools.product(busy[:_SLOWEST], busy[-_FASTEST:]):
            layers = list(best.layers)
            layers[source] -= 1
            layers[target] += 1
            if layers[source] and source != target:
                moved = min(moved, model.stages(layers), key=lambda one: one.seconds)
        if moved is best:
            break
        best = moved
    return best


_SLOWEST, _FASTEST = 4, 8
"""Stages from which layers are moved, those that take longest, and to which."""

_LIMITS = 64
"""Slowest stages that are looked at where devices differ."""
