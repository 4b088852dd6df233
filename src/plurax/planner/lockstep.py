"""Seconds and bytes of a pipeline whose devices go through the ticks of a schedule in lockstep.

The executor runs one tick after another, and devices exchange activations between them: a tick
takes as long as its slowest action. A backward takes about twice as long as a forward, so what
counts is in how many ticks there are only forwards:

    2 devices, 3 microbatches        ticks of forwards only    other ticks
    gpipe  F0 F1 F2 -  B0 B1 B2 -    4                         4
           -  F0 F1 F2 -  B0 ...
    1f1b   F0 F1 -  B0 F2 B1 -  B2   2                         6
           -  F0 B0 F1 B1 F2 B2 -

GPipe takes less time in lockstep, and stores all microbatches.
"""

import dataclasses
import functools
from collections.abc import Sequence

from plurax.pipeline.schedule import make_schedule, ticks
from plurax.pipeline.stages import even_layers
from plurax.planner.profile import Share
from plurax.planner.stage_layers import best_layers, stored_microbatches


def tick_counts(
    schedule: str | Sequence[str], pipeline: int, microbatches: int, virtual_stages: int = 1
) -> tuple[int, int]:
    """Return the number of ticks in which devices run forwards only, and that of all others.

    >>> tick_counts("gpipe", 2, 3), tick_counts("1f1b", 2, 3)
    ((4, 4), (2, 6))
    """
    p, m, v = pipeline, microbatches, virtual_stages
    if schedule == "gpipe":
        return m + p - 1, m + p - 1
    if schedule == "1f1b":
        return p, 2 * m + p - 2
    if schedule == "interleaved":
        return v * p, 2 * v * m + 2 * (p - 1) - v * p
    if schedule == "zb-h1":
        return p, max(3 * m + p - 1, 2 * (m + p - 1) + 1) - p
    columns = ticks(make_schedule(schedule, p, m, v))
    only = sum(all(a is None or a.kind == "F" for a in column) for column in columns)
    return only, len(columns) - only


def stage_times(
    schedule: str | Sequence[str],
    pipeline: int,
    microbatches: int,
    virtual_stages: int,
    forward: float,
) -> float:
    """Return the seconds of a step by those of one stage for one microbatch, stages being equal.

    `forward` is the share of the forward in a stage's seconds.
    """
    only, others = tick_counts(schedule, pipeline, microbatches, virtual_stages)
    # The gradients of inputs and those of weights are actions of their own under ZB-H1.
    back = (1 - forward) / (2 if schedule == "zb-h1" else 1)
    return only * forward + others * max(forward, back)


@dataclasses.dataclass(frozen=True)
class Stages:
    """The stages of a pipeline: `layers` of each; `seconds` of a step; `kept`, the bytes that a
    device stores of microbatches; `most`, the layers that the device with the most has."""

    layers: tuple[int, ...]
    seconds: float
    kept: float
    most: int


@functools.lru_cache(maxsize=4096)
def stages_of(
    schedule: str | tuple[str, ...],
    pipeline: int,
    microbatches: int,
    virtual_stages: int,
    depth: int,
    layers: Share,
    embedding: Share,
    head: Share,
    given: tuple[int, ...] | None = None,
    speeds: tuple[float, ...] | None = None,
) -> Stages:
    """Return the stages of a model of `depth` layers.

    **Arguments:** as the plan's; `layers`, all together, `embedding` and `head`, of one microbatch;
    `given`, the layers of each stage; `speeds` of the devices at each place of the pipeline, by
    which seconds are divided, by default 1. By default layers are equal, or the fastest if these
    are faster by 2 %, which is as much as the seconds can be relied on.
    """

    def taking(given: Sequence[int]) -> Stages:
        busy = [count * layers.seconds / depth for count in given]
        busy[0] += embedding.seconds
        busy[-1] += head.seconds
        if speeds is not None:
            busy = [one / speeds[stage % pipeline] for stage, one in enumerate(busy)]
        parts = (layers, embedding, head)
        forward = sum(one.forward for one in parts) / sum(one.seconds for one in parts)
        times = stage_times(schedule, pipeline, microbatches, virtual_stages, forward)
        stored = stored_microbatches(schedule, pipeline, microbatches, virtual_stages)
        # Arrays are as large on all devices.
        most = max(count * stored[stage % pipeline] for stage, count in enumerate(given))
        ends = max(stored[0] * embedding.kept, stored[-1] * head.kept)
        kept = most * layers.kept / depth + ends
        return Stages(tuple(given), max(busy) * times, kept, max(given) * virtual_stages)

    if given is not None:
        return taking(given)
    even = taking(even_layers(depth, pipeline * virtual_stages))
    best = best_layers(
        [layers.seconds / depth] * depth,
        pipeline,
        microbatches,
        virtual_stages=virtual_stages,
        schedule=schedule,
        end_seconds=(embedding.seconds, head.seconds),
        speeds=speeds,
    )
    assert best is not None, "fewer layers than stages are no candidate"
    fastest = taking(best.layers)
    return fastest if fastest.seconds < 0.98 * even.seconds else even
