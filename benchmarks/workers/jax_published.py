"""How long a published training run takes as plurax estimates it: GPT under the best plan."""

from typing import Any

import optax

import plurax as px
from benchmarks.gpt import MEGATRON, Gpt
from benchmarks.workers.serve import Settings, Side, serve
from plurax.planner.found import Found

NO_LIMIT = 1e18
"""Bytes of memory of a device, above what any plan needs."""


def build(settings: Settings) -> tuple[dict[str, Side], dict[str, Any]]:
    model = Gpt(**settings["model"])
    machine = px.Machine.preset(settings["machine"], settings["nodes"])
    if settings["plan"] is None:
        facts, found = _searched(model, machine, settings)
    else:
        rules = MEGATRON if settings["plan"].get("tensor", 1) > 1 else {}
        plan = px.Plan(**settings["plan"], shardings=rules)
        facts, found = {}, _estimate(model, machine, plan, settings)
    return {}, facts | {
        "parameters": model.parameters,
        "fits": found.fits,
        "devices": found.plan.devices,
        "plan": found.plan.sizes_text(),
        "step": found.seconds,
        "parts": found.parts(),
        "bytes": found.peak,
        "memory": machine.memory,
        "seconds": found.seconds_for(settings["examples"]),
    }


def _estimate(
    model: Gpt, machine: px.Machine, plan: px.Plan, settings: Settings
) -> px.analysis.Estimate:
    batch = model.batch(settings["batch"])
    return px.estimate(model.task(), optax.adamw(1e-4), plan, batch, machine)


def _searched(
    model: Gpt, machine: px.Machine, settings: Settings
) -> tuple[dict[str, Any], px.analysis.Estimate]:
    """The estimate of the best plan; where none fits, of the best without a limit of memory."""

    def search(memory: float) -> Found:
        return px.search(
            model.task(),
            optax.adamw(1e-4),
            model.batch(settings["batch"]),
            machine,
            pinned={"precision": "bfloat16"},
            memory=memory,
        )

    facts: dict[str, Any] = {}
    try:
        found = search(machine.memory)
    except px.errors.PlanError as reason:
        facts["why"] = str(reason)
        found = search(NO_LIMIT)
    best = found.ranked[0].estimate
    assert best is not None, "ranked plans are estimated"
    return facts | {"search": found.seconds, "gap": found.gap}, best


if __name__ == "__main__":
    serve(build)
