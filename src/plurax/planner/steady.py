"""Estimate a pipeline of many microbatches from one of few.

A pipeline's schedule has a start, a steady state and an end. With more microbatches only the steady
state grows, and what a device holds does not. To draw up and simulate the schedule of 64 stages and
768 microbatches takes many seconds, so a search estimates a step with a few microbatches for each
stage, of the same rows, and lets the steady state grow.

    pipeline=4, microbatches=256, 1F1B; estimated with 8 microbatches
    computing    8 of 256 microbatches, 0.8 s           256 / 8 x 0.8 s = 25.6 s
    bubble       3 microbatches, 0.3 s                  0.3 s
    gradients over `data`, the update, memory           once, as they are
"""

import dataclasses

import jax
import optax
from jaxtyping import PyTree

from plurax.analysis.estimate import Estimate, Seconds, estimate
from plurax.execute.placement import leading_dim
from plurax.machine import Machine
from plurax.plan import Plan
from plurax.planner.candidates import bubble
from plurax.task import Task

PER_STAGE = 2
"""Microbatches for each stage of the pipeline that is estimated."""


def estimate_steady(
    task: Task,
    optimizer: optax.GradientTransformation,
    plan: Plan,
    batch: PyTree,
    machine: Machine,
) -> Estimate:
    """Return `estimate`; of a pipeline with many microbatches, from one with few.

    Arguments and errors as of `plurax.estimate`.
    """
    few = PER_STAGE * plan.pipeline
    size = leading_dim(batch)
    # Whole microbatches only, or the rows of one would differ.
    whole = size % plan.microbatches == 0 and plan.schedule != "gpipe"  # which stores them all
    if plan.pipeline == 1 or plan.microbatches <= few or not whole:
        return estimate(task, optimizer, plan, batch, machine)
    less = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            (size // plan.microbatches * few, *leaf.shape[1:]), leaf.dtype
        ),
        batch,
    )
    short = dataclasses.replace(plan, microbatches=few)
    found = estimate(task, optimizer, short, less, machine)
    times = plan.microbatches / few
    return dataclasses.replace(
        found,
        plan=plan,
        batch_size=size,
        gradient=_grown(found.gradient, times, plan),
        bytes_sent={
            axes: sent * (times if _repeats(axes, plan) else 1)
            for axes, sent in found.bytes_sent.items()
        },
        product_flops=found.product_flops * times,
        memory={**found.memory, "batch": int(found.memory["batch"] * times)},
    )


def _grown(seconds: Seconds, times: float, plan: Plan) -> Seconds:
    """Return the seconds of more microbatches.

    Of what a device waits, the start and the end of the schedule stay; waiting for a stage with
    more to do grows.
    """
    few = dataclasses.replace(plan, microbatches=round(plan.microbatches / times))
    ends = min(seconds.bubble, bubble(few) * (seconds.total - seconds.bubble))
    return Seconds(
        seconds.products * times,
        seconds.traffic * times,
        {
            axes: one * (times if _repeats(axes, plan) else 1)
            for axes, one in seconds.collectives.items()
        },
        seconds.overhead * times,
        ends + (seconds.bubble - ends) * times,
    )


def _repeats(axes: str, plan: Plan) -> bool:
    """Whether the collectives over some axes run in every microbatch."""
    return "data" not in axes.split("+") or plan.zero >= 2
